"""What a result was made on: cards, driver, versions, commit."""

import json
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from ..evaluation.provenance import source_commit, versions
from ..settings.command_line import FailedRun


_MORE_PACKAGES = ("accelerate", "peft", "deepspeed", "flash-attn", "triton", "numpy")

# In a process of its own, which ends: whoever asks CUDA keeps some of its memory.
_ASK_TORCH = """
import json, torch
gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
gpus = [{"name": gpu.name, "memory": gpu.total_memory, "capability": f"{gpu.major}.{gpu.minor}"} for gpu in gpus]
print(json.dumps({"cuda": torch.version.cuda, "gpus": gpus}))
"""

_INSTALL = {
    "vllm": "vLLM is not installed (docs/vllm.md names the versions)",
    "deepspeed": "DeepSpeed is not installed (pip install 'deepspeed>=0.19')",
    "flash_attn": "flash-attn, the package of FlashAttention 2, is not installed",
    "flash_attn_interface": "flash_attn_interface, the package of FlashAttention 3, is not installed",
}


def machine(device: str) -> dict[str, Any]:
    """
    The facts of this machine for `"cuda"` or `"cpu"`.

    Raises:
        `ValueError`: if CUDA is asked for and torch finds no GPU.
    """
    facts: dict[str, Any] = {"device": device, "commit": source_commit(), "versions": versions(), "gpus": []}
    for package in _MORE_PACKAGES:
        try:
            facts["versions"][package] = version(package)
        except PackageNotFoundError:
            continue
    cores = len(os.sched_getaffinity(0))
    facts |= {"processor": f"{platform.machine()}, {cores} cores", "system": platform.platform()}
    if device == "cpu":
        return facts | {"card": f"no GPU ({facts['processor']})"}
    asked = subprocess.run([sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True)
    if asked.returncode:
        raise FailedRun(f"torch cannot ask for the GPUs of this machine:\n{asked.stderr[-2000:]}")
    facts |= json.loads(asked.stdout.splitlines()[-1])
    if not facts["gpus"]:
        raise ValueError(
            f"torch {facts['versions']['torch']} finds no GPU (CUDA {facts['cuda']}, CUDA_VISIBLE_DEVICES="
            f"{os.environ.get('CUDA_VISIBLE_DEVICES')!r}). Mend driver or installation, or try the same code at tiny sizes with "
            "`--device cpu`."
        )
    return facts | {"card": facts["gpus"][0]["name"], "driver": _driver()}


def _driver() -> str:
    """Version and power limit as nvidia-smi says them."""
    if not shutil.which("nvidia-smi"):
        return "not known: there is no nvidia-smi"
    query = ["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader"]
    asked = subprocess.run(query, capture_output=True, text=True)
    return asked.stdout.partition("\n")[0].strip() or f"not known: nvidia-smi ended with {asked.returncode}"


def lacking(needs: tuple[str, ...], facts: dict[str, Any]) -> str | None:
    """Why something that `needs` this is not possible here: `"cuda"`, `"N GPUs"`, `"N GiB"` of the first one, or a package."""
    for need in needs:
        number, _, unit = need.partition(" ")
        if need == "cuda" and facts["device"] == "cpu":
            return "needs a GPU"
        if unit == "GPUs" and facts["device"] == "cuda" and len(facts["gpus"]) < int(number):
            return f"needs {number} GPUs, and torch sees {len(facts['gpus'])}"
        if unit == "GiB" and facts["device"] == "cuda" and facts["gpus"][0]["memory"] < int(number) * 2**30:
            return f"needs a card of {number} GiB, and this one has {facts['gpus'][0]['memory'] / 2**30:.0f}"
        if need in _INSTALL and find_spec(need) is None:
            return _INSTALL[need]
    return None
