"""Labels inside of completions: the loss of PACS on prefixes, as pure functions.

A completion may be judged at several positions, the last of which is its outcome. The score of a position is the proxy of the prefix
that ends there, compared with aligned prefixes of the other completions of the prompt. With one position for every completion
everything is that of `objective.py`, bit by bit.

**Alignment** is by progress, steps with steps and outcomes with outcomes: position `k < K_i` of a completion with `K_i` positions is
compared with position `ceil(k (K_j - 1) / (K_i - 1))` of each other completion that has steps; `k = K_i` with `K_j`. (`ceil(k K_j /
K_i)` would compare a step with an outcome wherever `j` has few positions.) A position that finds none has no score.

**Weights.** The classes of the aligned set of a position, itself and what it is compared with, have equal say in it. The positions of a
completion that have a score share the weight 1.

Letters for shapes: `M` positions of all completions one after another, `B` completions.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ..objective import class_weights, loss_from_proxies, proxy_coefficients
from .groups import Groups


def aligned_position(k: int, own: int, other: int) -> int | None:
    """Position of a completion with `other` positions that `k` of one with `own` is compared with; both count from 1."""
    if k == own:
        return other
    return None if other == 1 else -(-k * (other - 1) // (own - 1))


def comparisons(numbers: Sequence[int], groups: Sequence[int]) -> torch.Tensor:
    """
    What each position is compared with: `(M, M)` float64, of which `psi = S - comparisons @ S` with the prefix proxies `S`.

    Args:
        numbers (sequence of `B` `int`): Positions of each completion, at least 1; 0 for one without a verdict.
        groups (sequence of `B` `int`): The prompt of each.
    """
    starts = [sum(numbers[:i]) for i in range(len(numbers))]
    found = torch.zeros(sum(numbers), sum(numbers), dtype=torch.float64)
    for i, own in enumerate(numbers):
        others = [j for j, n in enumerate(numbers) if j != i and n and groups[j] == groups[i]]
        for k in range(1, own + 1):
            places = [(j, aligned_position(k, own, numbers[j])) for j in others]
            columns = [starts[j] + place - 1 for j, place in places if place is not None]
            found[starts[i] + k - 1, columns] = 1 / max(len(columns), 1)
    return found


def position_weights(
    labels: torch.Tensor, compared: torch.Tensor, numbers: Sequence[int], *, class_weighting="balanced"
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Weights and targets of all positions, both `(M,)`: those of the classes in the aligned set of each, times its share of the
    completion; 0 for a position without a score. `compared` is what [`comparisons`] gives.
    """
    scored = compared.any(dim=1)
    weights, targets = torch.zeros_like(labels), labels.clone()
    for m in scored.nonzero()[:, 0].tolist():
        members = torch.cat([labels[m : m + 1], labels[compared[m] > 0]])
        of_set = class_weights(members, num_generations=len(members), class_weighting=class_weighting)
        weights[m], targets[m] = of_set[0][0], of_set[1][0]
    of_row = torch.repeat_interleave(torch.arange(len(numbers)), torch.tensor(numbers))
    shares = torch.zeros(len(numbers), dtype=labels.dtype).index_add(0, of_row, scored.to(labels.dtype))
    return weights / shares.clamp(min=1)[of_row], targets


def dense_loss(
    prefixes: torch.Tensor,
    labels: torch.Tensor,
    numbers: Sequence[int],
    groups: Sequence[int],
    *,
    class_weighting="balanced",
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    `1 / N * sum_ik w_ik BCE(sigmoid(psi_ik), y_ik)` over the positions with a score, `N` the completions whose outcome has one.

    Args:
        prefixes (`torch.Tensor` of shape `(M,)`): Proxy of each prefix, summed up to its position.
        labels (`torch.Tensor` of shape `(M,)`): In [0, 1].
        numbers, groups (sequences of `B` `int`): See [`comparisons`].
        class_weighting (`str`): See [`objective.class_weights`].

    Returns:
        The scalar loss and the scores `psi`, `(M,)`, 0 where there is none. Differentiable in `prefixes`.
    """
    if set(numbers) == {1}:
        return Groups(labels, groups).apply(loss_from_proxies, prefixes, class_weighting=class_weighting)
    compared = comparisons(numbers, groups)
    scores = _scores(prefixes, compared)
    weights, targets = position_weights(labels, compared, numbers, class_weighting=class_weighting)
    terms = weights * F.binary_cross_entropy_with_logits(scores, targets.to(scores), reduction="none")
    return terms.sum() / _num_rows(compared, numbers), scores


@torch.no_grad()
def dense_coefficients(
    prefixes: torch.Tensor,
    labels: torch.Tensor,
    numbers: Sequence[int],
    groups: Sequence[int],
    *,
    class_weighting="balanced",
) -> torch.Tensor:
    """Derivative of [`dense_loss`] with respect to each prefix proxy, `(M,)`: with `e = w (sigmoid(psi) - y) / N` it is `e -
    comparisons^T e`, the second part for its use in the scores of others. Arguments as there."""
    if set(numbers) == {1}:
        return Groups(labels, groups).apply(proxy_coefficients, prefixes, class_weighting=class_weighting)
    compared = comparisons(numbers, groups)
    scores = _scores(prefixes, compared)
    weights, targets = position_weights(labels, compared, numbers, class_weighting=class_weighting)
    residuals = weights * (torch.sigmoid(scores) - targets) / _num_rows(compared, numbers)
    return residuals - compared.to(residuals).T @ residuals


def token_coefficients(coefficients: torch.Tensor, positions: Sequence[int], num_tokens: int) -> torch.Tensor:
    """
    Of one completion, `(C,)`: each token gets the sum of the coefficients of the prefixes that it is in.

    Args:
        coefficients (`torch.Tensor` of shape `(K,)`): Of its prefixes.
        positions (sequence of `K` `int`): Where they end, inclusive, in order.
        num_tokens (`int`): `C`.
    """
    ends = torch.zeros(num_tokens, dtype=coefficients.dtype).index_add(0, torch.tensor(positions), coefficients)
    return ends.flip(0).cumsum(0).flip(0)


def _scores(prefixes: torch.Tensor, compared: torch.Tensor) -> torch.Tensor:
    return (prefixes - compared.to(prefixes) @ prefixes).where(compared.any(dim=1), 0.0)


def _num_rows(compared: torch.Tensor, numbers: Sequence[int]) -> int:
    outcomes = [sum(numbers[: i + 1]) - 1 for i, n in enumerate(numbers) if n]
    return max(int(compared[outcomes].any(dim=1).sum()), 1)


def checked_labels(name: str, i: int, given: Sequence, num_tokens: int) -> tuple[list[int], list[float]]:
    """
    Positions and labels that the reward function `name` has returned for completion `i`.

    Raises:
        `ValueError`: if they are no pairs of a position and a label in [0, 1], the positions are not in order, or one lies outside of
            the completion.
    """
    where = f"The reward function {name!r} returned {list(given)!r:.100} for completion {i}."
    try:
        positions, labels = [int(p) for p, _ in given], [float(y) for _, y in given]
    except (TypeError, ValueError):
        raise ValueError(f"{where} Dense labels are (position, label) pairs; the last one is the outcome.") from None
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
