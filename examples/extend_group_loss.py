"""Another loss of the completions of a group: each correct completion against each wrong one.

pacs-trl train --config recipes/miniature/pacs.yaml --method examples.extend_group_loss:PairwiseTrainer
"""

from dataclasses import dataclass

import torch.nn.functional as F

from pacs_trl.objective import scorable_completions
from pacs_trl.pacs_config import GroupLossConfig
from pacs_trl.rollouts.exact_trainer import ExactUpdateTrainer
from pacs_trl.settings.fields import setting
from pacs_trl.update.group_loss_update import AutogradObjective


def pairwise_loss(proxies, labels, *, num_generations: int, margin: float):
    """Return the mean over groups of `mean_ij softplus(margin - r_i + r_j)`, `i` correct and `j` wrong; 0 for a group
    with one label. `proxies` and `labels` have shape `(P * G,)`; a label is NaN without a verdict."""
    num_groups = scorable_completions(labels, num_generations).view(-1, num_generations).any(dim=1).sum()
    loss = 0.0 * proxies.sum()
    for r, y in zip(proxies.view(-1, num_generations), labels.view(-1, num_generations), strict=True):
        pairs = margin - r[y == 1][:, None] + r[y == 0][None, :]
        if pairs.numel():
            loss = loss + F.softplus(pairs).mean()
    return loss / num_groups.clamp(min=1)


@dataclass
class PairwiseConfig(GroupLossConfig):
    margin: float = setting(0.0, "Nats by which a correct completion should be ahead.", least=0)


class PairwiseTrainer(ExactUpdateTrainer):
    _name, _config_class = "pairwise", PairwiseConfig

    def create_objective(self):
        return AutogradObjective(pairwise_loss, "mean_log_ratio", {"margin": self.args.margin}, self.beta)
