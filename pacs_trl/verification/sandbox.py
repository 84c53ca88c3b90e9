"""Worker process that runs one program of a model at a time, in a confined child process.

`code.py` starts this file as a fresh interpreter with the standard library only. It forks a child per program,
which it receives as open files (program, input, output, messages) and never reads, so that no child inherits the
program or output of another. Asserts run in a second child, connected to the program by a socket. A child gives up its
rights before it reads its source (`confinement.py`); the worker enforces the time limits, and kills the children and
everything that they started.
"""

import atexit
import builtins
import gc
import json
import linecache
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from types import ModuleType
from typing import Any, NoReturn

from . import asserts as asserts  # programs import them
from . import calls as calls
from . import confinement


# Imported once for all programs.
PRELOADED = """
abc array bisect calendar cmath collections contextlib copy csv dataclasses datetime decimal enum fractions functools
heapq io itertools json math numbers operator pprint queue random re statistics string textwrap timeit types typing
unicodedata
"""


class Worker:
    """Runs programs from a connection one at a time. `settings` are `parent_pid`, `folder` (in which each program gets
    one), `time_zones` (folders), `layers`, `cpu_seconds`, `timeout_seconds`, `memory_limit_mb`, and
    `output_limit_mb`."""

    def __init__(self, connection: socket.socket, settings: dict[str, Any]):
        self.connection, self.settings = connection, settings
        has_landlock = "landlock" in settings["layers"]
        readable = confinement.readable_places() + settings["time_zones"]
        self.ruleset = confinement.landlock_ruleset(readable) if has_landlock else None
        self.has_seccomp = "seccomp" in settings["layers"]
        # Orphans of a program become children of this process, which kills them.
        confinement.prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
        confinement.prctl(4, 0)  # PR_SET_DUMPABLE: no process may read its memory and descriptors

    def serve(self) -> None:
        """Run programs until the connection closes or the parent exits."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        while os.getppid() == self.settings["parent_pid"]:
            if not poll.poll(1000):
                continue
            kind, files, _, _ = socket.recv_fds(self.connection, 4096, 4)
            if len(files) < 4:
                return
            report = self._run(files, has_asserts=kind == b"asserts")
            for file in files:
                os.close(file)
            self.connection.sendall(json.dumps(report).encode())

    def _run(self, files: list[int], has_asserts: bool) -> dict[str, Any]:
        folder = tempfile.mkdtemp(prefix="pacs_trl_code_", dir=self.settings["folder"])
        confined, confine = os.pipe()
        (program, asserts, output, messages), children, pids = files, [files], []
        ours, theirs = socket.socketpair()
        if has_asserts:
            children = [[asserts, ours.fileno(), output, messages], [program, theirs.fileno(), messages, messages]]
        for child in children:
            pids.append(os.fork())
            if pids[-1] == 0:
                os.close(confined)
                self._become_program(child, folder, confine, is_readable=child is children[-1])
        for file in (confine, ours.detach(), theirs.detach()):
            os.close(file)
        with os.fdopen(confined, "rb") as pipe:
            refusal = pipe.read()  # empty once the program is confined, else the reason
        started = time.monotonic()
        try:
            timed_out = self._times_out(pids, started)
        finally:  # also if the parent has exited
            for pid in pids:
                end_group(pid)
            ends = [os.wait4(pid, 0)[1:] for pid in pids]
            end_children()
            remove(folder)
        code = os.waitstatus_to_exitcode(ends[0][0])  # of the asserts, or of a program without
        for status, usage in ends:
            is_killed = os.waitstatus_to_exitcode(status) in (-signal.SIGKILL, -signal.SIGXCPU)
            if is_killed and usage.ru_utime + usage.ru_stime >= self.settings["cpu_seconds"]:
                timed_out = True  # the kernel acted first
        seconds = time.monotonic() - started
        return {"refusal": refusal.decode(), "code": code, "timed_out": timed_out, "seconds": seconds}

    def _times_out(self, pids: list[int], started: float) -> bool:
        """Wait for the end of the first process; returns whether one of them reached a time limit before."""
        ended, clocks = os.pidfd_open(pids[0]), [(~pid << 3) | 2 for pid in pids]  # the kernel's ids of CPU clocks
        try:
            poll = select.poll()
            for file in (ended, self.connection.fileno()):
                poll.register(file, select.POLLIN)
            while True:
                left = self.settings["timeout_seconds"] - (time.monotonic() - started)
                left = min(left, self.settings["cpu_seconds"] - max(map(time.clock_gettime, clocks)))
                if left <= 0:
                    return True
                ready = [file for file, _ in poll.poll(1 + 1000 * left)]
                if ended in ready:
                    return False
                if ready:  # the parent never sends while it waits, so it has closed the connection
                    sys.exit(0)
        finally:
            os.close(ended)

    def _become_program(self, files: list[int], folder: str, confine: int, is_readable: bool) -> NoReturn:
        try:
            self._confine(files, folder, confine, is_readable)
            with open(files[0], "rb") as file:
                source = file.read()
            os.close(confine)
        except BaseException as error:
            os.write(confine, f"{type(error).__name__}: {error}".encode())
            os._exit(1)
        run_program(source)

    def _confine(self, files: list[int], folder: str, confine: int, is_readable: bool) -> None:
        """Give up all rights that a program does not need."""
        os.setsid()
        confinement.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: killed with the worker
        confinement.prctl(4, is_readable)  # a program may read its /proc/self, but not that of asserts
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.chdir(folder)
        os.environ.clear()
        program, *streams = files
        for target, file in enumerate(streams):  # input, output, messages
            os.dup2(file, target)
        calls.devnull = os.open(os.devnull, os.O_RDWR)
        kept = [program, confine, calls.devnull]
        if self.ruleset is not None:
            kept.append(self.ruleset)
        confinement.close_other_files(*kept)
        confinement.set_limits(
            *(self.settings[name] for name in ("cpu_seconds", "memory_limit_mb", "output_limit_mb")),
            bound_processes=not self.has_seccomp,
        )
        confinement.confine(self.ruleset, filter_calls=self.has_seccomp)


def end_group(pid: int) -> None:
    """Kill a process and its descendants in the same session."""
    for kill, whom in ((os.killpg, pid), (os.kill, pid)):
        try:
            kill(whom, signal.SIGKILL)
        except ProcessLookupError:
            pass


def end_children() -> None:
    """Kill children until none is left, including those inherited from killed ones."""
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{name}/stat") as file:
                    if int(file.read().rpartition(")")[2].split()[1]) == os.getpid():
                        os.kill(int(name), signal.SIGKILL)
            except (FileNotFoundError, ProcessLookupError):
                pass
        time.sleep(0.001)


def remove(folder: str) -> None:
    """Remove a folder, including subfolders that a program, where it could, nested deeply or made inaccessible."""
    try:
        os.rmdir(folder)
    except OSError:
        for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            subprocess.run([*command, folder], stderr=subprocess.DEVNULL)


def run_program(source: bytes) -> NoReturn:
    """Run a program as `python solution.py` would, in this process, and end it."""
    module = ModuleType("__main__")
    module.__file__ = os.path.abspath("solution.py")
    sys.modules["__main__"], sys.argv = module, ["solution.py"]
    code = 1
    try:
        try:
            lines = source.decode(errors="replace").splitlines(keepends=True)
            linecache.cache["solution.py"] = (len(source), None, lines, "solution.py")  # for tracebacks
            exec(compile(source, "solution.py", "exec", dont_inherit=True), module.__dict__)
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
            if code == 1 and not isinstance(stop.code, int):
                print(stop.code, file=sys.stderr)
        except BaseException as error:
            traceback.print_exception(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))
        threading._shutdown()  # type: ignore[attr-defined]  # as at the exit of any interpreter: ends pools, joins threads
        atexit._run_exitfuncs()
        try:
            sys.stdout.flush()
        except (OSError, ValueError) as error:  # over the size limit, or closed by the program
            code = code or (1 if isinstance(error, OSError) else 0)
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.stderr.flush()
    finally:
        os._exit(code & 0xFF)


def main() -> None:
    settings = json.loads(sys.argv[1])
    # schedulers send it to all processes; the worker ends after its parent
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_NOFILE, (confinement.MAX_OPEN_FILES, confinement.MAX_OPEN_FILES))
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # normally defined by `site`
    for name in PRELOADED.split():
        __import__(name)
    gc.collect()
    gc.freeze()  # the collector would copy the memory pages that programs share
    connection = socket.socket(fileno=settings.pop("connection"))
    try:
        Worker(connection, settings).serve()
    except ConnectionError:
        pass  # the parent has exited


if __name__ == "__main__":
    main()
