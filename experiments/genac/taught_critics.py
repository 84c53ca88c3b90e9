"""Supervised critics of several sizes on an oracle's traces, in words and with a value head.

The first stage of `comparison.py`: they are evaluated by true success rates on new states, and its critics start from
them.
"""

import json
import random
from pathlib import Path
from statistics import correlation, mean, stdev
from typing import Any

import torch
from transformers import AutoModelForTokenClassification

from experiments.bootstrap import paired_bootstrap
from experiments.genac.critic_values import BATCH, TOKENS, load, written
from experiments.genac.oracle import oracle_traces
from experiments.genac.supervised_start import Trace, read_traces, write_traces
from experiments.genac.supervised_start import teach as fine_tune
from experiments.studies import markdown, publish, write_json
from pacs_trl.data.tasks import problems
from pacs_trl.evaluation.requests import render_prompt
from pacs_trl.experimental._critic_prompt import Actor, CriticPrompt
from pacs_trl.miniature.model import MODEL_SIZES
from pacs_trl.miniature.warm_start import SIZE_SETTINGS, WarmStartSettings, warm_start
from pacs_trl.update.forward_pass import ForwardPass


TASK = "terms_4"
EPOCHS = 10
DRAWS = 8  # answers of a mean
POLICY = {
    "model_name_or_path": f"miniature/{TASK}/tiny",
    "dataset_name": f"miniature/{TASK}",
    "max_completion_length": TOKENS,
}


def make_traces(file: Path, seeds: list[int], num_problems: int, split: str, samples: int) -> list[Trace]:
    """Write the traces of the warm starts of all seeds to one file."""
    if not file.is_file():
        traces: list[Trace] = []
        for seed in seeds:
            model, tokenizer = load(warm_start(POLICY["model_name_or_path"].partition("/")[2], seed=seed))
            rows = problems(TASK, split, num_problems, seed=seed)
            traces += oracle_traces(model, tokenizer, rows, CriticPrompt("miniature"), seed=seed, samples=samples)
        write_traces(file, traces)
    return read_traces(file)


def learning_rate(size: str) -> float:
    """Return the learning rate of the warm start of a size."""
    return {"learning_rate": WarmStartSettings.learning_rate, **SIZE_SETTINGS.get(size, {})}["learning_rate"]


def taught(work: Path, size: str, template: str) -> Path:
    """Return the directory of a critic after its supervised start."""
    return work / f"taught_{size}_{template}"


def teach(work: Path, size: str, template: str, traces: Path, seed: int, steps: int | None = None) -> None:
    """Run the supervised start of a critic once."""
    path = taught(work, size, template)
    if not (path / "config.json").is_file():
        fine_tune(
            warm_start(f"{TASK}/{size}", seed=seed),
            read_traces(traces),
            path,
            template=template,
            actor=Actor("", TOKENS, None),
            num_train_epochs=EPOCHS if steps is None else 1,
            learning_rate=learning_rate(size),
            per_device_train_batch_size=BATCH,
            seed=seed,
        )


def states_of(traces: list[Trace], tokenizer) -> tuple[list[list[int]], list[list[int]]]:
    """Return prompts and completions for a value head: the state ends before the last token."""
    prompts = [
        tokenizer(render_prompt(tokenizer, [{"role": "user", "content": t.state.problem}]), add_special_tokens=False)
        for t in traces
    ]
    ids = [tokenizer(t.state.response, add_special_tokens=False)["input_ids"] for t in traces]
    return [prompt["input_ids"] for prompt in prompts], [own + [tokenizer.eos_token_id] for own in ids]


def taught_head(start: Path, traces: list[Trace], rates: list[float], epochs: int, learning_rate: float, seed: int):
    """Fit a value head on the weights of `start` to the rates of the traces by squared error."""
    torch.manual_seed(seed)
    head = AutoModelForTokenClassification.from_pretrained(start, num_labels=1, dtype=torch.float32)
    prompts, ids = states_of(traces, load(start)[1])
    forward_pass, optimizer = ForwardPass(head, head.device), torch.optim.AdamW(head.parameters(), lr=learning_rate)
    places = list(range(len(traces)))
    for epoch in range(epochs):
        random.Random(f"{seed}/{epoch}").shuffle(places)
        for first in range(0, len(places), BATCH):
            batch = places[first : first + BATCH]
            values = forward_pass.values(head, [prompts[i] for i in batch], [ids[i] for i in batch])
            target = torch.tensor([rates[i] for i in batch])
            loss = (torch.stack([own[-1] for own in values]) - target).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return head.eval()


@torch.no_grad()
def said_by_head(head, start: Path, traces: list[Trace]) -> list[float]:
    prompts, ids = states_of(traces, load(start)[1])
    forward_pass = ForwardPass(head, head.device)
    found: list[float] = []
    for first in range(0, len(traces), 64):
        values = forward_pass.values(head, prompts[first : first + 64], ids[first : first + 64])
        found += [own[-1].item() for own in values]
    return found


def judge_taught(path: Path, traces: list[Trace]) -> dict[str, Any]:
    """Evaluate a supervised critic on new traces. Return by state its most probable value, the mean of `DRAWS` sampled
    values, the same after the oracle's reasons, the shares that cannot be parsed (which count as 0), and the accuracy
    of its reasons."""
    prompt = CriticPrompt("miniature")
    reasons = [t.answer[: t.answer.rindex(prompt.tags[0])] for t in traces]

    def values(texts: list[str]) -> list[float]:
        read = [prompt.parse(text) for text in texts]
        found["unread"].append(mean(value is None for value in read))
        each = len(texts) // len(traces)
        return [round(mean(v or 0.0 for v in read[i : i + each]), 4) for i in range(0, len(read), each)]

    answers = written(path, traces, "miniature")
    several = [t for t in traces for _ in range(DRAWS)]
    drawn = written(path, several, "miniature", temperature=1.0)
    begun = [reason + prompt.tags[0] for reason in reasons for _ in range(DRAWS)]
    behind = written(path, several, "miniature", begun, temperature=1.0)
    found: dict[str, Any] = {"unread": []}
    found |= {"most probable": values(answers), "drawn": values(drawn), "behind": values(behind)}
    own = [answer.split(prompt.tags[0])[0] for answer in answers]
    parts = [[text.partition("|")[::2] for text in texts] for texts in (own, reasons)]
    alike = [[a[k] == b[k] for a, b in zip(*parts, strict=True)] for k in range(2)]
    return found | {"calculations right": mean(alike[0]), "terms right": mean(alike[1])}


def judge_size(size: str, seed: int, work: Path, traces: list[Trace], held_out: list[Trace]) -> dict[str, Any]:
    """Return values of a critic of this size, in words and from a head."""
    prompt, start = CriticPrompt("miniature"), warm_start(f"{TASK}/{size}", seed=seed)
    found = judge_taught(taught(work, size, "miniature"), held_out)
    rates = [prompt.parse(t.answer) for t in traces]
    head = taught_head(start, traces, rates, EPOCHS, learning_rate(size), seed)
    said = said_by_head(head, start, held_out)
    size_in_numbers = sum(parameter.numel() for parameter in load(start)[0].parameters())
    return found | {"head": [round(x, 4) for x in said], "parameters": size_in_numbers}


def table_of_ladder(found: dict[str, Any], traces: list[Trace], held_out: list[Trace], samples: int) -> list[str]:
    """Return mean squared errors relative to the true rates, in thousandths, and relative to the mean, with intervals
    over problems; and the values where the oracle's reason has a mistake, and where it has none."""
    prompt = CriticPrompt("miniature")
    rates = [prompt.parse(t.answer) for t in held_out]
    constant = mean(prompt.parse(t.answer) for t in traces)
    names = [t.state.problem for t in held_out]
    wrong = [bool({"n", "x"} & {*t.answer}) for t in held_out]

    def errors(values) -> list[float]:
        of: dict[str, list[float]] = {}
        for name, value, rate in zip(names, values, rates, strict=True):
            of.setdefault(name, []).append(1000 * (value - rate) ** 2)
        return [mean(own) for own in of.values()]

    def row(name: str, values: list[float], *rest: str) -> list[str]:
        own = errors(values)
        gain = paired_bootstrap(errors([constant] * len(rates)), own)
        said = (mean(v for v, w in zip(values, wrong, strict=True) if w is side) for side in (True, False))
        spread = stdev(values) * stdev(rates)
        alike = f"{correlation(values, rates):.2f}" if spread else "-"
        cells = [name, f"{mean(own):.1f}", f"{gain.mean:+.1f} ({gain.lower:+.1f} to {gain.upper:+.1f})", alike]
        return [*cells, *(f"{value:.3f}" for value in said), *rest]

    noise = 1000 * mean(rate * (1 - rate) / (samples - 1) for rate in rates)
    rows = [row("true rate", rates, "", "", ""), row("the mean", [constant] * len(rates), "", "", "")]
    for size, own in found.items():
        right = [f"{own[name]:.3f}" for name in ("calculations right", "terms right")]
        name = f"{size}, {own['parameters'] / 1e6:.1f}M"
        ways = ("most probable", "the most probable answer", right), ("drawn", f"mean of {DRAWS} answers", ["", ""])
        ways = *ways, ("behind", f"mean of {DRAWS} scores after the oracle's reason", ["", ""])
        for (key, words, rest), unread in zip(ways, own["unread"], strict=True):
            rows.append(row(f"{name}: {words}", own[key], f"{unread:.3f}", *rest))
        rows.append(row(f"{name}: value head", own["head"], "", "", ""))
    heads = ["", "squared error / 1000", "minus that of the mean", "correlation", "value after a mistake"]
    heads += ["value without one", "unreadable", "calculations correct", "terms correct"]
    about = (
        f"{len(held_out)} states of {len(set(names))} held-out sums; {noise:.1f} of each error is noise of the rates"
    )
    return [f"{about}, estimated by {samples} continuations.", "", *markdown(heads, rows)]


def ladder(args, traces: Path) -> None:
    held_out = make_traces(args.work_dir / "held_out.jsonl", args.seeds[:1], args.problems, "test", 2 * args.samples)
    known = read_traces(traces)
    file = args.results_dir / "ladder.json"
    for size in args.sizes:
        found = json.loads(file.read_text()) if file.is_file() else {}
        if size not in found:
            teach(args.work_dir, size, "miniature", traces, args.seeds[0], args.max_steps)
            found[size] = judge_size(size, args.seeds[0], args.work_dir, known, held_out)
            write_json(file, found)
        found = {name: found[name] for name in MODEL_SIZES if name in found}
        publish(args.results_dir / "ladder.md", table_of_ladder(found, known, held_out, 2 * args.samples))
