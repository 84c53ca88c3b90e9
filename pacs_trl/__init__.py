"""PACS for TRL: reinforcement learning with verifiable rewards as supervised learning (arXiv 2509.02522).

Importing the package is light: neither torch nor trl is loaded until one of the names below is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING


if TYPE_CHECKING:  # the names below, for type checkers and editors
    from .baselines.grpo_config import GRPOConfig as GRPOConfig
    from .baselines.grpo_config import MaxRLConfig as MaxRLConfig
    from .baselines.grpo_config import REALConfig as REALConfig
    from .baselines.grpo_config import RLOOConfig as RLOOConfig
    from .baselines.grpo_trainer import GRPOTrainer as GRPOTrainer
    from .baselines.maxrl_trainer import MaxRLTrainer as MaxRLTrainer
    from .baselines.ppo_config import PPOConfig as PPOConfig
    from .baselines.ppo_trainer import PPOTrainer as PPOTrainer
    from .baselines.real_trainer import REALTrainer as REALTrainer
    from .baselines.rloo_trainer import RLOOTrainer as RLOOTrainer
    from .evaluation.pass_at_k import pass_at_k as pass_at_k
    from .pacs_config import PACSConfig as PACSConfig
    from .pacs_trainer import PACSTrainer as PACSTrainer
    from .rewards import math_reward as math_reward
    from .verification import Verifier as Verifier

__version__ = "0.2.0"

_PUBLIC_NAMES = {
    "GRPOConfig": "pacs_trl.baselines.grpo_config",
    "GRPOTrainer": "pacs_trl.baselines.grpo_trainer",
    "MaxRLConfig": "pacs_trl.baselines.grpo_config",
    "MaxRLTrainer": "pacs_trl.baselines.maxrl_trainer",
    "PACSConfig": "pacs_trl.pacs_config",
    "PACSTrainer": "pacs_trl.pacs_trainer",
    "PPOConfig": "pacs_trl.baselines.ppo_config",
    "PPOTrainer": "pacs_trl.baselines.ppo_trainer",
    "REALConfig": "pacs_trl.baselines.grpo_config",
    "REALTrainer": "pacs_trl.baselines.real_trainer",
    "RLOOConfig": "pacs_trl.baselines.grpo_config",
    "RLOOTrainer": "pacs_trl.baselines.rloo_trainer",
    "Verifier": "pacs_trl.verification",
    "math_reward": "pacs_trl.rewards",
    "pass_at_k": "pacs_trl.evaluation.pass_at_k",
}

__all__ = [*_PUBLIC_NAMES, "__version__"]


def __getattr__(name):
    if name in _PUBLIC_NAMES:
        return getattr(import_module(_PUBLIC_NAMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted(__all__)
