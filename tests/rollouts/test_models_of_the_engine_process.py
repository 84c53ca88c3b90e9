"""Environment of the engine process."""

import os
import signal
import socket
import sys

from transformers.utils import HF_MODULES_CACHE

from pacs_trl.rollouts import engine_process


def test_code_of_models_loaded_with_trust_remote_code_can_be_imported(monkeypatch):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != HF_MODULES_CACHE])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(engine_process, "_end_with", lambda parent: None)
    ours, theirs = socket.socketpair()
    ours.close()  # so that it ends at once
    engine_process.serve(os.getppid(), theirs.detach())
    assert HF_MODULES_CACHE in sys.path
