"""Runs of objectives on problems with many correct answers, with SmolLM2-135M-Instruct.

    python -m experiments.right_answers.runs            # every missing run of the plan, in the order of the plan
    python -m experiments.right_answers.runs --tasks between        # of these tasks only, one process for each core
    python -m experiments.right_answers.runs long       # all arms on `sums` and `multiples` at one rate, 100 updates
    python -m experiments.right_answers.runs rates      # base rates of the tasks
    python -m experiments.right_answers.analysis        # tables from the records

A finished run is a file in docs/results/many_right_answers/records (`long`: long_records), and the command trains
those that have none. The probabilities of all correct answers are computed exactly, so that pass@k, distinct correct
answers, and ratios have no sampling noise.
"""

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from experiments.right_answers.gated import GatedGRPOTrainer, GatedREINFORCETrainer
from experiments.right_answers.tasks import END, TASKS, Problem, reward, split
from experiments.smollm2 import FOLDER
from pacs_trl import GRPOTrainer, MaxRLTrainer, PACSTrainer, REALTrainer, RLOOTrainer
from pacs_trl.experimental.ucpo import UCPOTrainer


RECORDS = Path(__file__).parents[2] / "docs/results/many_right_answers/records"
KS = (1, 8, 64)
UPDATES = 30  # of a run
EVERY = {"between": 3, "multiples": 3, "divisors": 3, "sums": 6}  # updates between two measurements
LEVELS = {"between": 0.5, "multiples": 0.5, "divisors": 0.5, "sums": 0.15}  # pass@1 at which arms are compared


class Arm(NamedTuple):
    """A method with its settings."""

    trainer: Any
    settings: dict[str, Any]


ARMS = {
    "PACS, kept, beta 0.1": Arm(PACSTrainer, {"reference": "snapshot", "pacs_beta": 0.1}),
    "PACS, rollout": Arm(PACSTrainer, {}),
    "GRPO": Arm(GRPOTrainer, {}),
    "GRPO, KL 0.1": Arm(GRPOTrainer, {"beta": 0.1}),
    "UCPO": Arm(UCPOTrainer, {}),
    "PACS, kept, beta 0.3": Arm(PACSTrainer, {"reference": "snapshot", "pacs_beta": 0.3}),
    "GRPO, gated": Arm(GatedGRPOTrainer, {}),
    "MaxRL": Arm(MaxRLTrainer, {}),
    "RLOO": Arm(RLOOTrainer, {"beta": 0.0}),
    "REAL": Arm(REALTrainer, {}),
    "PACS, kept, beta 1": Arm(PACSTrainer, {"reference": "snapshot", "pacs_beta": 1.0}),  # 100 updates only
    "REINFORCE, gated": Arm(GatedREINFORCETrainer, {}),  # 100 updates only
}
LEADING_ARMS, OTHER_ARMS = list(ARMS)[:5], list(ARMS)[5:10]  # of 30 updates: the leading ones run first
RATES = (1e-5, 5e-6, 2e-5)
PILOT_SEED, SEEDS = 100, range(5)  # runs of the pilot end at the level, and their seed is not used again

LONG_RECORDS = RECORDS.parent / "long_records"
FIRST_LONG_ARMS = ("PACS, kept, beta 0.1", "PACS, rollout", "GRPO, KL 0.1", "GRPO", "PACS, kept, beta 1")
LATER_LONG_ARMS = tuple(arm for arm in ARMS if arm not in FIRST_LONG_ARMS)
LONG_TASKS = ("sums", "multiples")
LONG_UPDATES, LONG_EVERY = 100, 10

Point = dict[str, float]


class Run(NamedTuple):
    """One training run of the plan."""

    task: str
    arm: str
    rate: float
    seed: int

    @property
    def file(self) -> str:
        arm = self.arm.lower().replace(",", "").replace(" ", "_")
        return f"{self.task}-{arm}-{self.rate:g}-{self.seed}.json"


SETTINGS: dict[str, Any] = {
    "num_generations": 8,
    "per_device_train_batch_size": 32,  # 4 prompts x 8 completions, one update on each
    "gradient_accumulation_steps": 1,
    "temperature": 1.0,
    "fast_generation": True,  # each prompt is read once, not eight times
    "lr_scheduler_type": "constant",
    "max_grad_norm": 1.0,
    "model_init_kwargs": {"dtype": "float32"},
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
    "disable_tqdm": True,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
}


def load_tokenizer():
    """Return the tokenizer, for which a completion ends with its line."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    tokenizer.eos_token = tokenizer.tokenize(END)[0]
    return tokenizer


def answer_ids(tokenizer, problem: Problem) -> list[list[int]]:
    return [tokenizer(answer)["input_ids"] + [tokenizer.eos_token_id] for answer in problem.answers]


@torch.no_grad()
def answer_logps(model, tokenizer, problem: Problem) -> torch.Tensor:
    """Return the log-probs of the correct answers of a problem with their ends, float64 `(A,)`; the prompt is read
    once."""
    prompt = model(torch.tensor([tokenizer(problem.prompt)["input_ids"]]), use_cache=True)
    rows = answer_ids(tokenizer, problem)
    cache = prompt.past_key_values
    cache.batch_repeat_interleave(len(rows))
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=-1)
    logits = model(tokens[:, :-1].clamp(min=0), past_key_values=cache).logits
    logits = torch.cat([prompt.logits[:, -1:].expand(len(rows), -1, -1), logits], dim=1)
    logps = logits.log_softmax(dim=2).gather(2, tokens.clamp(min=0)[:, :, None])[:, :, 0]
    return logps.double().masked_fill(tokens < 0, 0.0).sum(dim=1)


def measure(logps: list[torch.Tensor], before_training: list[torch.Tensor]) -> dict[str, float]:
    """
    Return means over problems from the log-probs of their correct answers, `(A,)` each, now and before training:
    `pass@k`; `distinct`, the expected number of different correct answers among 64 samples; `perplexity` of the
    correct answers, and the `kl` divergence of their ratios from those of the base model, in nats.
    """
    values: dict[str, list[float]] = {
        name: [] for name in [*(f"pass@{k}" for k in KS), "distinct", "perplexity", "kl"]
    }
    for after, before in zip(logps, before_training, strict=True):
        success = after.exp().sum().clamp(max=1)
        for k in KS:
            values[f"pass@{k}"].append(1 - (1 - success.item()) ** k)
        values["distinct"].append((1 - (1 - after.exp()) ** 64).sum().item())
        logs, base = after.log_softmax(dim=0), before.log_softmax(dim=0)
        values["perplexity"].append(math.exp(-(logs.exp() * logs).sum().item()))
        values["kl"].append((logs.exp() * (logs - base)).sum().item())
    return {name: round(mean(column), 5) for name, column in values.items()}


def success_rates(logps: list[torch.Tensor]) -> list[float]:
    """Return the probability of a correct completion of each problem."""
    return [round(values.exp().sum().item(), 5) for values in logps]


class HeldOutCurve(TrainerCallback):
    """Measures held-out problems every `every` updates, outside the CPU seconds of the updates, and ends a run whose
    pass@1 is above `stop_above`."""

    def __init__(self, tokenizer, held_out: list[Problem], every: int, stop_above: float):
        self.tokenizer, self.held_out, self.every, self.stop_above = tokenizer, held_out, every, stop_above
        self.points: list[Point] = []
        self.seconds = 0.0

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.before_training = self.add_point(0, model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.seconds += time.process_time() - self.began
        if state.global_step % self.every == 0:
            self.last = self.add_point(state.global_step, model)
            control.should_training_stop |= self.points[-1]["pass@1"] > self.stop_above
        self.began = time.process_time()

    def add_point(self, update: int, model) -> list[torch.Tensor]:
        model.eval()
        logps = [answer_logps(model, self.tokenizer, problem) for problem in self.held_out]
        model.train()
        self.points.append({"update": update, **measure(logps, self.before_training if self.points else logps)})
        self.began = time.process_time()
        return logps


def train(run: Run, updates: int, every: int) -> dict[str, Any]:
    """Train for this many updates, measure every `every` updates, and return the record of a run."""
    arm, (train_problems, held_out), tokenizer = ARMS[run.arm], split(run.task), load_tokenizer()
    longest = max(len(ids) for problem in train_problems for ids in answer_ids(tokenizer, problem))
    stop_above = LEVELS[run.task] if run.seed == PILOT_SEED else 1.0
    curve = HeldOutCurve(tokenizer, held_out, every, stop_above)
    with tempfile.TemporaryDirectory() as folder:
        trainer = arm.trainer(
            str(FOLDER),
            reward,
            args=arm.trainer._config_class(
                folder,
                **SETTINGS | arm.settings,
                max_completion_length=longest,
                learning_rate=run.rate,
                seed=run.seed,
                max_steps=updates,
            ),
            train_dataset=Dataset.from_list([problem._asdict() for problem in train_problems]),
            processing_class=tokenizer,
            callbacks=[curve],
        )
        trainer.train()
    logs = [row for row in trainer.state.log_history if "reward" in row]
    return {
        **run._asdict(),
        "updates": len(logs),
        "points": curve.points,
        "before": success_rates(curve.before_training),
        "after": success_rates(curve.last),
        "reward": [round(row["reward"], 3) for row in logs],
        "entropy": [round(row["entropy"], 3) for row in logs],
        "cpu_seconds": round(curve.seconds, 1),
        "torch": torch.__version__,
    }


def read_records(folder: Path = RECORDS) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def crossing(points: Sequence[Point], level: float) -> tuple[Point, Point] | None:
    """Return the measurements before and after pass@1 first reaches `level`; `None` for a run that does not reach it,
    or starts above it."""
    for before, after in zip(points, points[1:], strict=False):
        if before["pass@1"] < level <= after["pass@1"]:
            return before, after
    return None


def at_level(points: Sequence[Point], level: float) -> Point | None:
    """Return the metrics at the [`crossing`] of `level`, linear in pass@1 between its two measurements."""
    if (around := crossing(points, level)) is None:
        return None
    before, after = around
    share = (level - before["pass@1"]) / (after["pass@1"] - before["pass@1"])
    return {name: before[name] + share * (after[name] - before[name]) for name in before}


def best_rate(records: list[dict[str, Any]], task: str, arm: str) -> float | None:
    """Return the learning rate of the pilot with which an arm has most distinct correct answers at the level of the
    task, or the highest pass@1 if none reaches it; `None` before the pilot has all rates."""
    curves = {
        record["rate"]: record["points"]
        for record in records
        if (record["task"], record["arm"], record["seed"]) == (task, arm, PILOT_SEED)
    }
    if len(curves) < len(RATES):
        return None
    points = {rate: at_level(curve, LEVELS[task]) for rate, curve in curves.items()}
    distinct = {rate: point["distinct"] for rate, point in points.items() if point}
    ends = {rate: curve[-1]["pass@1"] for rate, curve in curves.items()}
    return max(distinct or ends, key=(distinct or ends).__getitem__)


def plan(records: list[dict[str, Any]], tasks: Sequence[str] = tuple(TASKS)) -> list[Run]:
    """Return the runs in the order in which they answer most: the leading arms of all tasks, then the others. The runs
    of an arm wait for its pilot."""
    runs: list[Run] = []
    for arms in (LEADING_ARMS, OTHER_ARMS):
        for task in tasks:
            runs += [Run(task, arm, rate, PILOT_SEED) for rate in RATES for arm in arms]
            rates = {arm: best_rate(records, task, arm) for arm in arms}
            runs += [Run(task, arm, rate, seed) for seed in SEEDS for arm, rate in rates.items() if rate is not None]
    return runs


def long_plan(seeds: Sequence[int] = SEEDS) -> list[Run]:
    """Return the runs of 100 updates, all at the lowest rate of the pilot: of the tasks on which arms lost correct
    answers within 30 and did not saturate."""
    return [
        Run(task, arm, min(RATES), seed)
        for task in LONG_TASKS
        for arms in (FIRST_LONG_ARMS, LATER_LONG_ARMS)
        for seed in seeds
        for arm in arms
    ]


def train_and_record(run: Run, updates: int, every: int, folder: Path) -> None:
    """Train, and write the record of the run."""
    record = train(run, updates, every)
    temporary = folder / f"{run.file}.tmp"
    temporary.write_text(json.dumps(record) + "\n")
    os.replace(temporary, folder / run.file)
    print(run, record["points"][-1], f"{record['cpu_seconds']} s", flush=True)


def base_rates(num_problems: int) -> None:
    """Print pass@1, pass@64, and distinct correct answers of each task before training."""
    tokenizer, model = load_tokenizer(), AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    for task in TASKS:
        logps = [
            answer_logps(model, tokenizer, problem)
            for problem in [problem for part in split(task) for problem in part][:num_problems]
        ]
        print(task, measure(logps, logps), success_rates(logps), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=["train", "long", "rates"], default="train")
    parser.add_argument("--tasks", nargs="+", choices=[*TASKS], default=[*TASKS], help="tasks to train, in this order")
    parser.add_argument("--seeds", nargs="+", type=int, default=[*SEEDS], help="seeds of `long`, in this order")
    parser.add_argument("--problems", type=int, default=24, help="problems of `rates`")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.command == "rates":
        base_rates(args.problems)
    elif args.command == "long":
        LONG_RECORDS.mkdir(parents=True, exist_ok=True)
        for run in long_plan(args.seeds):
            if not (LONG_RECORDS / run.file).is_file():
                train_and_record(run, LONG_UPDATES, LONG_EVERY, LONG_RECORDS)
    else:
        RECORDS.mkdir(parents=True, exist_ok=True)
        while missing := [run for run in plan(read_records(), args.tasks) if not (RECORDS / run.file).is_file()]:
            train_and_record(missing[0], UPDATES, EVERY[missing[0].task], RECORDS)


if __name__ == "__main__":
    main()
