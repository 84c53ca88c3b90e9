"""Variance over training seeds: repeated training of a cell of the miniature tables from one warm start.

Each run has its own training seed, which determines the prompts and the sampling. All runs share one warm start, and
the evaluation is that of the tables. Prints the mean and standard deviation over training seeds, for comparison with
those over warm starts. Finished runs are kept in --work_dir.

    python -m benchmarks.training_seeds
"""

import argparse
import json
import statistics
from pathlib import Path

from experiments.paper.cells import RECIPES, Options, evaluation_settings
from experiments.paper.render import COMPARED_KS, TWINS
from experiments.paper.runs import start_of, train_once
from pacs_trl.evaluation.arguments import EvaluationArguments
from pacs_trl.evaluation.run import evaluate
from pacs_trl.recipe import read_recipe
from pacs_trl.rewards import shared_verifier


def run(cell: str, warm_start_seed: int, training_seed: int, work_dir: Path) -> dict[str, float]:
    """Train and evaluate a cell, and return pass@k in percent, averaged over the five benchmarks."""
    work = work_dir / cell / f"warm-start-{warm_start_seed}" / f"seed-{training_seed}"
    arguments = ["--config", str(RECIPES / "miniature" / f"{cell}.yaml"), "--seed", str(training_seed)]
    model = work / "model"
    train_once(arguments, start_of(read_recipe(arguments), seed=warm_start_seed), model)
    settings = evaluation_settings(Options())
    settings["benchmarks"] = ",".join(TWINS.values())
    evaluation = EvaluationArguments(model=str(model), output_dir=str(work / "evaluation"), method=cell, **settings)
    found = evaluate(evaluation, shared_verifier(), progress=False)["benchmarks"]
    return {
        str(k): 100 * statistics.fmean(found[name]["pass_at_k"][str(k)]["value"] for name in TWINS.values())
        for k in COMPARED_KS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cells", nargs="+", default=["sums-0.1m/pacs", "sums-0.1m/grpo"])
    parser.add_argument("--warm_start_seed", type=int, default=1)
    parser.add_argument("--training_seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--work_dir", type=Path, default=Path("outputs/training_seeds"))
    args = parser.parse_args()
    print("| cell | training seed | " + " | ".join(f"pass@{k}" for k in COMPARED_KS) + " |")
    print("| --- | --- |" + " ---: |" * len(COMPARED_KS))
    for cell in args.cells:
        runs = {seed: run(cell, args.warm_start_seed, seed, args.work_dir) for seed in args.training_seeds}
        (args.work_dir / f"{cell.replace('/', '-')}.json").write_text(json.dumps(runs, indent=1) + "\n")
        for seed, found in runs.items():
            print(f"| {cell} | {seed} | " + " | ".join(f"{found[str(k)]:.1f}" for k in COMPARED_KS) + " |")
        spread = [[found[str(k)] for found in runs.values()] for k in COMPARED_KS]
        cells = [f"{statistics.fmean(values):.1f} ± {statistics.stdev(values):.1f}" for values in spread]
        print(f"| {cell} | all | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
