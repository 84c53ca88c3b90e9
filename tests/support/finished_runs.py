"""Finished runs made up by hand, for the tests of tables."""

import gzip
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.paper import records
from pacs_trl.evaluation.results import RESULTS_SCHEMA, GradedSample, summarize


def results_of(
    counts: Mapping[str, Sequence[int]], n: int = 4, ks: Sequence[int] = (1, 2), **protocol
) -> dict[str, Any]:
    """Results with the given number of right completions for each problem of each benchmark."""
    entries = {}
    for name, right in counts.items():
        samples = [
            GradedSample(str(problem), float(i < c), 5, "stop") for problem, c in enumerate(right) for i in range(n)
        ]
        source = {"version": 1, "digest": "d", "num_problems": len(right)}
        summary = summarize([str(p) for p in range(len(right))], samples, ks)
        entries[name] = {"title": name, "source": source, **summary}
    facts = {"schema_version": RESULTS_SCHEMA, "method": "x", "n": n, "k": list(ks)}
    return facts | {"protocol": protocol, "benchmarks": entries}


def record(results_dir: Path, cell: records.Cell, seed: int, counts: Mapping[str, Sequence[int]], **settings) -> None:
    """A finished run of a cell; `settings` are those of [`results_of`]."""
    diversity = {name: {"0": 0.1 + 0.1 * seed, "1": 0.3} for name in counts}
    logs = [{"step": step, "reward": 0.5, "entropy": 1.0 - 0.05 * step * (1 + seed)} for step in range(1, 11)]
    checkpoints = [{"step": 2, **{f"eval_{name}/pass@1": 0.5 for name in counts}}]
    training = {"log_history": logs, "checkpoints": checkpoints} if cell.trained else None
    records.record(results_dir, cell.run, records.Run(seed, results_of(counts, **settings), diversity, training))


def text_of(results_dir: Path) -> str:
    """The text of the records of a directory."""
    return gzip.decompress((results_dir / records.FILE_NAME).read_bytes()).decode()


def write_text(results_dir: Path, text: str) -> None:
    """Replace the text of the records of a directory."""
    (results_dir / records.FILE_NAME).write_bytes(gzip.compress(text.encode()))


def rows_of(page: Path):
    """The table of a page as mappings from its header, or, where it has headings or is folded, its tables by the first
    word of its heading."""
    lines: dict[str, list[list[str]]] = {}
    heading = ""
    for line in page.read_text().splitlines():
        if line.startswith(("## ", "<details><summary>")):
            heading = line.removeprefix("## ").removeprefix("<details><summary>").partition("</summary>")[0].split()[0]
        elif line.startswith("|"):
            lines.setdefault(heading, []).append([cell.strip() for cell in line[1:-1].split("|")])
    tables = {h: [dict(zip(header, row, strict=True)) for row in rows] for h, (header, _, *rows) in lines.items()}
    return tables[""] if tables.keys() == {""} else tables
