"""Token weights: per-token factors on the gradient, applied in addition to the coefficient of the completion.

    grad L = sum_i c_i * sum_t w_it * grad log pi(o_it),        w_it = product of the token weights of the update

Token weights depend on detached values only. They scale the gradient, and do not change the proxies, the scores, or
the reported loss. The KL term is not weighted.

The weights in this module correct for the mismatch between the trainer and the generation engine, which computes
probabilities with different kernels, precision, and batches. `rho_it = pi_trainer(o_it) / pi_engine(o_it)` is the
probability ratio of a token under the weights at rollout time; at sequence level it is the product over the counted
tokens of the completion. A token without a log-prob from the engine has `rho = 1`.

Shapes: `B` completions, `T` completion tokens.
"""

import math
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator


class TokenValues(NamedTuple):
    """
    Inputs of a token weight; all are detached, float32 and of shape `(B, T)` unless stated otherwise.

    Attributes:
        logps, entropies: Log-probs and entropies in nats under the current policy.
        old_logps, old_entropies: The same under the policy at rollout time, computed by the trainer.
        sampling_logps: Log-probs in nats as reported by the generation engine; NaN where it reported none.
        coefficients (shape `(B, 1)` or `(B, T)`): Derivatives of the loss with respect to the log-prob of a counted
            token.
        mask (bool): `True` for counted tokens; other attributes are undefined where it is `False`.
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
    Base class of token weights. A subclass implements `__call__`; the other methods are for weights that depend on the
    whole optimizer step.

    Attributes:
        num_values (`int`): Number of tensors that [`own_values`] returns. If it is above 0, they are gathered over
            all completions and processes before the first backward pass, which may need an extra forward pass.
    """

    num_values = 0

    def prepare(self, update: Any, model: torch.nn.Module, step: Any) -> None:
        """Prepare for an optimizer step, before its forward passes. Arguments are the `PolicyUpdate`, the wrapped
        model, and the `StepRollouts`."""

    def own_values(self, tokens: TokenValues) -> list[torch.Tensor]:
        """Return `num_values` tensors `(B,)` from a micro-batch; `tokens.coefficients` are still 0."""
        return []

    def begin(
        self, coefficients: torch.Tensor, own_values: torch.Tensor, counted: torch.Tensor, num_completions: int
    ) -> None:
        """Receive the values of the whole optimizer step, before its first backward pass: its coefficients `(B,)`, the
        results of [`own_values`] `(num_values, B)`, 0 for completions without a forward pass, which completions have a
        counted token, bool `(B,)`, and the number of scorable completions, the divisor of the loss."""

    def __call__(self, tokens: TokenValues) -> torch.Tensor:
        """Return weights `(B, T)` without gradient; they are ignored outside the mask."""
        raise NotImplementedError

    def metrics(self, accelerator: Accelerator) -> dict[str, float]:
        """Return metrics of the step, the same on all processes."""
        return {}


class Mismatch(NamedTuple):
    """Settings of the engine-trainer mismatch: TRL's `vllm_importance_sampling_mode`, `..._clip_min`, and
    `..._clip_max`. A bound of `None` is disabled. Metrics use them, and the correction if it is enabled."""

    mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
    clip_min: float | None = None
    clip_max: float | None = None

    @property
    def bounds(self) -> tuple[float, float]:
        return self.clip_min or 0.0, math.inf if self.clip_max is None else self.clip_max

    def outside(self, ratios: torch.Tensor) -> torch.Tensor:
        low, high = self.bounds
        return (ratios < low) | (ratios > high)


class MismatchCorrection(TokenWeights):
    """Token weights that apply [`correction_weights`]."""

    def __init__(self, mismatch: Mismatch):
        self.mismatch = mismatch

    def __call__(self, tokens: TokenValues) -> torch.Tensor:
        return correction_weights(tokens.old_logps, tokens.sampling_logps, tokens.mask, self.mismatch)


class HighEntropyTokens(TokenWeights):
    """Token weights of TRL's `top_entropy_quantile`: 1 for the share `quantile` of the tokens with the highest
    entropies, 0 for the others. The quantile is over the optimizer step; TRL takes it over one micro-batch."""

    def __init__(self, quantile: float):
        self.quantile = quantile

    def prepare(self, update, model, step) -> None:
        entropies = update.token_entropies(model, step)
        least = np.quantile(entropies, 1 - self.quantile) if len(entropies) else 0.0
        # The first tokens of a group have equal entropies up to rounding, so they must be on the same side. The
        # threshold is halfway between two values, so that rounding in other micro-batches moves no token across it.
        keeps = entropies >= least - 64 * np.finfo(entropies.dtype).eps * max(1.0, abs(least))
        highest = entropies[~keeps].max(initial=-math.inf)
        self.threshold = (entropies[keeps].min(initial=math.inf) + highest) / 2

    def __call__(self, tokens: TokenValues) -> torch.Tensor:
        return (tokens.entropies >= self.threshold).to(tokens.logps.dtype)


def _log_ratios(logps: torch.Tensor, sampling_logps: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Return `log rho`, float64 `(B, T)`; 0 where `known` is `False`."""
    return (logps.detach().double() - sampling_logps.double()).masked_fill(~known, 0.0)


def correction_weights(
    logps: torch.Tensor, sampling_logps: torch.Tensor, mask: torch.Tensor, mismatch: Mismatch
) -> torch.Tensor:
    """
    Return the factor `w_it` on the gradient of each token.

    `"token_truncate"`: `min(max(rho, clip_min), clip_max)`. `"token_mask"`: `rho` inside `[clip_min, clip_max]`, 0
    outside. `"sequence_*"`: the same with the ratio of the whole completion.

    Args:
        logps, sampling_logps (`torch.Tensor` of shape `(B, T)`): Log-probs of the completion tokens in nats: from the
            trainer under the weights at rollout time, and from the engine (NaN where it reported none).
        mask (`torch.Tensor` of shape `(B, T)`): 1 (True) for counted tokens.
        mismatch ([`Mismatch`]): Mode and bounds.

    Returns:
        `torch.Tensor` of shape `(B, T)` without gradient, with the dtype of `logps`; undefined outside the mask.
    """
    log_ratios = _log_ratios(logps, sampling_logps, mask.bool() & ~sampling_logps.isnan())
    if mismatch.mode.startswith("sequence_"):
        log_ratios = log_ratios.sum(dim=1, keepdim=True).expand_as(log_ratios)
    ratios = log_ratios.exp()
    if mismatch.mode.endswith("_truncate"):
        return ratios.clamp(*mismatch.bounds).to(logps.dtype)
    return ratios.masked_fill(mismatch.outside(ratios), 0.0).to(logps.dtype)


# Columns of `mismatch_statistics`.
_COLUMNS = ("tokens", "sum_abs", "max_abs", "ratios", "sum_ratio", "sum_square", "outside", "min_ratio", "max_ratio")


def mismatch_statistics(
    logps: torch.Tensor, sampling_logps: torch.Tensor, mask: torch.Tensor, mismatch: Mismatch
) -> torch.Tensor:
    """
    Return sums and extremes over some completions, float64 `(9,)`.

    [`merge_statistics`] combines them, and [`mismatch_metrics`] converts them to metrics. Arguments are those of
    [`correction_weights`]. Ratios are those before truncation or masking, one per token or one per completion.
    """
    known = mask.bool() & ~sampling_logps.isnan()
    log_ratios = _log_ratios(logps, sampling_logps, known)
    differences = log_ratios[known].abs()
    if mismatch.mode.startswith("sequence_"):
        ratios = log_ratios.sum(dim=1)[known.any(dim=1)].exp()
    else:
        ratios = log_ratios[known].exp()
    infinity = ratios.new_full((1,), math.inf)
    values = [
        len(differences),
        differences.sum(),
        torch.cat([differences, differences.new_zeros(1)]).max(),
        *(len(ratios), ratios.sum(), ratios.square().sum(), mismatch.outside(ratios).sum()),
        torch.cat([ratios, infinity]).min(),
        torch.cat([ratios, -infinity]).max(),
    ]
    return torch.stack([torch.as_tensor(value).to(ratios) for value in values])


def merge_statistics(parts: torch.Tensor) -> torch.Tensor:
    """Merge the statistics of `N` subsets of the completions, `(N, 9)` with `N` at least 1, into one, `(9,)`."""
    merged = parts.sum(dim=0)
    for name, extreme in (("max_abs", parts.amax), ("min_ratio", parts.amin), ("max_ratio", parts.amax)):
        merged[_COLUMNS.index(name)] = extreme(dim=0)[_COLUMNS.index(name)]
    return merged


def mismatch_metrics(statistics: torch.Tensor) -> dict[str, float]:
    """
    Return the metrics `sampling/*` from statistics of shape `(9,)`; NaN if there was no token.

    The effective sample size is `(sum rho)^2 / (n * sum rho^2)`, in (0, 1]: the share of completions (or tokens) that
    would carry the same information if engine and trainer agreed. It is 0 if all ratios underflow, and NaN if their
    squares overflow.
    """
    value = dict(zip(_COLUMNS, statistics.tolist(), strict=True))
    tokens, ratios = value["tokens"], value["ratios"]
    known = ratios > 0
    # The ratios of whole completions may underflow, or their squares overflow.
    total, square = value["sum_ratio"], value["sum_square"]
    effective = total / square * (total / ratios) if 0 < square < math.inf else 0.0 if square == 0 else math.nan
    return {
        "sampling/sampling_logp_difference/mean": value["sum_abs"] / tokens if tokens else math.nan,
        "sampling/sampling_logp_difference/max": value["max_abs"] if tokens else math.nan,
        "sampling/importance_sampling_ratio/min": value["min_ratio"] if known else math.nan,
        "sampling/importance_sampling_ratio/mean": value["sum_ratio"] / ratios if known else math.nan,
        "sampling/importance_sampling_ratio/max": value["max_ratio"] if known else math.nan,
        "sampling/effective_sample_size": effective if known else math.nan,
        "sampling/outside_fraction": value["outside"] / ratios if known else math.nan,
    }
