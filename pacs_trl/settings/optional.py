"""What a machine may lack, asked for before the work that needs it: packages of some commands, and rights to write."""

import tempfile
from collections.abc import Sequence
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
            f"{name}={str(directory)!r} cannot be written to: {error.strerror}. Choose another directory, or make room or "
            "give the rights."
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
            f"engine='vllm', but vLLM is not installed in this environment. {VLLM_OF_TRL}. {INSTALL_VLLM}, or sample with "
            "transformers: `--engine transformers`."
        )
