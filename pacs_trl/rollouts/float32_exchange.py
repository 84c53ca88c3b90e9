"""What FSDP2 rounds to bfloat16 under accelerate's mixed precision, and should not: gradients, and what a model
returns.

accelerate 1.15 gives every module `MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=bf16, output_dtype=bf16)`. Then
gradients are summed over micro-batches and processes with 8 significant bits, where verl and DDP have float32. And
log-probabilities, which the fused head computes in float32, are rounded on their way out: one of -0.5 to the next
multiple of 2^-9, which is more than an update moves it, and the proxy sums thousands of them. Arithmetic inside the
model stays bf16.
"""

from dataclasses import replace

import torch
from accelerate import Accelerator


def keep_float32(accelerator: Accelerator) -> None:
    """
    Let FSDP2 accumulate and reduce gradients in float32, and return what the model returns. Does nothing elsewhere.

    Holds for models that are prepared afterwards. The gradient that is collected between micro-batches then takes 4
    bytes per trained weight on every GPU until it is reduced, instead of 2.

    Args:
        accelerator ([`~accelerate.Accelerator`]):
            That of a trainer whose model is not prepared yet.
    """
    if not accelerator.is_fsdp2:
        return
    plugin = accelerator.state.fsdp_plugin
    if plugin.mixed_precision_policy is not None:
        plugin.mixed_precision_policy = replace(
            plugin.mixed_precision_policy, reduce_dtype=torch.float32, output_dtype=None
        )
