"""A signal while code of a user hangs: it is interrupted, and the state after the last optimizer step is saved."""

import os
import signal
import threading
import time
from contextlib import closing

import pytest
import torch
from safetensors.torch import load_file
from support.forked_engine import forked_engine
from support.late_runs import trainer_of
from support.models import TOKENIZER, assert_same_models
from support.processes import on_two, start
from support.rollouts import digit_reward
from support.scripted import run_recipe

from pacs_trl import PACSTrainer
from pacs_trl.rollouts import interruption
from pacs_trl.rollouts.checkpoint import last_checkpoint
from pacs_trl.rollouts.stop_on_signal import StopOnSignal


SETTINGS = {"steps_per_generation": 1, "max_steps": 4, "save_strategy": "no"}


@pytest.fixture(autouse=True)
def short_patience(monkeypatch):
    monkeypatch.setattr(interruption, "PATIENCE", 0.1)


class Hanging:
    """A user's code that hangs in its call `at`, after it has sent a signal to this process."""

    def __init__(self, at=None, signum=signal.SIGTERM):
        self.at, self.signum, self.calls = at, signum, 0

    def hang(self):
        self.calls += 1
        if self.calls == self.at:
            os.kill(os.getpid(), self.signum)
            threading.Event().wait()

    def plain(self, completions, **kwargs):
        self.hang()
        return digit_reward(completions)

    def catching(self, completions, **kwargs):
        """Catches what an interruption raises, once."""
        try:
            self.hang()
        except:  # noqa: E722
            threading.Event().wait()
        return digit_reward(completions)

    async def asynchronous(self, completions, **kwargs):
        self.hang()  # the loop of all other asynchronous functions, too
        return digit_reward(completions)

    def rollout(self, prompts, trainer):
        self.hang()
        prompt_ids = TOKENIZER.apply_chat_template(prompts, add_generation_prompt=True, return_dict=False)
        completion_ids = [[5 + trainer.state.global_step, i % 7, TOKENIZER.eos_token_id] for i in range(len(prompts))]
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}


def train(directory, kind, hanging, stopping=None, resume=None, **settings):
    function = getattr(hanging, kind)
    is_reward = kind != "rollout"
    functions = {"reward": function if is_reward else digit_reward, "rollout_func": None if is_reward else function}
    trainer = trainer_of(directory, callbacks=[stopping] if stopping else [], **(SETTINGS | functions | settings))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def check(directory, kind, at, saved, **settings):
    """The run stops after the step `saved`, and a run that continues ends as one that was not stopped."""
    settings = {"rollout_lag": 0} | settings
    with forked_engine(), closing(StopOnSignal()) as stopping:
        straight = train(directory / "straight", kind, Hanging(), **settings)
        stopped = train(directory / "stopped", kind, Hanging(at), stopping, **settings)
        assert stopping.stopped == signal.SIGTERM and stopped.state.global_step == saved
        stopping.close()
        assert last_checkpoint(directory / "stopped") == str(directory / "stopped" / f"checkpoint-{saved}")
        resumed = train(directory / "stopped", kind, Hanging(), resume=True, **settings)
    assert_same_models(straight, resumed)


@pytest.mark.parametrize("kind", ["plain", "catching", "asynchronous", "rollout"])
def test_code_that_hangs_is_interrupted_and_the_last_step_saved(tmp_path, kind):
    check(tmp_path, kind, 3, 2)


def test_a_reward_that_hangs_in_an_evaluation_is_interrupted(tmp_path):
    """After the second step; random numbers of the evaluation do not get into the checkpoint."""
    check(tmp_path, "plain", 3, 2, eval_strategy="steps", eval_steps=2)


@pytest.mark.parametrize("lag", [1, 2])
def test_a_reward_that_hangs_with_a_lag_is_interrupted(tmp_path, lag):
    """The batch that was taken is part of the checkpoint, as are those in flight."""
    check(tmp_path, "plain", 3, 2, rollout_lag=lag)


def test_a_reward_function_that_returns_in_time_is_not_interrupted(tmp_path, monkeypatch):
    monkeypatch.setattr(interruption, "PATIENCE", 60.0)
    slow = Hanging()

    def reward(completions, **kwargs):
        slow.calls += 1
        if slow.calls == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1.0)  # several looks of the thread that interrupts
        return digit_reward(completions)

    with closing(StopOnSignal()) as stopping:
        trainer = trainer_of(tmp_path, callbacks=[stopping], reward=reward, rollout_lag=0, **SETTINGS)
        trainer.train()
    assert stopping.stopped == signal.SIGTERM and trainer.state.global_step == 2


def hangs_at_second_step(completions, trainer_state, **kwargs):
    if trainer_state.global_step == 1 and "HANG" in os.environ:
        with open(os.environ["HANG"], "w"):
            pass
        while True:
            time.sleep(1000)
    return digit_reward(completions)


def command(directory, model_path):
    settings = {"reward_funcs": "test_interruption.hangs_at_second_step", "max_train_samples": 64, "max_steps": 3}
    settings |= {"max_completion_length": 8, "learning_rate": 1e-3, "warmup_steps": 0, "disable_tqdm": True}
    run_recipe(directory, model_path, "--resume_from_checkpoint", "last", **settings)


def test_the_command_exits_after_one_signal(tmp_path, model_path):
    """The process as a scheduler sees it, with the patience of users."""
    process = start(command, tmp_path / "run", model_path, output=tmp_path / "out", HANG=str(tmp_path / "hangs"))
    try:
        while not (tmp_path / "hangs").exists() and process.exitcode is None:
            time.sleep(0.1)
        os.kill(process.pid, signal.SIGTERM)
        process.join(60)
        printed = (tmp_path / "out").read_text()
        assert process.exitcode == 143, printed[-3000:]
    finally:
        process.kill()
    assert "Stopped by SIGTERM after optimizer step 1 of 3" in printed and "It is interrupted" in printed
    command(tmp_path / "run", model_path)
    command(tmp_path / "straight", model_path)
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("run", "straight")]
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())


def train_on_two(directory):
    """Only the second process hangs, and only it gets a signal."""
    interruption.PATIENCE = 0.1
    hanging = Hanging(2 if os.environ["RANK"] == "1" else None)
    with closing(StopOnSignal()) as stopping:
        trainer = train(directory, "plain", hanging, stopping, rollout_lag=0, per_device_train_batch_size=4)
    trainer.accelerator.wait_for_everyone()  # as the command does; the first process writes the checkpoint
    assert trainer.state.global_step == 1 and stopping.stopped == signal.SIGTERM
    assert isinstance(trainer, PACSTrainer) and last_checkpoint(directory) is not None


@pytest.mark.distributed
def test_both_processes_stop_when_one_hangs(tmp_path):
    on_two(train_on_two, tmp_path / "run", outputs=tmp_path, seconds=300)
