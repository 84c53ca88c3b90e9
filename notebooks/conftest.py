"""Every notebook is a test of the tier `notebook`: `make notebooks`."""

from pathlib import Path

import pytest

from experiments.smollm2 import FOLDER


FOLDER_OF_NOTEBOOKS = Path(__file__).parent
needs_model = pytest.mark.skipif(not FOLDER.is_dir(), reason="the model is not there; `make model` prepares it")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(FOLDER_OF_NOTEBOOKS):
            item.add_marker("notebook")
            if item.path.suffix == ".ipynb" and "prepare_model" in item.path.read_text():
                item.add_marker(needs_model)
