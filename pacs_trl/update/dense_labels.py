"""Labels inside of completions: the loss of PACS on prefixes, as pure functions.

A completion may be judged at several positions, the last of which is its outcome. The score of a position is the proxy of the prefix
that ends there, compared with aligned prefixes of the other completions of the prompt. With one position for every completion
everything is that of `objective.py`, which the update then calls itself.

**Alignment** is by progress, steps with steps and outcomes with outcomes: position `k < K_i` of a completion with `K_i` positions is
compared with position `ceil(k (K_j - 1) / (K_i - 1))` of each other completion that has steps; `k = K_i` with `K_j`. (`ceil(k K_j /
K_i)` would compare a step with an outcome wherever `j` has few positions.) A position that finds none has no score.

**Weights.** The classes of the aligned set of a position, itself and what it is compared with, have equal say in it. The positions of a
completion that have a score share the weight 1.

Letters for shapes: `M` positions of all completions one after another, `B` completions, `G` those of the largest group.
"""

import math
import operator
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from ..objective import ClassWeighting, Proxy, class_weights
from .groups import Groups


def aligned_positions(own: int, other: int) -> np.ndarray:
    """Positions of a completion with `other` of them that those of one with `own` are compared with, `(own,)`; they count from 1,
    and 0 is none."""
    steps = -(-np.arange(1, own) * (other - 1) // max(own - 1, 1))
    return np.append(steps, other)


class Prefixes:
    """
    The positions of all completions, and what each is compared with.

    Args:
        groups ([`Groups`]): The completions by their outcomes.
        labels (sequence of `B` sequences of `float`): Of the positions of each completion in [0, 1], at least the outcome.

    Attributes:
        row, labels (`(M,)`): The completion of each position, and its label; NaN for a completion that is not scorable.
        outcomes (`(B,)`), starts (list of `B` `int`): The last and the first position of each completion.
        compared (`(M, G - 1)`): Positions that each is compared with; -1 is none.
        scored (bool, `(M,)`): Whether there are any.
    """

    def __init__(self, groups: Groups, labels: Sequence[Sequence[float]]):
        numbers = np.array([len(of_row) for of_row in labels])
        self.groups = groups
        self.row = torch.from_numpy(np.repeat(np.arange(len(numbers)), numbers))
        self.outcomes = torch.from_numpy(numbers.cumsum() - 1)
        of_all = torch.tensor([label for of_row in labels for label in of_row], dtype=groups.labels.dtype)
        self.labels = of_all.masked_fill(~groups.scorable[self.row], math.nan)
        compared = np.full((len(of_all), groups.size - 1), -1)
        self.starts = starts = (numbers.cumsum() - numbers).tolist()
        for members in groups.members:
            rows = [i for i in members if groups.scorable[i]]
            for i in rows:
                for column, j in enumerate(j for j in rows if j != i):
                    places = aligned_positions(numbers[i], numbers[j])
                    found = np.where(places > 0, starts[j] + places - 1, -1)
                    compared[starts[i] : starts[i] + numbers[i], column] = found
        self.compared = torch.from_numpy(compared)
        self.scored = (self.compared >= 0).any(dim=1)

    def weights(self, class_weighting: ClassWeighting) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and targets of the positions, both `(M,)`: those of the classes in the aligned set of each, the weights times its
        share of the completion; 0 for a position without a score."""
        others = self.labels[self.compared].masked_fill(self.compared < 0, math.nan)
        aligned = torch.cat([self.labels[:, None], others], dim=1)  # (M, G)
        kinds = {"num_generations": aligned.shape[1], "class_weighting": class_weighting}
        weights, targets = (values.view(aligned.shape)[:, 0] for values in class_weights(aligned.flatten(), **kinds))
        shares = torch.zeros(len(self.outcomes)).index_add(0, self.row, self.scored.float())
        return weights / shares.clamp(min=1)[self.row], targets

    def scores(self, proxies: torch.Tensor) -> torch.Tensor:
        """`psi` from prefix proxies, both `(M,)`: 0 where there is none, and exactly 0 where all proxies are equal."""
        differences = (proxies[:, None] - proxies[self.compared]).masked_fill(self.compared < 0, 0.0)
        return differences.sum(dim=1) / self._number.to(proxies)

    @property
    def _number(self) -> torch.Tensor:
        """Of positions that each is compared with, at least 1."""
        return (self.compared >= 0).sum(dim=1).clamp(min=1)

    def total(self, residuals: torch.Tensor) -> torch.Tensor:
        """From derivatives `e` with respect to scores those with respect to prefix proxies, `(M,)`: `e_m - sum_u e_u / n_u` over the
        positions `u` that are compared with `m`, each with `n_u`. Exactly 0 where all these are equal, and `m` counts as often as it
        is counted; rows whose coefficients are 0 are left out."""
        shares = (self.compared >= 0).double() / self._number[:, None]
        used = torch.zeros(len(residuals), dtype=torch.float64)
        used.index_add_(0, self.compared.clamp(min=0).flatten(), shares.flatten())
        differences = (residuals[self.compared] - residuals[:, None]) * shares.to(residuals)
        left = 1 - used
        left[left.abs() < 1e-9] = 0  # sevenths do not sum to 1
        found = residuals * left.to(residuals)
        return found.index_add_(0, self.compared.clamp(min=0).flatten(), differences.flatten())


def prefix_proxies(
    logps: torch.Tensor,
    ref_logps: torch.Tensor,
    mask: torch.Tensor,
    rows: torch.Tensor,
    ends: torch.Tensor,
    *,
    pacs_beta: float = 1.0,
    proxy: Proxy = "log_ratio",
) -> torch.Tensor:
    """[`objective.sequence_proxies`] of the prefixes of `rows` that end with the tokens `ends` (-1: none), both `(M,)`; one float64
    sum along each row, so that labels of every token take no more memory."""
    terms = (logps if proxy == "mean_logp" else logps.float() - ref_logps.float()).masked_fill(~mask, 0.0)
    found = F.pad(terms.double().cumsum(dim=1), (1, 0))[rows, ends + 1]
    if proxy == "mean_logp":
        found = found / F.pad(mask.cumsum(dim=1), (1, 0))[rows, ends + 1].clamp(min=1)
    return (pacs_beta * found).float()


def dense_loss(
    proxies: torch.Tensor, prefixes: Prefixes, *, class_weighting: ClassWeighting = "balanced"
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    `1 / N * sum_ik w_ik BCE(sigmoid(psi_ik), y_ik)` over the positions with a score, `N` the completions whose outcome has one.

    Args:
        proxies (`torch.Tensor` of shape `(M,)`): Of each prefix, summed up to its position.
        prefixes ([`Prefixes`]): The positions.
        class_weighting (`str`): See [`objective.class_weights`].

    Returns:
        The scalar loss and the scores `psi`, `(M,)`, 0 where there is none. Differentiable in `proxies`.
    """
    scores = prefixes.scores(proxies)
    weights, targets = prefixes.weights(class_weighting)
    entropies = F.binary_cross_entropy_with_logits(scores, targets.to(scores), reduction="none")
    return (weights.to(scores) * entropies).sum() / _num_rows(prefixes), scores


@torch.no_grad()
def dense_coefficients(
    proxies: torch.Tensor, prefixes: Prefixes, *, class_weighting: ClassWeighting = "balanced"
) -> torch.Tensor:
    """Derivative of [`dense_loss`] with respect to the proxy of each prefix, `(M,)`, its use in the scores of others included: with `e
    = w (sigmoid(psi) - y) / N` that is [`Prefixes.total`]. Arguments as there."""
    scores = prefixes.scores(proxies)
    weights, targets = prefixes.weights(class_weighting)
    return prefixes.total(weights.to(scores) * (torch.sigmoid(scores) - targets.to(scores)) / _num_rows(prefixes))


def _num_rows(prefixes: Prefixes) -> int:
    return max(int(prefixes.groups.scorable.sum()), 1)


def token_coefficients(
    coefficients: torch.Tensor, positions: Sequence[int] | np.ndarray, num_tokens: int
) -> torch.Tensor:
    """
    Of one completion, `(C,)`: each token gets the sum of the coefficients of the prefixes that it is in.

    Args:
        coefficients (`torch.Tensor` of shape `(K,)`): Of its prefixes.
        positions (sequence of `K` `int`): Where they end, inclusive, in order; -1 is the prefix without a token.
        num_tokens (`int`): `C`.
    """
    places = torch.as_tensor(positions, dtype=torch.long, device=coefficients.device)
    ends = coefficients.new_zeros(num_tokens + 1).index_add(0, places + 1, coefficients)
    return ends.flip(0).cumsum(0).flip(0)[1:]


def checked_labels(name: str, i: int, given: Sequence, num_tokens: int) -> tuple[list[int], list[float]]:
    """
    Positions and labels that the reward function `name` has returned for completion `i`.

    Raises:
        `ValueError`: if they are no pairs of a position and a label in [0, 1], the positions are not in order, or one lies outside of
            the completion.
    """
    where = f"The reward function {name!r} returned {list(given)!r:.100} for completion {i}."
    try:
        positions, labels = [operator.index(p) for p, _ in given], [float(y) for _, y in given]
    except (TypeError, ValueError):
        raise ValueError(
            f"{where} Dense labels are (position, label) pairs, positions whole numbers; the last one is the outcome."
        ) from None
    if not positions:
        raise ValueError(
            f"{where} There must be at least one pair, the outcome. Return None where there is no verdict."
        )
    if any(later <= earlier for earlier, later in zip(positions, positions[1:], strict=False)):
        raise ValueError(
            f"{where} Positions must rise: each is a prefix, and the last one is the outcome. Sort the pairs."
        )
    if positions[0] < 0 or positions[-1] >= num_tokens:
        raise ValueError(
            f"{where} Positions are inclusive indices into completion_ids, from 0 to {num_tokens - 1} here."
        )
    if not all(0 <= label <= 1 for label in labels):
        raise ValueError(f"{where} Labels must lie in [0, 1]. Rescale them.")
    return positions, labels
