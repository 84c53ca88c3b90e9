"""Tables of completions of evaluations, for `log_completions`; those of training are TRL's."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pandas as pd

from .completion_columns import with_one_type
from .logged_names import TABLE_COLUMNS


def empty_logs() -> dict[str, Any]:
    """Return the buffers in which TRL's trainer stores the completions that it has graded."""
    return {
        "images": [],
        "prompt": [],
        "completion": [],
        "rewards": defaultdict(list),
        "advantages": [],
        "extra": defaultdict(list),
    }


def rows_of(logs: dict[str, Any], step: int) -> list[dict[str, Any]]:
    """Return the table rows of the completions in such buffers, with the columns of TRL's table."""
    columns = {"prompt": logs["prompt"], "completion": logs["completion"], **logs["rewards"], **logs["extra"]}
    columns["advantage"] = logs["advantages"]
    return [{"step": step} | {name: values[i] for name, values in columns.items()} for i in range(len(logs["prompt"]))]


def write_table(file: Path, rows: list[dict[str, Any]]) -> None:
    """Write a table. A column that a reward function has logged for some batches only is empty in the others."""
    file.parent.mkdir(parents=True, exist_ok=True)
    names = dict.fromkeys(name for row in rows for name in row)
    table = {name: [row.get(name) for row in rows] for name in names}
    reward_columns = names.keys() - TABLE_COLUMNS
    columns = {name: with_one_type(table[name]) if name in reward_columns else table[name] for name in names}
    pd.DataFrame(columns).to_parquet(file)
