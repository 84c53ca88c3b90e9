"""Recorded rollouts for tests of the trainer.

`Replay` replaces generation: row `i` of generation `g` is a pure function of `(seed, g, i)`, so that a run with any
micro-batch, accumulation or number of processes learns from the same rows. `Recorder` keeps weights and gradients of
every optimizer step. What they should be is in `long_way.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig
from seeds import shifted
from sharding import full
from tolerances import rounding_atol
from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerCallback

from experiments.miniature.tasks import problems
from experiments.miniature.tokenizer import build_tokenizer
from pacs_trl import PACSConfig, PACSTrainer
from pacs_trl.experimental.dars import DARSConfig, DARSTrainer
from pacs_trl.experimental.guidance import GuidanceConfig, GuidanceTrainer
from pacs_trl.experimental.process_labels import ProcessLabelsTrainer
from pacs_trl.experimental.steer import STEERConfig, STEERTrainer
from pacs_trl.experimental.verl import VERLConfig, VERLTrainer
from pacs_trl.verification import Grade, Outcome


TOKENIZER = build_tokenizer()
MAX_COMPLETION_LENGTH = 16

# What rounding explains between a step in float32 and the long way in float64, relative to the norm. From the input to
# a weight's gradient there are about 1,000 additions: 290 in each of two layers, 300 in head and softmax, 128 tokens.
# Seen: up to 7e-6, by the instruction set.
RELATIVE = rounding_atol(1000, 1.0)


def tiny_model(seed: int = 0, **overrides) -> Qwen3ForCausalLM:
    """2 layers x 32 wide, grouped-query attention; weights large enough that log-probabilities are far from
    uniform."""
    settings = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }
    settings |= overrides
    config = Qwen3Config(
        vocab_size=len(TOKENIZER),
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=TOKENIZER.eos_token_id,
        pad_token_id=TOKENIZER.pad_token_id,
        **settings,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(shifted(seed))
        return Qwen3ForCausalLM(config)


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
    found = [(steps_of(ids), y) for ids, y in zip(completion_ids, label, strict=True)]
    return [None if y is None else [*steps, (end, y)] for (steps, end), y in found]


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
        own = rows[first:][:num_rows]
        output = {
            "prompt_ids": [row.prompt_ids for row in own],
            "completion_ids": [list(row.completion_ids) for row in own],
            "logprobs": None if self.logprobs is None else [self._logprobs(row) for row in own],
            "label": [row.label for row in own],
        }
        if self.tools:
            output["env_mask"] = [row.env_mask for row in own]
        return output


def trainable_weights(model) -> dict[str, torch.Tensor]:
    return {name.removeprefix("module."): full(p).detach() for name, p in model.named_parameters() if p.requires_grad}


def assert_same_models(first, second) -> None:
    """Policy, and critic if there is one, of two trainers, bit by bit."""
    for name in ("model", "critic") if hasattr(first, "critic") else ("model",):
        expected, found = (trainable_weights(getattr(trainer, name)) for trainer in (first, second))
        assert all(torch.equal(weight, found[key]) for key, weight in expected.items()), name


def assert_resumes(build: Callable, directory: Path, *steps: int) -> tuple:
    """Compare runs that go on after each of `steps` with one without a stop, bit by bit. `build(output_dir)` returns a
    trainer that saves every step. Returns the run without a stop and the last other one."""
    straight = build(directory / "straight")
    straight.train()
    for step in steps:
        again = build(directory / "again")
        again.train(resume_from_checkpoint=str(directory / "straight" / f"checkpoint-{step}"))
        assert_same_models(straight, again)
    return straight, again


def spy_on(owner, name: str, note: Callable) -> None:
    """Let `note(result, *arguments)` follow each call of a method of `owner`."""
    method = getattr(owner, name)

    def call(*args, **kwargs):
        result = method(*args, **kwargs)
        note(result, *args, **kwargs)
        return result

    setattr(owner, name, call)


class Recorder(TrainerCallback):
    """Weights before, and gradients at, every optimizer step."""

    def __init__(self):
        self.weights: list[dict[str, torch.Tensor]] = []
        self.gradients: list[dict[str, torch.Tensor | None]] = []

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self.weights.append(trainable_weights(model))

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients.append(
            {
                name.removeprefix("module."): None if p.grad is None else full(p.grad)
                for name, p in model.named_parameters()
                if p.requires_grad
            }
        )


SETTINGS = {
    "use_cpu": True,
    "bf16": False,
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": MAX_COMPLETION_LENGTH,
    "learning_rate": 0.05,
    "optim": "sgd",
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "max_steps": 2,
    "logging_steps": 1,
    "gradient_checkpointing": False,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "seed": shifted(42),
}


def config(output_dir: str | Path, config_class=PACSConfig, **overrides) -> PACSConfig:
    return config_class(str(output_dir), **(SETTINGS | overrides))


def build_trainer(
    output_dir: str | Path, *, model=None, reward=None, replay=None, trainer_class=None, more=None, **settings
) -> PACSTrainer:
    """A trainer on the tiny model; `settings` go to the configuration, `more` to the trainer."""
    steps = getattr(replay, "steps", False)
    trainer_class = trainer_class or (ProcessLabelsTrainer if steps else PACSTrainer)
    arguments = {"train_dataset": addition_dataset(), "processing_class": TOKENIZER, "rollout_func": replay}
    stored = stored_steps if steps else stored_label
    return trainer_class(
        tiny_model() if model is None else model,
        reward or (digit_reward if replay is None else stored),
        args=config(output_dir, trainer_class._config_class, **settings),
        **(arguments | (more or {})),
    )


@dataclass
class SteerAndVerlConfig(STEERConfig, VERLConfig):
    """Two methods at once."""


class SteerAndVerlTrainer(STEERTrainer, VERLTrainer):
    """Methods that override different extension points combine as classes do."""

    _config_class = SteerAndVerlConfig


@dataclass
class DarsAndGuidanceConfig(DARSConfig, GuidanceConfig):
    """Guided attempts, then more completions of hard prompts."""


class DarsAndGuidanceTrainer(DARSTrainer, GuidanceTrainer):
    """Methods that change the same generation, one after the other."""

    _config_class = DarsAndGuidanceConfig


def logps_and_entropies(model, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the completion tokens of one row, by a forward pass of that row alone."""
    ids = torch.tensor([row.prompt_ids + row.completion_ids])
    logps = model(input_ids=ids).logits[0, len(row.prompt_ids) - 1 : -1].log_softmax(dim=-1)
    chosen = logps.gather(1, torch.tensor(row.completion_ids)[:, None])[:, 0]
    return chosen, -(logps.exp() * logps).sum(dim=-1)


def load_weights(model, weights: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in weights:
                p.copy_(weights[name])


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


def relative_error(found: dict[str, torch.Tensor | None], expected: dict[str, torch.Tensor]) -> float:
    """Norm of the difference over norm of the expected, all parameters together. What should be 0 must be exactly
    0."""
    assert found.keys() >= expected.keys()
    difference = sum(
        ((0 if found[name] is None else found[name].double()) - value).square().sum().item()
        for name, value in expected.items()
    )
    size = sum(value.double().square().sum().item() for value in expected.values())
    return 0.0 if difference == 0 else (difference / size) ** 0.5 if size > 0 else float("inf")


LORA = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
