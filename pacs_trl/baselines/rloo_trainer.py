"""RLOO on the exact update: one ratio per completion, and advantages that leave the completion out of its baseline."""

from functools import partial

import torch
import trl
from accelerate.utils import gather_object

from .. import surrogate
from ..objective import rloo_advantages
from ..rollouts.uneven_shares import gather_rows
from ..update.forward_pass import logps_in_batches
from ..update.rollout import Rollout, unpad_rollouts
from .grpo_config import RLOOConfig
from .grpo_trainer import GRPOTrainer, SurrogateObjective


class RLOOTrainer(GRPOTrainer):
    """
    [`~trl.RLOOTrainer`] on the exact update, with the same arguments and those of [`~trl.GRPOTrainer`]. `args` is an
    [`RLOOConfig`].
    """

    _config_class = RLOOConfig
    _name = "RLOO"
    _paper = trl.RLOOTrainer._paper

    def create_objective(self) -> SurrogateObjective:
        return SurrogateObjective(
            surrogate.RatioLoss("rloo", "completion", 1 - self.epsilon_low, 1 + self.epsilon_high)
        )

    @property
    def corrects_mismatch(self) -> bool:
        return self.args.vllm_importance_sampling_correction

    def advantages(self, batch, num_generations):
        rewards = self._labels
        if self.args.reward_clip_range is not None:
            rewards = rewards.clamp(*self.args.reward_clip_range)
        if self.beta != 0:
            rewards = rewards - self.beta * self._sequence_kl(unpad_rollouts(batch))
        if num_generations == 1:  # nothing to compare with
            return None
        normalize = self.args.normalize_advantages
        return rloo_advantages(rewards, num_generations=num_generations, normalize=normalize)

    @torch.no_grad()
    def _sequence_kl(self, rollouts: list[Rollout]) -> torch.Tensor:
        """Return the log-ratios of policy and reference in nats, summed over the tokens that the policy generated, for
        the completions of all processes, `(B,)`."""
        prompts = [rollout.prompt_ids for rollout in rollouts]
        completions = [rollout.completion_ids for rollout in rollouts]
        images = [rollout.images for rollout in rollouts]
        compute_policy = partial(self.forward_pass.compute_logps, self.model_wrapped)
        compute_reference = partial(self._compute_kl_ref_logps, self.model_wrapped)
        batch_size = self.args.per_device_train_batch_size
        with self.timer.part("log_probs"):
            logps = logps_in_batches(compute_policy, prompts, completions, batch_size, images)
            ref_logps = logps_in_batches(compute_reference, prompts, completions, batch_size, images)
        masks = [torch.from_numpy(rollout.loss_mask) for rollout in rollouts]
        log_ratios = [
            (policy - reference)[mask].sum() for policy, reference, mask in zip(logps, ref_logps, masks, strict=True)
        ]
        kl = gather_rows(torch.stack(log_ratios).to(self.accelerator.device))  # processes may have unequal shares
        num_tokens = sum(gather_object([sum(int(mask.sum()) for mask in masks)]))
        self.record_metrics({"kl": kl.sum().item() / max(num_tokens, 1)})
        return kl
