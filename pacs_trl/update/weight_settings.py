"""Settings of labels and of the weights of tokens and rows: what is wrong between them."""

from typing import Any


# Keys of `label_noise`.
NOISE = ("false_positive", "false_negative")


def weight_errors(given: Any) -> list[str]:
    """What is wrong between these settings, a sentence for each; the argument as in [`PACSConfig.errors`]."""
    return [
        *_label_noise_errors(given),
        *_spread_errors(given),
        *_token_weight_errors(given),
        *_hidden_state_errors(given),
    ]


def _label_noise_errors(given: Any) -> list[str]:
    noise, example = given.label_noise, "Write label_noise: {false_positive: 0.02, false_negative: 0.1}."
    if noise is None:
        return []
    if not isinstance(noise, dict):
        return [f"label_noise must be a mapping, got {noise!r}. {example}"]
    rates = [noise.get(name, 0.0) for name in NOISE]
    if not noise or set(noise) - set(NOISE):
        return [
            f"label_noise={noise!r} must have the keys false_positive and false_negative, and no others. {example}"
        ]
    if not all(isinstance(r, int | float) and not isinstance(r, bool) and 0 <= r < 1 for r in rates):
        return [
            f"label_noise={noise!r} must have rates of at least 0 and below 1: shares of wrong verdicts. {example}"
        ]
    if sum(rates) >= 1:
        return [
            f"label_noise={noise!r}: the rates sum to {sum(rates):g}, and must sum to less than 1. At 1 a verdict says nothing "
            "about the truth, and above it the opposite. Mend the verifier."
        ]
    errors = []
    if not any(rates):
        errors.append(f"label_noise={noise!r} would be ignored: it says that no verdict is wrong. Remove the key.")
    if given.guidance is not None:
        errors.append(
            f"label_noise makes no sense with guidance={given.guidance!r}: guided completions are kept where their verdict is right, "
            "so wrong verdicts among them do not average out. Remove one of them."
        )
    return errors


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
        "label_noise": "its rates are those of verdicts on outcomes, and say nothing of steps",
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
