"""A real vLLM engine on the CPU. The directory is not called `vllm`, or Python would take it for the package.

vLLM's CPU backend repacks the weights of linear layers when it loads them, so that weights which TRL copies into the
engine later would never be seen. The fixture below keeps the plain product instead; CUDA needs nothing of the kind.
"""

import importlib.metadata
import socket
from functools import partial

import pytest


INSTALLED = "vllm" in importlib.metadata.packages_distributions()


def pytest_collection_modifyitems(items):
    for item in items:
        if "vllm_cpu" in item.path.parts:
            item.add_marker(pytest.mark.vllm)
            if not INSTALLED:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed (`make env-vllm`)"))


@pytest.fixture(autouse=True)
def no_temporary_file_stays():
    """vLLM's sockets and locks lie there as long as an engine runs, which is longer than a test."""


@pytest.fixture(scope="module", autouse=True)
def no_process_group_stays():
    """Engines leave one in this process, which the tests of other modules would find."""
    yield
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    destroy_model_parallel()
    destroy_distributed_environment()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Directory with the smallest miniature model and its tokenizer; vLLM loads by path."""
    from experiments.miniature.model import build_model
    from experiments.miniature.tokenizer import build_tokenizer

    directory = tmp_path_factory.mktemp("tiny")
    tokenizer = build_tokenizer()
    build_model(tokenizer, "tiny").save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="session")
def shared_engine():
    """One engine, and one with LoRA, for all trainers of a module: starting one takes longer than training with it.

    Every trainer sends its weights before it generates for the first time, so nothing of the last one remains.
    """
    from vllm import LLM
    from vllm.distributed.parallel_state import model_parallel_is_initialized

    from benchmarks.shared_engine import keep_plain_products

    started: dict[bool, list] = {False: [], True: []}  # without and with LoRA
    monkeypatch = pytest.MonkeyPatch()
    keep_plain_products(monkeypatch.setattr)

    def engine(**kwargs):
        # After the first start evaluation has its engines in this process too, and one that is closed tears down what
        # all of them need. The broken one is kept: it would tear down the new one when it is collected.
        engines = started[kwargs.get("enable_lora", False)]
        if not engines or not model_parallel_is_initialized():
            engines.append(LLM(**kwargs, enforce_eager=True, dtype="float32"))
        return engines[-1]

    yield engine
    monkeypatch.undo()


@pytest.fixture
def colocated(shared_engine, monkeypatch):
    """Lets trainers use the shared engine; returns what `build_trainer` needs for colocate mode."""
    from trl.generation import vllm_generation

    monkeypatch.setattr(vllm_generation, "LLM", partial(shared_engine))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # TRL sets these; set here, so that they are put back afterwards
        monkeypatch.delenv(name)
    with socket.socket() as free:  # TRL would take the first free one of a few, which another worker may take, too
        free.bind(("", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    return {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": 64,
        "vllm_gpu_memory_utilization": 0.3,
        "max_completion_length": 8,
    }
