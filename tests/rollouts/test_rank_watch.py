"""Ranks on other machines are not looked up among the processes of this one."""

import os
import socket
import time
from pathlib import Path

import pytest
from torch.distributed import HashStore

from pacs_trl.rollouts import rank_watch


needs_proc = pytest.mark.skipif(not Path("/proc/self").exists(), reason="without /proc no process is looked up")
ABSENT = 2**22 + 1  # process ids of Linux are smaller


def problem_of_other_rank(**changes):
    """Return the problem that a rank finds when another one has just given a sign of life."""
    watch = rank_watch.RankWatch(HashStore(), 0, 2, limit=6, output_dir="absent")
    watch._write_sign("running")
    watch._read_signs()
    watch._last_signs[1] = watch._last_signs[0]._replace(**changes)
    watch._times_of_signs[1] = time.monotonic()
    return watch._find_problem()


@needs_proc
def test_a_process_of_this_machine_is_looked_up():
    assert problem_of_other_rank(pid=os.getpid()) is None
    assert "has ended without a message" in problem_of_other_rank(pid=ABSENT)


def test_another_machine_may_have_the_hostname_of_this_one():
    assert problem_of_other_rank(pid=ABSENT, machine="another boot, another PID namespace") is None


def test_a_problem_names_the_host():
    assert f"on {socket.gethostname()})" in problem_of_other_rank(state="failed", failure="an error")


def test_a_run_does_not_read_how_an_earlier_one_ended():
    store = HashStore()
    first, second = (
        rank_watch.RankWatch(store, rank, 2, limit=6, output_dir="absent", run=run) for rank, run in ((1, 0), (0, 1))
    )
    first.fail(ValueError("no such column"))
    assert first._is_first_to_tell()
    second._read_signs()
    assert second._find_problem() is None
    assert second._is_first_to_tell()


def test_without_proc_a_machine_is_its_hostname(monkeypatch):
    def no_file(*args):
        raise FileNotFoundError

    monkeypatch.setattr(rank_watch.os, "readlink", no_file)
    assert rank_watch._machine() == socket.gethostname()
