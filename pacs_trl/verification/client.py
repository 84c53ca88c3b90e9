"""Processes that the verifiers start, with the standard library only."""

import json
import os
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


class ChildProcess:
    """A running `main` of a module of this folder, in a fresh interpreter with settings as JSON, and the connection
    to it, on which it depends: it exits when the connection closes."""

    def __init__(
        self,
        module: str,
        connection: Any,
        settings: dict[str, Any],
        flags: Sequence[str] = (),
        env: dict[str, str] | None = None,
        **how: Any,
    ):
        self.connection, self.owner = connection, os.getpid()
        # The package of this process, last on the path, where it hides no other module.
        package_root = str(Path(__file__).resolve().parents[2])
        start = f"import sys; sys.path.append({package_root!r}); "
        start += f"from pacs_trl.verification.{module} import main; sys.path.pop(); main()"
        arguments = json.dumps(settings | {"parent_pid": self.owner})
        # Ctrl-C in the terminal reaches only the trainer, which then ends the process. The variable makes the order
        # of sets equal in every run, hence sympy's rewriting and the outputs of programs.
        process = subprocess.Popen(
            [sys.executable, *flags, "-P", "-c", start, arguments],
            start_new_session=True,
            env={**(os.environ if env is None else env), "PYTHONHASHSEED": "0"},
            **how,
        )
        self.pid = process.pid
        # Runs when the object is collected or the interpreter exits, unless called before.
        self.end = weakref.finalize(self, _end, process, connection, self.owner)

    def check_owner(self) -> None:
        """Raise a `ConnectionError` in a forked process, which would mix its answers with those of the parent."""
        if os.getpid() != self.owner:
            raise ConnectionError("the process belongs to the parent process")


def _end(process: subprocess.Popen, connection: Any, owner: int) -> None:
    connection.close()
    if os.getpid() != owner:
        return
    try:
        process.wait(timeout=5.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class PoolProcess(ChildProcess):
    """A running `pacs_trl.verification.pool`. `settings` are `num_workers`, `timeout_seconds`, `cpu_seconds`,
    `memory_limit_mb`, and `protocol`."""

    def __init__(self, **settings: Any):
        self.seconds_per_item = settings["timeout_seconds"] / settings["num_workers"]
        ours, theirs = socket.socketpair()
        with theirs:
            super().__init__("pool", connection_of(ours, 120.0), settings, stdin=theirs.fileno())

    def grade(self, items: list) -> list[Any]:
        """Return the grade of each item (completion, alternative gold answers), in order. Raises an `OSError` or
        `EOFError` if the pool has ended or does not answer within its limits."""
        self.check_owner()
        self.connection.send(items)
        # The pool enforces its limits. If it stalls (a suspended process), the trainer must not.
        if not self.connection.poll(120.0 + len(items) * self.seconds_per_item):
            raise TimeoutError("the pool does not answer")
        return self.connection.recv()
