"""Columns that reward functions add to the completions table with `log_extra`.

TRL writes the table as a data frame, for which all columns need one length, and each a single type.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..errors import UserError


# TRL's trainer keeps the values of training in deques, an evaluation those of a batch in lists.
Column = deque | list

_LARGEST_INTEGER = 2**63 - 1  # of a table


def new_column(name: str, values: Any, number: int, pending: dict[str, list]) -> str:
    """Return the name under which a column is added to those of `pending`: a second column of a name in one batch gets
    a number. Raises a `ValueError` if there is not one value for each of `number` completions."""
    if (
        not isinstance(values, Sequence | np.ndarray | torch.Tensor)
        or isinstance(values, str)
        or len(values) != number
    ):
        raise UserError(
            f"log_extra({name!r}, ...) got {values!r:.100} for {number} completions. Pass a list with one value for "
            "each completion; None leaves one out."
        )
    taken, copies = name, 1
    while taken in pending:
        copies += 1
        taken = f"{name}_{copies}"
    return taken


def add_absent_columns(pending: dict[str, list], logged: Mapping[str, Column], number: int) -> None:
    """Add the columns of earlier batches that this batch does not have, without values."""
    for name in logged:
        pending.setdefault(name, [None] * number)


def align_columns(logged: Mapping[str, Column], number: int) -> None:
    """Add the completions that were logged before a column, without values; `number` is that of all completions."""
    for values in logged.values():
        for _ in range(number - len(values)):
            values.insert(0, None)


def unify_types(logged: Mapping[str, Column]) -> None:
    """Replace the values of each column by those that [`with_one_type`] returns."""
    for values in logged.values():
        unified = with_one_type(values)
        values.clear()
        values.extend(unified)


def with_one_type(values: Iterable[Any]) -> list[Any]:
    """Return the values of a column, as text if they are not only numbers, only text, or only truth values."""
    plain = [_plain(value) for value in values]
    types = {type(value) for value in plain if value is not None}
    is_uniform = types <= {int, float} or types <= {str} or types <= {bool}
    is_large = any(isinstance(value, int) and abs(value) > _LARGEST_INTEGER for value in plain)
    if is_uniform and not is_large:
        return plain
    return [None if value is None else str(value) for value in plain]


def _plain(value: Any) -> Any:
    """Return a number of NumPy or PyTorch as a number of Python."""
    is_scalar = isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.dim() == 0)
    return value.item() if is_scalar else value
