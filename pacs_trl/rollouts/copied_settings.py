"""Attributes that TRL's trainer copies from settings, and that callbacks change during a run."""

import math
from typing import Any

from ..errors import FailedRun, UserError
from .protocols import LiveTrainer


# Those that TRL's loss or generation reads.
COPIED_SETTINGS = (
    "beta",
    "epsilon_low",
    "epsilon_high",
    "loss_type",
    "importance_sampling_level",
    "top_entropy_quantile",
    "off_policy_mask_threshold",
    "num_generations",
    "num_iterations",
    "max_completion_length",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "aux_loss_enabled",
    "router_aux_loss_coef",
    "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_clip_max",
)


def copied_settings(trainer: LiveTrainer) -> dict[str, Any]:
    """Return the current values of the attributes `COPIED_SETTINGS`."""
    return {name: getattr(trainer, name) for name in COPIED_SETTINGS}


def check_changes(trainer: LiveTrainer, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise a [`FailedRun`] if an attribute was changed that nothing reads anew, and a `ValueError` for an illegal
    value. `before` and `now` are what [`copied_settings`] returned."""
    for name in [name for name in now if now[name] != before[name]]:
        loads_reference = name == "beta" and trainer.args.beta == 0
        is_live = name in trainer.live_attributes or (name == "router_aux_loss_coef" and trainer.aux_loss_enabled)
        if not is_live or loads_reference:
            raise FailedRun(
                f"trainer.{name} was changed from {before[name]!r} to {now[name]!r} after the trainer was "
                f"constructed, and {trainer._name} reads it then"
                + (" to decide whether there is a reference" if loads_reference else "")
                + ". Construct a new trainer with the setting, or use TRL's trainer."
            )
        if name == "beta" and not 0 <= now[name] < math.inf:
            raise UserError(
                f"trainer.beta was set to {now[name]}. It must be a finite number of at least 0: the coefficient of "
                "the KL to the reference."
            )
