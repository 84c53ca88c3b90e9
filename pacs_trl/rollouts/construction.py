"""Construction of trainers: argument checks before the model is loaded, process checks, and forward passes."""

import inspect
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel, ProcessorMixin
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from trl import GRPOConfig
from trl.chat_template_utils import supports_tool_calling
from trl.trainer.utils import get_config_model_id, is_async_callable

from ..data.environments import examples_of, prepare_environments
from ..update.context_length import context_lengths
from ..update.forward_pass import ForwardPass
from ..update.generation import faster_generation
from ..update.step_sizes import Step
from .adapter_sync import AdapterSync, max_lora_rank
from .checks import (
    OWN_PARAMETERS,
    check_dataset,
    check_generation_kwargs,
    check_lag,
    check_number_of_prompts,
    check_prompt_lengths,
    check_prompts,
    check_reward_functions,
    shared_turns_error,
)
from .engine import Engine
from .preemption import check_no_jit_checkpoint
from .vllm_checks import check_vllm


def check_arguments(model: str | PreTrainedModel, args: GRPOConfig, arguments: dict[str, Any]) -> None:
    """Raise a `ValueError` if datasets, reward functions, generation settings, or vLLM settings are invalid.
    `arguments` are those of a trainer except the model and the configuration; those of an environment are filled
    in."""
    reward_funcs, has_environment = arguments["reward_funcs"], arguments["environment_factory"] is not None
    check_reward_functions(reward_funcs)
    if has_environment:
        if arguments["train_dataset"] is None:
            step = Step.of(args, args.world_size)
            num_examples = int(step.rollouts(args.max_steps) * step.prompts_per_generation)
            arguments["train_dataset"] = examples_of(None, num_examples)
        given = {name: arguments.pop(name) for name in ("train_dataset", "eval_dataset")}
        arguments["environment_factory"], given = prepare_environments(arguments["environment_factory"], given)
        arguments |= given
    given_by_data = reward_funcs if arguments["rollout_func"] is None else ()  # a rollout function may add columns
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
        if not has_environment:  # an environment may modify the prompt
            check_prompts(name, arguments[name])
    check_generation_kwargs(args)
    check_lag(args, arguments)
    lora_rank = max_lora_rank(args, model, arguments["peft_config"])
    if args.use_vllm:
        check_vllm(args, name_of(model), lora_rank)


def config_of(model: str | PreTrainedModel, args: GRPOConfig) -> PreTrainedConfig:
    """Return the config of a model, which may be the name of one that is not loaded yet."""
    kwargs = {"trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}
    return AutoConfig.from_pretrained(model, **kwargs) if isinstance(model, str) else model.config


def check_model_type(config: PreTrainedConfig, processing_class: Any) -> None:
    """Raise a `ValueError` for an encoder-decoder, and for a model whose prompts may contain images or sound."""
    is_multimodal = config.model_type in PROCESSOR_MAPPING_NAMES or hasattr(config, "vision_config")
    if isinstance(processing_class, ProcessorMixin) or (processing_class is None and is_multimodal):
        raise ValueError(
            f"Models that read images or sound ({config.model_type!r}) are not supported. Use a text model, or pass "
            "the model's tokenizer as `processing_class` to train it on text alone."
        )
    if config.is_encoder_decoder:
        raise ValueError(f"{config.model_type!r} models are encoder-decoders. Use a causal language model.")


def with_arguments(function: Callable, name: str, own: dict[str, Any]) -> Callable:
    """Bind the entries of `own` that a reward function has parameters for. Raises a `ValueError` if the function is
    asynchronous and needs any of them."""
    own = {key: value for key, value in own.items() if key in inspect.signature(function).parameters}
    if own and is_async_callable(function):
        raise ValueError(
            f"The reward function {name!r} is asynchronous and asks for `{next(iter(own))}`, whose forward passes all "
            "processes make together, in one order. Write it as a plain function."
        )
    return wraps(function)(partial(function, **own)) if own else function


def check_lengths(model: str | PreTrainedModel, args: GRPOConfig, arguments: dict[str, Any]) -> None:
    """Check that prompts leave room for completions; this may download the model's config and tokenizer."""
    tokenizer, environment = arguments["processing_class"], arguments["environment_factory"]

    def load_tokenizer():
        revision = (args.model_init_kwargs or {}).get("revision", "main")
        kwargs = {"revision": revision, "trust_remote_code": args.trust_remote_code}
        return tokenizer or AutoTokenizer.from_pretrained(name_of(model), **kwargs)

    if (arguments["tools"] or environment) and not supports_tool_calling(load_tokenizer()):
        raise ValueError(
            "The chat template of the model renders no calls of tools. Choose a model that was trained to "
            "call tools, or give the tokenizer such a template."
        )
    if environment is not None or arguments["rollout_func"] is not None:
        return
    evaluation = arguments["eval_dataset"]
    datasets = evaluation if isinstance(evaluation, dict) else {"eval_dataset": evaluation}
    check_prompt_lengths(
        {"train_dataset": arguments["train_dataset"], **datasets},
        args,
        load_tokenizer,
        arguments["tools"],
        context_lengths(config_of(model, args)),
    )


def create_forward_pass(trainer: Any, model: Any, temperature: float | None = None) -> ForwardPass:
    """Return a model's [`ForwardPass`], by default at the sampling temperature."""
    forward_pass = ForwardPass(
        model,
        trainer.accelerator.device,
        pad_token_id=trainer._tokenizer.pad_token_id,
        padding_free=vars(trainer.args).get("padding_free", "auto"),
        temperature=trainer.temperature if temperature is None else temperature,
        autocast=trainer.accelerator.autocast,
    )
    forward_pass.on_pass = trainer.timer.counter_of(model, trainer.accelerator, is_policy=model is trainer.model)
    return forward_pass


def generation_settings(trainer: Any) -> AbstractContextManager:
    """Return the context manager that applies `fast_generation` and `generation_dtype`. Raises a `ValueError` if the
    weights are sharded or continuous batching is used."""
    names = ("fast_generation", "generation_dtype", "vllm_sync_adapter")
    fast, dtype, sync = (getattr(trainer.args, name, None) for name in names)
    if not any((fast, dtype, sync)):
        return nullcontext()
    if trainer.is_fsdp_enabled or is_deepspeed_zero3_enabled() or trainer.use_transformers_continuous_batching:
        raise ValueError(
            "`fast_generation`, `generation_dtype`, and `vllm_sync_adapter` need whole weights on every process and "
            "no continuous batching. Remove them with FSDP, ZeRO 3, and use_transformers_continuous_batching."
        )
    if sync:
        return nullcontext()
    dtype = getattr(torch, dtype) if dtype else None
    return faster_generation(trainer.accelerator.unwrap_model(trainer.model_wrapped), fast=fast, dtype=dtype)


def create_engine(trainer: Any) -> Engine:
    """Create the engine that replaces TRL's. With `vllm_sync_adapter` it sends adapters."""
    engine = Engine(trainer.vllm_generation, next_seeds=trainer._next_seeds, timer=trainer.timer)
    if getattr(trainer.args, "vllm_sync_adapter", False):
        text = "The sum of 12 and 30 is 42. Their product is 360, so the difference of the two results is 318."
        ids = trainer._tokenizer(text)["input_ids"][:32]
        parent = trainer.args.output_dir if engine.mode == "server" else None  # by default not shared
        os.makedirs(parent or ".", exist_ok=True)
        engine.adapter_sync = AdapterSync(engine, create_forward_pass(trainer, trainer.model, 1.0), ids, parent)
    return engine


def check_shared_turns(trainer: Any) -> None:
    """Raise a `ValueError` if tools are used while several processes generate together."""
    is_sharded = trainer.is_fsdp_enabled or is_deepspeed_zero3_enabled()
    if error := shared_turns_error(trainer.args, trainer.accelerator.num_processes, is_sharded):
        raise ValueError(error)


def check_equal_on_all_processes(what: str, number: int) -> None:
    """Raise a `ValueError` if `number`, the number of `what`, differs between processes."""
    numbers = gather_object([number])
    if len(set(numbers)) > 1:
        raise ValueError(
            f"Processes disagree on the number of {what}: {numbers}. All processes must load the same data with the "
            "same seed, or groups would be incomplete."
        )


def check_prompts_of_generation(dataset: Any, args: GRPOConfig) -> None:
    """Check that a training set has the same size on all processes, and enough prompts for a generation batch.
    Streaming datasets are skipped."""
    if hasattr(dataset, "__len__"):
        check_equal_on_all_processes("prompts in the training set", len(dataset))
        check_number_of_prompts(len(dataset), args)


def exchange_float32(accelerator: Accelerator) -> None:
    """Configure FSDP2, before models are prepared, to accumulate and reduce gradients in float32, and not to round
    model outputs. accelerate 1.15 rounds both to bfloat16: a log-prob of -0.5 becomes a multiple of 2^-9, which is
    more than one update changes it. Gradient accumulation needs 2 more bytes per trained weight on each GPU."""
    plugin = accelerator.state.fsdp_plugin if accelerator.is_fsdp2 else None
    if plugin is not None and plugin.mixed_precision_policy is not None:
        plugin.mixed_precision_policy = replace(
            plugin.mixed_precision_policy, reduce_dtype=torch.float32, output_dtype=None
        )


def name_of(model: str | PreTrainedModel) -> str:
    return model if isinstance(model, str) else get_config_model_id(model.config)
