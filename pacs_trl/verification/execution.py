"""Execution of programs by a worker on this machine (`sandbox.py`) or by a SandboxFusion server."""

import fcntl
import inspect
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

from . import Outcome, calls
from .client import end_process
from .confinement import LAYERS


class Execution(NamedTuple):
    """Result of a program: outcome (`None` for success; else `ERROR`, `TIMEOUT`, or `KILLED`), output, end of standard
    error, and wall-clock seconds."""

    outcome: Outcome | None
    output: str
    messages: str
    seconds: float

    @property
    def error(self) -> str:
        """Class of the exception, or outcome in lower case; empty for success."""
        if self.outcome is None:
            return ""
        last = (self.messages.strip().splitlines() or [""])[-1].partition(":")[0]
        is_class = self.outcome is Outcome.ERROR and last.replace(".", "").isidentifier()
        return last[:80] if is_class else self.outcome.name.lower()


class Level(NamedTuple):
    """Confinement of programs: the layers that hold, a description, and why the others do not."""

    layers: tuple[str, ...]
    text: str
    reasons: str = ""


# Tries to break out of each layer, and prints the layers that hold.
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
        # As `python -I -S`, except for a variable that fixes the order of sets, hence outputs.
        process = subprocess.Popen(
            [sys.executable, "-s", "-P", "-S", "-X", "utf8", "-c", start, json.dumps(settings | limits)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={"PYTHONHASHSEED": "0"},
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C in the terminal reaches only the trainer
        )
        theirs.close()
        self.pid, self.folder = process.pid, folder
        # Runs when the worker is collected or the interpreter exits, unless called before.
        self.end = weakref.finalize(self, end_process, process, self.connection, os.getpid(), folder)
        self.report: dict[str, Any] = {}  # its layers, sent once it is ready

    def run(self, program: str, text: str, has_asserts: bool = False) -> Execution:
        """Run a program on an input, or on asserts. Raises an `OSError` if the worker has ended or does not answer."""
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
            socket.send_fds(self.connection, [b"asserts" if has_asserts else b"run"], files)
            self.connection.settimeout(self.limits["timeout_seconds"] + 60.0)  # if it stalls, the trainer must not
            report = self._receive()
            output = os.pread(files[2], self.limits["output_limit_mb"] << 20, 0)
            messages = os.pread(files[3], 4000, max(0, os.fstat(files[3]).st_size - 4000))
        finally:
            for file in files:
                os.close(file)
        if report["refusal"]:
            raise RuntimeError(f"A program was not run, because it could not be confined: {report['refusal']}.")
        outcome = None if report["code"] == 0 else Outcome.KILLED if report["code"] < 0 else Outcome.ERROR
        if report["timed_out"]:
            outcome = Outcome.TIMEOUT
        words = messages.decode("utf-8", "replace") or "timeout" * report["timed_out"]
        return Execution(outcome, output.decode("utf-8", "replace"), words, report["seconds"])

    def measure(self) -> Level:
        """Return the layers that hold, from a program that tries to break out of each."""
        execution = self.run(_PROBE, str(self.limits["memory_limit_mb"] << 20))
        try:
            holds = json.loads(execution.output)
        except ValueError:
            raise ValueError(
                f"The sandbox cannot run programs on this machine ({execution.error}): "
                f"{execution.messages or 'no message'}. Set code_sandbox_url to use a SandboxFusion server."
            ) from None
        if not holds["rlimits"]:
            raise ValueError(
                "This system does not enforce memory limits. Set code_sandbox_url to a SandboxFusion server."
            )
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
    """Execution on a SandboxFusion server (bytedance/SandboxFusion), which confines the programs."""

    def __init__(self, url: str, cpu_seconds: float, timeout_seconds: float, memory_limit_mb: int):
        self.url, self.timeout_seconds, self.memory_limit_mb = url.rstrip("/"), timeout_seconds, memory_limit_mb

    def run(self, program: str, text: str, has_asserts: bool = False) -> Execution:
        assert not has_asserts, "they need a second process"
        program = program.replace(f"from {calls.__name__} import *\n", inspect.getsource(calls), 1)
        request = {"code": program, "stdin": text, "language": "python", "run_timeout": self.timeout_seconds}
        body = json.dumps(request | {"memory_limit_MB": self.memory_limit_mb}).encode()
        try:
            sent = urllib.request.Request(f"{self.url}/run_code", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(sent, timeout=self.timeout_seconds + 60.0) as answer:
                result = json.load(answer)["run_result"]
            status = result["status"]
        except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:  # TypeError: the result is null
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
        """Do nothing: there is no process to end."""
