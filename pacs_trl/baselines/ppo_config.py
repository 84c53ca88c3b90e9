"""Settings of the PPO baseline besides those of any actor with a critic."""

from dataclasses import dataclass

from ..settings import with_help
from .actor_critic_config import ActorCriticConfig


@with_help
@dataclass
class PPOConfig(ActorCriticConfig):
    r"""
    Configuration class for the [`PPOTrainer`]: that of [`ActorCriticConfig`], and what a value head needs. The critic
    is always trained in full, also when the policy is a LoRA adapter.

    Parameters:
        critic_warmup_steps (`int`, *optional*, defaults to `0`):
            Optimizer steps at the start in which only the critic learns.
        value_clip_range (`float`, *optional*, defaults to `0.5`):
            How far the clipped value loss lets values move from those at rollout time, in units of the reward. `None`
            does not clip.
    """

    critic_warmup_steps: int = 0
    value_clip_range: float | None = 0.5

    @property
    def critic_alone_steps(self) -> int:
        return self.critic_warmup_steps
