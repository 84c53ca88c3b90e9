"""Columns of datasets: those that are stored, and those that a transform makes when rows are read."""

from typing import Any


def is_in_memory(dataset: Any) -> bool:
    """Whether all values of a dataset can be read at once: not those of a stream, nor of a dataset whose rows
    `set_transform` or `with_transform` makes, one by one, perhaps at random."""
    from datasets import Dataset  # slow to import

    return isinstance(dataset, Dataset) and dataset.format["type"] != "custom"


def columns_of(dataset: Any) -> list[str] | None:
    """Return the names of the columns of the rows of a dataset; `None` if they are not known, as of some streams. With
    a transform they are those of the first row: `Dataset.column_names` are what the transform reads."""
    from datasets import Dataset  # slow to import

    if isinstance(dataset, Dataset) and not is_in_memory(dataset) and len(dataset) > 0:
        return list(dataset[0])
    return getattr(dataset, "column_names", None)
