"""STEER ([arXiv 2510.10150](https://huggingface.co/papers/2510.10150)): smaller weights for tokens whose update
changes the entropy most.

Extension point: weights per token. See docs/related_methods.md.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from accelerate import Accelerator

from ..pacs_config import PACSConfig
from ..pacs_trainer import PACSTrainer
from ..settings.checks import ignored_settings
from ..settings.fields import setting
from ..update.step_sizes import BatchSizes
from ..update.token_weights import TokenValues, TokenWeights


Mapping = Literal["exponential", "linear"]

# As in the authors' code: bounds of probabilities, and the smallest value that the exponential mapping divides by.
_MIN_PROBABILITY = 1e-8
_MIN_LARGEST_CHANGE = 0.02


def entropy_sensitivities(
    logps: torch.Tensor, old_logps: torch.Tensor, entropies: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """
    Return `p (1 - p) (log p + H) / p_old`, STEER's estimate of the entropy decrease per unit of a token's advantage:
    the effect of the sampled token's logit, without the decrease of the other logits.

    Args:
        logps, old_logps (`torch.Tensor` of shape `(B, T)`): Under the current and the generating policy.
        entropies (`torch.Tensor` of shape `(B, T)`): `H` of the generating policy, in nats.
        mask (`torch.Tensor` of shape `(B, T)`): 1 (True) for tokens in the loss.

    Returns:
        `torch.Tensor` of shape `(B, T)`: 0 outside the mask, and for values that are not finite.
    """
    p, old_p = (x.exp().clamp(_MIN_PROBABILITY, 1 - _MIN_PROBABILITY) for x in (logps, old_logps))
    sensitivities = p * (1 - p) * (p.log() + entropies) / old_p
    return torch.where(mask.bool() & sensitivities.isfinite(), sensitivities, 0.0)


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
    Return weights that decrease with the entropy change `o = |A * sensitivity|` of a token.

    `"exponential"` is `max(weight_min, exp(-k o))` with `k = -log(weight_min) / max(largest o, 0.02)`; `"linear"`
    decreases from `weight_max` at the smallest `o` to `weight_min` at the largest, and is their mean if all are equal.

    Args:
        logps, old_logps, entropies, mask: See [`entropy_sensitivities`].
        advantages (`torch.Tensor` of shape `(B,)` or `(B, T)`): `A`.
        mapping (`str`), weight_min (`float`), weight_max (`float`): As above; `"exponential"` ignores `weight_max`.
        extremes (pair of `float`, *optional*): Smallest and largest `o`, by default of these tokens.

    Returns:
        `torch.Tensor` of shape `(B, T)` without gradient, undefined outside the mask.
    """
    advantages = advantages if advantages.dim() == 2 else advantages[:, None]
    changes = (advantages * entropy_sensitivities(logps.detach(), old_logps, entropies.detach(), mask)).abs()
    changes = torch.where(changes.isfinite(), changes, 0.0)
    if extremes is None:
        counted = changes[mask.bool()]
        extremes = (counted.min().item(), counted.max().item()) if len(counted) else (0.0, 0.0)
    smallest, largest = extremes
    if mapping == "exponential":
        rate = -math.log(weight_min) / max(largest, _MIN_LARGEST_CHANGE)
        return torch.exp(-rate * changes).clamp(weight_min, 1.0)
    if largest <= smallest:
        return torch.full_like(changes, (weight_min + weight_max) / 2)
    return weight_max - (changes - smallest) * (weight_max - weight_min) / (largest - smallest)


class SteerWeights(TokenWeights):
    """[`TokenWeights`] by [`steer_weights`] with `A_i = -N c_i` and the extremes of the optimizer step."""

    num_values = 2

    def __init__(self, mapping: Mapping = "exponential", weight_min: float = 0.8, weight_max: float = 1.2):
        self.kinds: dict[str, Any] = {"mapping": mapping, "weight_min": weight_min, "weight_max": weight_max}

    def completion_values(self, tokens: TokenValues) -> list[torch.Tensor]:
        """Return the smallest and the largest absolute sensitivity of each completion; infinity and 0 without a
        token."""
        sizes = entropy_sensitivities(tokens.logps, tokens.old_logps, tokens.old_entropies, tokens.mask).abs()
        # One more column, because there is none if all completions of the micro-batch are empty.
        smallest = F.pad(sizes.masked_fill(~tokens.mask, math.inf), (0, 1), value=math.inf).amin(dim=1)
        return [smallest, F.pad(sizes, (0, 1)).amax(dim=1)]

    def begin(self, coefficients, completion_values, counted, num_completions) -> None:
        changes = (num_completions * coefficients * completion_values).abs()[:, counted]
        self.extremes = (changes[0].min().item(), changes[1].max().item()) if counted.any() else (0.0, 0.0)
        self.num_completions = num_completions
        self._sums: list[torch.Tensor] = []

    def __call__(self, tokens: TokenValues) -> torch.Tensor:
        compared = tokens.logps, tokens.old_logps, tokens.old_entropies
        advantages = -self.num_completions * tokens.coefficients
        weights = steer_weights(*compared, advantages, tokens.mask, **self.kinds, extremes=self.extremes)
        counted = tokens.mask & (tokens.coefficients != 0)
        self._sums.append(torch.stack([weights[counted].double().sum(), counted.sum()]))
        return weights

    def metrics(self, accelerator: Accelerator) -> dict[str, float]:
        """Return the mean weight of the tokens with a gradient on all processes, NaN without any."""
        total, number = accelerator.reduce(torch.stack(self._sums).sum(dim=0).float(), reduction="sum").tolist()
        return {"steer/weight_mean": total / (number or math.nan)}


@dataclass
class STEERConfig(PACSConfig):
    """Configuration of [`STEERTrainer`]: every parameter of [`PACSConfig`], and those of token weights."""

    supports_rollout_lag = False
    supports_images = False

    token_weight_mapping: Mapping = setting(
        "exponential", '`"exponential"` (weights from `token_weight_min` to 1) or `"linear"`.'
    )
    token_weight_min: float = setting(0.8, "Smallest weight.", above=0, below=2)
    token_weight_max: float = setting(1.2, 'Largest weight of `token_weight_mapping="linear"`.', above=0, below=2)

    def errors(self, step: BatchSizes) -> list[str]:
        errors, exponential = super().errors(step), self.token_weight_mapping == "exponential"
        if exponential:
            instead = "`token_weight_mapping: linear`"
            errors += ignored_settings(self, ["token_weight_max"], "exponential weights are at most 1", instead)
        if self.token_weight_min >= (1 if exponential else self.token_weight_max):
            errors.append("token_weight_min must be below the largest weight. The authors use 0.8.")
        return errors


class STEERTrainer(PACSTrainer):
    """[`PACSTrainer`] with [`SteerWeights`]; the first update on a rollout needs one more forward pass."""

    args: STEERConfig
    _name = "STEER"
    _paper = {"title": "Rethinking Entropy Interventions in RLVR: An Entropy Change Perspective", "id": "2510.10150"}
    _config_class = STEERConfig

    def token_weights(self) -> list[TokenWeights]:
        args = self.args
        steer = SteerWeights(args.token_weight_mapping, args.token_weight_min, args.token_weight_max)
        return [*super().token_weights(), steer]
