"""The report of `make gpu-check`: results of tests, kept in pytest's cache so that a run that was killed continues.

A result counts for the machine, versions, and commit it was made with. A test that has passed with them is not run
again; failed tests run again, after those that have no result yet. Each part runs alone, what says most first. The
report is written after each test, and after each row that a test records, and can be added to docs/gpu.md as it is.
"""

import hashlib
import json
import os
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks import table_of
from pacs_trl.evaluation.provenance import source_commit, versions
from pacs_trl.evaluation.results import write_results
from pacs_trl.redaction import published
from pacs_trl.report.tables import one_line, to_markdown


# Names of the parts, and the tests of each in the order in which they run: files, or beginnings of test names in one.
TITLES = {"1": "gradients and optimizer steps", "2": "whole steps with vLLM", "rest": "other tests"}
PARTS = {
    "1": (
        "test_attention.py::test_packed_equals_padded[small",
        "test_attention.py::test_compiled_equals_padded[small",
        "test_attention.py::test_kernels_see_prompt_and_branch",
        "test_targets.py::test_steps_beside_targets",
        "test_targets.py::test_steps_with_lora",
        "test_compiled_layers_on_gpu.py",
        "test_attention.py",
        "test_targets.py::test_trl_at_its_best[Qwen3-1.7B",
    ),
    "2": (
        "test_gpu_step.py::test_whole_steps[awake",
        "test_gpu_step.py::test_whole_steps[sleep",
        "test_vllm_engine.py::test_weights_reach_the_engine[sleep",
        "test_gpu_step.py",
        "test_vllm_engine.py::test_weights_reach_the_engine[awake",
        "test_targets.py::test_trl_at_its_best[Qwen3-4B",
    ),
}


def place_of(test: str) -> tuple[str, int]:
    """Return the part of a test, and its place there."""
    name = test.rpartition("/")[2]
    places = [(part, i) for part, tests in PARTS.items() for i, start in enumerate(tests) if name.startswith(start)]
    return max(places, key=lambda place: len(PARTS[place[0]][place[1]]), default=("rest", 0))


def machine(gpus: dict[str, Any]) -> dict[str, Any]:
    """Return the facts without which a number means nothing; `gpus` are those that only a process with CUDA knows."""
    package_versions = dict(versions())
    for package in ("accelerate", "peft", "deepspeed", "flash-attn", "triton", "numpy"):
        try:
            package_versions[package] = version(package)
        except PackageNotFoundError:
            continue
    processor = f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    return gpus | {"processor": processor, "versions": package_versions, "commit": source_commit()}


class GpuReport:
    """A pytest plugin that runs one part, or all tests (`None`), skips what has passed, and writes `report.md` and
    `report.json` after each test."""

    def __init__(self, config, directory: Path, facts: dict[str, Any], part: str | None = None):
        self.cache, self.directory, self.facts, self.part = config.cache, directory, facts, part
        self.lock = threading.Lock()
        self.key = "gpu-check/" + hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
        self.names: list[str] = []
        directory.mkdir(parents=True, exist_ok=True)

    def result(self, name: str) -> dict[str, Any] | None:
        return self.cache.get(self._key(name), None)

    def _key(self, name: str) -> str:
        return f"{self.key}/{hashlib.sha256(name.encode()).hexdigest()[:12]}"

    def pytest_collection_modifyitems(self, config, items) -> None:
        items[:] = [item for item in items if self.part in (None, place_of(item.nodeid)[0])]
        self.names = [item.nodeid for item in sorted(items, key=lambda item: place_of(item.nodeid))]
        results = {item: self.result(item.nodeid) or {} for item in items}
        done = [item for item in items if results[item].get("outcome") == "passed"]
        config.hook.pytest_deselected(items=done)

        def order(item) -> tuple[bool, tuple[str, int]]:
            return results[item].get("outcome") == "failed", place_of(item.nodeid)

        items[:] = sorted((item for item in items if item not in done), key=order)

    def pytest_runtest_logreport(self, report) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        reason = ""
        if report.skipped:
            reason = report.longrepr[2].removeprefix("Skipped: ")
        elif report.failed:
            reason = getattr(getattr(report.longrepr, "reprcrash", None), "message", str(report.longrepr))
        result = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
        result |= published({"reason": one_line(reason)[-1000:]})  # reports are sent to others
        stopped = self.result(report.nodeid) or {}  # a test that fails keeps the rows it has recorded
        rows = {"rows": stopped["rows"]} if stopped.get("outcome") == "stopped" else {}
        self.cache.set(self._key(report.nodeid), rows | result | dict(report.user_properties))
        self.write()

    @contextmanager
    def following(self, name: str, file: Path) -> Iterator[None]:
        """Report the rows that a test appends to a file as they come: if this process is killed, they remain."""
        ended = threading.Event()
        thread = threading.Thread(target=self._follow, args=(name, file, ended), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _follow(self, name: str, file: Path, ended: threading.Event) -> None:
        number = 0
        while not ended.wait(0.5) or number == 0:
            lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else []
            if len(lines) > number:
                number, rows = len(lines), [json.loads(line) for line in lines]
                self.cache.set(self._key(name), {"test": name, "outcome": "stopped", "rows": rows})
                self.write()
            if ended.is_set():
                return

    def pytest_sessionfinish(self) -> None:
        self.write()

    def write(self) -> None:
        """Write the report of all collected tests, from the results in the cache."""
        with self.lock:
            results = [self.result(name) or {"test": name, "outcome": "not run"} for name in self.names]
            report = {"part": self.part, "machine": self.facts, "date": time.strftime("%Y-%m-%d"), "results": results}
            write_results(self.directory / "report.json", report)
            temporary = self.directory / ".report.md"
            temporary.write_text(to_text(report), encoding="utf-8")
            temporary.replace(self.directory / "report.md")


def to_text(report: dict[str, Any]) -> str:
    """Format the report as a section of docs/gpu.md: the machine, the outcome of each test, the rows that tests
    recorded."""
    facts, results, part = report["machine"], report["results"], report.get("part")
    counts = {name: 0 for name in ("passed", "failed", "skipped", "stopped", "not run")}
    for result in results:
        counts[result["outcome"]] += 1
    gpus = ", ".join(f"{gpu['name']} ({gpu['memory'] / 2**30:.0f} GiB)" for gpu in facts["gpus"])
    title = f"{gpus}, {report['date']}" + (f", {TITLES[part]}" if part else "")
    command = f"make gpu-check PART={part}" if part else "pytest tests/gpu --gpu-report"
    row = [gpus, report["date"], facts["driver"], facts["versions"]["torch"], (facts["commit"] or "")[:10]]
    header = ["GPU", "date", "driver, power limit", "torch", "commit", *counts]
    lines = [f"### {title}\n", to_markdown(header, [[*row, *map(str, counts.values())]])]
    lines += [f"`{command}`, CUDA of torch {facts['cuda']}, {facts['processor']}, commit {facts['commit']};"]
    lines += [", ".join(f"{name} {number}" for name, number in facts["versions"].items()) + ".\n"]
    rows = [
        [_short(r), r["outcome"], f"{r['seconds']:.0f}" if "seconds" in r else "", r.get("reason", "")]
        for r in results
    ]
    lines.append(to_markdown(["test", "outcome", "seconds", "reason"], rows))
    for result in results:
        if result.get("rows"):
            lines.append(f"#### {_short(result)}\n\n{table_of(result['rows'])}")
    return "\n".join(lines)


def _short(result: dict[str, Any]) -> str:
    return result["test"].rpartition("/")[2].replace(".py::", ", ")
