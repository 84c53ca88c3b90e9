"""Runs on datasets with images, on recorded completions."""

import os
import tempfile
from pathlib import Path

import numpy as np
import torch
import trl
from datasets import Dataset, Features, Image, List, Value
from PIL import Image as Picture

import pacs_trl
from support.image_checkpoints import image_model, image_processor
from support.rollouts import digit_reward
from support.runs import SETTINGS
from support.sharding import full, let_accelerate_shard_on_cpu


OURS = {"GRPO": (pacs_trl.GRPOTrainer, pacs_trl.GRPOConfig), "PACS": (pacs_trl.PACSTrainer, pacs_trl.PACSConfig)}
TRLS = trl.GRPOTrainer, trl.GRPOConfig
FEATURES = Features(
    {
        "prompt": [{"role": Value("string"), "content": Value("string")}],
        "images": List(Image()),
        "number": Value("int8"),
    }
)
# Plain gradient descent, so that a difference of gradients is one of weights.
PLAIN = {"optim": "sgd", "learning_rate": 0.05, "lr_scheduler_type": "constant", "max_steps": 3, "max_grad_norm": 0}


def picture(number: int, mode: str = "RGB") -> Picture.Image:
    """A picture of a random size and content."""
    rng = np.random.default_rng(number)
    size = 28 + 14 * (number % 3), 28 + 14 * (number % 2)
    return Picture.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).convert(mode)


def rows(numbers=(1, 2, 1, 2, 1, 2, 1, 2)) -> Dataset:
    """Prompts with so many pictures each."""
    content = [[picture(10 * i + k) for k in range(number)] for i, number in enumerate(numbers)]
    prompts = [[{"role": "user", "content": f"What is {i}?"}] for i in range(len(numbers))]
    columns = {"prompt": prompts, "images": content, "number": list(numbers)}
    return Dataset.from_dict(columns, features=FEATURES)


def with_recorded_completions(trainer):
    """Let a trainer generate completions that depend on the call alone."""
    calls = []

    def generate(prompt_ids, images, fields, num_generations=None, **kwargs):  # TRL's RLOO passes no number
        calls.append(prompt_ids)
        completions = []
        for i in range(len(prompt_ids)):
            rng = np.random.default_rng([len(calls), trainer.accelerator.process_index * len(prompt_ids) + i])
            completions.append(
                [*rng.integers(0, 255, int(rng.integers(1, 9))).tolist(), trainer._tokenizer.eos_token_id]
            )
        return completions if num_generations is None else (completions, None)

    trainer._generate_single_turn = generate
    return trainer


def build(
    trainers, model_type, *, dataset=None, recorded=True, reward=digit_reward, more=None, model=None, **settings
):
    trainer_class, config_class = trainers
    processor = image_processor(model_type)
    settings = SETTINGS | PLAIN | {"max_completion_length": 9} | settings
    args = config_class(settings.pop("output_dir", None) or tempfile.mkdtemp(), **settings)
    arguments = {"train_dataset": rows() if dataset is None else dataset, "processing_class": processor} | (more or {})
    trainer = trainer_class(
        image_model(model_type, processor.tokenizer) if model is None else model, reward, args=args, **arguments
    )
    return with_recorded_completions(trainer) if recorded else trainer


def weights(trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def trained(*args, **settings):
    trainer = build(*args, **settings)
    before = weights(trainer)
    trainer.train()
    return before, weights(trainer), trainer


def trained_in_processes(
    directory: Path, method: str, model_type: str, num_processes: int, recorded: bool = True
) -> dict[str, dict]:
    """Weights before and after a run with texts among prompts of one and two images, of any number of processes. The
    second process has texts alone in some passes."""
    settings = {"per_device_train_batch_size": 8 // num_processes, "generation_batch_size": 8, "recorded": recorded}
    if os.environ.get("ACCELERATE_USE_FSDP"):
        let_accelerate_shard_on_cpu()
    mixed = rows((0, 2, 1, 0, 2, 1, 0, 1))
    before, after, _ = trained(OURS[method], model_type, dataset=mixed, output_dir=str(directory / method), **settings)
    both = {"before": before, "after": after}
    return {name: {key: full(value) for key, value in weights.items()} for name, weights in both.items()}
