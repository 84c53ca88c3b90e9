"""What is refused of the settings of labels and of the weights of tokens and rows."""

import math

import pytest
from replay import MAX_COMPLETION_LENGTH, config


STEER = {"token_weighting": "steer"}
LINEAR = STEER | {"token_weight_mapping": "linear"}
VERL = {"row_weighting": "verl"}
STRIDE = {"hidden_state_stride": 3}
HINTS = {"guidance": "hint", "max_guided_fraction": 0.5}


REFUSED = {
    "STEER, unknown": ({"token_weighting": "vespo"}, "token_weighting must be one of steer; got 'vespo'"),
    "STEER, weight 0": (STEER | {"token_weight_min": 0.0}, "token_weight_min must be above 0 and below 2, got 0.0"),
    "STEER, weight 2": (LINEAR | {"token_weight_max": 2.0}, "token_weight_max must be .* got 2.0"),
    "STEER, NaN": (STEER | {"token_weight_min": math.nan}, "token_weight_min must be .* got nan"),
    "STEER, ignored": ({"token_weight_min": 0.5}, "token_weight_min=0.5 would be ignored without"),
    "STEER, no maximum": (
        STEER | {"token_weight_max": 1.5},
        "token_weight_max=1.5 would be ignored with token_weight_mapping='exp",
    ),
    "STEER, exponential": (STEER | {"token_weight_min": 1.1}, "token_weight_min=1.1 must be below 1"),
    "STEER, order": (LINEAR | {"token_weight_min": 1.2}, "token_weight_min=1.2 must be below token_weight_max=1.2"),
    "VERL, unknown": ({"row_weighting": "rank"}, "row_weighting must be one of verl, verl_last_token; got 'rank'"),
    "VERL on last tokens, STEER": (
        STEER | {"row_weighting": "verl_last_token"},
        "row_weighting='verl_last_token' makes no sense",
    ),
    "VERL, ignored stride": (STRIDE, "hidden_state_stride=3 would be ignored without row_weighting"),
    "VERL, ignored rows": (STRIDE | VERL | {"hidden_state_rows": 8}, "hidden_state_rows=8 would be ignored"),
    "VERL, ignored steps": (
        STRIDE | VERL | {"hidden_state_every_steps": 2},
        "hidden_state_every_steps=2 would be ignored with row_weighting='verl'",
    ),
    "VERL, stride 0": (VERL | {"hidden_state_stride": 0}, "hidden_state_stride must be .*, got 0"),
    "VERL, stride of a whole completion": (
        VERL | {"hidden_state_stride": 8},
        "hidden_state_stride=8 is too long for completions of max_completion_length=16 tokens.* at most 7",
    ),
}


@pytest.mark.parametrize(("settings", "words"), REFUSED.values(), ids=REFUSED)
def test_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        config("out", **settings)


def test_the_last_legal_values():
    assert 2 * 7 + 1 <= MAX_COMPLETION_LENGTH and config("out", row_weighting="verl", hidden_state_stride=7)
