"""The connection between a verifier and its pool process, and the messages on it.

Standard library only: the trainer, the pool and its workers all import this.
"""

import json
import os
import pickle
import shutil
import socket
import struct
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any


_HEADER = struct.Struct("!Q")  # length of the pickle that follows


class PoolProcess:
    """A running `pacs_trl.verification.pool` and the connection to it. It is passed `num_workers`, `timeout_seconds`,
    `cpu_seconds`, `memory_limit_mb` and `protocol`."""

    def __init__(self, **settings: Any):
        self.owner = os.getpid()
        self.seconds_per_item = settings["timeout_seconds"] / settings["num_workers"]
        self.connection, theirs = socket.socketpair()
        # The package is found where this process found it. Last on the path, where it can hide nothing else.
        package_root = str(Path(__file__).resolve().parents[2])
        start = f"import sys; sys.path.append({package_root!r}); from pacs_trl.verification.pool import main; main()"
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", start, json.dumps({**settings, "parent_pid": self.owner})],
            stdin=theirs.fileno(),
            # The order of sets, hence of sympy's rewriting, is the same in every run.
            env={**os.environ, "PYTHONHASHSEED": "0"},
            # Ctrl-C in the terminal is for the trainer, which then ends the pool in an orderly way.
            start_new_session=True,
        )
        theirs.close()
        self.pid = process.pid
        # Runs when the verifier is forgotten or the interpreter ends, unless it has been called before.
        self.end = weakref.finalize(self, end_process, process, self.connection, self.owner)

    def ask(self, items: list) -> list[tuple[int, float]]:
        """
        Outcome and seconds of each item (completion, alternative gold answers), in order.

        Raises:
            OSError: When the pool has ended, or stays silent for longer than its limits allow.
        """
        # The pool keeps its limits. Should it stall all the same (a suspended process), the trainer must not.
        self.connection.settimeout(120.0 + len(items) * self.seconds_per_item)
        send(self.connection, items)
        answer = receive(self.connection)
        if answer is None:
            raise ConnectionResetError("the pool ended without an answer")
        return answer


def end_process(process: subprocess.Popen, connection: socket.socket, owner: int, folder: str | None = None) -> None:
    """End a process that ends when the connection does, and remove the folder it had."""
    connection.close()
    if os.getpid() != owner:  # a forked copy: the process is somebody else's
        return
    try:
        process.wait(timeout=5.0)  # it ends when the connection closes
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def send(connection: socket.socket, message: Any) -> None:
    """Send one message, which the peer reads with [`receive`]."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    connection.sendall(_HEADER.pack(len(body)) + body)


def receive(connection: socket.socket, on_timeout: Callable[[], None] | None = None) -> Any:
    """The next message of the peer, or `None` when it has closed the connection. The connection's timeout applies to
    every wait for more data; then `on_timeout`, if given, is called, and the wait goes on."""
    header = _read_exactly(connection, _HEADER.size, on_timeout)
    body = header and _read_exactly(connection, _HEADER.unpack(header)[0], on_timeout)
    return pickle.loads(body) if body else None


def _read_exactly(connection: socket.socket, size: int, on_timeout: Callable[[], None] | None) -> bytes | None:
    buffer = bytearray()
    while len(buffer) < size:
        try:
            received = connection.recv(min(size - len(buffer), 1 << 20))
        except TimeoutError:
            if on_timeout is None:
                raise
            on_timeout()
            continue
        if not received:
            return None
        buffer += received
    return bytes(buffer)
