"""Benchmarks of speed, memory, and precision. Run `make bench` or `python -m benchmarks.NAME`."""

import json
import os
from collections.abc import Sequence
from typing import Any


ROWS_FILE = "PACS_TRL_ROWS_FILE"  # environment variable with the name of a file


def record_row(row: dict[str, Any]) -> None:
    """Append a row to the JSON lines file of `make gpu-check`, so that it is reported even if the run is killed."""
    if file := os.environ.get(ROWS_FILE):
        with open(file, "a", encoding="utf-8") as rows:
            rows.write(json.dumps(row) + "\n")


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """Format dicts as the rows of a Markdown table; floats have four significant digits."""
    from pacs_trl.report.tables import to_markdown

    header = list(dict.fromkeys(key for row in rows for key in row))
    return to_markdown(header, [[_cell(row.get(key)) for key in header] for row in rows])


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
