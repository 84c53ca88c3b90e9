"""Settings of the PPO baseline, and what is refused because PPO would ignore it."""

from dataclasses import MISSING, dataclass, field, fields

from trl import GRPOConfig

from ..redaction import PublishedArguments
from ..settings import refuse_illegal_values, with_help


# Settings of GRPOConfig that make GRPO's advantage or belong to losses without PPO's clipping.
_SHAPES_ONLY_GRPO = {
    "scale_rewards": "PPO does not normalize rewards within a group; see whiten_advantages",
    "multi_objective_aggregation": "the reward of PPO is the weighted sum of the reward functions",
    "importance_sampling_level": "PPO clips the ratio of each token",
    "off_policy_mask_threshold": "it needs one advantage per completion",
    "sapo_temperature_neg": "it belongs to the SAPO loss",
    "sapo_temperature_pos": "it belongs to the SAPO loss",
    "vespo_k_pos": "it belongs to the VESPO loss",
    "vespo_lambda_pos": "it belongs to the VESPO loss",
    "vespo_k_neg": "it belongs to the VESPO loss",
    "vespo_lambda_neg": "it belongs to the VESPO loss",
}


@with_help
@dataclass
class PPOConfig(PublishedArguments, GRPOConfig):
    r"""
    Configuration class for the [`PPOTrainer`].

    Inherits every parameter of [`~trl.GRPOConfig`]; defaults are the settings of the PACS authors' PPO baseline.
    `epsilon`, `epsilon_high` and `delta` clip the policy's ratio as they do in GRPO, `max_grad_norm` clips the gradients
    of policy and critic, each on its own, and `weight_decay` and `lr_scheduler_type` apply to both. Parameters that shape
    GRPO's advantage (`scale_rewards`, ...) are refused when moved off their default.

    Parameters:
        > Parameters that control the critic

        critic_model_name_or_path (`str`, *optional*):
            Where the critic's weights come from. A causal language model gets a new value head. By default that is the
            policy's own path. The critic is always trained in full, in float32 (with autocast under `bf16`), also when
            the policy is a LoRA adapter.
        critic_learning_rate (`float`, *optional*, defaults to `1e-5`):
            Learning rate of the critic.
        critic_warmup_steps (`int`, *optional*, defaults to `0`):
            Optimizer steps at the start in which only the critic learns.
        value_clip_range (`float`, *optional*, defaults to `0.5`):
            How far the clipped value loss lets values move from those at rollout time, in units of the reward. `None`
            does not clip.

        > Parameters that control the advantage

        gamma (`float`, *optional*, defaults to `1.0`):
            Discount per token.
        gae_lambda (`float`, *optional*, defaults to `1.0`):
            Lambda of generalized advantage estimation. At 1 the advantage is the reward minus the value.
        whiten_advantages (`bool`, *optional*, defaults to `True`):
            Whether to shift and scale advantages to mean 0 and variance 1 over the tokens of the generation batch.

        > Parameters with another default than in GRPOConfig

        delta (`float`, *optional*, defaults to `3.0`):
            Upper bound of the ratio. Above `1 + epsilon` it acts on negative advantages only and is the dual clip of PPO
            implementations, there called `clip_ratio_c`. `None` leaves it out.
        loss_type (`str`, *optional*, defaults to `"dr_grpo"`):
            How losses of tokens add up, for policy and critic: `"dr_grpo"`, their sum divided by completions times
            `max_completion_length` (the authors' code), or `"dapo"`, their mean over the tokens of the optimizer step
            (the paper's formula).
        disable_dropout (`bool`, *optional*, defaults to `True`):
            The ratio compares two forward passes; dropout would fill it with noise.
        vllm_importance_sampling_correction (`bool`, *optional*, defaults to `False`):
            Off, as in the authors' code.
    """

    critic_model_name_or_path: str | None = None
    critic_learning_rate: float = 1e-5
    critic_warmup_steps: int = 0
    value_clip_range: float | None = 0.5
    gamma: float = 1.0
    gae_lambda: float = 1.0
    whiten_advantages: bool = True
    delta: float | None = 3.0
    loss_type: str = field(default="dr_grpo", metadata={"choices": ["dr_grpo", "dapo"]})
    disable_dropout: bool = True
    vllm_importance_sampling_correction: bool = False

    def __post_init__(self):
        defaults = {f.name: f.default for f in fields(self) if f.default is not MISSING}
        for name, reason in _SHAPES_ONLY_GRPO.items():
            value = getattr(self, name)
            if value != defaults[name]:
                raise ValueError(
                    f"PPOConfig does not take {name}={value!r}: {reason}, so the value would be ignored. Remove the key "
                    f"(its default is {defaults[name]!r}), or train with `method: grpo`."
                )
        if self.loss_type not in ("dr_grpo", "dapo"):
            raise ValueError(
                f"loss_type of PPO must be 'dr_grpo' (sum over tokens / max_completion_length, the authors' code) or "
                f"'dapo' (mean over tokens, the paper's formula); got {self.loss_type!r}."
            )
        for name in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in [0, 1], got {getattr(self, name)}. The authors use 1.0.")
        if not self.critic_learning_rate > 0:
            raise ValueError(
                f"critic_learning_rate must be above 0, got {self.critic_learning_rate}: without learning, the critic's "
                "values are noise. The authors use 1e-5."
            )
        if self.critic_warmup_steps < 0:
            raise ValueError(f"critic_warmup_steps must not be negative, got {self.critic_warmup_steps}.")
        if self.value_clip_range is not None and not self.value_clip_range > 0:
            raise ValueError(
                f"value_clip_range must be above 0, got {self.value_clip_range}. The authors use 0.5; None turns "
                "clipping off."
            )
        highest_ratio = 1 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)
        if self.delta is not None and self.delta <= highest_ratio:
            raise ValueError(
                f"delta={self.delta} must be above 1 + epsilon_high = {highest_ratio}: it bounds the ratio of negative "
                "advantages and may not undercut the clipping of positive ones. The authors use 3.0; None turns it off."
            )
        if self.fp16:
            raise ValueError(
                "fp16=True is not supported by PPO: policy and critic would share one loss scale. Set bf16=True or train "
                "in float32."
            )
        refuse_illegal_values(self)
        super().__post_init__()
