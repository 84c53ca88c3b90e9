"""Optimizer steps whose gradient is not finite: they are skipped and counted, and too many in a row end the run."""

import math

from accelerate.utils import DistributedType
from torch import nn

from ..errors import FailedRun
from .protocols import SteppingTrainer


def skip_non_finite_step(trainer: SteppingTrainer, model: nn.Module, grad_norm: float) -> None:
    """
    Count an optimizer step, and discard its gradient if `grad_norm`, the same on all processes, is not finite.

    Raises:
        [`FailedRun`]: after `max_non_finite_steps` such steps in a row, and with DeepSpeed, which has applied the
            gradient already, after one.
    """
    is_finite = math.isfinite(grad_norm)
    in_a_row, total = trainer._non_finite
    trainer._non_finite = (0, total) if is_finite else (in_a_row + 1, total + 1)
    in_a_row, total = trainer._non_finite
    trainer.record_metrics({"update/non_finite_steps": total})
    if is_finite:
        return
    is_applied = trainer.accelerator.distributed_type == DistributedType.DEEPSPEED
    if is_applied or in_a_row >= trainer.args.max_non_finite_steps:
        raise FailedRun(_description(trainer, in_a_row, is_applied=is_applied))
    if trainer.accelerator.scaler is None:  # in fp16 the scaler skips such steps itself
        model.zero_grad(set_to_none=True)  # optimizers skip parameters without a gradient


def _description(trainer: SteppingTrainer, in_a_row: int, *, is_applied: bool) -> str:
    step = trainer.state.global_step + 1
    now = f"The gradient norm was not finite in {in_a_row} optimizer steps in a row, up to step {step}"
    weights = "DeepSpeed has already applied the gradient to the weights. Start from the last checkpoint"
    if not is_applied:
        now += f" (max_non_finite_steps={trainer.args.max_non_finite_steps})"
        names = " and ".join(f"`{name}`" for name in trainer.divergence_metrics)
        weights = f"The weights are those before these steps. Look at {names}"
    return f"{now}. {weights}, and lower the learning rate, or set max_grad_norm."
