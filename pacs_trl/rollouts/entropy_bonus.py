"""Coefficient of the entropy bonus, which callbacks and adaptive control change during a run.

`entropy_coef`, `use_adaptive_entropy`, `_entropy_bonus_enabled`, and `_last_world_entropy` are TRL's attributes. The
bonus itself is a part of the policy update.
"""

import math

from ..errors import UserError
from .protocols import EntropyTrainer


def check_entropy_coef(trainer: EntropyTrainer) -> None:
    """Raise a `ValueError` if a callback has set a coefficient of the entropy bonus that would be ignored."""
    if not 0 <= trainer.entropy_coef < math.inf:
        raise UserError(
            f"trainer.entropy_coef was set to {trainer.entropy_coef}. It must be a finite number of at least 0; to "
            "lower the entropy, use a smaller coefficient or a lower temperature."
        )
    if (trainer.entropy_coef != 0 or trainer.use_adaptive_entropy) and not trainer._entropy_bonus_enabled:
        raise UserError(
            f"trainer.entropy_coef was set to {trainer.entropy_coef}, but the trainer was constructed with "
            "entropy_coef=0.0, so its optimizer steps skip completions without a reward signal. Construct it with "
            "a positive entropy_coef, and let a callback change it when training begins."
        )


def effective_entropy_coef(trainer: EntropyTrainer) -> float:
    """Return the coefficient of the next optimizer step. With adaptive control it is 0 while the entropy of the last
    step is above the target."""
    if trainer.use_adaptive_entropy and trainer._last_world_entropy > trainer.args.entropy_target:
        return 0.0
    return trainer.entropy_coef


def adapt_entropy_coef(trainer: EntropyTrainer, mean_entropy: float) -> None:
    """Log the coefficient of the entropy bonus; with adaptive control (section 4.1 of
    https://huggingface.co/papers/2505.22312), raise it first if the entropy of the optimizer step, in nats per token,
    is at most the target, and lower it otherwise."""
    if not trainer._entropy_bonus_enabled:
        return
    if trainer.use_adaptive_entropy:
        args = trainer.args
        if mean_entropy <= args.entropy_target:
            trainer.entropy_coef = min(trainer.entropy_coef + args.entropy_coef_delta, args.entropy_coef_max)
        else:
            trainer.entropy_coef = max(trainer.entropy_coef - args.entropy_coef_delta, args.entropy_coef_min)
        trainer._last_world_entropy = mean_entropy
    trainer.record_metrics({"entropy_coef": trainer.entropy_coef})


def reset_entropy_coef(trainer: EntropyTrainer) -> None:
    """Set the coefficient to that of the settings if an earlier run has adapted it."""
    if trainer._last_world_entropy < math.inf:
        trainer.entropy_coef, trainer._last_world_entropy = trainer.args.entropy_coef, math.inf
