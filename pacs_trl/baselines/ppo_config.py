"""Configurations of actor-critic methods and PPO, with the inherited settings that they reject."""

from dataclasses import dataclass
from typing import ClassVar

from ..rollouts.rollout_config import RolloutConfig
from ..settings.checks import ignored_settings, unbounded_length_errors
from ..settings.fields import setting
from ..settings.trl_settings import SAPO_AND_VESPO_SETTINGS
from ..update.step_sizes import BatchSizes


# Settings of GRPOConfig that only affect GRPO's advantage, or losses without PPO's clipping.
_IGNORED_SETTINGS = (
    "scale_rewards",
    "multi_objective_aggregation",
    "importance_sampling_level",
    "off_policy_mask_threshold",
    *SAPO_AND_VESPO_SETTINGS,
)


@dataclass
class ActorCriticConfig(RolloutConfig):
    """
    Base configuration of [`PPOConfig`] and [`~experimental.genac.GenACConfig`].

    Inherits every parameter of [`~trl.GRPOConfig`]; defaults are the settings of the PACS authors' PPO baseline.
    `epsilon`, `epsilon_high` and `delta` clip the policy's ratio as in GRPO. `max_grad_norm` clips the gradients of
    policy and critic separately; `weight_decay` and `lr_scheduler_type` apply to both. Parameters that only affect
    GRPO's advantage (`scale_rewards`, ...) raise an error unless they have their default value.
    """

    needs_same_number_of_processes = True
    has_critic = True
    kl_pass_precedes_update = True
    critic_alone_setting: ClassVar[str]  # the setting whose steps train only the critic

    # Parameters that control the critic
    critic_model_name_or_path: str | None = setting(
        None,
        "Initial weights of the critic: a causal language model, to which PPO adds a new value head. The "
        "default is the path of the policy. Weights are float32, with autocast under `bf16`, also if the "
        "policy uses LoRA.",
    )
    critic_learning_rate: float = setting(1e-5, "Learning rate of the critic.", above=0)

    # Parameters that control the advantage
    gamma: float = setting(1.0, "Discount per token.", least=0, most=1)
    gae_lambda: float = setting(
        1.0,
        "Lambda of generalized advantage estimation. At 1 the advantage is the reward minus the value.",
        least=0,
        most=1,
    )
    whiten_advantages: bool = setting(
        True,
        "Whether to shift and scale advantages to mean 0 and variance 1 over the tokens of the generation batch.",
    )

    # Parameters with another default than in GRPOConfig
    delta: float | None = setting(
        3.0,
        "Upper bound of the ratio. Above `1 + epsilon` it affects negative advantages only and is the dual "
        "clip of PPO implementations, often called `clip_ratio_c`. `None` disables it.",
    )
    loss_type: str = setting(
        "dr_grpo",
        'Normalization of token losses, for policy and critic: `"dr_grpo"`, their sum divided by '
        'completions times `max_completion_length` (the authors\' code), or `"dapo"`, their mean over the '
        "tokens of the optimizer step (the paper's formula).",
        choices=["dr_grpo", "dapo"],
    )
    disable_dropout: bool = setting(
        True, "Whether to disable dropout. The ratio compares two forward passes; dropout would add noise."
    )
    vllm_importance_sampling_correction: bool = setting(
        False,
        "Whether the gradient of each token is weighted by the ratio of the trainer's to the engine's probability. "
        "Off by default, as in the authors' code.",
    )

    def errors(self, step: BatchSizes) -> list[str]:
        reason = "advantages come from the critic (see whiten_advantages), and the ratio of each token is clipped"
        errors = super().errors(step) + ignored_settings(self, _IGNORED_SETTINGS, reason)
        epsilon_high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        highest_ratio = 1 + epsilon_high
        if self.delta is not None and self.delta <= highest_ratio:
            errors.append(
                f"delta={self.delta} would also clip positive advantages: it must be above 1 + epsilon_high = "
                f"{highest_ratio}. The authors use 3.0; None turns it off."
            )
        errors += unbounded_length_errors(self)
        if 0 < self.max_steps <= self.critic_alone_steps:
            errors.append(
                f"max_steps={self.max_steps} ends before the policy is trained: {self.critic_alone_setting}="
                f"{self.critic_alone_steps} optimizer steps train the critic alone. Raise max_steps, or lower "
                f"{self.critic_alone_setting}."
            )
        if self.fp16:
            errors.append(
                "fp16=True is not supported with a critic: policy and critic would share one loss scale. Set "
                "bf16=True or train in float32."
            )
        return errors

    @property
    def critic_alone_steps(self) -> int:
        """Number of optimizer steps at the start of a run that train only the critic."""
        return getattr(self, self.critic_alone_setting)


@dataclass
class PPOConfig(ActorCriticConfig):
    """
    Configuration class for the [`PPOTrainer`]: [`ActorCriticConfig`] and two settings of the critic. All critic
    weights are trained, also if the policy uses LoRA.
    """

    critic_scores_tokens = True
    critic_alone_setting = "critic_warmup_steps"

    critic_warmup_steps: int = setting(
        0, "Number of initial optimizer steps in which only the critic is trained.", least=0
    )
    value_clip_range: float | None = setting(
        0.5,
        "Maximum distance of values from those at rollout time in the clipped value loss, in units of the "
        "reward. `None` disables clipping.",
        above=0,
    )
