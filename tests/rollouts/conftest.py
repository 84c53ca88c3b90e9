"""The engine of generation, see `tests/engines.py`."""

from engines import engine  # noqa: F401
