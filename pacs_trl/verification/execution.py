"""Execution of programs by a worker on this machine (`sandbox.py`) or by a SandboxFusion server."""

import fcntl
import json
import os
import socket
import subprocess
import sys
import tempfile
import urllib.request
import weakref
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple

from . import Outcome
from .client import end_process
from .confinement import LAYERS


class Execution(NamedTuple):
    """One run of a program: its outcome (`None` if it ended by itself without an error; else `ERROR`, `TIMEOUT`, or
    `KILLED`), its output, the end of its standard error, and its wall-clock seconds."""

    outcome: Outcome | None
    output: str
    messages: str
    seconds: float

    @property
    def error(self) -> str:
        """The class of the error, or what else ended the program; empty if nothing did."""
        if self.outcome is None:
            return ""
        last = (self.messages.strip().splitlines() or [""])[-1].partition(":")[0]
        is_class = self.outcome is Outcome.ERROR and last.replace(".", "").isidentifier()
        return last[:80] if is_class else self.outcome.name.lower()


class Level(NamedTuple):
    """How far programs are confined: the layers that hold, the same in words, and why the others do not."""

    layers: tuple[str, ...]
    text: str
    reasons: str = ""


# Tries to break out in the ways that tell the layers apart, and says what it could do.
_PROBE = """
import json, os, socket, sys
def can(action, *arguments):
    try:
        action(*arguments)
        return True
    except (OSError, MemoryError):
        return False
def fork():
    if os.fork() == 0:
        os._exit(0)
def write():
    with open("probe", "w") as file:
        file.write("x")
limit = int(sys.stdin.read())
print(json.dumps({
    "landlock": not can(os.listdir, "..") and not can(open, "/proc/self/environ") and not can(write),
    "seccomp": not can(socket.socket) and not can(fork) and not can(os.kill, os.getppid(), 0),
    "rlimits": not can(bytearray, limit),
}))
"""


class LocalWorker:
    """A running `sandbox.py` and the connection to it."""

    def __init__(self, layers: Sequence[str], limits: dict[str, Any]):
        self.limits = limits
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connection.settimeout(60.0)
        folder = tempfile.mkdtemp(prefix="pacs_trl_code_")
        package_root = str(Path(__file__).resolve().parents[2])
        start = f"import sys; sys.path.append({package_root!r}); "
        start += "from pacs_trl.verification.sandbox import main; sys.path.pop(); main()"
        settings = {"connection": theirs.fileno(), "parent_pid": os.getpid(), "folder": folder, "layers": list(layers)}
        # As `python -I -S`, but for one variable: the order of sets, hence an output, is the same in every run.
        process = subprocess.Popen(
            [sys.executable, "-s", "-P", "-S", "-X", "utf8", "-c", start, json.dumps(settings | limits)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={"PYTHONHASHSEED": "0"},
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C in the terminal is for the trainer
        )
        theirs.close()
        self.pid, self.folder = process.pid, folder
        # Runs when the worker is forgotten or the interpreter ends, unless it has been called before.
        self.end = weakref.finalize(self, end_process, process, self.connection, os.getpid(), folder)
        self.report: dict[str, Any] = {}  # which layers it has, sent once it is ready

    def run(self, program: str, text: str) -> Execution:
        """Run a program on an input. Raises an `OSError` when the worker has ended or stays silent."""
        if not self.report:
            self.report = self._receive()
        contents = [content.encode("utf-8", "surrogatepass") for content in (program, text)] + [b"", b""]
        files = [os.memfd_create("program", os.MFD_CLOEXEC) for _ in contents]
        try:
            for file, content in zip(files, contents, strict=True):
                with open(file, "wb", closefd=False) as stream:
                    stream.write(content)
                os.lseek(file, 0, os.SEEK_SET)
            for file in files[2:]:
                fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
            socket.send_fds(self.connection, [b"run"], files)
            self.connection.settimeout(self.limits["timeout_seconds"] + 60.0)  # should it stall, the trainer must not
            report = self._receive()
            output = os.pread(files[2], self.limits["output_limit_mb"] << 20, 0)
            messages = os.pread(files[3], 4000, max(0, os.fstat(files[3]).st_size - 4000))
        finally:
            for file in files:
                os.close(file)
        if report["refusal"]:
            raise RuntimeError(f"A program could not be confined, and was not run: {report['refusal']}.")
        outcome = None if report["code"] == 0 else Outcome.KILLED if report["code"] < 0 else Outcome.ERROR
        if report["timed_out"]:
            outcome = Outcome.TIMEOUT
        words = messages.decode("utf-8", "replace") or "timeout" * report["timed_out"]
        return Execution(outcome, output.decode("utf-8", "replace"), words, report["seconds"])

    def measure(self) -> Level:
        """Which layers hold, by a program that tries what each of them forbids."""
        execution = self.run(_PROBE, str(self.limits["memory_limit_mb"] << 20))
        try:
            holds = json.loads(execution.output)
        except ValueError:
            raise ValueError(
                f"No program can be run here ({execution.error}): {execution.messages or 'it ended without a word'}."
            ) from None
        if not holds["rlimits"]:
            raise ValueError("The limits of this system do not hold: a program could take more memory than it may.")
        layers = tuple(layer for layer in LAYERS if holds[layer])
        names = {"landlock": f"landlock {self.report['landlock']}", "seccomp": "seccomp"}
        text = " + ".join([*(names[layer] for layer in layers), "rlimits"]) if layers else "rlimits only"
        reasons = "; ".join(f"{layer}: {self.report[layer]}" for layer in LAYERS if not holds[layer])
        return Level(layers, text, reasons)

    def _receive(self) -> dict[str, Any]:
        answer = self.connection.recv(1 << 16)
        if not answer:
            raise ConnectionResetError("the worker has ended")
        return json.loads(answer)


class SandboxFusion:
    """Programs run by a SandboxFusion server (bytedance/SandboxFusion), which answers for their confinement."""

    def __init__(self, url: str, cpu_seconds: float, timeout_seconds: float, memory_limit_mb: int):
        self.url, self.timeout_seconds, self.memory_limit_mb = url.rstrip("/"), timeout_seconds, memory_limit_mb

    def run(self, program: str, text: str) -> Execution:
        request = {"code": program, "stdin": text, "language": "python", "run_timeout": self.timeout_seconds}
        body = json.dumps(request | {"memory_limit_MB": self.memory_limit_mb}).encode()
        try:
            sent = urllib.request.Request(f"{self.url}/run_code", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(sent, timeout=self.timeout_seconds + 60.0) as answer:
                result = json.load(answer)["run_result"]
            status = result["status"]
        except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:  # TypeError: its result is null
            raise ConnectionError(f"{self.url} does not run programs: {error}") from error
        outcome = {"Finished": None, "TimeLimitExceeded": Outcome.TIMEOUT}.get(status, Outcome.KILLED)
        if outcome is None and result.get("return_code"):
            outcome = Outcome.ERROR
        return Execution(
            outcome, result.get("stdout") or "", result.get("stderr") or "", result.get("execution_time") or 0.0
        )

    def measure(self) -> Level:
        self.run("print(1)", "")
        return Level((), f"SandboxFusion at {self.url}")

    def end(self) -> None:
        """Nothing is held."""
