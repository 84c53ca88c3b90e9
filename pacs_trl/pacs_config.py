"""Settings of the exact update and of PACS, the rules between them, and settings of GRPO that PACS would ignore."""

from dataclasses import dataclass
from typing import Any, Literal

from .errors import UserError
from .objective import ClassWeighting, Proxy, ScoreEstimator
from .rollouts.rollout_config import RolloutConfig
from .settings.checks import ignored_settings
from .settings.fields import setting
from .settings.trl_settings import GRPO_LOSS_SETTINGS
from .update.packing_name import renamed_packing
from .update.step_sizes import BatchSizes


@dataclass
class ExactUpdateConfig(RolloutConfig):
    """
    Settings of the exact optimizer step, which all its objectives share. Inherits every parameter of
    [`~trl.GRPOConfig`].
    """

    is_exact = True
    supports_rollout_lag = True
    supports_images = True

    max_tokens_per_micro_batch: int | str | None = setting(
        None,
        "Bounds a forward pass by tokens. By default `per_device_train_batch_size` completions bound it. "
        "Every prompt of training plus `max_completion_length` must fit, which is checked at startup; an evaluation "
        "raises it to its longest prompt and completion. `auto` chooses it from the memory of the GPU; on a CPU it is "
        "the default.",
        least=1,
    )
    packing: Literal["auto", "never"] = setting(
        "auto",
        '`"auto"` packs the completions of a micro-batch where model and attention allow it, and pads '
        'otherwise; `"never"` pads, for tests.',
    )
    padding_free: str | None = setting(None, "Former name of `packing`, until version 0.3.", choices=["auto", "never"])
    completions_per_step: int | None = setting(
        None,
        "Completions of an optimizer step over all processes, which may get unequal shares; by default "
        "`per_device_train_batch_size` x processes x `gradient_accumulation_steps`, which must not be less. For a run "
        "that continues on a number of processes that does not divide it.",
        least=1,
    )
    max_non_finite_steps: int = setting(
        3,
        "Optimizer steps in a row with a gradient norm that is not finite after which training stops. Each "
        "such step is skipped on all processes.",
        least=1,
    )

    def __post_init__(self):
        size = self.max_tokens_per_micro_batch
        if isinstance(size, str) and size.isdecimal():  # of a recipe, whose parser has one type for each setting
            self.max_tokens_per_micro_batch = int(size)
        if self.padding_free in ("auto", "never"):
            if self.packing not in ("auto", self.padding_free):
                raise UserError(
                    f"packing={self.packing!r} and padding_free={self.padding_free!r}, its former name, contradict "
                    "each other. Remove padding_free."
                )
            self.packing, self.padding_free = renamed_packing(self.padding_free, stacklevel=4), None
        super().__post_init__()

    def errors(self, step: BatchSizes) -> list[str]:
        errors = super().errors(step)
        if self.scores_groups or self.is_asynchronous or self.completions_per_step is not None:
            errors += step.errors()
        if self.completions_per_step and (self.rollout_lag or (self.use_vllm and self._shares_engine)):
            errors.append(
                f"completions_per_step={self.completions_per_step} divides a generation batch unevenly, which a vLLM "
                "server, vllm_tensor_parallel_size above 1, and rollout_lag do not support. Launch a number of "
                "processes that divides it, and remove the key."
            )
        room, longest = self.max_tokens_per_micro_batch, self.max_completion_length or 0
        if not isinstance(room, int | None) and room != "auto":
            errors.append(
                f"max_tokens_per_micro_batch must be an integer of at least 1, or auto, got {room!r}. Correct it, or "
                "remove the key."
            )
        if isinstance(room, int) and room <= longest:
            errors.append(
                f"max_tokens_per_micro_batch={room} cannot hold one sequence of a prompt and max_completion_length="
                f"{longest} tokens. Raise it to their sum, or lower max_completion_length."
            )
        return errors

    @property
    def _shares_engine(self) -> bool:
        return self.vllm_mode == "server" or self.vllm_tensor_parallel_size > 1


@dataclass
class GroupLossConfig(ExactUpdateConfig):
    """
    Settings of a loss that compares the completions of a group, whose rewards are labels in [0, 1]. Inherits every
    parameter of [`ExactUpdateConfig`]; those that only shape GRPO's loss (`epsilon`, `loss_type`, `scale_rewards`,
    ...) are rejected unless they have their default value.
    """

    scores_groups = True
    rewards_are_labels = True
    group_comparison = "The loss compares correct with wrong completions of a group"

    # Parameters with another default than in GRPOConfig
    disable_dropout: bool = setting(
        True,
        "Whether to disable dropout. The proxy compares two forward passes of the same tokens; dropout would fill it "
        "with noise.",
    )
    vllm_importance_sampling_correction: bool = setting(
        False,
        "Whether the gradient of each token is weighted by the ratio of the trainer's to the engine's "
        "probability, truncated or masked as `vllm_importance_sampling_mode` and `..._clip_min` and "
        "`..._clip_max` say. Proxies, scores, and loss keep their values. Off as in the authors' code; the "
        "mismatch is logged as `sampling/*` in any case. It costs a forward pass only with "
        '`reference="snapshot"` or `proxy="mean_logp"` and several updates per generation.',
    )

    def errors(self, step: BatchSizes) -> list[str]:
        reason = "the loss compares the completions of a group, without probability ratios, clipping, and advantages"
        return [*super().errors(step), *ignored_settings(self, GRPO_LOSS_SETTINGS, reason)]


@dataclass
class PACSConfig(GroupLossConfig):
    """
    Configuration class for the [`PACSTrainer`].

    Inherits every parameter of [`GroupLossConfig`] and [`~trl.GRPOConfig`]. Generation, vLLM, data, logging and
    optimization keep their meaning, and so does `beta`, the weight of the KL term (k3 estimator, mean over the tokens
    of the optimizer step). Parameters that only shape GRPO's loss (`epsilon`, `loss_type`, `scale_rewards`, ...) are
    rejected unless they have their default value.
    """

    group_comparison = "PACS scores a completion relative to the implicit rewards of the others of its group"

    # Parameters that control the objective
    pacs_beta: float = setting(1.0, "Scale of the implicit reward, beta of the paper's eq. 7.", above=0)
    score_estimator: ScoreEstimator = setting(
        "rloo",
        'How the implicit rewards of a group become scores: `"rloo"`, `"dr_grpo"`, `"grpo"` or `"none"`. '
        '`"grpo"` divides by the group\'s standard deviation, which is 0 on the first update after a '
        'rollout if the reference is the rollout policy; it needs `reference="snapshot"`, or '
        "`first_update_score`.",
    )
    first_update_score: str | None = setting(
        None,
        '`"dr_grpo"` allows `score_estimator="grpo"` with `reference="rollout"`, the setting of the '
        'authors\' code: the first update after a rollout, where the quotient of `"grpo"` is undefined, has '
        'the gradient of `"dr_grpo"`. `None` refuses that setting.',
        choices=["dr_grpo"],
    )
    class_weighting: ClassWeighting = setting(
        "balanced",
        'Weights of correct and wrong completions inside each group: `"balanced"`, `"none"`, '
        '`"only_positive"` or `"only_negative"`.',
    )
    proxy: Proxy = setting(
        "log_ratio",
        'Implicit reward: `"log_ratio"` (eq. 7), `"mean_log_ratio"`, the same divided by the number of '
        'tokens, or `"mean_logp"`, the mean log-probability without reference.',
    )
    actor_term_coef: float = setting(
        0.0,
        "Weight of the actor term of eq. 5 (1.0 there), here centered in the group and with class weights. "
        "The authors' code has none, and 1.0 cost accuracy wherever it was measured (docs/method.md).",
        least=0,
    )

    # Parameters that control the reference policy
    reference: Literal["rollout", "snapshot"] = setting(
        "rollout",
        '`"rollout"`: the policy that generated the completions (the authors\' code). `"snapshot"`: a copy '
        "of the trained weights, taken at the start and renewed every `reference_reset_steps` (the paper's "
        "section 3.4).",
    )
    reference_reset_steps: int | None = setting(
        None, "Optimizer steps between renewals of the snapshot. `None` keeps the initial one.", least=1
    )
    reset_optimizer_on_reference_reset: bool = setting(
        False, "Whether to forget the optimizer's state when the snapshot is renewed."
    )
    reference_offload: bool = setting(
        False,
        "Whether to keep the snapshot in CPU memory. It is exchanged with the policy parameter by "
        "parameter, so the device never holds two copies.",
    )

    # Parameters that control the optimizer step
    group_layout: Literal["auto", "whole", "split"] = setting(
        "auto",
        'When scores are not known beforehand (every update but the first after a rollout), `"whole"` '
        'keeps each group in one micro-batch, if it fits, and needs one forward pass; `"split"` composes '
        'micro-batches freely and needs an additional forward pass without gradient. `"auto"` takes the '
        "cheaper one by tokens; the others are for tests.",
    )

    def errors(self, step: BatchSizes) -> list[str]:
        errors = super().errors(step) + _first_update_errors(self, step)
        if self.reference == "rollout":
            names = ("reference_reset_steps", "reset_optimizer_on_reference_reset", "reference_offload")
            reason = "the policy that generated is the reference, which changes with every generation"
            errors += ignored_settings(self, names, reason, "`reference: snapshot`")
        elif self.proxy == "mean_logp":
            reason = "proxy='mean_logp' has no reference"
            errors += ignored_settings(self, ["reference"], reason, "`proxy: log_ratio`")
        if self.reference_reset_steps is None and self.reference == "snapshot":
            reason = "the reference is never reset"
            errors += ignored_settings(self, ["reset_optimizer_on_reference_reset"], reason, "`reference_reset_steps`")
        if self.keeps_generating_policy and self.reference == "snapshot":
            errors.append("stale_logps: recompute would be ignored with reference: snapshot. Remove it.")
        return errors

    @property
    def proxy_reference(self) -> str | None:
        return None if self.proxy == "mean_logp" else self.reference


def _first_update_errors(config: Any, step: BatchSizes) -> list[str]:
    undefined = config.score_estimator == "grpo" and config.reference == "rollout" and config.proxy != "mean_logp"
    first = config.first_update_score
    if undefined and config.is_asynchronous:
        return [
            f"{config.asynchronous_setting} cannot be used with score_estimator='grpo' and reference='rollout': "
            "its implicit rewards are nearly 0 at first. Set score_estimator='rloo' or 'dr_grpo', or "
            "reference='snapshot'."
        ]
    if undefined and first is None:
        return [
            "score_estimator='grpo' cannot be used with reference='rollout': it divides by the standard deviation of "
            "the group's implicit rewards, which are all 0 on the first update after a rollout. Set reference="
            "'snapshot', score_estimator='rloo' or 'dr_grpo', or first_update_score='dr_grpo' for that update."
        ]
    if not undefined:
        reason = "it is for reference='rollout' and proxy='log_ratio'"
        return ignored_settings(config, ["first_update_score"], reason, "`score_estimator: grpo`")
    if first is not None and step.updates_per_generation == 1:
        return [
            f"first_update_score={first!r} needs a second update on a rollout, but with steps_per_generation="
            f"{step.steps_per_generation}, gradient_accumulation_steps={step.gradient_accumulation_steps}, and "
            "num_iterations=1 every update is the first. Raise steps_per_generation (the paper has four updates per "
            "rollout), or set score_estimator='dr_grpo' and remove the key."
        ]
    return []
