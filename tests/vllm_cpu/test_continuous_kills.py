"""A run with continuous rollouts that is killed again and again: trainer, worker, and vLLM server in turn.

A moment is a number of events: calls of the functions in `EVENTS`, in which groups are received, weights replaced,
groups taken, weights updated, and checkpoints saved. Worker processes are forked, which saves their imports.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests
from support.processes import CONTEXT as PROCESSES
from support.processes import start
from support.rollouts import addition_dataset
from support.seeds import shifted
from support.vllm_process import end, free_port, start_server, wait_until_ready
from trl.experimental.async_grpo import async_rollout_worker

from pacs_trl import train
from pacs_trl.errors import exit_code
from pacs_trl.rollouts.continuous import ContinuousRollouts
from pacs_trl.rollouts.exact_trainer import ExactUpdateTrainer
from pacs_trl.rollouts.rollout_worker import RolloutWorker
from pacs_trl.rollouts.weight_transfer import SharedMemoryTransfer


NUM_STEPS, GROUPS_PER_STEP = 30, 2
SECONDS_TO_NOTICE = 10 + 50  # ten, and those to save and to end on a busy machine
EVENTS = [
    (SharedMemoryTransfer, "pause"),
    (SharedMemoryTransfer, "load"),
    (SharedMemoryTransfer, "resume"),
    (RolloutWorker, "start"),
    (ContinuousRollouts, "_take_groups"),
    (ContinuousRollouts, "state"),
    (ExactUpdateTrainer, "training_step"),
    (ExactUpdateTrainer, "_save_checkpoint"),
]
MARK = "PACS_TRL_KILLED_RUN"  # environment variable of all processes of a run that are started anew


def count_groups_too(note) -> None:
    """Let the arrival of groups be an event."""
    receive = RolloutWorker.receive

    def call(self, timeout):
        groups = receive(self, timeout)
        if groups:
            note(self)
        return groups

    RolloutWorker.receive = call


def train_and_kill(argv: list[str], kill: dict, notes: Path) -> None:
    """Run the command `pacs-trl train`. At event number `kill["event"]` a signal is sent to `kill["target"]`, and
    before its end each step and process is noted in files of the directory `notes`."""
    async_rollout_worker.mp = SimpleNamespace(get_context=lambda name: PROCESSES)
    num_events = 0
    workers: list[int] = []

    def note(owner) -> None:
        nonlocal num_events
        num_events += 1
        if num_events < kill["event"] or (notes / "killed").exists():
            return
        target, signum = kill["target"], kill["signal"]
        if target == "worker" and not workers:
            return  # it has not started yet
        (notes / "killed").write_text(f"{time.monotonic()}")
        if target == "server":
            os.killpg(kill["server"], signum)
        else:
            os.kill(os.getpid() if target == "trainer" else workers[-1], signum)

    def with_note(owner, name):
        method = getattr(owner, name)

        def call(self, *args, **kwargs):
            note(self)
            result = method(self, *args, **kwargs)
            note(self)
            return result

        setattr(owner, name, call)

    start_worker, take = RolloutWorker.start, ContinuousRollouts._take_groups

    def start_and_note(self):
        start_worker(self)
        workers.append(self._process.pid)
        with open(notes / "workers", "a") as file:
            file.write(f"{self._process.pid}\n")

    def take_and_note(self):
        groups = take(self)
        with open(notes / "taken", "a") as file:  # a later line for the same step replaces an earlier one
            line = {"step": self.trainer.state.global_step, "positions": [group.position for group in groups]}
            file.write(json.dumps(line) + "\n")
        return groups

    RolloutWorker.start, ContinuousRollouts._take_groups = start_and_note, take_and_note
    for owner, name in EVENTS:
        with_note(owner, name)
    count_groups_too(note)
    sys.exit(exit_code("pacs-trl train", train.main, argv))


def kills() -> list[dict]:
    """Twenty kills in a random order. Their moments are in the first two steps after the start of a run."""
    generator = random.Random(shifted(0))
    targets = [("trainer", signal.SIGKILL)] * 10 + [("trainer", signal.SIGTERM)] * 4
    targets += [("worker", signal.SIGKILL)] * 4 + [("server", signal.SIGKILL)] * 2
    generator.shuffle(targets)
    drawn = [{"target": t, "signal": s, "event": generator.randint(1, 30)} for t, s in targets]
    drawn[targets.index(("trainer", signal.SIGKILL))]["event"] = 4  # the server is paused, for the first weights
    return drawn


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def with_mark(value: str) -> list[int]:
    """Processes that were started anew in a run."""
    pids = []
    for directory in Path("/proc").iterdir():
        try:
            if directory.name.isdigit() and f"{MARK}={value}".encode() in (directory / "environ").read_bytes():
                pids.append(int(directory.name))
        except OSError:
            pass
    return pids


@pytest.mark.slow
def test_a_run_that_is_killed_loses_no_prompt_and_trains_none_twice(tmp_path, checkpoint):
    data, notes, output_dir = tmp_path / "data.jsonl", tmp_path / "notes", tmp_path / "run"
    notes.mkdir()
    addition_dataset(100).to_json(data)
    settings = {
        "method": "grpo", "model_name_or_path": checkpoint, "dataset_name": data, "output_dir": output_dir,
        "reward_funcs": "support.rollouts.digit_reward", "use_cpu": True, "bf16": False, "report_to": "none",
        "num_generations": 4, "per_device_train_batch_size": 4 * GROUPS_PER_STEP, "gradient_accumulation_steps": 1,
        "max_completion_length": 24, "max_steps": NUM_STEPS, "save_steps": 1, "save_total_limit": 2,
        "learning_rate": 1e-3, "use_vllm": True, "vllm_mode": "server", "vllm_server_timeout": 120,
        "rollout_schedule": "continuous", "max_staleness": 2, "gradient_checkpointing": False,
        "resume_from_checkpoint": "last", "seed": shifted(42),
    }  # fmt: skip
    port, mark = free_port(), f"{os.getpid()}"
    with open(tmp_path / "server", "w") as server_output:
        server, url = start_server(checkpoint, server_output, port=port, slots=8)
        argv = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
        argv += ["--vllm_server_base_url", url]
        was_left_paused = 0
        try:
            wait_until_ready(server, url)
            for number, kill in enumerate([*kills(), {"target": "trainer", "signal": 0, "event": sys.maxsize}]):
                (notes / "killed").unlink(missing_ok=True)
                output = tmp_path / f"output.{number}"
                arguments = (argv, kill | {"server": server.pid}, notes)
                process = start(train_and_kill, *arguments, output=output, **{MARK: mark})
                process.join(150)
                printed = output.read_text()
                assert process.exitcode is not None, printed[-3000:]
                expected = {"worker": 1, "server": 1}.get(
                    kill["target"], 143 if kill["signal"] == signal.SIGTERM else -9
                )
                if process.exitcode == 0:  # the run was finished before, or had nothing left to generate
                    break
                assert process.exitcode == expected, (kill, printed[-3000:])
                assert "Traceback" not in printed, (kill, printed)
                if expected == 1:
                    (sentence,) = [line for line in printed.splitlines() if "resume_from_checkpoint last" in line]
                    assert "after optimizer step" in sentence and "fix the problem" in sentence, sentence
                if kill["target"] == "server" and expected == 1:
                    assert time.monotonic() - float((notes / "killed").read_text()) < SECONDS_TO_NOTICE
                    server.wait()
                    server, url = start_server(checkpoint, server_output, port=port, slots=8)
                    wait_until_ready(server, url)
                deadline = time.monotonic() + 20
                workers = [int(pid) for pid in (notes / "workers").read_text().split()] if number else []
                while left := [*filter(alive, workers), *with_mark(mark)]:
                    assert time.monotonic() < deadline, (kill, left)
                    time.sleep(0.1)
                was_left_paused += requests.get(f"{url}/is_paused", timeout=10).json()["is_paused"]
            assert process.exitcode == 0 and number > 10 and was_left_paused, printed[-3000:]
            assert not requests.get(f"{url}/is_paused", timeout=10).json()["is_paused"]
            version = requests.get(f"{url}/weight_info", timeout=10).json()["weight_version"]
            assert int(version.partition("/")[2]) >= NUM_STEPS - 1
        finally:
            if server.poll() is None:
                end(server)
    lines = [json.loads(line) for line in (notes / "taken").read_text().splitlines()]
    trained = {line["step"]: line["positions"] for line in lines}
    assert sorted(trained) == list(range(NUM_STEPS))
    positions = sorted(sum(trained.values(), []))
    assert len(set(positions)) == len(positions) == NUM_STEPS * GROUPS_PER_STEP
    history = json.loads((output_dir / "trainer_state.json").read_text())["log_history"]
    num_dropped = sum(log.get("async/dropped_groups", 0) for log in history)
    assert len({*range(positions[-1] + 1)} - {*positions}) == num_dropped
