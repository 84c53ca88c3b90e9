"""How much each token counts in the gradient, beside the coefficient of its completion.

    grad L = sum_i c_i * sum_t w_it * grad log pi(o_it),        w_it = product of the functions given to the update

Each function sees detached values only, so weights scale the gradient and leave proxies, scores and loss alone. The KL term is
not weighted.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch


class TokenValues(NamedTuple):
    """
    What a token weight may depend on; everything is detached, float32 and `(B, T)` unless said.

    Attributes:
        logps, entropies: Of the policy as it is now.
        old_logps: Under the policy that generated, by the trainer: never a snapshot.
        sampling_logps: The same by the engine; NaN where it reported none.
        coefficients (shape `(B,)`): Derivatives of the loss with respect to the log-probability of any counted token
            of the completion.
        mask (bool): Tokens that count; elsewhere the others have no meaning.
    """

    logps: torch.Tensor
    old_logps: torch.Tensor
    sampling_logps: torch.Tensor
    entropies: torch.Tensor
    coefficients: torch.Tensor
    mask: torch.Tensor


# Gives weights of shape `(B, T)` without gradient; those outside the mask have no meaning.
TokenWeights = Callable[[TokenValues], torch.Tensor]
