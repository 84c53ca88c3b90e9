"""The report of `make gpu-check`: results of tests, kept in pytest's cache so that a run that was killed continues.

A result counts for the machine, versions, and commit it was made with. A test that has passed with them is not run
again; failed tests run again, after those that have no result yet. Tests marked `first` say most about a machine.
"""

import hashlib
import json
import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks import table_of
from pacs_trl.evaluation.provenance import source_commit, versions
from pacs_trl.evaluation.results import write_results
from pacs_trl.redaction import published
from pacs_trl.report.tables import one_line, to_markdown


def machine(gpus: dict[str, Any]) -> dict[str, Any]:
    """Return the facts without which a number means nothing; `gpus` are those that only a process with CUDA knows."""
    found = dict(versions())
    for package in ("accelerate", "peft", "deepspeed", "flash-attn", "triton", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    processor = f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    return gpus | {"processor": processor, "versions": found, "commit": source_commit()}


class GpuReport:
    """A pytest plugin that skips what has passed, and writes `report.md` and `report.json` after each test."""

    def __init__(self, config, directory: Path, facts: dict[str, Any]):
        self.cache, self.directory, self.facts = config.cache, directory, facts
        self.key = "gpu-check/" + hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
        self.names: list[str] = []
        directory.mkdir(parents=True, exist_ok=True)

    def result(self, name: str) -> dict[str, Any] | None:
        return self.cache.get(self._key(name), None)

    def _key(self, name: str) -> str:
        return f"{self.key}/{hashlib.sha256(name.encode()).hexdigest()[:12]}"

    def pytest_collection_modifyitems(self, config, items) -> None:
        self.names = [item.nodeid for item in items]
        results = {item: self.result(item.nodeid) or {} for item in items}
        done = [item for item in items if results[item].get("outcome") == "passed"]
        config.hook.pytest_deselected(items=done)

        def order(item) -> tuple[bool, bool]:
            return results[item].get("outcome") == "failed", item.get_closest_marker("first") is None

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
        self.cache.set(self._key(report.nodeid), result | dict(report.user_properties))
        self.write()

    def pytest_sessionfinish(self) -> None:
        self.write()

    def write(self) -> None:
        """Write the report of all collected tests, from the results in the cache."""
        results = [self.result(name) or {"test": name, "outcome": "not run"} for name in self.names]
        report = {"machine": self.facts, "date": time.strftime("%Y-%m-%d"), "results": results}
        write_results(self.directory / "report.json", report)
        temporary = self.directory / ".report.md"
        temporary.write_text(to_text(report), encoding="utf-8")
        temporary.replace(self.directory / "report.md")


def to_text(report: dict[str, Any]) -> str:
    """Format the report as Markdown: the machine, the outcome of each test, the rows that tests recorded."""
    facts, results = report["machine"], report["results"]
    counts = {name: 0 for name in ("passed", "failed", "skipped", "not run")}
    for result in results:
        counts[result["outcome"]] += 1
    gpus = ", ".join(f"{gpu['name']} ({gpu['memory'] / 2**30:.0f} GiB)" for gpu in facts["gpus"])
    lines = ["# GPU check\n", ", ".join(f"{count} {name}" for name, count in counts.items()) + "\n"]
    lines += [f"- GPUs: {gpus}", f"- driver, power limit: {facts['driver']}; CUDA of torch: {facts['cuda']}"]
    lines += [f"- processor: {facts['processor']}", f"- commit: {facts['commit']}", f"- date: {report['date']}"]
    lines += ["- versions: " + ", ".join(f"{name} {number}" for name, number in facts["versions"].items()) + "\n"]
    rows = [
        [_short(r), r["outcome"], f"{r['seconds']:.0f}" if "seconds" in r else "", r.get("reason", "")]
        for r in results
    ]
    lines.append(to_markdown(["test", "outcome", "seconds", "reason"], rows))
    for result in results:
        if result.get("rows"):
            lines.append(f"## {_short(result)}\n\n{table_of(result['rows'])}")
    row = [gpus, report["date"], facts["driver"], facts["versions"]["torch"], (facts["commit"] or "")[:10]]
    header = ["GPU", "date", "driver, power limit", "torch", "commit", *counts]
    lines.append("## For the table of docs/gpu.md\n\n" + to_markdown(header, [[*row, *map(str, counts.values())]]))
    return "\n".join(lines)


def _short(result: dict[str, Any]) -> str:
    return result["test"].rpartition("/")[2].replace(".py::", ", ")
