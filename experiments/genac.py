"""Does a critic that reasons know more, and does its actor learn more? `python -m experiments.genac --seeds 0 1 2`

On sums of four terms and a policy of 0.1 million parameters, in three stages. `ladder`: critics of several sizes are taught by an oracle's
traces, in words and by a value head, and judged by the true success rates of states that they have not seen. `values`: critics learn
from the completions of one policy that does not learn, the warm start of a seed, and judge the same prefixes of the same held-out
completions, also in another domain (sums with parentheses). `arms`: PPO, GenAC with and without conditioning, PACS and GRPO from the
same warm starts, with the same number of completions; of both kinds of critics the first generations teach the critic alone. The
critics that write start from the traces of all seeds' warm starts. Restartable: what is finished is taken from `--results_dir` and
`--work_dir`. Writes its tables and a figure there.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from experiments import critic_values as critics
from pacs_trl.baselines.critic_prompt import CriticPrompt
from pacs_trl.baselines.critic_traces import Trace, read_traces, write_traces
from pacs_trl.data.tasks import problems
from pacs_trl.evaluation.pass_at_k import paired_bootstrap
from pacs_trl.miniature.model import MODEL_SIZES
from pacs_trl.miniature.oracle import oracle_traces
from pacs_trl.miniature.warm_start import SIZE_SETTINGS, WarmStartSettings, warm_start
from pacs_trl.reproduce.cells import RECIPES, Options, run_cell
from pacs_trl.reproduce.records import Records
from pacs_trl.reproduce.runs import train_once
from pacs_trl.reproduce.tables import Cell


TASK = "terms_4"
DOMAINS = {TASK: "sums of four terms", "grouped": "sums with parentheses"}
EPOCHS = 10
ALONE = 32  # optimizer steps of the critic alone: the first eight generations
POLICY = {
    "model_name_or_path": f"miniature/{TASK}/tiny",
    "dataset_name": f"miniature/{TASK}",
    "max_completion_length": critics.TOKENS,
}
SAVED = {"save_strategy": "steps", "save_steps": 40, "save_total_limit": 1}
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "PPO": ("twin-4b/ppo", {"critic_warmup_steps": ALONE}),
    "PACS": ("twin-4b/pacs", {}),
    "GRPO": ("twin-4b/grpo", {}),
    "GenAC": ("genac", {"critic_prompt": "miniature"}),
    "GenAC, not conditioned": ("genac", {"critic_prompt": "miniature_unconditioned"}),
}
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}  # Student's, by the number of seeds


def file_name(arm: str) -> str:
    return arm.lower().replace("'s", "").replace(", ", "_").replace(" ", "_")


def settings_of(arm: str, work: Path) -> dict[str, Any]:
    """Where an arm differs from its recipe; no setting depends on the seed."""
    settings = POLICY | ARMS[arm][1]
    if "critic_prompt" in settings:
        critic = taught(work, "tiny", settings["critic_prompt"])
        settings |= {"critic_model_name_or_path": str(critic), "critic_pretraining_steps": ALONE}
        settings |= {"critic_batch_size": 512}
    return settings


def cell_of(arm: str, work: Path) -> Cell:
    settings = settings_of(arm, work) | SAVED | {"max_steps": 120}
    return Cell(arm, f"miniature/{ARMS[arm][0]}", settings=settings, name=f"genac/{file_name(arm)}")


def words(settings: dict[str, Any]) -> list[str]:
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


# Traces, and critics that they teach ----------------------------------------------------------------------------------


def make_traces(file: Path, seeds: list[int], num_problems: int, split: str, samples: int) -> list[Trace]:
    """Of the warm starts of all seeds, so that one file serves them."""
    if not file.is_file():
        traces: list[Trace] = []
        for seed in seeds:
            model, tokenizer = critics.load(warm_start(POLICY["model_name_or_path"].partition("/")[2], seed=seed))
            rows = problems(TASK, split, num_problems, seed=seed)
            traces += oracle_traces(model, tokenizer, rows, CriticPrompt.read("miniature"), seed=seed, samples=samples)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_traces(file, traces)
    return read_traces(file, CriticPrompt.read("miniature"))


def learning_rate(size: str) -> float:
    """That of the warm start of the size."""
    return {"learning_rate": WarmStartSettings.learning_rate, **SIZE_SETTINGS.get(size, {})}["learning_rate"]


def taught(work: Path, size: str, template: str) -> Path:
    """Where the critic of a size lies after its supervised start."""
    return work / f"taught_{size}_{template}" / "checkpoint-1" / "critic"


def teach(work: Path, size: str, template: str, traces: Path, seed: int, steps: int | None = None) -> None:
    """The supervised start of [`~baselines.genac_trainer.GenACTrainer`], and one step that changes nothing."""
    policy, critic = (warm_start(f"{TASK}/{each}", seed=seed) for each in ("tiny", size))
    settings = POLICY | {
        "critic_model_name_or_path": critic,
        "critic_prompt": template,
        "critic_sft_dataset": traces,
        "critic_sft_epochs": EPOCHS if steps is None else 1,
        "critic_sft_learning_rate": learning_rate(size),
        "critic_batch_size": critics.BATCH,
        "critic_learning_rate": 1e-12,
        "critic_pretraining_steps": 1,
        "max_segments": 1,
        "critic_extra_states": False,
        "max_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
    }
    path = taught(work, size, template)
    recipe = ["--config", str(RECIPES / "miniature" / "genac.yaml"), *words(settings)]
    train_once(recipe, policy, path.parents[1])


def judge_size(size: str, seed: int, work: Path, traces: list[Trace], held_out: list[Trace]) -> dict[str, Any]:
    """What a critic of this size says after the traces, in words and by a head."""
    prompt, start = CriticPrompt.read("miniature"), warm_start(f"{TASK}/{size}", seed=seed)
    found = critics.judge_taught(taught(work, size, "miniature"), held_out)
    rates = [prompt.parse(t.answer) for t in traces]
    head = critics.taught_head(start, traces, rates, EPOCHS, learning_rate(size), seed)
    said = critics.said_by_head(head, start, held_out)
    size_in_numbers = sum(parameter.numel() for parameter in critics.load(start)[0].parameters())
    return found | {"head": [round(x, 4) for x in said], "parameters": size_in_numbers}


def table_of_ladder(found: dict[str, Any], traces: list[Trace], held_out: list[Trace], samples: int) -> list[str]:
    """Mean squared errors against the true rates, in thousandths, and how much better than the mean, with intervals over problems."""
    prompt = CriticPrompt.read("miniature")
    rates = [prompt.parse(t.answer) for t in held_out]
    constant = mean(prompt.parse(t.answer) for t in traces)
    names = [t.state.problem for t in held_out]

    def errors(values) -> list[float]:
        """By problem."""
        of: dict[str, list[float]] = {}
        for name, value, rate in zip(names, values, rates, strict=True):
            of.setdefault(name, []).append(1000 * ((0.0 if math.isnan(value) else value) - rate) ** 2)
        return [mean(own) for own in of.values()]

    def cell(values) -> str:
        own = errors(values)
        gain = paired_bootstrap(errors([constant] * len(rates)), own)
        return f"{mean(own):.1f} | {gain.mean:+.1f} ({gain.lower:+.1f} to {gain.upper:+.1f})"

    noise = 1000 * mean(rate * (1 - rate) / (samples - 1) for rate in rates)
    lines = [
        f"{len(held_out)} states of {len(set(names))} held-out sums, of which the mean is {1000 * mean((constant - r) ** 2 for r in rates):.1f} "
        f"off; {noise:.1f} of that is noise of the rates, estimated by {samples} continuations.",
        "",
        "| critic | parameters | squared error / 1000 | minus that of the mean | cannot be read | calculations right | terms right |",
        "| --- |" + " ---: |" * 6,
    ]
    for size, own in found.items():
        million = f"{own['parameters'] / 1e6:.1f}M"
        share = mean(math.isnan(v) for v in own["values"])
        rest = f"{share:.3f} | {own['calculations right']:.3f} | {own['terms right']:.3f}"
        lines += [f"| {size}, in words | {million} | {cell(own['values'])} | {rest} |"]
        share = mean(math.isnan(v) for v in own["behind"])
        lines += [f"| {size}, behind the oracle's reason | | {cell(own['behind'])} | {share:.3f} | | |"]
        lines += [f"| {size}, value head | | {cell(own['head'])} | | | |"]
    return lines


# The values of three critics -----------------------------------------------------------------------------------------


def judge_values(seed: int, args) -> dict[str, dict[str, dict[str, Any]]]:
    """Train the critics of a seed about a policy that does not learn, and measure them: critic -> domain -> measures."""
    first, steps = warm_start(f"{TASK}/tiny", seed=seed), args.value_steps
    found_by: dict[str, Callable[[list[dict]], list[list[float]]]] = {}
    for arm in ARMS:
        if arm == "GRPO":  # has no values
            continue
        settings = settings_of(arm, args.work_dir) | {"seed": seed, "max_steps": steps}
        settings |= {"save_strategy": "steps", "save_steps": steps}
        settings |= {key: steps for key in ("critic_warmup_steps", "critic_pretraining_steps") if key in settings}
        directory = args.work_dir / "values" / f"seed-{seed}" / file_name(arm)
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
    """Means over seeds; the Brier score also against the mean's, with an interval over all problems of all seeds."""
    columns = ["reward", "brier", "explained_variance", *(f"top 1 of {m}" for m in critics.CANDIDATES), "unparsed"]
    lines = []
    for task, domain in DOMAINS.items():
        sizes = ", ".join(
            f"{f['the mean'][task]['right']} of {f['the mean'][task]['prefixes'] // len(critics.PLACES)}"
            for f in found
        )
        lines += [
            "",
            f"{domain}: completions that are right, by seed: {sizes}; {len(critics.PLACES)} prefixes of each.",
            "",
        ]
        lines += [
            f"| critic | {' | '.join(columns)} | brier minus the mean's |",
            "| --- |" + " ---: |" * (len(columns) + 1),
        ]
        for name in found[0]:
            cells = [f"{mean(f[name][task][column] for f in found):.3f}" for column in columns]
            pair = ([error for f in found for error in f[n][task]["errors"]] for n in ("the mean", name))
            gain = paired_bootstrap(*pair)
            lines.append(
                f"| {name} | {' | '.join(cells)} | {gain.mean:+.3f} ({gain.lower:+.3f} to {gain.upper:+.3f}) |"
            )
    return lines


# The policies --------------------------------------------------------------------------------------------------------


def run_arm(cell: Cell, seed: int, options: Options, file: Path) -> None:
    """Run a cell, and write down the seconds of a core that each generation took: those of the clock times the share that this
    process had of one."""
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
    file.write_text(json.dumps(known) + "\n")


def read_arms(options: Options, work: Path, file: Path) -> dict[str, dict[int, dict[str, Any]]]:
    """Arm -> seed -> counts, seconds of a core at the end of each generation, and its reward."""
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
    """Mean reward of the last generations that ended by then."""
    early = [reward for reward, end in zip(run["rewards"], run["ends"], strict=True) if end <= seconds + 0.01]
    return mean(early[-LAST:]) if early else math.nan


def interval(values: list[float]) -> str:
    """Mean and half of Student's 95 % interval over seeds."""
    half = f" ± {T_95[len(values)] * stdev(values) / len(values) ** 0.5:.1f}" if len(values) in T_95 else ""
    return f"{mean(values):+.1f}{half}"


def table_of_arms(found: dict[str, dict[int, dict[str, Any]]]) -> list[str]:
    """By seed: right completions as counts, seconds of a core, and the reward at the end and at the seconds at which the slowest arm
    without a critic that writes ends; then each arm against PPO over the seeds that both have."""
    baselines = [runs for arm, runs in found.items() if not arm.startswith("GenAC")]
    lines = [
        f"| arm | seed | right / drawn, {', '.join(DOMAINS.values())} | seconds | last reward | reward at equal seconds |",
        "| --- |" + " ---: |" * 5,
    ]
    for arm, runs in found.items():
        for seed, run in runs.items():
            end = max((own[seed]["ends"][-1] for own in baselines if seed in own), default=math.nan)
            counts = ", ".join(f"{c} / {n}" for c, n in run["counts"].values())
            lines.append(
                f"| {arm} | {seed} | {counts} | {run['ends'][-1]:.0f} | {at(run, math.inf):.3f} | {at(run, end):.3f} |"
            )
    lines += ["", "| arm | pass@1, % | minus PPO | times PPO's seconds |", "| --- |" + " ---: |" * 3]
    for arm, runs in found.items():
        pairs = [(run, found["PPO"][seed]) for seed, run in runs.items() if seed in found.get("PPO", {})]
        difference = "" if arm == "PPO" or not pairs else _difference(pairs)
        ratio = mean(own["ends"][-1] / other["ends"][-1] for own, other in pairs) if pairs else math.nan
        rates = mean(100 * mean(run["problems"]) for run in runs.values())
        lines.append(f"| {arm} | {rates:.1f} | {difference} | {ratio:.1f} |")
    return lines


def _difference(pairs: list[tuple[dict, dict]]) -> str:
    """Over seeds, or of one seed over problems."""
    if len(pairs) > 1:
        return interval([100 * (mean(own["problems"]) - mean(other["problems"])) for own, other in pairs])
    ((own, other),) = pairs
    gain = paired_bootstrap([100 * x for x in other["problems"]], [100 * x for x in own["problems"]])
    return f"{gain.mean:+.1f} ({gain.lower:+.1f} to {gain.upper:+.1f}, problems)"


def draw(found: dict[str, dict[int, dict[str, Any]]], path: Path) -> None:
    """Reward over generations and over seconds of a core, mean over five generations; a line for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True, layout="constrained")
    for k, (arm, runs) in enumerate(found.items()):
        for i, run in enumerate(runs.values()):
            smooth = [mean(run["rewards"][max(0, t - LAST + 1) : t + 1]) for t in range(len(run["rewards"]))]
            style = {"color": f"C{k}", "alpha": 0.8, "linewidth": 1.2, "label": None if i else arm}
            axes[0].plot(range(1, len(smooth) + 1), smooth, **style)
            axes[1].plot(run["ends"], smooth, **style)
    axes[0].set(xlabel="generations of 256 completions", ylabel="mean reward")
    axes[1].set(xlabel="seconds of a core", xscale="log")
    axes[0].legend(fontsize=8)
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def ladder(args, traces: Path) -> None:
    held_out = make_traces(args.work_dir / "held_out.jsonl", args.seeds[:1], args.problems, "test", 2 * args.samples)
    known = read_traces(traces, CriticPrompt.read("miniature"))
    file = args.results_dir / "ladder.json"
    for size in args.sizes:
        found = json.loads(file.read_text()) if file.is_file() else {}
        if size not in found:
            teach(args.work_dir, size, "miniature", traces, args.seeds[0], args.max_steps)
            found[size] = judge_size(size, args.seeds[0], args.work_dir, known, held_out)
            file.write_text(json.dumps(found) + "\n")
        found = {name: found[name] for name in MODEL_SIZES if name in found}
        publish(args.results_dir / "ladder.md", table_of_ladder(found, known, held_out, 2 * args.samples))


def publish(file: Path, lines: list[str]) -> None:
    file.write_text("\n".join(lines).strip() + "\n")
    print("\n".join(["", *lines]), flush=True)


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
                file.write_text(json.dumps(judge_values(seed, args)) + "\n")
            judged.append(json.loads(file.read_text()))
            publish(args.results_dir / "values.md", table_of_values(judged))
        for arm in ARMS if "arms" in args.stages else ():
            run_arm(cell_of(arm, args.work_dir), seed, options, args.results_dir / "seconds.json")
            found = read_arms(options, args.work_dir, args.results_dir / "seconds.json")
            publish(args.results_dir / "arms.md", table_of_arms(found))
            draw(found, args.results_dir / "genac.png")


if __name__ == "__main__":
    main()
