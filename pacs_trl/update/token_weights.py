"""Weights per token: how much each token counts in the gradient, beside the coefficient of its completion.

    grad L = sum_i c_i * sum_t w_it * grad log pi(o_it),        w_it = product of the weights given to the update

Weights see detached values only, so they scale the gradient and leave proxies, scores and loss alone. The KL term is
not weighted.
"""

from typing import NamedTuple

import torch
from accelerate import Accelerator


class TokenValues(NamedTuple):
    """
    Values that a token weight may depend on; everything is detached, float32 and `(B, T)` unless said.

    Attributes:
        logps, entropies: Of the policy as it is now.
        old_logps, old_entropies: Of the policy that generated, computed by the trainer: never a snapshot.
        sampling_logps: As `old_logps`, reported by the engine; NaN where it reported none.
        coefficients (shape `(B, 1)` or `(B, T)`): Derivatives of the loss with respect to the log-probability of a
        counted token. mask (bool): Tokens that count; elsewhere the others have no meaning.
    """

    logps: torch.Tensor
    old_logps: torch.Tensor
    sampling_logps: torch.Tensor
    entropies: torch.Tensor
    old_entropies: torch.Tensor
    coefficients: torch.Tensor
    mask: torch.Tensor


class TokenWeights:
    """
    Weights of the tokens of an optimizer step. A subclass defines `__call__`; the rest is for weights that depend on
    the whole step.

    Attributes:
        num_row_values (`int`): How many values [`row_values`] returns. Above 0 they are known, of all rows and all
        processes, before
            the first backward pass, which may take a forward pass more.
    """

    num_row_values = 0

    def row_values(self, tokens: TokenValues) -> list[torch.Tensor]:
        """Return `num_row_values` tensors `(B,)` of a micro-batch, whose coefficients are not known yet (0)."""
        return []

    def begin(
        self, coefficients: torch.Tensor, row_values: torch.Tensor, counted: torch.Tensor, num_rows: int
    ) -> None:
        """
        Take what is known of the whole step, before its first backward pass.

        Args:
            coefficients (`torch.Tensor` of shape `(B,)`): Of all rows.
            row_values (`torch.Tensor` of shape `(num_row_values, B)`): 0 for rows that no forward pass has seen.
            counted (bool `torch.Tensor` of shape `(B,)`): Rows with tokens that count.
            num_rows (`int`): Scorable rows, which the loss is divided by.
        """

    def __call__(self, tokens: TokenValues) -> torch.Tensor:
        """Return weights `(B, T)` without gradient; those outside the mask have no meaning."""
        raise NotImplementedError

    def metrics(self, accelerator: Accelerator, *, on_policy: bool) -> dict[str, float]:
        """Return metrics of the step, the same on all processes."""
        return {}
