"""GRPO: the loss of TRL's GRPOTrainer as it is, on rollouts that are drawn as those of PACS and PPO are.

It learns what TRL's own trainer learns, bit for bit in the first epoch (later ones are shuffled by seed and epoch).
What it adds is said in `rollouts/rollout_trainer.py`: seeds per request, the checks
before the start, an orderly end, and checkpoints to continue from in the middle of a generation batch.
"""

import contextlib

import torch

from ..pacs_config import SHAPES_ONLY_GRPO
from ..rollouts.rollout_trainer import RolloutTrainer
from ..update.startup_check import warn_of_left_padding


class GRPOTrainer(RolloutTrainer):
    """[`~trl.GRPOTrainer`], with the same arguments, whose rollouts can be drawn again."""

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
