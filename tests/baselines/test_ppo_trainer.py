"""PPOTrainer against a long way in float64: gradients of both models, clipping and warm-up.

The reference below computes values, advantages and both losses row by row without padding and knows nothing of the
trainer. float32 sums of a few hundred terms differ from float64 by about 1e-7 relative; 1e-4 of the largest gradient
leaves room for ratios and whitening.
"""

import copy
from functools import partial

import pytest
import torch
import trl
from support import actor_critics
from support.actor_critics import CriticRecorder, assert_close_gradients
from support.models import TOKENIZER, load_weights, logps_and_entropies, tiny_model, trainable_weights
from support.rollouts import Replay
from support.tolerances import rounding_atol

from pacs_trl import PPOTrainer


pytestmark = pytest.mark.trains


build = partial(actor_critics.build, PPOTrainer)


def recorded(output_dir, model_path, **more):
    """A trainer, and what is recorded of it."""
    recorder = CriticRecorder()
    recorder.trainer = build(output_dir, model_path, callbacks=[recorder], **more)
    return recorder.trainer, recorder


def rows_as_float64(model, critic, row):
    """Log-probabilities, and values before each token, of the completion of one row."""
    values = critic(input_ids=torch.tensor([row.prompt_ids + row.completion_ids])).logits
    return logps_and_entropies(model, row)[0], values[0, len(row.prompt_ids) - 1 : -1, 0]


def ppo_losses(rows, scored, old, args, *, tools):
    """Policy loss and value loss of one optimizer step over `rows`, written as the sums they are."""
    sampled_positions = [[t for t in range(len(r.completion_ids)) if not tools or r.env_mask[t]] for r in rows]
    sampled_positions = [[] if r.label is None else tokens for r, tokens in zip(rows, sampled_positions)]
    advantages, returns = {}, {}
    for i, (row, tokens) in enumerate(zip(rows, sampled_positions)):
        advantage = next_value = 0.0
        for t in reversed(tokens):
            reward = row.label if t == tokens[-1] else 0.0
            value = old[i][1][t].item()
            advantage = reward + args.gamma * next_value - value + args.gamma * args.gae_lambda * advantage
            advantages[i, t], returns[i, t] = advantage, advantage + value
            next_value = value
    if args.whiten_advantages:
        a = torch.tensor(list(advantages.values()), dtype=torch.float64)
        advantages = {k: (v - a.mean().item()) / (a.var().item() + 1e-8) ** 0.5 for k, v in advantages.items()}
    policy_loss, value_loss = 0.0, 0.0
    for (i, t), advantage in advantages.items():
        ratio = (scored[i][0][t] - old[i][0][t].detach()).exp()
        objective = torch.minimum(ratio * advantage, ratio.clamp(1 - args.epsilon, 1 + args.epsilon) * advantage)
        if advantage < 0 and args.delta is not None:
            objective = objective.clamp(min=args.delta * advantage)  # dual clip
        policy_loss = policy_loss - objective
        value, old_value = scored[i][1][t], old[i][1][t].detach()
        error = (value - returns[i, t]) ** 2
        if args.value_clip_range is not None:
            near = old_value + (value - old_value).clamp(-args.value_clip_range, args.value_clip_range)
            error = torch.maximum(error, (near - returns[i, t]) ** 2)
        value_loss = value_loss + error
    count = len(advantages) if args.loss_type == "dapo" else len(rows) * args.max_completion_length
    return policy_loss / count, value_loss / count, value_loss.item() / len(advantages)


@pytest.mark.parametrize(
    ("settings", "replay"),
    [
        ({}, Replay(unverifiable=0.2)),
        ({"loss_type": "dapo", "gamma": 0.9, "gae_lambda": 0.8, "value_clip_range": 0.01}, Replay(tools=True)),
        # ratios far from 1, so that both sides of the clip and the dual clip act; values that come nearer to their
        # targets, and so at least one of them, move by more than their range
        (
            {
                "learning_rate": 40.0,
                "critic_learning_rate": 0.05,
                "value_clip_range": 1e-6,
                "delta": 1.3,
                "epsilon": 0.1,
            },
            Replay(soft=True),
        ),
        ({"whiten_advantages": False, "delta": None, "value_clip_range": None, "gae_lambda": 0.5}, Replay(seed=1)),
        ({"model_init_kwargs": {"attn_implementation": "eager"}}, Replay()),
        ({"gradient_checkpointing": True}, Replay()),
    ],
    ids=["defaults", "tools-dapo-gae", "clipped", "plain", "padded", "checkpointing"],
)
def test_two_updates_equal_the_long_way(tmp_path, model_path, settings, replay):
    trainer, recorder = recorded(tmp_path, model_path, replay=replay, num_iterations=2, **settings)
    policy = tiny_model().double()
    critic = copy.deepcopy(trainer.critic).double()
    trainer.train()

    args = trainer.args
    rows = replay.rows(0, 16)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == 2
    old = None
    for update in range(2):
        load_weights(policy, recorder.weights[update])
        load_weights(critic, recorder.critics[update])
        scored = [rows_as_float64(policy, critic, row) for row in rows]
        old = old or [(logps.detach(), values.detach()) for logps, values in scored]
        policy_loss, value_loss, mean_error = ppo_losses(rows, scored, old, args, tools=replay.tools)
        policy.zero_grad()
        critic.zero_grad()
        (policy_loss + value_loss).backward()
        assert_close_gradients(
            recorder.gradients[update], {name: p.grad.float() for name, p in policy.named_parameters()}
        )
        moved = {
            name: (before - recorder.critics[update + 1][name]) / args.critic_learning_rate
            for name, before in recorder.critics[update].items()
        }
        assert_close_gradients(moved, {name: p.grad.float() for name, p in critic.named_parameters()})
        assert logs[update]["loss"] == pytest.approx(policy_loss.item(), rel=1e-4, abs=1e-6)
        assert logs[update]["ppo/value_loss"] == pytest.approx(mean_error, rel=1e-4)
        norm = torch.stack([p.grad.norm() for p in critic.parameters()]).norm().item()
        assert logs[update]["ppo/critic_grad_norm"] == pytest.approx(norm, rel=1e-4)
    # nothing has moved yet, so what is left of ratio - 1 - log ratio is the rounding of a ratio near 1
    assert logs[0]["ppo/approx_kl"] == pytest.approx(0.0, abs=rounding_atol(1, 1.0)) and logs[1]["ppo/approx_kl"] > 0
    if "learning_rate" in settings:  # the case that is about clipping clips
        assert logs[1]["clip_ratio/region_mean"] > 0
        assert logs[1]["ppo/value_clip_fraction"] > 0
        ratios = torch.cat([(new[0] - before[0]).exp() for new, before in zip(scored, old)])
        assert ratios.max() > args.delta


def test_no_padding_goes_through_policy_critic_and_kl_reference(tmp_path, model_path):
    replay = Replay()
    trainer = build(tmp_path, model_path, replay=replay, num_iterations=2, beta=0.1, startup_check=False)
    tokens = {"model": [], "critic": [], "ref_model": []}
    for name, shapes in tokens.items():
        getattr(trainer, name).register_forward_pre_hook(
            lambda _, args, inputs, shapes=shapes: shapes.append(tuple(inputs["input_ids"].shape)), with_kwargs=True
        )
    trainer.train()
    rows = replay.rows(0, 16)
    completions = sum(len(row.completion_ids) for row in rows)
    generation = sum(len(row.prompt_ids) for row in rows) + completions
    # two micro-batches each: of all, the reference, then two updates; a prompt that rows of a micro-batch share counts
    # once
    for name, passes in {"model": 3, "critic": 3, "ref_model": 1}.items():
        assert {rows for rows, _ in tokens[name]} == {1} and len(tokens[name]) == 2 * passes
        assert passes * completions < sum(length for _, length in tokens[name]) <= passes * generation


def test_passes_give_what_those_of_trl_give(tmp_path, model_path):
    trainer = build(tmp_path, model_path)
    mask = torch.tensor([[0, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1]])
    ids = torch.arange(18).view(3, 6).masked_fill(mask == 0, TOKENIZER.pad_token_id)
    for batch_size in (None, 2):
        arguments = (trainer.model, ids, mask, 3, batch_size)
        actual = trainer._get_per_token_logps_and_entropies(*arguments, compute_entropy=True)
        expected = trl.GRPOTrainer._get_per_token_logps_and_entropies(trainer, *arguments, compute_entropy=True)
        torch.testing.assert_close(actual[:2], expected[:2], rtol=1e-5, atol=1e-5)


def test_gradients_of_policy_and_critic_are_clipped_each_on_its_own(tmp_path, model_path):
    trainer, recorder = recorded(tmp_path, model_path, replay=Replay(), max_grad_norm=1e-3, max_steps=1)
    trainer.train()
    policy_norm = torch.stack([g.norm() for g in recorder.gradients[0].values()]).norm()
    before, after = recorder.critics
    critic_norm = torch.stack([(before[n] - after[n]).norm() / 0.05 for n in before]).norm()
    assert policy_norm.item() == pytest.approx(1e-3, rel=1e-3)
    assert critic_norm.item() == pytest.approx(1e-3, rel=1e-2)


def test_only_the_critic_learns_during_warmup(tmp_path, model_path):
    adam = {"optim": "adamw_torch", "weight_decay": 0.1, "learning_rate": 1e-3, "critic_learning_rate": 1e-3}
    trainer, recorder = recorded(tmp_path, model_path, critic_warmup_steps=2, max_steps=3, **adam)
    start = trainable_weights(trainer.model)
    trainer.train()
    for name, weight in start.items():
        assert torch.equal(weight, recorder.weights[1][name]) and torch.equal(weight, recorder.weights[2][name])
    assert any(not torch.equal(weight, trainer.model.get_parameter(name)) for name, weight in start.items())
    for before, after in zip(recorder.critics, recorder.critics[1:]):
        assert any(not torch.equal(before[name], after[name]) for name in before)
