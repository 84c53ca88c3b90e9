"""An engine process forked from the server of `processes.py`, where a new interpreter needs eight seconds."""

import os
import socket
from unittest.mock import patch

from pacs_trl.rollouts import engine_process
from support.processes import CONTEXT, ensure_server


def _serve(connection: socket.socket) -> None:
    engine_process.serve(os.getppid(), connection.detach())


def start_forked(connection: socket.socket):
    ensure_server()
    process = CONTEXT.Process(target=_serve, args=(connection,), daemon=True)
    process.start()
    process.wait = process.join
    return process


def forked_engine():
    """Patch inside a `with` block, also in a process that a test starts."""
    return patch.object(engine_process, "start_process", start_forked)
