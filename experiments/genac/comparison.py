"""Comparison of GenAC, PPO, PACS, and GRPO: values of the critics, and trained policies.

`python -m experiments.genac.comparison`

Sums of four terms, a policy of 0.1 million parameters, three stages. `ladder`: critics of several sizes are trained on
an oracle's traces, in words and with a value head, and compared with true success rates on new states. `values`:
critics are trained on completions of a fixed policy, the warm start of a seed, and evaluated on the same prefixes of
held-out completions, also in another domain (sums with parentheses). `arms`: PPO, GenAC with and without conditioning,
PACS, and GRPO from the same warm starts with equal numbers of completions; the first generations train only the
critics. GenAC's critics start from traces of all seeds. Finished stages are read from `--results_dir` and
`--work_dir`. Writes tables.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

from experiments.bootstrap import paired_bootstrap
from experiments.genac import critic_values as critics
from experiments.genac.taught_critics import POLICY, TASK, ladder, make_traces, taught, teach
from experiments.paper.cells import RECIPES, Options, run_cell
from experiments.paper.records import Records
from experiments.paper.render import Cell
from experiments.paper.runs import train_once
from experiments.studies import markdown, over_seeds, publish, run_name, saved, words, write_json
from pacs_trl.miniature.model import MODEL_SIZES
from pacs_trl.miniature.warm_start import warm_start


DOMAINS = {TASK: "sums of four terms", "grouped": "sums with parentheses"}
ALONE = 32  # optimizer steps of the critic alone: the first eight generations
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "PPO": ("sums-0.1m/ppo", {"critic_warmup_steps": ALONE}),
    "PACS": ("sums-0.1m/pacs", {}),
    "GRPO": ("sums-0.1m/grpo", {}),
    "GenAC": ("genac", {"critic_prompt": "miniature"}),
    "GenAC, not conditioned": ("genac", {"critic_prompt": "miniature_unconditioned"}),
}


def settings_of(arm: str, work: Path) -> dict[str, Any]:
    """Return the differences of an arm from its recipe; they do not depend on the seed."""
    settings = POLICY | ARMS[arm][1]
    if "critic_prompt" in settings:
        critic = taught(work, "tiny", settings["critic_prompt"])
        settings |= {"critic_model_name_or_path": str(critic), "critic_pretraining_steps": ALONE}
        settings |= {"critic_batch_size": 512}
    return settings


def cell_of(arm: str, work: Path) -> Cell:
    settings = settings_of(arm, work) | saved(40) | {"max_steps": 120}
    return Cell(arm, f"miniature/{ARMS[arm][0]}", settings=settings, name=f"genac/{run_name(arm)}")


# The values of three critics -----------------------------------------------------------------------------------------


def judge_values(seed: int, args) -> dict[str, dict[str, dict[str, Any]]]:
    """Train the critics of a seed on a fixed policy, and measure them: critic -> domain -> measures."""
    first, steps = warm_start(f"{TASK}/tiny", seed=seed), args.value_steps
    found_by: dict[str, Callable[[list[dict]], list[list[float]]]] = {}
    for arm in ARMS:
        if arm == "GRPO":  # has no values
            continue
        settings = settings_of(arm, args.work_dir) | {"seed": seed, "max_steps": steps}
        settings |= {"save_strategy": "steps", "save_steps": steps}
        settings |= {key: steps for key in ("critic_warmup_steps", "critic_pretraining_steps") if key in settings}
        directory = args.work_dir / "values" / f"seed-{seed}" / run_name(arm)
        recipe = str(RECIPES / "miniature" / f"{ARMS[arm][0]}.yaml")
        train_once(["--config", recipe, *words(settings)], first, directory)
        critic = directory / f"checkpoint-{steps}" / "critic"
        if arm == "PACS":
            found_by["PACS's score"] = lambda rows, policy=directory: critics.values_of_score(policy, first, rows)
        elif arm == "PPO":
            found_by["PPO's head"] = lambda rows, critic=critic: critics.values_of_head(critic, rows)
        else:
            template, before = settings["critic_prompt"], Path(settings["critic_model_name_or_path"])
            for name, path in ((f"{arm}: traces alone", before), (arm, critic)):
                found_by[name] = lambda rows, path=path, template=template: critics.values_in_words(
                    path, rows, template
                )
    found: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in ["the mean", *found_by]}
    for task in DOMAINS:
        rows = critics.held_out(first, task, args.problems, seed)
        rate = mean(row["right"] for row in rows)
        found["the mean"][task] = critics.measures(rows, [[rate] * len(critics.PLACES) for _ in rows])
        for name, values in found_by.items():
            found[name][task] = critics.measures(rows, values(rows))
    return found


def table_of_values(found: list[dict]) -> list[str]:
    """Return means over seeds; the Brier score also relative to the mean's, with an interval over problems."""
    columns = ["reward", "brier", "explained_variance", *(f"top 1 of {m}" for m in critics.CANDIDATES), "unparsed"]
    lines = []
    for task, domain in DOMAINS.items():
        sizes = ", ".join(
            f"{f['the mean'][task]['right']} of {f['the mean'][task]['prefixes'] // len(critics.PLACES)}"
            for f in found
        )
        places = f"{len(critics.PLACES)} prefixes of each."
        lines += ["", f"{domain}: completions that are right, by seed: {sizes}; {places}", ""]
        rows = []
        for name in found[0]:
            cells = [f"{mean(f[name][task][column] for f in found):.3f}" for column in columns]
            pair = ([error for f in found for error in f[n][task]["errors"]] for n in ("the mean", name))
            gain = paired_bootstrap(*pair)
            rows.append([name, *cells, f"{gain.mean:+.3f} ({gain.lower:+.3f} to {gain.upper:+.3f})"])
        lines += markdown(["critic", *columns, "brier minus the mean's"], rows)
    return lines


# The policies --------------------------------------------------------------------------------------------------------


def run_arm(cell: Cell, seed: int, options: Options, file: Path) -> None:
    """Run a cell, and record the CPU seconds of each generation."""
    known = json.loads(file.read_text()) if file.is_file() else {}
    if str(seed) in known.get(cell.run, {}) and seed in Records(options.results_dir).seeds(cell.run):
        return
    clock, own = time.perf_counter(), time.process_time()
    run_cell(cell, seed, options)
    share = (time.process_time() - own) / (time.perf_counter() - clock)
    state = json.loads((cell.directory(options.work_dir, seed) / "model" / "trainer_state.json").read_text())
    seconds = []
    for entry in state["log_history"]:
        if "reward" in entry:
            seconds.append(0.0)
        if "time/total" in entry:
            seconds[-1] += share * entry["time/total"]
    known.setdefault(cell.run, {})[str(seed)] = [round(x, 2) for x in seconds]
    write_json(file, known)


def read_arms(options: Options, work: Path, file: Path) -> dict[str, dict[int, dict[str, Any]]]:
    """Return by arm and seed counts, CPU seconds at the end of each generation, and rewards."""
    records, known = Records(options.results_dir), json.loads(file.read_text())
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for arm in ARMS:
        cell = cell_of(arm, work)
        for run in records.runs(cell.run, arm):
            seconds = known[cell.run][str(run.seed)]
            counts = {
                name: (sum(p["c"] for p in b["problems"]), sum(p["n"] for p in b["problems"]))
                for name, b in run.results["benchmarks"].items()
            }
            problems_right = [p["c"] / p["n"] for b in run.results["benchmarks"].values() for p in b["problems"]]
            found.setdefault(arm, {})[run.seed] = {
                "counts": counts,
                "problems": problems_right,
                "ends": [sum(seconds[: i + 1]) for i in range(len(seconds))],
                "rewards": [entry["reward"] for entry in run.training["log_history"] if "reward" in entry],
            }
    return found


LAST = 5  # generations of a mean reward


def at(run: dict[str, Any], seconds: float) -> float:
    """Return the mean reward of the last generations that ended by then."""
    early = [reward for reward, end in zip(run["rewards"], run["ends"], strict=True) if end <= seconds + 0.01]
    return mean(early[-LAST:]) if early else math.nan


def table_of_arms(found: dict[str, dict[int, dict[str, Any]]]) -> list[str]:
    """Return by seed counts of correct completions, CPU seconds, and the reward at the end and when the slowest arm
    without a generating critic ends; then each arm relative to PPO over common seeds."""
    baselines = [runs for arm, runs in found.items() if not arm.startswith("GenAC")]
    rows: list[list[object]] = []
    for arm, runs in found.items():
        for seed, run in runs.items():
            end = max((own[seed]["ends"][-1] for own in baselines if seed in own), default=math.nan)
            counts = ", ".join(f"{c} / {n}" for c, n in run["counts"].values())
            rewards = (f"{at(run, seconds):.3f}" for seconds in (math.inf, end))
            rows.append([arm, seed, counts, f"{run['ends'][-1]:.0f}", *rewards])
    heads = ["arm", "seed", f"correct / sampled, {', '.join(DOMAINS.values())}", "seconds", "last reward"]
    lines, rows = [*markdown([*heads, "reward at equal seconds"], rows), ""], []
    for arm, runs in found.items():
        pairs = [(run, found["PPO"][seed]) for seed, run in runs.items() if seed in found.get("PPO", {})]
        difference = "" if arm == "PPO" or not pairs else _difference(pairs)
        ratio = mean(own["ends"][-1] / other["ends"][-1] for own, other in pairs) if pairs else math.nan
        rates = mean(100 * mean(run["problems"]) for run in runs.values())
        rows.append([arm, f"{rates:.1f}", difference, f"{ratio:.1f}"])
    return lines + markdown(["arm", "pass@1, %", "minus PPO", "times PPO's seconds"], rows)


def _difference(pairs: list[tuple[dict, dict]]) -> str:
    if len(pairs) > 1:
        values = [100 * (mean(own["problems"]) - mean(other["problems"])) for own, other in pairs]
        return "{:+.1f} ± {:.1f}".format(*over_seeds(values))
    ((own, other),) = pairs
    gain = paired_bootstrap([100 * x for x in other["problems"]], [100 * x for x in own["problems"]])
    return f"{gain.mean:+.1f} ({gain.lower:+.1f} to {gain.upper:+.1f}, problems)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    stages = ["ladder", "values", "arms"]
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--stages", nargs="+", choices=stages, default=stages)
    parser.add_argument("--sizes", nargs="+", choices=[*MODEL_SIZES], default=["tiny", "small"], help="of `ladder`")
    parser.add_argument("--problems", type=int, default=64, help="held-out problems of a domain (default: 64)")
    parser.add_argument("--trace_problems", type=int, default=150, help="problems of traces, by seed (default: 150)")
    parser.add_argument("--samples", type=int, default=16, help="continuations of a state of a trace (default: 16)")
    parser.add_argument("--value_steps", type=int, default=ALONE, help="optimizer steps of the critics of `values`")
    parser.add_argument("--max_steps", type=int, help="of every arm, to try things out; traces are then read once")
    parser.add_argument("--results_dir", type=Path, default=Path("outputs/genac/results"))
    parser.add_argument("--work_dir", type=Path, default=Path("outputs/genac/runs"))
    args = parser.parse_args()
    if min(args.problems, args.trace_problems, args.samples, args.value_steps, args.max_steps or 1) < 1:
        parser.error("problems, continuations and steps are counted from 1")
    args.results_dir.mkdir(parents=True, exist_ok=True)
    traces = args.work_dir / "traces.jsonl"
    make_traces(traces, args.seeds, args.trace_problems, "train", args.samples)
    if "ladder" in args.stages:
        ladder(args, traces)
    for template in ("miniature", "miniature_unconditioned") if {"values", "arms"} & {*args.stages} else ():
        teach(args.work_dir, "tiny", template, traces, args.seeds[0], args.max_steps)
    sizes = (
        {"num_samples": 32, "max_problems": args.problems}
        if args.max_steps is None
        else {"num_samples": 8, "max_problems": 4}
    )
    benchmarks = ",".join(f"miniature/{task}" for task in DOMAINS)
    places = {"results_dir": args.results_dir, "work_dir": args.work_dir}
    options = Options(tuple(args.seeds), args.max_steps, benchmarks=benchmarks, **places, **sizes)
    judged = []
    for seed in args.seeds:
        if "values" in args.stages:
            file = args.results_dir / f"values-{seed}.json"
            if not file.is_file():
                write_json(file, judge_values(seed, args))
            judged.append(json.loads(file.read_text()))
            publish(args.results_dir / "values.md", table_of_values(judged))
        for arm in ARMS if "arms" in args.stages else ():
            run_arm(cell_of(arm, args.work_dir), seed, options, args.results_dir / "seconds.json")
            found = read_arms(options, args.work_dir, args.results_dir / "seconds.json")
            publish(args.results_dir / "arms.md", table_of_arms(found))


if __name__ == "__main__":
    main()
