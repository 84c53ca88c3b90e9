"""A recipe: one YAML file, plus command-line overrides, that describes one training run.

`method` decides which trainer runs and which settings exist: the fields of that trainer's configuration and of the
other dataclasses below. [`Recipe.from_settings`] reads them into values and a list of errors, which `train` raises and
`plan` prints; only `train` goes on to make the configuration. Reading a recipe loads no model, no data and no GPU.
"""

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from types import SimpleNamespace
from typing import Any, NamedTuple

from transformers import AutoTokenizer
from trl import GRPOConfig, ModelConfig

from . import experimental, rewards
from .baselines.ppo_config import PPOConfig
from .data import DataArguments
from .data.sets import MINIATURE
from .data.tasks import TOOL_TASKS, check_task
from .pacs_config import PACSConfig
from .redaction import PublishedArguments
from .rollouts.step_sizes import Step, step_errors
from .rollouts.tools import check_tool, shared_turns_error
from .rollouts.trainer_checks import check_reward_function
from .rollouts.trainer_settings import precision_error, trainer_errors
from .settings import Setting, settings_of
from .settings.command_line import did_you_mean, read_settings
from .settings.keys import NEEDED, values_and_errors
from .settings.optional import function_of_user
from .verification.shared import VerificationArguments, run_python


@dataclass
class GRPOArguments(PublishedArguments, GRPOConfig):
    """TRL's configuration, of which trackers get what others may see."""

    @classmethod
    def errors(cls, given: Any, step: Step | None) -> list[str]:
        """What is wrong between settings besides what TRL says."""
        return []


METHODS = {"pacs": PACSConfig, "grpo": GRPOArguments, "ppo": PPOConfig}

# What transformers 5.23 calls what all versions know by the older name.
SECOND_NAMES = {
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
}

# Without these the sizes of a step are not known.
_SIZES = {field.name for field in fields(Step)} | {"generation_batch_size"}


@dataclass
class RunArguments:
    """
    What is run.

    Args:
        method (`str`, *optional*, defaults to `"pacs"`):
            `"pacs"`, or a baseline on the same data and rewards: `"grpo"` (TRL's loss) or `"ppo"`; or the name of a
            module in `pacs_trl.experimental`.
        reward_funcs (`list[str]`, *optional*, defaults to `["math_reward"]`):
            Names from `pacs_trl.rewards`, or `package.module.function` of your own, importable from the working
            directory. With several, `reward_weights` says how they add up.
        tools (`list[str]`, *optional*):
            Functions that the model may call before it answers: `run_python`, or `package.module.function` of your
            own, with type hints and a docstring that describes its arguments. The chat template must have tools.
        expected_processes (`int`, *optional*):
            Number of processes that the batch sizes are written for. Another number makes another batch, which
            `pacs-trl plan` says in words.
    """

    method: str = "pacs"
    reward_funcs: list[str] = field(default_factory=lambda: ["math_reward"])
    tools: list[str] | None = None
    expected_processes: int | None = None

    def __post_init__(self):
        if not self.reward_funcs:
            raise ValueError("reward_funcs is empty: there would be nothing to learn from. Write [math_reward].")
        if self.tools == []:
            raise ValueError("tools is empty: there would be nothing to call. Write [run_python], or remove the key.")


class Recipe(NamedTuple):
    """
    A recipe as values.

    Attributes:
        run, data, model, verification:
            Dataclasses; plain values of the same names where one has refused them.
        training:
            Values of the fields of the method's configuration; that configuration itself once [`Recipe.built`] has
            made it.
        settings (`dict`):
            The keys that were given, with their final values: written to a file, they repeat the run.
        step ([`Step`], *optional*):
            What the batch sizes come to on the processes of the run; `None` if they are illegal or those are not
            known.
    """

    run: RunArguments
    data: DataArguments
    model: ModelConfig
    training: Any
    verification: VerificationArguments
    settings: dict
    step: Step | None

    @classmethod
    def from_settings(cls, settings: dict, world_size: int | None) -> tuple["Recipe | None", list[str]]:
        """
        What the keys of a recipe come to, and everything that is wrong with them. Asks nothing of this machine.

        Args:
            settings (`dict`):
                Keys and values as YAML reads them.
            world_size (`int`, *optional*):
                Number of processes of the run; `None` if it is not known, so that batch sizes cannot be judged.

        Returns:
            [`Recipe`], in which defaults stand for values that are illegal (`None` if there is no such method), and a
            message for each mistake.
        """
        method, names = settings.get("method", "pacs"), method_names()
        if method not in names:
            near = did_you_mean(method, names) if isinstance(method, str) else ""
            return None, [f"`method` must be one of {', '.join(names)}; got {method!r}.{near}"]
        known = {name: settings_of_method(name) for name in (*METHODS, method)}
        given, illegal, errors = values_and_errors(settings, method, known)
        values = {name: setting.default for name, setting in known[method].items()} | given
        if values["bf16"] is None:  # TRL's default
            values["bf16"] = not values["fp16"]
        if "hub_strategy" not in given:
            values["hub_strategy"] = "end"
        errors += _second_name_errors(values, given)
        *parts, training = (_made(part, values, errors) for part in _parts(method))
        run, data, model, verification = parts
        step = None
        if world_size is not None and not illegal & _SIZES:
            wrong_sizes = step_errors(training, world_size)
            step = None if wrong_sizes else Step.of(training, world_size)
            errors += wrong_sizes
        errors += config_class(method).errors(training, step)
        errors += trainer_errors(training, world_size)
        errors += _relation_errors(run, data, training) + _adapter_errors(model, given)
        if run.tools and (together := shared_turns_error(training, world_size)):
            errors.append(together)
        # a recipe is published, a token never
        kept = {"method": method} | {key: value for key, value in given.items() if key != "hub_token"}
        return cls(run, data, model, training, verification, dict(sorted(kept.items())), step), errors

    def built(self) -> "Recipe":
        """
        The same with the configuration that the trainer takes; it asks this machine for its devices.

        Raises:
            `ValueError`: if this machine cannot do what is asked for.
        """
        config = config_class(self.run.method)
        if refused := precision_error(self.training):
            raise ValueError(refused)
        try:
            training = config(**copy.deepcopy(vars(self.training)))
        except (TypeError, OSError, ImportError) as error:  # how libraries refuse files and missing packages
            raise ValueError(
                f"The settings of {config.__name__} are refused: {type(error).__name__}: {error}"
            ) from error
        final = {}
        for key, value in self.settings.items():
            parts = (self.run, self.data, self.model, training, self.verification)
            last = next(getattr(part, key) for part in parts if hasattr(part, key))
            last = last.value if isinstance(last, Enum) else last
            # TRL turns a list of one LoRA target into text, transformers turns texts and mappings into objects
            is_plain = isinstance(last, str | int | float | dict | None) and not isinstance(value, list)
            final[key] = last if is_plain else value
        return self._replace(training=training, settings=final)


def _made(part: type, values: dict, errors: list[str]) -> Any:
    """A part of a recipe. Training configurations are made where the run is, see [`Recipe.built`]."""
    own = {f.name: values[f.name] for f in fields(part) if f.init}
    if issubclass(part, GRPOConfig) or None in (own.get(name, "") for name in NEEDED if part is DataArguments):
        return SimpleNamespace(**own)
    try:
        return part(**own)
    except ValueError as error:
        errors.append(str(error))
        return SimpleNamespace(**own)


def _second_name_errors(values: dict, given: dict) -> list[str]:
    """Give the older of two names the value of the newer one, as transformers does; what is wrong if both were
    given."""
    errors = []
    for new, old in SECOND_NAMES.items():
        if values.get(new) is not None:
            if given.get(old, values[new]) != values[new]:
                errors.append(
                    f"{new}={values[new]!r} and {old}={given[old]!r} are one setting under two names, of which "
                    "transformers would take the first. Remove one of them."
                )
            values[old] = values[new]
    return errors


# As accelerate reads them, of torchrun and of MPI.
RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")


def read_recipe(argv: Sequence[str]) -> Recipe:
    """
    Read `--config RECIPE.yaml [--key value ...]` for a run on this machine.

    Args:
        argv (`Sequence[str]`):
            Command-line arguments; keys given there win over the file.

    Returns:
        [`Recipe`], with its training configuration built.

    Raises:
        `ValueError`: with everything that is wrong: a file that does not exist or is not a mapping, an unknown method
        or key
            (with the nearest known one), values of the wrong type or out of range, and contradictions; or with what is
            missing in the environment of one process of several.
    """
    settings, world_size = read_arguments(argv), int(os.environ.get("WORLD_SIZE", 1))
    if world_size > 1 and not any(name in os.environ for name in RANKS):
        raise ValueError(
            f"WORLD_SIZE={world_size} in the environment says that there are {world_size} processes, but no launcher "
            "has given this one a "
            "RANK: it would wait for the others forever. Start it with `accelerate launch` or torchrun, or unset "
            "WORLD_SIZE."
        )
    recipe, errors = Recipe.from_settings(settings, world_size)
    if errors or recipe is None:
        raise ValueError(" ".join(errors))
    os.environ.update({key: str(value) for key, value in (settings.get("env") or {}).items()})
    return recipe.built()


def read_arguments(argv: Sequence[str]) -> dict:
    """
    The keys of `--config RECIPE.yaml [--key value ...]`; those of the command line win.

    Raises:
        `ValueError`: if the file does not exist or is no mapping, or a word of the command line belongs to no key.
    """
    return read_settings(argv, settings_of_method)


def method_names() -> list[str]:
    """Return the methods that there are: the core's and those in `pacs_trl.experimental`."""
    return [*METHODS, *experimental.methods()]


def config_class(method: str) -> type:
    """Return the training configuration of a method."""
    return METHODS[method] if method in METHODS else experimental.classes_of(method)[0]


def settings_of_method(method: str | None) -> dict[str, Setting]:
    """The settings of a method by name; those of PACS if there is no such method."""
    return settings_of(*_parts(method if method in method_names() else "pacs"))


def _parts(method: str) -> tuple[type, ...]:
    """The dataclasses of a recipe, the training configuration last."""
    return (RunArguments, DataArguments, ModelConfig, VerificationArguments, config_class(method))


def _adapter_errors(model: Any, given: dict) -> list[str]:
    """LoRA's settings without LoRA would train the whole model; who says `use_peft: false` means it."""
    lora = sorted(name for name in given if name.startswith("lora_") or name in ("use_dora", "use_rslora"))
    if model.use_peft or "use_peft" in given or not lora:
        return []
    return [
        f"{', '.join(lora)} would be ignored, and the whole model trained. Set use_peft: true, or false if that is "
        "meant."
    ]


def _relation_errors(run: RunArguments, data: DataArguments, training: Any) -> list[str]:
    """What is wrong between settings of different owners."""
    errors = []
    if training.max_tool_calling_iterations is not None and not run.tools:
        errors.append(
            f"max_tool_calling_iterations={training.max_tool_calling_iterations} would be ignored without tools. Set "
            "them (tools: [run_python]), or remove the key."
        )
    if training.push_to_hub and training.hub_strategy != "end":
        errors.append(
            f"hub_strategy={training.hub_strategy!r} must be 'end': before the end of training transformers would "
            "upload the whole folder, with the token in training_args.bin, logs and completions. Remove the key."
        )
    if training.eval_strategy != "no" and not data.eval_split_size:
        errors.append(
            f"eval_strategy={str(training.eval_strategy)!r} needs problems that are held out: set eval_split_size to "
            "their number."
        )
    functions, weights = run.reward_funcs, training.reward_weights
    if weights is not None and len(weights) != len(functions):
        errors.append(
            f"reward_weights={weights} must have one weight for each of the {len(functions)} reward functions "
            f"({', '.join(functions)})."
        )
    elif weights is not None and hasattr(training, "pacs_beta") and (abs(sum(weights) - 1) > 1e-6 or min(weights) < 0):
        errors.append(
            f"reward_weights={weights} must not be negative and must sum to 1, not {sum(weights):g}: the weighted sum "
            "of the rewards is the label of PACS, from 0 (wrong) to 1 (right)."
        )
    return errors


def load_tokenizer(recipe: Recipe, **kwargs: Any):
    """Tokenizer of the model of a recipe; `kwargs` are those of `from_pretrained`. Raises an `OSError` if it is not
    there."""
    from .miniature.tokenizer import build_tokenizer

    name = recipe.model.model_name_or_path
    if name.startswith(MINIATURE):
        task = name.removeprefix(MINIATURE).partition("/")[0]
        check_task(task)
        return build_tokenizer(task in TOOL_TASKS)
    where = {"revision": recipe.model.model_revision, "trust_remote_code": recipe.training.trust_remote_code}
    return AutoTokenizer.from_pretrained(name, padding_side="left", **where, **kwargs)


def reward_function(name: str) -> Callable:
    """A function of `pacs_trl.rewards` by its name, any other by its dotted path, also from the working directory."""
    if "." not in name:
        function = getattr(rewards, name, None)
        if callable(function) and name.endswith("_reward"):
            return function
        own = sorted(n for n in vars(rewards) if n.endswith("_reward") and not n.startswith("_"))
        raise ValueError(
            f"There is no reward function {name!r} in pacs_trl.rewards, which has {', '.join(own)}. Write functions "
            "of your own as package.module.function."
        )
    function = function_of_user(name, "reward_funcs")
    check_reward_function(function, name.rpartition(".")[2])
    return function


def tool_function(name: str) -> Callable:
    """`run_python`, or a tool of the user by its dotted path, also from the working directory."""
    if "." not in name and name != run_python.__name__:
        raise ValueError(
            f"There is no tool {name!r} in pacs_trl, which has {run_python.__name__}. Write tools of your own as "
            "package.module.function."
        )
    function = function_of_user(name, "tools") if "." in name else run_python
    check_tool(function)
    return function
