"""Configurations of GRPO, RLOO, MaxRL, and REAL on the exact update."""

from dataclasses import dataclass
from typing import Any, Literal

from ..objective import GROUP_LOSSES
from ..pacs_config import ExactUpdateConfig, GroupLossConfig
from ..settings.checks import ignored_settings, unbounded_length_errors
from ..settings.fields import setting, switch
from ..settings.trl_settings import GRPO_LOSS_SETTINGS
from ..surrogate import LOSS_TYPES
from ..update.step_sizes import BatchSizes


@dataclass
class GRPOConfig(ExactUpdateConfig):
    """
    Configuration class for the [`GRPOTrainer`].

    Inherits every parameter of [`ExactUpdateConfig`] and [`~trl.GRPOConfig`] with its meaning and default.
    """

    group_comparison = "GRPO subtracts the mean reward of the group from a reward"

    shuffle_minibatches: bool = setting(
        False,
        "Whether the completions of a generation are spread over its optimizer steps at random, as in TRL. "
        "By default a step has whole groups, in order, so that only one reads each prompt.",
    )
    scale_rewards: Literal["group", "batch", "none", True, False] = switch(  # type: ignore[assignment]  # TRL's is text
        "group",
        "What rewards minus the mean of their group are divided by, as in `trl.GRPOConfig`: the standard deviation of "
        'the `"group"` (or `True`) or of the `"batch"`, or 1 (`"none"`, `False`).',
    )
    loss_type: str = setting(
        "dapo",
        'Normalization and token weights, as in `trl.GRPOConfig`: `"grpo"`, `"dr_grpo"`, `"bnpo"`, '
        '`"dapo"`, `"luspo"`, `"cispo"`, `"sapo"` or `"vespo"`. `"bnpo"` divides by the tokens of the '
        "optimizer step, not of a micro-batch.",
        choices=[name for name in LOSS_TYPES if name != "rloo"],
    )
    importance_sampling_level: str = setting(
        "token", '`"token"`, or `"sequence"` for one ratio per completion.', choices=["token", "sequence"]
    )

    def errors(self, step: BatchSizes) -> list[str]:
        return super().errors(step) + unbounded_length_errors(self)


@dataclass
class MaxRLConfig(GRPOConfig):
    """Configuration class for the [`MaxRLTrainer`]: every parameter of [`GRPOConfig`] except those that normalize
    rewards."""

    group_comparison = "MaxRL divides by the mean reward of the group"

    def errors(self, step: BatchSizes) -> list[str]:
        errors = super().errors(step)
        names = ("scale_rewards", "multi_objective_aggregation")
        return errors + ignored_settings(self, names, "the advantage has another normalization")


@dataclass
class RLOOConfig(ExactUpdateConfig):
    """
    Configuration class for the [`RLOOTrainer`].

    Inherits every parameter of [`ExactUpdateConfig`]. Those that it adds, and `epsilon` and `epsilon_high`, have the
    names, meanings, and defaults of [`~trl.RLOOConfig`]. Parameters that only affect GRPO's loss raise an error unless
    they have their default value.
    """

    kl_pass_precedes_update = True
    group_comparison = "RLOO subtracts the mean reward of the other completions of the group"

    beta: float = setting(
        0.05,
        "Weight of the KL penalty on the reward of a completion (sum of its log-ratios). 0 loads no reference.",
        least=0,
    )
    num_generations: int = setting(2, "Completions of each prompt.", least=2)
    normalize_advantages: bool = setting(
        False,
        "Whether to shift and scale the advantages of a generation batch to mean 0 and standard deviation 1.",
    )
    reward_clip_range: tuple[float, float] | None = setting(None, "Bounds on rewards.")
    shuffle_minibatches: bool = setting(
        False, "Whether the completions of a generation are spread over its optimizer steps at random."
    )
    vllm_importance_sampling_correction: bool = setting(
        False,
        "Whether the gradient of each token is weighted by the ratio of the trainer's to the engine's probability, as "
        "`vllm_importance_sampling_mode` says. `trl.RLOOTrainer` has no such weights.",
    )

    def errors(self, step: BatchSizes) -> list[str]:
        names = [name for name in GRPO_LOSS_SETTINGS if name not in ("epsilon", "epsilon_high")]
        reason = "RLOO clips the ratio of a whole completion and has no such setting"
        errors = [*super().errors(step), *ignored_settings(self, names, reason)]
        bounds = self.reward_clip_range
        if bounds is not None and not _are_bounds(bounds):
            errors.append(
                f"reward_clip_range={bounds!r} must be two numbers, the smaller one first. Correct it, or remove the "
                "key."
            )
        return errors


def _are_bounds(bounds: Any) -> bool:
    """Return whether a setting is two numbers, the first below the second."""
    is_pair = isinstance(bounds, list | tuple) and len(bounds) == 2
    if not is_pair or not all(isinstance(bound, int | float) for bound in bounds):
        return False
    lower, upper = bounds
    return lower < upper


@dataclass
class REALConfig(GroupLossConfig):
    """
    Configuration class for the [`REALTrainer`]. Inherits every parameter of [`GroupLossConfig`].
    """

    rewards_are_binary = True

    group_loss: str = setting(
        "real",
        'A key of `objective.GROUP_LOSSES`: `"real"`, or `"disco"` (without its divergence constraint).',
        choices=list(GROUP_LOSSES),
    )
    tau: float = setting(
        0.5, "Temperature of the loss; 0.5 is that of REAL's authors. DisCO's authors recommend 10.", above=0
    )
