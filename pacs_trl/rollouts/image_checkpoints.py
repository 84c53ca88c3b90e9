"""Checkpoints that also read images, trained on text or on images.

On text the language model inside is trained and the rest is frozen: the tokenizer is that of the checkpoint, LoRA
adapters are added to the language model alone, and saved models get the files of the processor, so that they still
read images. On images the whole model is trained, or with `freeze_vision_tower` the language model alone.
"""

import copy
import inspect
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import transformers
from peft import PeftConfig, PeftModel
from torch import nn
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedConfig, PreTrainedModel, ProcessorMixin
from transformers.pytorch_utils import Conv1D
from transformers.utils import IMAGE_PROCESSOR_NAME, PROCESSOR_NAME, VIDEO_PROCESSOR_NAME, cached_file
from trl.trainer.utils import get_callable_name

from ..data import images
from ..data.text_tokenizer import accepting_text, load_text_tokenizer
from ..errors import UserError
from ..update.peft_models import without_peft
from .launched_sharding import uses_plugin, version_of_fsdp
from .model_config import Model
from .rollout_config import RolloutConfig


_LINEAR = (nn.Linear, Conv1D)  # layers that peft adapts with `all-linear`
_PROCESSOR_FILES = (IMAGE_PROCESSOR_NAME, VIDEO_PROCESSOR_NAME, PROCESSOR_NAME)


def has_language_model_inside(config: PreTrainedConfig) -> bool:
    """Return whether a model has a language model with a configuration of its own inside, as those that read images or
    sound."""
    return not config.is_encoder_decoder and config.get_text_config() is not config


# Arguments of a trainer ---------------------------------------------------------------------------------------------


def prepare_for_text(
    model: Model,
    config: PreTrainedConfig,
    name: str,
    args: RolloutConfig,
    arguments: dict[str, Any],
) -> None:
    """Replace the arguments of a trainer by those that train the language model inside a checkpoint on text: its
    tokenizer, and LoRA targets in the language model. `config` and `name` are those of the model."""
    processing_class = arguments["processing_class"]
    if processing_class is None:
        tokenizer = tokenizer_of(name, args)
    elif isinstance(processing_class, ProcessorMixin):
        tokenizer = processing_class.tokenizer
        tokenizer.chat_template = tokenizer.chat_template or processing_class.chat_template
    else:
        tokenizer = processing_class
    arguments["processing_class"] = accepting_text(tokenizer)
    _restrict_adapter(model, config, args, arguments)


def _restrict_adapter(model: Model, config: PreTrainedConfig, args: RolloutConfig, arguments: dict[str, Any]) -> None:
    """Replace the `peft_config` among the arguments of a trainer, if there is one, by one of the language model."""
    if arguments["peft_config"] is not None:
        arguments["peft_config"] = lora_of_language_model(
            arguments["peft_config"], model, config, trust_remote_code=args.trust_remote_code
        )


def has_images(arguments: dict[str, Any]) -> bool:
    """Return whether a dataset among the arguments of a trainer has images."""
    return any(images.has_images(arguments[name]) for name in ("train_dataset", "eval_dataset"))


def check_no_images(name: str, arguments: dict[str, Any]) -> None:
    """Raise a `ValueError` if a dataset has images, and the model `name` reads none."""
    for dataset in ("train_dataset", "eval_dataset"):
        if images.has_images(arguments[dataset]):
            raise UserError(
                f"{dataset} has images, and {name or 'the model'} reads text alone. Use a checkpoint that reads "
                "images, or remove the columns `image` and `images` and image blocks of messages."
            )


def prepare_for_images(
    model: Model,
    config: PreTrainedConfig,
    name: str,
    args: RolloutConfig,
    arguments: dict[str, Any],
) -> None:
    """Check the arguments of a trainer for datasets with images, and fill in the processor of the checkpoint. Raises a
    `ValueError` for what cannot be trained with images."""
    check_settings_for_images(args, arguments)
    if arguments["processing_class"] is None:
        arguments["processing_class"] = processor_of(name, args)
    processor = arguments["processing_class"]
    if not isinstance(processor, ProcessorMixin):
        raise UserError(
            f"A dataset has images, and processing_class is a {type(processor).__name__}, which reads text alone. "
            "Pass the processor of the model, or remove the argument."
        )
    if processor.chat_template is None:
        processor.chat_template = processor.tokenizer.chat_template
    if args.freeze_vision_tower:
        _restrict_adapter(model, config, args, arguments)


def check_settings_for_images(args: RolloutConfig, arguments: dict[str, Any]) -> None:
    """Raise a `ValueError` for settings that are not supported with images."""
    unsupported = [name for name in ("tools", "environment_factory", "rollout_func") if arguments[name]]
    if args.rollout_schedule == "continuous":
        unsupported.append("rollout_schedule: continuous")
    unsupported += [name for name in ("rollout_lag", "use_transformers_continuous_batching") if getattr(args, name)]
    if args.vllm_sync_adapter and not args.freeze_vision_tower:
        unsupported.append("vllm_sync_adapter without freeze_vision_tower")
    if not args.supports_images:
        unsupported.append(type(args).__name__)
    if uses_plugin(args, "DEEPSPEED"):
        unsupported.append("DeepSpeed")
    if uses_plugin(args, "FSDP") and version_of_fsdp(args) != 2:
        unsupported.append("FSDP 1 (set fsdp_version: 2)")
    reward_funcs = arguments["reward_funcs"]
    if not isinstance(reward_funcs, list):
        reward_funcs = [reward_funcs]
    for function in reward_funcs:
        is_function = callable(function) and not isinstance(function, nn.Module)
        if is_function and "compute_logps" in inspect.signature(function).parameters:
            unsupported.append(f"the reward function {get_callable_name(function)!r}, which reads compute_logps")
    if unsupported:
        raise UserError(
            f"Datasets with images are not supported with {', '.join(unsupported)}. Remove these, or the images; "
            "GRPO, RLOO, PACS, MaxRL, and REAL train on images."
        )


# Processors and tokenizers ------------------------------------------------------------------------------------------


def processor_of(name: str, args: RolloutConfig, **kwargs: Any) -> Any:
    """Load the processor of a checkpoint as TRL does; `kwargs` are further ones of `from_pretrained`. Raises a
    `ValueError` if a package of it is missing."""
    try:
        return AutoProcessor.from_pretrained(
            name,
            revision=(args.model_init_kwargs or {}).get("revision", "main"),
            padding_side="left",
            truncation_side="left",
            trust_remote_code=args.trust_remote_code,
            **kwargs,
        )
    except ImportError as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"The processor of {name} needs a package that is missing ({reason:.200}). Install it, usually "
            "torchvision in the version for the installed torch."
        ) from error


def tokenizer_of(name: str, args: RolloutConfig) -> Any:
    """Load the tokenizer of a checkpoint as TRL loads processors."""
    return load_text_tokenizer(
        name,
        revision=(args.model_init_kwargs or {}).get("revision", "main"),
        padding_side="left",
        truncation_side="left",
        trust_remote_code=args.trust_remote_code,
    )


def processor_files(name: str, args: RolloutConfig) -> list[Path]:
    """Return the files of a checkpoint's processor, except those of its tokenizer; without those that cannot be
    had."""
    if not name:
        return []
    revision = (args.model_init_kwargs or {}).get("revision")
    files = [
        cached_file(
            name,
            file,
            revision=revision,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        for file in _PROCESSOR_FILES
    ]
    return [Path(file) for file in files if file is not None]


def copy_processor_files(files: list[Path], directory: Path) -> None:
    """Copy the files of a processor to the directory of a saved model."""
    for file in files:
        if file.resolve() != (directory / file.name).resolve():
            shutil.copyfile(file, directory / file.name)


# The language model inside ------------------------------------------------------------------------------------------


@runtime_checkable
class _AdaptsModules(Protocol):
    """A configuration of LoRA or another adapter of layers. Both attributes are names of modules or a pattern."""

    target_modules: Collection[str] | str | None
    exclude_modules: Collection[str] | str | None


def _model_without_weights(config: PreTrainedConfig, trust_remote_code: bool) -> PreTrainedModel:
    """Return a model on the meta device: of the architecture that the configuration names, if transformers has it."""
    names = config.architectures or [""]
    architecture = getattr(transformers, names[0], None)
    with torch.device("meta"):
        if architecture is None:
            return AutoModelForImageTextToText.from_config(config, trust_remote_code=trust_remote_code)
        return architecture(config)


def lora_of_language_model(
    peft_config: PeftConfig,
    model: Model,
    config: PreTrainedConfig,
    *,
    trust_remote_code: bool = False,
) -> PeftConfig:
    """Return a LoRA configuration that also excludes all modules outside of the language model: encoders of images
    often have layers of the same names. Raises a `ValueError` if none of the modules that it names is left."""
    if not isinstance(peft_config, _AdaptsModules):
        return peft_config
    if isinstance(model, str):
        model = _model_without_weights(config, trust_remote_code)
    names_outside = names_outside_language_model(model)
    _check_targets(peft_config.target_modules, model, names_outside)

    # peft excludes modules whose whole name matches a pattern.
    outside = "|".join(map(re.escape, names_outside))
    patterns = [rf"(?:{outside})(?:\..*)?"]
    excluded = peft_config.exclude_modules
    if isinstance(excluded, str) and excluded:  # a pattern already
        patterns.append(excluded)
    elif excluded:  # names, or ends of names
        patterns.append(rf"(?:.*\.)?(?:{'|'.join(map(re.escape, sorted(excluded)))})")
    restricted = copy.copy(peft_config)
    restricted.exclude_modules = "|".join(patterns)

    if isinstance(restricted.target_modules, str) and restricted.target_modules.lower() == "all-linear":
        modules = model.get_decoder().named_modules()
        restricted.target_modules = {name.split(".")[-1] for name, layer in modules if isinstance(layer, _LINEAR)}
    return restricted


def _check_targets(
    targets: Collection[str] | str | None, model: PreTrainedModel | PeftModel, names_outside: list[str]
) -> None:
    """Raise a `ValueError` if a list of `targets`, ends of names of modules, has none that is not outside."""
    if not isinstance(targets, set | list | tuple):
        return
    is_outside = re.compile("|".join(rf"{re.escape(name)}(\..*)?" for name in names_outside)).fullmatch
    names_inside = [name for name, _ in model.named_modules() if not is_outside(name)]
    has_target = any(f".{name}".endswith(f".{target}") for name in names_inside for target in targets)
    if not has_target:
        raise UserError(
            f"LoRA's target_modules (in a recipe: lora_target_modules) has {', '.join(sorted(targets))}, and the "
            "trained part of the model has no such module. Correct the name, or use all-linear."
        )


def names_outside_language_model(model: PreTrainedModel | PeftModel) -> list[str]:
    """Return the names of the largest modules that contain no part of the language model: encoders of images, and the
    layers that connect them."""
    parts = [model.get_decoder(), model.get_output_embeddings()]
    names_of_parts = []
    names_around_parts = set()  # with the names of the parts themselves
    for name, module in model.named_modules():
        if any(module is part for part in parts):
            names_of_parts.append(name)
        if any(descendant is part for descendant in module.modules() for part in parts):
            names_around_parts.add(name)

    names_outside: list[str] = []
    for name, _ in model.named_modules():  # parents before children
        is_inside_part = any(name.startswith(f"{part}.") for part in names_of_parts)
        is_inside_outside = any(name.startswith(f"{outside}.") for outside in names_outside)
        if name not in names_around_parts and not is_inside_part and not is_inside_outside:
            names_outside.append(name)
    return names_outside


def freeze_outside_language_model(model: PreTrainedModel | PeftModel) -> None:
    """Freeze all weights outside of the language model and its head. Raises a `ValueError` if none is left."""
    base = without_peft(model)
    language_model = (base.get_decoder(), base.get_output_embeddings())
    ids_inside = {id(parameter) for part in language_model for parameter in part.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in ids_inside:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(
            "All trained weights are outside of the language model, where text does not reach them. Train layers of "
            "the language model (with LoRA: target_modules), or use a dataset with images."
        )


@contextmanager
def context_of_language_model(config: PreTrainedConfig) -> Iterator[None]:
    """Give a configuration the context length of the language model inside, where TRL's tool loop looks for it."""
    text_config = config.get_text_config()
    if hasattr(config, "max_position_embeddings") or not hasattr(text_config, "max_position_embeddings"):
        yield
        return
    config.max_position_embeddings = text_config.max_position_embeddings
    try:
        yield
    finally:
        del config.max_position_embeddings
