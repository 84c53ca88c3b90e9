"""One of four ranks dies, hangs, or cannot write: the others end with one message that names it."""

import errno
import itertools
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from support.processes import on_two, run_and_save, start
from support.rollouts import digit_reward
from support.runs import build_trainer
from torch.distributed import DistError, HashStore, TCPStore

from pacs_trl.errors import FailedRun, during_run, exit_code
from pacs_trl.rollouts import checkpoint, rank_watch
from pacs_trl.rollouts.checkpoint_files import last_checkpoint


pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.trains]
NUM_RANKS, CULPRIT = 4, 2


def train(directory: Path, failure: str) -> None:
    rank = int(os.environ["RANK"])

    def reward(completions, trainer_state, **kwargs):
        if rank == CULPRIT and trainer_state.global_step == 2:
            if failure == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if failure == "hangs":
                time.sleep(1000)
            if failure == "raises":
                raise RuntimeError("no such verdict")
        return digit_reward(completions)

    save = checkpoint.save_state

    def save_state(trainer, folder):
        if failure == "full disk" and rank == CULPRIT and trainer.state.global_step == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(trainer, folder)

    folder = directory / f"run {rank // 2}" if failure == "two folders" else directory / "run"
    settings = {"per_device_train_batch_size": 2, "max_steps": 50, "save_strategy": "steps", "save_steps": 1}

    def run(argv):
        trainer = build_trainer(folder, reward=reward, ddp_timeout=6, **settings)
        with during_run():
            trainer.train()

    with (
        patch.multiple(rank_watch, INTERVAL=0.2, GRACE=1.0, SILENCE=5.0),
        patch.object(checkpoint, "save_state", save_state),
    ):
        sys.exit(exit_code("train", run, []))


def ends_of(directory: Path, failure: str) -> tuple[list[int], list[str]]:
    """Return the exit codes of all ranks, and what they print."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {"WORLD_SIZE": str(NUM_RANKS), "LOCAL_WORLD_SIZE": str(NUM_RANKS), "MASTER_ADDR": "127.0.0.1"}
    environment |= {
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "ACCELERATE_USE_CPU": "true",
    }
    outputs = [directory / f"output.{rank}" for rank in range(NUM_RANKS)]
    processes = [
        start(train, directory, failure, output=outputs[rank], RANK=str(rank), LOCAL_RANK=str(rank), **environment)
        for rank in range(NUM_RANKS)
    ]
    deadline = time.monotonic() + 300
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes, [file.read_text() for file in outputs]


MESSAGES = {
    "killed": (f"Rank {CULPRIT} (process ", "has ended without a message"),
    "hangs": (f"Rank {CULPRIT} (process ", "longer than ddp_timeout=6"),
    "full disk": (f"Rank {CULPRIT} (process ", "has failed with FailedRun", "No space left on device"),
    "raises": (f"Rank {CULPRIT} (process ", "has failed with RuntimeError: no such verdict"),
}


@pytest.mark.parametrize(
    "failure", [*(pytest.param(f, marks=pytest.mark.slow) for f in ("hangs", "raises")), "killed", "full disk"]
)
def test_the_other_ranks_end_with_one_message(tmp_path, failure):
    codes, printed = ends_of(tmp_path, failure)
    others = [rank for rank in range(NUM_RANKS) if rank != CULPRIT]
    assert all(codes[rank] == 1 for rank in others), (codes, printed[0][-2000:])
    for part in MESSAGES[failure]:
        assert sum(part in printed[rank] for rank in others) == 1, (part, [text[-800:] for text in printed])
    message = next(line for rank in others for line in printed[rank].splitlines() if MESSAGES[failure][0] in line)
    assert "continue with `--resume_from_checkpoint last`, from " in message
    assert Path(last_checkpoint(tmp_path / "run")).name == "checkpoint-2"


def test_a_rank_that_told_and_ended_is_not_repeated(monkeypatch):
    store = HashStore()
    first, second = (rank_watch.RankWatch(store, rank, NUM_RANKS, limit=6, output_dir="absent") for rank in range(2))
    first._write_sign("running")
    second._read_signs()
    assert first._tells() and first._tells()  # its main thread and its watch ask
    monkeypatch.setattr(second, "_is_dead", lambda rank: True)  # the first one has ended meanwhile
    assert second._is_first_alive() and not second._tells()


@pytest.mark.parametrize(("num_ranks", "words"), [(2, "other rank has"), (3, "other 2 ranks have")])
def test_the_message_is_two_sentences(num_ranks, words):
    store = HashStore()
    first, second = (rank_watch.RankWatch(store, rank, num_ranks, limit=6, output_dir="absent") for rank in range(2))
    second.fail(FailedRun("The reward function 'r' called sys.exit(3). Raise an exception."))
    first._read_signs()
    first.problem = first._find_problem()
    assert f"sys.exit(3). Raise an exception, so the {words} stopped. Find the cause" in first._message()


def test_an_error_that_reads_like_one_of_a_collective_operation_is_told_if_all_others_live():
    store = HashStore()
    group = SimpleNamespace(_get_default_store=lambda: SimpleNamespace(clone=lambda: store))
    fake = {"is_initialized": lambda: True, "get_world_size": lambda: 2, "get_rank": lambda: 1}
    fake |= {"DistError": DistError, "distributed_c10d": group}
    with (
        patch.multiple(rank_watch, dist=SimpleNamespace(**fake), SILENCE=0.1, INTERVAL=0.1),
        patch.object(rank_watch, "_RUN_NUMBERS", itertools.count()),
        pytest.raises(RuntimeError, match="server timed out"),
        rank_watch.watching_ranks(limit=6, output_dir="absent"),
    ):
        raise RuntimeError("server timed out")  # of a reward function
    other = rank_watch.RankWatch(store, 0, 2, limit=6, output_dir="absent")
    other._read_signs()
    assert "has failed with RuntimeError: server timed out" in other._find_problem()


def train_again(directory: Path) -> int:
    """Train after a run that has failed on both ranks. Rank 1 begins when rank 0 has looked for its signs of life."""

    def raises(completions, **kwargs):
        raise ValueError("no such column")

    with patch.multiple(rank_watch, INTERVAL=0.1, GRACE=0.1):
        with pytest.raises(ValueError, match="no such column"):
            build_trainer(directory / "failed", reward=raises).train()
        trainer = build_trainer(directory / "again")
        if os.environ["RANK"] == "1":
            time.sleep(1.0)
        trainer.train()
    return trainer.state.global_step


def test_ranks_train_again_after_a_run_that_has_failed(tmp_path):
    on_two(run_and_save, train_again, (tmp_path,), tmp_path, outputs=tmp_path)
    assert [torch.load(tmp_path / f"result.{rank}") for rank in range(2)] == [2, 2]


@pytest.mark.slow
def test_ranks_that_see_different_folders_are_named_before_training(tmp_path):
    codes, printed = ends_of(tmp_path, "two folders")
    assert codes == [1] * NUM_RANKS
    assert "is not the same folder on all ranks: rank 2 on " in printed[0] and "rank 3 on " in printed[0]
    assert not [*(tmp_path / "run 0").glob("*")]
