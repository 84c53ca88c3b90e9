"""Process between the trainer and the grading workers, which forks, feeds, watches, and replaces them.

The trainer starts it as a fresh interpreter, so nothing of the trainer is forked or imported again (no
torch, CUDA, threads, or user `__main__`), and a notebook or `python -c` may be the parent. It imports math-verify once
and forks a replacement for a killed worker in milliseconds. It never grades, so it always notices when its parent
ends, and then ends its workers.
"""

import gc
import importlib
import json
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait

from . import Grade, Outcome, connect
from .worker import grade_one, serve


# How often to check that the parent is alive. A closed connection is noticed at once.
_POLL_SECONDS = 1.0
# Maximum number of items sent to a worker at a time.
_MAX_CHUNK_ITEMS = 32

# Graded once before the first fork, because the LaTeX parser builds its tables on first use (about 0.5 s).
_WARM_UP = [
    ("The answer is 3/4, so $x = \\frac{3}{4}$ or \\boxed{0.75}.", "\\frac{3}{4}"),
    ("\\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}", "\\left[ -2, 7 \\right)"),
    ("\\boxed{x^2 + 2\\sqrt{3}x - 1}", "(x - 1)^{2}"),
    ("\\boxed{x \\in (-\\infty, 5] \\cup \\{7, 8\\}}", "\\text{Evelyn}"),
    ("\\boxed{a_{2} = \\sin x + \\log_2 3}", "e^{2x} - f(x)"),
    ("\\boxed{\\frac{10!}{3} + \\binom{n}{2}}", "|x - 1|"),
    ("\\boxed{\\begin{pmatrix} 1 & 0 \\\\ 0 & 1 \\end{pmatrix}}", "y = 2x + 1"),
]


@dataclass
class _Worker:
    pid: int
    connection: Connection
    assigned: deque[int] = field(default_factory=deque)  # indices of its items; it grades the first one
    started: float = 0.0  # start time of the first one


class _Pool:
    """Workers and the connection to the parent. One batch at a time."""

    def __init__(
        self, connection: Connection, *, parent_pid: int, num_workers: int, timeout_seconds: float, **settings
    ):
        self.connection, self.parent_pid, self.timeout_seconds = connection, parent_pid, timeout_seconds
        self.worker_settings = settings
        self.workers: list[_Worker] = []
        for _ in range(num_workers):
            self.workers.append(self._fork())

    def run(self) -> None:
        """Grade batches until the parent closes the connection."""
        while True:
            while not self.connection.poll(_POLL_SECONDS):
                self._exit_without_parent()
            self.connection.send(self._grade(self.connection.recv()))

    def _fork(self) -> _Worker:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            try:
                # Inherited ends would keep connections open after their owner has exited.
                ours.close()
                self.connection.close()
                for worker in self.workers:
                    worker.connection.close()
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                serve(Connection(theirs.detach()), **self.worker_settings)
            except (EOFError, ConnectionError, MemoryError):  # the pool has exited, or the item needs too much memory
                pass
            except Exception:
                traceback.print_exc()
            finally:  # skips the exit handlers of the parent
                os._exit(0)
        theirs.close()
        return _Worker(pid, connect(ours, self.timeout_seconds))

    def _grade(self, items: list[tuple[str, tuple[str, ...]]]) -> list[Grade]:
        for slot, worker in enumerate(self.workers):  # killed between two batches, not by an item
            if os.waitpid(worker.pid, os.WNOHANG)[0]:
                worker.connection.close()
                self.workers[slot] = self._fork()
        results = [Grade(Outcome.KILLED)] * len(items)
        todo = deque(range(len(items)))
        while todo or any(worker.assigned for worker in self.workers):
            for slot, worker in enumerate(self.workers):
                if todo and not worker.assigned and not self._assign(worker, todo, items):
                    self._replace(slot, todo, results)
            busy = {worker.connection: slot for slot, worker in enumerate(self.workers) if worker.assigned}
            deadline = min((self.workers[slot].started for slot in busy.values()), default=0.0) + self.timeout_seconds
            patience = min(_POLL_SECONDS, max(0.0, deadline - time.monotonic()))
            ready = wait([self.connection, *busy], patience)
            self._exit_without_parent()
            if self.connection in ready:  # the parent never sends while it waits, so it has closed the connection
                sys.exit(0)
            for connection, slot in busy.items():
                if connection in ready:
                    if not self._collect(self.workers[slot], results):
                        self._replace(slot, todo, results)
                elif time.monotonic() - self.workers[slot].started > self.timeout_seconds:
                    self._replace(slot, todo, results, Outcome.TIMEOUT)
        return results

    def _assign(self, worker: _Worker, todo: deque[int], items: list) -> bool:
        """Send a worker its next chunk; returns whether it was received."""
        size = max(1, min(_MAX_CHUNK_ITEMS, len(todo) // (2 * len(self.workers))))
        worker.assigned.extend(todo.popleft() for _ in range(size))
        worker.started = time.monotonic()
        try:
            worker.connection.send([items[index] for index in worker.assigned])
        except OSError:
            return False
        return True

    def _collect(self, worker: _Worker, results: list) -> bool:
        """Receive the next outcome of a worker; returns `False` if it has ended instead."""
        try:
            outcome, share = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            return False
        now = time.monotonic()
        results[worker.assigned.popleft()] = Grade(outcome, now - worker.started, share)
        worker.started = now
        return True

    def _replace(self, slot: int, todo: deque[int], results: list, outcome: Outcome = Outcome.KILLED) -> None:
        """Kill and replace a worker: its current item gets `outcome`, the others return to the queue."""
        worker = self.workers[slot]
        os.kill(worker.pid, signal.SIGKILL)  # a no-op for one that has ended by itself
        status = os.waitpid(worker.pid, 0)[1]
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:  # over its CPU time
            outcome = Outcome.TIMEOUT
        results[worker.assigned.popleft()] = Grade(outcome, time.monotonic() - worker.started)
        todo.extendleft(reversed(worker.assigned))
        worker.connection.close()
        self.workers[slot] = self._fork()

    def _exit_without_parent(self) -> None:
        # The connection stays open if another child of the parent has inherited its end.
        if os.getppid() != self.parent_pid:
            sys.exit(0)


def main() -> None:
    settings = json.loads(sys.argv[1])
    # schedulers send it to all processes; the pool ends after its parent
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are disabled
    connection = Connection(os.dup(0))
    os.dup2(2, 1)  # stray output must not reach the connection
    if settings["protocol"] == "reasoning_gym":
        importlib.import_module("reasoning_gym")
        _WARM_UP.clear()
    for text, gold in _WARM_UP:
        grade_one(text, (gold,), settings["protocol"])
    gc.collect()
    gc.freeze()  # the collector would copy the memory pages that forked workers share
    pool = _Pool(connection, **settings)
    try:
        pool.run()
    except (EOFError, ConnectionError):  # the parent has closed the connection or exited
        pass
    finally:
        for worker in pool.workers:
            os.kill(worker.pid, signal.SIGKILL)
            os.waitpid(worker.pid, 0)
