"""What a machine may lack, asked for before the work that needs it: packages of some commands, and rights to write."""

import importlib
import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path


# The minor versions that TRL 1.16 drives: first and last.
SUPPORTED_VLLM = ((0, 22), (0, 31))

_FIRST, _LAST = (".".join(map(str, version)) for version in SUPPORTED_VLLM)
_NEXT = f"{SUPPORTED_VLLM[1][0]}.{SUPPORTED_VLLM[1][1] + 1}"
VLLM_OF_TRL = f"TRL 1.16 works with vLLM {_FIRST} to {_LAST}"
INSTALL_VLLM = (
    f"Install one with `pip install 'vllm>={_FIRST},<{_NEXT}' 'transformers<5.18'` (CUDA) or `make env-vllm` (CPU)"
)


TRACKERS = (
    "wandb",
    "trackio",
    "tensorboard",
    "mlflow",
    "comet_ml",
    "codecarbon",
    "clearml",
    "dagshub",
    "dvclive",
    "swanlab",
)


def looks_like_path(name: str) -> bool:
    """Whether the name of a model or a dataset is spelled as a path: a Hub id has at most one slash, and recipes of
    ours write below `outputs/`."""
    return name.startswith((".", "/", "~", "outputs/")) or name.count("/") > 1


def check_model_path(name: str) -> None:
    """
    Check that a model given by its path is there, so that no path is searched on the Hub.

    Args:
        name (`str`): A directory, or any other name of a model, which is not checked: a Hub id, `miniature/TASK`.

    Raises:
        `ValueError`: if the name is spelled as a path, and there is no such directory, or no model in it, or only an
            adapter of a base model that is not there.
    """
    directory = Path(name)
    if directory.is_file():
        raise ValueError(f"The model {name!r} is a file. Name the directory that holds config.json and the weights.")
    if not directory.is_dir():
        if looks_like_path(name) and not name.startswith("miniature/"):
            home = " `~` is not expanded here: write the whole path." if name.startswith("~") else ""
            raise ValueError(f"The model directory {name!r} does not exist (seen from {Path.cwd()}).{home}")
        return
    shards = directory / "pytorch_model_fsdp_0"  # where accelerate saves FSDP's shards
    if shards.is_dir() and not any(directory.glob("*.safetensors")):
        raise ValueError(
            f"The model {name!r} is in FSDP shards. Merge them: `accelerate merge-weights {shards} {directory}`."
        )
    adapter = directory / "adapter_config.json"
    if (directory / "config.json").is_file():
        return
    if not adapter.is_file():
        raise ValueError(f"The directory {name!r} holds no model: it has neither config.json nor adapter_config.json.")
    base = json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not base:
        raise ValueError(
            f"{name}/adapter_config.json does not name the base model of the adapter. Set base_model_name_or_path "
            "there."
        )
    if looks_like_path(base) and not Path(base).is_dir():
        raise ValueError(
            f"The adapter {name!r} belongs to the base model {base!r}, which does not exist (seen from {Path.cwd()}). "
            "Put the base model there, or set base_model_name_or_path in adapter_config.json to where it is."
        )


def check_whole_model(name: str, user: str, otherwise: str) -> None:
    """
    Raises:
        `ValueError`: if a directory holds an adapter without its base model; `user` is what would load it, and
            `otherwise` what to do instead of merging it.
    """
    if Path(name, "adapter_config.json").is_file() and not Path(name, "config.json").is_file():
        raise ValueError(
            f"{name} holds an adapter, and {user} loads whole models. Merge it into its base model first (peft: "
            "AutoPeftModelForCausalLM.from_pretrained(...).merge_and_unload().save_pretrained(...), and the "
            f"tokenizer), or {otherwise}."
        )


def check_writable(name: str, directory: str | Path) -> None:
    """
    Make a directory, and write into it.

    Args:
        name (`str`): The setting that names it.
        directory (`str` or `Path`): The directory.

    Raises:
        `ValueError`: if that is refused.
    """
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise ValueError(
            f"{name}={str(directory)!r} cannot be written to: {error.strerror}. Choose another directory, or make "
            "room or give the rights."
        ) from error


def require_trackers(names: Sequence[str]) -> None:
    """
    Raises:
        `ValueError`: if a tracker of `report_to` is not installed.
    """
    missing = [name for name in names if name in TRACKERS and find_spec(name) is None]
    if missing:
        raise ValueError(
            f"report_to names {' and '.join(missing)}, not installed in this environment. Install with `pip install "
            f"{' '.join(missing)}`, or take the name out of report_to."
        )


def require_matplotlib(what: str) -> None:
    """
    Raises:
        `ValueError`: if there is no matplotlib for what draws figures.
    """
    if find_spec("matplotlib") is None:
        raise ValueError(
            f"{what} draws figures with matplotlib, which is not installed in this environment. Install it with `pip "
            "install 'matplotlib>=3.10'`, or this package with the extra `report`, and run the same command again."
        )


def require_vllm_for_evaluation() -> None:
    """
    Raises:
        `ValueError`: if there is no vLLM.
    """
    if find_spec("vllm") is None:
        raise ValueError(
            f"engine='vllm', but vLLM is not installed in this environment. {VLLM_OF_TRL}. {INSTALL_VLLM}, or sample "
            "with transformers: `--engine transformers`."
        )


def function_of_user(name: str, key: str) -> Callable:
    """
    A function by its dotted path, also from the working directory.

    Raises:
        `ValueError`: if there is none; `key` is the setting that names it.
    """
    module_name, _, function_name = name.rpartition(".")
    if not module_name:
        raise ValueError(f"{key}: {name!r} names no function. Write it as package.module.function.")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the module is the user's, and its import can raise anything
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if place.filename.startswith("<frozen") else f", {place.filename} line {place.lineno}"
        raise ValueError(
            f"The module of {name!r} cannot be imported here ({type(error).__name__}: {error}{where}). It must be "
            f"importable from the working directory of the run, which is {Path.cwd()}."
        ) from error
    if not callable(getattr(module, function_name, None)):
        raise ValueError(f"The module {module_name!r} has no function {function_name!r} ({key}: {name}).")
    return getattr(module, function_name)
