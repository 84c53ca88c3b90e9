"""Another loss of probability ratios: SPO (https://huggingface.co/papers/2401.16025), whose bound is a parabola.

pacs-trl train --config recipes/qwen3-4b/grpo.yaml --method examples.extend_ratio_loss:SPOTrainer
"""

import math

import torch

from pacs_trl import GRPOConfig, GRPOTrainer
from pacs_trl.baselines.grpo_trainer import SurrogateObjective
from pacs_trl.surrogate import RatioLoss, RatioTerms


class SPOObjective(SurrogateObjective):
    """`f(rho) = rho -+ (rho - 1)^2 / (2 epsilon)`, minus for positive advantages. The loss is `sum_i c_i sum_t f`, and
    the weight of a token `df / d log pi = rho (1 -+ (rho - 1) / epsilon)`."""

    def token_terms(self, tokens, factors):
        factor = math.prod(factors, start=torch.ones_like(tokens.logps)) * tokens.mask  # (B, T)
        epsilon, ratio = self.loss.upper_bound - 1, (tokens.logps - tokens.old_logps).exp()
        sign = -tokens.coefficients[:, :1].sign()  # of the advantage: c_i = -advantage * scale
        weights = ratio * (1 - sign * (ratio - 1) / epsilon) * factor
        values = ((ratio - sign * (ratio - 1) ** 2 / (2 * epsilon)) * factor).sum(dim=1)
        none = torch.zeros_like(values)  # nothing is clipped
        return RatioTerms(weights, values, low_fraction=none, high_fraction=none, phi=none + 1)


class SPOTrainer(GRPOTrainer):
    _name = "SPO"
    _config_class = GRPOConfig  # `epsilon`, `beta`, and the normalization of `loss_type`

    def create_objective(self):
        objective = super().create_objective()
        loss = RatioLoss(self.args.loss_type, upper_bound=1 + self.epsilon_low)
        return SPOObjective(loss, objective.kl_coef, max_completion_length=objective.max_completion_length)
