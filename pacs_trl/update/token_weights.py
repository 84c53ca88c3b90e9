"""Weights per token: how much each token counts in the gradient, beside the coefficient of its completion.

    grad L = sum_i c_i * sum_t w_it * grad log pi(o_it),        w_it = product of the weights given to the update

Weights depend on detached values only, so they scale the gradient and leave proxies, scores, and loss alone. The KL
term is not weighted.

The weights of this module correct for the mismatch between the trainer and the engine that generated, which computes
probabilities with other kernels, in another precision, and in other batches. `rho_it = pi_trainer(o_it) /
pi_engine(o_it)` is the ratio of a token at the weights that generated; at sequence level it is the product over the
counted tokens of the completion. A token whose probability the engine did not report counts as `rho = 1`.

Letters for shapes: `B` completions, `T` completion tokens.
"""

import math
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator


class TokenValues(NamedTuple):
    """
    Values that a token weight may depend on; everything is detached, float32 and `(B, T)` unless said.

    Attributes:
        logps, entropies: Of the policy as it is now.
        old_logps, old_entropies: Of the policy that generated, computed by the trainer: never a snapshot.
        sampling_logps: As `old_logps`, reported by the engine; NaN where it reported none.
        coefficients (shape `(B, 1)` or `(B, T)`): Derivatives of the loss with respect to the log-prob of a counted
            token.
        mask (bool): Tokens that count; the other values have no meaning elsewhere.
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
        num_row_values (`int`): Number of values that [`row_values`] returns. Above 0 they are known, of all
            completions and processes, before the first backward pass, which may take one more forward pass.
    """

    num_row_values = 0

    def prepare(self, update: Any, model: torch.nn.Module, step: Any) -> None:
        """Run before the other passes of a step: a `PolicyUpdate`, the wrapped model, and `StepRollouts`."""

    def row_values(self, tokens: TokenValues) -> list[torch.Tensor]:
        """Return `num_row_values` tensors `(B,)` of a micro-batch, whose coefficients are not known yet (0)."""
        return []

    def begin(
        self, coefficients: torch.Tensor, row_values: torch.Tensor, counted: torch.Tensor, num_rows: int
    ) -> None:
        """
        Receive what is known of the whole step, before its first backward pass.

        Args:
            coefficients (`torch.Tensor` of shape `(B,)`): Of all completions.
            row_values (`torch.Tensor` of shape `(num_row_values, B)`): 0 for completions without a forward pass.
            counted (bool `torch.Tensor` of shape `(B,)`): Completions with tokens that count.
            num_rows (`int`): Scorable completions, by which the loss is divided.
        """

    def __call__(self, tokens: TokenValues) -> torch.Tensor:
        """Return weights `(B, T)` without gradient; those outside the mask have no meaning."""
        raise NotImplementedError

    def metrics(self, accelerator: Accelerator, *, on_policy: bool) -> dict[str, float]:
        """Return metrics of the step, the same on all processes."""
        return {}


class Mismatch(NamedTuple):
    """How the mismatch of engine and trainer is measured, and may be corrected: TRL's
    `vllm_importance_sampling_mode`, `..._clip_min`, and `..._clip_max`; `None` is no bound."""

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
    """[`correction_weights`] as one of the token weights of an update."""

    def __init__(self, mismatch: Mismatch):
        self.mismatch = mismatch

    def __call__(self, tokens: TokenValues) -> torch.Tensor:
        return correction_weights(tokens.old_logps, tokens.sampling_logps, tokens.mask, self.mismatch)


class HighEntropyTokens(TokenWeights):
    """TRL's `top_entropy_quantile`: 1 for this share of the tokens of an optimizer step with the highest entropies, 0
    for the others. TRL takes the quantile over one micro-batch on all processes."""

    def __init__(self, quantile: float):
        self.quantile = quantile

    def prepare(self, update, model, step) -> None:
        entropies = update.token_entropies(model, step)
        least = np.quantile(entropies, 1 - self.quantile) if len(entropies) else 0.0
        # First tokens of a group have equal entropies up to rounding: all of them are on one side. The threshold is in
        # the middle of two values, so that rounding in another micro-batch moves no token across.
        keeps = entropies >= least - 64 * np.finfo(entropies.dtype).eps * max(1.0, abs(least))
        highest = entropies[~keeps].max(initial=-math.inf)
        self.threshold = (entropies[keeps].min(initial=math.inf) + highest) / 2

    def __call__(self, tokens: TokenValues) -> torch.Tensor:
        return (tokens.entropies >= self.threshold).to(tokens.logps.dtype)


def _log_ratios(logps: torch.Tensor, sampling_logps: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """`log rho`, `(B, T)` in float64; 0 where it is not `known`."""
    return (logps.detach().double() - sampling_logps.double()).masked_fill(~known, 0.0)


def correction_weights(
    logps: torch.Tensor, sampling_logps: torch.Tensor, mask: torch.Tensor, mismatch: Mismatch
) -> torch.Tensor:
    """
    Return factors `w_it` on the gradient of each token: `"token_truncate"`: `min(max(rho, clip_min), clip_max)`;
    `"token_mask"`: `rho` inside `[clip_min, clip_max]`, 0 outside; `"sequence_*"`: the same with the ratio of the
    whole completion.

    Args:
        logps, sampling_logps (`torch.Tensor` of shape `(B, T)`): Log-probs of the completion tokens by the trainer, at
            the weights that generated, and by the engine; NaN where it reported none.
        mask (`torch.Tensor` of shape `(B, T)`): 1 (True) for tokens that count.
        mismatch ([`Mismatch`]): Mode and bounds.

    Returns:
        `torch.Tensor` of shape `(B, T)` without gradient. Tokens outside the mask have no meaning.
    """
    log_ratios = _log_ratios(logps, sampling_logps, mask.bool() & ~sampling_logps.isnan())
    if mismatch.mode.startswith("sequence_"):
        log_ratios = log_ratios.sum(dim=1, keepdim=True).expand_as(log_ratios)
    ratios = log_ratios.exp()
    if mismatch.mode.endswith("_truncate"):
        return ratios.clamp(*mismatch.bounds).to(logps.dtype)
    return ratios.masked_fill(mismatch.outside(ratios), 0.0).to(logps.dtype)


# Columns of the statistics below.
_COLUMNS = ("tokens", "sum_abs", "max_abs", "ratios", "sum_ratio", "sum_square", "outside", "min_ratio", "max_ratio")


def mismatch_statistics(
    logps: torch.Tensor, sampling_logps: torch.Tensor, mask: torch.Tensor, mismatch: Mismatch
) -> torch.Tensor:
    """
    Return sums and extremes over some completions, float64 `(9,)`, which [`merge_statistics`] combines and
    [`mismatch_metrics`] turns into metrics; arguments as in [`correction_weights`]. Ratios are those before truncation
    or masking, one per token or one per completion.
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
    """Statistics of all rows, `(9,)`, from those of parts of them, `(N, 9)` with `N` at least 1."""
    merged = parts.sum(dim=0)
    for name, extreme in (("max_abs", parts.amax), ("min_ratio", parts.amin), ("max_ratio", parts.amax)):
        merged[_COLUMNS.index(name)] = extreme(dim=0)[_COLUMNS.index(name)]
    return merged


def mismatch_metrics(statistics: torch.Tensor) -> dict[str, float]:
    """
    Metrics with the prefix `sampling/`, from statistics of shape `(9,)`; NaN if there was no token.

    The effective sample size is `(sum rho)^2 / (n * sum rho^2)`, in (0, 1]: the share of completions (or tokens) that
    would tell as much if engine and trainer agreed; 0 where all ratios are too small for a
    number, NaN where their squares are too large for one.
    """
    value = dict(zip(_COLUMNS, statistics.tolist(), strict=True))
    tokens, ratios = value["tokens"], value["ratios"]
    known = ratios > 0
    # Ratios of whole completions may all be too small for a number, or their squares too large.
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
