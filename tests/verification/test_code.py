"""`CodeVerifier`: outcomes of programs, limits, levels of confinement, and what it leaves behind (nothing)."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from watching import block, children, is_running, wait_for, workers_of

from pacs_trl import rewards
from pacs_trl.rewards import MAX_REPLY, run_python
from pacs_trl.verification import Outcome, code
from pacs_trl.verification.code import CodeVerifier


SUM = {"type": "stdin_stdout", "cases": [{"input": "1 2\n", "output": "3\n"}, {"input": "5 6\n", "output": "11\n"}]}
ADD = {"type": "function", "name": "add", "cases": [{"input": [1, 2], "output": 3}, {"input": [5, 6], "output": 11}]}


@pytest.fixture(scope="module")
def verifier():
    limits = {"cpu_seconds": 0.4, "timeout_seconds": 2.0, "memory_limit_mb": 256}
    with CodeVerifier(num_workers=2, isolation="rlimits", **limits) as verifier:
        yield verifier


PROGRAMS = (Path(__file__).parents[1] / "data" / "programs.txt").read_text().split("\n### ")[1:]


class TestOutcomes:
    @pytest.mark.parametrize("program", PROGRAMS)
    def test_each_program_has_its_outcome(self, verifier, program):
        header, _, source = program.partition("\n")
        tests, outcome, error = f"{header} ".split(" ", 2)
        (grade,) = verifier.grade_detailed([block(source)], [{"sum": SUM, "add": ADD}[tests]])
        assert (grade.outcome.name, grade.error) == (outcome, error.strip()), grade
        assert grade.outcome.label == float(outcome == "CORRECT")
        assert grade.share == grade.outcome.label or tests == "add"  # the first case may pass

    def test_a_program_with_future_imports_runs_after_a_prelude(self, verifier):
        future = "from __future__ import annotations\n"
        programs = [
            f"{future}print(total(map(int, input().split())))",
            f"{future}def add(a, b):\n    return total((a, b))",
        ]
        tests = [kind | {"prelude": "total = sum"} for kind in (SUM, ADD)]
        code = "assert add(1, 2) == total([3])"
        tests.append({"type": "asserts", "code": code, "entry_point": "add", "prelude": "total = sum"})
        grades = verifier.grade_detailed([block(programs[0]), block(programs[1]), block(programs[1])], tests)
        assert [grade.outcome for grade in grades] == [Outcome.CORRECT] * 3, grades

    def test_the_block_that_defines_the_function_is_tested(self, verifier):
        program = "def add(a, b):\n    return a + b"
        completions = [f"```\n{program}\n```\nOutput:\n```\n3\n```", f"{block(program)}\n{block('print(add(1, 2))')}"]
        assert verifier.grade(completions, [ADD, ADD]) == [1.0, 1.0]

    @pytest.mark.parametrize("character", ["\ud800", "\0"])  # half a character
    def test_characters_that_no_program_may_have(self, verifier, character):
        (grade,) = verifier.grade_detailed([block(f"print('{character}')")], [SUM])
        assert (grade.outcome, grade.share, grade.error) == (Outcome.ERROR, 0.0, "SyntaxError")

    def test_what_is_no_program(self, verifier):
        completions = ["", "no idea", None, 3, "```cpp\nint main() {}\n```", "```python\nprint(3)", "x" * 300_000]
        outcomes = [grade.outcome for grade in verifier.grade_detailed(completions, [SUM] * 7)]
        assert outcomes == [Outcome.NO_ANSWER] * 6 + [Outcome.TOO_LONG]

    def test_tests_that_cannot_be_read_are_no_verdict(self, verifier):
        a_set = ADD | {"cases": [{"input": [{1}], "output": 1}]}
        unreadable = [SUM | {"language": "cpp"}, None, "{", {"a": 1, 2: 3}, a_set]
        grades = verifier.grade_detailed([block("print(3)")] * 5, unreadable)
        assert [grade.outcome.label for grade in grades] == [None] * 5 and "cpp" in grades[0].error

    def test_a_program_reads_what_the_system_has_for_the_standard_library(self, verifier):
        program = """
import locale, mimetypes, zoneinfo
zones = sorted(zoneinfo.available_timezones())
print(zones, [zoneinfo.ZoneInfo(zone).key for zone in zones[:9]], mimetypes.guess_type("a.png"))
try:
    print(locale.setlocale(locale.LC_ALL, "C.UTF-8"))
except locale.Error as error:
    print(error)
"""
        python = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, env={})
        (execution,) = verifier.run([program], [""])
        assert (execution.output, execution.messages) == (python.stdout, "")

    def test_an_expected_output_above_the_limit_is_no_verdict(self):
        tests = SUM | {"cases": [{"input": "", "output": "x" * (2 << 20)}]}
        program = block("print('x' * (2 << 20))")
        for limit, outcome in ((1, Outcome.GOLD_UNPARSEABLE), (3, Outcome.CORRECT)):
            with CodeVerifier(num_workers=1, isolation="rlimits", output_limit_mb=limit) as verifier:
                (grade,) = verifier.grade_detailed([program], [tests])
            assert grade.outcome is outcome and ("output_limit_mb" in grade.error) == (limit == 1)

    def test_order_of_sets_is_the_same_in_every_process(self, verifier):
        program = "print(*{'a', 'b', 'c', 'd', 'e', 'f'})"
        assert len({execution.output for execution in verifier.run([program] * 6, [""] * 6)}) == 1
        with CodeVerifier(num_workers=1, isolation="rlimits") as other:
            assert other.run([program], [""])[0].output == verifier.run([program], [""])[0].output


class TestLevels:
    def test_the_level_is_measured_and_told(self, verifier):
        assert verifier.facts()["confinement"] == verifier.level and "rlimits" in verifier.level

    @pytest.mark.parametrize(
        ("layers", "missing"), [((), "landlock and seccomp"), (("seccomp",), "landlock"), (("landlock",), "seccomp")]
    )
    def test_less_than_asked_for_is_refused(self, layers, missing):
        verifier = CodeVerifier(num_workers=2)
        verifier._layers = layers
        with pytest.raises(ValueError, match=f"code_isolation.* needs {missing}, .*switched off"):
            verifier.grade([block("print(3)")], [SUM])
        assert verifier._pool is None

    def test_an_event_loop_is_refused(self, confined, verifier):
        (execution,) = verifier.run(["import asyncio\nasyncio.run(asyncio.sleep(0))"], [""])
        assert execution.outcome is Outcome.ERROR and "PermissionError: [Errno 1]" in execution.messages

    def test_a_layer_that_does_not_hold_is_not_believed(self, monkeypatch):
        """The probe decides, not what the worker says that it has installed."""
        monkeypatch.setattr(code, "_PROBE", code._PROBE.replace("not can(socket.socket)", "False"))
        with pytest.raises(ValueError, match="needs (seccomp|landlock and seccomp)"):
            CodeVerifier(num_workers=1).start()


class TestProcesses:
    @pytest.mark.parametrize("times", [20, pytest.param(200, marks=pytest.mark.slow)])
    def test_nothing_is_left_behind(self, verifier, tmp_path, times):
        verifier.grade([block("print(3)")], [SUM])
        before, folders = len(os.listdir("/proc/self/fd")), sorted(os.listdir(os.environ["TMPDIR"]))
        for number in range(times):
            verifier.grade([block(f"print({number})"), block(f"raise SystemExit({number})")], [SUM, SUM])
        for worker in workers_of(verifier):
            assert not children(worker) and len(os.listdir(f"/proc/{worker}/fd")) < 10
        assert len(os.listdir("/proc/self/fd")) == before and sorted(os.listdir(os.environ["TMPDIR"])) == folders

    def test_a_program_leaves_no_mark_on_the_files_of_the_next_one(self):
        program = """
import fcntl, os
for file in range(64):
    try:
        print(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_NONBLOCK)
        fcntl.fcntl(file, fcntl.F_SETFL, os.O_NONBLOCK)
    except OSError:
        pass
"""
        with CodeVerifier(num_workers=1, isolation="rlimits") as verifier:
            first, second = verifier.run([program] * 2, [""] * 2)
        assert first.output == second.output == "0\n" * 4

    def test_an_interrupt_leaves_a_verifier_that_works(self, verifier):
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell started us with `&`
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            verifier.grade([block(f"import time; time.sleep(9) # {i}") for i in range(20)], [SUM] * 20)
        timer.join()
        signal.signal(signal.SIGINT, before)
        assert verifier.grade([block("print(sum(map(int, input().split()))) # after an interrupt")], [SUM]) == [1.0]

    def test_workers_and_programs_end_with_their_parent(self, tmp_path):
        start = """
from pacs_trl.verification.code import CodeVerifier
from watching import workers_of
verifier = CodeVerifier(num_workers=2, isolation="rlimits", cpu_seconds=60.0, timeout_seconds=60.0)
print(*workers_of(verifier), flush=True)
verifier.run(["import time; time.sleep(60)", "while True: pass"], ["", ""])
"""
        how = {
            "stdout": subprocess.PIPE,
            "text": True,
            "env": os.environ | {"TMPDIR": str(tmp_path)},
            "cwd": Path(__file__).parent,
        }
        with subprocess.Popen([sys.executable, "-c", start], **how) as process:
            pids = [int(pid) for pid in process.stdout.readline().split()]
            assert wait_for(lambda: all(map(children, pids)) and len(os.listdir(tmp_path)) == 2, 20)
            everybody = [*pids, *(child for pid in pids for child in children(pid))]
            process.kill()
        assert wait_for(lambda: not any(map(is_running, everybody)), 20)
        assert wait_for(lambda: not os.listdir(tmp_path), 20)


class TestTool:
    def test_what_the_model_is_told(self, verifier, monkeypatch):
        monkeypatch.setitem(rewards._verifiers, "programs", verifier)
        assert run_python("print(sum(map(int, input().split())))", "1 2") == "3\n"
        assert len(run_python("print('x' * 10**6)")) == MAX_REPLY
        with pytest.raises(RuntimeError, match=r"(?s)^ZeroDivisionError: .*1 / 0.*division by zero$"):
            run_python("print('before')\n1 / 0")
        with pytest.raises(RuntimeError, match="^timeout: timeout$"):
            run_python("while True: pass")


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_a_system_without_the_sandbox_is_refused_before_a_program_runs(monkeypatch, system):
    monkeypatch.setattr(sys, "platform", system)
    with pytest.raises(ValueError, match=f"sandbox of Linux.*{system}.*Use Linux"):
        CodeVerifier(num_workers=1, isolation="rlimits").start()
