"""The pure parts of the two analyses."""

from statistics import mean

import pytest
import torch
from optional_packages import matplotlib  # noqa: F401 (skips without it)
from replay import build_trainer
from seeds import shifted
from tolerances import rounding_atol

from experiments import adaptive_rules, methods
from experiments.adaptive_rules import next_beta, renewal_is_due
from experiments.beta_and_reference import references
from experiments.gradient_variance import (
    VARIANTS,
    Batch,
    group_gradients,
    largest_share,
    noise_share,
)
from experiments.paper.records import Records
from experiments.studies import running_mean
from pacs_trl.miniature.model import build_model
from pacs_trl.update.logps import sequence_logps
from pacs_trl.update.reference import SnapshotReference


def test_noise_share_of_two_gradients_by_hand():
    # mean (2, 0); deviations (-1, 1), (1, -1): trace of the covariance (2 + 2) / 1 = 4; 4 / 2 / |mean|^2 = 2 / 4
    assert noise_share(torch.tensor([[1.0, 1.0], [3.0, -1.0]])) == pytest.approx(0.5)


def test_noise_share_is_free_of_scale_and_finds_the_true_one():
    # mean 0.3 and standard deviation 2 along 5 axes, 100 gradients: 5 * 4 / 100 of noise on 5 * 0.09 of signal
    gradients = 0.3 + 2.0 * torch.randn(2_000, 100, 5, generator=torch.Generator().manual_seed(shifted(0)))
    noise, lengths = zip(
        *((noise_share(g) * g.mean(0).square().sum(), g.mean(0).square().sum()) for g in gradients), strict=True
    )
    assert sum(noise) / sum(lengths) == pytest.approx(0.2 / (0.2 + 0.45), rel=0.03)
    assert noise_share(1e-3 * gradients[0]) == pytest.approx(noise_share(gradients[0]), rel=1e-5)


def test_largest_share():
    assert largest_share(torch.tensor([[3.0, 0.0], [0.0, 1.0]])) == pytest.approx(0.9)


def test_running_mean_starts_with_what_there_is():
    assert running_mean([2.0, 4.0, 6.0, 8.0], 3) == [2.0, 3.0, 4.0, 6.0]


def test_references_are_settings_of_the_recipe():
    assert list(references(None)) == ["rollout", "snapshot, kept"]
    assert references(40)["snapshot, renewed every 40"][-2:] == ["--reference_reset_steps", "40"]


@pytest.fixture(scope="module")
def groups(tokenizer):
    generator = torch.Generator().manual_seed(shifted(1))
    ids = torch.randint(0, 200, (24, 12), generator=generator)
    prompts, completions = ids[:, :5].tolist(), ids[:, 5:].tolist()
    completions[3] = completions[3][:5]
    labels = (torch.rand(24, generator=generator) < 0.5).float()
    labels[8:16] = 0.0  # a group of one class
    return build_model(tokenizer, "tiny", seed=shifted(0)).eval(), Batch(prompts, completions, labels)


def test_sequence_logps_against_a_loop(groups):
    model, batch = groups
    with torch.no_grad():
        logps = sequence_logps(model, *batch.rows(slice(2, 4)))
        for row, length in ((2, 12), (3, 10)):
            ids, total = batch.prompt_ids[row] + batch.completion_ids[row], 0.0
            assert len(ids) == length
            for t in range(5, length):
                logits = model(input_ids=torch.tensor([ids[:t]])).logits[0, -1]
                total += logits.double().log_softmax(-1)[ids[t]].item()
            assert logps[row - 2].item() == pytest.approx(total, rel=1e-5)


def test_rloo_with_rescaled_beta_is_dr_grpo(groups):
    model, batch = groups
    proxies = torch.randn(24, generator=torch.Generator().manual_seed(shifted(2)))
    gradients = group_gradients(model, batch, proxies)
    assert {g.shape[0] for g in gradients.values()} == {2} and list(gradients) == list(VARIANTS)
    # one weight adds up 8 rows of 11 predicted tokens
    close = {"rtol": 0.0, "atol": rounding_atol(8 * 11, gradients["dr_grpo"].norm(dim=1).max().item())}
    torch.testing.assert_close(gradients["rloo, beta x 7/8"], gradients["dr_grpo"], **close)
    assert (gradients["rloo"] - gradients["dr_grpo"]).norm() > 0.01 * gradients["rloo"].norm()
    # equal proxies: the same direction, G / (G - 1) times as long; the score of GRPO does not divide
    gradients = group_gradients(model, batch, torch.zeros(24))
    torch.testing.assert_close(gradients["rloo"], 8 / 7 * gradients["dr_grpo"], **close)
    torch.testing.assert_close(gradients["grpo"], gradients["dr_grpo"], **close)


def test_rules_by_hand():
    assert [renewal_is_due(share) for share in (0.0, 0.05, 0.06)] == [False, False, True]
    # scores of half the spread want twice the beta; never more than that, never less than half, and nothing from zero
    # scores
    assert [next_beta(3.0, std) for std in (0.5, 0.1, 2.0, 50.0, 0.0, float("nan"))] == [6.0, 6.0, 1.5, 1.5, 3.0, 3.0]


@pytest.mark.trains
@pytest.mark.parametrize("arm", ["snapshot, beta 10, when saturated", "rollout, beta by spread"])
def test_rules_act(tmp_path, monkeypatch, arm):
    monkeypatch.setattr(adaptive_rules, "MAX_SATURATED", -1.0)
    monkeypatch.setattr(adaptive_rules, "SPREAD", 0.0)
    renewed, betas = [], []
    monkeypatch.setattr(SnapshotReference, "renew", lambda self: renewed.append(1))
    trainer_class, settings = adaptive_rules.ARMS[arm]
    spread = trainer_class is adaptive_rules.KeepSpread

    given = dict(zip([name.removeprefix("--") for name in settings[::2]], settings[1::2], strict=True))
    given["pacs_beta"] = float(given.get("pacs_beta", 1.0))
    trainer = build_trainer(tmp_path, trainer_class=trainer_class, steps_per_generation=4, max_steps=4, **given)
    update = trainer.update.run
    trainer.update.run = lambda *a, **k: betas.append(trainer.update.objective.pacs_beta) or update(*a, **k)
    trainer.train()
    # the first update of a rollout has no spread; the three after it halve beta each, the last one
    # unseen
    assert betas == ([1.0, 1.0, 0.5, 0.25] if spread else [10.0] * 4)
    assert len(renewed) == (0 if spread else 4)


def test_the_picture_of_the_methods(tmp_path, monkeypatch):
    """As many seeds of each method as the records have, and differences of runs with the same warm start."""
    monkeypatch.setattr("sys.argv", ["methods", "--output", str(tmp_path / "methods.png")])
    methods.main()
    assert (tmp_path / "methods.png").read_bytes().startswith(b"\x89PNG")
    (run,) = [run for run in Records(methods.RESULTS).runs("sums-1m/pacs", "PACS") if run.seed == 0]
    by_hand = mean(run.results["benchmarks"][f"miniature/terms_{n}"]["pass_at_k"]["8"]["value"] for n in range(3, 8))
    assert methods.pass_at(run, [1, 8])[1] == pytest.approx(100 * by_hand)
