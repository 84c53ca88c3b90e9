"""Work without a connection to the Hub. Loads no library."""

import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies


_SECONDS = 5.0
# Settings that name a model or data, which may be on the Hub.
_NAMES = ("model", "model_name_or_path", "critic_model_name_or_path", "dataset_name", "benchmarks", "eval_benchmarks")
_TRUE = ("1", "ON", "YES", "TRUE")  # of huggingface_hub


def work_offline_without_connection(command: str, settings: Mapping[str, Any]) -> None:
    """
    Set `HF_HUB_OFFLINE` if settings name files of the Hub and the Hub cannot be reached. Libraries, which read this
    variable when they are imported, would repeat each request for a minute; offline they read their cache at once. A
    run that pushes its model is left alone, because the connection may return until then.
    """
    is_offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in _TRUE
    pushes = settings.get("push_to_hub", False) not in (False, "False", "false")
    if is_offline or pushes or not _needs_hub(settings) or _reaches_hub():
        return
    os.environ["HF_HUB_OFFLINE"] = "1"
    if os.environ.get("RANK", "0") == "0":
        print(
            f"pacs-trl {command}: {_endpoint().hostname} cannot be reached, so models and data come from the cache "
            "(HF_HUB_OFFLINE=1).",
            file=sys.stderr,
            flush=True,
        )


def _needs_hub(settings: Mapping[str, Any]) -> bool:
    """Whether a setting names what is neither generated, nor a module, nor on this machine."""
    if settings.get("engine") == "server":  # which has the model
        settings = {key: value for key, value in settings.items() if key != "model"}
    names = [settings[key] for key in _NAMES if settings.get(key)]
    if settings.get("dataset_path") and settings.get("dataset_name") in names:
        names.remove(settings["dataset_name"])
    specs = [spec for name in names for spec in (name if isinstance(name, list) else str(name).split(","))]
    paths = [str(spec).strip().rpartition("=")[2] for spec in specs]
    is_local = [path.startswith("reasoning_gym") or ":" in path or Path(path).exists() for path in paths]
    return not all(is_local)


def _endpoint() -> Any:
    return urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")


def _reaches_hub() -> bool:
    """Whether the Hub accepts a connection; with a proxy, which makes it, the answer is always yes."""
    endpoint = _endpoint()
    if {endpoint.scheme, "all"} & getproxies().keys():
        return True
    try:
        port = endpoint.port or (80 if endpoint.scheme == "http" else 443)
        socket.create_connection((endpoint.hostname, port), timeout=_SECONDS).close()
    except OSError:
        return False
    return True
