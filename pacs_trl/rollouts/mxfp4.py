"""Checkpoints with MXFP4 weights (gpt-oss), which are trained as dequantized weights.

Packed MXFP4 weights have no gradient, and transformers (5.17 to 5.24) saves a model that it has dequantized without
most of its experts: it reverses the conversion by which it has read them.
"""

from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.quantization_config import Mxfp4Config
from trl.trainer.utils import create_model_from_path

from ..errors import UserError
from ..update.peft_models import without_peft
from .rollout_config import RolloutConfig


def is_mxfp4(quantization_config: Any) -> bool:
    """Return whether a quantization configuration, of transformers or of a `config.json`, is of MXFP4."""
    if quantization_config is None:
        return False
    settings = quantization_config if isinstance(quantization_config, dict) else quantization_config.to_dict()
    return str(settings.get("quant_method")).lower().endswith("mxfp4")


def check_mxfp4(
    model: str | PreTrainedModel | PeftModel,
    config: PreTrainedConfig,
    args: RolloutConfig,
    arguments: dict[str, Any],
) -> None:
    """Raise a `ValueError` for packed MXFP4 weights in memory, and for settings that keep or need them packed."""
    requested = arguments["quantization_config"]
    is_packed = is_mxfp4(getattr(config, "quantization_config", None))
    if not isinstance(model, str):
        if any(type(module).__name__.startswith("Mxfp4") for module in model.modules()):
            raise UserError(
                "The model has packed MXFP4 weights, which cannot be trained. Load it with "
                "quantization_config=Mxfp4Config(dequantize=True), or pass its name, which dequantizes it."
            )
        return
    if is_packed and requested is not None and not is_mxfp4(requested):
        raise UserError(
            f"quantization_config: the weights of {model} are MXFP4, and cannot be loaded with another quantization. "
            "Remove it (in a recipe: load_in_4bit and load_in_8bit) to train dequantized weights."
        )
    if is_packed and args.use_vllm:
        raise UserError(
            f"use_vllm: vLLM would load the MXFP4 weights of {model} and cannot take those that are trained, which "
            "are dequantized. Set use_vllm to false, or train a checkpoint that is saved with bfloat16 weights."
        )


def dequantized(
    model: str | PreTrainedModel | PeftModel,
    config: PreTrainedConfig,
    args: RolloutConfig,
    arguments: dict[str, Any],
) -> Any:
    """Return a checkpoint with MXFP4 weights as a model in memory with weights of the dtype of `model_init_kwargs`;
    other models as they are."""
    if isinstance(model, str) and is_mxfp4(getattr(config, "quantization_config", None)):
        kwargs = {"trust_remote_code": args.trust_remote_code} | (args.model_init_kwargs or {})
        if args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
            kwargs["device_map"] = None
        model = create_model_from_path(model, **kwargs, quantization_config=Mxfp4Config(dequantize=True))
        dtype = kwargs.get("dtype") or "float32"
        if isinstance(dtype, str):
            dtype = torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
        # Experts are dequantized to bfloat16.
        model.to(dtype)  # type: ignore[arg-type]  # transformers decorates `to`, which then lacks `self`
        arguments["quantization_config"] = None
    if not isinstance(model, str):
        base = without_peft(model)
        conversions = getattr(base, "_weight_conversions", None) or []
        operations = [type(step).__name__ for entry in conversions for step in getattr(entry, "operations", [])]
        if "Mxfp4Dequantize" in operations:
            del base._weight_conversions  # saved as they are
    return model
