"""The engine of generation, see `tests/generation_engines.py`."""

from generation_engines import engine  # noqa: F401
