"""The former name of the setting `packing`. Loads no library."""

import warnings


def renamed_packing(padding_free: str, stacklevel: int) -> str:
    """Return the value of `packing` for a value of `padding_free`, and warn that the setting has another name."""
    warnings.warn(
        f"`padding_free` is now called `packing`, and the former name ends with version 0.3. Set packing="
        f"{padding_free!r} instead.",
        FutureWarning,
        stacklevel=stacklevel,
    )
    return padding_free
