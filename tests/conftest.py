"""Settings of all tests: quiet libraries, no network, one thread; and a tier for each test (see CONTRIBUTING.md)."""

import gc
import json
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

import pytest

from experiments.miniature.files import DATA_DIR, write_data


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB


HERE = Path(__file__).parent
TIERS = {"unit", "slow", "distributed", "vllm", "notebook", "gpu"}

# What libraries make on import and leave behind when their process is stopped (wandb), or always (torchrun, inductor).
LEFT_BY_OTHERS = ("wandb-", "torchelastic_", "torchinductor_", "pymp-")


@pytest.hookimpl(trylast=True)  # after pytest has looked for a place for its own directory
def pytest_configure(config):
    """
    Temporary files of this process and of those it starts stay under pytest's directory, not in the system's.

    Before anything is imported: wandb makes its folders, and trackio reads where its own is, when they are imported.
    A conftest.py below this one is loaded earlier, so it must not import TRL.
    """
    directory = config._tmp_path_factory.getbasetemp() / "temporary"
    directory.mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(directory)
    os.environ["TRACKIO_DIR"] = str(directory.with_name("trackio"))
    write_data(HERE.parent / DATA_DIR)  # where recipes look for it


@pytest.fixture(scope="module", autouse=True)
def loaded_modules_are_frozen_for_the_garbage_collector():
    """Modules stay: nobody looks through them for garbage, as accelerate would with each training, nor for what is
    installed."""
    import accelerate.utils.imports as installed

    if not hasattr(installed._is_package_available, "cache_info"):
        installed._is_package_available = cache(installed._is_package_available)
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_temporary_file_stays():
    """What this package or a test writes to the temporary directory, it removes."""
    before = set(os.listdir(tempfile.gettempdir()))
    yield
    now = set(os.listdir(tempfile.gettempdir())) - before
    left = [name for name in now if not Path(tempfile.gettempdir(), name).is_socket()]  # vLLM leaves its sockets
    left = sorted(name for name in left if not any(other in name for other in LEFT_BY_OTHERS))
    assert not left, f"left in the temporary directory: {left}. Write under tmp_path, or remove what was written."


def pytest_collection_modifyitems(items):
    """A test is of the tiers it is marked with, else of the tier its folder is named after, else a unit test."""
    for item in items:
        if not item.path.is_relative_to(HERE) or TIERS & {marker.name for marker in item.iter_markers()}:
            continue
        folder = item.path.relative_to(HERE).parts[0].removesuffix("_cpu")
        item.add_marker(folder if folder in TIERS else "unit")


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    """The tiny model on disk, with its tokenizer."""
    return save_tiny_model(tmp_path_factory)


@pytest.fixture(scope="session")
def tool_model_path(tmp_path_factory):
    """The tiny model on disk; the chat template of its tokenizer has tools."""
    return save_tiny_model(tmp_path_factory, tools=True)


def save_tiny_model(tmp_path_factory, tools: bool = False) -> str:
    from support.models import tiny_model

    from experiments.miniature.tokenizer import build_tokenizer

    path = tmp_path_factory.mktemp("saved") / "model"
    tiny_model().save_pretrained(path)
    build_tokenizer(tools=tools).save_pretrained(path)
    return str(path)


@pytest.fixture
def checkpoint_with_code(tmp_path, monkeypatch):
    """Copy a checkpoint of Qwen3, so that its class is in a file of the checkpoint; the path of the copy."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))

    def copy(checkpoint: str | Path, model_type: str = "own") -> str:
        directory = shutil.copytree(checkpoint, tmp_path / "with_code")
        (directory / "modeling_own.py").write_text(
            "from transformers import Qwen3Config, Qwen3ForCausalLM\n"
            f"class OwnConfig(Qwen3Config):\n    model_type = '{model_type}'\n"
            "class OwnForCausalLM(Qwen3ForCausalLM):\n    config_class = OwnConfig\n"
        )
        config = json.loads((directory / "config.json").read_text())
        classes = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
        config |= {"model_type": model_type, "architectures": ["OwnForCausalLM"], "auto_map": classes}
        (directory / "config.json").write_text(json.dumps(config))
        return str(directory)

    return copy


@pytest.fixture(params=["colocate", "server", "transformers"])
def engine(request, model_path, monkeypatch):
    """Settings of a run, and what its engine has been asked for: number of completions, prompt and seed of each
    request."""
    from support.fake_llm import play_colocated
    from support.vllm_server import LoopbackVLLM, play_installed, server_settings

    if request.param == "transformers":
        yield {}, None
    elif request.param == "colocate":
        settings = play_colocated(monkeypatch)
        yield settings, lambda trainer: [(1, ids, p.seed) for ids, p in trainer.vllm_generation.llm.requests]
    else:
        play_installed(monkeypatch.setattr)
        with LoopbackVLLM(model_path) as server:

            def requests(trainer):
                asked, server.requests = server.requests, []
                return [(body["n"], ids, body["seed"]) for body in asked for ids in body["prompt"]]

            yield server_settings(server.url), requests


@pytest.fixture(scope="session")
def confined():
    """For tests of what runs programs at the level that is asked for by default."""
    from pacs_trl.verification.code import CodeVerifier

    verifier = CodeVerifier(num_workers=1)
    try:
        verifier.start()
    except ValueError as error:
        pytest.skip(str(error))
    verifier.close()


@pytest.fixture
def launch_file(tmp_path):
    """Write an accelerate file of these lines; its path."""

    def write(*lines: str) -> str:
        file = tmp_path / "launch.yaml"
        file.write_text("\n".join(lines))
        return str(file)

    return write
