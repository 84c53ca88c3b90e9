"""The date in chat templates that print one.

Templates of Llama 3 and gpt-oss call `strftime_now`, so a run or an evaluation that is continued on another day, or
lasts past midnight, would have other prompts. All prompts of a run, and of the samples in one directory, have the date
of their start.
"""

from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any


def prints_date(chat_template: str | None) -> bool:
    """Return whether a chat template prints the current date."""
    return chat_template is not None and "strftime_now" in str(chat_template)


def with_date(chat_template_kwargs: Mapping[str, Any] | None, date: Callable[[], str]) -> dict[str, Any]:
    """Return `chat_template_kwargs` with a `strftime_now` that formats the ISO date that `date()` returns. Templates
    prefer it to the function of transformers, which formats the current time."""

    def strftime_now(date_format: str) -> str:
        return datetime.fromisoformat(date()).strftime(date_format)

    return {"strftime_now": strftime_now, **(chat_template_kwargs or {})}


def stored_date(directory: Path) -> str:
    """Return the ISO date in the file `prompt_date` of a directory, which is written now if it does not exist."""
    file = directory / "prompt_date"
    if not file.is_file():
        directory.mkdir(parents=True, exist_ok=True)
        file.write_text(datetime.now().isoformat() + "\n")
    return file.read_text().strip()
