"""`make gpu-check` continues after a kill, runs what has failed again, and its report is complete after each test."""

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.processes import run_and_save, start


ROOT = Path(__file__).parents[1]
GPU_TESTS = ROOT / "tests" / "gpu"
CONFTEST = """
import json, os
from pathlib import Path
from gpu_report import GpuReport

def pytest_configure(config):
    config.pluginmanager.register(GpuReport(config, Path("report"), json.loads(os.environ["FACTS"])))
"""
TESTS = """
import os, time
from pathlib import Path
import pytest

def note(name):
    with open("calls", "a") as calls:
        calls.write(name + " ")

def test_fails():
    note("fails")
    raise OSError("no weights in /home/alice/models/model.bin (HF_TOKEN=hf_abcdefghij0123456789)")

def test_measures(record_property):
    note("measures")
    record_property("rows", [{"half": 1 / 3, "of": 2}])

def test_hangs():
    note("hangs")
    time.sleep(600 if os.environ.get("HANG") else 0)

@pytest.mark.skip(reason="no second GPU")
def test_skips(): pass
"""
FACTS = {"gpus": [{"name": "GPU of a test", "memory": 80 * 2**30}], "driver": "1.2, 700 W", "cuda": "13.0"}
FACTS |= {"processor": "x86_64, 2 cores", "versions": {"torch": "2.13.0"}, "commit": "0123456789abcdef"}


def check(directory: Path, **environment: str) -> subprocess.Popen:
    """Start pytest on the tests above, as `make gpu-check` does."""
    environment = {
        "FACTS": json.dumps(FACTS),
        "PYTHONPATH": os.pathsep.join([str(GPU_TESTS), str(ROOT)]),
    } | environment
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", ".", "-c", "pytest.ini", "test_them.py"]
    return subprocess.Popen(command, cwd=directory, env=os.environ | environment, stdout=subprocess.DEVNULL)


def outcomes(directory: Path) -> dict[str, str]:
    results = json.loads((directory / "report" / "report.json").read_text())["results"]
    return {result["test"].rpartition("test_")[2]: result["outcome"] for result in results}


@pytest.mark.slow
def test_a_killed_run_continues(tmp_path):
    """SIGKILL in the third test: the report has the first two; passed tests are skipped then, failed ones run last."""
    for name, text in {"conftest.py": CONFTEST, "test_them.py": TESTS, "pytest.ini": "[pytest]\n"}.items():
        (tmp_path / name).write_text(text)
    calls, end = tmp_path / "calls", time.monotonic() + 120
    killed = check(tmp_path, HANG="1")
    while not (calls.exists() and "hangs" in calls.read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert outcomes(tmp_path) == {"fails": "failed", "measures": "passed", "hangs": "not run", "skips": "not run"}
    assert check(tmp_path).wait() == 1
    assert calls.read_text().split() == ["fails", "measures", "hangs", "hangs", "fails"]
    assert outcomes(tmp_path) == {"fails": "failed", "measures": "passed", "hangs": "passed", "skips": "skipped"}
    report = (tmp_path / "report" / "report.md").read_text()
    assert "| passed | failed | skipped | stopped | not run |" in report and "| 2 | 1 | 1 | 0 | 0 |" in report
    assert report.startswith("### GPU of a test (80 GiB), ") and "no second GPU" in report
    assert "| half | of |" in report and "| 0.3333 | 2 |" in report and "GPU of a test (80 GiB)" in report
    assert (
        "no weights in model.bin" in report and "hf_" not in report and "alice" not in report
    )  # it is sent to others
    assert check(tmp_path, FACTS=json.dumps(FACTS | {"commit": "fedcba"})).wait() == 1  # another commit: all of them
    assert calls.read_text().split()[5:] == ["fails", "measures", "hangs"]


class Cache(dict):
    """pytest's cache, in memory."""

    set = dict.__setitem__


@dataclass(frozen=True)
class Item:
    nodeid: str


def report_of(monkeypatch, directory: Path, *tests: str):
    monkeypatch.syspath_prepend(GPU_TESTS)
    from gpu_report import GpuReport

    report = GpuReport(SimpleNamespace(cache=Cache()), directory, FACTS, "1")
    report.names = list(tests)
    return report


def test_a_row_is_reported_before_its_test_ends(tmp_path, monkeypatch):
    """What a killed run has measured is in its report; the test itself has not passed, so it runs again."""
    report, file = (
        report_of(monkeypatch, tmp_path, "gpu/test_a.py::test_steps", "gpu/test_a.py::test_b"),
        tmp_path / "r",
    )
    text = tmp_path / "report.md"
    with report.following("gpu/test_a.py::test_steps", file):
        for row in ({"s / step": 1.25}, {"s / step": 2.5}):
            with file.open("a") as rows:
                rows.write(json.dumps(row) + "\n" + '{"half a')
            end = time.monotonic() + 60
            while not (text.exists() and f"| {row['s / step']:.4g} |" in text.read_text()) and time.monotonic() < end:
                time.sleep(0.05)
            assert f"| {row['s / step']:.4g} |" in text.read_text()
            file.write_text(file.read_text().removesuffix('{"half a'))
        assert "| test_a, test_steps | stopped |" in text.read_text()
        assert "| test_a, test_b | not run |" in text.read_text()
    failed = SimpleNamespace(nodeid="gpu/test_a.py::test_steps", outcome="failed", when="call", duration=3.0)
    vars(failed).update(skipped=False, failed=True, longrepr="out of memory", user_properties=[])
    report.pytest_runtest_logreport(failed)
    assert "| test_a, test_steps | failed | 3 | out of memory |" in text.read_text()
    assert "| 1.25 |" in text.read_text() and "| 2.5 |" in text.read_text()


def test_each_part_runs_what_says_most_first(tmp_path, monkeypatch):
    gradients = "test_attention.py::test_packed_equals_padded[small-sdpa]"
    tests = ["test_targets.py::test_trl_at_its_best[Qwen3-1.7B]", "test_gpu_step.py::test_whole_steps[sleep]"]
    tests += ["test_targets.py::test_steps_beside_targets[Qwen3-4B]", gradients, "test_gpu_processes.py::test_x"]
    tests += ["test_targets.py::test_trl_at_its_best[Qwen3-4B]", "test_gpu_step.py::test_whole_steps[awake]"]
    ran = {}
    for part in ("1", "2", "rest"):
        report = report_of(monkeypatch, tmp_path)
        report.part, items = part, [Item(f"tests/gpu/{name}") for name in tests]
        report.pytest_collection_modifyitems(
            SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: None)), items
        )
        ran[part] = [tests.index(each.nodeid.removeprefix("tests/gpu/")) for each in items]
    assert ran == {"1": [3, 2, 0], "2": [6, 1, 5], "rest": [4]}


def test_parts_name_tests_that_exist(monkeypatch):
    monkeypatch.syspath_prepend(GPU_TESTS)
    from gpu_report import PARTS

    for name in (name for tests in PARTS.values() for name in tests):
        file, _, function = name.partition("::")
        assert f"def {function.partition('[')[0]}" in (GPU_TESTS / file).read_text(), name


def test_without_a_gpu_no_report_is_written(tmp_path, monkeypatch):
    """It says what is missing and what to do, and writes no report."""
    monkeypatch.syspath_prepend(GPU_TESTS)
    conftest = runpy.run_path(str(GPU_TESTS / "conftest.py"))
    conftest["pytest_configure"].__globals__["DEVICE"] = "cpu"
    config = SimpleNamespace(addinivalue_line=print, getoption=lambda *name: tmp_path / "report")
    with pytest.raises(pytest.exit.Exception, match="no CUDA device") as ended:
        conftest["pytest_configure"](config)
    assert ended.value.returncode == 2 and not (tmp_path / "report").exists()


def note_and_sleep(file: Path) -> None:
    file.with_suffix(".new").write_text(str(os.getpid()))
    file.with_suffix(".new").rename(file)
    time.sleep(600)


def start_and_sleep(directory: Path) -> None:
    task = (note_and_sleep, (directory / "pid",), directory)
    get_context("fork").Process(target=run_and_save, args=task).start()
    time.sleep(600)


def test_the_page_has_the_numbers_of_the_reports():
    """Seconds and memory of optimizer steps, and the counts of outcomes."""
    page = (ROOT / "docs/speed.md").read_text() + (ROOT / "docs/results/gpu/README.md").read_text()
    files = (ROOT / "docs/results/gpu").glob("*.json")
    reports = {path.stem: json.loads(path.read_text())["results"] for path in files}
    (steps,) = [
        result["rows"] for result in reports["2026-11-27"] if "test_steps" in result["test"] and "rows" in result
    ]
    for row in steps:
        numbers = "{seconds:.2f} ({fastest:.2f} - {slowest:.2f})".format_map(row)
        factor = row["times as fast as TRL's GRPO"]
        assert f"| {numbers} | {factor:.2f} | {row['GiB']:.1f} |" in page, row["method"]
    for results in reports.values():
        outcomes = [result["outcome"] for result in results]
        assert f"| {outcomes.count('passed')} | {outcomes.count('failed')} | " in page


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.slow
def test_what_a_test_computes_ends_with_it(tmp_path):
    """SIGKILL to the process of the tests: nothing keeps the GPU."""
    parent, end = start(start_and_sleep, tmp_path, output=tmp_path / "parent"), time.monotonic() + 120
    while not (tmp_path / "pid").exists() and time.monotonic() < end:
        time.sleep(0.05)
    pid = int((tmp_path / "pid").read_text())
    assert is_alive(pid)
    parent.kill()
    while is_alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_alive(pid)
