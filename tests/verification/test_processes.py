"""Limits, kills and shutdown of the verification processes. Hostile answers are data: `data/hostile.jsonl`."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from accelerate import Accelerator
from support.processes import on_two
from watching import block, box, children, is_running, read_jsonl, wait_for, workers_of

from pacs_trl.rewards import math_reward, shared_verifier
from pacs_trl.verification import Outcome, Verifier
from pacs_trl.verification.code import CodeVerifier


HOSTILE = read_jsonl("hostile.jsonl")
# Evaluates for hours and is no plain number, so that nothing but a limit can end it.
ENDLESS = r"\boxed{9^{9^9} - 1}"


def resident_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def in_background(verifier, completions, golds):
    """The future outcomes of a batch that another thread grades, so that the test can interfere."""
    grade = verifier.grade_detailed
    return ThreadPoolExecutor(1).submit(lambda: [each.outcome for each in grade(completions, golds)])


class TestHostile:
    def test_every_attack_is_answered_in_time_and_the_pool_lives_on(self):
        texts = ["".join(text * count for text, count in row["parts"]) for row in HOSTILE]
        golds = [row["gold"] for row in HOSTILE]
        assert len({row["description"] for row in HOSTILE}) == len(HOSTILE) >= 60
        with Verifier(num_workers=2, protocol="authors", cpu_seconds=0.15, timeout_seconds=3.0) as verifier:
            verifier.cache_size = 0
            verifier.grade([box(i) for i in range(100)], range(100))
            memory = resident_mb()
            grades = verifier.grade_detailed(texts, golds)
            assert resident_mb() - memory < 16
            assert verifier.grade([box(i) for i in range(100)], range(100)) == [1.0] * 100
            assert len(children(verifier._pool.pid)) == 2
        slow = {row["description"]: grade.seconds for row, grade in zip(HOSTILE, grades) if grade.seconds > 4.0}
        assert not slow
        right = {row["description"] for row, grade in zip(HOSTILE, grades) if grade.outcome is Outcome.CORRECT}
        # Invisible characters around a right answer are not wrong. math-verify finds no other in here.
        assert right <= {"null bytes in the box", "right-to-left overrides", "lone surrogate"}
        assert sum(grade.outcome is Outcome.TOO_LONG for grade in grades) == 3

    def test_neighbours_of_a_hanging_item_are_graded(self):
        completions = [ENDLESS.replace("1", str(i)) if i % 20 == 7 else box(i) for i in range(100)]
        with Verifier(num_workers=2, protocol="authors", cpu_seconds=0.15) as verifier:
            outcomes = [grade.outcome for grade in verifier.grade_detailed(completions, range(100))]
        expected = [Outcome.TIMEOUT if i % 20 == 7 else Outcome.CORRECT for i in range(100)]
        assert outcomes == expected

    def test_power_towers_need_no_limit(self):
        with Verifier(num_workers=1, protocol="authors", cpu_seconds=30.0, timeout_seconds=30.0) as verifier:
            grade = verifier.grade_detailed([r"\boxed{9^{9^{9^9}}}"], ["42"])[0]
        assert grade.outcome is Outcome.WRONG and grade.seconds < 5.0


class TestLimits:
    def test_wall_clock_ends_an_item_that_uses_no_processor_time(self):
        with Verifier(num_workers=1, timeout_seconds=1.0) as verifier:
            (worker,) = workers_of(verifier)
            os.kill(worker, signal.SIGSTOP)
            grades = verifier.grade_detailed([box(1), box(2), box(3)], [1, 2, 3])
            assert [grade.outcome for grade in grades] == [Outcome.TIMEOUT, Outcome.CORRECT, Outcome.CORRECT]
            assert 1.0 <= grades[0].seconds < 2.0
            assert not is_running(worker)

    def test_kernel_ends_a_hanging_worker_while_the_pool_is_stuck(self):
        with Verifier(num_workers=1, protocol="authors", cpu_seconds=0.5, timeout_seconds=30.0) as verifier:
            (worker,) = workers_of(verifier)
            pool = verifier._pool.pid
            batch = in_background(verifier, [ENDLESS], ["42"])
            time.sleep(0.1)
            os.kill(pool, signal.SIGSTOP)
            assert wait_for(lambda: not is_running(worker), 10)
            os.kill(pool, signal.SIGCONT)
            assert batch.result(60) == [Outcome.TIMEOUT]

    def test_a_worker_beyond_its_memory_is_killed_and_its_neighbors_are_graded(self):
        large = "x" * 100_000_000  # cannot even be read within the limit
        with Verifier(num_workers=1, memory_limit_mb=256, timeout_seconds=30.0) as verifier:
            verifier.max_characters = 10**9
            grades = verifier.grade_detailed([box(1), large, box(2)], [1, 9, 2])
        assert [grade.outcome for grade in grades] == [Outcome.CORRECT, Outcome.KILLED, Outcome.CORRECT]


class TestKilledProcesses:
    def test_at_work(self):
        def interfere(first, *pids, number=signal.SIGKILL):
            """Outcomes of a hanging item and two others while processes get a signal."""
            numbers = range(first, first + 3)
            batch = in_background(verifier, [ENDLESS.replace("1", str(first)), *map(box, numbers[1:])], numbers)
            time.sleep(0.2)
            for pid in pids:
                os.kill(pid, number)
            return batch.result(60)

        with Verifier(num_workers=1, protocol="authors", cpu_seconds=1.0) as verifier:
            (worker,) = workers_of(verifier)
            pool = verifier._pool.pid
            # what a scheduler sends to all disturbs nothing: the trainer finishes its step, and needs its labels for
            # that
            assert interfere(10, worker, pool, number=signal.SIGTERM) == [Outcome.TIMEOUT, *[Outcome.CORRECT] * 2]
            assert verifier._pool.pid == pool
            known = len(verifier._cache)
            assert interfere(20, *workers_of(verifier)) == [Outcome.KILLED, *[Outcome.CORRECT] * 2]
            assert len(verifier._cache) == known + 2  # without the one that was killed
            # the pool is started again and loses nothing
            (worker,) = workers_of(verifier)
            assert interfere(30, pool) == [Outcome.TIMEOUT, *[Outcome.CORRECT] * 2]
            assert verifier._pool.pid != pool
            assert wait_for(lambda: not is_running(worker), 5)


class Kind(NamedTuple):
    """A verifier, its correct answers, and their solutions."""

    verifier: Verifier | CodeVerifier
    answer: Callable[[int], str]
    solution: Callable[[int], Any]

    def grade(self, first, expected=0):
        """Grades of ten answers, correct with `expected=0`."""
        numbers = range(first, first + 10)
        return self.verifier.grade([self.answer(i) for i in numbers], [self.solution(i + expected) for i in numbers])


@pytest.fixture(params=["answers", "programs"])
def kind(request):
    if request.param == "answers":
        verifier_kind = Kind(Verifier(num_workers=2, protocol="authors", cpu_seconds=2.0), box, str)
    else:
        verifier = CodeVerifier(num_workers=2, isolation="rlimits")

        def tests(i):
            return {"type": "stdin_stdout", "cases": [{"input": "", "output": str(i)}]}

        verifier_kind = Kind(verifier, lambda i: block(f"print({i})"), tests)
    with verifier_kind.verifier:
        yield verifier_kind


class TestBothVerifiers:
    def test_killed_workers_are_replaced(self, kind):
        workers = workers_of(kind.verifier)
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
        assert wait_for(lambda: not any(map(is_running, workers)), 5)
        assert kind.grade(0) == [1.0] * 10

    def test_the_signal_that_a_scheduler_sends_to_all_disturbs_nothing(self, kind):
        assert kind.grade(10) == [1.0] * 10  # a worker that starts does not ignore it yet
        workers = workers_of(kind.verifier)
        for worker in workers:
            os.kill(worker, signal.SIGTERM)
        assert kind.grade(0) == [1.0] * 10 and all(map(is_running, workers))

    def test_a_closed_verifier_starts_again(self, kind):
        workers = workers_of(kind.verifier)
        kind.verifier.close()
        assert wait_for(lambda: not any(map(is_running, workers)), 5)
        assert kind.grade(0) == [1.0] * 10

    def test_workers_that_cannot_start(self, kind, monkeypatch):
        kind.verifier.close()
        monkeypatch.setattr(sys, "executable", "/bin/false")
        with pytest.raises(RuntimeError, match="failed"):
            kind.grade(0)

    @pytest.mark.parametrize("is_grading", [False, True])
    @pytest.mark.slow
    def test_a_forked_process_has_workers_of_its_own(self, kind, monkeypatch, is_grading):
        """Also if another thread holds the lock, which nobody would release in the child."""
        workers, (started, answer) = workers_of(kind.verifier), (threading.Event(), threading.Event())
        run_jobs = kind.verifier._run_jobs
        waiting = threading.Thread(target=kind.grade, args=(0,), daemon=True)
        if is_grading:
            monkeypatch.setattr(
                kind.verifier, "_run_jobs", lambda jobs: (started.set(), answer.wait(), run_jobs(jobs))[-1]
            )
            waiting.start()
            assert started.wait(10)
        child = os.fork()
        if child == 0:
            signal.alarm(30)  # a child that hangs is ended
            kind.verifier._run_jobs = run_jobs
            right = kind.grade(20) == [1.0] * 10 and kind.grade(40, expected=1) == [0.0] * 10
            right = right and not set(workers_of(kind.verifier)) & set(workers)
            kind.verifier.close()
            os._exit(0 if right else 1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        answer.set()
        if is_grading:
            waiting.join(30)
        assert code == 0
        assert kind.grade(0) == [1.0] * 10 and workers_of(kind.verifier) == workers


PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from pacs_trl.verification import Verifier

signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs with it ignored
verifier = Verifier(num_workers=2, protocol="authors", cpu_seconds=60.0, timeout_seconds=60.0)
assert verifier.grade([r"\\\\boxed{1}"] * 3, [1, 1, 2]) == [1.0, 1.0, 0.0]
pool = verifier._pool.pid
workers = Path(f"/proc/{pool}/task/{pool}/children").read_text().split()
"""
BUSY = r"""
print(pool, *workers, flush=True)
verifier.grade([r"\boxed{9^{9^9} - 1}", r"\boxed{9^{9^9} - 2}"], ["42", "42"])
"""


def start_program(*parts):
    """A parent that was given to the interpreter with -c: it has no file that a child could import again."""
    program = "".join(textwrap.dedent(part) for part in parts)
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", program.replace("\\\\", "\\")], **how)
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) >= 3, process.stderr.read()
    return process, pids


class TestEndOfTheParent:
    @pytest.mark.parametrize(
        "ending",
        [
            *(signal.SIGKILL, signal.SIGTERM, "", "raise RuntimeError('oops')"),
            *(pytest.param(ending, marks=pytest.mark.slow) for ending in (signal.SIGINT, "exit(3)", "os._exit(0)")),
        ],
    )
    def test_end_without_close(self, ending):
        is_signal = isinstance(ending, int)
        process, pids = start_program(PROGRAM, BUSY if is_signal else f"print(pool, *workers, flush=True)\n{ending}")
        if is_signal:
            time.sleep(0.3)
            assert all(map(is_running, pids))
            process.send_signal(ending)
        assert wait_for(lambda: not any(map(is_running, pids)), 5)
        _, errors = process.communicate(timeout=30)
        assert is_signal or ("oops" in errors) == ("oops" in ending) and "Warning" not in errors

    def test_kill_while_another_child_holds_the_connection(self):
        """A forked data loader inherits the parent's end of it, so the pool sees no end of file."""
        fork = """
        sleeper = os.fork()
        if sleeper == 0:
            time.sleep(60)
            os._exit(0)
        workers.append(sleeper)
        """
        process, pids = start_program(PROGRAM, fork, BUSY)
        sleeper = pids.pop()
        time.sleep(0.3)
        process.kill()
        assert wait_for(lambda: not any(map(is_running, pids)), 5)
        assert is_running(sleeper)
        os.kill(sleeper, signal.SIGKILL)
        process.communicate(timeout=30)

    def test_forgetting_ends_the_processes(self):
        verifier = Verifier(num_workers=1)
        pids = [*workers_of(verifier), verifier._pool.pid]
        del verifier
        assert wait_for(lambda: not any(map(is_running, pids)), 5)


def grade_on_a_rank(directory):
    accelerator = Accelerator(cpu=True)
    golds = [str(i + accelerator.process_index) for i in range(60)]
    expected = [1.0 - accelerator.process_index] * 60
    assert math_reward([box(i) for i in range(60)], solution=golds) == expected
    assert shared_verifier().num_workers == max(1, len(os.sched_getaffinity(0)) // 2)
    accelerator.wait_for_everyone()
    (directory / f"pid.{accelerator.process_index}").write_text(str(shared_verifier()._pool.pid))


@pytest.mark.distributed
@pytest.mark.slow
def test_two_ranks_have_a_pool_each(tmp_path):
    on_two(grade_on_a_rank, tmp_path, outputs=tmp_path)
    pools = [int((tmp_path / f"pid.{rank}").read_text()) for rank in range(2)]
    assert pools[0] != pools[1]
    assert wait_for(lambda: not any(map(is_running, pools)), 5)
