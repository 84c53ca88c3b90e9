"""One warning for a run that cannot learn: with its causes, after three optimizer steps without signal at the start or
ten later, also over a resume."""

import logging

import pytest
from support.models import TOKENIZER
from support.rollouts import Replay, addition_dataset
from support.runs import build_trainer

from pacs_trl import GRPOTrainer, PACSTrainer, PPOTrainer
from pacs_trl.rollouts.nothing_to_learn import PATIENCE, PATIENCE_AT_START


WARNING = "nothing to learn from"


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


@pytest.mark.parametrize("trainer_class", [PACSTrainer, GRPOTrainer, PPOTrainer])
def test_rewards_that_are_all_zero_are_warned_of_once(tmp_path, model_path, caplog, trainer_class):
    """One generation serves two optimizer steps; after the warning nothing more is said."""
    settings = {"steps_per_generation": 2, "max_steps": PATIENCE + 2, "max_completion_length": 4}
    build_trainer(tmp_path, model=model_path, reward=zeros, trainer_class=trainer_class, **settings).train()
    (said,) = warnings(caplog)
    assert "mean reward 0.00" in said and "max_completion_length=4" in said


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ({}, PATIENCE_AT_START),
        ({"mixed": [0]}, PATIENCE),
        (
            {"mixed": range(100), "truncated": range(100)},
            PATIENCE_AT_START,
        ),  # rewards differ, none has ended
        ({"mixed": range(0, 100, 5)}, None),
        ({"mixed": [2, 12]}, None),  # the third, and the tenth after it
        ({"mixed": [PATIENCE]}, PATIENCE_AT_START),  # one warning in a run
        ({"mixed": range(100)}, None),
    ],
)
def test_steps_without_a_signal_in_a_row_are_warned_of_once(tmp_path, caplog, kinds, expected):
    """At most one warning, which names the number of steps."""
    trainer = build_trainer(tmp_path, replay=replay(**kinds), max_steps=PATIENCE + 2 if "truncated" in kinds else 19)
    trainer.train()
    said = warnings(caplog)
    assert len(said) == (expected is not None) and all(f"in {expected} optimizer steps" in text for text in said)


def test_one_generation_of_several_for_an_optimizer_step_suffices(tmp_path, caplog):
    settings = {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "max_steps": PATIENCE}
    trainer = build_trainer(tmp_path, replay=replay(mixed=range(1, 100, 2)), **settings)
    trainer.train()
    assert not warnings(caplog)


@pytest.mark.parametrize(("offset", "expected"), [(PATIENCE_AT_START - 1, [1, 1]), (PATIENCE_AT_START + 1, [1, 0])])
def test_a_resumed_run_goes_on_counting_and_warns_once(tmp_path, caplog, offset, expected):
    """A resumed run goes on counting, also in the middle of a generation, and does not repeat the warning."""
    num_warnings = []
    for resume in (None, str(tmp_path / f"checkpoint-{offset}")):
        caplog.clear()
        settings = {"save_strategy": "steps", "save_steps": 1, "steps_per_generation": 2, "max_steps": PATIENCE + 2}
        trainer = build_trainer(tmp_path, replay=replay(), **settings)
        trainer.train(resume_from_checkpoint=resume)
        num_warnings.append(len(warnings(caplog)))
    assert num_warnings == expected


def test_only_the_first_process_speaks(tmp_path, caplog):
    trainer = build_trainer(tmp_path, replay=replay(), max_steps=PATIENCE)
    trainer.is_world_process_zero = lambda: False
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert not warnings(caplog)


def test_an_evaluation_before_training_counts_as_no_step(tmp_path, caplog):
    more = {"eval_dataset": addition_dataset(2)}
    build_trainer(tmp_path, reward=zeros, more=more, num_generations_eval=4, per_device_eval_batch_size=8).evaluate()
    assert not warnings(caplog)
