"""Settings of all tests: quiet libraries, no network, one thread; and a tier for each test (see CONTRIBUTING.md)."""

import os
import tempfile
from pathlib import Path

import pytest


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
# trackio reads this once, when it is imported
os.environ.setdefault("TRACKIO_DIR", tempfile.mkdtemp(prefix="trackio-"))


HERE = Path(__file__).parent
TIERS = {"unit", "slow", "distributed", "vllm", "notebook", "gpu"}


def pytest_collection_modifyitems(items):
    """A test is of the tiers it is marked with, else of the tier its folder is named after, else a unit test."""
    for item in items:
        if not item.path.is_relative_to(HERE) or TIERS & {marker.name for marker in item.iter_markers()}:
            continue
        folder = item.path.relative_to(HERE).parts[0].removesuffix("_cpu")
        item.add_marker(folder if folder in TIERS else "unit")


@pytest.fixture(scope="session")
def tokenizer():
    from replay import TOKENIZER

    return TOKENIZER


@pytest.fixture
def launch_file(tmp_path):
    """Write an accelerate file of these lines; its path."""

    def write(*lines: str) -> str:
        file = tmp_path / "launch.yaml"
        file.write_text("\n".join(lines))
        return str(file)

    return write
