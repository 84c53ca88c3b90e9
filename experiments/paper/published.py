"""Published numbers of the paper, from `published.yaml`.

v1 contains a mislabel: its abstract gives 59.78 % as PACS's pass@256 on AIME 2025, but Table 2 has this number (+13.32
over PPO, +14.36 over GRPO, as in the abstract) under AIME 2024, and 58.22 % under AIME 2025.
"""

from pathlib import Path
from typing import NamedTuple

import yaml


class PassAtK(NamedTuple):
    """A table of pass@k: `values[method][k]` in percent."""

    source: str
    protocol: str
    model: str
    benchmark: str
    values: dict[str, dict[int, float]]


_PAPER = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text(encoding="utf-8"))

TABLES = [
    PassAtK(
        table["source"],
        table["protocol"],
        table["model"],
        table["benchmark"],
        {method: dict(zip(table["k"], row, strict=True)) for method, row in table["values"].items()},
    )
    for table in _PAPER["pass_at_k"]
]

OUT_OF_DOMAIN_SOURCE = "arXiv 2509.02522v2, figure 6"

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


def pass_at_k_tables(model: str, benchmark: str) -> list[PassAtK]:
    """Return the published tables of one base model and benchmark."""
    return [table for table in TABLES if table.model == model and table.benchmark == benchmark]
