"""The task with many answers: exact probabilities, the verifier, metrics at equal pass@1, runs that continue."""

import pytest
import torch
from support.optional_packages import matplotlib  # noqa: F401 (skips without it)

from experiments import many_answers, many_answers_tables
from experiments.many_answers import NONE, Arm, answer_logps, answers, build, correct, generate, problems, token_logps


def test_the_verifier_accepts_every_sum():
    """4 without the term 3: 1+3 is forbidden, 4 has one term, 1+1 is another number."""
    completions = torch.tensor([[2, 2, 0, 0, 0], [1, 1, 2, 0, 0], [1, 3, 0, 0, 0], [4, 0, 0, 0, 0], [1, 1, 0, 0, 0]])
    prompts = torch.tensor([[NONE + 4, 3, NONE]]).expand(5, -1)
    assert correct(prompts, completions).tolist() == [True, True, False, False, False]
    assert len(answers()) == 3906 and [len(part) for part in problems()] == [190, 47]


def test_probabilities_of_all_answers_are_exact():
    policy, prompts = build([0, 1]), problems()[1][:3]
    logps = answer_logps(policy, prompts)
    torch.testing.assert_close(logps.exp().sum(dim=2), torch.ones(2, 3), rtol=1e-5, atol=0)
    some = answers()[::400]
    alone = token_logps(policy, prompts[:1].expand(2, len(some), -1), some.expand(2, -1, -1)).sum(dim=2)
    torch.testing.assert_close(alone, logps[:, 0, ::400], rtol=1e-4, atol=1e-4)
    torch.manual_seed(0)
    sampled = generate(policy, prompts[:1].expand(2, 4000, -1))
    ended = (sampled[..., 0] == 0).float().mean(dim=1)  # the empty answer is the first
    torch.testing.assert_close(ended, logps[:, 0, 0].exp(), rtol=0, atol=0.04)  # five standard errors of 0.5


FIRST_UPDATES = [Arm("PACS"), Arm("PACS", reset=0), Arm("GRPO"), Arm("MaxRL"), Arm("REAL"), Arm("UCPO")]


@pytest.mark.parametrize("arm", [*FIRST_UPDATES, Arm("GRPO", gate=64)])
def test_a_first_update_prefers_correct_answers(arm):
    labels, mask = torch.tensor([1.0, *[0.0] * 7]), torch.ones(8, 5)
    tokens = {"log_ratios": torch.zeros(8, 5), "labels": labels, "mask": mask, "logps": -torch.ones(8, 5)}
    coefficients = many_answers.token_coefficients(arm, **tokens)
    assert (coefficients[0] < 0).all() and (coefficients[1:] > 0).all()
    if arm.method == "PACS":  # balanced class weights reverse the actor term (docs/method.md)
        reversed_signs = many_answers.token_coefficients(arm._replace(actor=1.0), **tokens)
        assert (reversed_signs[0] > 0).all() and (reversed_signs[1:] < 0).all()


def test_ucpo_moves_credit_to_improbable_correct_answers_and_a_gate_to_problems_that_are_rarely_solved():
    labels, mask = torch.tensor([1.0, 1.0, *[0.0] * 6, 1.0, *[0.0] * 7]), torch.ones(16, 5)
    logps = torch.full((16, 5), -1.0)
    logps[1] = -2.0
    tokens = {"log_ratios": torch.zeros(16, 5), "labels": labels, "mask": mask, "logps": logps}
    grpo, ucpo, gated = (
        many_answers.token_coefficients(arm, **tokens) for arm in (Arm("GRPO"), Arm("UCPO"), Arm("GRPO", gate=8))
    )
    assert (ucpo[1] < grpo[1]).all() and (ucpo[0] > grpo[0]).all() and torch.equal(ucpo[2:], grpo[2:])
    torch.testing.assert_close(ucpo[:2].sum(), grpo[:2].sum())
    torch.testing.assert_close(gated[:8], grpo[:8] * 7 / 14)  # (n - m) / (n - m + k - 1) for m = 1
    torch.testing.assert_close(gated[8:], grpo[8:])


def test_metrics_at_equal_pass_1():
    """pass@1 passes 40 % halfway between the measurements at 20 and 40 updates; the second seed does not reach it."""
    record = {name: [[0.1, 0.1], [0.3, 0.2], [0.5, 0.3]] for name in many_answers_tables.METRICS if name != "updates"}
    record |= {"seeds": [7, 8], "every": 20, "pass@64": [[1.0, 1.0], [0.9, 1.0], [0.7, 1.0]]}
    metrics = many_answers_tables.at_pass_1(record, 0.4)
    assert list(metrics) == [7]
    assert metrics[7]["pass@64"] == pytest.approx(0.8) and metrics[7]["updates"] == pytest.approx(30)


@pytest.mark.slow
def test_recorded_arms_are_not_trained_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(many_answers, "warm_start", build)
    wanted = [(Arm("PACS", reset=2), 1e-3), (Arm("GRPO", kl=0.1), 1e-3)]
    wanted += [(Arm("RLOO", minibatches=2, noise=0.5), 1e-3), (Arm("PACS", minibatches=2, breadth=True), 1e-3)]
    for _ in range(2):
        many_answers.train_missing(tmp_path, wanted, [0, 1], updates=2, every=1)
    records = many_answers.read_records(tmp_path)
    assert [record["arm"] for record in records] == [arm.name for arm, _ in wanted]
    assert capsys.readouterr().out.count("pass@1") == 4
    assert records[0]["pass@1"][0] == records[1]["pass@1"][0] != records[0]["pass@1"][2]
