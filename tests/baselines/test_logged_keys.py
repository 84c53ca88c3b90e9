"""Logs of training and evaluation have the keys of TRL's, with numbers wherever TRL's are numbers."""

import pytest
import torch
from support.models import load_weights, logps_and_entropies, tiny_model
from support.rollouts import Replay, rows_of_update
from support.runs import Recorder, build_trainer
from support.trls_update import EIGHT, OWN, REUSED, TRLS, run

from pacs_trl import GRPOTrainer


pytestmark = pytest.mark.trains

EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 16, "beta": 0.1}
FOUR = {**EIGHT, "max_steps": 4, "learning_rate": 0.01}
RUNS = {
    "dapo": ("grpo", FOUR | EVALUATED, {}),
    "cispo": ("grpo", FOUR | EVALUATED | {"loss_type": "cispo"}, {}),
    "one completion per evaluated prompt": ("grpo", FOUR | EVALUATED | {"num_generations_eval": 1}, {}),
    "all groups uniform, two updates": ("grpo", REUSED | {"max_steps": 4, "num_iterations": 2}, {"uniform_groups": 4}),
    "no completion counts": ("grpo", FOUR | {"mask_truncated_completions": True}, {"truncated": 2.0}),
    "tokens seen": ("grpo", FOUR | {"include_num_input_tokens_seen": True}, {}),
    "entropy bonus": ("grpo", FOUR | EVALUATED | {"entropy_coef": 0.1}, {"tools": True}),
    "rloo": ("rloo", FOUR | EVALUATED, {}),
    "rloo, one completion per evaluated prompt": ("rloo", FOUR | EVALUATED | {"num_generations_eval": 1}, {}),
}


@pytest.mark.parametrize(("method", "settings", "replay"), RUNS.values(), ids=RUNS)
def test_logs_have_the_keys_of_trl(tmp_path, model_path, method, settings, replay):
    path = model_path if settings.get("beta") else None
    runs = [
        run(tmp_path / name, trainers, method, Replay(**replay), path=path, **settings)[2]
        for name, trainers in (("trl", TRLS), ("ours", OWN))
    ]
    for other, ours in zip(*runs, strict=True):
        assert [key for key in other if key not in ours] == []
        assert [key for key, value in other.items() if value is not None and ours[key] is None] == []


def one_completion_per_group(generation, rows):
    """The completions of the first two of four groups are equal."""
    for i, row in enumerate(rows[:8]):
        row.completion_ids = list(rows[i // 4 * 4].completion_ids)
    return rows


def test_entropy_of_skipped_groups_is_that_of_one_completion_of_each(tmp_path):
    """Their completions are equal here, so the sample is exact if it has a completion of each group."""
    replay, recorder = Replay(uniform_groups=2, edit=one_completion_per_group), Recorder()
    trainer = build_trainer(
        tmp_path,
        replay=replay,
        trainer_class=GRPOTrainer,
        more={"callbacks": [recorder]},
        per_device_train_batch_size=16,
        learning_rate=0.01,
    )
    samples = []
    sample_of_skipped = trainer.update.driver.sample_of_skipped

    def spy(minibatch, schedule, skipped):
        samples.append(sorted({minibatch.rollouts[i].group for i in skipped}))
        trainer.update.driver._limits = trainer.update.driver._limits._replace(backward_cost=99)  # no bound
        return sample_of_skipped(minibatch, schedule, skipped)

    trainer.update.driver.sample_of_skipped = spy
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert [len(groups) for groups in samples] == [2, 2]
    model = tiny_model().double()
    for update, log in enumerate(logs):
        _, rows = rows_of_update(replay, trainer.args, update)
        load_weights(model, recorder.weights[update])
        entropies = torch.cat([logps_and_entropies(model, row)[1] for row in rows])
        assert log["entropy"] == pytest.approx(entropies.mean().item(), rel=1e-5)


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_entropy_of_skipped_groups_costs_at_most_5_percent_of_a_step(tmp_path, packing):
    """Half of 16 groups are uniform. A token with a backward pass counts three times."""
    costs = {True: 0, False: 0}
    trainer = build_trainer(
        tmp_path,
        replay=Replay(uniform_groups=8),
        trainer_class=GRPOTrainer,
        per_device_train_batch_size=64,
        startup_check=False,
        max_steps=4,
    )
    if not packing:
        trainer.forward_pass.packing = None

    def count(texts, num_completion_tokens):
        has_gradient = torch.is_grad_enabled()
        lengths = [length for text in texts for length in text]
        tokens = sum(lengths) if packing else len(lengths) * max(lengths)
        costs[has_gradient] += tokens * (3 if has_gradient else 1)

    trainer.forward_pass.on_pass = count
    trainer.train()
    assert 0 < costs[False] <= 0.05 * costs[True]
