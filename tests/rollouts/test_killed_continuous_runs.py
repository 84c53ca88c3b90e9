"""Continuous runs that are killed at random moments: no prompt is lost or trained twice, and no process is left over."""

import json
import multiprocessing
import os
import random
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.models import tiny_model
from support.optional_packages import needs
from support.processes import CONTEXT, ensure_server, start
from support.rollouts import addition_dataset
from support.runs import build_trainer
from support.scripted_worker import server_of
from support.vllm_server import play_installed, server_settings
from test_rollout_worker import alive, when_gone
from transformers import TrainerCallback
from trl.experimental.async_grpo import async_rollout_worker

from pacs_trl.errors import FailedRun
from pacs_trl.rollouts.checkpoint_files import last_checkpoint


NUM_STEPS, KILLS = 12, 20


class Diary(TrainerCallback):
    """Writes the positions of each optimizer step, and the process of the worker; a repeated step replaces its own."""

    def __init__(self, directory: Path):
        self.directory = directory

    def on_step_begin(self, args, state, control, **kwargs):
        if (worker := self.trainer._source._worker) is not None:
            (self.directory / "worker").write_text(str(worker._process.pid))

    def on_step_end(self, args, state, control, **kwargs):
        positions = [group.position for group in self.trainer._source._taken]
        (self.directory / f"step_{state.global_step}").write_text(json.dumps(positions))


def train(directory: Path, url: str) -> None:
    play_installed(setattr)
    ensure_server()
    async_rollout_worker.mp = SimpleNamespace(get_context=lambda name: CONTEXT)
    diary = Diary(directory)
    trainer = build_trainer(
        directory / "run",
        model=tiny_model(),
        more={"train_dataset": addition_dataset(2 * NUM_STEPS), "callbacks": [diary]},
        max_steps=NUM_STEPS,
        rollout_schedule="continuous",
        max_staleness=12,  # none is dropped
        save_strategy="steps",
        save_steps=1,
        save_total_limit=2,
        **server_settings(url),
    )
    diary.trainer = trainer
    try:
        trainer.train(resume_from_checkpoint=last_checkpoint(str(directory / "run")))
    except FailedRun as failure:  # of the worker that was killed
        print(failure)
        os._exit(3)


@pytest.mark.slow
@needs("aiohttp")
def test_runs_that_are_killed_train_each_prompt_once(tmp_path):
    rng = random.Random(5)
    victims = ["trainer", "worker"] * (KILLS // 2)
    workers: set[int] = set()
    with server_of(tiny_model()) as server:
        server.seconds_per_token = 0.002
        while True:
            process = start(train, tmp_path, server.url, output=tmp_path / "output")
            timer = None
            if victims:
                timer = threading.Timer(rng.uniform(1.0, 6.0), kill, (victims.pop(), process, tmp_path))
                timer.start()
            process.join()
            if timer is not None:
                timer.cancel()
            if (tmp_path / "worker").exists():
                workers.add(int((tmp_path / "worker").read_text()))
            assert process.exitcode in (0, 3, -signal.SIGKILL), (tmp_path / "output").read_text()[-3000:]
            if process.exitcode == 0:
                break
    trained = [json.loads((tmp_path / f"step_{step}").read_text()) for step in range(1, NUM_STEPS + 1)]
    assert sorted(sum(trained, [])) == list(range(2 * NUM_STEPS))
    when_gone(*workers)
    assert not any(map(alive, workers))
    assert multiprocessing.active_children() == []


def kill(victim: str, process, directory: Path) -> None:
    pid = process.pid
    if victim == "worker":
        if not (directory / "worker").exists():
            return
        pid = int((directory / "worker").read_text())
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
