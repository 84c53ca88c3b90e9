"""Comparison of settings: of a run with the checkpoint that it resumes from, and of a trainer with its construction.

`checkpoint_settings.yaml` lists which settings must be equal, and which may differ.
"""

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from peft import PeftConfig
from transformers import PreTrainedConfig
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME
from trl import GRPOConfig

from ..errors import UserError
from ..rewards import shared_arguments
from ..settings.trl_settings import GRPO_LOSS_SETTINGS
from ..update.step_sizes import BatchSizes
from .protocols import CheckedTrainer


if TYPE_CHECKING:
    from .resumable_trainer import ResumableTrainer


logger = logging.getLogger(__name__)

_SETTING_LISTS = yaml.safe_load(Path(__file__).with_name("checkpoint_settings.yaml").read_text(encoding="utf-8"))


def _plain_settings(args: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return the named settings after a JSON round trip, so that they can be compared with those of a checkpoint."""
    return json.loads(json.dumps({name: getattr(args, name) for name in names}, default=str))


# With a checkpoint --------------------------------------------------------------------------------------------------


def settings_to_compare(trainer: "ResumableTrainer") -> dict[str, Any]:
    """Return what a checkpoint stores and a run that resumes from it must have too, as plain values by name."""
    added_to_trl = {field.name for field in fields(trainer.args)} - {field.name for field in fields(GRPOConfig)}
    compared_of_added = sorted(added_to_trl - set(_SETTING_LISTS["free"]))
    names = [*_SETTING_LISTS["equal"], *GRPO_LOSS_SETTINGS, *compared_of_added, *trainer._equal_settings]
    if trainer.args.rollout_schedule == "continuous":  # state of a server and of an engine process differs
        names.append("use_vllm")
    settings = _plain_settings(trainer.args, names)

    sizes = BatchSizes.of(trainer.args, trainer.accelerator.num_processes)
    settings["completions per optimizer step"] = sizes.completions_per_update
    settings["completions per generation batch"] = sizes.completions_per_generation

    verification = shared_arguments()
    all_of_verification = {field.name for field in fields(verification)}
    compared_of_verification = sorted(all_of_verification - set(_SETTING_LISTS["free_verification"]))
    settings |= _plain_settings(verification, compared_of_verification)
    settings["reward functions"] = trainer.reward_func_names
    return settings


def check_same_settings(checkpoint: str, saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Raise a `ValueError` that lists the settings in `current` that are otherwise in a checkpoint, which has
    `saved`."""
    differing = [
        f"{name}: {saved.get(name)!r} in the checkpoint, {value!r} now"
        for name, value in current.items()
        if saved.get(name) != value
    ]
    if differing:
        raise UserError(
            f"{checkpoint} has other settings: {'; '.join(differing)}. Restore these settings, or start a new run "
            "from its weights with model_name_or_path."
        )


# Entries of a model's configuration that decide the shapes of its weights.
_ENTRIES_OF_SHAPES = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "num_local_experts",
    "moe_intermediate_size",
)


def check_same_model(checkpoint: str, config: PreTrainedConfig) -> None:
    """Raise a `ValueError` if the weights in a checkpoint have other shapes than those of a model with this
    configuration. A checkpoint of an adapter has no configuration of its model, and passes."""
    file = Path(checkpoint, CONFIG_NAME)
    if not file.is_file():
        return
    saved = json.loads(file.read_text(encoding="utf-8"))
    saved = saved.get("text_config", saved)
    current = config.get_text_config().to_dict()  # attributes of layers that differ cannot be read
    differing = [
        f"{name}: {saved[name]!r} in the checkpoint, {current[name]!r} now"
        for name in _ENTRIES_OF_SHAPES
        if name in saved and name in current and saved[name] != current[name]
    ]
    if differing:
        raise UserError(
            f"{checkpoint} holds another model than this run trains ({'; '.join(differing)}). Set model_name_or_path "
            "to the model that the run was started with, or choose another output_dir."
        )


# LoRA settings that must be equal in a checkpoint and in the run that resumes from it.
_ADAPTER_SETTINGS = (
    "r",
    "lora_alpha",
    "lora_dropout",
    "bias",
    "layers_to_transform",
    "modules_to_save",
    "use_rslora",
    "use_dora",
)
# Those that peft may replace when it adds an adapter to a model: names by which "all-linear" is meant, and those of
# fused experts.
_RESOLVED_ADAPTER_SETTINGS = ("target_modules", "target_parameters", "rank_pattern", "alpha_pattern")


def check_same_adapter(checkpoint: str, adapter: PeftConfig | None, *, is_in_model: bool = True) -> None:
    """
    Raise a `ValueError` unless a checkpoint has the adapter that the run trains. Only warn if their base models have
    different names: the model may have moved.

    Args:
        checkpoint (`str`): Folder of the checkpoint.
        adapter ([`~peft.PeftConfig`], *optional*): That of the run, `None` if it trains the whole model.
        is_in_model (`bool`): Whether peft has added the adapter to the model, and so resolved the settings that are
            compared only then.
    """
    file = Path(checkpoint, ADAPTER_CONFIG_NAME)
    saved = json.loads(file.read_text()) if file.is_file() else None
    if saved is None and adapter is None:
        return
    if saved is None:
        raise UserError(
            f"{checkpoint} holds a whole model, but this run trains an adapter (LoRA). Set use_peft: false to "
            "continue that run, or choose another output_dir."
        )
    if adapter is None:
        raise UserError(
            f"{checkpoint} holds an adapter (LoRA), but this run trains a whole model. Set use_peft: true to continue "
            "that run, or choose another output_dir."
        )
    names: tuple[str, ...] = _ADAPTER_SETTINGS
    if is_in_model:
        names += _RESOLVED_ADAPTER_SETTINGS
    current = {name: getattr(adapter, name, None) for name in names}
    check_same_settings(checkpoint, _with_sorted_lists(saved), _with_sorted_lists(current))

    saved_base, current_base = saved["base_model_name_or_path"], adapter.base_model_name_or_path
    if saved_base and current_base and Path(saved_base).name != Path(current_base).name:
        logger.warning(
            "%s holds an adapter of %s, and this run trains one of %s. Resume with the model that the run was started "
            "with, unless it has only moved.",
            checkpoint,
            saved_base,
            current_base,
        )


def _with_sorted_lists(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings whose lists, tuples, and sets, of module names or layers, can be compared in any order."""
    collections = (list, tuple, set)
    return {name: sorted(value) if isinstance(value, collections) else value for name, value in settings.items()}


# With the construction of a trainer ---------------------------------------------------------------------------------


def fixed_settings(args: Any) -> dict[str, Any]:
    """Return the settings that a trainer reads only when it is constructed, as plain values by name."""
    live = re.compile("|".join(_SETTING_LISTS["live"]))
    return _plain_settings(args, [field.name for field in fields(args) if not live.fullmatch(field.name)])


def check_fixed(trainer: CheckedTrainer) -> None:
    """Raise a `ValueError` that lists the settings that were changed after a trainer was constructed. Those of the
    optimizer may change until it is created."""
    current = fixed_settings(trainer.args)
    if trainer.optimizer is None:
        trainer._fixed_settings |= {name: current[name] for name in trainer.optimizer_settings}
    constructed = trainer._fixed_settings
    changed = [
        f"args.{name} was changed from {constructed[name]!r} to {value!r}"
        for name, value in current.items()
        if constructed[name] != value
    ]
    if changed:
        raise UserError(
            f"{', '.join(changed)} after construction: the trainer has already read it. Restore the value, or "
            "construct a new trainer with it."
        )
