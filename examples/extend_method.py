"""A method of your own: learn from the first tokens of a completion only.

pacs-trl train --config recipes/miniature/pacs.yaml --method examples.extend_method:PrefixTrainer --num_tokens 16
"""

from dataclasses import dataclass

import torch

from pacs_trl import PACSConfig, PACSTrainer
from pacs_trl.settings.fields import setting
from pacs_trl.update.token_weights import TokenWeights


@dataclass
class PrefixConfig(PACSConfig):
    num_tokens: int = setting(8, "Number of tokens that learn.", least=1)


class FirstTokens(TokenWeights):
    """Weight 1 for the first tokens of a completion, 0 for the others; `tokens.mask` has shape `(B, T)`."""

    def __init__(self, num_tokens: int):
        self.num_tokens = num_tokens

    def __call__(self, tokens) -> torch.Tensor:
        return (torch.arange(tokens.mask.shape[1], device=tokens.mask.device) < self.num_tokens).float()


class PrefixTrainer(PACSTrainer):
    _name = "prefix"
    _config_class = PrefixConfig

    def token_weights(self):
        return [*super().token_weights(), FirstTokens(self.args.num_tokens)]
