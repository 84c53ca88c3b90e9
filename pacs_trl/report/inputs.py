"""Reader of training logs for reports and model cards."""

from pathlib import Path
from typing import Any

from ..evaluation.results import read_json


def read_log_history(path: Path) -> list[dict[str, Any]]:
    """Read the log history of a `trainer_state.json`; a `ValueError` names what it lacks."""
    history = read_json(path)["log_history"]
    for log in history:
        log["step"]
    return history
