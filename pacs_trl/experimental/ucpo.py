"""UCPO ([arXiv 2605.00365](https://huggingface.co/papers/2605.00365)): improbable correct completions count more.

Extension point: changed advantages. The formula is that of the authors' code (github.com/AnamikaLochab/UCPO, 93ce506,
`compute_dgrpo_advantage_outcome_invq_l`), which takes the mean log-prob of a token, not the sum."""

from dataclasses import dataclass

import torch
from accelerate.utils import gather_object

from ..baselines.grpo_config import GRPOConfig
from ..baselines.grpo_trainer import GRPOTrainer
from ..errors import UserError
from ..settings.fields import setting
from ..update.rollout import unpad_rollouts


def ucpo_weights(mean_logps: torch.Tensor, correct: torch.Tensor, num_generations: int, tau: float) -> torch.Tensor:
    """Return the factors on the advantages `(B,)`, `w_i = 1 - tau + tau n (1 / q_i) / sum_j (1 / q_j)` for the `n`
    correct completions of a group, where `q_i` is proportional to `exp(s_i)`, and 1 for the others. Their mean is 1;
    with `tau` 0 all are 1, with 1 they are proportional to `1 / q_i`.

    Args:
        mean_logps, correct (`torch.Tensor` of shape `(B,)`): `s`, the mean log-prob of a token under the generating
            policy in nats, read where `correct` is `True`. Completions of a group, `num_generations`, are adjacent.
    """
    is_correct = correct.view(-1, num_generations)
    log_inverses = -mean_logps.double().view_as(is_correct)  # log 1 / q_i, up to a constant of the group
    inverse_shares = torch.softmax(log_inverses.masked_fill(~is_correct, -torch.inf), dim=1)
    num_correct = is_correct.sum(dim=1, keepdim=True).double()
    factors = 1 - tau + tau * num_correct * inverse_shares
    return torch.where(is_correct, factors, 1.0).flatten()


@dataclass
class UCPOConfig(GRPOConfig):
    """Configuration class for the [`UCPOTrainer`]: every parameter of [`GRPOConfig`], and `tau`."""

    supports_rollout_lag = False
    supports_images = False
    rewards_are_labels = True
    rewards_are_binary = True

    tau: float = setting(0.2, "0 for GRPO, 1 for advantages proportional to exp(-mean log-prob).", least=0, most=1)


class UCPOTrainer(GRPOTrainer):
    """[`GRPOTrainer`] whose advantages are multiplied by [`ucpo_weights`]; rewards must be 0, 1, or `None`."""

    _name = "UCPO"
    _config_class = UCPOConfig
    _paper = {
        "title": "Uniform-Correct Policy Optimization: Breaking RLVR's Indifference to Diversity",
        "id": "2605.00365",
    }

    def advantages(self, batch, num_generations):
        if ((self._labels != 0) & (self._labels != 1) & ~self._labels.isnan()).any():
            raise UserError("UCPO needs rewards of 0 or 1. Use a binary reward function, or method grpo.")
        rollouts = unpad_rollouts(batch)
        # Only correct completions whose advantage is not 0 have a weight, so others need no forward pass.
        weighted = [i for i, r in enumerate(rollouts) if r.label == 1 and r.advantage != 0 and r.loss_mask.any()]
        prompt_ids = [rollouts[i].prompt_ids for i in weighted]
        completion_ids = [rollouts[i].completion_ids for i in weighted]
        # Advantage, whether it has a weight, and mean log-prob of each completion of this process.
        facts = [(rollout.advantage, False, 0.0) for rollout in rollouts]
        for i, logps in zip(weighted, self.compute_logps(prompt_ids, completion_ids), strict=True):
            mean_logp = logps[torch.from_numpy(rollouts[i].loss_mask)].mean().item()
            facts[i] = (rollouts[i].advantage, True, mean_logp)
        all_facts = torch.tensor(gather_object(facts), device=self._labels.device)
        advantages, has_weight, mean_logps = all_facts.unbind(dim=1)
        return advantages * ucpo_weights(mean_logps, has_weight.bool(), num_generations, self.args.tau)
