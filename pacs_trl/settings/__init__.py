"""Settings from YAML files and command lines.

Commands parse `--config FILE.yaml [--key value ...]` with TRL's parser; unknown names get a suggestion. This module
imports only PyYAML, so that wrong options do not wait for libraries.
"""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ..errors import UserError
from .fields import switch_value, type_hints


# Our settings by their names in TRL's scripts, earlier versions of transformers, verl, OpenRLHF, and lm-eval, where no
# name that is similar means the same.
NAMES_ELSEWHERE = {
    "adam_beta1": ("adam_betas",),
    "adam_beta2": ("adam_betas",),
    "attn_implementation": ("flash_attn", "flash_attention", "use_flash_attention"),
    "benchmarks": ("dataset", "tasks"),
    "beta": ("init_kl_coef", "kl_beta", "kl_coef", "kl_loss_coef", "use_kl_loss"),
    "bf16": ("mixed_precision",),
    "dataset_name": ("datasets", "prompt_data", "train_dataset", "train_file", "train_files"),
    "deepspeed": ("deepspeed_config", "ds_config"),
    "dtype": ("torch_dtype",),
    "engine": ("backend", "use_vllm", "vllm"),
    "environment": ("environment_factory",),
    "epsilon": ("clip_range", "clip_ratio", "clip_ratio_low", "cliprange", "eps_clip", "eps_clip_low_high"),
    "epsilon_high": ("clip_ratio_high", "eps_clip_low_high"),
    "eval_on_start": ("val_before_train",),
    "eval_split_size": ("dataset_test_split", "eval_dataset", "val_files"),
    "eval_steps": ("eval_freq", "test_freq"),
    "gae_lambda": ("lam", "lambd"),
    "gradient_accumulation_steps": ("grad_accum_steps", "ppo_mini_batch_size"),
    "k": ("ks",),
    "learning_rate": ("actor_learning_rate", "lr"),
    "lora_r": ("lora_rank",),
    "loss_type": ("loss_agg_mode",),
    "max_completion_length": (
        *("generate_max_len", "max_len", "max_length", "max_new_tokens", "max_response_length", "max_seq_length"),
        *("max_tokens", "response_length"),
    ),
    "max_grad_norm": ("clip_grad", "grad_clip", "gradient_clipping"),
    "max_new_tokens": ("max_completion_length", "max_tokens"),
    "max_problems": ("limit",),
    "max_prompt_length": ("max_len", "max_length", "max_seq_length", "prompt_max_len"),
    "max_steps": ("max_train_steps", "total_training_steps"),
    "max_tokens_per_micro_batch": ("ppo_max_token_len_per_gpu",),
    "method": ("adv_estimator", "advantage_estimator", "algorithm"),
    "model": ("model_name_or_path", "model_path", "pretrained"),
    "model_name_or_path": ("model", "model_path", "pretrain", "sft_model_path"),
    "n": ("n_samples", "num_generations", "num_samples"),
    "num_generations": (
        *("group_size", "n", "n_samples_per_prompt", "num_completions", "num_return_sequences", "num_samples"),
        *("rloo_k", "rollout_n"),
    ),
    "num_iterations": ("max_epochs", "num_ppo_epochs", "ppo_epochs"),
    "num_train_epochs": ("max_epochs", "num_episodes", "total_epochs"),
    "optim": ("optimizer",),
    "output_dir": ("default_local_dir", "output_path", "save_dir", "save_path"),
    "per_device_train_batch_size": ("batch_size", "per_device_batch_size"),
    "problem_column": ("input_key", "prompt_key", "question_column"),
    "project": ("project_name", "wandb_project"),
    "report_to": ("logger", "use_tensorboard", "use_wandb", "wandb"),
    "resume_from_checkpoint": ("ckpt_path", "load_checkpoint"),
    "revision": ("model_revision",),
    "reward_funcs": ("remote_rm_url", "reward_fn", "reward_model", "reward_model_name_or_path", "rewards"),
    "run_name": ("experiment_name", "wandb_run_name"),
    "save_steps": ("save_freq",),
    "solution_column": ("answer_column", "label_key"),
    "use_cpu": ("no_cuda",),
    "use_liger_kernel": ("use_liger_loss",),
    "use_peft": ("lora", "peft", "peft_config", "use_lora"),
    "use_vllm": ("vllm",),
    "value_clip_range": ("cliprange_value",),
    "vllm_server_host": ("vllm_host",),
    "vllm_server_port": ("vllm_port",),
    "warmup_steps": ("lr_warmup_ratio", "lr_warmup_steps_ratio", "warmup_ratio"),
}

# What to do about keys that a recipe cannot have.
_ADVICE = {
    "logging_dir": "TensorBoard writes to `runs` in output_dir; set the environment variable TENSORBOARD_LOGGING_DIR "
    "for another directory.",
    "overwrite_output_dir": "A run never overwrites another one: remove the key, and name a new output_dir.",
    **dict.fromkeys(
        ("kl_estimator", "kl_loss_type"), "No setting chooses the estimator of the KL term: remove the key."
    ),
    **dict.fromkeys(  # of prompts in verl, of completions in OpenRLHF
        ("global_batch_size", "train_batch_size"),
        "An optimizer step trains on `per_device_train_batch_size` x processes x `gradient_accumulation_steps` "
        "completions: set these.",
    ),
    **dict.fromkeys(  # a launcher starts the processes
        ("accelerate_config", "config_file", "num_processes", "num_machines", "num_gpus", "gpus", "nodes"),
        "It is an option of `pacs-trl plan` or `accelerate launch` (--config_file, --num_processes).",
    ),
}


# YAML -------------------------------------------------------------------------------------------------------


def read_mapping(path: str | Path, what: str) -> dict[str, Any]:
    """Read a YAML file that must be a mapping. `what` names it in errors: "recipe", "accelerate file"."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"The {what} {str(path)!r} cannot be read from {Path.cwd()} ({getattr(error, 'strerror', error)}). "
            "Correct the path."
        ) from error
    return parse_mapping(text, f"{what} {str(path)!r}")


def parse_mapping(text: str, where: str) -> dict[str, Any]:
    """Parse the text of a YAML file, see [`read_mapping`]."""
    try:
        content, node = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise UserError(f"The {where} is not YAML: {' '.join(str(error).split())}. Fix the syntax.") from error
    if not isinstance(content, dict):
        raise UserError(f"The {where} must be a YAML mapping, got {type(content).__name__}. Write `key: value` lines.")
    names = [key.value for key, _ in node.value]  # of which `content` has the last one
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"The {where} contains {' and '.join(repeated)} more than once. Keep one of each.")
    return {str(key): value for key, value in content.items()}  # YAML reads `on:` and `no:` as booleans


# Command lines ----------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """Parser of `pacs-trl NAME`. Options are declared with underscores and accept hyphens."""

    def __init__(self, name: str, description: str, **kwargs: Any):
        super().__init__(**{"prog": f"pacs-trl {name}", "description": description, "allow_abbrev": False, **kwargs})

    def parse_known_args(self, args=None, namespace=None):
        self.words = with_underscores(sys.argv[1:] if args is None else args)
        return super().parse_known_args(self.words, namespace)

    def error(self, message):
        known, is_unknown = self._option_string_actions, message.startswith("unrecognized")
        if is_unknown or message.startswith("the following arguments are required"):  # perhaps misspelled
            options = [word.partition("=")[0] for word in self.words if word.startswith("--")]
            messages = [
                f"There is no option `{option}`.{near}"
                for option in options
                if option not in known and ((near := did_you_mean(option, known)) or is_unknown)
            ]
            message = " ".join(messages) or message
        super().error(message)


def with_underscores(argv: Sequence[str]) -> list[str]:
    """Return the words of a command line with underscores for hyphens in options."""
    return [re.sub("^--[^=]+", lambda option: "--" + option[0][2:].replace("-", "_"), word) for word in argv]


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return a suggestion of the nearest known names after a space; empty without one."""
    nearest = (
        [ours for ours, names in NAMES_ELSEWHERE.items() if name in names and ours in known]
        or difflib.get_close_matches(name, known, n=1, cutoff=0.85)
        or sorted(other for other in known if other.startswith(f"{name}_"))[:3]
        or sorted(other for other in known if f"_{name}_" in f"_{other}_")[:3]
        or difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    )
    return f" Did you mean {' or '.join(f'`{other}`' for other in nearest)}?" if nearest else ""


def read_settings(argv: Sequence[str]) -> dict[str, Any]:
    """Read `--config FILE.yaml [--key value ...]`; the command line wins. A key without a value is true. Raises a
    `ValueError` if the file cannot be read or is not a mapping, or a word has no key."""
    words: dict[str, list[str]] = {}
    key = None
    for word in with_underscores(argv):
        if word.startswith("--"):
            key, *value = word[2:].split("=", 1)
            words[key] = value
        elif key is None:
            raise UserError(f"{word!r} has no key. Write settings as --key value and a recipe as --config FILE.")
        else:
            words[key].append(word)
    path = words.pop("config", None)
    if path == []:
        raise UserError("--config needs a file. Write --config RECIPE.yaml.")
    if path is not None and len(path) > 1:
        raise UserError(
            f"{path[1]!r} after --config {path[0]} has no key. Write settings as --key value, and name one recipe."
        )
    settings = {} if path is None else read_mapping(path[0], "recipe")
    for key, values in words.items():
        if not values:
            settings[key] = True
        elif values == ["null"]:
            settings[key] = None
        elif len(values) == 1:
            settings[key] = values[0]
        else:
            settings[key] = values
    return settings


def typed_values(settings: Mapping[str, Any], parts: Sequence[type], what: str) -> dict[str, Any]:
    """Return the values of all fields of some dataclasses without common fields, converted by TRL's parser, without
    `env`. `what` names the configuration in errors."""
    from transformers import HfArgumentParser  # TRL's parser; takes seconds to import

    class FieldParser(HfArgumentParser):
        def error(self, message):
            message = re.sub(r"--(\w+)(/--[\w-]+)*", r"`\1`", message).removeprefix("argument ")
            raise UserError(f"{message.rstrip('.')}. Correct or add the value.")

    dataclass_types: Any = parts  # classes, which the type of the parser's argument does not admit
    parser = FieldParser(dataclass_types, allow_abbrev=False, add_help=False)
    actions = {action.dest: action for action in parser._actions}
    hints = {name: str(hint) for part in parts for name, hint in type_hints(part).items()}
    words: list[str] = []
    values: dict[str, Any] = {}  # that are no words of a command line
    for key, written in known_settings(settings, actions, what).items():
        action, value = actions[key], _as_declared(key, written, hints[key])
        is_switch = key == "fsdp" and isinstance(value, bool)
        if isinstance(value, list) and action.nargs == "+":
            words += [f"--{key}", *map(str, value)]
        elif isinstance(value, list | tuple | dict | None) or is_switch:
            _check_kind(key, value, hints[key], may_be_missing=action.default is None)
            values[key] = value
            action.required = False
        else:
            words.append(f"--{key}={value}")
    return vars(parser.parse_args(words)) | values


def _as_declared(key: str, value: Any, hint: str) -> Any:
    """Return a value in the form of its field, where YAML or the command line has another. Raises a `ValueError` if
    YAML has read text as a boolean, a tuple has other entries than numbers, or neither can have the value."""
    if key == "parallelism_config" and value is not None:
        raise UserError(
            "`parallelism_config` is an object of accelerate, which a recipe cannot have. Remove the key, and write "
            "sizes of data parallelism into the accelerate file (`accelerate launch --config_file`)."
        )
    if key == "fsdp" and isinstance(value, str) and isinstance(switch_value(value), bool):  # else names of options
        return switch_value(value)
    if isinstance(value, str) and "dict" in hint and value.lstrip().startswith("{"):  # YAML or JSON
        return parse_mapping(value, f"setting `{key}`")
    if isinstance(value, str) and key.endswith("_kwargs"):
        raise UserError(f"`{key}` must be a mapping, got {value!r}. Write it as {{name: value}}.")
    if isinstance(value, list) and "tuple" in hint:  # neither YAML nor argparse has tuples
        return tuple(_number(entry, key) for entry in value)
    if any(isinstance(entry, bool) for entry in (value if isinstance(value, list) else [value])):
        _check_boolean(key, value, hint)
    return value


def known_settings(settings: Mapping[str, Any], known: Collection[str], what: str) -> dict[str, Any]:
    """Return the settings without `env`, `key: false` for `no_key: true`. Raises a `ValueError` for unknown keys."""
    values, unknown = {}, []
    for key, value in settings.items():
        if key in known:
            values[key] = value
        elif key.removeprefix("no_") in known and value is True:
            values[key.removeprefix("no_")] = False
        elif key != "env":
            unknown.append(key)
    if len(unknown) > 1:
        keys = ", ".join(key + _suggestion(key, known) for key in sorted(unknown))
        raise UserError(f"Some keys are not settings of {what}: {keys}. Correct or remove them.")
    if unknown:
        advice = _ADVICE.get(unknown[0]) or did_you_mean(unknown[0], {*known, "config"}).strip() or "Remove the key."
        raise UserError(f"`{unknown[0]}` is not a setting of {what}. {advice}")
    return values


def _suggestion(key: str, known: Collection[str]) -> str:
    """Return what an unknown key may mean, in parentheses after a space; empty without a suggestion."""
    near = "" if key in _ADVICE else did_you_mean(key, known).strip()
    return f" ({near[0].lower()}{near[1:]})" if near else ""


def _check_kind(key: str, value: Any, hint: str, may_be_missing: bool) -> None:
    """Raise a `ValueError` if a setting of type `hint` cannot be a list, tuple, mapping, or None."""
    kind = "None" if value is None else type(value).__name__
    if kind in hint or isinstance(value, bool) or (value is None and may_be_missing):
        return
    if hint == str(str):
        several = " Several datasets are not mixed: join them into one file." if key == "dataset_name" else ""
        raise UserError(f"{key} must be one text, got a {kind}. Write one value, or remove the key.{several}")
    raise UserError(f"{key} must be {hint}, got {kind}. Write a value of that type, or remove the key.")


def _check_boolean(key: str, value: Any, hint: str) -> None:
    """Raise a `ValueError` if a setting that holds text is a boolean, as which YAML reads some words."""
    takes_boolean = "bool" in hint or "True" in hint or key in ("fsdp", "resume_from_checkpoint")
    if "str" in hint and not takes_boolean:
        raise UserError(
            f"`{key}` must be text, got {value}: YAML reads no, off, yes, and on without quotes as false and true. "
            f'Write `{key}: "{"yes" if value is True else "no"}"` with quotes, or remove the key.'
        )


def _number(value: Any, key: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise UserError(f"{key} must be a list of numbers, got {value!r} in it. Correct the value.") from error


def set_environment(settings: Mapping[str, Any]) -> None:
    """Set the environment variables of the key `env`."""
    env = settings.get("env") or {}
    if not isinstance(env, dict):
        raise UserError(f"env must be a mapping, got {env!r}. Write environment variables as `NAME: value` below it.")
    os.environ.update({key: str(value) for key, value in env.items()})


# Templates ----------------------------------------------------------------------------------------------------


def render(template: str, **values: Any) -> str:
    """Return the text that a file of `templates` makes of values, without empty lines at its end."""
    from jinja2 import Template

    text = (Path(__file__).parents[1] / "templates" / template).read_text(encoding="utf-8")
    return Template(text, trim_blocks=True, lstrip_blocks=True).render(values).rstrip("\n")
