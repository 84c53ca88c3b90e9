"""Every notebook is a test of the tier `notebook`: `make notebooks`."""

from pathlib import Path


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker("notebook")
