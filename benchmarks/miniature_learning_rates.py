"""Learning-rate search for the miniature tables: the same budget for each method, on a training seed that no table
uses (the warm start is that of seed 0).

    python -m benchmarks.miniature_learning_rates            # one core, minutes; continues an interrupted search

PACS, GRPO and PPO are trained with the same rates from one warm start, and compared by the mean reward (fraction of
correct completions at temperature 1) of the last third of the rollouts. The PPO critic always uses 1e-3.
"""

import argparse
from pathlib import Path
from statistics import mean

from experiments.paper.runs import start_of, train_once
from pacs_trl.recipe import read_recipe


RECIPES = Path(__file__).parents[1] / "recipes" / "miniature"
METHODS = ("pacs", "grpo", "ppo")
TRAINING_SEED = 100


def reward_at_the_end(model: str, method: str, rate: float, max_steps: int, work_dir: Path) -> float:
    output_dir = work_dir / f"{model}-{method}-{rate:g}-{max_steps}"
    arguments = ["--config", str(RECIPES / model / f"{method}.yaml"), "--save_strategy", "no"]
    arguments += ["--learning_rate", str(rate), "--max_steps", str(max_steps), "--seed", str(TRAINING_SEED)]
    history = train_once(arguments, start_of(read_recipe(arguments), seed=0), output_dir)
    rewards = [log["reward"] for log in history if "reward" in log]
    return mean(rewards[-(len(rewards) // 3) :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["sums-0.1m", "sums-1m"])
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-5, 1e-4, 3e-4, 1e-3])
    parser.add_argument("--max_steps", type=int, default=60)
    parser.add_argument("--work_dir", type=Path, default=Path("outputs/miniature_learning_rates"))
    args = parser.parse_args()
    print("| model | method | " + " | ".join(f"{rate:g}" for rate in args.rates) + " |")
    print("| --- | --- |" + " ---: |" * len(args.rates))
    for model in args.models:
        for method in METHODS:
            rewards = [reward_at_the_end(model, method, r, args.max_steps, args.work_dir) for r in args.rates]
            print(f"| {model} | {method} | " + " | ".join(f"{reward:.3f}" for reward in rewards) + " |", flush=True)


if __name__ == "__main__":
    main()
