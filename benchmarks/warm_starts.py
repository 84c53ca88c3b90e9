"""How near the warm starts of the miniature come to their target, whatever the seed and the number of threads.

Makes each warm start anew and draws 8 completions for every held-out problem, with random streams that the calibration
has not used. Prints a table in Markdown; what is finished is kept in --work_dir.

    python -m benchmarks.warm_starts
"""

import argparse
import json
import os
from pathlib import Path

from transformers import AutoModelForCausalLM

from pacs_trl.data.tasks import problems
from pacs_trl.miniature.tokenizer import build_tokenizer
from pacs_trl.miniature.warm_start import measure, warm_start


NUM_SAMPLES = 8
CHECK_SEED = 7


def check(model: str, seed: int, threads: int, work_dir: Path) -> dict[str, float]:
    """Target, measured accuracy and optimizer steps of one warm start."""
    file = work_dir / f"{model.replace('/', '-')}-{seed}-{threads}.json"
    if not file.is_file():
        os.environ["OMP_NUM_THREADS"] = str(threads)  # of the process that makes it
        directory = warm_start(model, seed=seed, cache_dir=work_dir / f"threads-{threads}")
        made = json.loads((directory / "warm_start.json").read_text())
        policy = AutoModelForCausalLM.from_pretrained(directory)
        rows = problems(model.split("/")[0], "test")
        accuracy = measure(policy, build_tokenizer(), rows, num_samples=NUM_SAMPLES, seed=CHECK_SEED)
        found = {"target": made["settings"]["target_accuracy"], "accuracy": accuracy, "steps": made["steps"]}
        file.write_text(json.dumps(found) + "\n")
    return json.loads(file.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    tasks, sizes = ("addition", "equation", "arithmetic"), ("tiny", "small")
    parser.add_argument("--models", nargs="+", default=[f"{task}/{size}" for task in tasks for size in sizes])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--work_dir", type=Path, default=Path("outputs/warm_starts"))
    args = parser.parse_args()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    columns = [
        f"seed {seed}, {threads} thread{'s' * (threads > 1)}" for seed in args.seeds for threads in args.threads
    ]
    print(f"| model | target | {' | '.join(columns)} |\n| --- | ---: |{' ---: |' * len(columns)}", flush=True)
    furthest = 0.0
    for model in args.models:
        row = [check(model, seed, threads, args.work_dir) for seed in args.seeds for threads in args.threads]
        furthest = max(furthest, *(abs(found["accuracy"] - found["target"]) for found in row))
        cells = [f"{100 * found['accuracy']:.1f} ({found['steps']} steps)" for found in row]
        print(f"| {model} | {100 * row[0]['target']:.1f} | {' | '.join(cells)} |", flush=True)
    print(f"\nFurthest from its target: {100 * furthest:.2f} points.")


if __name__ == "__main__":
    main()
