"""STEER, process labels, VERL, RLPR, and noisy verifiers on miniature sums.

`python -m experiments.weights --seeds 0 1 2`

Sums of four terms, 0.1 million parameters. The arms of a seed share their warm start, generate 40 times 256
completions with four updates each, and are measured on 64 held-out sums with 64 samples each. The learning rate of a
method is the better of two on an unreported seed (6 runs, and 27 with three seeds), or `--rate` for all. Compared are:
STEER, entropy and pass@k at equal pass@1; process labels against outcome labels; PACS and GRPO with 10 and 20 % of
both kinds of labels flipped; VERL, its metrics against the entropy, and its gain; RLPR, the share of the verifier's
gain without a verifier. Finished arms are read from `--results_dir`, and an interrupted arm resumes. Writes a table
and a figure.
"""

import hashlib
import math
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from experiments.bootstrap import paired_bootstrap
from experiments.paper.cells import Options, run_cell
from experiments.paper.records import Records
from experiments.paper.render import Cell
from experiments.studies import arms_parser, markdown, options_of, over_seeds, publish, run_name, saved
from pacs_trl.rewards import math_reward


TASK = {
    "model_name_or_path": "miniature/terms_4/tiny",
    "dataset_name": "miniature/terms_4",
    "max_completion_length": 48,
}
SIZES = {"num_samples": 64, "max_problems": 64, "benchmarks": "miniature/terms_4"}
RATES, SWEPT_SEED = (1.0e-4, 3.0e-4), 9
# whose learning rate is swept; the arms that are not here scale gradients of PACS by 0.5 to 1.5, and take its rate
METHODS = {
    "PACS": {},
    "GRPO": {},
    "RLPR": {"method": "rlpr", "reward_funcs": "pacs_trl.experimental.rlpr.probability_reward", "spread_filter": 0.5},
}


def _noisy(share: str, **settings) -> dict:
    return {"reward_funcs": f"experiments.weights.flipped_{share}", **settings}


STEPS = {"method": "process_labels", "reward_funcs": "pacs_trl.miniature.step_reward.step_reward"}
NOISY = {
    share: {
        f"PACS, {share} % flipped": ("PACS", _noisy(share, class_weighting="none")),
        f"GRPO, {share} % flipped": ("GRPO", _noisy(share)),
    }
    for share in ("20", "10")
}
ARMS: dict[str, tuple[str, dict]] = {  # method, settings; what tells most comes first
    "warm start": ("none", {}),
    **NOISY["20"],
    "PACS": ("PACS", {}),
    "PACS, labels of steps": ("PACS", STEPS),
    "STEER": ("PACS", {"method": "steer"}),
    "VERL": ("PACS", {"method": "verl", "hidden_state_stride": 10}),
    "RLPR": ("RLPR", {}),
    **NOISY["10"],
}
KS = (1, 8, 64)


def _flipped(share: float, completions, prompts, trainer_state, **kwargs) -> list[float | None]:
    """Labels of `math_reward`, a share of them flipped as a function of step, prompt, position, and text."""
    verdicts = math_reward(completions, **kwargs)
    found: list[float | None] = []
    for i, (verdict, prompt, completion) in enumerate(zip(verdicts, prompts, completions, strict=True)):
        text = repr((trainer_state.global_step, i, prompt, completion))
        is_wrong = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "little") / 2**48 < share
        found.append(1.0 - verdict if verdict is not None and is_wrong else verdict)
    return found


def flipped_10(completions, prompts, trainer_state, **kwargs) -> list[float | None]:
    return _flipped(0.1, completions, prompts, trainer_state, **kwargs)


def flipped_20(completions, prompts, trainer_state, **kwargs) -> list[float | None]:
    return _flipped(0.2, completions, prompts, trainer_state, **kwargs)


def cell_of(arm: str, method: str, settings: dict, rate: float) -> Cell:
    if method == "none":
        return Cell(arm, "miniature/sums-0.1m/pacs", trained=False, settings=TASK, name="weights/warm_start")
    name = f"{run_name(arm)}_{rate:g}"
    recipe = f"miniature/sums-0.1m/{'grpo' if method == 'GRPO' else 'pacs'}"
    settings = METHODS[method] | settings | TASK | saved(20) | {"max_steps": 160, "learning_rate": rate}
    return Cell(arm, recipe, settings=settings, name=f"weights/{name}")


class Measured(NamedTuple):
    """pass@k for each of `KS` in percent (NaN with too few samples), mean entropy of the last ten steps in nats, and
    pass@1 of each problem in percent."""

    values: list[float]
    problems: list[float]


def measured(run) -> Measured:
    (benchmark,) = run.results["benchmarks"].values()
    entropies = [entry["entropy"] for entry in run.training["log_history"]] if run.training else [math.nan]
    passes = [100 * found["value"] if (found := benchmark["pass_at_k"].get(str(k))) else math.nan for k in KS]
    problems = [100 * problem["c"] / problem["n"] for problem in benchmark["problems"]]
    return Measured([*passes, mean(entropies[-10:])], problems)


def swept_rates(options: Options, methods) -> dict[str, float]:
    """Return the learning rate with the higher pass@1 for each method whose sweep is finished."""
    records, found = Records(options.results_dir), {}
    for method in methods:
        runs = {rate: records.runs(cell_of(method, method, {}, rate).run, method) for rate in RATES}
        scores = {rate: measured(run).values[0] for rate, own in runs.items() for run in own if run.seed == SWEPT_SEED}
        if len(scores) == len(RATES):
            found[method] = max(scores, key=lambda rate: scores[rate])
    return found


def finished(options: Options, rates: dict[str, float]) -> dict[str, dict[int, Measured]]:
    """Return the finished seeds of each arm."""
    records, found = Records(options.results_dir), {}
    for arm, (method, settings) in ARMS.items():
        runs = records.runs(cell_of(arm, method, settings, rates[method]).run, arm) if method in rates else []
        found[arm] = {
            run.seed: measured(run) for run in sorted(runs, key=lambda run: run.seed) if run.seed in options.seeds
        }
    return found


def report(found: dict[str, dict[int, Measured]]) -> list[str]:
    """Return a row for each arm: its values by seed, and the difference at k = 1 with a 95 % interval."""
    names = [*(f"pass@{k}" for k in KS), "entropy"]
    rows = []
    for arm, runs in found.items():
        if not runs:
            continue
        columns = zip(*(run.values for run in runs.values()), strict=True)
        cells = [
            "-"
            if math.isnan(mean(c))
            else f"{mean(c):.2f}" + (f" ({', '.join(f'{x:.2f}' for x in c)})" if len(c) > 1 else "")
            for c in columns
        ]
        other = f"PACS{arm[arm.index(',') :]}" if "%" in arm else "PACS"
        pairs = [(runs[s], found[other][s]) for s in runs if s in found.get(other, {})]
        difference = f"{other}: {interval(pairs)}" if pairs and arm not in (other, "warm start") else ""
        rows.append([arm, ", ".join(map(str, runs)), *cells, difference])
    return markdown(["", "seeds", *names, "pass@1 minus"], rows, 2)


def interval(pairs: list[tuple[Measured, Measured]]) -> str:
    """Return the mean difference at k = 1 with Student's 95 % interval over seeds; with one seed a bootstrap over
    problems."""
    if len(pairs) == 1:
        candidate, baseline = pairs[0]
        difference = paired_bootstrap(baseline.problems, candidate.problems)
        return f"{difference.mean:+.2f} ({difference.lower:+.2f} to {difference.upper:+.2f}, problems)"
    values = [candidate.values[0] - baseline.values[0] for candidate, baseline in pairs]
    return "{:+.2f} ± {:.2f}".format(*over_seeds(values))


def draw(found: dict[str, dict[int, Measured]], path: Path) -> None:
    """Plot pass@1, pass@64, and entropy, one point per seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from experiments.figures import save

    arms = [arm for arm, runs in found.items() if runs][::-1]
    figure, axes = plt.subplots(1, 3, figsize=(10, 0.9 + 0.35 * len(arms)), sharey=True, layout="constrained")
    shown = ((0, "pass@1, %"), (len(KS) - 1, f"pass@{KS[-1]}, %"), (len(KS), "entropy at the end, nats"))
    for axis, (column, title) in zip(axes, shown, strict=True):
        for place, arm in enumerate(arms):
            points = [run.values[column] for run in found[arm].values()]
            axis.plot(points, [place] * len(points), "o", color="tab:blue", alpha=0.6, markersize=5)
            axis.plot([mean(points)], [place], "|", color="black", markersize=14, markeredgewidth=2)
        axis.set(title=title, yticks=range(len(arms)), yticklabels=arms)
        axis.grid(axis="x", alpha=0.3)
    save(figure, path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = arms_parser(__doc__, "weights", ARMS)
    parser.add_argument("--rate", type=float, help="learning rate of all arms, instead of the better of two")
    args = parser.parse_args()
    options = options_of(args, **SIZES)
    methods = dict.fromkeys(ARMS[arm][0] for arm in args.arms if arm != "warm start")
    for method in methods if args.rate is None else ():
        for rate in RATES:
            run_cell(cell_of(method, method, {}, rate), SWEPT_SEED, options)
    rates = swept_rates(options, methods) if args.rate is None else dict.fromkeys(methods, args.rate)
    rates["none"] = 0.0
    for seed in args.seeds:
        for arm in args.arms:
            method, settings = ARMS[arm]
            run_cell(cell_of(arm, method, settings, rates[method]), seed, options)
            found = finished(options, rates)
            publish(args.results_dir / "table.md", report(found))
            draw(found, args.results_dir / "weights.png")


if __name__ == "__main__":
    main()
