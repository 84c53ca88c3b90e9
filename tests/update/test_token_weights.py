"""The correction of the mismatch between engine and trainer: by hand, by its properties, and by loops."""

import math

import numpy as np
import pytest
import torch
from support.seeds import shifted

from pacs_trl.update.token_weights import Mismatch, correction_weights, mismatch_metrics, mismatch_ratios


MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
LN2 = math.log(2.0)

# Two completions. Ratios per token: 2, 1/2, 4 and 8, (unknown), (not counted).
# Per completion: 2 * 1/2 * 4 = 4, and 8 (an unknown token is 1, one that is not counted does not enter).
LOGPS = torch.tensor([[-1.0 + LN2, -1.0 - LN2, -1.0 + 2 * LN2], [-1.0 + 3 * LN2, -7.0, -1.0 + 9 * LN2]])
SAMPLING = torch.tensor([[-1.0, -1.0, -1.0], [-1.0, math.nan, -1.0]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])


def metrics_of(logps, sampling_logps, mask, **settings):
    return mismatch_metrics(*mismatch_ratios(logps, sampling_logps, mask, Mismatch(**settings)))


BY_HAND = {
    # bounds 1 and 3:              2 in, 1/2 up to 1, 4 down to 3;   8 down to 3, unknown is 1
    "token_truncate": [[2.0, 1.0, 3.0], [3.0, 1.0]],
    "token_mask": [[2.0, 0.0, 0.0], [0.0, 1.0]],
    "sequence_truncate": [[3.0, 3.0, 3.0], [3.0, 3.0]],
    "sequence_mask": [[0.0, 0.0, 0.0], [0.0, 0.0]],
}


@pytest.mark.parametrize("mode", MODES)
def test_weights_equal_those_worked_by_hand(mode):
    weights = correction_weights(LOGPS, SAMPLING, MASK, Mismatch(mode=mode, clip_min=1.0, clip_max=3.0))
    assert weights[0].tolist() == pytest.approx(BY_HAND[mode][0]) and weights.dtype == torch.float32
    assert weights[1, :2].tolist() == pytest.approx(BY_HAND[mode][1])


def test_metrics_equal_those_worked_by_hand():
    """Differences ln 2 * (1, 1, 2, 3): mean 7/4 ln 2. Ratios 2, 1/2, 4, 8: sum 14.5."""
    metrics = metrics_of(LOGPS, SAMPLING, MASK, mode="token_mask", clip_max=3.0)
    assert metrics == pytest.approx(
        {
            "sampling/sampling_logp_difference/mean": 1.75 * LN2,
            "sampling/sampling_logp_difference/max": 3 * LN2,
            "sampling/importance_sampling_ratio/min": 0.5,
            "sampling/importance_sampling_ratio/mean": 14.5 / 4,
            "sampling/importance_sampling_ratio/max": 8.0,
        },
        rel=1e-6,
    )
    # Per completion: ratios 4 and 8.
    metrics = metrics_of(LOGPS, SAMPLING, MASK, mode="sequence_mask", clip_max=5.0)
    assert metrics["sampling/importance_sampling_ratio/mean"] == pytest.approx(6.0)


def random_batch(seed, rows=6, tokens=7):
    rng = np.random.default_rng(shifted(seed))
    logps = torch.from_numpy(-rng.exponential(2.0, (rows, tokens)))
    sampling = logps + torch.from_numpy(rng.normal(0.0, 0.4, (rows, tokens)))
    sampling[torch.from_numpy(rng.random((rows, tokens)) < 0.1)] = math.nan
    return logps, sampling, torch.from_numpy(rng.random((rows, tokens)) < 0.8)


@pytest.mark.parametrize("mode", MODES)
def test_equal_probabilities_change_nothing(mode):
    logps, _, mask = random_batch(0)
    weights = correction_weights(logps, logps.clone(), mask, Mismatch(mode=mode, clip_min=0.5, clip_max=2.0))
    assert torch.equal(weights, torch.ones_like(weights))
    metrics = metrics_of(logps, logps.clone(), mask, mode=mode)
    assert metrics["sampling/sampling_logp_difference/max"] == 0.0
    assert metrics["sampling/importance_sampling_ratio/mean"] == 1.0


def test_weights_carry_no_gradient():
    logps, sampling, mask = random_batch(1)
    weights = correction_weights(logps.requires_grad_(), sampling, mask, Mismatch(mode="token_truncate"))
    assert not weights.requires_grad


@pytest.mark.parametrize("bounds", [(None, 3.0), (0.8, 1.25), (0.5, None), (None, None)])
@pytest.mark.parametrize("mode", MODES)
def test_weights_and_metrics_equal_loops(mode, bounds):
    logps, sampling, mask = random_batch(2)
    low, high = bounds
    weights = correction_weights(logps, sampling, mask, Mismatch(mode=mode, clip_min=low, clip_max=high))
    everything = []
    for i in range(len(logps)):
        counted = [t for t in range(logps.shape[1]) if mask[i, t]]
        ratio = {t: math.exp(logps[i, t] - sampling[i, t]) for t in counted if not math.isnan(sampling[i, t])}
        if mode.startswith("sequence"):
            product = math.prod(ratio.values())
            everything += [product] if ratio else []
            ratio = dict.fromkeys(counted, product)
        else:
            everything += list(ratio.values())
        for t in counted:
            value = ratio.get(t, 1.0)
            if "truncate" in mode:
                value = min(max(value, low or 0.0), math.inf if high is None else high)
            elif (low is not None and value < low) or (high is not None and value > high):
                value = 0.0
            assert weights[i, t].item() == pytest.approx(value, rel=1e-6), (i, t)
    metrics = metrics_of(logps, sampling, mask, mode=mode, clip_min=low, clip_max=high)
    assert metrics["sampling/importance_sampling_ratio/min"] == pytest.approx(min(everything))
    assert metrics["sampling/importance_sampling_ratio/max"] == pytest.approx(max(everything))
    assert metrics["sampling/importance_sampling_ratio/mean"] == pytest.approx(sum(everything) / len(everything))


def test_metrics_are_undefined_without_log_probs_of_the_engine():
    nothing = torch.full((2, 3), math.nan)
    metrics = metrics_of(torch.zeros(2, 3), nothing, torch.ones(2, 3), mode="token_mask")
    assert all(math.isnan(value) for value in metrics.values())


@pytest.mark.parametrize(("gap", "truncated"), [(-5.0, 0.0), (5.0, 3.0)])
def test_ratios_too_large_or_small_for_floats_are_truncated_or_masked(gap, truncated):
    """Of 200 tokens: in float64 e^-1000 is 0 and e^1000 is infinite."""
    sampling_logps, mask = torch.full((2, 200), -1.0), torch.ones(2, 200, dtype=torch.bool)
    compared = sampling_logps.double() + gap, sampling_logps, mask
    for mode, expected in (("sequence_truncate", truncated), ("sequence_mask", 0.0)):
        weights = correction_weights(*compared, Mismatch(mode=mode, clip_max=3.0))
        assert torch.equal(weights, torch.full_like(weights, expected))
