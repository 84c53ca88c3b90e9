"""From a checkpoint to pass@k with intervals: the same prompts and the same verifier as training.

Importing this package needs numpy only. `pass_at_k` is bound here because a submodule has the same name: the function
must be what `pacs_trl.evaluation.pass_at_k` means, whatever else has been imported before.
"""

from .pass_at_k import Interval, paired_interval, pass_at_k, pass_interval


__all__ = ["Interval", "paired_interval", "pass_at_k", "pass_interval"]
