"""Checks while a trainer is constructed: of its arguments, before the model is loaded, and of its processes."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, ProcessorMixin
from transformers.integrations import is_deepspeed_zero3_enabled
from trl import GRPOConfig
from trl.trainer.utils import get_config_model_id, is_async_callable

from ..update.context_length import context_lengths
from ..update.generation import faster_generation
from ..update.scorer import Scorer
from .checks import (
    OWN_PARAMETERS,
    check_dataset,
    check_generation_kwargs,
    check_number_of_prompts,
    check_prompt_lengths,
    check_prompts,
    check_reward_functions,
    shared_turns_error,
)
from .preemption import check_no_jit_checkpoint
from .vllm_checks import check_vllm


def check_arguments(model: str | PreTrainedModel, args: GRPOConfig, arguments: dict[str, Any]) -> None:
    """
    Check the arguments of a trainer; `arguments` are all but the model and the configuration.

    Raises:
        `ValueError`: if data or reward functions cannot be used, or the vLLM that `args` asks for cannot work.
    """
    reward_funcs, has_environment = arguments["reward_funcs"], arguments["environment_factory"] is not None
    check_reward_functions(reward_funcs)
    given_by_data = reward_funcs if arguments["rollout_func"] is None else ()  # a rollout function adds columns
    passed = (*OWN_PARAMETERS, *(["environments"] if has_environment else []))
    for name in ("train_dataset", "eval_dataset"):
        check_dataset(name, arguments[name], given_by_data, passed)
    if args.push_to_hub and args.hub_strategy not in ("end", "every_save"):
        raise ValueError(
            f"hub_strategy={args.hub_strategy.value!r} is not supported: checkpoints hold the token "
            "(training_args.bin) and the state of the optimizer. Remove the setting."
        )
    check_no_jit_checkpoint(args)
    for name in ("bf16_full_eval", "fp16_full_eval"):
        if getattr(args, name):
            raise ValueError(
                f"{name}=True would round the trained weights themselves in an evaluation outside of training. Remove "
                "the key, or load the model in that precision for an evaluation alone."
            )
    for name in ("train_dataset", "eval_dataset"):
        if not has_environment:  # an environment writes into the prompt
            check_prompts(name, arguments[name])
    check_generation_kwargs(args)
    if args.use_vllm:
        check_vllm(args, _name_of(model))


def with_arguments(function: Callable, name: str, own: dict[str, Any]) -> Callable:
    """Return a reward function that gets those of `own` that it has a parameter for."""
    own = {key: value for key, value in own.items() if key in inspect.signature(function).parameters}
    if own and is_async_callable(function):
        raise ValueError(
            f"The reward function {name!r} is asynchronous and asks for `{next(iter(own))}`, whose forward passes all "
            "processes make together, in one order. Write it as a plain function."
        )
    return wraps(function)(partial(function, **own)) if own else function


def check_lengths(model: str | PreTrainedModel, args: GRPOConfig, arguments: dict[str, Any]) -> None:
    """Check that prompts leave room for completions; may download the model's configuration and tokenizer."""
    tokenizer = arguments["processing_class"]
    generated_by_user = arguments["environment_factory"] is not None or arguments["rollout_func"] is not None
    if generated_by_user or isinstance(tokenizer, ProcessorMixin):  # prompts of a processor may hold images
        return

    def load_tokenizer():
        revision = (args.model_init_kwargs or {}).get("revision", "main")
        kwargs = {"revision": revision, "trust_remote_code": args.trust_remote_code}
        return tokenizer or AutoTokenizer.from_pretrained(_name_of(model), **kwargs)

    kwargs = {"trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}
    config = AutoConfig.from_pretrained(model, **kwargs) if isinstance(model, str) else model.config
    evaluation = arguments["eval_dataset"]
    datasets = evaluation if isinstance(evaluation, dict) else {"eval_dataset": evaluation}
    check_prompt_lengths(
        {"train_dataset": arguments["train_dataset"], **datasets},
        args,
        load_tokenizer,
        arguments["tools"],
        context_lengths(config),
    )


def create_scorer(trainer: Any, model: Any, temperature: float | None = None) -> Scorer:
    """Return a scorer; `temperature` is that of the fused head if TRL has not put one on the model."""
    return Scorer(
        model,
        trainer.accelerator.device,
        pad_token_id=trainer._tokenizer.pad_token_id,
        padding_free=trainer._padding_free,
        temperature=trainer.temperature if temperature is None else temperature,
        autocast=trainer.accelerator.autocast,
    )


def generation_settings(trainer: Any) -> AbstractContextManager:
    """Return the context of a generation with the trainer's `fast_generation` and `generation_dtype`."""
    fast, dtype = (getattr(trainer.args, name, None) for name in ("fast_generation", "generation_dtype"))
    if not fast and dtype is None:
        return nullcontext()
    if trainer.is_fsdp_enabled or is_deepspeed_zero3_enabled() or trainer.use_transformers_continuous_batching:
        raise ValueError(
            "`fast_generation` and `generation_dtype` need whole weights on every process and `generate` of "
            "transformers. Remove them with FSDP, ZeRO 3, and use_transformers_continuous_batching."
        )
    dtype = getattr(torch, dtype) if dtype else None
    return faster_generation(trainer.accelerator.unwrap_model(trainer.model_wrapped), fast=fast, dtype=dtype)


def check_shared_turns(trainer: Any) -> None:
    """Refuse tools where processes would have to take their turns together."""
    is_sharded = trainer.is_fsdp_enabled or is_deepspeed_zero3_enabled()
    if error := shared_turns_error(trainer.args, trainer.accelerator.num_processes, is_sharded):
        raise ValueError(error)


def check_equal_on_all_processes(what: str, number: int) -> None:
    """Raise a `ValueError` if processes do not have equally many of `what`."""
    numbers = gather_object([number])
    if len(set(numbers)) > 1:
        raise ValueError(
            f"Processes disagree on the number of {what}: {numbers}. All processes must load the same data with the "
            "same seed, or groups would be incomplete."
        )


def check_prompts_of_generation(dataset: Any, args: GRPOConfig) -> None:
    """Check that a training set, if it is no stream, has enough prompts for a generation batch, on all processes."""
    if hasattr(dataset, "__len__"):
        check_equal_on_all_processes("prompts in the training set", len(dataset))
        check_number_of_prompts(len(dataset), args)


def exchange_float32(accelerator: Accelerator) -> None:
    """
    Let FSDP2 accumulate and reduce gradients, and return what the model returns, in float32; for models that are
    prepared afterwards.

    accelerate 1.15 rounds both to bfloat16: gradients then have 8 significant bits, and a log-prob of -0.5 becomes a
    multiple of 2^-9, more than an update moves it. Arithmetic inside the model stays bfloat16. Costs 2 more bytes per
    trained weight and GPU while gradients are accumulated.
    """
    plugin = accelerator.state.fsdp_plugin if accelerator.is_fsdp2 else None
    if plugin is not None and plugin.mixed_precision_policy is not None:
        plugin.mixed_precision_policy = replace(
            plugin.mixed_precision_policy, reduce_dtype=torch.float32, output_dtype=None
        )


def _name_of(model: str | PreTrainedModel) -> str:
    return model if isinstance(model, str) else get_config_model_id(model.config)
