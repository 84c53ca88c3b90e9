"""GRPO: the unchanged loss of TRL's GRPOTrainer, on rollouts that are generated as those of PACS and PPO are.

Its weights are those of TRL's own trainer, bit for bit in the first epoch (later ones are shuffled by seed and epoch).
"""

import contextlib
from dataclasses import dataclass

import torch
import trl

from ..pacs_config import SHAPES_ONLY_GRPO
from ..redaction import PublishedArguments
from ..rollouts.rollout_trainer import RolloutTrainer
from ..settings import refuse_illegal_values
from ..update.generation import GenerationSettings
from ..update.startup_check import warn_of_left_padding


@dataclass
class GRPOConfig(PublishedArguments, GenerationSettings, trl.GRPOConfig):
    """[`~trl.GRPOConfig`], of which trackers get what others may see."""

    def __post_init__(self):
        refuse_illegal_values(self)
        super().__post_init__()


class GRPOTrainer(RolloutTrainer):
    """[`~trl.GRPOTrainer`], with the same arguments, on the rollouts of [`RolloutTrainer`]."""

    # those that only GRPO's loss reads, and how the rows of a generation batch are spread
    _own_shared_settings = (*SHAPES_ONLY_GRPO, "world_size")

    def _choose_forward_passes(self) -> None:
        if not self._forward_passes_are_chosen and not self._is_vlm:
            logps = super()._get_per_token_logps_and_entropies
            warn_of_left_padding(self.scorer, self.model_wrapped, lambda *given: logps(*given)[0])
        self._forward_passes_are_chosen = True

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        with contextlib.nullcontext() if torch.is_grad_enabled() else self.timer.part("log_probs"):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)
