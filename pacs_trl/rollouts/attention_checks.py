"""Checks of the attention implementation that a model is to be loaded with."""

import re
from importlib.util import find_spec
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..errors import UserError
from ..settings import did_you_mean
from .rollout_config import RolloutConfig


# Packages of the attention implementations that transformers does not bring.
_ATTENTION_PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}


def check_attention(args: RolloutConfig) -> None:
    """Raise a `ValueError` if a model to be loaded asks for an attention that does not exist, is not installed, or
    cannot train."""
    loading = args.model_init_kwargs or {}
    implementation = loading.get("attn_implementation")
    capability = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0
    error = unknown_attention(implementation) or flash_attention_4_error(args, loading, capability)
    if error := error or missing_attention(implementation):
        raise UserError(error)


def unknown_attention(implementation: Any) -> str | None:
    """Return that transformers has no such attention implementation, and which it has; `None` if it has it, or would
    download it as a kernel, `owner/name`."""
    known = [name for name in ("eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()) if not re.search(r"\||^pacs_", name)]
    if not isinstance(implementation, str) or "/" in implementation or implementation.removeprefix("paged|") in known:
        return None
    near = did_you_mean(implementation, known)
    return f"attn_implementation: {implementation!r} does not exist.{near} Choose from {', '.join(known)}."


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
