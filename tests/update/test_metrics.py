"""Metrics of the implicit critic: by hand, and the logged ones against a recomputation from weights and rows."""

import math
from pathlib import Path

import pytest
import torch
from support.long_way import in_graph_step
from support.models import load_weights, logps_and_entropies, tiny_model
from support.rollouts import Replay, rows_of_update
from support.runs import Recorder, build_trainer

from pacs_trl.objective import group_scores
from pacs_trl.pacs_trainer import critic_metrics
from pacs_trl.update.groups import Groups
from pacs_trl.update.minibatch import scheduled_completions
from pacs_trl.update.token_weights import mismatch_metrics


pytestmark = pytest.mark.trains


NAN = float("nan")


def groups_of(labels, size):
    return Groups(labels, [row // size for row in range(len(labels))])


def test_critic_metrics_equal_those_worked_by_hand():
    """Two groups of three. Group 1 is mixed; group 2 has one class and a row without a verdict."""
    labels = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, NAN])
    proxies = torch.tensor([0.9, 0.3, -0.6, 2.0, -2.0, 7.0])
    scores = group_scores(proxies, labels, num_generations=3)
    # leave-one-out: 0.9 - (-0.15), 0.3 - 0.15, -0.6 - 0.6; group 2 has two rows: 2 - (-2), -2 - 2
    torch.testing.assert_close(scores, torch.tensor([1.05, 0.15, -1.2, 4.0, -4.0, 0.0]))
    metrics = critic_metrics(proxies, scores, groups_of(labels, 3))

    def sigmoid(x):
        return 1 / (1 + math.exp(-x))

    residuals = [1 - sigmoid(1.05), sigmoid(0.15), sigmoid(-1.2), 1 - sigmoid(4), 1 - sigmoid(-4)]
    expected = {
        "pacs/score_mean": 0.0,  # leave-one-out scores of a group sum to 0
        "pacs/score_std": math.sqrt((1.05**2 + 0.15**2 + 1.2**2 + 4**2 + 4**2) / 4),
        "pacs/proxy_abs_mean": (0.9 + 0.3 + 0.6 + 2.0 + 2.0) / 5,
        "pacs/residual_abs_mean": sum(residuals) / 5,
        "pacs/label_mean": 3 / 5,
        "pacs/critic_accuracy": 2 / 3,  # of group 1: 1.05 right, 0.15 wrong, -1.2 right
        "pacs/critic_brier": sum(r**2 for r in residuals[:3]) / 3,
        "pacs/uniform_group_fraction": 1 / 2,
        "pacs/saturated_score_fraction": 0.0,
        "pacs/unscorable_fraction": 1 / 6,
    }
    assert metrics == pytest.approx(expected, abs=1e-6)
    # scores 5.5, -5.5, -8, 8: saturated on both sides
    scores = torch.tensor([5.5, -5.5, -8.0, 8.0])
    for divisor, share in ((1, 1.0), (1.5, 0.5)):
        metrics = critic_metrics(scores, scores / divisor, groups_of(torch.tensor([1.0, 0.0, 1.0, 0.0]), 2))
        assert metrics["pacs/saturated_score_fraction"] == share


def test_soft_labels_are_rated_against_the_targets_of_their_weighting():
    # group mean 0.1: balanced targets are y = R / 0.1 / (R / 0.1 + (1 - R) / 0.9) = 0.321, 0.529, 0.609
    labels, proxies = torch.tensor([0.05, 0.111, 0.139]), torch.tensor([-0.4, 0.1, 0.3])
    scores = group_scores(proxies, labels, num_generations=3)
    metrics = critic_metrics(proxies, scores, groups_of(labels, 3))
    odds = labels / (1 - labels) * 9
    residuals = torch.sigmoid(scores) - odds / (1 + odds)
    assert metrics["pacs/critic_accuracy"] == 1.0  # the score is above 0 exactly where the label is above the mean
    assert metrics["pacs/residual_abs_mean"] == pytest.approx(residuals.abs().mean().item(), abs=1e-6)
    assert metrics["pacs/critic_brier"] == pytest.approx(residuals.square().mean().item(), abs=1e-6)
    assert metrics["pacs/label_mean"] == pytest.approx(0.1)
    plain = critic_metrics(proxies, scores, groups_of(labels, 3), class_weighting="none")
    assert plain["pacs/critic_accuracy"] == pytest.approx(1 / 3)  # no label is above 0.5


NO_VALUE = {  # labels, proxies, and the metrics that still have a value
    "all proxies 0": ([1.0, 0.0], [0.0, 0.0], {"pacs/residual_abs_mean": 0.5}),
    "uniform group": ([1.0, 1.0], [0.5, -0.5], {"pacs/uniform_group_fraction": 1.0}),
    "nothing scorable": ([NAN, 1.0], [1.0, 1.0], {"pacs/unscorable_fraction": 1.0}),
}


@pytest.mark.parametrize(("labels", "proxies", "values"), NO_VALUE.values(), ids=NO_VALUE)
def test_critic_is_not_rated(labels, proxies, values):
    labels, proxies = torch.tensor(labels), torch.tensor(proxies)
    metrics = critic_metrics(proxies, group_scores(proxies, labels, num_generations=2), groups_of(labels, 2))
    assert math.isnan(metrics["pacs/critic_accuracy"]) and math.isnan(metrics["pacs/critic_brier"])
    assert metrics.items() >= values.items()
    if "pacs/unscorable_fraction" in values:
        assert all(math.isnan(value) for name, value in metrics.items() if name not in values)


@pytest.mark.parametrize("group_layout", ["whole", "split"])
def test_logged_metrics_equal_their_recomputation(tmp_path, group_layout):
    replay, recorder = Replay(unverifiable=0.2), Recorder()
    trainer = build_trainer(
        tmp_path,
        replay=replay,
        more={"callbacks": [recorder]},
        group_layout=group_layout,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    for update in range(2):
        _, rows = rows_of_update(replay, trainer.args, update)
        step = in_graph_step(tiny_model().double(), replay, trainer.args, update, recorder.weights, replay.weights)
        labels = torch.tensor([NAN if row.label is None else row.label for row in rows])
        scores = group_scores(step.proxies, labels, num_generations=4)
        expected = critic_metrics(step.proxies, scores, groups_of(labels, 4))
        metrics = {name: NAN if logged[update][name] is None else logged[update][name] for name in expected}
        assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6, nan_ok=True)
        norm = math.sqrt(sum(g.square().sum().item() for g in step.gradients.values()))
        assert logged[update]["grad_norm"] == pytest.approx(norm, rel=1e-5)
    # in the first update, rows of one-class groups and rows without a verdict have no gradient and are not computed
    _, rows = rows_of_update(replay, trainer.args, 0)
    labels = [[row.label for row in rows[i : i + 4]] for i in (0, 4)]
    counting = sum(sum(v is not None for v in group) for group in labels if {0.0, 1.0} <= set(group))
    assert 0 < counting < 8
    assert logged[0]["update/forwarded_fraction"] == counting / 8
    glossary = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    lines = "".join(line.split("|")[1] for line in glossary.splitlines() if line.startswith("| `"))
    names = {
        name for name in logged[0] if name.startswith(("pacs/", "update/", "time/", "entropy", "loss", "grad_norm"))
    }
    names |= mismatch_metrics(torch.zeros(1), torch.ones(1)).keys()
    assert len(names) > 20 and not [name for name in names if f"`{name}`" not in lines]


@pytest.mark.parametrize("group_layout", ["whole", "split"])
def test_entropy_is_the_mean_over_the_tokens_of_all_completions(tmp_path, group_layout):
    """Also of those that the update leaves out: a group of one class on the first update, rows without a verdict."""
    replay, recorder = Replay(tools=True, unverifiable=0.2), Recorder()
    settings = {"steps_per_generation": 2, "group_layout": group_layout}
    if group_layout == "split":
        settings["max_tokens_per_micro_batch"] = 40
    trainer = build_trainer(tmp_path, replay=replay, more={"callbacks": [recorder]}, **settings)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert logged[0]["update/forwarded_fraction"] < 0.7
    assert logged[0]["pacs/forwarded_fraction"] == logged[0]["update/forwarded_fraction"]  # its former name
    model = tiny_model()
    for update in range(2):
        _, rows = rows_of_update(replay, trainer.args, update)
        load_weights(model, recorder.weights[update])
        expected = [logps_and_entropies(model, row)[1][torch.tensor(row.env_mask).bool()] for row in rows]
        assert logged[update]["entropy"] == pytest.approx(torch.cat(expected).mean().item(), rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "reported", "update", "used"),
    [
        ({}, -2.0, 0, True),
        ({"temperature": 0.7}, -2.0, 0, True),
        ({"top_p": 0.9}, -2.0, 0, False),  # not the policy's own distribution
        ({}, None, 0, False),  # the engine could not say
        ({}, -2.0, 1, False),  # the policy has moved on
    ],
)
def test_entropy_of_rows_left_out_is_that_which_the_engine_sampled(tmp_path, settings, reported, update, used):
    trainer = build_trainer(
        tmp_path, replay=Replay(uniform_groups=1, tools=True, logprobs=reported), num_iterations=2, **settings
    )
    entropies = []
    compute = trainer.update._skipped_entropy

    def remember(model, minibatch, schedule, timing):
        skipped = [row for i, row in enumerate(minibatch.rollouts) if i not in scheduled_completions(schedule)]
        entropy = compute(model, minibatch, schedule, timing)
        entropies.append((entropy, sum(int(row.loss_mask.sum()) for row in skipped)))
        return entropy

    trainer.update._skipped_entropy = remember
    trainer.train()
    entropy, num_tokens = entropies[update]
    assert bool(num_tokens) is (update == 0)
    assert (entropy == pytest.approx(2.0 * num_tokens, rel=1e-6)) is (used or not num_tokens)
