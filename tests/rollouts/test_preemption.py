"""SIGTERM or Ctrl-C in the middle of a step: the step is finished and saved, the process exits with code 143 or 130,
the next one continues."""

import json
import os
import signal
import threading
from contextlib import closing

import pytest
import torch
from safetensors.torch import load_file
from support.problems import CRITIC_PROMPT
from support.rollouts import digit_reward
from support.scripted import run_recipe

from pacs_trl.errors import exit_code
from pacs_trl.rollouts.checkpoint_files import last_checkpoint
from pacs_trl.rollouts.rollout_trainer import RolloutTrainer
from pacs_trl.rollouts.stop_on_signal import StopOnSignal


send_at: int | None = None  # the optimizer step in which signals come, from 0
send: tuple[int, ...] = ()


def reward(completions, trainer_state, **kwargs):
    if trainer_state.global_step == send_at:
        for number in send:
            os.kill(os.getpid(), number)
    return digit_reward(completions)


@pytest.fixture(autouse=True)
def default_handler():
    """Of Ctrl-C, which a shell ignores in what it starts with `&`."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def run(output_dir, model_path, *words, method="pacs", at=None, signals=(signal.SIGTERM,)):
    global send_at, send
    send_at, send = at, signals
    settings = {"method": method, "reward_funcs": "test_preemption.reward", "max_train_samples": 64, "max_steps": 4}
    settings |= {"steps_per_generation": 2, "max_completion_length": 8, "learning_rate": 1e-3, "warmup_steps": 0}
    settings |= {"lr_scheduler_type": "linear", "disable_tqdm": True, "resume_from_checkpoint": "last"}
    return run_recipe(output_dir, model_path, *words, **settings)


def weights(directory):
    return load_file(directory / "model.safetensors")


GRPO_TOO = pytest.param("grpo", marks=pytest.mark.slow)
# of both models something is learnt before the signal, and after it
CRITIC = ["--critic_prompt", CRITIC_PROMPT, "--critic_max_new_tokens", "4", "--critic_pretraining_steps", "1"]


@pytest.mark.parametrize("method", ["pacs", "ppo", GRPO_TOO, "genac"])
@pytest.mark.slow
def test_a_run_stopped_in_the_middle_of_a_generation_continues_bit_by_bit(
    tmp_path, model_path, method, capsys, monkeypatch
):
    """Without any checkpoint asked for, and with `save_only_model`: what is saved can be continued from. A second
    signal comes while it is being written."""
    more = CRITIC if method == "genac" else []
    run(tmp_path / "straight", model_path, *more, method=method)
    before = signal.getsignal(signal.SIGTERM)
    save = RolloutTrainer._save_run

    def signalled_again(self, directory):
        os.kill(os.getpid(), signal.SIGTERM)
        save(self, directory)

    monkeypatch.setattr(RolloutTrainer, "_save_run", signalled_again)
    with pytest.raises(SystemExit) as stopped:
        run(tmp_path / "stopped", model_path, "--save_only_model", "true", *more, method=method, at=2)
    assert stopped.value.code == 143 and signal.getsignal(signal.SIGTERM) is before
    assert last_checkpoint(tmp_path / "stopped") == str(tmp_path / "stopped" / "checkpoint-3")
    assert not (tmp_path / "stopped" / "model.safetensors").exists()
    said = capsys.readouterr().out
    assert "Stopped by SIGTERM after optimizer step 3 of 4" in said and "`--resume_from_checkpoint last`" in said
    run(tmp_path / "stopped", model_path, *more, method=method)
    expected, stopped_weights = weights(tmp_path / "straight"), weights(tmp_path / "stopped")
    assert all(torch.equal(weight, stopped_weights[name]) for name, weight in expected.items())


@pytest.mark.parametrize("method", ["pacs", GRPO_TOO])
def test_finished_runs(tmp_path, model_path, method, capsys):
    """Stopped in the last step, started once more, killed before the model was written (TRL's own trainer would take
    one more step), continued from an earlier step, and trained longer."""
    saving = ["--save_strategy", "steps", "--save_steps", "1", "--lr_scheduler_type", "constant"]

    def steps(number, *more, at=None):
        trainer = run(tmp_path, model_path, "--max_steps", str(number), *saving, *more, method=method, at=at)
        return trainer and trainer.state.global_step

    assert steps(2, at=1) == 2
    expected, written = weights(tmp_path), (tmp_path / "model.safetensors").stat().st_mtime_ns
    capsys.readouterr()
    assert steps(2) is None and "is finished" in capsys.readouterr().out
    assert (tmp_path / "model.safetensors").stat().st_mtime_ns == written
    (tmp_path / "trainer_state.json").write_text("{")  # truncated: the process was killed
    (tmp_path / "model.safetensors").unlink()
    assert steps(2) == 2
    assert all(torch.equal(weight, expected[name]) for name, weight in weights(tmp_path).items())
    assert json.loads((tmp_path / "trainer_state.json").read_text())["global_step"] == 2
    assert steps(2, "--resume_from_checkpoint", str(tmp_path / "checkpoint-1")) == 2
    assert steps(3) == 3


def test_ctrl_c_saves_and_says_how_to_resume(tmp_path, model_path, capfd):
    with pytest.raises(SystemExit) as stopped:
        run(tmp_path, model_path, at=0, signals=[signal.SIGINT])
    assert stopped.value.code == 130 and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-1")
    said = capfd.readouterr()
    assert "`--resume_from_checkpoint last`" in said.out and "again to stop at once" in said.err


def test_a_second_ctrl_c_stops_at_once(tmp_path, model_path, capsys):
    def main(argv):
        run(tmp_path, model_path, at=2, signals=[signal.SIGTERM, signal.SIGINT, signal.SIGINT])

    assert exit_code("pacs-trl train", main, []) == 130
    assert last_checkpoint(tmp_path) is None
    assert "stopped by Ctrl-C. `--resume_from_checkpoint last`" in capsys.readouterr().err


def test_ctrl_c_stays_ignored_in_the_background(tmp_path, model_path):
    """A shell ignores it in what it starts with `&`: it is meant for another program."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    trainer = run(tmp_path, model_path, "--max_steps", "2", at=0, signals=[signal.SIGINT])
    assert trainer.state.global_step == 2 and signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_checkpoint_of_another_run_does_not_overwrite_a_model(tmp_path, model_path):
    run(tmp_path / "first", model_path, "--max_steps", "2", "--save_strategy", "steps", "--save_steps", "1")
    run(tmp_path / "second", model_path, "--max_steps", "1")
    before = weights(tmp_path / "second")
    checkpoint = ["--max_steps", "2", "--resume_from_checkpoint", str(tmp_path / "first" / "checkpoint-1")]
    for resume in (checkpoint, ["--resume_from_checkpoint", "none"], ["--resume_from_checkpoint", "last"]):
        with pytest.raises(ValueError, match="output_dir"):
            run(tmp_path / "second", model_path, "--max_steps", "2", *resume)
    assert all(torch.equal(weight, before[name]) for name, weight in weights(tmp_path / "second").items())
    assert run(tmp_path / "third", model_path, *checkpoint).state.global_step == 2


def test_a_run_in_another_thread_leaves_signals_alone():
    """Python lets the main thread alone handle them."""
    handlers = []

    def begin():
        with closing(StopOnSignal()) as callback:
            callback.on_train_begin(None, None, None)
            handlers.append((signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)))

    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    assert handlers == [before]
