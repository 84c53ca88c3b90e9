"""GRPO with problems weighted by what they can still add to pass@k, after Bayesian Boundary Gating (BBG,
[arXiv 2606.15455](https://huggingface.co/papers/2606.15455)).

Not BBG: of the paper, only the weight of a problem, its threshold, and that the loss is REINFORCE with signs could be
established, as another implementation quotes them (equations 8 and 9). [`GatedGRPOTrainer`] has the weight;
[`GatedREINFORCETrainer`] has all three, which is as near to BBG as these go. Neither draws more problems in place of
those that are left out.
"""

from dataclasses import dataclass

import torch
from accelerate.utils import gather_object

from pacs_trl import GRPOConfig, GRPOTrainer
from pacs_trl.settings.fields import setting


def expected_gains(num_completions: int, k: int) -> torch.Tensor:
    """
    Return the expected derivative of pass@k in the success rate `p` of a problem, `E[k (1 - p)^(k - 1)]`, for 0 to
    `n = num_completions` correct completions of `n`, with a uniform prior, `p ~ Beta(m + 1, n - m + 1)`: `k
    Gamma(n - m + k) Gamma(n + 2) / (Gamma(n - m + 1) Gamma(n + k + 1))`, float64 `(n + 1,)`.
    """
    wrong = num_completions - torch.arange(num_completions + 1, dtype=torch.float64)
    size = torch.tensor(float(num_completions), dtype=torch.float64)
    ratio = torch.lgamma(wrong + k) - torch.lgamma(wrong + 1) + torch.lgamma(size + 2) - torch.lgamma(size + k + 1)
    return k * ratio.exp()


@dataclass
class GatedGRPOConfig(GRPOConfig):
    gate_k: int = setting(64, "The k of the pass@k that a problem should add to.", least=2)


class GatedGRPOTrainer(GRPOTrainer):
    """[`GRPOTrainer`] whose groups with `m` correct completions have their advantages multiplied by
    [`expected_gains`], divided by that of a group with one."""

    _name, _config_class = "GRPO, gated", GatedGRPOConfig

    def advantages(self, batch, num_generations):
        groups = self._labels.nan_to_num().view(-1, num_generations)
        gains = expected_gains(num_generations, self.args.gate_k)
        weights = (gains / gains[1])[groups.sum(dim=1).round().long()].repeat_interleave(num_generations)
        return torch.tensor(gather_object(batch["advantages"].tolist())) * weights


@dataclass
class GatedREINFORCEConfig(GatedGRPOConfig):
    gate_threshold: float = setting(0.01, "Groups with a smaller share of the largest weight are left out.", least=0)


class GatedREINFORCETrainer(GatedGRPOTrainer):
    """REINFORCE with the rewards 1 and -1, times the share of the largest possible weight, `expected_gains / (n + 1)`:
    with `n = 8` and `k = 64` 0.89 for groups without a correct completion, 0.10 for those with one, and 0 for others,
    whose shares are below the threshold. No mean is subtracted, so that groups without a correct completion count."""

    _name, _config_class = "REINFORCE, gated", GatedREINFORCEConfig

    def advantages(self, batch, num_generations):
        labels = self._labels.nan_to_num()
        shares = expected_gains(num_generations, self.args.gate_k) / (num_generations + 1)
        shares[shares < self.args.gate_threshold] = 0
        num_correct = labels.view(-1, num_generations).sum(dim=1).round().long()
        return (2 * labels - 1) * shares[num_correct].repeat_interleave(num_generations)
