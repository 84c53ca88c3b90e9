"""Checkpoints that also read images, trained on text: the language model inside is trained, the rest is frozen.

The tokenizer is that of the checkpoint, LoRA adapters are added to the language model alone, and saved models get the
files of the processor, so that they still read images.
"""

import copy
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftConfig, PeftModel
from torch import nn
from transformers import AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel, ProcessorMixin
from transformers.pytorch_utils import Conv1D
from transformers.utils import IMAGE_PROCESSOR_NAME, PROCESSOR_NAME, VIDEO_PROCESSOR_NAME, cached_file

from ..data.text_tokenizer import accepting_text, load_text_tokenizer
from .rollout_config import RolloutConfig


_LINEAR = (nn.Linear, Conv1D)  # layers that peft adapts with `all-linear`
_PROCESSOR_FILES = (IMAGE_PROCESSOR_NAME, VIDEO_PROCESSOR_NAME, PROCESSOR_NAME)


def has_language_model_inside(config: PreTrainedConfig) -> bool:
    """Return whether a model has a language model with a configuration of its own inside, as those that read images or
    sound."""
    return not config.is_encoder_decoder and config.get_text_config() is not config


def prepare_for_text(
    model: str | PreTrainedModel | PeftModel,
    config: PreTrainedConfig,
    name: str,
    args: RolloutConfig,
    arguments: dict[str, Any],
) -> None:
    """Replace the arguments of a trainer by those that train the language model inside a checkpoint on text: its
    tokenizer, and LoRA targets in the language model. `config` and `name` are those of the model."""
    given = arguments["processing_class"]
    if given is None:
        tokenizer = tokenizer_of(name, args)
    elif isinstance(given, ProcessorMixin):
        tokenizer = given.tokenizer
        tokenizer.chat_template = tokenizer.chat_template or given.chat_template
    else:
        tokenizer = given
    arguments["processing_class"] = accepting_text(tokenizer)
    if (peft_config := arguments["peft_config"]) is not None:
        arguments["peft_config"] = lora_of_language_model(peft_config, model, config)


def tokenizer_of(name: str, args: RolloutConfig) -> Any:
    """Load the tokenizer of a checkpoint as TRL loads processors."""
    return load_text_tokenizer(
        name,
        revision=(args.model_init_kwargs or {}).get("revision", "main"),
        padding_side="left",
        truncation_side="left",
        trust_remote_code=args.trust_remote_code,
    )


def lora_of_language_model(
    peft_config: PeftConfig, model: str | PreTrainedModel | PeftModel, config: PreTrainedConfig
) -> PeftConfig:
    """Return a LoRA configuration that also excludes all modules outside of the language model: encoders of images
    often have layers of the same names."""
    if not hasattr(peft_config, "exclude_modules"):
        return peft_config
    if isinstance(model, str):
        with torch.device("meta"):
            architecture = getattr(transformers, (config.architectures or [""])[0], None)
            model = AutoModelForImageTextToText.from_config(config) if architecture is None else architecture(config)
    outside = "|".join(re.escape(name) for name in names_outside_language_model(model))
    patterns = [rf"(?:{outside})(?:\..*)?"]
    if excluded := peft_config.exclude_modules:
        is_pattern = isinstance(excluded, str)
        patterns.append(excluded if is_pattern else rf"(?:.*\.)?(?:{'|'.join(map(re.escape, sorted(excluded)))})")
    restricted = copy.copy(peft_config)
    restricted.exclude_modules = "|".join(patterns)
    if isinstance(restricted.target_modules, str) and restricted.target_modules.lower() == "all-linear":
        modules = model.get_decoder().named_modules()
        restricted.target_modules = {name.split(".")[-1] for name, layer in modules if isinstance(layer, _LINEAR)}
    return restricted


def names_outside_language_model(model: nn.Module) -> list[str]:
    """Return the names of the largest modules that contain no part of the language model: encoders of images, and the
    layers that connect them."""
    inside = [model.get_decoder(), model.get_output_embeddings()]
    with_parts = {
        name for name, module in model.named_modules() if any(part is m for m in module.modules() for part in inside)
    }
    parts = [name for name, module in model.named_modules() if any(module is part for part in inside)]
    outside: list[str] = []
    for name, _ in model.named_modules():
        is_inside = name in with_parts or any(name.startswith(f"{part}.") for part in parts)
        if not is_inside and not any(name.startswith(f"{parent}.") for parent in outside):
            outside.append(name)
    return outside


def freeze_outside_language_model(model: PreTrainedModel | PeftModel) -> None:
    """Freeze all weights outside of the language model and its head. Raises a `ValueError` if none is left."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    inside = {id(p) for part in (base.get_decoder(), base.get_output_embeddings()) for p in part.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in inside:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            "All trained weights are outside of the language model, where text does not reach them. Train layers of "
            "the language model (with LoRA: target_modules), or use a dataset with images."
        )


def processor_files(name: str, args: RolloutConfig) -> list[Path]:
    """Return the files of a checkpoint's processor, except those of its tokenizer, as far as they can be had."""
    if not name:
        return []
    revision = (args.model_init_kwargs or {}).get("revision")
    where = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    files = [cached_file(name, file, revision=revision, **where) for file in _PROCESSOR_FILES]
    return [Path(file) for file in files if file is not None]


def copy_processor_files(files: list[Path], directory: Path) -> None:
    """Copy the files of a processor to the directory of a saved model."""
    for file in files:
        if file.resolve() != (directory / file.name).resolve():
            shutil.copyfile(file, directory / file.name)


@contextmanager
def context_of_language_model(config: PreTrainedConfig) -> Iterator[None]:
    """Give a configuration the context length of the language model inside, where TRL's tool loop looks for it."""
    key, text_config = "max_position_embeddings", config.get_text_config()
    if hasattr(config, key) or not hasattr(text_config, key):
        yield
        return
    setattr(config, key, getattr(text_config, key))
    try:
        yield
    finally:
        delattr(config, key)
