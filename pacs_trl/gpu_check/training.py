"""Short trainings of a small model with random weights, which the parts `vllm`, `gpus` and `soak` look at from their sides."""

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from .. import PACSConfig, PACSTrainer
from ..data.tasks import problems
from ..miniature.tokenizer import build_tokenizer
from ..plan.cost import ModelShape
from ..rewards import math_reward
from .replay import build_model


MAX_COMPLETION = 8


def even_start(completion_ids, **kwargs) -> list[float]:
    """A reward that random weights can learn in seconds: the first token has an even number."""
    return [float(ids[0] % 2 == 0) for ids in completion_ids]


def save_model(directory: Path, shape: ModelShape, device: str) -> str:
    """A checkpoint of random weights with the tokenizer of the miniature, which decides the size of the vocabulary."""
    if not (directory / "tokenizer_config.json").is_file():
        tokenizer = build_tokenizer()
        ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        shape = ModelShape(**{**vars(shape), "vocabulary": len(tokenizer)})
        build_model(shape, device, bos_token_id=None, **ends).save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    return str(directory)


def trainer_of(
    output_dir: Path, checkpoint: str, device: str, *, callbacks=(), rollout_func=None, **settings: Any
) -> PACSTrainer:
    """A trainer in float32 on that checkpoint: sums as prompts, the first token's number as reward, and the verifier at work beside it."""
    defaults = {
        "use_cpu": device == "cpu",
        "bf16": False,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": MAX_COMPLETION,
        "learning_rate": 1e-2,
        "optim": "adamw_torch",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "reward_weights": [1.0, 0.0],
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    rows = [
        {"prompt": [{"role": "user", "content": row["problem"]}], "solution": row["answer"]}
        for row in problems("addition", "train", 64)
    ]
    return PACSTrainer(
        model=AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32),
        reward_funcs=[even_start, math_reward],
        args=PACSConfig(str(output_dir), **(defaults | settings)),
        train_dataset=Dataset.from_list(rows),
        processing_class=build_tokenizer(),
        callbacks=list(callbacks),
        rollout_func=rollout_func,
    )


def logged(trainer: PACSTrainer, name: str) -> list[float]:
    """A metric of all optimizer steps."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]
