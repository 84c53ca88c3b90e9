"""Asynchronous rollouts on two cores: seconds per generation batch with lag 0, 1, and 2.

    OMP_NUM_THREADS=1 python -m benchmarks.async_rollouts

The trainer is pinned to core 0 and the engine process to core 1, also with lag 0, where they work in turn.
`in process` is lag 0 without an engine process, on core 0 alone (`--threads 2`: on both cores). One run per line of
JSON: the median seconds from one generation batch to the next after the first two, and means of `async/*`.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from typing import Any, Literal

import torch
from datasets import Dataset
from transformers import TrainerCallback

from benchmarks.rollout_engines import QUESTION
from experiments.miniature.model import build_model
from experiments.miniature.tokenizer import build_tokenizer
from pacs_trl import PACSConfig, PACSTrainer
from pacs_trl.rollouts import engine_process
from pacs_trl.rollouts.late_batches import LateBatches


# `rollout_lag` by kind. "0" is the engine process in turn with training, "in process" the trainer's engine.
LAGS: dict[str, Literal[0, 1, 2]] = {"0": 0, "1": 1, "2": 2}


class InTurn(LateBatches):
    """Batches that the engine process generates with the current weights, while the trainer waits."""

    def __init__(self, trainer):
        super().__init__(trainer)
        self.lag = 1  # copies of the trained weights

    def _submit(self, number):
        if number == self.next_number:
            super()._submit(number)


class InTurnTrainer(PACSTrainer):
    def _create_source(self):
        return InTurn(self)


class Clock(TrainerCallback):
    """Note when each generation batch has been learned from."""

    def __init__(self, updates: int):
        self.updates = updates
        self.times: list[float] = []

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.updates == 0:
            self.times.append(time.perf_counter())


def measure(kind: str, args: argparse.Namespace) -> dict:
    """Train, and return the seconds per generation batch and metrics."""
    clock = Clock(args.updates)
    questions = [QUESTION.format(a, b) for a in range(20) for b in range(20)]
    prompts = [{"prompt": [{"role": "user", "content": text}]} for text in questions]
    with tempfile.TemporaryDirectory() as directory:
        model = args.model
        if model == "miniature":
            model, tokenizer = f"{directory}/model", build_tokenizer()
            build_model(tokenizer).save_pretrained(model)
            tokenizer.save_pretrained(model)
        config = PACSConfig(
            directory,
            use_cpu=True,
            bf16=False,
            model_init_kwargs={"dtype": "float32"},
            per_device_train_batch_size=args.completions // args.updates,
            steps_per_generation=args.updates,
            gradient_accumulation_steps=1,
            num_generations=8,
            max_completion_length=args.length,
            generation_kwargs={"min_new_tokens": args.length},
            learning_rate=1e-5,
            max_steps=args.batches * args.updates,
            fast_generation=True,
            rollout_lag=LAGS.get(kind, 0),
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )

        def late_reward(completions, **kwargs):  # plain functions are called when their batch is taken
            time.sleep(args.reward_seconds)
            return [float(i % 2) for i in range(len(completions))]

        async def reward(completions, **kwargs):  # called when its batch arrives
            await asyncio.sleep(args.reward_seconds)
            return [float(i % 2) for i in range(len(completions))]

        trainer_class = InTurnTrainer if kind == "0" else PACSTrainer
        data = {"train_dataset": Dataset.from_list(prompts), "callbacks": [clock]}
        reward_func: Any = late_reward if args.late_rewards else reward  # TRL's annotation lacks coroutine functions
        trainer = trainer_class(model, reward_func, args=config, **data)
        trainer.train()
    between = [b - a for a, b in zip(clock.times[1:], clock.times[2:], strict=False)]
    logs = [log for log in trainer.state.log_history if "async/lag_updates" in log][2:]
    names = ("lag_updates", "learner_wait", "engine_wait", "overlapped_share")
    means = {f"async/{n}": round(statistics.fmean(log[f"async/{n}"] for log in logs), 3) for n in names if logs}
    return {"kind": kind, "seconds": round(statistics.median(between), 3)} | means


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="miniature", help="or a path")
    parser.add_argument("--kinds", nargs="+", default=[*LAGS, "in process"])
    parser.add_argument("--threads", type=int, default=1, help="of the trainer; the engine process has one core")
    parser.add_argument("--completions", type=int, default=32, help="per generation batch")
    parser.add_argument("--length", type=int, default=24, help="tokens of each completion")
    parser.add_argument("--updates", type=int, default=4, help="per generation batch")
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--reward_seconds", type=float, default=0.0, help="that a reward function waits per batch")
    parser.add_argument("--late_rewards", action="store_true", help="call it when its batch is taken")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    cores, start = sorted(os.sched_getaffinity(0)), engine_process.start_process
    os.sched_setaffinity(0, cores[: args.threads])

    def start_pinned(connection):
        process = start(connection)
        os.sched_setaffinity(process.pid, cores[1:2])
        return process

    engine_process.start_process = start_pinned
    for _ in range(args.repeats):
        for kind in args.kinds:
            print(json.dumps(measure(kind, args)), flush=True)


if __name__ == "__main__":
    main()
