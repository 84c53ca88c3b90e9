"""How far the engine that generated is from the policy that learns, and what to do about it, as pure tensor functions.

vLLM computes probabilities with other kernels, in another precision and in other batches than the trainer, so
completions are not drawn from exactly the policy that is updated. TRL corrects its losses by importance weights in
four modes (`vllm_importance_sampling_mode`). Here they get a meaning for PACS: a detached factor on the gradient of
each token,

    grad L = sum_i c_i * sum_t w_it * grad log pi(o_it)

with the coefficients `c_i = dL/dr_i` of `objective.proxy_coefficients`. Proxy, score and loss keep their values, so
coefficients stay functions of labels and proxies alone. The k3 estimator of the KL term is not weighted.

`rho_it = pi_trainer(o_it) / pi_engine(o_it)` is the ratio of a token, at the weights that generated. At sequence level
it is the product over the counted tokens of the completion, the same for all of them. A token whose probability the
engine did not report counts as `rho = 1`.

Letters for shapes: `B` completions, `T` completion tokens.
"""

import math
from typing import Literal, NamedTuple

import torch

from .token_weights import TokenValues, TokenWeights


CorrectionMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


class Mismatch(NamedTuple):
    """How the mismatch of engine and trainer is measured, and may be corrected: arguments of
    [`correction_weights`]."""

    mode: CorrectionMode
    clip_min: float | None = None
    clip_max: float | None = None


# Columns of the statistics below, and how two of them become one.
_COLUMNS = ("tokens", "sum_abs", "max_abs", "ratios", "sum_ratio", "sum_square", "outside", "min_ratio", "max_ratio")


def _log_ratios(logps: torch.Tensor, sampling_logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`log rho`, `(B, T)` in float64; 0 where the mask is False or the engine's probability is unknown."""
    known = mask.bool() & ~sampling_logps.isnan()
    return (logps.double() - sampling_logps.double()).masked_fill(~known, 0.0)


def correction_weights(
    logps: torch.Tensor,
    sampling_logps: torch.Tensor,
    mask: torch.Tensor,
    *,
    mode: CorrectionMode,
    clip_min: float | None = None,
    clip_max: float | None = None,
) -> torch.Tensor:
    """
    Factors `w_it` on the gradient of each token.

    `"token_truncate"`: `min(max(rho, clip_min), clip_max)`. `"token_mask"`: `rho` inside `[clip_min, clip_max]`, 0
    outside. `"sequence_*"`: the same with the ratio of the whole completion. `None` is no bound.

    Args:
        logps, sampling_logps (`torch.Tensor` of shape `(B, T)`): Log-probabilities of the completion tokens by the
            trainer, at the weights that generated, and by the engine; NaN where it reported none.
        mask (`torch.Tensor` of shape `(B, T)`): 1 (True) for tokens that count.
        mode, clip_min, clip_max: TRL's `vllm_importance_sampling_mode`, `..._clip_min` and `..._clip_max`.

    Returns:
        float32 `torch.Tensor` of shape `(B, T)` without gradient. Tokens outside the mask have no meaning.
    """
    log_ratios = _log_ratios(logps.detach(), sampling_logps, mask)
    if mode.startswith("sequence_"):
        log_ratios = log_ratios.sum(dim=1, keepdim=True).expand_as(log_ratios)
    ratios = log_ratios.exp()
    low, high = 0.0 if clip_min is None else clip_min, math.inf if clip_max is None else clip_max
    if mode.endswith("_truncate"):
        return ratios.clamp(low, high).float()
    return ratios.masked_fill((ratios < low) | (ratios > high), 0.0).float()


class MismatchCorrection(TokenWeights):
    """[`correction_weights`] as one of the token weights of an update."""

    def __init__(self, mismatch: Mismatch):
        self.mismatch = mismatch

    def __call__(self, tokens: TokenValues) -> torch.Tensor:
        return correction_weights(tokens.old_logps, tokens.sampling_logps, tokens.mask, **self.mismatch._asdict())


def mismatch_statistics(
    logps: torch.Tensor,
    sampling_logps: torch.Tensor,
    mask: torch.Tensor,
    *,
    mode: CorrectionMode,
    clip_min: float | None = None,
    clip_max: float | None = None,
) -> torch.Tensor:
    """
    Sums and extremes over some rows, from which [`mismatch_metrics`] makes metrics; arguments as in
    [`correction_weights`]. Ratios are those before truncation or masking, one per token or one per completion.

    Returns:
        float64 `torch.Tensor` of shape `(9,)`; several of them are combined by [`merge_statistics`].
    """
    known = mask.bool() & ~sampling_logps.isnan()
    log_ratios = _log_ratios(logps.detach(), sampling_logps, mask)
    differences = log_ratios[known].abs()
    if mode.startswith("sequence_"):
        ratios = log_ratios.sum(dim=1)[known.any(dim=1)].exp()
    else:
        ratios = log_ratios[known].exp()
    low, high = 0.0 if clip_min is None else clip_min, math.inf if clip_max is None else clip_max
    sums = [len(differences), differences.sum(), len(ratios), ratios.sum(), ratios.square().sum()]
    num_tokens, sum_abs, num_ratios, sum_ratio, sum_square = [torch.as_tensor(s).to(ratios) for s in sums]
    outside = ((ratios < low) | (ratios > high)).sum().to(ratios)
    infinity = ratios.new_full((1,), math.inf)
    max_abs, min_ratio, max_ratio = (
        torch.cat([differences, differences.new_zeros(1)]).max(),
        torch.cat([ratios, infinity]).min(),
        torch.cat([ratios, -infinity]).max(),
    )
    return torch.stack(
        [num_tokens, sum_abs, max_abs, num_ratios, sum_ratio, sum_square, outside, min_ratio, max_ratio]
    )


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
