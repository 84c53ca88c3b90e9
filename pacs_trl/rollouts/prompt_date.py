"""The date in chat templates that print one.

Templates of Llama 3 and gpt-oss call `strftime_now`, so a run that is continued on another day, or that trains past
midnight, would have other prompts. All prompts of a run have the date of its start, which checkpoints keep.
"""

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from accelerate.utils import broadcast_object_list


def prints_date(chat_template: str | None) -> bool:
    return chat_template is not None and "strftime_now" in str(chat_template)


def with_date(chat_template_kwargs: Mapping[str, Any], date: Callable[[], str]) -> dict[str, Any]:
    """Return `chat_template_kwargs` with a `strftime_now` that formats the ISO date that `date()` returns. Templates
    prefer it to the function of transformers, which formats the current time."""
    return {"strftime_now": lambda form: datetime.fromisoformat(date()).strftime(form), **chat_template_kwargs}


def date_now() -> str:
    """Return the current time of the first process, on all processes, in ISO format."""
    dates = [datetime.now().isoformat()]
    broadcast_object_list(dates)
    return dates[0]
