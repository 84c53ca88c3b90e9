"""The attacks of `data/attacks.txt` with every layer, with one, and with none: who gets out; nobody is rewarded."""

import os
import re
import socket
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
from watching import block, children, workers_of

from pacs_trl.verification import Outcome
from pacs_trl.verification.code import CodeVerifier
from pacs_trl.verification.confinement import LAYERS


class Attack(NamedTuple):
    name: str
    stopped_by: list[str]
    source: str


PRELUDE = """
import os, sys, time, signal, ctypes, socket, struct, threading
libc = ctypes.CDLL(None, use_errno=True)
def breach(condition=True):
    if condition:
        print("BREACH", flush=True)
def call(number, *arguments):
    return libc.syscall(ctypes.c_long(number), *(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
"""


def read_attacks():
    _, *blocks = (Path(__file__).parents[1] / "data" / "attacks.txt").read_text().split("\n### ")
    for attack in blocks:
        header, _, source = attack.partition("\n")
        name, _, layers = header.partition(" | ")
        yield Attack(name, layers.split(", "), source)


READ = list(read_attacks())
FUNCTIONS = [attack.source for attack in READ if attack.stopped_by == ["function"]]
ATTACKS = [attack._replace(source=PRELUDE + attack.source) for attack in READ if attack.stopped_by != ["function"]]
EXPECTED = "EXPECTED-" + os.urandom(8).hex()
# A case; asserts that only look similar; asserts in a loop, after one that catches errors.
ASSERTS = (
    f"assert answer() == {EXPECTED!r}",
    f"def check(f):\n    assert f().startswith({EXPECTED!r}) or f() in [{EXPECTED!r}]",
    f"try:\n    length = len(answer())\nexcept Exception:\n    length = {len(EXPECTED)}\n"
    f"assert abs(length - {len(EXPECTED)}) < 1e-6\nfor text in map(lambda _: answer(), [1]):\n"
    f"    assert not text != {EXPECTED!r}",
)
LIMITS = {"cpu_seconds": 0.5, "timeout_seconds": 1.0, "memory_limit_mb": 256, "output_limit_mb": 4}


class Recording(CodeVerifier):
    """Keeps what the programs wrote."""

    def _run(self, program, text, has_asserts=False):
        execution = super()._run(program, text, has_asserts)
        self.executions[program.partition("\n")[0]] = execution
        return execution


class Surroundings:
    """What the programs may reach for: files, servers, and a process."""

    def __init__(self, stack, folder):
        self.folder = folder
        self.servers = {kind: stack.enter_context(socket.socket(*kinds)) for kind, kinds in SERVERS.items()}
        self.unix, self.abstract = os.path.relpath(folder / "unix"), f"pacs-{os.getpid()}-{os.urandom(4).hex()}"
        addresses = {"unix": self.unix, "abstract": f"\0{self.abstract}"}
        for kind, server in self.servers.items():
            server.bind(addresses.get(kind, ("127.0.0.1", 0)))
            server.setblocking(False)
            if kind != "udp":
                server.listen(100)
        self.victim = subprocess.Popen(["sleep", "100"])
        stack.callback(self.victim.wait)
        stack.callback(self.victim.kill)
        maps = Path(f"/proc/{self.victim.pid}/maps").read_text().splitlines()
        self.address = next(int(line.partition("-")[0], 16) for line in maps if " rw-p " in line)

    def program(self, number, attack):
        """The attack in a folder of its own. Its first line tells programs apart."""
        folder = self.folder / str(number)
        folder.mkdir()
        (folder / "secret").write_text("x = 1\n")
        known = {
            "name": f"pacs-{os.getpid()}-{number}",
            "folder": str(folder),
            **{name: str(folder / name) for name in ("secret", "target", "late")},
            "tcp": self.servers["tcp"].getsockname()[1],
            "udp": self.servers["udp"].getsockname()[1],
            "unix": str((self.folder / "unix").resolve()),
            "abstract": self.abstract,
            "victim": self.victim.pid,
            "address": self.address,
            "trainer": os.getpid(),
            "variable": "PACS_PRIVATE_VARIABLE",
        }
        return f"T = {known!r}\n{attack.source}"

    def was_reached(self):
        """Servers that somebody has spoken to."""
        reached = []
        for kind, server in self.servers.items():
            try:
                server.recv(1) if kind == "udp" else server.accept()[0].close()
                reached.append(kind)
            except BlockingIOError:
                pass
        return reached

    def changed(self):
        """Folders in which something is not as it was."""

        def is_as_it_was(folder):
            (secret,) = folder.iterdir()
            return (secret.name, secret.read_text(), secret.stat().st_mode & 0o777) == ("secret", "x = 1\n", 0o644)

        return [path for path in self.folder.iterdir() if path.is_dir() and not is_as_it_was(path)]


SERVERS = {
    "tcp": (socket.AF_INET, socket.SOCK_STREAM),
    "udp": (socket.AF_INET, socket.SOCK_DGRAM),
    "unix": (socket.AF_UNIX, socket.SOCK_STREAM),
    "abstract": (socket.AF_UNIX, socket.SOCK_STREAM),
}


def layers_of(level):
    return {layer for layer in LAYERS if layer in level}


def is_stopped(attack, level):
    """Whether one of the layers that hold stops an attack."""
    holding = {"limits", *layers_of(level)} | ({"root"} if os.geteuid() == 0 else set())
    if match := re.search(r"landlock (\d+)", level):
        holding |= {f"landlock {earlier}" for earlier in range(1, int(match[1]) + 1)}
    return bool(holding & set(attack.stopped_by))


FEWER_LAYERS = [pytest.param(layers, marks=pytest.mark.slow) for layers in (("seccomp",), ("landlock",), ())]


@pytest.mark.parametrize("layers", [("landlock", "seccomp"), *FEWER_LAYERS], ids=str)
def test_no_attack_is_rewarded_at_any_level_of_isolation(layers, tmp_path, monkeypatch):
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS) >= 80
    monkeypatch.setenv("PACS_PRIVATE_VARIABLE", "private")
    with ExitStack() as stack:
        around = Surroundings(stack, tmp_path)
        programs = [around.program(number, attack) for number, attack in enumerate(ATTACKS)]
        tests = {"type": "stdin_stdout", "cases": [{"input": "nothing", "output": EXPECTED}]}
        verifier = Recording(num_workers=2, isolation="rlimits", **LIMITS)
        verifier._layers, verifier.executions = layers, {}
        stack.enter_context(verifier)
        if layers_of(verifier.level) != set(layers):
            pytest.skip(f"this machine has {verifier.level}")
        # What an earlier program and its right output leave behind is there to be found.
        earlier = block(f"print({EXPECTED!r}) # earlier-{os.urandom(8).hex()}")
        assert verifier.grade([earlier] * 2, [tests] * 2) == [1.0] * 2
        grades = verifier.grade_detailed([block(program) for program in programs], [tests] * len(programs))
        assert not any(map(children, workers_of(verifier)))
        assert not [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("pacs_trl_code_")]
        functions = {"type": "function", "name": "answer", "cases": [{"input": [], "output": EXPECTED}]}
        asserts = [{"type": "asserts", "code": code, "entry_point": "answer"} for code in ASSERTS]
        right = block(f"def answer():\n    return {EXPECTED!r}")
        assert verifier.grade([right] * len(asserts), asserts) == [1.0] * len(asserts)
        called = [block(program) for program in FUNCTIONS]
        labels = [verifier.grade(called, [tests] * len(called)) for tests in [functions, *asserts]]

        got_out = {
            attack.name
            for attack, program in zip(ATTACKS, programs)
            if "BREACH" in verifier.executions[program.partition("\n")[0]].output
        }
        print(f"\n{verifier.level}: {len(got_out)} of {len(ATTACKS)} succeed:", *sorted(got_out), sep="\n  ")
        rewarded = [a.name for a, grade in zip(ATTACKS, grades) if grade.outcome.label != 0.0]
        assert not rewarded and labels == [[0.0] * len(FUNCTIONS)] * (1 + len(asserts))
        # Their limit is 1 second, theirs to stay are 20; how far apart the two lie depends on how busy the machine is.
        print("longest:", max(grade.seconds for grade in grades))
        assert not {attack.name: grade.seconds for attack, grade in zip(ATTACKS, grades) if grade.seconds > 15.0}
        assert not [a.name for a in ATTACKS if a.name in got_out and is_stopped(a, verifier.level)]
        assert not [path for path in tmp_path.glob("*/late")]
        if layers == ("landlock", "seccomp"):
            assert not got_out and not around.was_reached() and not around.changed()
            assert around.victim.poll() is None
        if not layers:  # the attacks are what they claim to be
            could = {attack.name for attack in ATTACKS if not is_stopped(attack, verifier.level)}
            assert len(got_out) > 0.8 * len(could), sorted(could - got_out)
        outcomes = {attack.name: grade.outcome for attack, grade in zip(ATTACKS, grades)}
        for name in ("infinite loop", "sleep", "stop oneself", "signals ignored", "patched worker"):
            assert outcomes[name] is Outcome.TIMEOUT, name
