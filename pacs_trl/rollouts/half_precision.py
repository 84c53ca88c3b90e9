"""Warning of weights in half precision, which lose small updates to rounding."""

import logging
from typing import Any

from peft import PeftConfig, PeftModel
from transformers import PreTrainedModel

from .launched_sharding import is_sharded_by_plugin
from .rollout_config import RolloutConfig


logger = logging.getLogger(__name__)
# bfloat16 has 8 significant bits: adding less than 2^-9 of a weight has no effect. Adam moves a weight by about the
# learning rate, and typical weights are 0.02.
_SMALLEST_BF16_LEARNING_RATE = 2**-9 * 0.02


def rounded_updates(dtype: Any, learning_rate: float, *, has_float32_copies: bool) -> str | None:
    """Return a warning if weights in half precision would lose most of the updates, in two sentences."""
    name = str(dtype).removeprefix("torch.")
    if name not in ("bfloat16", "float16", "auto") or learning_rate >= _SMALLEST_BF16_LEARNING_RATE:
        return None
    lost = f"dtype={name} with learning_rate={learning_rate:g}: half precision rounds away updates below about "
    lost += f"{_SMALLEST_BF16_LEARNING_RATE:.0e} of typical weights. "
    if has_float32_copies:
        return lost + "FSDP and DeepSpeed train float32 copies; dtype: float32 makes that explicit."
    return lost + "Set dtype: float32 and bf16: true (float32 weights, bfloat16 arithmetic)."


def warn_of_rounded_updates(
    model: str | PreTrainedModel | PeftModel, args: RolloutConfig, peft_config: PeftConfig | None
) -> None:
    """Log a warning, on the first process, if weights in half precision would lose most of the updates."""
    if peft_config is not None or isinstance(model, PeftModel):
        return
    dtype = (args.model_init_kwargs or {}).get("dtype") if isinstance(model, str) else model.dtype
    is_copied = (args.bf16 or args.fp16) and is_sharded_by_plugin(args)
    warning = rounded_updates(dtype, args.learning_rate, has_float32_copies=False)
    if warning is not None and not is_copied and args.process_index == 0:
        logger.warning(warning)
