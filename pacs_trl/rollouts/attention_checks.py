"""Checks of the attention implementation that a model is to be loaded with."""

import re
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..errors import UserError
from ..settings import did_you_mean
from .model_config import config_of
from .rollout_config import RolloutConfig


# Packages of the attention implementations that transformers does not bring.
_ATTENTION_PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
# Attributes with which the classes of transformers say that they have an attention implementation.
_SUPPORT = {
    "sdpa": "_supports_sdpa",
    "flex_attention": "_supports_flex_attn",
    "flash_attention_2": "_supports_flash_attn",
    "flash_attention_3": "_supports_flash_attn",
    "flash_attention_4": "_supports_flash_attn",
}


def check_attention(name: str, args: RolloutConfig) -> None:
    """Raise a `ValueError` if a model to be loaded asks for an attention that does not exist, that its layers do not
    have, that is not installed, or that cannot train."""
    loading = args.model_init_kwargs or {}
    implementation = loading.get("attn_implementation")
    capability = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0
    error = unknown_attention(implementation) or flash_attention_4_error(args, loading, capability)
    error = error or missing_attention(implementation)
    if error is None and implementation is not None:
        error = unsupported_attention(implementation, config_of(name, args))
    if error is not None:
        raise UserError(error)


def unknown_attention(implementation: Any) -> str | None:
    """Return that transformers has no such attention implementation, and which it has; `None` if it has it, or would
    download it as a kernel, `owner/name`."""
    known = [name for name in ("eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()) if not re.search(r"\||^pacs_", name)]
    if not isinstance(implementation, str) or "/" in implementation or implementation.removeprefix("paged|") in known:
        return None
    near = did_you_mean(implementation, known)
    return f"attn_implementation: {implementation!r} does not exist.{near} Choose from {', '.join(known)}."


def unsupported_attention(implementation: Any, config: PreTrainedConfig) -> str | None:
    """Return that models of a configuration do not have an attention implementation; `None` if they have it, or are
    not in transformers."""
    model_class = getattr(transformers, (config.architectures or [""])[0], None)
    attribute = _SUPPORT.get(str(implementation))
    if model_class is None or attribute is None or getattr(model_class, attribute, True):
        return None
    return (
        f"attn_implementation: {config.model_type!r} models have no {implementation}. Set eager, or remove the key "
        "for their default."
    )


def flash_attention_4_error(
    args: RolloutConfig, loading: dict[str, Any], capability: int, planned_gpu: str | None = None
) -> str | None:
    """Return why FlashAttention 4 cannot train, if a model would be loaded with it. `loading` are the arguments of
    `from_pretrained`, `capability` is the major compute capability of the GPU (0 without one), and `planned_gpu` its
    name if another machine trains."""
    if loading.get("attn_implementation") != "flash_attention_4":
        return None
    dtype = loading.get("dtype")
    if dtype in (None, "float32", torch.float32) and not (args.bf16 or args.fp16):
        return (
            "attn_implementation: flash_attention_4 computes in half precision, and the weights are float32 without "
            "autocast. Set bf16: true, or attn_implementation: sdpa."
        )
    if capability < 9:
        device = f"a GPU of compute capability {capability}" if capability else "no GPU"
        device = f"the plan is for an {planned_gpu}" if planned_gpu else f"this machine has {device}"
        return (
            f"attn_implementation: flash_attention_4 is for Hopper and Blackwell GPUs, and {device}. Set "
            "attn_implementation: sdpa."
        )
    return None


def missing_attention(implementation: Any) -> str | None:
    """Return which package an attention implementation lacks on this machine, and what to do; `None` if it lacks none.
    The package `kernels` downloads another implementation instead."""
    package = _ATTENTION_PACKAGES.get(str(implementation))
    if package is None or find_spec(package) is not None or find_spec("kernels") is not None:
        return None
    return (
        f"attn_implementation: {implementation} needs the package {package}, which is not installed here. Install it, "
        "or set attn_implementation: sdpa, which packs completions, too."
    )
