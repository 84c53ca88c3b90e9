"""Does a critic that reasons know more, and does its actor learn more? `python -m experiments.genac --seeds 0 1 2`

Two stages, on sums and the smaller model of the tables. `values`: critics learn about one policy that does not, the warm start of a seed,
from the same number of optimizer steps; then they judge the same prefixes of the same held-out completions, also in another domain
(sums with parentheses). `arms`: PPO, GenAC with and without conditioning, PACS and GRPO from the same warm starts, with the same number of
completions; the reward is compared again at the seconds of the quickest arm. The critics that write start from one file of an oracle's
traces of all seeds' warm starts. Restartable: what is finished is taken from `--results_dir` and `--work_dir`. Without other work on the machine one
seed takes about an hour of a core.
"""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from pacs_trl.baselines.critic_answers import AfterAnswer, generate_answers, question_ids
from pacs_trl.baselines.critic_objective import mean_ranking_accuracy, value_scores
from pacs_trl.baselines.critic_prompt import Actor, CriticPrompt, State
from pacs_trl.baselines.critic_traces import Trace, write_traces
from pacs_trl.data.tasks import looks_right, problems
from pacs_trl.evaluation.requests import SamplingSettings, render_prompt
from pacs_trl.evaluation.sampling import sample_completions
from pacs_trl.miniature.oracle import oracle_traces
from pacs_trl.miniature.warm_start import MAX_COMPLETION_LENGTH
from pacs_trl.objective import group_scores
from pacs_trl.recipe import read_recipe
from pacs_trl.report.inputs import read_log_history
from pacs_trl.reproduce.cells import RECIPES, Options, run_cell
from pacs_trl.reproduce.records import Records
from pacs_trl.reproduce.runs import start_of, train_once
from pacs_trl.reproduce.tables import Cell
from pacs_trl.update.scorer import Scorer, score_rows


DOMAINS = {"terms": "sums", "grouped": "sums with parentheses"}
GROUP = 8  # completions of a problem
CANDIDATES = (2, 4, 8)
PLACES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of a completion: prefixes before its first to its last token
SFT = {"critic_sft_epochs": 60, "critic_sft_learning_rate": 1e-3}
SAVED = {"save_strategy": "steps", "save_steps": 40, "save_total_limit": 1}
PLAIN = {"critic_prompt": "miniature_unconditioned"}


def arms(traces: Path) -> dict[str, Cell]:
    """Name -> what is run; no setting depends on the seed."""
    of_genac = SFT | {"critic_sft_dataset": str(traces)} | SAVED
    given = {
        "PPO": ("miniature/twin-4b/ppo", SAVED),
        "GenAC": ("miniature/genac", of_genac),
        "GenAC, not conditioned": ("miniature/genac", of_genac | PLAIN),
        "PACS": ("miniature/twin-4b/pacs", SAVED),
        "GRPO": ("miniature/twin-4b/grpo", SAVED),
    }
    return {
        name: Cell(name, recipe, settings=settings, name=f"genac/{name.lower().replace(', ', '_').replace(' ', '_')}")
        for name, (recipe, settings) in given.items()
    }


def make_traces(file: Path, seeds: list[int], num_problems: int) -> None:
    """Of the warm starts of all seeds, so that one file serves them."""
    if file.is_file():
        return
    traces: list[Trace] = []
    for seed in seeds:
        model, tokenizer = load(start(seed))
        rows = problems("terms", "train", num_problems, seed=seed)
        traces += oracle_traces(model, tokenizer, rows, CriticPrompt.read("miniature"), seed=seed)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_traces(file, traces)


def start(seed: int) -> Path:
    return start_of(read_recipe(["--config", str(RECIPES / "miniature" / "genac.yaml")]), seed)


def load(path: Path, architecture=AutoModelForCausalLM) -> tuple[Any, Any]:
    return architecture.from_pretrained(path, dtype=torch.float32), AutoTokenizer.from_pretrained(
        path, padding_side="left"
    )


# The values of three critics on the same prefixes ------------------------------------------------------------------


def held_out(path: Path, task: str, num_problems: int, seed: int) -> list[dict[str, Any]]:
    """Completions of a policy with their grades, adjacent by problem, and the places where values are asked for."""
    model, tokenizer = load(path)
    rows = problems(task, "test", num_problems, seed=seed)
    turns = [[{"role": "user", "content": row["problem"]}] for row in rows]
    how = SamplingSettings(temperature=1.0, top_p=1.0, max_new_tokens=MAX_COMPLETION_LENGTH)
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
    """PPO: the value before a token stands where it is predicted."""
    critic = load(path, AutoModelForTokenClassification)[0].eval()
    scorer, found = Scorer(critic, critic.device), []
    for i in range(0, len(rows), 64):
        some = rows[i : i + 64]
        values = scorer.values(critic, [r["prompt"] for r in some], [r["ids"] for r in some])
        found += [[of[place].item() for place in row["places"]] for row, of in zip(some, values, strict=True)]
    return found


def values_in_words(path: Path, rows: list[dict], template: str) -> list[list[float]]:
    """GenAC: the most probable answer; NaN where it cannot be read."""
    critic, tokenizer = load(path)
    prompt = CriticPrompt.read(template)
    args = read_recipe(["--config", str(RECIPES / "miniature" / "genac.yaml")]).training
    actor = Actor("", MAX_COMPLETION_LENGTH, mean(row["right"] for row in rows))
    states = [
        State(row["problem"], tokenizer.decode(row["ids"][:place], skip_special_tokens=True), place)
        for row in rows
        for place in row["places"]
    ]
    questions = question_ids(tokenizer, [prompt.render(state, actor) for state in states], args)
    how = SamplingSettings(temperature=0.0, top_p=1.0, max_new_tokens=args.critic_max_new_tokens)
    ending = AfterAnswer(tokenizer, prompt.tags[1], critic.config.vocab_size)
    answers = generate_answers(critic, tokenizer, questions, [0] * len(questions), how, ending=ending, batch_size=512)
    read = [prompt.parse(tokenizer.decode(ids)) for ids, _ in answers]
    values = [math.nan if value is None else value for value in read]
    return [values[i : i + len(PLACES)] for i in range(0, len(values), len(PLACES))]


def values_of_score(policy: Path, reference: Path, rows: list[dict]) -> list[list[float]]:
    """PACS: sigma(psi) of the prefixes that end at the same share of a prompt's completions."""
    prompts, ids = [row["prompt"] for row in rows], [row["ids"] for row in rows]
    with torch.no_grad():
        logps = [[of for of, _ in score_rows(load(path)[0], prompts, ids)] for path in (policy, reference)]
    ratios = [(own - other).double() for own, other in zip(*logps, strict=True)]
    columns = []
    for k in range(len(PLACES)):
        proxies = torch.stack([ratio[: row["places"][k]].sum() for ratio, row in zip(ratios, rows, strict=True)])
        columns.append(group_scores(proxies, torch.zeros(len(rows)), num_generations=GROUP).sigmoid().tolist())
    return [list(row) for row in zip(*columns, strict=True)]


def measures(rows: list[dict], values: list[list[float]]) -> dict[str, float]:
    """Of one critic; the last place ranks."""
    flat = torch.tensor([value for of_row in values for value in of_row])
    outcomes = torch.tensor([float(row["right"]) for row in rows for _ in PLACES])
    groups = []
    for first in range(0, len(rows), GROUP):
        last = [0.0 if math.isnan(of_row[-1]) else of_row[-1] for of_row in values[first : first + GROUP]]
        groups.append((last, [row["right"] for row in rows[first : first + GROUP]]))
    ranking = {f"top 1 of {m}": mean_ranking_accuracy(groups, m) for m in CANDIDATES}
    return (
        value_scores(flat, outcomes) | ranking | {"prefixes": len(flat), "right": int(sum(r["right"] for r in rows))}
    )


def judge_values(seed: int, args, traces: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Train the critics of a seed, and measure them: critic -> domain -> measures."""
    first, work, steps = start(seed), args.work_dir / "values" / f"seed-{seed}", args.steps
    of_genac = SFT | {"critic_sft_dataset": str(traces), "critic_pretraining_steps": steps}
    runs: dict[str, tuple[str, dict[str, Any]]] = {
        "PPO's head": ("twin-4b/ppo", {"critic_warmup_steps": steps}),
        "GenAC, traces alone": ("genac", of_genac | {"max_steps": 1, "critic_learning_rate": 1e-12}),
        "GenAC": ("genac", of_genac),
        "GenAC, not conditioned": ("genac", of_genac | PLAIN),
        "PACS's score": ("twin-4b/pacs", {}),
    }
    critics: dict[str, Callable[[list[dict]], list[list[float]]]] = {}
    for name, (recipe, settings) in runs.items():
        settings = {
            "max_steps": steps,
            "seed": seed,
            "save_strategy": "steps",
            "save_steps": steps,
            "save_total_limit": 1,
        } | settings
        settings["save_steps"] = settings["max_steps"]
        words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
        directory = work / name.lower().replace("'s", "").replace(", ", "_").replace(" ", "_")
        train_once(["--config", str(RECIPES / "miniature" / f"{recipe}.yaml"), *words], first, directory)
        critic = directory / f"checkpoint-{settings['max_steps']}" / "critic"
        if recipe == "genac":
            template = settings.get("critic_prompt", "miniature")
            critics[name] = lambda rows, critic=critic, template=template: values_in_words(critic, rows, template)
        elif recipe == "twin-4b/ppo":
            critics[name] = lambda rows, critic=critic: values_of_head(critic, rows)
        else:
            critics[name] = lambda rows, policy=directory: values_of_score(policy, first, rows)
    found: dict[str, dict[str, dict[str, float]]] = {name: {} for name in ["the mean", *critics]}
    for task in DOMAINS:
        rows = held_out(first, task, args.problems, seed)
        rate = mean(row["right"] for row in rows)
        found["the mean"][task] = measures(rows, [[rate] * len(PLACES) for _ in rows])
        for name, values in critics.items():
            found[name][task] = measures(rows, values(rows))
    return found


def table_of_values(found: list[dict]) -> list[str]:
    columns = ["reward", "brier", "explained_variance", *(f"top 1 of {m}" for m in CANDIDATES), "unparsed"]
    lines = []
    for task, words in DOMAINS.items():
        sizes = ", ".join(
            f"{f['the mean'][task]['right']} of {f['the mean'][task]['prefixes'] // len(PLACES)}" for f in found
        )
        lines += ["", f"{words}: completions that are right, by seed: {sizes}; {len(PLACES)} prefixes of each", ""]
        lines += [f"| critic | {' | '.join(columns)} |", "| --- |" + " ---: |" * len(columns)]
        for name in found[0]:
            cells = [", ".join(f"{f[name][task][column]:.3f}" for f in found) for column in columns]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


# The policies -------------------------------------------------------------------------------------------------------


def table_of_arms(options: Options, cells: dict[str, Cell]) -> list[str]:
    """By seed: pass@1 over all benchmarks as a count, seconds, the mean reward of the last ten generations, and of the ten before the
    quickest arm ended."""
    records, histories = Records(options.results_dir), {}
    for name, cell in cells.items():
        for run in records.runs(cell.run, name):
            file = cell.directory(options.work_dir, run.seed) / "model" / "trainer_state.json"
            histories[name, run.seed] = run, [e for e in read_log_history(file) if "time/total" in e]
    ends = {key: sum(e["time/total"] for e in history) for key, (_, history) in histories.items()}
    quickest = {seed: min(end for (_, s), end in ends.items() if s == seed) for _, seed in histories}
    lines = [
        "",
        "| arm | seed | right / drawn | seconds | last reward | reward at equal seconds |",
        "| --- |" + " ---: |" * 5,
    ]
    for (name, seed), (run, history) in histories.items():
        counts = [
            (p["c"], run.results["n"])
            for b in run.results["benchmarks"].values()
            for p in b["problems"]
            if p["c"] is not None
        ]
        passed, rewards, early = 0.0, [], []
        for entry in history:
            passed += entry["time/total"]
            if "reward" in entry:
                rewards.append(entry["reward"])
                early += [entry["reward"]] * (passed <= quickest[seed])
        lines.append(
            f"| {name} | {seed} | {sum(c for c, _ in counts)} / {sum(n for _, n in counts)} | {ends[name, seed]:.0f} | "
            f"{mean(rewards[-10:]):.3f} | {mean(early[-10:] or [math.nan]):.3f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--stages", nargs="+", choices=["values", "arms"], default=["values", "arms"])
    parser.add_argument(
        "--steps", type=int, default=160, help="optimizer steps of the critics of `values` (default: 160)"
    )
    parser.add_argument("--problems", type=int, default=150, help="held-out problems of a domain (default: 150)")
    parser.add_argument("--trace_problems", type=int, default=200, help="problems of traces, by seed (default: 200)")
    parser.add_argument("--max_steps", type=int, help="of every arm, to try things out")
    parser.add_argument("--results_dir", type=Path, default=Path("outputs/genac/results"))
    parser.add_argument("--work_dir", type=Path, default=Path("outputs/genac/runs"))
    args = parser.parse_args()
    traces = args.work_dir.resolve() / "traces.jsonl"
    make_traces(traces, args.seeds, args.trace_problems)
    args.results_dir.mkdir(parents=True, exist_ok=True)
    if "values" in args.stages:
        found = []
        for seed in args.seeds:
            file = args.results_dir / f"values-{seed}.json"
            if not file.is_file():
                file.write_text(json.dumps(judge_values(seed, args, traces), indent=1) + "\n")
            found.append(json.loads(file.read_text()))
            print("\n".join(table_of_values(found)), flush=True)
    if "arms" in args.stages:
        small = {} if args.max_steps is None else {"num_samples": 8, "max_problems": 4}
        options = Options(
            tuple(args.seeds), args.max_steps, results_dir=args.results_dir, work_dir=args.work_dir, **small
        )
        cells = arms(traces)
        for seed in args.seeds:
            for cell in cells.values():
                run_cell(cell, seed, options)
                print("\n".join(table_of_arms(options, cells)), flush=True)


if __name__ == "__main__":
    main()
