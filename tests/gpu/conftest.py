"""Fixtures of the GPU tests, which run at tiny sizes on the CPU where there is no CUDA device, and `--gpu-report`.

What a test computes runs in a process of its own, because an engine or a crash leaves memory behind.
"""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from gpu_report import TITLES, GpuReport, machine
from support import processes

from benchmarks import ROWS_FILE


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SECONDS = 540  # for a test; one that hangs must not use up a call of ten minutes

# In a process of its own: one that asks CUDA for properties keeps some of its memory.
ASK_TORCH = """
import json, torch
gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
gpus = [{"name": gpu.name, "memory": gpu.total_memory} for gpu in gpus]
print(json.dumps({"cuda": torch.version.cuda, "gpus": gpus}))
"""


@cache
def gpus() -> dict:
    """Return names and memory of the GPUs that torch sees, the CUDA version, and the driver with its power limit."""
    asked = subprocess.run([sys.executable, "-c", ASK_TORCH], check=True, capture_output=True, text=True)
    query = ["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, check=True, capture_output=True, text=True).stdout.partition("\n")[0].strip()
    except (OSError, subprocess.CalledProcessError):
        driver = "unknown: nvidia-smi failed"
    return json.loads(asked.stdout.splitlines()[-1]) | {"driver": driver}


def pytest_addoption(parser):
    parser.addoption("--gpu-report", type=Path, metavar="DIR", help="write a report, and run only what has not passed")
    parser.addoption("--gpu-part", choices=list(TITLES), help="tests of the report, by default all")


def pytest_configure(config):
    config.addinivalue_line("markers", "needs(cuda, num_gpus, gib, package): skip a GPU test where this is missing")
    directory = config.getoption("--gpu-report", None)
    if directory is None:
        return
    if DEVICE == "cpu":
        pytest.exit(
            f"torch {torch.__version__} finds no CUDA device, so there is nothing to report about a GPU. Install "
            "a driver and a torch built for CUDA (`make gpu-check TORCH=...`), or try the tests with `pytest "
            "tests/gpu`.",
            returncode=2,
        )
    report = GpuReport(config, directory.absolute(), machine(gpus()), config.getoption("--gpu-part"))
    config.pluginmanager.register(report, "gpu-report")


def pytest_runtest_setup(item):
    for mark in item.iter_markers("needs"):
        if why := missing(**mark.kwargs):
            pytest.skip(why)


def missing(cuda: bool = False, num_gpus: int = 1, gib: int = 0, package: str | None = None) -> str | None:
    """Return why a test cannot run here. On a CPU it runs with any number of GPUs and any memory, at tiny sizes."""
    if package and not is_installed(package):
        return f"{package} is not installed"
    if cuda and DEVICE == "cpu":
        return "needs a CUDA device"
    if DEVICE == "cuda" and len(gpus()["gpus"]) < num_gpus:
        return f"needs {num_gpus} GPUs, torch sees {len(gpus()['gpus'])}"
    if DEVICE == "cuda" and gpus()["gpus"][0]["memory"] < gib * 2**30:
        return f"needs a GPU of {gib} GiB"
    return None


def is_installed(package: str) -> bool:
    """`flash_attn` alone says little: FlashAttention 2 and 4 have modules of their own in it."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # of the parent
        return False


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture(autouse=True)
def no_temporary_file_stays():
    """vLLM's sockets and locks may stay when its process is killed."""


@pytest.fixture
def alone(request, tmp_path, monkeypatch):
    """Return `call(function, *arguments, num_processes=1, **environment)`: its results, from processes of its own."""
    if DEVICE == "cuda":  # a forked process could not use CUDA if its parent has asked for it
        monkeypatch.setattr(processes, "CONTEXT", get_context("spawn"))

    def call(function, *arguments, num_processes=1, num_gpus=None, **environment):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[: num_gpus or num_processes]
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(visible)} | environment
        environment.setdefault("ACCELERATE_USE_CPU", str(DEVICE == "cpu").lower())
        environment[ROWS_FILE] = str(tmp_path / "rows.jsonl")
        task = (processes.run_and_save, function, arguments, tmp_path)
        report = request.config.pluginmanager.get_plugin("gpu-report")
        with nullcontext() if report is None else report.following(request.node.nodeid, tmp_path / "rows.jsonl"):
            if num_processes == 2:
                processes.on_two(*task, outputs=tmp_path, seconds=SECONDS, **environment)
            else:
                output = tmp_path / "output.0"
                process = processes.start(*task, output=output, **environment)
                processes.wait_for([process], [output], seconds=SECONDS)
        return torch.load(tmp_path / "result.0", weights_only=False)

    return call
