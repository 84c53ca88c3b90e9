"""The connection between a verifier and its pool process.

Standard library only: the trainer, the pool, and its workers all import this.
"""

import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import weakref
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


def connection_of(own: socket.socket, send_seconds: float) -> Connection:
    """Return a connection over a socket, which it takes over. Sending raises an `OSError` where the peer takes nothing
    for so long."""
    whole = int(send_seconds) + 1
    own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", whole, 0))
    return Connection(own.detach())


class PoolProcess:
    """A running `pacs_trl.verification.pool` and the connection to it. It gets `num_workers`, `timeout_seconds`,
    `cpu_seconds`, `memory_limit_mb`, and `protocol`."""

    def __init__(self, **settings: Any):
        owner = os.getpid()
        self.seconds_per_item = settings["timeout_seconds"] / settings["num_workers"]
        ours, theirs = socket.socketpair()
        self.connection = connection_of(ours, 120.0)
        # The package is found where this process found it. Last on the path, where it can hide nothing else.
        package_root = str(Path(__file__).resolve().parents[2])
        start = f"import sys; sys.path.append({package_root!r}); from pacs_trl.verification.pool import main; main()"
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", start, json.dumps({**settings, "parent_pid": owner})],
            stdin=theirs.fileno(),
            # The order of sets, hence of sympy's rewriting, is the same in every run.
            env={**os.environ, "PYTHONHASHSEED": "0"},
            # Ctrl-C in the terminal is for the trainer, which then ends the pool in an orderly way.
            start_new_session=True,
        )
        theirs.close()
        self.pid = process.pid
        # Runs when the verifier is forgotten or the interpreter ends, unless it has been called before.
        self.end = weakref.finalize(self, end_process, process, self.connection, owner)

    def ask(self, items: list) -> list[tuple[int, float]]:
        """
        Return outcome and seconds of each item (completion, alternative gold answers), in order.

        Raises:
            OSError, EOFError: When the pool has ended, or stays silent for longer than its limits allow.
        """
        self.connection.send(items)
        # The pool keeps its limits. Should it stall all the same (a suspended process), the trainer must not.
        if not self.connection.poll(120.0 + len(items) * self.seconds_per_item):
            raise TimeoutError("the pool does not answer")
        return self.connection.recv()


def end_process(
    process: subprocess.Popen, connection: socket.socket | Connection, owner: int, folder: str | None = None
) -> None:
    """End a process that ends when the connection does, and remove the folder it had."""
    connection.close()
    if os.getpid() != owner:  # a forked copy: the process belongs to the parent
        return
    try:
        process.wait(timeout=5.0)  # it ends when the connection closes
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
