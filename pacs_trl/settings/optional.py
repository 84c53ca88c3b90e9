"""Packages that only some commands need: asked for before the work that needs them, and named with the way to install them."""

from importlib.util import find_spec


# The minor versions that TRL 1.16 drives: first and last.
SUPPORTED_VLLM = ((0, 22), (0, 31))

_FIRST, _LAST = (".".join(map(str, version)) for version in SUPPORTED_VLLM)
_NEXT = f"{SUPPORTED_VLLM[1][0]}.{SUPPORTED_VLLM[1][1] + 1}"
VLLM_OF_TRL = f"TRL 1.16 works with vLLM {_FIRST} to {_LAST}"
INSTALL_VLLM = (
    f"Install one with `pip install 'vllm>={_FIRST},<{_NEXT}' 'transformers<5.18'` (CUDA) or `make env-vllm` (CPU)"
)


def require_matplotlib(what: str) -> None:
    """
    Raises:
        `ValueError`: if there is no matplotlib for what draws figures.
    """
    if find_spec("matplotlib") is None:
        raise ValueError(
            f"{what} draws figures with matplotlib, which is not installed in this environment. Install it with `pip "
            "install 'matplotlib>=3.10'` and run the same command again."
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
