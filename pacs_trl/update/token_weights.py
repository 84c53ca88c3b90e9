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
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator


if TYPE_CHECKING:
    from .driver import UpdateDriver
    from .minibatch import Minibatch


class TokenValues(NamedTuple):
    """
    Inputs of a token weight; all are detached, float32 and of shape `(B, T)` unless stated otherwise.

    Attributes:
        logps, entropies: Log-probs and entropies in nats under the current policy.
        old_logps, old_entropies: The same under the policy at rollout time; with a lag, ratio losses have the
            log-probs of the policy that generated, and no entropies (0).
        sampling_logps: Log-probs in nats as reported by the generation engine; NaN where it reported none.
        coefficients (shape `(B, 1)` or `(B, T)`): Derivatives of the loss with respect to the log-prob of a counted
            token.
        mask (bool): `True` for counted tokens; other attributes are undefined where it is `False`.
        has_sampling_logps (bool, shape `(B, 1)`): Whether the engine reports log-probs at all, perhaps none for this
            completion.
    """

    logps: torch.Tensor
    old_logps: torch.Tensor
    sampling_logps: torch.Tensor
    entropies: torch.Tensor
    old_entropies: torch.Tensor
    coefficients: torch.Tensor
    mask: torch.Tensor
    has_sampling_logps: torch.Tensor | None = None


class TokenWeights:
    """
    Base class of token weights. A subclass implements `__call__`; the other methods are for weights that depend on the
    whole optimizer step.

    Attributes:
        num_values (`int`): Number of tensors that [`completion_values`] returns. If it is above 0, they are gathered
            over all completions and processes before the first backward pass, which may need an extra forward pass.
        num_selected (`int`, *optional*): Number of tokens of the optimizer step with weight 1, if all others have
            weight 0. The entropy bonus is then the mean over these tokens.
    """

    num_values = 0
    num_selected: int | None = None

    def prepare(self, driver: "UpdateDriver", model: torch.nn.Module, minibatch: "Minibatch") -> None:
        """Prepare for an optimizer step, before its forward passes. `model` is the wrapped model."""

    def completion_values(self, tokens: TokenValues) -> list[torch.Tensor]:
        """Return `num_values` tensors `(B,)` from a micro-batch; `tokens.coefficients` are still 0."""
        return []

    def begin(
        self, coefficients: torch.Tensor, completion_values: torch.Tensor, counted: torch.Tensor, num_completions: int
    ) -> None:
        """Receive the values of the whole optimizer step, before its first backward pass: its coefficients `(B,)`, the
        results of [`completion_values`] `(num_values, B)`, 0 for completions without a forward pass, which completions
        have a counted token, bool `(B,)`, and the number of scorable completions. Called only if a token weight of the
        update has `num_values` above 0."""

    def __call__(self, tokens: TokenValues) -> torch.Tensor:
        """Return weights `(B, T)` without gradient; they are ignored outside the mask."""
        raise NotImplementedError

    def metrics(self, accelerator: Accelerator) -> dict[str, float]:
        """Return metrics of the step, the same on all processes."""
        return {}


class Mismatch(NamedTuple):
    """Settings of the engine-trainer mismatch: TRL's `vllm_importance_sampling_mode`, `..._clip_min`, and
    `..._clip_max`. A bound of `None` is disabled. Metrics use the mode, and the correction all."""

    mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
    clip_min: float | None = None
    clip_max: float | None = None


class MismatchValues(NamedTuple):
    """Comparison of the trainer's log-probs with those of the engine: absolute `differences` of the log-probs of the
    compared tokens, in nats, and `ratios` before truncation or masking, one per token or one per completion; both
    float64 and one-dimensional."""

    differences: torch.Tensor
    ratios: torch.Tensor


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

    def prepare(self, driver, model, minibatch) -> None:
        entropies = driver.token_entropies(model, minibatch)
        least = np.quantile(entropies, 1 - self.quantile) if len(entropies) else 0.0
        # The first tokens of a group have equal entropies up to rounding, so they must be on the same side. The
        # threshold is halfway between two values, so that rounding in other micro-batches moves no token across it.
        keeps = entropies >= least - 64 * np.finfo(entropies.dtype).eps * max(1.0, abs(least))
        highest = entropies[~keeps].max(initial=-math.inf)
        self.threshold = (entropies[keeps].min(initial=math.inf) + highest) / 2
        self.num_selected = int(keeps.sum())

    def __call__(self, tokens: TokenValues) -> torch.Tensor:
        return (tokens.entropies >= self.threshold).to(tokens.logps.dtype)


def _log_ratios(logps: torch.Tensor, sampling_logps: torch.Tensor, is_compared: torch.Tensor) -> torch.Tensor:
    """Return `log rho`, float64 `(B, T)`; 0 where `is_compared` is `False`."""
    return (logps.detach().double() - sampling_logps.double()).masked_fill(~is_compared, 0.0)


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
    lower_bound = mismatch.clip_min or 0.0
    upper_bound = math.inf if mismatch.clip_max is None else mismatch.clip_max
    if mismatch.mode.endswith("_truncate"):
        return ratios.clamp(lower_bound, upper_bound).to(logps.dtype)
    return ratios.masked_fill((ratios < lower_bound) | (ratios > upper_bound), 0.0).to(logps.dtype)


def mismatch_ratios(
    logps: torch.Tensor, sampling_logps: torch.Tensor, mask: torch.Tensor, mismatch: Mismatch
) -> MismatchValues:
    """Compare the log-probs of a micro-batch with those of the engine. Arguments are those of
    [`correction_weights`]."""
    is_compared = mask.bool() & ~sampling_logps.isnan()
    log_ratios = _log_ratios(logps, sampling_logps, is_compared)
    token_log_ratios = log_ratios[is_compared]
    if mismatch.mode.startswith("sequence_"):
        ratios = log_ratios.sum(dim=1)[is_compared.any(dim=1)].exp()
    else:
        ratios = token_log_ratios.exp()
    return MismatchValues(token_log_ratios.abs(), ratios)


def mismatch_metrics(differences: torch.Tensor, ratios: torch.Tensor) -> dict[str, float]:
    """Return TRL's metrics `sampling/*` from the results of [`mismatch_ratios`]; NaN if no token was compared."""
    values: dict[str, torch.Tensor | float] = {
        "sampling_logp_difference/mean": differences.mean(),
        "sampling_logp_difference/max": differences.max() if len(differences) else math.nan,
        "importance_sampling_ratio/min": ratios.min() if len(ratios) else math.nan,
        "importance_sampling_ratio/mean": ratios.mean(),
        "importance_sampling_ratio/max": ratios.max() if len(ratios) else math.nan,
    }
    return {f"sampling/{name}": float(value) for name, value in values.items()}
