"""A resumed run logs the losses, and reads the data, of a run without a stop."""

import datetime
from pathlib import Path

import pandas as pd
import pytest
import torch
import transformers.utils.chat_template_utils
import trl
from support.models import assert_same_models
from support.rollouts import addition_dataset, digit_reward
from support.runs import build_trainer

from experiments.miniature.tokenizer import build_tokenizer
from pacs_trl.baselines.ppo_trainer import PPOTrainer


SAVING = {"save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-2, "optim": "adamw_torch"}


def losses(trainer) -> list[tuple[int, float]]:
    names = ("loss", "train_loss")
    return [(entry["step"], entry[name]) for entry in trainer.state.log_history for name in names if name in entry]


@pytest.mark.parametrize("trainer_class", [None, PPOTrainer], ids=["one loss per update", "one per batch"])
def test_logged_losses_after_a_resume_cover_all_steps(tmp_path, model_path, trainer_class):
    """Two steps after a log, one step after the next, and at the log."""
    settings = SAVING | {"logging_steps": 3, "max_steps": 6, "steps_per_generation": 2}
    if trainer_class is not None:
        settings |= {"trainer_class": trainer_class, "gradient_accumulation_steps": 2}

    def build(directory):
        torch.manual_seed(3)
        return build_trainer(directory, model=model_path, reward=digit_reward, **settings)

    straight = build(tmp_path / "straight")
    straight.train()
    assert [step for step, _ in losses(straight)] == [3, 6, 6]
    for step in (2, 3, 4):
        resumed = build(tmp_path / "resumed")
        resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / f"checkpoint-{step}"))
        assert losses(resumed) == losses(straight), step


def test_a_resume_inside_a_generation_batch_keeps_its_table_of_completions(tmp_path):
    settings = SAVING | {"max_steps": 3, "steps_per_generation": 2, "log_completions": True}
    build_trainer(tmp_path, reward=digit_reward, **settings).train()
    tables = {file: pd.read_parquet(file) for file in sorted((tmp_path / "completions").glob("*.parquet"))}
    assert [len(table) for table in tables.values()] == [16, 16, 16]
    build_trainer(tmp_path, reward=digit_reward, **settings).train(str(tmp_path / "checkpoint-1"))
    for file, table in tables.items():
        assert pd.read_parquet(file).equals(table), file


class NotedPrompts:
    """Reward function that notes the prompts of each generation batch."""

    __name__ = "digit"

    def __init__(self):
        self.prompts: list[list[str]] = []

    def __call__(self, prompts, completions, **kwargs):
        self.prompts.append([str(prompt) for prompt in prompts])
        return digit_reward(completions)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.slow
def test_a_stream_that_is_read_several_times_continues_in_its_place(tmp_path, accumulation):
    """A pass has three generation batches; an optimizer step has one or two, and the third waits for the next pass."""
    rewards = []

    def build(directory, max_steps=6):
        torch.manual_seed(3)
        rewards.append(NotedPrompts())
        stream = addition_dataset(6).to_iterable_dataset()
        size = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": accumulation}
        settings = SAVING | size | {"steps_per_generation": 1, "max_steps": max_steps}
        more = {"train_dataset": stream}
        return build_trainer(directory, reward=rewards[-1], more=more, lr_scheduler_type="constant", **settings)

    straight = build(tmp_path / "straight")
    straight.train()
    for step in (2, 3, 4, 5):
        resumed = build(tmp_path / "resumed")
        resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / f"checkpoint-{step}"))
        assert_same_models(straight, resumed)
        again = rewards[-1].prompts
        assert again == rewards[0].prompts[-len(again) :] and len(again) < len(rewards[0].prompts), step
    build(tmp_path / "short", 1).train()
    longer = build(tmp_path / "short")
    longer.train(resume_from_checkpoint=True)
    assert_same_models(straight, longer)


class Clock(datetime.datetime):
    """A clock that can be set forward."""

    days = 0

    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + datetime.timedelta(days=cls.days)


def test_a_run_continued_on_another_day_keeps_its_prompts(tmp_path, monkeypatch):
    """The template of Llama 3.2 prints the date; so do its turns after midnight."""
    monkeypatch.setattr(transformers.utils.chat_template_utils, "datetime", Clock)
    monkeypatch.setattr("pacs_trl.rollouts.resumable_trainer.datetime", Clock)
    monkeypatch.setattr(Clock, "days", 0)
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "llama3_2.jinja").read_text()
    generated = []

    def build(directory):
        torch.manual_seed(3)
        trainer = build_trainer(
            directory, reward=digit_reward, more={"processing_class": tokenizer}, steps_per_generation=1, **SAVING
        )
        original = trainer._generate_single_turn

        def generate(prompt_ids, *args, **kwargs):
            generated.append([list(ids) for ids in prompt_ids])
            Clock.days += 1
            return original(prompt_ids, *args, **kwargs)

        trainer._generate_single_turn = generate
        return trainer

    straight = build(tmp_path)
    straight.train()
    Clock.days = 5
    resumed = build(tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert_same_models(straight, resumed)
    first, second, again = generated
    assert again == second
    today = datetime.datetime.now().strftime("%d %b %Y")
    assert all(today in text for text in tokenizer.batch_decode(first + second))
    Clock.days = 5
    fresh = build(tmp_path / "fresh")
    fresh.train()
    assert today not in tokenizer.decode(generated[-1][0])
