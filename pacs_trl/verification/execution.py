"""Execution of programs by a worker process (`sandbox.py`)."""

import fcntl
import json
import os
import socket
import subprocess
import tempfile
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from . import Outcome
from .client import end_process, start_process
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
        settings = {"connection": theirs.fileno(), "parent_pid": os.getpid(), "folder": folder, "layers": list(layers)}
        # As `python -I -S`, except for a variable that fixes the order of sets, hence outputs.
        process = start_process(
            "sandbox",
            settings | limits,
            ["-s", "-S", "-X", "utf8"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={"PYTHONHASHSEED": "0"},
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self.pid, self.folder, self.owner = process.pid, folder, os.getpid()
        # Runs when the worker is collected or the interpreter exits, unless called before.
        self.end = weakref.finalize(self, end_process, process, self.connection, self.owner, folder)
        self.report: dict[str, Any] = {}  # its layers, sent once it is ready

    def run(self, program: str, text: str, has_asserts: bool = False) -> Execution:
        """Run a program on an input, or on asserts. Raises an `OSError` if the worker has ended or does not answer."""
        if os.getpid() != self.owner:
            raise ConnectionError("the worker belongs to the parent process")
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
        holds = json.loads(execution.output) if execution.outcome is None else {"rlimits": False}
        if not holds["rlimits"]:
            raise ValueError(
                "The sandbox cannot run programs on this machine, or limit their memory ("
                f"{execution.error or 'no limit'}: {execution.messages or 'no message'}). Use another machine."
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
