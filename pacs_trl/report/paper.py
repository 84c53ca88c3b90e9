"""Published tables of pass@k, from `paper.yaml`.

v1 contains a mislabel: its abstract gives 59.78 % as PACS's pass@256 on AIME 2025, but Table 2 has this number (+13.32
over PPO, +14.36 over GRPO, as in the abstract) under AIME 2024, and 58.22 % under AIME 2025.
"""

from pathlib import Path
from typing import NamedTuple

import yaml


class PublishedTable(NamedTuple):
    """A table of pass@k: `values[method][k]` in percent."""

    source: str
    protocol: str
    model: str
    benchmark: str
    values: dict[str, dict[int, float]]


MISLABEL = (
    "v1 names 59.78 % as pass@256 on AIME 2025; its Table 2 has it under AIME 2024, and 58.22 % under AIME 2025."
)

PAPER = yaml.safe_load(Path(__file__).with_name("paper.yaml").read_text(encoding="utf-8"))

TABLES = [
    PublishedTable(
        table["source"],
        table["protocol"],
        table["model"],
        table["benchmark"],
        {method: dict(zip(table["k"], row, strict=True)) for method, row in table["values"].items()},
    )
    for table in PAPER["pass_at_k"]
]


def published(model: str, benchmark: str) -> list[PublishedTable]:
    """
    Return the published tables of one base model and benchmark.

    Raises:
        `ValueError`: if the paper has no table for that base model.
    """
    models = sorted({table.model for table in TABLES})
    if model not in models:
        raise ValueError(f"The paper has no pass@k table of {model!r}. Choose from {', '.join(models)}.")
    return [table for table in TABLES if table.model == model and table.benchmark == benchmark]
