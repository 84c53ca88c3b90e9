"""Effective ranks and VERL: the authors' vectors, cases on paper, singular values by torch, properties, and runs."""

import json
import math
from pathlib import Path

import pytest
import torch
from support.models import RELATIVE, load_weights, logps_and_entropies, relative_error, tiny_model
from support.rollouts import Replay, rows_of_update
from support.runs import Recorder, build_trainer, out_of_memory_in, spy_on
from support.seeds import shifted

from pacs_trl.experimental import verl
from pacs_trl.experimental.verl import (
    VERLTrainer,
    effective_rank,
    hidden_states,
    rank_velocity_and_acceleration,
    verl_coefficients,
)
from pacs_trl.update.forward_pass import ForwardPass, fused_head


VECTORS = json.loads((Path(__file__).parents[1] / "data" / "steer_and_verl_vectors.json").read_text())
CASES = VECTORS["effective_rank"]


@pytest.mark.parametrize("vector", CASES, ids=lambda v: f"{len(v['hidden_states'])} tokens, stride {v['stride']}")
def test_ranks_equal_those_of_the_authors_code(vector):
    states = torch.tensor(vector["hidden_states"])
    assert effective_rank(states) == pytest.approx(vector["effective_rank"][0], rel=1e-5)
    # Their Gram matrices are float32, in which each eigenvalue that should be 0 adds a singular value of about 3e-4 of
    # the largest, and a prefix of n tokens has n - D of them: their ranks are up to 0.03 too high.
    actual = rank_velocity_and_acceleration(states, vector["stride"])
    assert actual == pytest.approx((vector["velocity"], vector["acceleration"]), abs=0.015)


def test_ranks_equal_those_worked_by_hand():
    # mean (0, 0); singular values sqrt(2), sqrt(2): shares 1/2, 1/2, exp(ln 2) = 2
    square = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    assert effective_rank(square) == pytest.approx(2.0, abs=1e-6)
    assert effective_rank(torch.tensor([[1.0, 2.0], [3.0, 6.0], [-1.0, -2.0]])) == pytest.approx(1.0, abs=1e-6)
    # stride 1: prefixes of 2, 3 and 4 tokens. 2 tokens span one direction: E_1 = 1, and E_3 = 2. The first three
    # centred have the Gram matrix of (1, 0), (-1, 0), (0, 1): eigenvalues 2 and 2/3, singular values in the ratio
    # sqrt(3) : 1
    shares = [math.sqrt(3) / (1 + math.sqrt(3)), 1 / (1 + math.sqrt(3))]
    second = math.exp(-sum(p * math.log(p) for p in shares))
    first, last = second - 1, 2 - (1 + second) / 2
    assert rank_velocity_and_acceleration(square, 1) == pytest.approx(((first + last) / 2, last - first), abs=1e-6)


@pytest.mark.parametrize(("num_tokens", "width", "strides"), [(40, 6, (2, 3)), (6, 40, (2, 3)), (600, 4, (29,))])
def test_ranks_of_prefixes_equal_those_by_singular_values(num_tokens, width, strides):
    generator = torch.Generator().manual_seed(shifted(0))
    states = torch.randn(num_tokens, width, generator=generator, dtype=torch.float64) * torch.logspace(0, -2, width)

    def by_svd(z):
        p = torch.linalg.svdvals(z - z.mean(dim=0))
        p = p / p.sum()
        return math.exp(-torch.special.xlogy(p, p).sum().item())

    assert effective_rank(states) == pytest.approx(by_svd(states), rel=1e-6)
    for stride in strides:
        seen = states[-512:]
        ranks = [by_svd(seen[: t + 1]) for t in range(stride, len(seen), stride)]
        differences = [ranks[j] - sum(ranks[:j]) / j for j in range(1, len(ranks))]
        second = [b - a for a, b in zip(differences, differences[1:])]
        expected = sum(differences) / max(1, len(differences)), sum(second) / max(1, len(second))
        # of a Gram matrix, in which each of up to 508 eigenvalues that should be 0 is a singular value of about 1e-8
        assert rank_velocity_and_acceleration(states, stride) == pytest.approx(expected, abs=1e-4)


def test_ranks_do_not_change_with_rotation_and_short_completions_have_no_velocity():
    generator = torch.Generator().manual_seed(shifted(1))
    states = torch.randn(30, 8, generator=generator)
    rotation = torch.linalg.qr(torch.randn(8, 8, generator=generator)).Q
    assert effective_rank(states @ rotation * 3 + 5) == pytest.approx(effective_rank(states), rel=1e-5)
    for tokens in (0, 1):
        assert effective_rank(states[:tokens]) == 1.0 and rank_velocity_and_acceleration(states[:tokens], 5) == (0, 0)
    assert rank_velocity_and_acceleration(states[:10], 5) == (0.0, 0.0)  # one prefix
    assert rank_velocity_and_acceleration(states[:15], 5)[1] == 0.0  # two
    assert 0.0 not in rank_velocity_and_acceleration(states[:16], 5)  # three


COEFFICIENTS = torch.tensor([-0.25, 0.25, -0.05, 0.0])
RANKS = torch.tensor([[6.0, 2.0, 4.0, 99.0], [1.5, 0.5, 1.0, 99.0], [0.0, 0.0, 0.0, 99.0]])


def test_bonus_equals_that_worked_by_hand():
    # Means begin at the first step's: 4, 1, 0. Completion 0: deviations 1/2, 1/2, 0, so t = 1/2 and Phi = tanh(1/2) =
    # 0.462; A = 1 may grow by 1/2. Completion 1: Phi < 0. Completion 2: Phi = 0. Completion 3 is ignored.
    actual, means = verl_coefficients(COEFFICIENTS, RANKS, 4, None)
    assert actual.tolist() == pytest.approx([-(1 + math.tanh(0.5)) / 4, 0.25, -0.05, 0.0])
    assert means == pytest.approx([4.0, 1.0, 0.0])
    # Next step, twice as high: deviations of completion 0 are 2, 2, and of completion 1 0, 0:
    # A = 1 + min(tanh 2, 1/2); A = -1 + 0; A = 0.2 + min(tanh 1, 0.1)
    actual, means = verl_coefficients(COEFFICIENTS, 2 * RANKS, 4, means)
    assert actual.tolist() == pytest.approx([-1.5 / 4, 0.25, -0.075, 0.0])
    assert means == pytest.approx([0.7 * 4 + 0.3 * 8, 0.7 + 0.3 * 2, 0.0])
    unchanged, after = verl_coefficients(torch.zeros(3), torch.ones(3, 3), 3, means)
    assert torch.equal(unchanged, torch.zeros(3)) and after == means  # no completion has a gradient


def test_bounds_and_acceleration():
    generator, means = torch.Generator().manual_seed(shifted(0)), None
    coefficients = torch.randn(200, generator=generator) / 200
    pushed_up = coefficients < 0
    for _ in range(4):
        shaped, means = verl_coefficients(coefficients, 3 * torch.randn(3, 200, generator=generator) + 2, 200, means)
        factors = shaped / coefficients
        assert 1 <= factors[pushed_up].min() and factors[pushed_up].max() <= 1.5 + 1e-6
        assert 0.5 - 1e-6 <= factors[~pushed_up].min() and factors[~pushed_up].max() <= 1
    # Where the acceleration is high the rank decides (2: above its mean), where it is low the velocity (0: below)
    ranks = torch.tensor([[2.0, 2.0], [0.0, 0.0], [9.0, -9.0]])
    actual, _ = verl_coefficients(torch.tensor([-1.0, -1.0]), ranks, 1, [1.0, 1.0, 1.0])
    assert actual.tolist() == pytest.approx([-1.5, -1.0])


@pytest.mark.parametrize("packing", ["auto", "never"])
def test_hidden_states_are_those_of_each_row_alone(packing):
    model = tiny_model().eval()
    rows = [[5, 6, 7], [8], [5, 6, 7]], [[20, 21], [30, 31, 32, 33], []]
    with torch.no_grad(), fused_head(model):
        packed_states = hidden_states(ForwardPass(model, model.device, packing=packing), model, *rows)
        for states, prompt, completion in zip(packed_states, *rows, strict=True):
            expected_states = model.model(torch.tensor([prompt + completion])).last_hidden_state[0, len(prompt) :]
            torch.testing.assert_close(states, expected_states, rtol=1e-5, atol=1e-5)


@pytest.mark.trains
@pytest.mark.parametrize("tokens", ["all", "last"])
@pytest.mark.parametrize("group_layout", ["whole", "split"])
def test_gradient_equals_the_long_way(tmp_path, monkeypatch, group_layout, tokens):
    """The sum of log-probabilities by the coefficients that ranks have shaped, of all tokens or of the last one that
    the policy wrote, in float64; rows that do not count stay out."""
    last = tokens == "last"
    replay, recorder, kept = Replay(tools=last), Recorder(), []

    def keep(coefficients, *others):
        shaped, means = verl_coefficients(coefficients, *others)
        kept.append((coefficients, shaped, others[0][0]))
        return shaped, means

    monkeypatch.setattr(verl, "verl_coefficients", keep)
    settings = {"steps_per_generation": 2, "group_layout": group_layout, "bonus_tokens": tokens}
    settings |= {"trainer_class": VERLTrainer, "replay": replay, "more": {"callbacks": [recorder]}}
    settings["hidden_state_stride"] = 3
    trainer = build_trainer(tmp_path, **settings)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    model = tiny_model().double()
    for update, (coefficients, verl_values, ranks) in enumerate(kept):
        assert not torch.equal(verl_values, coefficients) and (verl_values == 0).equal(coefficients == 0)
        assert 0 < logged[update]["hidden/bonus"] <= 0.5
        load_weights(model, recorder.weights[update])
        model.zero_grad()
        _, rows = rows_of_update(replay, trainer.args, update)
        for row, coefficient, last_value, rank in zip(rows, coefficients, verl_values, ranks, strict=True):
            ids = torch.tensor([row.prompt_ids + row.completion_ids])
            is_sampled = torch.tensor(row.env_mask).bool() | (not last)
            states = model.model(ids).last_hidden_state[0, len(row.prompt_ids) :].detach()
            expected_rank = effective_rank(states[is_sampled]) if coefficient and is_sampled.any() else 0
            assert rank.item() == pytest.approx(expected_rank, rel=1e-4)
            logps = logps_and_entropies(model, row)[0][is_sampled]
            ((coefficient if last else last_value) * logps[:-1].sum() + last_value * logps[-1:].sum()).backward()
        expected = {name: p.grad.clone() for name, p in model.named_parameters() if name in recorder.gradients[update]}
        assert relative_error(recorder.gradients[update], expected) < 2 * RELATIVE
    assert trainer.verl_means is not None and len(kept) == 2


def test_a_completion_without_tokens_of_the_policy_does_not_enter_the_means(tmp_path):
    def without_tokens(generation, rows):
        rows[5].env_mask = [0] * len(rows[5].completion_ids)
        return rows

    replay, measured = Replay(tools=True, edit=without_tokens), []
    settings = {"trainer_class": VERLTrainer, "replay": replay, "hidden_state_stride": 3, "max_steps": 1}
    trainer = build_trainer(tmp_path, **settings)
    spy_on(trainer.update, "ranks", lambda *call: measured.append(call))
    trainer.train()
    ((ranks, _, minibatch, indices),) = measured
    with_tokens = [i for i, row in enumerate(minibatch.rollouts) if row.group == 1 and row.loss_mask.any()]
    assert indices == with_tokens and len(indices) == 3  # group 0 is uniform
    means = ranks[:, indices].mean(dim=1).tolist()
    assert trainer.verl_means == pytest.approx(means, abs=1e-6)
    assert trainer.state.log_history[0]["hidden/effective_rank"] == pytest.approx(means[0])


def test_running_means_of_the_abandoned_attempt_do_not_count(tmp_path):
    """The second update reads the means after the first, and fails once."""
    runs = []
    for fails in (False, True):
        settings = {"trainer_class": VERLTrainer, "hidden_state_stride": 3}
        trainer = build_trainer(tmp_path, replay=Replay(uniform_groups=0), **settings)
        if fails:
            out_of_memory_in(trainer, 2)
        trainer.train()
        norms = [log["grad_norm"] for log in trainer.state.log_history if "loss" in log]
        runs.append((trainer.verl_means, norms))
    (means, norms), (means_again, norms_again) = runs
    assert means_again == pytest.approx(means, rel=1e-5)
    assert norms_again == pytest.approx(norms, rel=1e-4)
