"""Values of GenAC's answers, PPO's value head, and PACS's score on the same prefixes, for `comparison.py`."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from experiments.genac.supervised_start import Trace
from experiments.paper.cells import RECIPES
from pacs_trl.data.tasks import looks_right, problems
from pacs_trl.evaluation.requests import SamplingSettings, render_prompt
from pacs_trl.evaluation.sampling import sample_completions
from pacs_trl.experimental._critic_answers import generate_answers, question_ids
from pacs_trl.experimental._critic_math import critic_rewards
from pacs_trl.experimental._critic_prompt import Actor, CriticPrompt, State
from pacs_trl.objective import group_scores
from pacs_trl.recipe import read_recipe
from pacs_trl.update.forward_pass import ForwardPass
from pacs_trl.update.logps import compute_logps


TOKENS = 48  # of a completion: sums of four terms
BATCH = 32  # traces of an optimizer step
GROUP = 8  # completions of a problem
CANDIDATES = (2, 4, 8)
PLACES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of a completion: prefixes before its first to its last token


def load(path: Path, architecture=AutoModelForCausalLM) -> tuple[Any, Any]:
    return architecture.from_pretrained(path, dtype=torch.float32), AutoTokenizer.from_pretrained(
        path, padding_side="left"
    )


# Three kinds of critics on the same prefixes -------------------------------------------------------------------------


def held_out(path: Path, task: str, num_problems: int, seed: int) -> list[dict[str, Any]]:
    """Generate completions of a policy with grades, adjacent by problem, and choose positions of prefixes."""
    model, tokenizer = load(path)
    rows = problems(task, "test", num_problems, seed=seed)
    turns = [[{"role": "user", "content": row["problem"]}] for row in rows]
    how = SamplingSettings(temperature=1.0, top_p=1.0, max_new_tokens=TOKENS)
    drawn = sample_completions(model, tokenizer, turns, n=GROUP, settings=how, seed=seed, batch_size=512)
    found = []
    for group, (row, turn, completions) in enumerate(zip(rows, turns, drawn, strict=True)):
        prompt = tokenizer(render_prompt(tokenizer, turn), add_special_tokens=False)["input_ids"]
        for completion in completions:
            ids = tokenizer(completion.text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
            places = [round(share * (len(ids) - 1)) for share in PLACES]
            right = looks_right(row, completion.text)
            found.append(
                {
                    "group": group,
                    "problem": row["problem"],
                    "prompt": prompt,
                    "ids": ids,
                    "places": places,
                    "right": right,
                }
            )
    return found


@torch.no_grad()
def values_of_head(path: Path, rows: list[dict]) -> list[list[float]]:
    """Return values of the PPO critic, at the position that predicts the next token."""
    critic = load(path, AutoModelForTokenClassification)[0].eval()
    forward_pass, found = ForwardPass(critic, critic.device), []
    for i in range(0, len(rows), 64):
        some = rows[i : i + 64]
        values = forward_pass.values(critic, [r["prompt"] for r in some], [r["ids"] for r in some])
        found += [[of[place].item() for place in row["places"]] for row, of in zip(some, values, strict=True)]
    return found


def values_in_words(path: Path, rows: list[dict], template: str) -> list[list[float]]:
    """Return the most probable value of a GenAC critic; NaN where it cannot be parsed."""
    rate = mean(row["right"] for row in rows)
    tokenizer = load(path)[1]
    states = [
        State(row["problem"], tokenizer.decode(row["ids"][:place], skip_special_tokens=True), place)
        for row in rows
        for place in row["places"]
    ]
    answers = written(path, [Trace(state, rate, "") for state in states], template)
    prompt = CriticPrompt(template)
    values = [math.nan if (value := prompt.parse(answer)) is None else value for answer in answers]
    return [values[i : i + len(PLACES)] for i in range(0, len(values), len(PLACES))]


def written(
    path: Path, traces: list[Trace], template: str, begun: list[str] | None = None, temperature: float = 0.0
) -> list[str]:
    """Return the answers of a critic about the states of traces, by default the most probable ones, after the given
    beginnings (`begun`)."""
    critic, tokenizer = load(path)
    prompt = CriticPrompt(template)
    args = read_recipe(["--config", str(RECIPES / "miniature" / "genac.yaml")]).training
    texts = [prompt.render(t.state, Actor("", TOKENS, t.success_rate)) for t in traces]
    begun = begun or [""] * len(texts)
    questions = [
        ids + tokenizer(first, add_special_tokens=False)["input_ids"]
        for ids, first in zip(question_ids(tokenizer, texts, args.chat_template_kwargs), begun, strict=True)
    ]
    sampling = SamplingSettings(temperature=temperature, top_p=1.0, max_new_tokens=args.critic_max_new_tokens)
    how = {"settings": sampling, "tag": prompt.tags[1], "batch_size": 512}
    answers = generate_answers(critic, tokenizer, questions, range(len(questions)), **how)
    return [first + tokenizer.decode(ids) for first, (ids, _) in zip(begun, answers, strict=True)]


def values_of_score(policy: Path, reference: Path, rows: list[dict]) -> list[list[float]]:
    """Return sigmoid(psi) of PACS for prefixes that end at the same share of a prompt's completions."""
    prompts, ids = [row["prompt"] for row in rows], [row["ids"] for row in rows]
    with torch.no_grad():
        logps = [[of for of, _ in compute_logps(load(path)[0], prompts, ids)] for path in (policy, reference)]
    ratios = [(own - other).double() for own, other in zip(*logps, strict=True)]
    columns = []
    for k in range(len(PLACES)):
        proxies = torch.stack([ratio[: row["places"][k]].sum() for ratio, row in zip(ratios, rows, strict=True)])
        columns.append(group_scores(proxies, torch.zeros(len(rows)), num_generations=GROUP).sigmoid().tolist())
    return [list(row) for row in zip(*columns, strict=True)]


def measures(rows: list[dict], values: list[list[float]]) -> dict[str, Any]:
    """Return the measures of a critic; the last position ranks. `errors` has the mean of `(R - v)^2` per problem."""
    flat = torch.tensor([value for of_completion in values for value in of_completion])
    outcomes = torch.tensor([float(row["right"]) for row in rows for _ in PLACES])
    groups = []
    for first in range(0, len(rows), GROUP):
        last = [
            0.0 if math.isnan(of_completion[-1]) else of_completion[-1]
            for of_completion in values[first : first + GROUP]
        ]
        groups.append((last, [row["right"] for row in rows[first : first + GROUP]]))
    ranking = {f"top 1 of {m}": mean_ranking_accuracy(groups, m) for m in CANDIDATES}
    errors = (outcomes - flat.nan_to_num(0.0)).square().view(-1, GROUP * len(PLACES)).mean(dim=1)
    counts = {"prefixes": len(flat), "right": int(sum(r["right"] for r in rows))}
    return value_scores(flat, outcomes) | ranking | counts | {"errors": [round(x, 4) for x in errors.tolist()]}


def value_scores(values: torch.Tensor, outcomes: torch.Tensor) -> dict[str, float]:
    """
    Of the values of any critic: `reward`, the mean of `1 - (R - v)^2` where a value that could not be read counts 0;
    `brier`, the mean of `(R - v)^2` with such a value as 0; `explained_variance` of the outcomes; `unparsed`, the
    share of such values.
    """
    if len(values) == 0:
        return dict.fromkeys(("reward", "brier", "explained_variance", "unparsed"), math.nan)
    read = values.double().nan_to_num(0.0)
    residual, total = (outcomes - read).var(correction=0), outcomes.double().var(correction=0)
    return {
        "reward": critic_rewards(values, outcomes).double().mean().item(),
        "brier": (outcomes - read).square().mean().item(),
        "explained_variance": (1.0 - residual / total).item() if total > 0 else math.nan,
        "unparsed": values.isnan().double().mean().item(),
    }


def ranking_accuracy(values: Sequence[float], right: Sequence[bool], candidates: int) -> float:
    """
    How often the highest value is that of a right completion, over all choices of so many candidates of one prompt
    that hold both right and wrong ones; equal values share. NaN where there is no such choice.

    Choices need not be gone through: the highest value of a choice is v or less in `C(n_v, m)` of them, `n_v` being
    the number of completions with no higher value.
    """
    num_right = sum(right)
    uniform = math.comb(num_right, candidates) + math.comb(len(right) - num_right, candidates)
    mixed = math.comb(len(right), candidates) - uniform
    if mixed == 0:
        return math.nan
    hits, below = 0.0, 0
    for value in sorted(set(values)):
        tied = [is_right for other, is_right in zip(values, right, strict=True) if other == value]
        highest = math.comb(below + len(tied), candidates) - math.comb(below, candidates)
        hits += highest * sum(tied) / len(tied)
        below += len(tied)
    return (hits - math.comb(num_right, candidates)) / mixed


def mean_ranking_accuracy(groups: Sequence[tuple[Sequence[float], Sequence[bool]]], candidates: int) -> float:
    """Return the mean [`ranking_accuracy`] over the prompts that have one, given by values and grades."""
    found = [ranking_accuracy(values, right, candidates) for values, right in groups]
    found = [accuracy for accuracy in found if accuracy == accuracy]
    return sum(found) / len(found) if found else math.nan
