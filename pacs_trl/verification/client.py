"""Connection between a verifier and its pool process, with the standard library only."""

import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


def connection_of(own: socket.socket, send_seconds: float) -> Connection:
    """Return a connection that owns a socket. Sending raises an `OSError` if the peer receives nothing for
    `send_seconds`."""
    whole = int(send_seconds) + 1
    own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", whole, 0))
    return Connection(own.detach())


def start_process(module: str, settings: dict[str, Any], flags: Sequence[str] = (), **how: Any) -> subprocess.Popen:
    """Start `main` of a module of this folder in a fresh interpreter, with settings as JSON."""
    # The package of this process, last on the path, where it hides no other module.
    package_root = str(Path(__file__).resolve().parents[2])
    start = f"import sys; sys.path.append({package_root!r}); "
    start += f"from pacs_trl.verification.{module} import main; sys.path.pop(); main()"
    # Ctrl-C in the terminal reaches only the trainer, which then ends the process.
    return subprocess.Popen(
        [sys.executable, *flags, "-P", "-c", start, json.dumps(settings)], start_new_session=True, **how
    )


class PoolProcess:
    """A running `pacs_trl.verification.pool` and the connection to it. `settings` are `num_workers`,
    `timeout_seconds`, `cpu_seconds`, `memory_limit_mb`, and `protocol`."""

    def __init__(self, **settings: Any):
        self.owner = os.getpid()
        self.seconds_per_item = settings["timeout_seconds"] / settings["num_workers"]
        ours, theirs = socket.socketpair()
        self.connection = connection_of(ours, 120.0)
        # The variable makes the order of sets, hence of sympy's rewriting, equal in every run.
        how = {"stdin": theirs.fileno(), "env": {**os.environ, "PYTHONHASHSEED": "0"}}
        process = start_process("pool", {**settings, "parent_pid": self.owner}, **how)
        theirs.close()
        self.pid = process.pid
        # Runs when the object is collected or the interpreter exits, unless called before.
        self.end = weakref.finalize(self, end_process, process, self.connection, self.owner)

    def grade(self, items: list) -> list[tuple[int, float, float]]:
        """Return outcome, seconds, and share of each item (completion, alternative gold answers), in order. Raises an
        `OSError` or `EOFError` if the pool has ended or does not answer within its limits."""
        if os.getpid() != self.owner:  # a fork would mix its answers with those of the parent
            raise ConnectionError("the pool belongs to the parent process")
        self.connection.send(items)
        # The pool enforces its limits. If it stalls (a suspended process), the trainer must not.
        if not self.connection.poll(120.0 + len(items) * self.seconds_per_item):
            raise TimeoutError("the pool does not answer")
        return self.connection.recv()


def end_process(
    process: subprocess.Popen, connection: socket.socket | Connection, owner: int, folder: str | None = None
) -> None:
    """Close the connection of a process, which then exits, and remove its folder."""
    connection.close()
    if os.getpid() != owner:  # a forked copy: the process belongs to the parent
        return
    try:
        process.wait(timeout=5.0)  # it exits when the connection closes
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
