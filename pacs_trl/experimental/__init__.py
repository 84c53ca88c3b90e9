"""Methods related to PACS, one module each; nothing outside this folder depends on them.

`method: NAME` in a recipe trains with the module `NAME` of this folder: with its class whose name ends with `Trainer`,
configured by its class whose name ends with `Config`. Each trainer is a subclass of [`PACSTrainer`] that overrides one
of its extension points (docs/method.md), or, GenAC, of PPO's base class. Modules that begin with an underscore are
shared parts.
"""

import importlib
import pkgutil


def methods() -> list[str]:
    """Return the names of the methods in this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def classes_of(method: str) -> tuple[type, type]:
    """Import a method and return its configuration and its trainer."""
    module = importlib.import_module(f"{__name__}.{method}")
    found = []
    for ending in ("Config", "Trainer"):
        own = [
            each
            for name, each in vars(module).items()
            if name.endswith(ending) and each.__module__.startswith(module.__name__)
        ]
        if len(own) != 1:
            raise ValueError(
                f"{module.__name__} must define one class whose name ends with {ending!r}, and defines {len(own)}."
            )
        found += own
    return found[0], found[1]
