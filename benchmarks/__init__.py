"""Benchmarks of speed, memory, and precision. Run `make bench` or `python -m benchmarks.NAME`."""

from collections.abc import Sequence
from typing import Any


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """Format dicts as the rows of a Markdown table; floats have four significant digits."""
    from pacs_trl.report.tables import to_markdown

    header = list(dict.fromkeys(key for row in rows for key in row))
    return to_markdown(header, [[_cell(row.get(key)) for key in header] for row in rows])


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
