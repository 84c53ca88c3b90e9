"""Probability-ratio losses in terms of one coefficient per completion and one weight per token.

    L = sum_i c_i * sum_t f(rho_it),        c_i = -A_i * scale_i,        rho_it = pi(o_it) / pi_old(o_it)
    grad L = sum_i c_i * sum_t w_it * grad log pi(o_it)

`A_i` is the advantage, `scale_i` the normalization of [`completion_scales`], and `w_it` the derivative of `f(rho_it)`
with respect to log pi, which depends on detached values only ([`ratio_terms`]). The module covers all losses of
`trl.GRPOTrainer` 1.16 and that of `trl.RLOOTrainer`. All functions are pure; tests compare them with autograd through
TRL's formulas.

Shapes: `B` completions, `T` completion tokens. Masks are `True` for counted tokens.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch


class RatioLoss(NamedTuple):
    """
    Settings of a loss, with the names and meanings of [`~trl.GRPOConfig`].

    Attributes:
        loss_type (`str`): A key of `LOSS_TYPES`.
        importance_sampling_level (`str`): `"token"`: one ratio per token. `"sequence"`: the geometric mean of the
            token ratios (GSPO). `"completion"`: their product (RLOO), with a loss that is not summed over tokens.
        lower_bound, upper_bound (`float`): Bounds on the ratio, `1 - epsilon` and `1 + epsilon_high`; `upper_bound` is
            the cap of `"cispo"`.
        delta (`float`, *optional*): Upper bound on the ratio that also applies to negative advantages.
        sapo_temperatures, vespo_k, vespo_lambda (pairs of `float`): Values for positive and for negative advantages.
    """

    loss_type: str = "dapo"
    importance_sampling_level: str = "token"
    lower_bound: float = 0.8
    upper_bound: float = 1.2
    delta: float | None = None
    sapo_temperatures: tuple[float, float] = (1.0, 1.05)
    vespo_k: tuple[float, float] = (2.0, 3.0)
    vespo_lambda: tuple[float, float] = (3.0, 2.0)


class RatioTerms(NamedTuple):
    """
    What a loss needs of the tokens of a micro-batch, without gradient.

    Attributes:
        logp_weights (shape `(B, T)`): `w_it`, the weights of log-probs in the gradient; undefined outside the mask.
        surrogate_sums (shape `(B,)`): `sum_t f(rho_it)`, so that the loss is `sum_i c_i * surrogate_sums_i`.
        low_fraction, high_fraction (shape `(B,)`): Clip fractions: the share of counted tokens with a ratio below the
            lower bound and a negative advantage, or with a ratio above the upper bound and a positive advantage; 0 or
            1 at sequence level.
        phi (shape `(B,)`): Weight of each completion of `"vespo"`, see [`vespo_weights`]; 1 for the other losses.
    """

    logp_weights: torch.Tensor
    surrogate_sums: torch.Tensor
    low_fraction: torch.Tensor
    high_fraction: torch.Tensor
    phi: torch.Tensor


def log_importance_weights(log_ratios: torch.Tensor, mask: torch.Tensor, level: str) -> torch.Tensor:
    """
    Aggregate log-ratios to an `importance_sampling_level`.

    Args:
        log_ratios (shape `(B, T)`): Differences of log-probs in nats.
        mask (bool, shape `(B, T)`): `True` for counted tokens.
        level (`str`): `"token"`, `"sequence"` (mean over tokens), or `"completion"` (sum over tokens).

    Returns:
        `torch.Tensor`: Log-ratios of shape `(B, T)` for `"token"`, 0 outside the mask, otherwise `(B, 1)`.
    """
    log_ratios = log_ratios.masked_fill(~mask, 0.0)
    if level == "token":
        return log_ratios
    sums = log_ratios.sum(dim=1, keepdim=True)
    if level == "sequence":
        return sums / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return sums


# Returns `f(rho)` and its derivative with respect to log rho from the ratios and the signs of the advantages, see
# [`with_derivative`].
RatioFunction = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@torch.enable_grad()
def with_derivative(
    f: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ratio: torch.Tensor, sign: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Return `f(rho)` and its derivative with respect to log rho, `rho * f'(rho)`, which autograd computes.

    Args:
        f (`Callable`): `f(ratio, sign)`, computed for each ratio alone.
        ratio (shape `(B, T)` or `(B, 1)`): Probability ratios.
        sign (shape `(B, 1)`): Signs of the advantages: 1, 0, or -1.
    """
    ratio = ratio.detach().requires_grad_()
    surrogates = f(ratio, sign)
    (derivatives_in_ratio,) = torch.autograd.grad(surrogates.sum(), ratio)
    return surrogates.detach(), derivatives_in_ratio * ratio.detach()


# Losses -------------------------------------------------------------------------------------------------------------


class _LossInputs(NamedTuple):
    """
    Inputs of a loss: what it reads of a micro-batch.

    Attributes:
        logps, log_ratios (shape `(B, T)`): Log-probs under the current policy, and their differences from those of the
            policy at rollout time.
        ratio (shape `(B, T)` or `(B, 1)`): Probability ratios at the `importance_sampling_level` of the loss.
        positive, negative (bool, shape `(B, 1)`): Whether the advantage is above, or below 0.
        mask (bool, shape `(B, T)`), num_tokens (shape `(B, 1)`): Counted tokens, and their number, at least 1.
        token_weights (shape `(B, T)`): Weights of the losses of the tokens; 0 outside the mask.
        log_correction (shape `(B, 1)`, *optional*): See [`ratio_terms`].
    """

    logps: torch.Tensor
    log_ratios: torch.Tensor
    ratio: torch.Tensor
    positive: torch.Tensor
    negative: torch.Tensor
    mask: torch.Tensor
    num_tokens: torch.Tensor
    token_weights: torch.Tensor
    log_correction: torch.Tensor | None


class _LossTerms(NamedTuple):
    """The attributes of [`RatioTerms`] in which losses differ; without `phi` it is 1."""

    logp_weights: torch.Tensor
    surrogate_sums: torch.Tensor
    phi: torch.Tensor | None = None


def _terms_of_function(
    surrogates: torch.Tensor, derivatives: torch.Tensor, inputs: _LossInputs, loss: RatioLoss
) -> _LossTerms:
    """Return the terms of `sum_t f(rho_it)` from `f` and its derivative in log rho, both of the shape of the ratio."""
    surrogate_sums = (surrogates * inputs.token_weights).sum(dim=1)
    if loss.importance_sampling_level == "token":
        return _LossTerms((derivatives * inputs.token_weights).expand_as(inputs.logps), surrogate_sums)
    if loss.importance_sampling_level == "completion":
        surrogate_sums = surrogate_sums / inputs.num_tokens[:, 0]
    # The ratio of a completion depends on all of its tokens alike.
    mean_weights = inputs.token_weights.sum(dim=1, keepdim=True) / inputs.num_tokens
    return _LossTerms((derivatives * mean_weights).expand_as(inputs.logps), surrogate_sums)


def _terms_of_detached_weights(weights: torch.Tensor, inputs: _LossInputs) -> _LossTerms:
    """Return the terms of `sum_t weight_it * log pi(o_it)` with detached weights, `(B, T)` or `(B, 1)`."""
    logp_weights = weights * inputs.token_weights
    return _LossTerms(logp_weights, (logp_weights * inputs.logps.masked_fill(~inputs.mask, 0.0)).sum(dim=1))


def _clipped_loss(inputs: _LossInputs, loss: RatioLoss) -> _LossTerms:
    """GRPO: `f` is that of `min(min(rho, delta) * A, clip(rho) * A)`, where `clip` is to the bounds of the loss."""
    ratio = inputs.ratio
    delta = math.inf if loss.delta is None else loss.delta
    capped = ratio.clamp(max=delta)
    clipped = ratio.clamp(loss.lower_bound, loss.upper_bound)
    # The smaller product is that of the smaller ratio for a positive advantage, else that of the larger one.
    takes_capped = torch.where(inputs.positive, capped <= clipped, capped >= clipped)
    surrogates = torch.where(takes_capped, capped, clipped)

    # The derivative of rho in log rho is rho, and that of a bound is 0.
    is_below_delta = ratio <= delta
    is_within_bounds = (loss.lower_bound <= ratio) & (ratio <= loss.upper_bound)
    follows_ratio = torch.where(takes_capped, is_below_delta, is_within_bounds)
    derivatives = ratio.masked_fill(~follows_ratio, 0.0)
    return _terms_of_function(surrogates, derivatives, inputs, loss)


def _sapo_loss(inputs: _LossInputs, loss: RatioLoss) -> _LossTerms:
    """SAPO: `f` is `4 / tau * sigmoid(tau * (rho - 1))`."""
    tau = _by_sign(inputs.positive, loss.sapo_temperatures, inputs.ratio)
    gate = torch.sigmoid(tau * (inputs.ratio - 1))
    surrogates = 4 / tau * gate
    derivatives = 4 * gate * (1 - gate) * inputs.ratio
    return _terms_of_function(surrogates, derivatives, inputs, loss)


def _cispo_loss(inputs: _LossInputs, loss: RatioLoss) -> _LossTerms:
    """CISPO: log pi is multiplied by the capped ratio."""
    return _terms_of_detached_weights(inputs.ratio.clamp(max=loss.upper_bound), inputs)


def _vespo_loss(inputs: _LossInputs, loss: RatioLoss) -> _LossTerms:
    """VESPO: log pi is multiplied by the weight of its completion, [`vespo_weights`]."""
    log_ratios = inputs.log_ratios.clamp(-20.0, 20.0).masked_fill(~inputs.mask, 0.0)  # bounds as in TRL
    log_ratio_of_completion = log_ratios.sum(dim=1, keepdim=True)
    if inputs.log_correction is not None:
        log_ratio_of_completion = log_ratio_of_completion + inputs.log_correction
    weights = vespo_weights(log_ratio_of_completion, ~inputs.negative, loss)
    return _terms_of_detached_weights(weights, inputs)._replace(phi=weights[:, 0])


def _by_sign(positive: torch.Tensor, pair: tuple[float, float], like: torch.Tensor) -> torch.Tensor:
    """Return the first value of a pair where `positive`, else the second, with dtype and device of `like`."""
    value_if_positive, value_if_negative = pair
    return torch.where(positive, like.new_tensor(value_if_positive), like.new_tensor(value_if_negative))


def vespo_weights(log_ratio: torch.Tensor, not_negative: torch.Tensor, loss: RatioLoss) -> torch.Tensor:
    """Return VESPO's weight of each completion, `exp(lambda) * w^k * exp(-lambda * w)` with `w = exp(log_ratio)`,
    clamped as in TRL. `not_negative` is whether the advantage is at least 0. All tensors have shape `(B, 1)`."""
    log_w = log_ratio.clamp(math.log(1e-8), 20.0)
    k = _by_sign(not_negative, loss.vespo_k, log_w)
    lambda_ = _by_sign(not_negative, loss.vespo_lambda, log_w).clamp(min=1e-4)
    log_weights = lambda_ + k * log_w - lambda_ * log_w.exp()
    return log_weights.exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


class LossType(NamedTuple):
    """A loss: the function that computes its terms, and the normalization of its sum over tokens, see
    [`completion_scales`]."""

    compute_terms: Callable[[_LossInputs, RatioLoss], _LossTerms]
    normalization: str


LOSS_TYPES = {
    "grpo": LossType(_clipped_loss, "completion"),
    "bnpo": LossType(_clipped_loss, "step"),
    "dr_grpo": LossType(_clipped_loss, "max_completion_length"),
    "dapo": LossType(_clipped_loss, "generation"),
    "luspo": LossType(_clipped_loss, "completions"),
    "sapo": LossType(_sapo_loss, "completion"),
    "cispo": LossType(_cispo_loss, "generation"),
    "vespo": LossType(_vespo_loss, "generation"),
    "rloo": LossType(_clipped_loss, "completions"),
}


@torch.no_grad()
def ratio_terms(
    logps: torch.Tensor,
    old_logps: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    loss: RatioLoss,
    *,
    token_weights: torch.Tensor | None = None,
    log_correction: torch.Tensor | None = None,
    function: RatioFunction | None = None,
) -> RatioTerms:
    """
    Return the weights of the log-probs, the sums over tokens, and the clip fractions of a loss.

    Args:
        logps, old_logps (shape `(B, T)`): Log-probs in nats under the current policy and the policy at rollout time.
        advantages (shape `(B,)`): Advantages; only their signs are used.
        mask (bool, shape `(B, T)`): `True` for counted tokens.
        loss ([`RatioLoss`]): The loss and its settings.
        token_weights (shape `(B, T)`, *optional*): Weights of the losses of the tokens (masks, importance weights).
        log_correction (shape `(B, 1)`, *optional*): Added to the log-ratio of a completion by `"vespo"`.
        function (`RatioFunction`, *optional*): Used instead of the function of `loss.loss_type`, with its `ratio` and
            the signs of the advantages, 1, 0, or -1, of shape `(B, 1)`.
    """
    log_ratios = logps - old_logps
    ratio = log_importance_weights(log_ratios, mask, loss.importance_sampling_level).exp()
    if token_weights is None:
        token_weights = mask.to(logps.dtype)
    else:
        token_weights = token_weights.masked_fill(~mask, 0.0)
    inputs = _LossInputs(
        logps,
        log_ratios,
        ratio,
        positive=advantages[:, None] > 0,
        negative=advantages[:, None] < 0,
        mask=mask,
        num_tokens=mask.sum(dim=1, keepdim=True).clamp(min=1),
        token_weights=token_weights,
        log_correction=log_correction,
    )
    if function is not None:
        surrogates, derivatives = function(ratio, advantages[:, None].sign())
        terms = _terms_of_function(surrogates, derivatives, inputs, loss)
    else:
        terms = LOSS_TYPES[loss.loss_type].compute_terms(inputs, loss)
    phi = logps.new_ones(len(logps)) if terms.phi is None else terms.phi

    # Clip fractions are of the ratio after the cap `delta`, as in TRL.
    capped_ratio = ratio if loss.delta is None else ratio.clamp(max=loss.delta)
    is_clipped_low = (capped_ratio < loss.lower_bound) & inputs.negative & mask
    is_clipped_high = (capped_ratio > loss.upper_bound) & inputs.positive & mask
    num_tokens = inputs.num_tokens[:, 0]
    return RatioTerms(
        terms.logp_weights,
        terms.surrogate_sums,
        low_fraction=is_clipped_low.sum(dim=1) / num_tokens,
        high_fraction=is_clipped_high.sum(dim=1) / num_tokens,
        phi=phi,
    )


def completion_scales(
    loss_type: str, num_tokens: torch.Tensor, *, max_completion_length: int, generation_tokens: torch.Tensor
) -> torch.Tensor:
    """
    Return the factor on the summed token losses of each completion of an optimizer step, float64 `(B,)`.

    It follows from the normalization of the loss type. `B` includes completions without counted tokens.

    - `"completion"`: `1 / (B * num_tokens)`, a mean over completions of means over their tokens.
    - `"step"`: `1 / sum(num_tokens)`, a mean over the tokens of the optimizer step.
    - `"max_completion_length"`: `1 / (B * max_completion_length)`.
    - `"generation"`: `1 / generation_tokens`.
    - `"completions"`: `1 / B`, a mean over completions of sums over their tokens.

    Args:
        loss_type (`str`): A key of `LOSS_TYPES`.
        num_tokens (shape `(B,)`): Number of counted tokens of each completion of the step.
        max_completion_length (`int`): Setting of the configuration.
        generation_tokens (shape `(B,)`): Number of counted tokens in the generation batch of each completion, divided
            by the number of optimizer steps that share it.
    """
    num_completions = len(num_tokens)
    num_tokens = num_tokens.double()
    divisors = {
        "completion": num_completions * num_tokens.clamp(min=1),
        "step": num_tokens.sum().clamp(min=1).expand(num_completions),
        "max_completion_length": torch.full_like(num_tokens, num_completions * max_completion_length),
        "generation": generation_tokens.double(),
        "completions": torch.full_like(num_tokens, num_completions),
    }
    return 1 / divisors[LOSS_TYPES[loss_type].normalization]


def kl_terms(
    logps: torch.Tensor,
    ref_logps: torch.Tensor,
    mask: torch.Tensor,
    log_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the k3 estimator of KL(policy || reference) of each token in nats, `(B, T)`, 0 outside the mask.
    `log_weights` are the log importance weights of TRL's `use_bias_correction_kl`, `(B, T)` or `(B, 1)`.
    Differentiable in `logps` and `log_weights`."""
    log_ratio = (ref_logps - logps).masked_fill(~mask, 0.0)  # before `exp`, whose overflow would have a NaN gradient
    terms = torch.exp(log_ratio) - log_ratio - 1
    if log_weights is not None:
        terms = terms * log_weights.exp()
    return terms.masked_fill(~mask, 0.0)


def off_policy_mask(
    logps: torch.Tensor, sampling_logps: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, threshold: float
) -> torch.Tensor:
    """
    Return which completions are kept, bool `(B, 1)`: those with an advantage of at least 0, and those whose mean
    `sampling_logps - logps` is at most `threshold`. Tokens without sampling log-probs (NaN) count as 0.

    Args:
        logps, sampling_logps (shape `(B, T)`): Log-probs in nats under the current policy and when they were sampled.
        advantages (shape `(B,)`): Advantages.
        mask (bool, shape `(B, T)`): `True` for counted tokens.
        threshold (`float`): TRL's `off_policy_mask_threshold`, in nats per token.
    """
    differences = (sampling_logps - logps).nan_to_num(nan=0.0).masked_fill(~mask, 0.0)
    mean_difference = differences.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return (advantages[:, None] >= 0) | (mean_difference <= threshold)
