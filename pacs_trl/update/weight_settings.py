"""Settings of labels: what is wrong between them."""

from typing import Any


def weight_errors(given: Any) -> list[str]:
    """What is wrong between these settings, a sentence for each; the argument as in [`PACSConfig.errors`]."""
    return _spread_errors(given)


def _spread_errors(given: Any) -> list[str]:
    draws = [name for name in ("guidance", "adaptive_rollouts", "refill_uniform_groups") if getattr(given, name)]
    if given.spread_filter is None or not draws:
        return []
    return [
        f"spread_filter={given.spread_filter} makes no sense with {draws[0]}: it judges groups when they are first drawn, and later draws "
        "would add to groups that it has dropped, or be judged one by one. Remove one of them."
    ]


def dense_label_errors(given: Any) -> list[str]:
    """Why these settings make no sense where a reward function labels completions in several places, a sentence for each."""
    outcomes = "it goes by the labels of outcomes, and steps may differ where outcomes are equal"
    reasons = {
        "score_estimator": "the score of a prefix is its proxy minus the mean of the aligned ones, which is 'rloo'",
        "actor_term_coef": "the actor term weighs a completion by the likelihood of its one label",
        "spread_filter": outcomes,
        "refill_uniform_groups": outcomes,
    }
    neutral = {"score_estimator": "rloo"}
    return [
        f"A reward function returned (position, label) pairs, which make no sense with {name}={value!r}: {reason}. Remove the key, or "
        "return numbers."
        for name, reason in reasons.items()
        if (value := getattr(given, name)) and value != neutral.get(name)
    ]
