"""Published numbers of the paper, from `paper.yaml`.

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
OUT_OF_DOMAIN_SOURCE = "arXiv 2509.02522v2, figure 6"

_PAPER = yaml.safe_load(Path(__file__).with_name("paper.yaml").read_text(encoding="utf-8"))

TABLES = [
    PublishedTable(
        table["source"],
        table["protocol"],
        table["model"],
        table["benchmark"],
        {method: dict(zip(table["k"], row, strict=True)) for method, row in table["values"].items()},
    )
    for table in _PAPER["pass_at_k"]
]
# method or model -> benchmark -> number, documented in the file
TABLE_1, TABLE_1_CITED, TABLE_1_GAINS = (_PAPER[name] for name in ("table_1", "table_1_cited", "table_1_gains"))
TABLE_1_BENCHMARKS = tuple(name for name in TABLE_1["PACS-4B"] if name != "average")
OUT_OF_DOMAIN = _PAPER["out_of_domain"]
OUT_OF_DOMAIN_IN_TEXT = {
    (method, name): value for method, row in _PAPER["out_of_domain_in_text"].items() for name, value in row.items()
}
TABLE_3_DIVERSITY = {
    (model, method): row for model, rows in _PAPER["table_3_diversity"].items() for method, row in rows.items()
}


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
