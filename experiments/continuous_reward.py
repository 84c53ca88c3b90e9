"""Reward at an equal number of completions with rollouts 0 to 4 optimizer steps late, as of continuous rollouts.

    python -m experiments.miniature.files addition
    OMP_NUM_THREADS=1 python -m experiments.continuous_reward outputs/continuous_reward.jsonl

Two-digit addition on the miniature. The weights from before the last s optimizer steps generate, and their log-probs
are the reference of PACS and the denominator of GRPO's ratios: what continuous rollouts do in a run in which every
group is as late as `max_staleness: s` allows. Generation and training take turns in one process, so that all runs are
repeatable and timing plays no part. One line of JSON per run; runs that the file has are not repeated. The table has
pass@1 on held-out problems after the last step, and paired differences to s = 0 with 95 % intervals over seeds.
"""

import argparse
import json
import statistics
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers.trainer_callback import PrinterCallback

from experiments.miniature.files import data_file, model_directory
from experiments.miniature.tasks import Split
from pacs_trl import GRPOConfig, GRPOTrainer, PACSConfig, PACSTrainer
from pacs_trl.report.tables import to_markdown
from pacs_trl.rewards import math_reward
from pacs_trl.rollouts.sources import GenerationNow


# 97.5 % quantiles of Student's distribution by the number of seeds.
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
METHODS: dict[str, tuple[Any, Any]] = {"pacs": (PACSTrainer, PACSConfig), "grpo": (GRPOTrainer, GRPOConfig)}


class LateGeneration(GenerationNow):
    """Generates each batch when it is taken, with the weights from before the last `staleness` optimizer steps."""

    def __init__(self, trainer: Any, staleness: int):
        super().__init__(self._generate_late)
        self.trainer = trainer
        self.weights: deque[dict[str, torch.Tensor]] = deque(maxlen=staleness + 1)  # the oldest ones generate

    def _generate_late(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> dict[str, Any]:
        trainer, model = self.trainer, self.trainer.model
        self.weights.append({name: weight.clone() for name, weight in model.state_dict().items()})
        model.load_state_dict(self.weights[0])
        output = trainer._generate_now(prompt_ids, *args, **kwargs)
        ids = [list(completion) for completion in output["completion_ids"]]
        with torch.no_grad():
            logps = trainer.forward_pass.compute_logps(model, prompt_ids, ids).logps
        model.load_state_dict(self.weights[-1])
        return {"completion_ids": ids, "logprobs": [values.tolist() for values in logps]}


def problems(split: Split) -> Dataset:
    """Return the problems of a split, as prompts with solutions."""
    rows = [json.loads(line) for line in data_file("addition", split).read_text().splitlines()]
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": row["problem"]}], "solution": row["answer"]} for row in rows]
    )


def run(method: str, staleness: int, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Train once, and return settings, pass@1, and the mean reward of the last quarter of the steps."""
    trainer_class, config_class = METHODS[method]
    with tempfile.TemporaryDirectory() as directory:
        config = config_class(
            directory,
            use_cpu=True,
            bf16=False,
            rollout_lag=1,  # log-probs of the policy that generated are kept; the source above decides how late it is
            model_init_kwargs={"dtype": "float32"},
            num_generations=8,
            num_generations_eval=args.eval_samples,
            per_device_train_batch_size=args.completions,
            per_device_eval_batch_size=args.eval_samples * args.eval_prompts,
            gradient_accumulation_steps=1,
            max_completion_length=32,
            fast_generation=True,
            learning_rate=args.learning_rate,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=5,
            max_grad_norm=0.0,
            max_steps=args.steps,
            seed=seed,
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = trainer_class(
            str(model_directory("addition")),
            math_reward,
            args=config,
            train_dataset=problems("train"),
            eval_dataset=problems("test").select(range(args.eval_prompts)),
        )
        trainer._create_source = lambda: LateGeneration(trainer, staleness)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        reward = trainer.evaluate()["eval_reward"]
    rewards = [log["reward"] for log in trainer.state.log_history if "reward" in log]
    last = rewards[-max(1, args.steps // 4) :]
    return {"method": method, "staleness": staleness, "seed": seed, "pass@1": reward, "reward": statistics.fmean(last)}


def difference(rows: dict[int, float], base: dict[int, float]) -> str:
    """Return the mean paired difference in points, with half of its 95 % interval over seeds."""
    values = [100 * (rows[seed] - base[seed]) for seed in sorted(rows.keys() & base.keys())]
    if len(values) not in STUDENT:
        return ""
    half = STUDENT[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.fmean(values):+.1f} ± {half:.1f}"


def table(runs: list[dict[str, Any]]) -> str:
    """Return the results of all runs as a Markdown table."""
    rows = []
    for method in METHODS:
        by_staleness: dict[int, dict[int, float]] = {}
        for each in runs:
            if each["method"] == method:
                by_staleness.setdefault(each["staleness"], {})[each["seed"]] = each["pass@1"]
        for staleness, values in sorted(by_staleness.items()):
            seeds = ", ".join(f"{100 * values[seed]:.1f}" for seed in sorted(values))
            minus = difference(values, by_staleness.get(0, {})) if staleness else ""
            rows.append([method, str(staleness), f"{100 * statistics.fmean(values.values()):.1f} ({seeds})", minus])
    return to_markdown(["method", "steps late", "pass@1, %, by seed", "minus 0"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="JSON lines, which later calls continue")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--completions", type=int, default=128, help="per optimizer step")
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--eval_prompts", type=int, default=256)
    parser.add_argument("--eval_samples", type=int, default=4, help="completions of each held-out problem")
    args = parser.parse_args()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    runs = [json.loads(line) for line in args.output.read_text().splitlines()] if args.output.is_file() else []
    finished = {(each["method"], each["staleness"], each["seed"]) for each in runs}
    for seed in args.seeds:
        for method in args.methods:
            for staleness in args.staleness:
                if (method, staleness, seed) in finished:
                    continue
                runs.append(run(method, staleness, seed, args))
                with args.output.open("a") as file:
                    file.write(json.dumps(runs[-1]) + "\n")
    print(table(runs))


if __name__ == "__main__":
    main()
