"""Measurements of speed, memory, and precision: `make bench`, `python -m benchmarks.NAME`."""

from collections.abc import Sequence
from typing import Any


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """Format rows as a Markdown table; numbers have four digits."""
    from pacs_trl.report.tables import to_markdown

    header = list(dict.fromkeys(key for row in rows for key in row))
    return to_markdown(header, [[_cell(row.get(key)) for key in header] for row in rows])


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
