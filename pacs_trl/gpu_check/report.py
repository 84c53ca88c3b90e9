"""The report, made from the files of results alone: Markdown to read, JSON to compare."""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..evaluation.results import write_results
from ..report.tables import one_line, to_markdown
from . import results
from .arguments import PARTS
from .judge import against_plan, faster
from .results import Piece


def write_report(output: Path, pieces: Sequence[Piece], environment: dict[str, Any]) -> dict[str, Any]:
    """Write `report.json` and `report.md` into `output`; returns the first."""
    found = results.read(output)
    entries = [found.get(piece.name) or {**_not_run(piece), "environment": environment} for piece in pieces]
    steps = [entry for entry in entries if entry["part"] == "step" and "rows" in entry]
    entries.append({**against_plan(steps), "environment": environment})
    entries.sort(key=lambda entry: [*PARTS].index(entry["part"]))
    parts = {part: _part([e for e in entries if e["part"] == part]) for part in PARTS}
    parts["step"]["short"] = faster(steps) or parts["step"]["short"]
    report = {"environment": environment, "date": time.strftime("%Y-%m-%d"), "parts": parts, "pieces": entries}
    write_results(output / "report.json", report)
    temporary = output / ".report.md"
    temporary.write_text(_markdown(report), encoding="utf-8")
    temporary.replace(output / "report.md")
    return report


def _not_run(piece: Piece) -> dict[str, Any]:
    return {"part": piece.part, "name": piece.name, "status": "not run", "reason": ""}


def _part(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """The status of a part: failed if a piece has failed, not run if one is missing, passed if one has passed."""
    statuses = [entry["status"] for entry in entries]
    status = next((s for s in ("failed", "not run", "passed") if s in statuses), "not possible")
    counts = {s: statuses.count(s) for s in ("passed", "failed", "not possible", "not run") if s in statuses}
    why = next(
        (e["reason"] for e in entries if e["status"] in ("failed", "not possible") and e["status"] == status), ""
    )
    short = next((e["short"] for e in entries if e.get("short")), "")
    return {"status": status, "counts": counts, "short": why or short}


def _markdown(report: dict[str, Any]) -> str:
    environment, entries = report["environment"], report["pieces"]
    rows = [
        [name, part["status"], ", ".join(f"{n} {s}" for s, n in part["counts"].items()), part["short"]]
        for name, part in report["parts"].items()
    ]
    lines = ["# GPU check\n", *_facts(report), to_markdown(["part", "status", "pieces", "in short"], rows)]
    for name, words in PARTS.items():
        lines.append(f"## {name}\n\n{words[0].upper()}{words[1:]}.\n")
        lines += [_piece(entry, environment) for entry in entries if entry["part"] == name]
    made_with = [e["environment"] for e in entries if e["status"] != "not run"] or [
        environment
    ]  # perhaps not what is there now
    row = [environment["card"], report["date"]]
    row += [_distinct(facts.get("driver", "-") for facts in made_with)]
    row += [_distinct(facts["versions"].get("torch", "-") for facts in made_with)]
    row += [_distinct((f["commit"] or f["versions"].get("pacs_trl", "-"))[:10] for f in made_with)]
    row += [part["status"] + (f": {part['short']}" if part["short"] else "") for part in report["parts"].values()]
    header = ["card", "date", "driver, power limit", "torch", "pacs_trl", *PARTS]
    lines.append("## For the table of docs/gpu.md\n\n" + to_markdown(header, [row]))
    return "\n".join(lines)


def _distinct(facts: Iterable[str]) -> str:
    return ", ".join(sorted(set(facts)))


def _facts(report: dict[str, Any]) -> list[str]:
    environment = report["environment"]
    gpus = [f"{gpu['name']} ({gpu['memory'] / 2**30:.0f} GiB, sm {gpu['capability']})" for gpu in environment["gpus"]]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    return [
        f"- cards: {', '.join(gpus) or environment['card']}",
        f"- driver, power limit: {environment.get('driver', '-')}; CUDA of torch: {environment.get('cuda', '-')}",
        f"- machine: {environment['processor']}, {environment['system']}",
        f"- versions: {versions}",
        f"- commit: {environment['commit'] or 'installed, not a clone'}",
        f"- date: {report['date']}\n",
    ]


def _piece(entry: dict[str, Any], environment: dict[str, Any]) -> str:
    took = f", {entry['seconds']:.0f} s" if "seconds" in entry else ""
    lines = [f"### {entry['name']}: {entry['status']}{took}\n"]
    lines += [f"{one_line(entry['reason'])}\n"] if entry["reason"] else []
    others = [key for key in ("commit", "versions", "driver") if entry["environment"].get(key) != environment.get(key)]
    if others and entry["status"] != "not run":
        versions = {k: v for k, v in entry["environment"]["versions"].items() if environment["versions"].get(k) != v}
        said = [f"commit {entry['environment']['commit']}"] * ("commit" in others) + [
            f"{k} {v}" for k, v in versions.items()
        ]
        lines.append(f"Made with other versions than those above: {', '.join(said) or 'another driver'}.\n")
    lines += [f"- {'holds' if holds else 'DOES NOT HOLD'}: {text}" for text, holds in entry.get("bars", {}).items()]
    lines += [""] * bool(entry.get("bars"))
    if rows := entry.get("rows"):
        header = list(dict.fromkeys(key for row in rows for key in row))
        lines.append(to_markdown(header, [[_cell(row.get(key)) for key in header] for row in rows]))
    return "\n".join(lines)


def _cell(value: Any) -> str:
    """Numbers with four digits that count."""
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
