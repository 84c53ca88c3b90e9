"""Settings of labels and of the weights of tokens and rows: what is wrong between them."""

from typing import Any


def weight_errors(given: Any) -> list[str]:
    """What is wrong between these settings, a sentence for each; the argument as in [`PACSConfig.errors`]."""
    return [
        *_spread_errors(given),
        *_token_weight_errors(given),
        *_hidden_state_errors(given),
    ]


def _spread_errors(given: Any) -> list[str]:
    draws = [name for name in ("guidance", "adaptive_rollouts", "refill_uniform_groups") if getattr(given, name)]
    if given.spread_filter is None or not draws:
        return []
    return [
        f"spread_filter={given.spread_filter} makes no sense with {draws[0]}: it judges groups when they are first drawn, and later draws "
        "would add to groups that it has dropped, or be judged one by one. Remove one of them."
    ]


def _token_weight_errors(given: Any) -> list[str]:
    least, most, errors = given.token_weight_min, given.token_weight_max, []
    if given.token_weighting is None:
        defaults = {"token_weight_mapping": "exponential", "token_weight_min": 0.8, "token_weight_max": 1.2}
        return [
            f"{name}={getattr(given, name)!r} would be ignored without token_weighting. Set token_weighting='steer', or remove the key."
            for name, default in defaults.items()
            if getattr(given, name) != default
        ]
    if given.token_weight_mapping == "exponential":
        if most != 1.2:
            errors.append(
                f"token_weight_max={most} would be ignored with token_weight_mapping='exponential', whose weights end at 1. Use "
                "'linear', or remove the key."
            )
        if least >= 1:
            errors.append(
                f"token_weight_min={least} must be below 1 with token_weight_mapping='exponential': weights lie between it and 1. "
                "The authors use 0.8."
            )
    elif least >= most:
        errors.append(
            f"token_weight_min={least} must be below token_weight_max={most}: tokens that change the entropy most get the smaller one. "
            "The authors use 0.8 and 1.2."
        )
    return errors


def _hidden_state_errors(given: Any) -> list[str]:
    stride, longest, errors = given.hidden_state_stride, given.max_completion_length, []
    every, weighs = given.hidden_state_every_steps, given.row_weighting is not None
    if given.row_weighting == "verl_last_token" and given.token_weighting is not None:
        errors.append(
            f"row_weighting='verl_last_token' makes no sense with token_weighting={given.token_weighting!r}, which finds the largest change "
            "of a step from one coefficient for each completion. Use row_weighting='verl', or remove one of them."
        )
    if every is not None and weighs:
        errors.append(
            f"hidden_state_every_steps={every} would be ignored with row_weighting={given.row_weighting!r}, which measures every "
            "step. Remove the key."
        )
    if given.hidden_state_rows != 64 and (weighs or every is None):
        errors.append(
            f"hidden_state_rows={given.hidden_state_rows} would be ignored without hidden_state_every_steps; row_weighting measures "
            "all completions that count. Remove the key."
        )
    if not weighs and every is None:
        if stride != 40:
            errors.append(
                f"hidden_state_stride={stride} would be ignored without row_weighting and hidden_state_every_steps. Set "
                "row_weighting='verl', or remove the key."
            )
    elif longest is not None and 2 * stride + 1 > longest:
        errors.append(
            f"hidden_state_stride={stride} is too long for completions of max_completion_length={longest} tokens: velocity compares "
            f"prefixes of {stride + 1} and {2 * stride + 1} tokens. Set it to at most {max(1, (longest - 1) // 2)}."
        )
    return errors


def dense_label_errors(given: Any) -> list[str]:
    """Why these settings make no sense where a reward function labels completions in several places, a sentence for each."""
    outcomes = "it goes by the labels of outcomes, and steps may differ where outcomes are equal"
    reasons = {
        "score_estimator": "the score of a prefix is its proxy minus the mean of the aligned ones, which is 'rloo'",
        "actor_term_coef": "the actor term weighs a completion by the likelihood of its one label",
        "spread_filter": outcomes,
        "refill_uniform_groups": outcomes,
        "token_weighting": "STEER finds the largest change of a step from one coefficient for each completion",
        "row_weighting": "VERL weighs the one coefficient of a completion",
    }
    neutral = {"score_estimator": "rloo"}
    return [
        f"A reward function returned (position, label) pairs, which make no sense with {name}={value!r}: {reason}. Remove the key, or "
        "return numbers."
        for name, reason in reasons.items()
        if (value := getattr(given, name)) and value != neutral.get(name)
    ]
