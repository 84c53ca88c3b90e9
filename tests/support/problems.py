"""Problems of the miniature tasks, in the files that conftest.py writes before the first test."""

from pathlib import Path
from typing import Any

from experiments.miniature import files
from experiments.miniature.files import data_file


ROOT = Path(__file__).parents[2]
CRITIC_PROMPT = str(ROOT / files.CRITIC_PROMPT)


def training_data(task: str = "addition") -> dict[str, Any]:
    """Return the settings of a recipe that trains on a task."""
    return {"dataset_name": str(ROOT / data_file(task, "train")), "prompt_instruction": ""}


def held_out(task: str = "addition") -> str:
    """Return the held-out problems of a task as a benchmark with the name `miniature/TASK`."""
    return f"miniature/{task}={ROOT / data_file(task, 'test')}"
