"""Evaluation of checkpoints: pass@k with intervals, with the prompts and the verifier of training.

Importing this package needs numpy only. `pacs_trl.evaluation.pass_at_k` is the function, not the submodule.
"""

from .pass_at_k import Interval, paired_interval, pass_at_k, pass_interval


__all__ = ["Interval", "paired_interval", "pass_at_k", "pass_interval"]
