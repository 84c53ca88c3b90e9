"""STEER: the authors' vectors, a case on paper, loops, properties, and runs that go on from a checkpoint."""

import json
import math
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from support.long_way import TWO_UPDATES, train_and_compare
from support.rollouts import Replay
from support.seeds import shifted

from pacs_trl.experimental.steer import STEERTrainer, SteerWeights, entropy_sensitivities, steer_weights
from pacs_trl.update.token_weights import TokenValues


VECTORS = json.loads((Path(__file__).parents[1] / "data" / "steer_and_verl_vectors.json").read_text())["steer"]
VALUES = ("logps", "old_logps", "entropies", "advantages", "mask")


def test_weights_equal_those_of_the_authors_code():
    for vector in VECTORS:
        *values, advantages, mask = (torch.tensor(vector[name]) for name in VALUES)
        kinds = {name: vector[name] for name in ("mapping", "weight_min", "weight_max")}
        expected, counted = torch.tensor(vector["weights"]), mask.bool()
        for shaped_advantages in (advantages, advantages[:, None].expand_as(mask)):  # per completion, per token
            weights = steer_weights(*values, shaped_advantages, mask, **kinds)
            torch.testing.assert_close(weights[counted], expected[counted], rtol=2e-6, atol=0)
    assert {vector["mapping"] for vector in VECTORS} == {"linear", "exponential"}


LN2 = math.log(2.0)
ON_PAPER = (
    # p = 1/2, 1/2, 1/4, where p_old = 1/2 and H = ln 2, 2 ln 2, 1 + 2 ln 2:
    # slopes (1/4)(0) / (1/2) = 0, (1/4)(ln 2) / (1/2) = ln 2 / 2, (3/16)(1) / (1/2) = 3/8
    torch.tensor([[0.5, 0.5, 0.25, 0.9]], dtype=torch.float64).log(),
    torch.full((1, 4), -LN2, dtype=torch.float64),
    torch.tensor([[LN2, 2 * LN2, 1 + 2 * LN2, 5.0]], dtype=torch.float64),
    torch.tensor([-2.0], dtype=torch.float64),
    torch.tensor([[1, 1, 1, 0]]),
)


def test_sensitivities_and_weights_equal_those_worked_by_hand():
    slopes = entropy_sensitivities(*ON_PAPER[:3], ON_PAPER[4])
    torch.testing.assert_close(slopes, torch.tensor([[0.0, LN2 / 2, 0.375, 0.0]], dtype=torch.float64))
    # changes 0, ln 2 and 3/4: exponential .8^0, .8^(ln 2 / .75), .8^1; linear 1.2 - .4 * change / .75
    weights = steer_weights(*ON_PAPER)[0, :3]
    assert weights.tolist() == pytest.approx([1.0, 0.8 ** (LN2 / 0.75), 0.8])
    weights = steer_weights(*ON_PAPER, mapping="linear")[0, :3]
    assert weights.tolist() == pytest.approx([1.2, 1.2 - 0.4 * LN2 / 0.75, 0.8])
    # small changes do not make the exponential steeper: .8^(change / .02)
    weights = steer_weights(*ON_PAPER[:3], ON_PAPER[3] / 200, ON_PAPER[4])[0, :3]
    assert weights.tolist() == pytest.approx([1, 0.8 ** (LN2 / 200 / 0.02), 0.8 ** (0.00375 / 0.02)])


def test_weights_ignore_the_sign_of_advantages_and_parts_have_those_of_the_whole():
    """The sign of an advantage does not matter; parts of a step have the weights of the whole if they know its
    extremes; no change, and no token at all, have a weight."""
    generator = torch.Generator().manual_seed(shifted(0))
    logps, old_logps = (-3 * torch.rand(6, 5, generator=generator) for _ in range(2))
    entropies, advantages = 2 * torch.rand(6, 5, generator=generator), torch.randn(6, generator=generator)
    mask = torch.rand(6, 5, generator=generator) > 0.3
    values = logps, old_logps, entropies, advantages, mask
    changes = (advantages[:, None] * entropy_sensitivities(logps, old_logps, entropies, mask)).abs()[mask]
    extremes = changes.min().item(), changes.max().item()
    for mapping in ("exponential", "linear"):
        whole = steer_weights(*values, mapping=mapping)
        assert torch.equal(steer_weights(*values[:3], -advantages, mask, mapping=mapping), whole)
        parts = [steer_weights(*(v[i : i + 2] for v in values), mapping=mapping, extremes=extremes) for i in (0, 2, 4)]
        assert torch.equal(torch.cat(parts)[mask], whole[mask])
        assert steer_weights(*values[:3], torch.zeros(6), mask, mapping=mapping)[mask].unique().item() == 1.0
        assert steer_weights(*values[:4], torch.zeros(6, 5), mapping=mapping).isfinite().all()
    broken = logps.clone().fill_(math.nan)
    assert (steer_weights(broken, *values[1:])[mask] == 1.0).all()


def test_metrics_equal_those_worked_by_hand():
    """The tokens of `ON_PAPER` as two micro-batches, A = -2 and N = 4; a row without a coefficient counts for the
    extremes alone."""
    logps, old_logps, entropies, _, mask = (x.float() for x in ON_PAPER)
    coefficients, slopes = torch.tensor([0.5, 0.0]), torch.tensor([[0.0, 0.0], [0.375, 0.0]])
    steer = SteerWeights()
    steer.begin(coefficients, slopes, torch.tensor([True, True]), 4)
    assert steer.extremes == (0.0, 0.75)
    for part in (mask * torch.tensor([1, 0, 1, 0]), mask * torch.tensor([0, 1, 0, 0])):
        values = logps, old_logps, torch.zeros_like(logps), entropies + 0.5, entropies, coefficients[:1], part.bool()
        steer(TokenValues(*values))
    steer(TokenValues(*values[:5], coefficients[1:], part.bool()))
    metrics = steer.metrics(Accelerator(cpu=True))
    assert metrics == pytest.approx({"steer/weight_mean": (1 + 0.8 ** (LN2 / 0.75) + 0.8) / 3}, rel=1e-5)


def test_completions_without_tokens_have_no_sensitivities():
    """As a micro-batch of masked completions alone, whose routers are read; `begin` does not count them."""
    empty, mask = torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.bool)
    tokens = TokenValues(empty, empty, empty, empty, empty, torch.zeros(2, 1), mask)
    smallest, largest = SteerWeights().completion_values(tokens)
    assert smallest.tolist() == [math.inf] * 2 and largest.tolist() == [0.0] * 2


STEER = {"token_weight_min": 0.5, "max_steps": 4, "trainer_class": STEERTrainer}
LINEAR = {"token_weight_mapping": "linear", "token_weight_max": 1.5}


@pytest.mark.trains
@pytest.mark.parametrize(
    "settings",
    [
        {"group_layout": "whole"},
        {"group_layout": "split", "packing": "never", **LINEAR},
        {"reference": "snapshot", "reference_reset_steps": 3, "actor_term_coef": 0.5, **LINEAR},
        {"proxy": "mean_logp", "num_iterations": 2, "pacs_beta": 4.0},
        {"max_tokens_per_micro_batch": 30, "tools": True, "pacs_beta": 4.0},
    ],
    ids=str,
)
def test_gradient_equals_the_long_way(tmp_path, settings):
    """Weights depend on the extremes of the whole step, whatever its micro-batches, and on the policy that
    generated."""
    replay = Replay(tools=settings.pop("tools", False), unverifiable=0.1)
    trainer, _ = train_and_compare(tmp_path, replay, **(TWO_UPDATES | STEER | settings))
    largest = 1.5 if trainer.args.token_weight_mapping == "linear" else 1
    assert all(0.5 < entry["steer/weight_mean"] < largest for entry in trainer.state.log_history[:4])
