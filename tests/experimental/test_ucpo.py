"""UCPO: a case on paper, loops, properties, and a run whose advantages are computed again from its first weights."""

import math

import pytest
import torch
from support.models import relative_error, tiny_model
from support.rollouts import Replay
from support.runs import Recorder, build_trainer, spy_on
from support.seeds import shifted

from pacs_trl import GRPOTrainer
from pacs_trl.experimental.ucpo import UCPOTrainer, ucpo_weights


def weights_by_loops(mean_logps, correct, num_generations, tau):
    """Blend equal shares of a group's advantage with shares proportional to 1 / q, in float64."""
    weights = [1.0] * len(mean_logps)
    for start in range(0, len(mean_logps), num_generations):
        members = [i for i in range(start, start + num_generations) if correct[i]]
        total = sum(math.exp(mean_logps[i]) for i in members)
        inverse = {i: total / math.exp(mean_logps[i]) for i in members}
        for i in members:
            share = (1 - tau) / len(members) + tau * inverse[i] / sum(inverse.values())
            weights[i] = len(members) * share
    return weights


def test_on_paper():
    # q = 1/2, 1/4, 1/4, so 1 / q = 2, 4, 4 with shares 1/5, 2/5, 2/5, times 3 completions: 0.6, 1.2, 1.2
    logps = torch.tensor([0.5, 0.25, 0.125, 0.25]).log()
    correct = torch.tensor([True, True, False, True])
    assert ucpo_weights(logps, correct, 4, 1.0).tolist() == pytest.approx([0.6, 1.2, 1.0, 1.2])
    assert ucpo_weights(logps, correct, 4, 0.5).tolist() == pytest.approx([0.8, 1.1, 1.0, 1.1])


def test_weights_equal_loops_keep_the_sum_of_a_group_and_are_positive():
    generator = torch.Generator().manual_seed(shifted(0))
    logps = -4 * torch.rand(40, generator=generator, dtype=torch.float64)
    correct = torch.rand(40, generator=generator) < 0.6
    correct[:8], correct[8:16] = False, True  # a group without a correct completion, and one of nothing else
    for tau in (0.0, 0.2, 1.0):
        weights = ucpo_weights(logps, correct, 8, tau)
        assert weights.tolist() == pytest.approx(weights_by_loops(logps.tolist(), correct.tolist(), 8, tau), rel=1e-12)
        sums = (weights * correct).view(-1, 8).sum(dim=1)
        torch.testing.assert_close(sums, correct.view(-1, 8).sum(dim=1).double(), rtol=1e-12, atol=0)
        assert (weights >= 1 - tau).all() and (weights > 0).all() and (weights[~correct] == 1).all()
        moved = ucpo_weights(logps + 3.0, correct, 8, tau)  # only the ratios of the probabilities count
        torch.testing.assert_close(moved, weights, rtol=1e-12, atol=0)
    order = logps[8:16].argsort()
    assert (ucpo_weights(logps, correct, 8, 0.2)[8:16][order].diff() <= 0).all()  # the improbable count more


def run(directory, trainer_class, replay=None, **changes):
    recorder = Recorder()
    settings = {"num_generations": 8, "per_device_train_batch_size": 16, "max_steps": 1} | changes
    trainer = build_trainer(
        directory,
        replay=replay or Replay(num_generations=8, uniform_groups=0),
        trainer_class=trainer_class,
        more={"callbacks": [recorder]},
        **settings,
    )
    advantages = []
    if trainer_class is UCPOTrainer:
        spy_on(trainer, "advantages", lambda result, batch, *_: advantages.append((result, dict(batch))))
    trainer.train()
    return recorder.gradients, advantages


def test_it_is_grpo_with_tau_0_and_weighs_advantages_under_the_generating_policy_otherwise(tmp_path):
    grpo, _ = run(tmp_path, GRPOTrainer)
    same, _ = run(tmp_path, UCPOTrainer, tau=0.0)
    other, ((advantages, batch),) = run(tmp_path, UCPOTrainer, tau=1.0)
    assert relative_error(same[0], grpo[0]) < 1e-6
    assert relative_error(other[0], grpo[0]) > 1e-3
    model, mean_logps = tiny_model().eval(), []
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    counted_masks = batch["tool_mask"] if "tool_mask" in batch else batch["completion_mask"]
    rows = zip(*(batch[name] for name in names), counted_masks, strict=True)
    for prompt, prompt_mask, completion, mask, counted in rows:
        prompt, completion = prompt[prompt_mask.bool()], completion[mask.bool()]
        with torch.no_grad():
            logits = model(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
        logps = logits.log_softmax(dim=1).gather(1, completion[:, None])[:, 0]
        mean_logps.append(logps[counted[mask.bool()].bool()].double().mean().item())
    correct = (batch["labels"] == 1).tolist()
    weights = torch.tensor(weights_by_loops(mean_logps, correct, 8, 1.0))
    expected = (weights * batch["advantages"]).float()
    torch.testing.assert_close(advantages, expected, rtol=1e-4, atol=1e-6, check_dtype=False)


def test_gradient_accumulation_changes_nothing(tmp_path):
    whole, _ = run(tmp_path, UCPOTrainer, tau=1.0)
    halves, _ = run(tmp_path, UCPOTrainer, tau=1.0, per_device_train_batch_size=8, gradient_accumulation_steps=2)
    assert relative_error(halves[0], whole[0]) < 1e-5


def test_unrewarded_completions_and_those_without_tokens_of_the_policy_take_no_part(tmp_path):
    """Their factor is 1, and the others keep the sum of the advantages of their group."""

    def edit(generation, rows):
        correct = [i for i, row in enumerate(rows) if row.label == 1]
        rows[correct[0]].env_mask = [0] * len(rows[correct[0]].completion_ids)
        rows[correct[1]].label = None
        return rows

    replay = Replay(num_generations=8, uniform_groups=0, tools=True, edit=edit)
    (gradients, *_), ((advantages, batch),) = run(tmp_path, UCPOTrainer, replay=replay, tau=1.0)
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    without_tokens = (batch["tool_mask"] * batch["completion_mask"]).sum(dim=1) == 0
    unrewarded = batch["labels"].isnan()
    assert without_tokens.any() and unrewarded.any()
    changed = advantages != batch["advantages"]
    assert changed.any() and not changed[without_tokens | unrewarded].any()
    sums, expected = (values.double().view(-1, 8).sum(dim=1) for values in (advantages, batch["advantages"]))
    torch.testing.assert_close(sums, expected, rtol=1e-5, atol=1e-5)


def test_rewards_between_0_and_1_are_refused(tmp_path):
    with pytest.raises(ValueError, match="UCPO"):
        build_trainer(tmp_path, replay=Replay(soft=True), trainer_class=UCPOTrainer, max_steps=1).train()
