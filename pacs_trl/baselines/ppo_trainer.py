"""PPOTrainer: proximal policy optimization with a value-head critic."""

import torch
from transformers import AutoModelForTokenClassification, PreTrainedModel, set_seed

from ..update.rollout import without_padding
from .actor_critic import ActorCriticTrainer, load_critic, padded
from .gae import clipped_value_losses
from .ppo_config import PPOConfig


class PPOTrainer(ActorCriticTrainer):
    """
    Trainer for Proximal Policy Optimization with a token-level critic, the PPO baseline of the PACS paper.

    Rollouts are the same as in [`~trl.GRPOTrainer`], `num_generations` completions per prompt, but PPO does not
    compare rewards within a group. Logs the metrics of [`~trl.GRPOTrainer`] and `ppo/*`, see docs/metrics.md.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`]): Model id, path, or instance.
        reward_funcs (`RewardFunc` or `list[RewardFunc]`): As in [`~trl.GRPOTrainer`]. A completion for which all of
            them return `None` is excluded from the loss.
        args ([`PPOConfig`], *optional*): Configuration of this trainer. If `None`, a default configuration is used.

    All other arguments are those of [`~trl.GRPOTrainer`].
    """

    args: PPOConfig
    _own_shared_settings = (*ActorCriticTrainer._own_shared_settings, "value_clip_range", "critic_warmup_steps")
    _critic_has_values = True
    _tag_names = ["trl", "ppo"]
    _name = "PPO"
    _config_class = PPOConfig
    _paper = {"title": "Proximal Policy Optimization Algorithms", "id": "1707.06347"}

    def _create_critic(self, policy, args, arguments) -> PreTrainedModel:
        """Load a critic with one output per token: a causal language model with a new value head, or a saved critic
        with its own."""
        set_seed(args.seed)  # for the initialization of the value head
        return load_critic(policy, args, AutoModelForTokenClassification, num_labels=1)

    @torch.no_grad()
    def _value_tokens(self, inputs, batch):
        """Compute the values in micro-batches of the size that training uses."""
        self.critic.eval()
        size = self.args.per_device_train_batch_size if self.model.training else self.args.per_device_eval_batch_size
        with self.timer.part("log_probs"):
            values = self._values(batch, size)
        self.critic.train()
        return values, self.args.gae_lambda

    def _values(self, batch: dict, size: int) -> torch.Tensor:
        """Return the value of each token, `(B, T)`, read at the position before it, from `size` rows at a time."""
        prompts = without_padding(batch["prompt_ids"], batch["prompt_mask"])
        completions = without_padding(batch["completion_ids"], batch["completion_mask"])
        parts = [slice(start, start + size) for start in range(0, len(prompts), size)]
        values = [self._critic_pass.values(self.critic, prompts[part], completions[part]) for part in parts]
        return padded(sum(values, []), batch["completion_ids"].size(1))

    def _train_critic(self, inputs: dict) -> None:
        mask = self._value_mask(inputs)
        with self._accumulating_critic(), self._critic_pass.attention():
            losses, clipped = clipped_value_losses(
                self._values(inputs, len(inputs["prompt_ids"])),
                inputs["values"],
                inputs["returns"],
                self.args.value_clip_range,
            )
            losses = losses.masked_fill(~mask, 0.0)
            self.accelerator.backward(losses.sum() / self._loss_denominator(inputs))
        self._add_to_step(value_loss=losses.detach().sum(), value_clip_fraction=(clipped & mask).sum())
        if self.accelerator.sync_gradients:
            self._log_values(critic_grad_norm=self._step_critic())
