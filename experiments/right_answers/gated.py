"""GRPO with problems weighted by what they can still add to pass@k, after Bayesian Boundary Gating (BBG,
[arXiv 2606.15455](https://huggingface.co/papers/2606.15455)).

Not BBG: of the paper, only the weight of a problem could be established (equation 8, as another implementation quotes
it), and not the loss of groups without a correct completion, which GRPO's advantage leaves out.
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
