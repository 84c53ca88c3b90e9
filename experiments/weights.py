"""Do STEER, VERL, RLPR and corrected labels do what they are for? `python -m experiments.weights --seeds 0 1 2`

The arms of a seed share their warm start (sums, the smaller model of the tables) and draw 60 generations of 256 completions, four updates
each. The learning rate of a method is the better of two on a seed that is not reported, with the same budget: 10 runs, and 30 with
three seeds. What decides: STEER, entropy kept and pass@k at equal pass@1; VERL, whether its metrics move apart from the entropy, and
gain or none; RLPR, how much of the verifier's gain comes without it; noisy verdicts (10 and 20 % of both kinds flipped), pass@1 with and
without correction, and of GRPO. Restartable: finished arms are taken from `--results_dir`, an interrupted one goes on from its last
checkpoint. Not run yet.
"""

import argparse
import hashlib
from pathlib import Path
from statistics import mean, stdev

from pacs_trl.report.inputs import read_log_history
from pacs_trl.reproduce.cells import Options, run_cell
from pacs_trl.reproduce.records import Records
from pacs_trl.reproduce.tables import Cell
from pacs_trl.rewards import math_reward


SAVED = {"save_strategy": "steps", "save_steps": 20, "save_total_limit": 1, "max_steps": 240}
RATES, SWEPT_SEED = (1.0e-4, 3.0e-4), 9
METHODS = {  # whose learning rate is swept
    "PACS": {},
    "GRPO": {},
    "STEER": {"token_weighting": "steer"},
    "VERL": {"row_weighting": "verl", "hidden_state_stride": 10},
    "RLPR": {"reward_funcs": "probability_reward", "spread_filter": 0.5},
}


def _noisy(share: str, **settings) -> dict:
    return {"reward_funcs": f"experiments.weights.flipped_{share}", **settings}


def _corrected(share: str) -> dict:
    rates = {"false_positive": int(share) / 100, "false_negative": int(share) / 100}
    return _noisy(share, class_weighting="none", label_noise=rates)


ARMS: dict[str, tuple[str, dict]] = {name: (name, {}) for name in METHODS if name != "GRPO"} | {  # method, settings
    f"{name}, {share} % flipped": arm
    for share in ("10", "20")
    for name, arm in {
        "PACS": ("PACS", _noisy(share, class_weighting="none")),
        "PACS, corrected": ("PACS", _corrected(share)),
        "GRPO": ("GRPO", _noisy(share)),
    }.items()
}
KS = (1, 8, 64)


def _flipped(share: float, completions, prompts, trainer_state, **kwargs) -> list[float | None]:
    """Verdicts of `math_reward`, of which so many are wrong: which ones is a function of step, prompt, place and text."""
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
    name = f"{arm}_{rate:g}".lower().replace(" %", "").replace(",", "").replace(" ", "_")
    recipe = f"miniature/twin-4b/{'grpo' if method == 'GRPO' else 'pacs'}"
    return Cell(
        arm, recipe, settings=METHODS[method] | settings | SAVED | {"learning_rate": rate}, name=f"weights/{name}"
    )


def pass_at(run, k: int) -> float | None:
    """Mean over the benchmarks of the miniature."""
    values = [b["pass_at_k"].get(str(k)) for b in run.results["benchmarks"].values()]
    return None if None in values else mean(value["value"] for value in values)


def swept_rates(options: Options, methods) -> dict[str, float]:
    """The learning rate of each method whose sweep is done: the one with the higher pass@1."""
    records, found = Records(options.results_dir), {}
    for method in methods:
        runs = {rate: records.runs(cell_of(method, method, {}, rate).run, method) for rate in RATES}
        scores = {rate: pass_at(run, 1) for rate, own in runs.items() for run in own if run.seed == SWEPT_SEED}
        if len(scores) == len(RATES):
            found[method] = max(scores, key=lambda rate: scores[rate])
    return found


def report(options: Options, rates: dict[str, float]) -> list[str]:
    """A row for each arm: mean and standard deviation over seeds, pass@k in percent, entropy of the last ten steps in nats."""
    records = Records(options.results_dir)
    lines = [
        f"| | rate | {' | '.join(f'pass@{k}' for k in KS)} | entropy |",
        "| --- | ---: |" + " ---: |" * (len(KS) + 1),
    ]
    for arm, (method, settings) in ARMS.items():
        if method not in rates:
            continue
        cell = cell_of(arm, method, settings, rates[method])
        runs = [run for run in records.runs(cell.run, arm) if run.seed in options.seeds]
        if not runs:
            continue
        columns = [[100 * value for run in runs if (value := pass_at(run, k)) is not None] for k in KS]
        files = [cell.directory(options.work_dir, run.seed) / "model" / "trainer_state.json" for run in runs]
        histories = [[e["entropy"] for e in read_log_history(file) if "entropy" in e] for file in files]
        columns.append([mean(entropies[-10:]) for entropies in histories])
        cells = [f"{mean(c):.2f} ± {stdev(c) if len(c) > 1 else 0:.2f}" if c else "-" for c in columns]
        lines.append(f"| {arm} | {rates[method]:g} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), metavar="ARM")
    parser.add_argument("--results_dir", type=Path, default=Path("outputs/weights/results"))
    parser.add_argument("--work_dir", type=Path, default=Path("outputs/weights/runs"))
    parser.add_argument("--max_steps", type=int, help="of every arm, to try things out")
    args = parser.parse_args()
    sizes = {} if args.max_steps is None else {"num_samples": 8, "max_problems": 4, "warm_start_steps": 2}
    seeds = (*args.seeds, SWEPT_SEED)
    options = Options(seeds, args.max_steps, results_dir=args.results_dir, work_dir=args.work_dir, **sizes)
    methods = dict.fromkeys(ARMS[arm][0] for arm in args.arms)
    for method in methods:
        for rate in RATES:
            run_cell(cell_of(method, method, {}, rate), SWEPT_SEED, options)
    rates = swept_rates(options, methods)
    options = options._replace(seeds=tuple(args.seeds))
    for seed in args.seeds:
        for arm in args.arms:
            method, settings = ARMS[arm]
            run_cell(cell_of(arm, method, settings, rates[method]), seed, options)
            print("\n".join(report(options, rates)), flush=True)


if __name__ == "__main__":
    main()
