"""Markdown tables of rows that benchmarks and GPU tests return."""

from collections.abc import Sequence
from typing import Any

from pacs_trl.report.tables import to_markdown


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """Format rows as a Markdown table; numbers have four digits."""
    header = list(dict.fromkeys(key for row in rows for key in row))
    return to_markdown(header, [[_cell(row.get(key)) for key in header] for row in rows])


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
