"""Checks of the arguments of a trainer before the model is loaded.

They cover what would hang, be ignored, or damage data or weights, and what TRL reports only after it has loaded the
model and generated completions, without saying what to change.
"""

import sys
from typing import Any

from datasets import Dataset
from transformers import PreTrainedModel
from trl.trainer.utils import is_async_callable

from .. import __all__ as public_names
from .. import rewards
from ..data.environments import EMPTY_PROMPT, prepare_environments
from ..errors import UserError
from ..settings.names import require_vllm
from ..update.step_sizes import BatchSizes
from .adapter_checks import max_lora_rank
from .dataset_checks import OPTIONAL_PARAMETERS, check_dataset, without_unused_columns
from .launched_sharding import is_sharded_by_plugin
from .model_config import name_of
from .rollout_config import RolloutConfig
from .server_checks import check_vllm


def check_config_class(args: Any, config_class: type[RolloutConfig]) -> None:
    """Raise a `ValueError` if `args` is no configuration of this package, but, for example, one of TRL."""
    if not isinstance(args, config_class):
        name, module = config_class.__name__, config_class.__module__
        if module.startswith("pacs_trl.") and name in public_names:
            module = "pacs_trl"
        raise UserError(
            f"args is a {type(args).__module__}.{type(args).__name__}, which lacks settings of {name}. Write `from "
            f"{module} import {name}`, and construct it with the same arguments."
        )


def check_arguments(model: str | PreTrainedModel, args: RolloutConfig, arguments: dict[str, Any]) -> None:
    """Raise a `ValueError` if arguments of a trainer are invalid. `arguments` are all but the model and the
    configuration; those of an environment are filled in."""
    has_environment = arguments["environment_factory"] is not None
    if has_environment:
        if arguments["train_dataset"] is None:
            arguments["train_dataset"] = _empty_prompts(args, arguments["environment_factory"])
        datasets = {name: arguments[name] for name in ("train_dataset", "eval_dataset")}
        arguments["environment_factory"] = prepare_environments(arguments["environment_factory"], datasets)
    if args.accelerator_config.dispatch_batches and isinstance(arguments["train_dataset"], Dataset):
        raise UserError(  # of a stream TRL says so
            "accelerator_config with dispatch_batches would give each process a part of its generation batch. Remove "
            "the key."
        )
    functions = arguments["reward_funcs"]
    for function in functions if isinstance(functions, list) else [functions]:
        check_num_labels(function)
        is_name_of_function = isinstance(function, str) and function in vars(rewards)
        if is_name_of_function or not (callable(function) or isinstance(function, str | None)):
            raise UserError(
                f"reward_funcs: {function!r:.100} is not callable. Pass a function or a list of functions, such as "
                "`from pacs_trl.rewards import math_reward`; text is the name of a reward model."
            )
    if arguments["rollout_func"] is not None:  # may add the columns that reward functions read
        functions = ()
    passed = (*OPTIONAL_PARAMETERS, "environments") if has_environment else OPTIONAL_PARAMETERS
    for name in ("train_dataset", "eval_dataset"):
        dataset, title = arguments[name], name
        if args.remove_unused_columns:
            dataset, title = without_unused_columns(name, dataset), f"{name} with remove_unused_columns=True"
        check_dataset(title, dataset, functions, passed)
    check_lag(args, model, arguments)
    lora_rank = max_lora_rank(args, model, arguments["peft_config"])
    if args.use_vllm:
        check_vllm(args, name_of(model), lora_rank)


def _empty_prompts(args: RolloutConfig, environment_factory: Any) -> Dataset:
    """Return the training set of an environment that owns its data: the empty prompts of one generation batch, to
    which `reset` appends. Raises a `ValueError` if there are several environments, or the run has no length."""
    if isinstance(environment_factory, dict):
        raise UserError(
            "A dict of environments requires a `train_dataset` with a column `environment`, which names the "
            "environment of each example. Pass one, or a single environment."
        )
    if args.max_steps <= 0:
        raise UserError("Without `train_dataset` an environment has no length. Set max_steps.")
    num_prompts = int(BatchSizes.of(args, args.world_size).prompts_per_generation)
    return Dataset.from_dict({"prompt": [EMPTY_PROMPT] * num_prompts})


def check_num_labels(reward_model: Any) -> None:
    """Raise a `ValueError` for a sequence classification model with several labels, of which TRL would take the first.
    Other models are checked when they are called."""
    kind = type(reward_model).__name__
    if isinstance(reward_model, PreTrainedModel) and kind.endswith("ForSequenceClassification"):
        if (number := reward_model.config.num_labels) != 1:
            raise UserError(
                f"The reward model in reward_funcs, a {kind}, has {number} labels, of which the first would be the "
                "reward. Load it with num_labels=1, or pass a function that computes a reward from the labels."
            )


def check_lag(args: RolloutConfig, model: Any, arguments: dict[str, Any]) -> None:
    """Raise a `ValueError` if a trainer with these arguments cannot generate ahead of training (`rollout_lag`, or
    `rollout_schedule: continuous` without a server)."""
    function = arguments["rollout_func"]
    is_async = function is not None and is_async_callable(function)
    if args.has_continuous_server:
        return  # `worker_checks.check_user_code`
    if is_async and not args.rollout_lag:
        raise UserError("An asynchronous rollout_func is called with a lag only. Set rollout_lag: 1.")
    if not args.is_asynchronous:
        return
    if args.rollout_engine == "vllm":
        require_vllm("remove rollout_engine")
    unsupported = [name for name in ("tools", "environment_factory") if arguments[name]]
    if function is not None and not is_async:  # it gets the trainer, whose weights change while it runs
        asynchronous = " other than `async def rollout_func(prompts, generate)`" if args.rollout_lag else ""
        unsupported.append(f"a rollout_func{asynchronous}")
    if is_async and arguments["eval_dataset"]:
        unsupported.append("rollout_func with eval_dataset")
    if not isinstance(arguments["train_dataset"], Dataset):
        unsupported.append("a streaming dataset")
    if args.use_transformers_continuous_batching:
        unsupported.append("use_transformers_continuous_batching")
    has_adapter = bool(arguments["peft_config"] or getattr(model, "active_peft_config", None))
    if args.rollout_engine == "vllm" and has_adapter:
        unsupported.append("adapters with rollout_engine: vllm")
    if not args.use_vllm and is_sharded_by_plugin(args):
        unsupported.append("FSDP or DeepSpeed without vLLM")
    if not args.use_vllm and args.device.type != "cpu":
        unsupported.append("generation with transformers on a GPU")
    if not args.use_vllm and sys.platform != "linux":  # weights are files in memory
        unsupported.append(f"a process that generates on {sys.platform}")
    if unsupported:
        key = "rollout_lag" if args.rollout_lag else "rollout_schedule"
        raise UserError(
            f"{args.asynchronous_setting} does not support {' and '.join(unsupported)}. Remove {key}, or use "
            "single-turn generation on a finite dataset, with vllm_mode: server on GPUs."
        )
