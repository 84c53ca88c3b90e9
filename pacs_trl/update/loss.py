"""Losses as the update takes them: coefficients of completions and weights of tokens."""

from collections.abc import Sequence

import torch

from ..surrogate import RatioTerms, kl_terms
from .groups import Groups
from .rows import Rollout
from .token_weights import TokenValues


class Objective:
    """
    A loss as coefficients of completions and weights of tokens. A loss of groups, such as that of PACS, defines
    [`proxies`], [`coefficients`], [`size`], and [`summarize`]; a loss whose coefficients need no log-probs, such as
    that of GRPO, [`known_coefficients`], [`token_terms`], and [`token_metrics`].

    Attributes:
        kl_coef (`float`): Weight of the KL term.
        has_reference (`bool`): Whether proxies read `ref_logps`.
        has_ratio (`bool`): Whether weights of tokens read `old_logps`.
    """

    kl_coef = 0.0
    has_reference = False
    has_ratio = False

    def known_coefficients(self, rollouts: list[Rollout]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the coefficients of the completions of a step, and the factors on the KL terms of their tokens, both
        `(B,)`; `None` if they depend on log-probs (then the KL term is a mean over all tokens)."""
        return None

    def token_terms(self, tokens: TokenValues, factors: Sequence[torch.Tensor]) -> RatioTerms:
        """Return weights and values of a micro-batch; `factors` are those of [`TokenWeights`]."""
        raise NotImplementedError

    def token_metrics(self, num_tokens: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> dict[str, float]:
        """Return metrics from `low` and `high` of [`RatioTerms`], and the numbers of counted tokens, all `(B,)`."""
        return {}

    def kl(self, logps: torch.Tensor, ref_logps: torch.Tensor, old_logps: torch.Tensor, mask: torch.Tensor):
        """Return the KL term of each token, `(B, T)`, differentiable in `logps`."""
        return kl_terms(logps, ref_logps, mask)

    def proxies(self, logps: torch.Tensor, ref_logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the value of each completion that the coefficients depend on, `(B,)` without gradient, from `(B,
        T)`."""
        return logps.new_zeros(len(logps))

    def coefficients(self, groups: Groups, proxies: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
        """Return the derivatives of the loss of some groups with respect to the log-prob of any counted token of each
        completion, `(B,)`, from the proxies of the completions and the numbers of their counted tokens, both
        `(B,)`."""
        raise NotImplementedError

    def size(self, groups: Groups) -> int:
        """Return what the loss of some groups is divided by."""
        return int(groups.scorable.sum())

    def summarize(self, groups: Groups, proxies: torch.Tensor) -> tuple[float, dict[str, float]]:
        """Return the loss without the KL term, and metrics."""
        raise NotImplementedError
