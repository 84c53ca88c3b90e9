"""One warning for a run that cannot learn: with its causes, after ten optimizer steps without signal, also over a
resume."""

import logging

import pytest
from replay import TOKENIZER, Replay, addition_dataset, build_trainer, config

from pacs_trl.baselines.grpo_trainer import GRPOTrainer
from pacs_trl.baselines.ppo_trainer import PPOTrainer
from pacs_trl.rollouts.callbacks import PATIENCE, no_signal_message


WARNING = "nothing to learn from"
TINY = ("use_cpu", "bf16", "per_device_train_batch_size", "num_generations", "gradient_checkpointing", "save_strategy")


def zeros(completions, **kwargs):
    return [0.0] * len(completions)


def warnings(caplog):
    return [record.message for record in caplog.records if WARNING in record.message]


def replay(mixed=(), truncated=()):
    """Uniform groups, none truncated, but in these generations."""

    def edit(generation, rows):
        for i, row in enumerate(rows):
            row.label = float(i % 2) if generation in mixed else 0.0
            row.completion_ids = [65, 66] if generation in truncated else [65, TOKENIZER.eos_token_id]
            row.env_mask, row.token_weights = [1, 1], [1.0, 1.0]
        return rows

    return Replay(edit=edit)


@pytest.mark.parametrize("trainer_class", ["pacs", "grpo", "ppo"])
def test_all_rewards_zero(tmp_path, model_path, caplog, trainer_class):
    """One generation serves two optimizer steps; after the warning nothing more is said."""
    settings = {"steps_per_generation": 2, "max_steps": PATIENCE + 2, "max_completion_length": 4}
    if trainer_class == "pacs":
        trainer = build_trainer(tmp_path, reward=zeros, **settings)
    else:
        trainer_class = {"grpo": GRPOTrainer, "ppo": PPOTrainer}[trainer_class]
        known = {name: value for name, value in vars(config(tmp_path, **settings)).items() if name in TINY}
        args = trainer_class._config_class(str(tmp_path), **known, **settings)
        data = {"train_dataset": addition_dataset(), "processing_class": TOKENIZER}
        trainer = trainer_class(model_path, zeros, args=args, **data)
    trainer.train()
    (said,) = warnings(caplog)
    assert "mean reward 0.00" in said and "max_completion_length=4" in said and "form of the answers" in said


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, 1),
        ({"mixed": range(100), "truncated": range(100)}, 1),  # rewards differ, but no completion has ended
        ({"mixed": range(0, 100, 5)}, 0),
        ({"mixed": [9]}, 0),  # the tenth
        ({"mixed": [PATIENCE]}, 1),  # one warning in a run
        ({"mixed": range(100)}, 0),
    ],
)
def test_steps_in_a_row(tmp_path, caplog, given, expected):
    trainer = build_trainer(tmp_path, replay=replay(**given), max_steps=PATIENCE + 2 if "truncated" in given else 19)
    trainer.train()
    assert len(warnings(caplog)) == expected


def test_one_generation_of_several_for_an_optimizer_step_suffices(tmp_path, caplog):
    settings = {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "max_steps": PATIENCE}
    trainer = build_trainer(tmp_path, replay=replay(mixed=range(1, 100, 2)), **settings)
    trainer.train()
    assert not warnings(caplog)


@pytest.mark.parametrize(("offset", "expected"), [(3, [1, 1]), (PATIENCE + 1, [1, 0])])
def test_over_a_resume(tmp_path, caplog, offset, expected):
    """A resumed run goes on counting, also in the middle of a generation, and does not repeat the warning."""
    found = []
    for resume in (None, str(tmp_path / f"checkpoint-{offset}")):
        caplog.clear()
        settings = {"save_strategy": "steps", "save_steps": 1, "steps_per_generation": 2, "max_steps": PATIENCE + 2}
        trainer = build_trainer(tmp_path, replay=replay(), **settings)
        trainer.train(resume_from_checkpoint=resume)
        found.append(len(warnings(caplog)))
    assert found == expected


@pytest.mark.parametrize(
    ("reward", "truncated", "words", "others"),
    [
        (0.0, 1.0, ["max_completion_length=64", "form"], ["temperature", "harder"]),
        (0.0, 0.1, ["form"], ["max_completion_length", "temperature"]),
        (1.0, 0.0, ["harder"], ["max_completion_length", "form"]),
        (0.5, 0.0, ["temperature"], ["max_completion_length", "harder"]),
    ],
)
def test_likely_causes(reward, truncated, words, others):
    text = no_signal_message(reward, truncated, 64)
    assert all(word in text for word in words) and not any(word in text for word in others)


def test_only_the_first_process_speaks(tmp_path, caplog):
    trainer = build_trainer(tmp_path, replay=replay(), max_steps=PATIENCE)
    trainer.is_world_process_zero = lambda: False
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert trainer.signal["none_in"] == PATIENCE and not warnings(caplog)
