"""The four names of `trl` that this package replaces."""

import trl
from trl import import_utils


def replace_trainers(trainers: str) -> None:
    """Exchanges the trainers and configurations in the module `trl`, before other modules import them from there.

    Args:
        trainers: `"trl"` leaves them, `"pacs_trl"` takes those of this package, `"pacs"` also `PACSTrainer` for
            `GRPOTrainer`.
    """
    import_utils.__getattr__ = is_available
    if trainers == "trl":
        return
    import pacs_trl

    for name in ("GRPOTrainer", "GRPOConfig", "RLOOTrainer", "RLOOConfig"):
        setattr(trl, name, getattr(pacs_trl, name))
    if trainers == "pacs":
        from pacs_mode import PACSTrainerOfGRPO

        trl.GRPOTrainer, trl.GRPOConfig = PACSTrainerOfGRPO, pacs_trl.PACSConfig


def is_available(name: str):
    """Answers for `import_utils.is_PACKAGE_available` where the installed version no longer has it."""
    import importlib.util

    if not name.startswith("is_"):
        raise AttributeError(name)
    package = name.removeprefix("is_").removesuffix("_available")
    return lambda: importlib.util.find_spec(package) is not None
