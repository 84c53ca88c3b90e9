"""Recorded rollouts, their prompts, and their rewards.

`Replay` replaces generation: row `i` of generation `g` is a pure function of `(seed, g, i)`, so that a run with any
micro-batch, accumulation or number of processes learns from the same rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from datasets import Dataset

from experiments.miniature.tasks import problems
from pacs_trl import PACSConfig, PACSTrainer
from pacs_trl.verification import Grade, Outcome
from support.models import TOKENIZER, trainable_weights


MAX_COMPLETION_LENGTH = 16


@cache
def addition_dataset(num_prompts: int = 32) -> Dataset:
    return Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": row["problem"]}], "solution": row["answer"]}
            for row in problems("addition", "train", num_prompts)
        ]
    )


def stored_label(completions, label, **kwargs) -> list[float | None]:
    """Reward function that returns what the recorded rollouts say."""
    return label


def steps_of(ids: list[int]) -> tuple[list[tuple[int, float]], int]:
    """Labels before the outcome of a completion, none to three, and where the outcome stands: the last token, or the
    one before."""
    end = len(ids) - 1 - (len(ids) > 6 and ids[1] % 2)
    number = min(ids[0] % 4, end)
    return [(k * end // (number + 1), ids[k] % 3 / 2) for k in range(number)], end


def stored_steps(completions, label, completion_ids, **kwargs) -> list[list[tuple[int, float]] | None]:
    """Reward function that returns what the recorded rollouts say, and labels of steps before it."""
    steps_and_labels = [(steps_of(ids), y) for ids, y in zip(completion_ids, label, strict=True)]
    return [None if y is None else [*steps, (end, y)] for (steps, end), y in steps_and_labels]


def boxed(prompts, trainer):
    """Completions that reason differently, of which every fourth has no box; texts of one token per character but for
    the box."""
    texts = [f"{i % 4}{'x' * (i % 2)}" + (r"\boxed{7}" if i % 4 else "7") for i in range(len(prompts))]
    prompt_ids = trainer._tokenize_prompts(prompts)[0]
    ids = [TOKENIZER(text)["input_ids"] + [TOKENIZER.eos_token_id] for text in texts]
    return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": None}


def digit_reward(completions, **kwargs) -> list[float]:
    """Reward function for sampled completions: a fixed but arbitrary function of the text."""
    return [float(sum(map(ord, completion[0]["content"])) % 2) for completion in completions]


class Parity:
    """A verifier to which about half of all completions are correct."""

    def unreadable_golds(self, golds):
        return []

    def grade_detailed(self, completions, golds, truncated):
        return [Grade(Outcome(sum(map(ord, text)) % 2)) for text in completions]


@dataclass
class Row:
    prompt_ids: list[int]
    completion_ids: list[int]
    label: float | None = None
    env_mask: list[int] = field(default_factory=list)
    token_weights: list[float] = field(default_factory=list)


@dataclass
class Replay:
    """A rollout function that replays rows made from a seed."""

    seed: int = 0
    num_generations: int = 4
    unverifiable: float = 0.0  # fraction of labels that are `None`
    truncated: float = 0.25  # fraction of completions that do not end with the end-of-sequence token
    tools: bool = False  # whether to return a mask that hides some completion tokens
    soft: bool = False  # whether labels lie inside [0, 1] instead of being 0 or 1
    uniform_groups: int = 1  # the first so many groups of each generation have one label; all others have both
    steps: bool = False  # whether completions have labels before their outcomes
    logprobs: float | None = None  # what the engine reports of every token it drew; `None`: nothing
    edit: Callable[[int, list[Row]], list[Row]] | None = None  # `edit(generation, rows) -> rows`, a last change
    weights: list[dict[str, torch.Tensor]] = field(default_factory=list)  # of the policy, at each generation

    def rows(self, generation: int, num_completions: int) -> list[Row]:
        rng = np.random.default_rng([self.seed, generation])
        rows = []
        for i in range(num_completions):
            if i % self.num_generations == 0:
                prompt = rng.integers(0, 256, size=rng.integers(1, 9)).tolist()
                outcomes = rng.permutation([0.0, 1.0, *(rng.random(self.num_generations - 2) < 0.5)]).tolist()
            body = rng.integers(0, 256, size=rng.integers(0, MAX_COMPLETION_LENGTH)).tolist()
            cut_off = rng.random() < self.truncated and body
            completion = body if cut_off else [*body, TOKENIZER.eos_token_id]
            label = outcomes[i % self.num_generations]
            if self.soft:
                label = 0.1 + 0.5 * label + 0.3 * float(rng.random())
            unverifiable = rng.random() < self.unverifiable
            if i // self.num_generations < self.uniform_groups:
                label = float(generation % 2)  # all wrong, then all right
            mask = (rng.random(len(completion)) < 0.7).astype(int).tolist()
            weights = rng.uniform(0.2, 2.0, size=len(completion)).astype(np.float32).tolist()
            rows.append(Row(prompt, completion, None if unverifiable else label, mask, weights))
        return self.edit(generation, rows) if self.edit else rows

    def _logprobs(self, row: Row) -> list[float | None]:
        """Of the tokens that the engine drew; it knows none of those that a tool wrote."""
        return [self.logprobs if drawn or not self.tools else None for drawn in row.env_mask]

    def __call__(self, prompts, trainer: PACSTrainer) -> dict:
        generation = trainer._step // (trainer.args.steps_per_generation * trainer.num_iterations)
        shares = getattr(trainer, "_shares", None)  # TRL's trainers have none
        process, num_rows = trainer.accelerator.process_index, len(prompts)
        first = process * num_rows if shares is None else shares.first(process)
        rows = self.rows(
            generation,
            len(prompts) * trainer.accelerator.num_processes if shares is None else shares.num_completions,
        )
        self.weights.append(trainable_weights(trainer.model))
        process_rows = rows[first:][:num_rows]
        output = {
            "prompt_ids": [row.prompt_ids for row in process_rows],
            "completion_ids": [list(row.completion_ids) for row in process_rows],
            "logprobs": None if self.logprobs is None else [self._logprobs(row) for row in process_rows],
            "label": [row.label for row in process_rows],
        }
        if self.tools:
            output["env_mask"] = [row.env_mask for row in process_rows]
        return output


def rows_of_update(replay: Replay, args: PACSConfig, update: int) -> tuple[int, list[Row]]:
    """The generation that optimizer step `update` (from 0) learns from (the first one, if several), and its rows."""
    slot = args.per_device_train_batch_size
    if args.gradient_accumulation_steps > args.steps_per_generation:
        ratio = args.gradient_accumulation_steps // args.steps_per_generation
        generations = range(update * ratio, (update + 1) * ratio)
        return generations[0], [r for g in generations for r in replay.rows(g, slot * args.steps_per_generation)]
    num_steps = args.steps_per_generation // args.gradient_accumulation_steps
    generation, within = divmod(update, num_steps * args.num_iterations)
    rows = replay.rows(generation, slot * args.steps_per_generation)
    size = len(rows) // num_steps
    first = within % num_steps * size
    return generation, rows[first : first + size]
