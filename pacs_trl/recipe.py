"""A recipe: one YAML file, plus command-line overrides, that describes one training run.

`method` decides which trainer runs and which settings exist: the fields of that trainer's configuration and of the
other dataclasses below. [`Recipe.from_settings`] makes all of them, for a run in this process or for a launch
elsewhere (`plan`). Reading a recipe loads neither model nor data, and needs no GPU.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from peft import LoraConfig, PeftConfig
from trl import ModelConfig, get_peft_config

from . import rewards
from .data import DataArguments
from .data.text_tokenizer import load_text_tokenizer
from .errors import UserError
from .methods import DEFAULT_METHOD, METHODS, check_method, is_of_user, keys_of_other_methods
from .rewards import VerificationArguments
from .rollouts.checkpoint_files import last_resumable_checkpoint
from .rollouts.process_checks import shared_turns_error
from .rollouts.process_count import read_saved_run
from .rollouts.rollout_config import RolloutConfig
from .settings import read_settings, set_environment, typed_values
from .settings.checks import illegal_values, refuse_illegal_values, without_effect
from .settings.fields import setting
from .settings.names import function_of_user, object_of_user
from .update.step_sizes import BatchSizes


if TYPE_CHECKING:
    from .rollouts.rollout_trainer import RolloutTrainer


T = TypeVar("T")

logger = logging.getLogger(__name__)

# Values of resume_from_checkpoint besides paths.
WORDS_FOR_NO_CHECKPOINT = ("None", "none", "False", "false")
WORDS_FOR_LAST_CHECKPOINT = ("last", "true", "True")


@dataclass
class RunArguments:
    """Select the method, rewards, tools, and environment."""

    method: str = setting(
        "pacs",
        '`"pacs"`; another objective on the same update, data, and rewards: `"grpo"`, `"rloo"`, `"maxrl"` '
        'or `"real"`; `"ppo"`; the name of a module in `pacs_trl.experimental`; or a trainer of your own, '
        "`package.module:Class`.",
    )
    reward_funcs: list[str] = field(
        default_factory=lambda: ["math_reward"],
        metadata={
            "help": "Names from `pacs_trl.rewards`, or `package.module:function` of your own, importable from the "
            "working directory. With several, `reward_weights` says how they add up."
        },
    )
    tools: list[str] | None = setting(
        None,
        "Functions that the model may call before it answers: `run_python`, or `package.module:function` "
        "of your own, with type hints and a docstring that describes its arguments. The chat template must "
        "have tools.",
    )
    environment: str | None = setting(
        None,
        "`package.module:attribute`, importable from the working directory: an object with "
        "`environment_factory`, `train_dataset`, and `reward_funcs`, as TRL's `HarborSpec` and "
        "`OpenRewardSpec`. It replaces `dataset_name`, and `reward_funcs` if they are not given.",
    )
    rollout_func: str | None = setting(
        None,
        "`package.module:function` that generates the completions; see `rollout_func` of TRL's `GRPOTrainer`.",
    )
    expected_processes: int | None = setting(
        None,
        "Number of processes that the batch sizes are written for. Another number makes another batch, "
        "which `pacs-trl plan` reports, unless `keep_global_batch` is set.",
        least=1,
    )
    keep_global_batch: bool = setting(
        False,
        "Whether another number of processes keeps the completions per optimizer step and generation batch of "
        "`expected_processes`, or without it of the checkpoint to resume from. Sets `per_device_train_batch_size`, "
        "`gradient_accumulation_steps`, `steps_per_generation`, and, if the number does not divide them, "
        "`completions_per_step`.",
    )

    def __post_init__(self):
        refuse_illegal_values(self)


class Recipe(NamedTuple):
    """
    The dataclasses of a recipe.

    Attributes:
        training: The configuration of the method's trainer.
        settings (`dict`): The keys of the file and the command line with their values; written to a file, they repeat
            the run.
        step ([`BatchSizes`]): Batch sizes for the number of processes of the run.
    """

    run: RunArguments
    data: DataArguments
    model: ModelConfig
    training: Any
    verification: VerificationArguments
    settings: dict[str, Any]
    step: BatchSizes

    @property
    def model_name(self) -> str:
        """Name or path of the model, without which no recipe is read."""
        assert self.model.model_name_or_path is not None
        return self.model.model_name_or_path

    @classmethod
    def from_settings(cls, settings: dict[str, Any], num_processes: int | None = None) -> "Recipe":
        """Read keys and values as YAML or [`~settings.read_settings`] give them, for this run or for a launch of
        `num_processes` on other hardware. Raises a `ValueError` that names unknown, missing, illegal, or conflicting
        keys."""
        method = settings.get("method", DEFAULT_METHOD)
        classes = settings_classes(method)
        known = {declared.name for part in classes for declared in fields(part)}
        if errors := keys_of_other_methods(method, settings.keys() - known):
            raise UserError(" ".join(errors))
        values = _typed_values(settings, classes, method)
        if values["keep_global_batch"]:
            values |= _sizes_for_processes(values, num_processes or int(os.environ.get("WORLD_SIZE", "1")))
        *other_classes, config = classes
        if num_processes is not None:
            config = _class_for_launch(config, num_processes)
        run, data, model, verification, training = _instantiate((*other_classes, config), values)
        if errors := illegal_values(model) + _conflicts(run, data, model, training, settings):
            raise UserError(" ".join(errors))
        step = BatchSizes.of(training, training.world_size)
        return cls(run, data, model, training, verification, _repeatable(settings, values, method), step)


def _typed_values(settings: dict, classes: tuple[type, ...], method: str) -> dict[str, Any]:
    """Return the values of all fields of some dataclasses. An environment replaces dataset and rewards."""
    environment = settings.get("environment")
    if environment:
        settings = {"dataset_name": environment, **settings}
    values = typed_values(settings, classes, f"method {method}")
    if environment and "reward_funcs" not in settings:
        values["reward_funcs"] = []
    if values["model_name_or_path"] is None:
        raise UserError("`model_name_or_path` is missing. Set it to a path or a Hub id.")
    return values


def _sizes_for_processes(values: dict[str, Any], num_processes: int) -> dict[str, Any]:
    """Return the batch-size settings of `keep_global_batch` for a number of processes."""
    step = _written_sizes(values).for_processes(num_processes)
    if step.completions_per_step is not None and "completions_per_step" not in values:
        raise UserError(
            f"{step.completions_per_update} completions of an optimizer step cannot be divided by {num_processes} "
            f"processes, which method {values['method']} needs. Launch a number that divides them."
        )
    sizes = {name: value for name, value in step.settings.items() if name in values}
    return sizes | {"generation_batch_size": None}


def _written_sizes(values: dict[str, Any]) -> BatchSizes:
    """Return the batch sizes for the number of processes that they are written for."""
    expected = values["expected_processes"]
    if expected is None:
        resume = str(values["resume_from_checkpoint"])
        checkpoint: str | None = resume
        if resume in WORDS_FOR_LAST_CHECKPOINT:
            checkpoint = last_resumable_checkpoint(values["output_dir"])
        if checkpoint is None or resume in WORDS_FOR_NO_CHECKPOINT:
            raise UserError(
                "keep_global_batch needs the number of processes that the batch sizes are written for. Set "
                "expected_processes, or resume_from_checkpoint to a checkpoint."
            )
        return read_saved_run(checkpoint).batch_sizes
    sizes: dict[str, Any] = {declared.name: values.get(declared.name) for declared in fields(BatchSizes)}
    sizes["num_processes"] = expected
    if sizes["steps_per_generation"] is None:
        sizes["steps_per_generation"] = values["gradient_accumulation_steps"]
        if values["generation_batch_size"]:
            completions = values["per_device_train_batch_size"] * expected
            sizes["steps_per_generation"] = values["generation_batch_size"] // completions
    return BatchSizes(**sizes)


def _instantiate(classes: tuple[type, ...], values: dict[str, Any]) -> list[Any]:
    """Return an object of each dataclass. Raises a `ValueError` with what all of them refuse."""
    instances, errors = [], []
    for part in classes:
        values_of_part = {declared.name: values[declared.name] for declared in fields(part) if declared.init}
        try:
            instances.append(part(**values_of_part))
        except (ValueError, TypeError, OSError, ImportError) as error:  # of libraries: files, missing packages
            advice = "" if isinstance(error, UserError) else " Correct these settings."
            errors.append(f"{part.__name__}: {str(error).rstrip('.') + '.' if advice else error}{advice}")
    if errors:
        raise UserError(" ".join(errors))
    return instances


def _repeatable(settings: dict[str, Any], values: dict[str, Any], method: str) -> dict[str, Any]:
    """Return the settings that were written, with typed values, without token and environment variables."""
    repeatable = {"method": method}
    for key in sorted(settings.keys() - {"env", "hub_token"}):
        name = key if key in values else key.removeprefix("no_")  # `no_bf16: true` is `bf16: false`
        is_scalar = isinstance(values[name], str | int | float | None)
        repeatable[name] = values[name] if is_scalar else settings[key]
    return repeatable


def _class_for_launch(config: Any, num_processes: int) -> type:
    """
    Return a subclass of a configuration class that describes a run of `num_processes` processes on other hardware.

    transformers checks the devices of this machine for `use_cpu: false` and `tf32`, so that an instance has
    `use_cpu: true` and no `tf32`. Whether the run needs GPUs is in `needs_gpu`.
    """

    def world_size(self):
        return num_processes

    def __post_init__(self):
        self.needs_gpu = not self.use_cpu
        self.use_cpu = True
        self.tf32 = None
        config.__post_init__(self)

    members = {"world_size": property(world_size), "__post_init__": __post_init__}
    return type(config.__name__, (config,), members)


def settings_without_effect(recipe: Recipe) -> list[str]:
    """Return one message per setting that turns off others of a recipe."""
    values = {**vars(recipe.model), **vars(recipe.training)}
    written = set(recipe.settings)
    if recipe.training.rollout_engine == "vllm":  # which has these two, but not use_vllm
        written -= {"vllm_max_model_length", "vllm_gpu_memory_utilization"}
    return without_effect(written, values)


def read_recipe(argv: Sequence[str]) -> Recipe:
    """Read `--config RECIPE.yaml [--key value ...]` for a run in this process; the command line wins over the file."""
    settings = read_settings(argv)
    ranks = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")  # of torchrun and MPI
    if os.environ.get("WORLD_SIZE", "1") != "1" and not any(name in os.environ for name in ranks):
        raise UserError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} is set, but no launcher has given this process a RANK: it would "
            "wait for the others forever. Start it with `accelerate launch` or torchrun, or unset WORLD_SIZE."
        )
    set_environment(settings)
    recipe = Recipe.from_settings(settings)
    for message in settings_without_effect(recipe):
        logger.warning(message)
    return recipe


def settings_classes(method: str) -> tuple[type, ...]:
    """Return the dataclasses whose fields are the settings of a recipe; the last one configures the trainer. Raises a
    `ValueError` if there is no such method."""
    check_method(method)
    return RunArguments, DataArguments, ModelConfig, VerificationArguments, config_class(method)


def config_class(method: str) -> type[RolloutConfig]:
    """Return the training configuration of a method."""
    if method in METHODS:
        return _import_class(METHODS[method].config)
    if is_of_user(method):
        return _classes_of_user(method)[1]
    return _only_subclass(f"{__package__}.experimental.{method}", RolloutConfig)


def trainer_of_method(method: str) -> "type[RolloutTrainer]":
    """Return the trainer of a method: of this package, or the class of a user, `package.module:Class`."""
    if method in METHODS:
        return _import_class(METHODS[method].trainer)
    if is_of_user(method):
        return _classes_of_user(method)[0]
    from .rollouts.rollout_trainer import RolloutTrainer  # slow to import

    return _only_subclass(f"{__package__}.experimental.{method}", RolloutTrainer)


def _classes_of_user(method: str) -> "tuple[type[RolloutTrainer], type[RolloutConfig]]":
    """Import the trainer of a user, `package.module:Class`, and return it with its configuration."""
    from .rollouts.rollout_trainer import RolloutTrainer

    trainer_class = object_of_user(method, "method")
    if isinstance(trainer_class, type) and issubclass(trainer_class, RolloutTrainer):
        config = getattr(trainer_class, "_config_class", None)
        if isinstance(config, type) and issubclass(config, RolloutConfig):
            return trainer_class, config
    raise UserError(
        f"method: {method!r} is no trainer of this package. Name a subclass of one, such as PACSTrainer, with its "
        "configuration as `_config_class`."
    )


def _import_class(name: str) -> Any:
    module, _, class_name = name.rpartition(".")
    return getattr(import_module(f"{__package__}.{module}"), class_name)


def _only_subclass(module_name: str, base: type[T]) -> type[T]:
    """Return the only subclass of `base` that a module defines."""
    classes = [value for value in vars(import_module(module_name)).values() if isinstance(value, type)]
    subclasses = [part for part in classes if part.__module__ == module_name and issubclass(part, base)]
    if len(subclasses) != 1:
        names = ", ".join(subclass.__name__ for subclass in subclasses) or "none"
        raise UserError(
            f"The module {module_name} of a method must define one subclass of {base.__name__}, and defines {names}. "
            "Add it, or move the others to a module whose name begins with an underscore."
        )
    return subclasses[0]


def _conflicts(run: RunArguments, data: DataArguments, model: Any, training: Any, settings: dict) -> list[str]:
    """Return what is wrong between settings, or would be ignored without a word by TRL and transformers."""
    errors = [
        f"`{key}` would be ignored: {why}. {remedy}" for key, why, remedy in _ignored(run, model, training, settings)
    ]
    if model.load_in_4bit and model.dtype == "auto":
        errors.append(
            "load_in_4bit computes in dtype, which must be a number format and is auto. Set dtype: bfloat16."
        )
    if run.tools or run.environment:
        if error := shared_turns_error(training):
            errors.append(error)
    if training.eval_strategy != "no" and not (data.eval_split_size or training.eval_benchmarks):
        errors.append(
            f"eval_strategy={training.eval_strategy.value!r} needs problems that are held out: set eval_split_size "
            "to their number, or eval_benchmarks to names of benchmarks."
        )
    if training.reward_weights is not None:
        errors += _reward_weight_errors(training.reward_weights, run.reward_funcs, training)
    return errors


def _ignored(run: RunArguments, model: ModelConfig, training: Any, settings: dict) -> Iterator[tuple[str, str, str]]:
    """Yield each key that would be ignored, why, and what to do."""
    if training.optim_args and training.optim in ("adamw_torch", "adamw_torch_fused"):
        yield "optim_args", "AdamW takes adam_beta1, adam_beta2, and adam_epsilon", "Set these, or remove the key."
    if training.warmup_steps and training.lr_scheduler_type == "constant":
        remedy = "Set lr_scheduler_type: constant_with_warmup, or remove the key."
        yield "warmup_steps", "the rate is constant", remedy
    if training.eval_strategy == "no":
        remedy = "Set eval_strategy: steps and eval_steps, or remove the key."
        if training.eval_benchmarks:
            yield "eval_benchmarks", "eval_strategy is no", remedy
        if training.eval_on_start:
            yield "eval_on_start", "eval_strategy is no", remedy
    if training.fsdp_config and not training.fsdp:
        remedy = "Use an accelerate file (`accelerate launch --config_file`), set fsdp, or remove the key."
        yield "fsdp_config", "fsdp is not set", remedy

    has_clip = training.vllm_importance_sampling_clip_min or training.vllm_importance_sampling_clip_max
    truncates = training.vllm_importance_sampling_mode.endswith("_truncate")
    if training.vllm_importance_sampling_correction and truncates and not has_clip:
        remedy = "Set vllm_importance_sampling_clip_max, or vllm_importance_sampling_correction: false."
        yield "vllm_importance_sampling_mode", "no clip_min or clip_max is set", remedy
    if training.max_tool_calling_iterations is not None and not (run.tools or run.environment):
        remedy = "Set tools: [run_python] or environment, or remove the key."
        yield "max_tool_calling_iterations", "there are no tools and no environment", remedy

    lora_keys = sorted(key for key in settings if key.startswith("lora_") or key in ("use_dora", "use_rslora"))
    if lora_keys and not model.use_peft and "use_peft" not in settings:
        remedy = "Set use_peft: true, or remove the key; use_peft: false keeps it."
        yield ", ".join(lora_keys), "the whole model is trained without use_peft: true", remedy
    if run.environment:
        used_keys = {"eval_split_size", "max_train_samples", "dataset_seed"}
        data_keys = {declared.name for declared in fields(DataArguments)} - used_keys
        if unused_keys := sorted(data_keys & settings.keys()):
            yield ", ".join(unused_keys), "`environment` has the examples", "Remove the key, or `environment`."


def _reward_weight_errors(weights: list[float], reward_funcs: list[str], training: Any) -> list[str]:
    """Return what is wrong with the weights of reward functions, whose weighted sum may have to be a label. Without
    weights, functions may return `None` for each other's problems."""
    if reward_funcs and len(weights) != len(reward_funcs):
        return [f"reward_weights={weights} must have one weight for each of reward_funcs={reward_funcs}."]
    if training.rewards_are_binary and sorted(weights) != [0.0] * (len(weights) - 1) + [1.0]:
        return [
            f"reward_weights={weights} must be 1 for one reward function and 0 for the others: rewards of "
            f"{type(training).__name__} are 0 or 1, and a weighted sum lies between. Write one function that returns "
            "0 or 1, or use method pacs."
        ]
    if training.rewards_are_labels and (abs(sum(weights) - 1) > 1e-6 or min(weights) < 0):
        return [
            f"reward_weights={weights} must not be negative and must sum to 1, not {sum(weights):g}: the weighted sum "
            "of the rewards is the label, from 0 (wrong) to 1 (right)."
        ]
    return []


def adapter_config(model: ModelConfig) -> PeftConfig | None:
    """Return the configuration of the LoRA adapter, or `None` without `use_peft`."""
    try:
        peft_config = get_peft_config(model)
    except ValueError as error:
        raise UserError(f"The LoRA settings are no adapter: {error} Correct the lora_* settings.") from error
    if isinstance(peft_config, LoraConfig):
        targets = peft_config.target_modules
        if isinstance(targets, str) and targets.isidentifier():
            # TRL turns a list of one name into a string, which peft reads as a regular expression
            peft_config.target_modules = {targets}  # type: ignore[assignment]  # a set, as peft stores names
    return peft_config


def load_tokenizer(recipe: Recipe, **kwargs: Any) -> Any:
    """Load the tokenizer of the model of a recipe; `kwargs` are those of `from_pretrained`. Raises an `OSError` if
    there is none."""
    return load_text_tokenizer(
        recipe.model_name,
        padding_side="left",
        revision=recipe.model.model_revision,
        trust_remote_code=recipe.training.trust_remote_code,
        **kwargs,
    )


def reward_function(name: str) -> Callable:
    """Return a function of `pacs_trl.rewards` by name, or another as `package.module:function`, also from the working
    directory."""
    names = sorted(key for key in vars(rewards) if key.endswith("_reward"))
    if name in names:
        return getattr(rewards, name)
    if "." not in name and ":" not in name:
        raise UserError(
            f"There is no reward function {name!r} in pacs_trl.rewards, which has {', '.join(names)}. Write functions "
            "of your own as package.module:function."
        )
    return function_of_user(name, "reward_funcs")
