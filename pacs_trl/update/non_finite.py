"""Optimizer steps whose gradient is not finite: left out, counted, and an error when they do not end."""

import math

from ..settings.command_line import FailedRun


class NonFiniteSteps:
    """`limit`: steps in a row after which training stops. `in_a_row`, `total`: how many there were, up to the last
    step and in the whole run."""

    def __init__(self, limit: int):
        self.limit = limit
        self.in_a_row = self.total = 0

    def leaves_out(self, grad_norm: float, step: int, *, is_applied: bool = False) -> bool:
        """
        Whether a step is to be left out, by the norm of its reduced gradient before clipping, the same on all
        processes. `step` is its number, for the error; `is_applied` says that the gradient is in the weights already.

        Raises:
            `RuntimeError`: if it cannot be left out, or is the last of `limit` in a row.
        """
        if math.isfinite(grad_norm):
            self.in_a_row = 0
            return False
        self.in_a_row += 1
        self.total += 1
        if is_applied:
            raise FailedRun(
                f"The gradient norm of step {step} is {grad_norm}. DeepSpeed has already applied it; start a new run "
                "from the weights of the last checkpoint (model_name_or_path) with a lower learning rate."
            )
        if self.in_a_row >= self.limit:
            raise FailedRun(
                f"The gradient norm was not finite in {self.in_a_row} optimizer steps in a row (now {grad_norm} at "
                "step "
                f"{step}; max_non_finite_steps={self.limit}). The weights are those before the first of them. Look at "
                "`pacs/proxy_abs_mean`: lower the learning rate, or set max_grad_norm."
            )
        return True
