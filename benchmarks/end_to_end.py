"""Training time to a target reward: PACS, GRPO with the exact update and with TRL's (`trl_grpo`), PPO, and TRL's
`GRPOTrainer` (`trl`) and `RLOOTrainer` (`trl_rloo`), with transformers or vLLM generation.

    OMP_NUM_THREADS=1 python -m benchmarks.end_to_end --engine transformers
    OMP_NUM_THREADS=1 python -m benchmarks.end_to_end --engine vllm    # after `make env-vllm`
    OMP_NUM_THREADS=1 python -m benchmarks.end_to_end --methods grpo trl_grpo trl --max_steps 4 \\
        --config recipes/smollm2-135m/sums_grpo.yaml    # after `make model`

All methods use one recipe, by default recipes/miniature/pacs.yaml, and its initial weights. Times are CPU seconds of
the process that trains and generates, which other load on the machine hardly affects; verifier workers are excluded.
On a GPU they are wall-clock seconds; kernels run asynchronously, so the shares of the parts are approximate. A method
reaches the target when the mean reward of the last `--window` generation batches is at least `--target`.
"""

import argparse
import dataclasses
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import trl

from benchmarks.shared_engine import share_engine
from pacs_trl.rollouts import rollout_trainer
from pacs_trl.rollouts.timing import PARTS
from pacs_trl.train import main as train


RECIPE = Path(__file__).parents[1] / "recipes/miniature/pacs.yaml"


class TimedParts:
    """The parts of a step of TRL's trainers, timed as those of this package."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.timer = rollout_trainer.StepTimer(lambda name, value: self._metrics["train"][name].append(value))
        self.add_callback(self.timer)
        if self.use_vllm:
            sync_weights = self.vllm_generation.sync_weights
            self.vllm_generation.sync_weights = lambda: self._timed("weight_sync", sync_weights)

    def _timed(self, part, function, *args, **kwargs):
        with self.timer.part(part):
            return function(*args, **kwargs)

    def training_step(self, *args, **kwargs):
        return self._timed("update", super().training_step, *args, **kwargs)

    def _generate_and_score_completions(self, inputs):
        return self._timed("other", super()._generate_and_score_completions, inputs)

    def _generate(self, prompts):
        return self._timed("generation", super()._generate, prompts)

    def _calculate_rewards(self, *args, **kwargs):
        return self._timed("verification", super()._calculate_rewards, *args, **kwargs)

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        part = "update" if torch.is_grad_enabled() else "log_probs"
        return self._timed(part, super()._get_per_token_logps_and_entropies, *args, **kwargs)


class TRLTrainer(TimedParts, trl.GRPOTrainer):
    """TRL's GRPO."""


class TRLsRLOOTrainer(TimedParts, trl.RLOOTrainer):
    """TRL's RLOO, with those settings of the recipe that `trl.RLOOConfig` has."""

    def __init__(self, *, args, tools, rollout_func, environment_factory, **kwargs):
        names = {field.name for field in dataclasses.fields(trl.RLOOConfig) if field.init} - {"generation_batch_size"}
        settings = {name: value for name, value in vars(args).items() if name in names}
        super().__init__(args=trl.RLOOConfig(**settings), **kwargs)


# Trainers that are used instead of those of a method, and the method whose settings they get.
TRAINERS = {
    "trl_grpo": (rollout_trainer.RolloutTrainer, "grpo"),
    "trl": (TRLTrainer, "grpo"),
    "trl_rloo": (TRLsRLOOTrainer, "rloo"),
}


def history(method: str, directory: Path, settings: list[str]) -> list[dict]:
    """Train with a method, and return the log of each optimizer step."""
    trainer_class, method_of_settings = TRAINERS.get(method, (None, method))
    run = ["--method", method_of_settings, "--output_dir", str(directory / method)]
    trainer = train([*settings, *run], trainer_class)
    return [log for log in trainer.state.log_history if "time/total" in log]


def steps_to(target: float, window: int, logs: list[dict]) -> int | None:
    """Return the number of optimizer steps until the mean of `window` rewards reaches the target, or `None`."""
    rewards = [log["reward"] for log in logs]
    means = (statistics.mean(rewards[n - window : n]) for n in range(window, len(rewards) + 1))
    return next((n for n, mean in enumerate(means, window) if mean >= target), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", type=Path, default=RECIPE)
    parser.add_argument("--engine", choices=["transformers", "vllm"], default="transformers")
    parser.add_argument("--methods", nargs="+", default=["pacs", "grpo", "trl_grpo", "ppo"])
    parser.add_argument("--target", type=float, default=0.3)
    parser.add_argument("--window", type=int, default=4)
    parser.add_argument("--max_steps", type=int, default=60)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        patch.object(rollout_trainer, "StepTimer", partial(rollout_trainer.StepTimer, clock=time.process_time)).start()
    settings = ["--config", str(args.config), "--max_steps", str(args.max_steps)]
    if args.engine == "vllm":
        share_engine(device, "float32")
        settings += ["--use_vllm", "true", "--vllm_mode", "colocate", "--vllm_max_model_length", "128"]
    logs_by_method = {}
    with tempfile.TemporaryDirectory() as directory:
        for method in args.methods:
            logs_by_method[method] = history(method, Path(directory), settings)
    heads = ["steps to " + format(args.target, ".0%"), "seconds", "seconds per step (median)", *PARTS]
    print(f"\n| method, {args.engine} | {' | '.join(heads)} |")
    print("| --- |" + " ---: |" * len(heads))
    for method, logs in logs_by_method.items():
        steps = steps_to(args.target, args.window, logs)
        total = sum(log["time/total"] for log in logs[:steps])
        shares = [f"{sum(log[f'time/{part}'] for log in logs[:steps]) / total:.0%}" for part in PARTS]
        reached = steps or f"not in {args.max_steps}"
        step_seconds = statistics.median(log["time/total"] for log in logs)
        print(f"| {method} | {reached} | {total:.1f} | {step_seconds:.2f} | {' | '.join(shares)} |")


if __name__ == "__main__":
    main()
