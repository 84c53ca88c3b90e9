"""Checks of quantized models: settings that would convert, copy, or send their packed weights."""

from typing import Any

from peft import PeftModel
from transformers import PreTrainedModel

from ..errors import UserError
from .model_config import config_of
from .rollout_config import RolloutConfig


def check_quantization(
    model: str | PreTrainedModel | PeftModel, args: RolloutConfig, quantization_config: Any = None
) -> None:
    """Raise a `ValueError` for a quantized model with settings that would convert, copy, or send its packed
    weights."""
    sends_weights = args.rollout_schedule == "continuous" and not args.vllm_sync_adapter
    if not args.generation_dtype and not args.has_engine_process and not sends_weights:
        return
    method = quantization_method(quantization_config or getattr(config_of(model, args), "quantization_config", None))
    if method is None:
        return
    if args.has_engine_process:
        raise UserError(
            f"{args.asynchronous_setting}: the engine process cannot copy a model quantized with {method}. Remove the "
            "key, or load the model without quantization."
        )
    if sends_weights:
        raise UserError(
            f"rollout_schedule: continuous would send the packed weights of a model quantized with {method} to a "
            "server that holds plain ones. Set vllm_sync_adapter: true to send the LoRA adapter alone, or load the "
            "model without quantization."
        )
    if args.generation_dtype and method != "bitsandbytes":
        raise UserError(
            f"generation_dtype={args.generation_dtype!r} would convert the weights of a model quantized with {method} "
            "without their scales. Remove it."
        )


def quantization_method(config: Any) -> str | None:
    """Return the name of the quantization method, or `None` if weights are not quantized or are dequantized."""
    if config is None:
        return None
    settings = config if isinstance(config, dict) else config.to_dict()
    if settings.get("dequantize"):
        return None
    method = settings.get("quant_method", "unknown")
    return str(getattr(method, "value", method))
