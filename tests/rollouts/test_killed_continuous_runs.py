"""Continuous runs that are killed at random moments: no prompt is lost or trained twice, no process is left over."""

import json
import os
import random
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
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


KILLS = 20


class Diary(TrainerCallback):
    """Writes the positions of each optimizer step, and the process of the worker; a repeated step replaces its own."""

    def __init__(self, directory: Path):
        self.directory = directory

    def on_step_begin(self, args, state, control, **kwargs):
        if (worker := self.trainer._source._worker) is not None:
            self._write("worker", str(worker._process.pid))

    def on_step_end(self, args, state, control, **kwargs):
        positions = [group.position for group in self.trainer._source._taken]
        self._write(f"step_{state.global_step}", json.dumps(positions))

    def _write(self, name: str, text: str) -> None:
        (self.directory / "new").write_text(text)
        (self.directory / "new").replace(self.directory / name)  # as a whole


def train(directory: Path, url: str) -> None:
    play_installed(setattr)
    ensure_server()
    async_rollout_worker.mp = SimpleNamespace(get_context=lambda name: CONTEXT)
    diary = Diary(directory)
    trainer = build_trainer(
        directory / "run",
        model=tiny_model(),
        more={"train_dataset": addition_dataset(24), "callbacks": [diary]},
        max_steps=10_000,
        learning_rate=1e-6,
        rollout_schedule="continuous",
        max_staleness=20,
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
def test_runs_that_are_killed_train_each_prompt_once_or_count_it_as_dropped(tmp_path):
    """Of the trainer, its worker, and the server, which comes back with initial weights."""
    rng = random.Random(5)
    workers: set[int] = set()
    exit_codes = {"trainer": -signal.SIGKILL, "worker": 3, "server": 3}
    with server_of(tiny_model()) as server:
        server.seconds_per_token = 0.002
        for number in range(KILLS):
            victim = [*exit_codes][number % 3]
            (tmp_path / "worker").unlink(missing_ok=True)
            process = start(train, tmp_path, server.url, output=tmp_path / "output")
            while process.is_alive() and not (tmp_path / "worker").exists():
                process.join(0.01)
            assert process.is_alive(), (tmp_path / "output").read_text()[-3000:]
            process.join(rng.uniform(0.0, 1.5))
            workers.add(int((tmp_path / "worker").read_text()))
            if victim == "server":
                server.answers["/weight_info"] = 503  # down, and then another one
            else:
                os.kill(process.pid if victim == "trainer" else int((tmp_path / "worker").read_text()), signal.SIGKILL)
            process.join(60)
            server.answers.clear()
            server.version = "default" if victim == "server" else server.version
            assert process.exitcode == exit_codes[victim], (tmp_path / "output").read_text()[-3000:]
    checkpoint = last_checkpoint(str(tmp_path / "run"))
    num_steps = int(checkpoint.rpartition("-")[2])
    trained = sum([json.loads((tmp_path / f"step_{i}").read_text()) for i in range(1, num_steps + 1)], [])
    state = torch.load(Path(checkpoint) / "pacs_state_0.pt")["late_batches"]
    finished = [group["position"] for group in state["groups"]]
    assert len(trained) == 2 * num_steps >= KILLS
    known = sorted(trained + finished + state["missing"])
    logs = json.loads((Path(checkpoint) / "trainer_state.json").read_text())["log_history"]
    num_dropped = sum(log.get("async/dropped_groups", 0) for log in logs)
    assert len(set(known)) == len(known) == state["next_position"] - num_dropped
    assert set(known) <= {*range(state["next_position"])}
    when_gone(*workers)
    assert not any(map(alive, workers))
