"""Interface of a loss for the policy update: one coefficient per completion and one weight per token."""

from collections.abc import Sequence

import torch

from ..surrogate import RatioTerms, kl_terms
from .groups import Groups
from .rollout import Rollout
from .token_weights import TokenValues


class Objective:
    """
    Base class of losses. A group loss such as that of PACS implements [`proxies`], [`coefficients`], [`size`], and
    [`summarize`]. A loss whose coefficients do not depend on log-probs, such as that of GRPO, implements
    [`known_coefficients`], [`token_terms`], and [`token_metrics`].

    Attributes:
        kl_coef (`float`): Weight of the KL term.
        has_reference (`bool`): Whether the proxies read `ref_logps`.
        has_ratio (`bool`): Whether the token weights read `old_logps`.
    """

    kl_coef = 0.0
    has_reference = False
    has_ratio = False

    def known_coefficients(self, rollouts: list[Rollout]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the coefficients of the completions of an optimizer step, and the factors on the KL terms of their
        tokens, both `(B,)`; `None` if they depend on log-probs (the KL term is then a mean over all tokens)."""
        return None

    def token_terms(self, tokens: TokenValues, factors: Sequence[torch.Tensor]) -> RatioTerms:
        """Return the weights and values of a micro-batch; `factors` are the `(B, T)` factors of [`TokenWeights`]."""
        raise NotImplementedError

    def token_metrics(self, num_tokens: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> dict[str, float]:
        """Return metrics from the number of counted tokens and `low` and `high` of [`RatioTerms`], all `(B,)`."""
        return {}

    def kl(self, logps: torch.Tensor, ref_logps: torch.Tensor, old_logps: torch.Tensor, mask: torch.Tensor):
        """Return the KL term of each token, `(B, T)`, differentiable in `logps`."""
        return kl_terms(logps, ref_logps, mask)

    def proxies(self, logps: torch.Tensor, ref_logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the proxy of each completion, `(B,)` without gradient, from tensors `(B, T)`. Coefficients depend on
        log-probs only through the proxies."""
        return logps.new_zeros(len(logps))

    def coefficients(self, groups: Groups, proxies: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
        """Return the derivative of the loss of some groups with respect to the log-prob of one counted token of each
        completion, `(B,)`; it is the same for all counted tokens of a completion. `proxies` and `num_tokens` (counted
        tokens) have shape `(B,)`."""
        raise NotImplementedError

    def size(self, groups: Groups) -> int:
        """Return the divisor of the loss of some groups."""
        return int(groups.scorable.sum())

    def summarize(self, groups: Groups, proxies: torch.Tensor) -> tuple[float, dict[str, float]]:
        """Return the loss without the KL term, and the metrics of the objective."""
        raise NotImplementedError
