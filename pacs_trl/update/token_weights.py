"""How much each token counts in the gradient, beside the coefficient of its completion; and STEER, which is one way.

    grad L = sum_i c_i * sum_t w_it * grad log pi(o_it),        w_it = product of the functions given to the update

Each function sees detached values only, so weights scale the gradient and leave proxies, scores and loss alone. The KL term is
not weighted.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from accelerate import Accelerator


class TokenValues(NamedTuple):
    """
    What a token weight may depend on; everything is detached, float32 and `(B, T)` unless said.

    Attributes:
        logps, entropies: Of the policy as it is now.
        old_logps: Under the policy that generated, by the trainer: never a snapshot.
        old_entropies: Entropies of that policy; 0 where a later update does not know them, since no weight asks for them.
        sampling_logps: As `old_logps`, by the engine; NaN where it reported none.
        coefficients (shape `(B, 1)` or `(B, T)`): Derivatives of the loss with respect to the log-probability of a counted token,
            the same for all of a completion unless it is labelled in several places.
        mask (bool): Tokens that count; elsewhere the others have no meaning.
    """

    logps: torch.Tensor
    old_logps: torch.Tensor
    sampling_logps: torch.Tensor
    entropies: torch.Tensor
    old_entropies: torch.Tensor
    coefficients: torch.Tensor
    mask: torch.Tensor


# Gives weights of shape `(B, T)` without gradient; those outside the mask have no meaning.
TokenWeights = Callable[[TokenValues], torch.Tensor]


# STEER (https://huggingface.co/papers/2510.10150) ---------------------------------------------------------------------

Mapping = Literal["exponential", "linear"]

# As in the authors' code: probabilities stay this far from 0 and 1, and the exponential mapping takes a largest change below the
# second number for the second number.
_LEAST_PROBABILITY = 1e-8
_LEAST_LARGEST_CHANGE = 0.02


def entropy_slopes(
    logps: torch.Tensor, old_logps: torch.Tensor, entropies: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """
    `p (1 - p) (log p + H) / p_old`: what STEER takes for the fall of a token's entropy per unit of its advantage.

    It is the effect of the sampled token's logit on the entropy of the softmax; the fall of the other logits is left out.

    Args:
        logps, old_logps (`torch.Tensor` of shape `(B, T)`): Log-probabilities under the policy as it is, and as it was when it
            generated.
        entropies (`torch.Tensor` of shape `(B, T)`): `H`, of the policy that generated, in nats.
        mask (`torch.Tensor` of shape `(B, T)`): 1 (True) for tokens that count.

    Returns:
        `torch.Tensor` of shape `(B, T)`: 0 outside the mask, and where it is not finite.
    """
    p, old_p = (x.exp().clamp(_LEAST_PROBABILITY, 1 - _LEAST_PROBABILITY) for x in (logps, old_logps))
    slopes = p * (1 - p) * (p.log() + entropies) / old_p
    return torch.where(mask.bool() & slopes.isfinite(), slopes, 0.0)


def steer_weights(
    logps: torch.Tensor,
    old_logps: torch.Tensor,
    entropies: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    mapping: Mapping = "exponential",
    weight_min: float = 0.8,
    weight_max: float = 1.2,
    extremes: tuple[float, float] | None = None,
) -> torch.Tensor:
    """
    Weights that are the smaller the more an update of the token changes its entropy.

    With the change `o = |A * slope|` of [`entropy_slopes`]: `"exponential"` is `max(weight_min, exp(-k o))` with `k = -log(weight_min)
    / max(largest o, 0.02)`; `"linear"` falls from `weight_max` at the smallest `o` to `weight_min` at the largest, and is their mean
    where all are equal.

    Args:
        logps, old_logps, entropies, mask: See [`entropy_slopes`].
        advantages (`torch.Tensor` of shape `(B,)` or `(B, T)`): `A`.
        mapping (`str`), weight_min (`float`), weight_max (`float`): As said; `"exponential"` does not read `weight_max`.
        extremes (pair of `float`, *optional*): Smallest and largest `o`. By default those of the given tokens.

    Returns:
        `torch.Tensor` of shape `(B, T)` without gradient. Tokens outside the mask have no meaning.
    """
    advantages = advantages if advantages.dim() == 2 else advantages[:, None]
    slopes = entropy_slopes(logps.detach(), old_logps, entropies.detach(), mask)
    changes = (advantages * slopes).abs()
    changes = torch.where(changes.isfinite(), changes, 0.0)
    if extremes is None:
        counted = changes[mask.bool()]
        extremes = (counted.min().item(), counted.max().item()) if len(counted) else (0.0, 0.0)
    least, largest = extremes
    if mapping == "exponential":
        rate = -math.log(weight_min) / max(largest, _LEAST_LARGEST_CHANGE)
        return torch.exp(-rate * changes).clamp(weight_min, 1.0)
    if mapping != "linear":
        raise ValueError(f"`mapping` must be 'exponential' or 'linear', got {mapping!r}.")
    if largest <= least:
        return torch.full_like(changes, (weight_min + weight_max) / 2)
    return weight_max - (changes - least) * (weight_max - weight_min) / (largest - least)


class Steer(NamedTuple):
    """Arguments of [`steer_weights`]: the STEER of a run."""

    mapping: Mapping = "exponential"
    weight_min: float = 0.8
    weight_max: float = 1.2


class SteerWeights:
    """
    STEER in one optimizer step, as one of its [`TokenWeights`]: `A_i = -N c_i`, extremes of the whole step on all processes.

    Args:
        steer ([`Steer`]): How changes become weights.
        coefficients (`torch.Tensor` of shape `(B,)`): `c` of all rows of the step.
        num_rows (`int`): `N`, what has divided the loss.
        slopes (`torch.Tensor` of shape `(2, B)`): Smallest and largest absolute slope of the counted tokens of each row; 0 for
            rows that no forward pass has seen.
        counted (bool `torch.Tensor` of shape `(B,)`): Rows with tokens that count.
    """

    def __init__(self, steer: Steer, coefficients, num_rows: int, slopes, counted):
        changes = (num_rows * coefficients * slopes).abs()[:, counted]
        self.extremes = (changes[0].min().item(), changes[1].max().item()) if counted.any() else (0.0, 0.0)
        self.steer, self.num_rows = steer, num_rows
        self._sums: list[torch.Tensor] = []
        self._bounds: list[torch.Tensor] = []

    def __call__(self, tokens: TokenValues) -> torch.Tensor:
        compared = tokens.logps, tokens.old_logps, tokens.old_entropies
        advantages = -self.num_rows * tokens.coefficients
        weights = steer_weights(*compared, advantages, tokens.mask, **self.steer._asdict(), extremes=self.extremes)
        predicted = -weights * advantages * entropy_slopes(*compared, tokens.mask)
        values = torch.stack([torch.ones_like(weights), weights, predicted, tokens.entropies - tokens.old_entropies])
        learnt = tokens.mask & (tokens.coefficients != 0)
        self._sums.append(values[:, learnt].double().sum(dim=1))
        signed = torch.stack([weights, -weights]).masked_fill(~learnt, math.inf)
        self._bounds.append(signed.flatten(1).amin(dim=1))
        return weights

    def metrics(self, accelerator: Accelerator, *, on_policy: bool) -> dict[str, float]:
        """Metrics with the prefix `steer/`, over the tokens with a gradient on all processes; NaN if there was none."""
        sums = accelerator.reduce(torch.stack(self._sums).sum(dim=0).float(), reduction="sum").tolist()
        bounds = accelerator.gather(torch.stack(self._bounds).amin(dim=0)[None]).amin(dim=0).tolist()
        num_tokens = sums[0] or math.nan
        found = {
            "steer/weight_mean": sums[1] / num_tokens,
            "steer/weight_min": bounds[0] if sums[0] else math.nan,
            "steer/weight_max": -bounds[1] if sums[0] else math.nan,
            "steer/predicted_entropy_change": sums[2] / num_tokens,
        }
        return found if on_policy else found | {"steer/measured_entropy_change": sums[3] / num_tokens}
