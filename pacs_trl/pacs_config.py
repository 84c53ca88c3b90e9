"""Settings of PACS, every rule between them, and what is refused because the objective would ignore it."""

import os
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from typing import Literal, get_args

from trl import GRPOConfig

from .objective import ClassWeighting, Proxy, ScoreEstimator
from .redaction import PublishedArguments
from .settings import refuse_illegal_values, with_help
from .update.sampling_correction import CorrectionMode


# Settings of GRPOConfig that shape GRPO's own loss. PACS has no ratio, no clipping and no advantage to apply them to.
_SHAPES_ONLY_GRPO = {
    "delta": "PACS does not clip probability ratios",
    "epsilon": "PACS does not clip probability ratios",
    "epsilon_high": "PACS does not clip probability ratios",
    "importance_sampling_level": "PACS has no probability ratio",
    "loss_type": "the loss is binary cross-entropy on the score",
    "scale_rewards": "rewards are labels and are not normalized",
    "multi_objective_aggregation": "labels are the weighted sum of the reward functions",
    "top_entropy_quantile": "the proxy sums over all tokens of a completion",
    "off_policy_mask_threshold": "PACS does not mask off-policy sequences",
    "use_bias_correction_kl": "PACS has no probability ratio to correct the KL term with",
    "entropy_coef": "PACS has no entropy bonus",
    "use_adaptive_entropy": "PACS has no entropy bonus",
    "entropy_coef_min": "PACS has no entropy bonus",
    "entropy_coef_max": "PACS has no entropy bonus",
    "entropy_coef_delta": "PACS has no entropy bonus",
    "entropy_target": "PACS has no entropy bonus",
    "sapo_temperature_neg": "it belongs to the SAPO loss",
    "sapo_temperature_pos": "it belongs to the SAPO loss",
    "vespo_k_pos": "it belongs to the VESPO loss",
    "vespo_lambda_pos": "it belongs to the VESPO loss",
    "vespo_k_neg": "it belongs to the VESPO loss",
    "vespo_lambda_neg": "it belongs to the VESPO loss",
    "router_aux_loss_coef": "PACS does not add the router's auxiliary loss; 0.0 trains a mixture of experts without it",
}


def batch_arithmetic_errors(
    *,
    per_device_train_batch_size: int,
    num_processes: int,
    gradient_accumulation_steps: int,
    steps_per_generation: int,
    num_generations: int,
    num_iterations: int = 1,
) -> list[str]:
    """
    What is wrong with the sizes of a run, in words that name the values and the nearest legal ones.

    A generation batch has `per_device_train_batch_size * num_processes * steps_per_generation` completions and an
    optimizer step learns from `per_device_train_batch_size * num_processes * gradient_accumulation_steps` of them.
    Both must hold whole groups of `num_generations`, and an optimizer step may not straddle two generation batches
    unless it consumes both whole.

    Returns:
        `list[str]`: one message per broken rule; empty if the sizes are legal.
    """
    slot = per_device_train_batch_size * num_processes
    if num_generations < 2:
        return [
            f"num_generations must be at least 2, got {num_generations}: the score of a completion compares it with "
            "the other completions of its prompt. The paper uses 8."
        ]
    errors = []
    for name, steps in (
        ("steps_per_generation", steps_per_generation),
        ("gradient_accumulation_steps", gradient_accumulation_steps),
    ):
        size = slot * steps
        if size % num_generations == 0:
            continue
        what = "generation batch" if name == "steps_per_generation" else "batch of an optimizer step"
        unit = next(n for n in range(1, num_generations + 1) if slot * n % num_generations == 0)
        legal_steps = _around(steps, unit)
        divisors = [n for n in range(2, size + 1) if size % n == 0]
        nearest = sorted(sorted(divisors, key=lambda n: abs(n - num_generations))[:2])
        other_way = f", or num_generations={_either(nearest)}" if nearest else ""
        errors.append(
            f"The {what} must hold whole groups of num_generations={num_generations} completions, but it has "
            f"per_device_train_batch_size={per_device_train_batch_size} x {num_processes} processes x "
            f"{name}={steps} = {size}. Nearest legal values: {name}={_either(legal_steps)}{other_way}."
        )
        break  # the second rule follows from the first when the steps are equal; one remedy at a time
    whole_updates = steps_per_generation % gradient_accumulation_steps == 0
    whole_generations = gradient_accumulation_steps % steps_per_generation == 0
    if not whole_updates and not whole_generations:
        legal = _around(steps_per_generation, gradient_accumulation_steps)
        errors.append(
            f"steps_per_generation={steps_per_generation} must be a multiple of gradient_accumulation_steps="
            f"{gradient_accumulation_steps}, so that every optimizer step learns from one generation batch. Nearest "
            f"legal values: steps_per_generation={_either(legal)}."
        )
    elif not whole_updates and num_iterations > 1:
        errors.append(
            f"num_iterations={num_iterations} repeats a generation batch, but with gradient_accumulation_steps="
            f"{gradient_accumulation_steps} > steps_per_generation={steps_per_generation} the repetitions would fall "
            f"into one optimizer step. Set steps_per_generation={gradient_accumulation_steps} or num_iterations=1."
        )
    return errors


def _around(value: int, unit: int) -> list[int]:
    """The multiples of `unit` next to `value`, at least one `unit`."""
    below = value // unit * unit
    return [n for n in (below, below + unit) if n > 0]


def _either(values: list[int]) -> str:
    return " or ".join(str(v) for v in values)


@with_help
@dataclass
class PACSConfig(PublishedArguments, GRPOConfig):
    r"""
    Configuration class for the [`PACSTrainer`].

    Inherits every parameter of [`~trl.GRPOConfig`]. Generation, vLLM, data, logging and optimization keep their
    meaning, and so does `beta`, the weight of the KL term (k3 estimator, mean over the tokens of the optimizer step).
    Parameters that only shape GRPO's loss (`epsilon`, `loss_type`, `scale_rewards`, ...) are refused when moved off
    their default.

    Parameters:
        > Parameters that control the objective

        pacs_beta (`float`, *optional*, defaults to `1.0`):
            Scale of the implicit reward, beta of the paper's eq. 7.
        score_estimator (`str`, *optional*, defaults to `"rloo"`):
            How the implicit rewards of a group become scores: `"rloo"`, `"dr_grpo"`, `"grpo"` or `"none"`. `"grpo"`
            divides by the group's standard deviation, which is 0 on the first update after a rollout if the reference
            is the rollout policy; it needs `reference="snapshot"`, or `first_update_score`.
        first_update_score (`str`, *optional*):
            `"dr_grpo"` allows `score_estimator="grpo"` with `reference="rollout"`, the setting of the authors' code: the
            first update after a rollout, where all implicit rewards are 0 and the quotient of `"grpo"` is undefined, has
            the gradient of `"dr_grpo"`, and the later updates of the rollout have the score of `"grpo"`. `None` refuses
            that setting.
        class_weighting (`str`, *optional*, defaults to `"balanced"`):
            Weights of correct and wrong completions inside each group: `"balanced"`, `"none"`, `"only_positive"` or
            `"only_negative"`.
        proxy (`str`, *optional*, defaults to `"log_ratio"`):
            Implicit reward: `"log_ratio"` (eq. 7), or `"mean_logp"`, the mean log-probability without reference.
        actor_term_coef (`float`, *optional*, defaults to `0.0`):
            Weight of the actor term of eq. 5. The authors' code has none. 1.0 is the weight in eq. 5, but the term here
            is centered in the group and carries the class weights, and eq. 5 has neither.

        > Parameters that control the reference policy

        reference (`str`, *optional*, defaults to `"rollout"`):
            `"rollout"`: the policy that generated the completions (the authors' code). `"snapshot"`: a copy of the
            trained weights, taken at the start and renewed every `reference_reset_steps` (the paper's section 3.4).
        reference_reset_steps (`int`, *optional*):
            Optimizer steps between renewals of the snapshot. `None` keeps the initial one.
        reset_optimizer_on_reference_reset (`bool`, *optional*, defaults to `False`):
            Whether to forget the optimizer's state when the snapshot is renewed.
        reference_offload (`bool`, *optional*, defaults to `False`):
            Whether to keep the snapshot in CPU memory. It is exchanged with the policy parameter by parameter, so the
            device never holds two copies.

        > Parameters that control the optimizer step

        max_tokens_per_micro_batch (`int`, *optional*):
            Bounds a forward pass by tokens. By default it is bounded by `per_device_train_batch_size` rows.
        padding_free (`str`, *optional*, defaults to `"auto"`):
            `"auto"` packs the rows of a micro-batch where model and attention allow it and pads them otherwise. For tests:
            `"always"` raises where packing is impossible, `"never"` pads.
        group_layout (`str`, *optional*, defaults to `"auto"`):
            When scores are not known beforehand (every update but the first after a rollout), `"whole"` keeps each
            group in one micro-batch and needs one forward pass; `"split"` composes micro-batches freely and needs an
            additional forward pass without gradient. `"auto"` takes the cheaper one by tokens; the others are for tests.
        max_non_finite_steps (`int`, *optional*, defaults to `3`):
            Optimizer steps in a row with a gradient norm that is not finite after which training stops. Each such step
            is skipped on all processes.

        > Parameters with another default than in GRPOConfig

        disable_dropout (`bool`, *optional*, defaults to `True`):
            The proxy compares two forward passes of the same tokens; dropout would fill it with noise.
        vllm_importance_sampling_correction (`bool`, *optional*, defaults to `False`):
            Whether to correct for the mismatch between the engine that generates and the trainer: the gradient becomes
            `sum_i c_i * sum_t w_it * grad log pi(o_it)` with the coefficients `c_i = d(loss)/d(proxy_i)` and detached
            weights `w_it`, the ratio of the trainer's to the engine's probability, truncated or masked as
            `vllm_importance_sampling_mode` (`"token_truncate"`, `"token_mask"`, `"sequence_truncate"`,
            `"sequence_mask"`), `vllm_importance_sampling_clip_min` and `vllm_importance_sampling_clip_max` say. Proxies,
            scores and loss keep their values. Off as in the authors' code; the mismatch is logged as `sampling/*` in any
            case. It costs a forward pass only with `reference="snapshot"` or `proxy="mean_logp"` and several updates per
            generation.
    """

    pacs_beta: float = 1.0
    score_estimator: ScoreEstimator = "rloo"
    first_update_score: str | None = field(default=None, metadata={"choices": ["dr_grpo"]})
    class_weighting: ClassWeighting = "balanced"
    proxy: Proxy = "log_ratio"
    actor_term_coef: float = 0.0
    reference: Literal["rollout", "snapshot"] = "rollout"
    reference_reset_steps: int | None = None
    reset_optimizer_on_reference_reset: bool = False
    reference_offload: bool = False
    max_tokens_per_micro_batch: int | None = None
    padding_free: Literal["auto", "always", "never"] = "auto"
    group_layout: Literal["auto", "whole", "split"] = "auto"
    max_non_finite_steps: int = 3
    disable_dropout: bool = True
    vllm_importance_sampling_correction: bool = False

    def __post_init__(self):
        errors = []
        for check in (
            self._refuse_ignored_settings,
            self._check_objective,
            self._check_reference,
            self._check_micro_batches,
            partial(refuse_illegal_values, self),
        ):
            try:
                check()
            except ValueError as error:
                errors.append(str(error))
        if errors:
            raise ValueError(" ".join(errors))
        if self.generation_batch_size is None or self.steps_per_generation is None:
            self._check_batch_arithmetic(int(os.environ.get("WORLD_SIZE", 1)))
        super().__post_init__()
        self._check_later_updates()

    def _refuse_ignored_settings(self):
        defaults = {f.name: f.default for f in fields(self) if f.default is not MISSING}
        for name, reason in _SHAPES_ONLY_GRPO.items():
            value = getattr(self, name)
            if value != defaults[name] and (name, value) != ("router_aux_loss_coef", 0.0):
                raise ValueError(
                    f"PACSConfig does not take {name}={value!r}: {reason}, so the value would be ignored. Remove the key "
                    f"(its default is {defaults[name]!r}), or train with `method: grpo`."
                )

    def _check_choice(self, name: str, choices: tuple[str, ...]):
        if getattr(self, name) not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}; got {getattr(self, name)!r}.")

    def _check_objective(self):
        self._check_choice("score_estimator", get_args(ScoreEstimator))
        self._check_choice("class_weighting", get_args(ClassWeighting))
        self._check_choice("proxy", get_args(Proxy))
        self._check_choice("vllm_importance_sampling_mode", get_args(CorrectionMode))
        if not self.pacs_beta > 0:
            raise ValueError(
                f"pacs_beta must be above 0, got {self.pacs_beta}: it scales the implicit reward, and at 0 nothing is "
                "learned. The paper uses 1.0. (The weight of the KL term is the other setting, `beta`.)"
            )
        if self.actor_term_coef < 0:
            raise ValueError(
                f"actor_term_coef must not be negative, got {self.actor_term_coef}: 0 leaves the actor term of eq. 5 "
                "out, as the authors' code does; 1.0 is its weight in the paper."
            )

    def _check_reference(self):
        self._check_choice("reference", ("rollout", "snapshot"))
        undefined = self.score_estimator == "grpo" and self.reference == "rollout" and self.proxy == "log_ratio"
        if undefined and self.first_update_score is None:
            raise ValueError(
                "score_estimator='grpo' cannot be used with reference='rollout': it divides by the standard deviation "
                "of the group's implicit rewards, and on the first update after a rollout these are all exactly 0 "
                "(policy and reference are the same), so the score would be numerical noise. Use "
                "reference='snapshot', or score_estimator='rloo' or 'dr_grpo', or say that this update takes another "
                "score: first_update_score='dr_grpo'."
            )
        if self.first_update_score is not None:
            self._check_choice("first_update_score", ("dr_grpo",))
            if not undefined:
                raise ValueError(
                    f"first_update_score={self.first_update_score!r} would be ignored: it is for score_estimator='grpo' "
                    "with reference='rollout' and proxy='log_ratio', whose score is undefined on the first update after "
                    f"a rollout; here score_estimator={self.score_estimator!r}, reference={self.reference!r} and "
                    f"proxy={self.proxy!r}. Remove the key."
                )
        if self.reference == "snapshot" and self.proxy == "mean_logp":
            raise ValueError(
                "reference='snapshot' would be ignored with proxy='mean_logp', which has no reference. Use "
                "proxy='log_ratio', or remove `reference`."
            )
        if self.reference == "rollout":
            for name in ("reference_reset_steps", "reset_optimizer_on_reference_reset", "reference_offload"):
                if getattr(self, name):
                    raise ValueError(
                        f"{name}={getattr(self, name)!r} would be ignored with reference='rollout', which renews "
                        "itself with every generation. Set reference='snapshot', or remove the key."
                    )
        if self.reference_reset_steps is not None and self.reference_reset_steps < 1:
            raise ValueError(
                f"reference_reset_steps must be at least 1, got {self.reference_reset_steps}. Leave it out to keep "
                "the initial snapshot."
            )
        if self.reset_optimizer_on_reference_reset and self.reference_reset_steps is None:
            raise ValueError(
                "reset_optimizer_on_reference_reset=True would never happen, because reference_reset_steps is not "
                "set. Set it to the number of optimizer steps between resets."
            )

    def _check_later_updates(self):
        if self.first_update_score is None:
            return
        if self.steps_per_generation * self.num_iterations <= self.gradient_accumulation_steps:
            raise ValueError(
                f"first_update_score={self.first_update_score!r} needs a second update on a rollout, but with "
                f"steps_per_generation={self.steps_per_generation}, gradient_accumulation_steps="
                f"{self.gradient_accumulation_steps} and num_iterations={self.num_iterations} every update is the first, "
                "so the score of 'grpo' would never be used. Raise steps_per_generation (the paper has four updates "
                "per rollout), or set score_estimator='dr_grpo' and remove the key."
            )

    def _check_micro_batches(self):
        self._check_choice("padding_free", ("auto", "always", "never"))
        self._check_choice("group_layout", ("auto", "whole", "split"))
        if self.max_tokens_per_micro_batch is not None and (
            self.max_tokens_per_micro_batch <= (self.max_completion_length or 0)
        ):
            raise ValueError(
                f"max_tokens_per_micro_batch={self.max_tokens_per_micro_batch} cannot hold one sequence: completions "
                f"may have max_completion_length={self.max_completion_length} tokens, and the prompt comes on top. "
                "Raise it to the longest prompt plus max_completion_length, or lower max_completion_length."
            )
        if self.max_non_finite_steps < 1:
            raise ValueError(f"max_non_finite_steps must be at least 1, got {self.max_non_finite_steps}.")

    def _check_batch_arithmetic(self, num_processes: int):
        slot = self.per_device_train_batch_size * num_processes
        if self.generation_batch_size is not None:
            if self.generation_batch_size % slot != 0:
                raise ValueError(
                    f"generation_batch_size={self.generation_batch_size} must be a multiple of "
                    f"per_device_train_batch_size={self.per_device_train_batch_size} x {num_processes} processes = "
                    f"{slot}. Nearest legal values: {_either(_around(self.generation_batch_size, slot))}."
                )
            steps_per_generation = self.generation_batch_size // slot
        else:
            steps_per_generation = self.steps_per_generation or self.gradient_accumulation_steps
        errors = batch_arithmetic_errors(
            per_device_train_batch_size=self.per_device_train_batch_size,
            num_processes=num_processes,
            gradient_accumulation_steps=self.gradient_accumulation_steps,
            steps_per_generation=steps_per_generation,
            num_generations=self.num_generations,
            num_iterations=self.num_iterations,
        )
        if errors:
            raise ValueError(" ".join(errors))
