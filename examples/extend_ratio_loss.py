"""Another loss of probability ratios: SPO (https://huggingface.co/papers/2401.16025), whose bound is a parabola.

pacs-trl train --config recipes/miniature/grpo.yaml --method examples.extend_ratio_loss:SPOTrainer
"""

from dataclasses import dataclass

from pacs_trl import GRPOConfig, GRPOTrainer
from pacs_trl.baselines.grpo_trainer import RatioFunctionObjective


@dataclass(frozen=True)
class SPOObjective(RatioFunctionObjective):
    settings_of_f = ("epsilon",)  # `epsilon_high` and `delta` are refused
    epsilon: float = 0.2

    def f(self, ratio, sign):
        """Return `rho -+ (rho - 1)^2 / (2 epsilon)`, minus for positive advantages; its maximum is at 1 + epsilon, or
        for negative advantages its minimum at 1 - epsilon."""
        return ratio - sign * (ratio - 1) ** 2 / (2 * self.epsilon)


class SPOTrainer(GRPOTrainer):
    _name = "SPO"
    _config_class = GRPOConfig  # `epsilon`, `beta`, and the normalization of `loss_type`

    def create_objective(self):
        return SPOObjective(**vars(super().create_objective()), epsilon=self.epsilon_low)
