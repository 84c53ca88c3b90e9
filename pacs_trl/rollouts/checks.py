"""Input checks: datasets, reward functions, tools, and evaluation settings, if possible before the model is loaded.

They cover what would hang, be ignored, or damage data or weights, and what TRL reports only after it has loaded the
model and generated completions, without saying what to change.
"""

import inspect
import logging
import math
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from huggingface_hub.utils import httpx
from peft import LoraConfig, PeftModel
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from trl.trainer.utils import get_callable_name, get_config_model_id, is_async_callable

from .. import rewards
from ..data.environments import EMPTY_PROMPT, prepare_environments
from ..data.golds import report_golds
from ..data.images import dataset_prompt_lengths
from ..data.messages import MessageCheck
from ..errors import UserError
from ..rewards import shared_verifier
from ..settings.names import require_vllm
from ..update.context_length import context_lengths
from ..update.step_sizes import Step
from .rollout_config import RolloutConfig, continuous_server_command


logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_TRIES = 2.0  # of questions to a vLLM server

# Keyword arguments that TRL passes to every reward function in addition to dataset columns.
_ALWAYS_PASSED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
OWN_PARAMETERS = ("compute_logps",)


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
        if not (callable(function) or isinstance(function, str | None)) or function in vars(rewards):
            raise UserError(
                f"reward_funcs: {function!r:.100} is not callable. Pass a function or a list of functions, such as "
                "`from pacs_trl.rewards import math_reward`; text is the name of a reward model."
            )
    if arguments["rollout_func"] is not None:  # may add the columns that reward functions read
        functions = ()
    passed = (*OWN_PARAMETERS, "environments") if has_environment else OWN_PARAMETERS
    for name in ("train_dataset", "eval_dataset"):
        dataset, title = arguments[name], name
        if args.remove_unused_columns:
            dataset, title = without_unused_columns(dataset), f"{name} with remove_unused_columns=True"
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
    num_prompts = int(Step.of(args, args.world_size).prompts_per_generation)
    return Dataset.from_dict({"prompt": [EMPTY_PROMPT] * num_prompts})


def check_environment_names(datasets: dict[str, Any], names: Collection[str]) -> None:
    """Raise a `ValueError` if an example names an environment that does not exist. Streaming datasets are skipped."""
    for title, dataset in datasets.items():
        if isinstance(dataset, Dataset):
            for row, name in enumerate(dataset["environment"][:]):
                if name not in names:
                    raise UserError(
                        f"Row {row} of {title} has environment={name!r}, which is not among the environments of "
                        f"`environment_factory`: {', '.join(map(repr, names))}. Correct the column, or add the "
                        "environment."
                    )


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


def max_lora_rank(args: RolloutConfig, model: Any, peft_config: Any) -> int | None:
    """Return the `max_lora_rank` of vLLM that `vllm_sync_adapter` needs, or `None` without it. Raises a `ValueError`
    if there is no plain LoRA adapter to send. Adapters that vLLM cannot serve fail at the first weight transfer."""
    if not args.vllm_sync_adapter:
        return None
    config = peft_config or getattr(model, "active_peft_config", None)
    if type(config) is not LoraConfig or args.vllm_enable_sleep_mode:
        what = "all weights" if config is None else type(config).__name__
        raise UserError(
            f"vllm_sync_adapter: true needs an engine that keeps the base model, and plain LoRA; this run has "
            f"vllm_enable_sleep_mode: {str(args.vllm_enable_sleep_mode).lower()} and trains {what}. Use LoRA without "
            "sleep mode, or remove the key to send all weights."
        )
    return max(8, 1 << (config.r - 1).bit_length())  # the values of vLLM's setting


def check_dataset(name: str, dataset: Any, reward_funcs: Any = (), passed: Collection[str] = ()) -> None:
    """Raise a `ValueError` if a dataset (or one of a dict) has no column `prompt`, a prompt in memory is neither text
    nor a list of messages, or a reward function cannot be called with its columns. `passed` are further keyword
    arguments, for functions with such a parameter. Columns of streams are checked when the first examples arrive."""
    if isinstance(dataset, dict):
        for key, part in dataset.items():
            check_dataset(f"{name}[{key!r}]", part, reward_funcs, passed)
    elif isinstance(dataset, Dataset | IterableDataset) and dataset.column_names is not None:
        check_columns(name, dataset.column_names, needs_prompt="environments" not in passed)
        checks_prompts = isinstance(dataset, Dataset) and "environments" not in passed  # which may modify prompts
        for i, prompt in enumerate(dataset["prompt"][:] if checks_prompts else ()):
            if isinstance(prompt, list):
                is_prompt = bool(prompt) and all(message.get("role") for message in prompt)
            else:
                is_prompt = bool(prompt) and isinstance(prompt, str)
            if not is_prompt:
                raise UserError(
                    f"Row {i} of {name} has the prompt {prompt!r:.100}. It must be text, or a list of messages that "
                    "each have a role; remove such rows, or make them with `pacs_trl.data.build_prompt`."
                )
        keywords = {*_ALWAYS_PASSED, *dataset.column_names} - {"prompt", "completion"}  # TRL passes plurals
        keywords |= {"environments"} & set(passed)
        for function in reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]:
            if not callable(function) or isinstance(function, nn.Module):
                continue
            signature = inspect.signature(function)
            try:
                optional = signature.parameters.keys() & {*passed, "truncated"}
                signature.bind(**dict.fromkeys(keywords | optional))
            except TypeError as error:
                raise UserError(
                    f"The reward function {get_callable_name(function)!r} cannot be called with the columns of "
                    f"{name}, {', '.join(dataset.column_names)} ({error}). Write "
                    "it as `def reward(completions, COLUMN, **kwargs)`; rename the column, or give it a default value."
                ) from error


def without_unused_columns(dataset: Any) -> Any:
    """Return a dataset, or a dict of datasets, with the columns that TRL keeps with `remove_unused_columns`."""
    if isinstance(dataset, dict):
        return {key: without_unused_columns(part) for key, part in dataset.items()}
    if not isinstance(dataset, Dataset | IterableDataset) or dataset.column_names is None:
        return dataset
    return dataset.select_columns([name for name in ("prompt", "image", "images") if name in dataset.column_names])


def check_columns(name: str, columns: Iterable[str], *, needs_prompt: bool = True) -> None:
    """Raise a `ValueError` if there is no `prompt` among the columns although it is needed, or a column has the name
    of an argument that reward functions get from the trainer."""
    columns = list(columns)
    for column in columns:
        if column in (*_ALWAYS_PASSED, *OWN_PARAMETERS):
            raise UserError(
                f"{name} has the column `{column}`, but the trainer passes its own `{column}` to reward functions. "
                "Rename the column, or remove it."
            )
    if needs_prompt and "prompt" not in columns:
        raise UserError(
            f"{name} has no column `prompt`, the model input, only {', '.join(columns) or 'none'}. Rename the column "
            "of problems, or make it with `pacs_trl.data.build_prompt`."
        )


def check_golds(dataset: Any) -> None:
    """Report gold answers of a training set that cannot be graded or may be misread. Streaming datasets are
    skipped."""
    if isinstance(dataset, Dataset) and "solution" in dataset.column_names:
        report_golds("the training set", dataset["solution"][:], shared_verifier())


def check_prompt_lengths(
    datasets: dict[str, Any],
    args: RolloutConfig,
    tokenizer: Any,
    tools: list[Callable] | None,
    contexts: dict[str, int | None],
) -> int | None:
    """Return the tokens of the longest prompt and a completion of it, or `None` if not all prompts are known. Raise a
    `ValueError` if a prompt plus `max_completion_length` tokens exceeds the context length of the model
    ([`context_lengths`]), `max_tokens_per_micro_batch` (`train_dataset` only), or, with vLLM, `vllm_max_model_length`;
    or if the text of a message would not reach the prompt ([`MessageCheck`]). Streaming datasets are skipped."""
    limits_of_generation = contexts | {"vllm_max_model_length": args.vllm_max_model_length if args.use_vllm else None}
    limits_of_training = dict(limits_of_generation)
    if isinstance(args.max_tokens_per_micro_batch, int):
        limits_of_training["max_tokens_per_micro_batch"] = args.max_tokens_per_micro_batch
    completion = args.max_completion_length or 1
    messages = MessageCheck(tokenizer, args.chat_template_kwargs, tools)
    longest, all_are_known = 0, args.max_completion_length is not None
    for name, dataset in datasets.items():
        if not isinstance(dataset, Dataset):
            all_are_known = all_are_known and dataset is None
            continue
        limits = limits_of_training if name == "train_dataset" else limits_of_generation
        room, limit = min(((n, key) for key, n in limits.items() if n), default=(math.inf, ""))
        messages.check(name, dataset["prompt"][:])
        measured = dataset if limit else dataset.select(range(min(1, len(dataset))))  # one tests the tokenizer
        lengths = dataset_prompt_lengths(name, measured, tokenizer, args.chat_template_kwargs, tools)
        longest = max([longest, *lengths])
        all_are_known = all_are_known and len(lengths) == len(dataset)
        if overlong := [i for i, length in enumerate(lengths) if length + completion > room]:
            remedy = f"Raise it to {max(lengths) + completion}"
            if limit in contexts:
                limit = f"the context of the model, {limit}"
                remedy = f"Lower max_completion_length to {max(room - max(lengths), 0)}"
            raise UserError(
                f"Row {overlong[0]} of {name} has a prompt of {lengths[overlong[0]]} tokens. With "
                f"max_completion_length={completion}, {len(overlong)} of {len(lengths)} prompts do not fit into "
                f"{limit}={room}. {remedy}, or remove prompts of more than {max(room - completion, 0)} tokens (in a "
                "recipe: max_prompt_length)."
            )
    return longest + completion if all_are_known else None


def shared_turns_error(args: RolloutConfig, is_sharded: bool = False) -> str | None:
    """Return an error message if several processes generate together: with tools they would deadlock, because a
    process requests another turn only while its own completions call tools."""
    if args.use_vllm:
        generates_alone = args.vllm_mode == "colocate" and args.vllm_tensor_parallel_size == 1
    else:
        generates_alone = not is_sharded
    if generates_alone or args.world_size == 1:
        return None
    return (
        f"tools with {args.world_size} processes that generate together (a vLLM server, vllm_tensor_parallel_size "
        "above 1, or FSDP and ZeRO-3 without vLLM) would wait forever: a process whose completions call no tool asks "
        "for no further turn. Set use_vllm: true, vllm_mode: colocate, and vllm_tensor_parallel_size: 1."
    )


def check_loaded(
    model: Any, dataset: Any, args: RolloutConfig, has_tools: bool, is_sharded: bool, has_evaluation: bool = True
) -> None:
    """Raise a `ValueError` if a LoRA target matches no module (peft only raises if none matches at all), if faster
    generation cannot have whole weights, if processes that generate together have tools, or if the training set
    differs between processes or is too small."""
    generates_elsewhere = args.rollout_schedule == "continuous" and not has_evaluation
    if has_tools and not generates_elsewhere and (error := shared_turns_error(args, is_sharded)):
        raise UserError(error)
    for config in getattr(model, "peft_config", {}).values():
        targets = vars(config).get("target_modules")  # prompt tuning has none
        targets = targets if isinstance(targets, set | list) else ()
        names = getattr(model.base_model, "targeted_module_names", [])
        if names and (missing := [t for t in targets if not any(f".{name}".endswith(f".{t}") for name in names)]):
            where = "model" if model.config.get_text_config() is model.config else "trained part of the model"
            raise UserError(
                f"LoRA's target_modules (in a recipe: lora_target_modules) has {', '.join(sorted(missing))}, and the "
                f"{where} has no such module. Correct the name, or use all-linear."
            )
    needs_weights = args.fast_generation or args.generation_dtype or args.vllm_sync_adapter
    if needs_weights and (is_sharded or args.use_transformers_continuous_batching):
        raise UserError(
            "`fast_generation`, `generation_dtype`, and `vllm_sync_adapter` need whole weights on every process and "
            "no continuous batching. Remove them with FSDP, ZeRO 3, and use_transformers_continuous_batching."
        )
    if hasattr(dataset, "__len__"):
        sizes = gather_object([len(dataset)])
        if len(set(sizes)) > 1:
            raise UserError(
                f"Processes disagree on the number of prompts in the training set: {sizes}. All processes must load "
                "the same data with the same seed, or groups would be incomplete."
            )
        check_number_of_prompts(len(dataset), args)


def check_number_of_prompts(num_prompts: int, args: RolloutConfig) -> None:
    """Raise a `ValueError` if a generation batch needs more distinct prompts than the training set has."""
    needed = args.generation_batch_size // args.num_generations
    if num_prompts < needed:
        raise UserError(
            f"The training set has {num_prompts} prompts, but a generation batch needs {needed} different ones "
            f"({args.generation_size} / num_generations={args.num_generations}). Use more prompts, or lower these "
            "batch sizes."
        )


def config_of(model: str | PreTrainedModel | PeftModel, args: RolloutConfig) -> PreTrainedConfig:
    """Return the config of a model, which may be the name of one that is not loaded yet."""
    kwargs = {"trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}
    return AutoConfig.from_pretrained(model, **kwargs) if isinstance(model, str) else model.config


def name_of(model: str | PreTrainedModel) -> str:
    return model if isinstance(model, str) else get_config_model_id(model.config)


def check_model_type(config: PreTrainedConfig, args: RolloutConfig) -> None:
    """Raise a `ValueError` for an encoder-decoder, and for an explicit loss of the routers that the method lacks; warn
    if it would be the default of a mixture of experts."""
    if config.is_encoder_decoder:
        raise UserError(f"{config.model_type!r} models are encoder-decoders. Use a causal language model.")
    config, weight = config.get_text_config(), args.router_aux_loss_coef
    weight = getattr(config, "router_aux_loss_coef", 0.0) if weight is None else weight
    if args.is_exact or not hasattr(config, "output_router_logits") or weight == 0:
        return
    without = (
        f"{type(args).__name__} trains a mixture of experts ({config.model_type!r}) without the loss of its routers"
    )
    if args.router_aux_loss_coef is not None:
        raise UserError(
            f"{without}, but has router_aux_loss_coef={weight}. Remove the key, or train with method grpo."
        )
    warnings.warn(f"{without}, whose coefficient in its configuration is {weight}.", stacklevel=2)


def check_lengths(model: str | PreTrainedModel, args: RolloutConfig, arguments: dict[str, Any]) -> int | None:
    """Check that prompts leave room for completions; this may download the model's config and tokenizer. Return the
    tokens of the longest prompt and a completion of it, or `None` if they are not known."""
    if arguments["environment_factory"] is not None or arguments["rollout_func"] is not None:
        return None

    tokenizer = arguments["processing_class"]
    if tokenizer is None:
        kwargs = {"revision": (args.model_init_kwargs or {}).get("revision", "main")}
        tokenizer = AutoTokenizer.from_pretrained(name_of(model), trust_remote_code=args.trust_remote_code, **kwargs)
    evaluation = arguments["eval_dataset"]
    datasets = evaluation if isinstance(evaluation, dict) else {"eval_dataset": evaluation}
    datasets = {"train_dataset": arguments["train_dataset"], **datasets}
    contexts = context_lengths(config_of(model, args))
    return check_prompt_lengths(datasets, args, tokenizer, arguments["tools"], contexts)


def check_lag(args: RolloutConfig, model: Any, arguments: dict[str, Any]) -> None:
    """Raise a `ValueError` if a trainer with these arguments cannot generate ahead of training (`rollout_lag`)."""
    function = arguments["rollout_func"]
    is_async = function is not None and is_async_callable(function)
    if args.rollout_schedule == "continuous":
        return  # `server_checks.check_user_code`
    if not args.rollout_lag:
        if is_async:
            raise UserError("An asynchronous rollout_func is called with a lag only. Set rollout_lag: 1.")
        return
    if args.rollout_engine == "vllm":
        require_vllm("remove rollout_engine")
    unsupported = [name for name in ("tools", "environment_factory") if arguments[name]]
    if function is not None and not is_async:  # it gets the trainer, whose weights change while it runs
        unsupported.append("a rollout_func other than `async def rollout_func(prompts, generate)`")
    if is_async and arguments["eval_dataset"]:
        unsupported.append("rollout_func with eval_dataset")
    if not isinstance(arguments["train_dataset"], Dataset):
        unsupported.append("a streaming dataset")
    if args.use_transformers_continuous_batching:
        unsupported.append("use_transformers_continuous_batching")
    has_adapter = bool(arguments["peft_config"] or getattr(model, "active_peft_config", None))
    if args.rollout_engine == "vllm" and has_adapter:
        unsupported.append("adapters with rollout_engine: vllm")
    plugins = [os.environ.get(f"ACCELERATE_USE_{name}") == "true" for name in ("FSDP", "DEEPSPEED")]
    if not args.use_vllm and any([*plugins, args.deepspeed]):
        unsupported.append("FSDP or DeepSpeed without vLLM")
    if not args.use_vllm and args.device.type != "cpu":
        unsupported.append("generation with transformers on a GPU")
    if not args.use_vllm and sys.platform != "linux":  # weights are files in memory
        unsupported.append(f"a process that generates on {sys.platform}")
    if unsupported:
        raise UserError(
            f"rollout_lag={args.rollout_lag} does not support {' and '.join(unsupported)}. Remove rollout_lag, or use "
            "single-turn generation on a finite dataset, with vllm_mode: server on GPUs."
        )


# vLLM: what would hang, or fail late or in a subprocess ------------------------------------------------------------


def server_url(args: RolloutConfig) -> str:
    """Return the server URL of a run in server mode, without a trailing slash."""
    return (args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}").rstrip("/")


def training_dtype(args: RolloutConfig, model: Any) -> str:
    """Return the precision in which a run computes."""
    if args.bf16 or args.fp16:
        return "bfloat16" if args.bf16 else "float16"
    if isinstance(model, str):
        return str((args.model_init_kwargs or {}).get("dtype", "float32")).removeprefix("torch.")
    return str(model.dtype).removeprefix("torch.")


def serve_command(
    model: str, lora_rank: int | None = None, args: RolloutConfig | None = None, dtype: str | None = None
) -> str:
    """Return the shell command that starts a vLLM server to which TRL can send weights, or LoRA adapters; with `args`
    of a run with `rollout_schedule: continuous` one that shares memory with the trainer, and computes in `dtype`."""
    if args is not None and args.rollout_schedule == "continuous":
        return continuous_server_command(args, model, dtype or training_dtype(args, model))
    loading = f'vllm serve {model} --weight-transfer-config \'{{"backend": "nccl"}}\''
    if lora_rank is not None:
        loading = f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve {model} --enable-lora --max-lora-rank {lora_rank}"
    return f"VLLM_SERVER_DEV_MODE=1 {loading} --logprobs-mode processed_logprobs --max-logprobs -1"


def check_vllm(args: RolloutConfig, model: str, lora_rank: int | None = None) -> None:
    """Raise a `ValueError` if the vLLM version, a port, or the server is unsuitable for the policy with the name or
    path `model`."""
    require_vllm("set use_vllm=False to generate with transformers")
    if args.process_index != 0:
        return
    if args.vllm_mode == "server":
        check_port(args.vllm_group_port, "vllm_group_port", "Set vllm_group_port to a free one.")
        check_server(args, model, lora_rank)
        return
    port_is_of_launcher = torch.distributed.is_initialized() or torch.distributed.is_torchelastic_launched()
    if (port := os.environ.get("MASTER_PORT", "")).isdigit() and not port_is_of_launcher:
        remedy = "Unset MASTER_PORT, or start with `accelerate launch --main_process_port 0`."
        check_port(int(port), "MASTER_PORT", remedy)


def check_port(port: int, setting: str, remedy: str) -> None:
    """Raise a `ValueError` if another process listens on `port` of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise UserError(
                f"{setting}={port} cannot be used on this machine ({error.strerror}): another process, perhaps "
                f"another run, holds the port. {remedy}"
            ) from error


def check_server(args: RolloutConfig, model: str, lora_rank: int | None = None) -> None:
    """Wait up to `vllm_server_timeout` seconds for the server. Raises a `ValueError` if none answers, where TRL may
    wait forever, or if it serves another model."""
    url, command = server_url(args), serve_command(model, lora_rank, args)
    deadline = time.monotonic() + args.vllm_server_timeout
    with httpx.Client(base_url=url, timeout=10.0) as client:
        served: dict = {}
        while not served:
            try:
                client.get("/health").raise_for_status()
                served = client.get("/v1/models").raise_for_status().json()["data"][0]
            except (httpx.HTTPError, ValueError, LookupError) as error:
                reason = f"{type(error).__name__}: {error}".partition("\n")[0]
                if time.monotonic() >= deadline:
                    raise UserError(
                        f"No vLLM server answers at {url} after {args.vllm_server_timeout:g} s (vllm_server_timeout; "
                        f"{reason}). Start it with: {command} or correct vllm_server_base_url, or vllm_server_host "
                        "and vllm_server_port."
                    ) from error
                logger.warning("Waiting for the vLLM server at %s (%s).", url, reason)
                time.sleep(_SECONDS_BETWEEN_TRIES)
        if model not in (served["id"], served.get("root")):
            raise UserError(
                f"The vLLM server at {url} serves {served['id']!r}, but this run trains {model!r} (for the same "
                f"weights under another name, add --served-model-name {model}). Start it with: {command}"
            )
