"""Watch of the other ranks of a run.

A rank that is killed, fails, or hangs in a user's code leaves the others waiting in a collective operation: with NCCL
until a watchdog aborts the process, with gloo until a timeout, and neither says which rank is to blame. A thread on
each rank therefore writes a sign of life to the store of the process group and reads those of the others. If one is
missing, all ranks end with exit code 1, and the first of them that lives says which rank ended and why.
"""

import itertools
import json
import os
import re
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch.distributed as dist
from accelerate.utils import broadcast_object_list, gather_object

from ..errors import FailedElsewhere, UserError
from . import interruption
from .checkpoint_files import last_checkpoint


INTERVAL = 2.0  # seconds between signs of life
# Seconds without a sign of life after which a rank on another machine, or in another container, counts as dead, also
# one whose code does not let the thread run for that long.
SILENCE = 60.0
GRACE = 10.0  # seconds in which the main thread may end by itself, before its process does

_RUN_NUMBERS = itertools.count()  # of the runs of this process, which all ranks start together

_COLLECTIVE = re.compile(r"gloo|nccl|connection (closed|reset)|timed out|broken pipe|process group", re.IGNORECASE)


def is_collective_error(error: BaseException) -> bool:
    """Return whether an error comes from an operation that another rank did not take part in."""
    is_generic = type(error) is RuntimeError and _COLLECTIVE.search(str(error)) is not None
    return is_generic or isinstance(error, dist.DistError)


def _process_has_ended(pid: int) -> bool:
    """Return whether a process of this machine has ended, also if its parent has not noticed yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        # Without /proc (macOS) nothing is known; with it, no entry means that the process has ended.
        return Path("/proc/self").exists()


def _machine() -> str:
    """Return boot and PID namespace of this process: those that share both see each other in /proc. A hostname does
    not say so: cloud images may have one name, and containers that of their machine."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


class Sign(NamedTuple):
    """
    A sign of life of a rank.

    Attributes:
        number (`int`): Number of the sign, from 1, by which a new one is told from an old one.
        state (`str`): `"running"`, `"failed"`, or `"ended"`.
        busy (`float`, *optional*): Seconds since a call of a user's code began; `None` outside of one.
        failure (`str`, *optional*): Why the rank has failed.
        pid (`int`), host (`str`): Its process and hostname.
        machine (`str`): See [`_machine`].
    """

    number: int
    state: Literal["running", "failed", "ended"]
    busy: float | None
    failure: str | None
    pid: int
    host: str
    machine: str


class RankWatch:
    """
    Signs of life of this rank, and watch of the others.

    Args:
        store (`torch.distributed.Store`): Store of the process group; the watch is its only user in its thread.
        rank, num_ranks (`int`): Index of this rank, and number of ranks.
        limit (`float`): Seconds that a call of a user's code may take.
        output_dir (`str`): Directory of the run, whose last checkpoint the message names.
        run (`int`): Number of the run; the store keeps the last signs of earlier runs.

    Attributes:
        problem (`str`, *optional*): What is wrong with a rank; `None` as long as nothing is.
    """

    def __init__(self, store: Any, rank: int, num_ranks: int, *, limit: float, output_dir: str, run: int = 0):
        self._store, self._rank, self._num_ranks = store, rank, num_ranks
        self._limit, self._output_dir = limit, output_dir
        self._key_prefix = f"pacs_trl/rank_watch/{run}"  # in the store
        self._machine = _machine()
        self._num_signs = 0
        self._failure: str | None = None  # of this rank
        self._last_signs: dict[int, Sign] = {}  # by rank
        self._times_of_signs: dict[int, float] = {}  # by rank: when this rank first read its last sign
        self._tells_problem: bool | None = None  # see `_tells`
        self.problem: str | None = None
        self._has_problem = threading.Event()
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        self._write_sign("running")
        self._thread.start()

    def stop(self) -> None:
        """End the watch. A rank that has ended is no longer watched."""
        self._is_stopped.set()
        self._thread.join(INTERVAL)
        self._write_sign("failed" if self._failure else "ended")

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks why this one ends."""
        lines = str(error).strip().splitlines()
        first_line = lines[0] if lines else ""
        self._failure = f"{type(error).__name__}: {first_line}".removesuffix(": ").removesuffix(".")
        self._write_sign("failed")

    def explain(self, error: BaseException) -> FailedElsewhere | None:
        """Wait until it is known which rank caused an error of a collective operation. Returns `None` if all live."""
        if not self._has_problem.wait(SILENCE + 2 * INTERVAL):
            return None
        return FailedElsewhere(self._message(), prints=self._tells())

    # Signs ----------------------------------------------------------------------------------------------------------

    def _write_sign(self, state: Literal["running", "failed", "ended"]) -> None:
        self._num_signs += 1
        sign = Sign(
            number=self._num_signs,
            state=state,
            busy=interruption.seconds_in_user_code(),
            failure=self._failure,
            pid=os.getpid(),
            host=socket.gethostname(),
            machine=self._machine,
        )
        try:
            self._store.set(self._key(self._rank), json.dumps(sign._asdict()))
        except (RuntimeError, OSError):
            if state == "running":  # otherwise the other ranks may have ended, and the store with them
                raise

    def _read_signs(self) -> None:
        for rank in range(self._num_ranks):
            if not self._store.check([self._key(rank)]):
                continue
            sign = Sign(**json.loads(self._store.get(self._key(rank))))
            is_new = rank not in self._last_signs or sign.number != self._last_signs[rank].number
            if is_new:
                self._last_signs[rank] = sign
                self._times_of_signs[rank] = time.monotonic()

    def _key(self, rank: int) -> str:
        return f"{self._key_prefix}/{rank}"

    # Thread ---------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._is_stopped.wait(INTERVAL):
            try:
                self._write_sign("running")
                self._read_signs()
            except (RuntimeError, OSError):
                self.problem = "The process that holds the store of the process group has ended"
            if self.problem is None:
                self.problem = self._find_problem()
            if self.problem is not None:
                self._has_problem.set()
                if not self._is_stopped.wait(GRACE):  # the main thread waits for a rank that does not come
                    self._end_process()
                return

    def _find_problem(self) -> str | None:
        """Return what is wrong with a rank, if anything is."""
        for rank, sign in sorted(self._last_signs.items()):
            name = f"Rank {rank} (process {sign.pid} on {sign.host})"
            if sign.state == "failed" and rank != self._rank:
                return f"{name} has failed with {sign.failure}"
            if self._is_dead(rank):
                return f"{name} has ended without a message, as after kill -9 or when memory runs out"
            if sign.busy is not None and sign.busy > self._limit:
                return (
                    f"{name} has waited {sign.busy:.0f} s for a reward function, tool, or rollout function, longer "
                    f"than ddp_timeout={self._limit:g}"
                )
        return None

    def _is_dead(self, rank: int) -> bool:
        """Return whether another rank has ended or hangs without having said so."""
        sign = self._last_signs[rank]
        if sign.state != "running" or rank == self._rank:
            return False
        if sign.machine == self._machine and _process_has_ended(sign.pid):
            return True
        return time.monotonic() - self._times_of_signs[rank] > SILENCE

    def _end_process(self) -> None:
        if self._tells():
            print(f"pacs-trl train: {self._message()}", file=sys.stderr, flush=True)
        os._exit(1)

    # Message --------------------------------------------------------------------------------------------------------

    def _tells(self) -> bool:
        """Return whether this rank says why all end: the first that lives, unless one did that has ended since. The
        first call decides: the main thread and the watch both ask."""
        if self._tells_problem is None:
            self._tells_problem = self._is_first_alive() and self._is_first_to_tell()
        return self._tells_problem

    def _is_first_alive(self) -> bool:
        """Return whether all ranks before this one have ended."""
        running_before = [
            rank for rank, sign in self._last_signs.items() if rank < self._rank and sign.state == "running"
        ]
        return all(self._is_dead(rank) for rank in running_before)

    def _is_first_to_tell(self) -> bool:
        try:
            return self._store.add(f"{self._key_prefix}/told", 1) == 1
        except (RuntimeError, OSError):  # the store has ended, and with it the rank that holds it
            return True

    def _message(self) -> str:
        last = last_checkpoint(self._output_dir)
        where = f"from {last}" if last else "from the beginning: no checkpoint is complete"
        others = "other rank has" if self._num_ranks == 2 else f"other {self._num_ranks - 1} ranks have"
        return (
            f"{self.problem}, so the {others} stopped. Find the cause in its log, and "
            f"continue with `--resume_from_checkpoint last`, {where}."
        )


def check_shared_folder(accelerator: Any, output_dir: str) -> None:
    """Raise a `ValueError` on all ranks if one of them does not see the folder of checkpoints that rank 0 sees. A run
    that resumes would not see the parts of checkpoints that such a rank has written."""
    (name,) = broadcast_object_list([f".shared-{uuid.uuid4().hex}"])
    file = Path(output_dir, name)
    if accelerator.is_main_process:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    accelerator.wait_for_everyone()
    blind_rank = None
    if not _appears(file):
        blind_rank = f"rank {accelerator.process_index} on {socket.gethostname()}"
    blind_ranks = [rank for rank in gather_object([blind_rank]) if rank is not None]
    if accelerator.is_main_process:
        file.unlink()
    if blind_ranks:
        raise UserError(
            f"output_dir={output_dir!r} is not the same folder on all ranks: {', '.join(blind_ranks)} do not see a "
            'file that rank 0 wrote there. Put it on a file system that all nodes share, or set save_strategy: "no".'
        )


def _appears(file: Path) -> bool:
    """Return whether a file exists within about five seconds: file systems of clusters show new files late."""
    for seconds in (0.0, 0.1, 1.0, 4.0):
        time.sleep(seconds)
        if file.exists():
            return True
    return False


@contextmanager
def watching_ranks(*, limit: float, output_dir: str) -> Iterator[None]:
    """Watch the other ranks inside the context; `limit` and `output_dir` are those of [`RankWatch`]."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    watch = RankWatch(
        dist.distributed_c10d._get_default_store().clone(),  # type: ignore[attr-defined]  # missing in torch's stub
        dist.get_rank(),
        dist.get_world_size(),
        limit=limit,
        output_dir=output_dir,
        run=next(_RUN_NUMBERS),
    )
    watch.start()
    try:
        yield
    except BaseException as error:  # also of Rust code, and Ctrl-C
        if not is_collective_error(error):
            watch.fail(error)
            raise
        explanation = watch.explain(error)
        if explanation is None:  # all others live: the error is one of this rank, such as a timeout in a user's code
            watch.fail(error)
            raise
        raise explanation from error
    finally:
        watch.stop()
