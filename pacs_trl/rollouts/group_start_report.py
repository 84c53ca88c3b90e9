"""Report of groups whose completions started from different states of their environment."""

import logging
from collections.abc import Callable, Mapping

from accelerate.utils import gather_object

from .group_starts import GroupStarts


logger = logging.getLogger(__name__)


class GroupStartReport:
    """
    Metric `environments/different_start_fraction`, and a warning at the first group that it counts or cannot count.

    Args:
        record (`Callable`): Logs metrics by name.
        comparison (`str`, *optional*): Sentence that says how the method compares the completions of a group.
    """

    def __init__(self, record: Callable[[Mapping[str, float]], None], comparison: str | None):
        self._record, self._comparison = record, comparison
        self._has_warned = self._has_warned_of_unknown = False

    def add(self, starts: GroupStarts) -> None:
        """Report the generation batch whose environments were reset last. All processes must call this."""
        observations: dict[int, set[int]] = {}
        for group, observation in gather_object(starts.observations):
            observations.setdefault(group, set()).add(observation)
        reasons = dict(gather_object(list(starts.differing.items())))
        differing = {group for group, seen in observations.items() if len(seen) > 1} | reasons.keys()
        unknown = set(gather_object(list(starts.unknown))) - differing
        compared = (observations.keys() | differing) - unknown
        if compared:
            self._record({"environments/different_start_fraction": len(differing) / len(compared)})
        if unknown and not self._has_warned_of_unknown:
            self._has_warned_of_unknown = True
            logger.warning(
                f"It is not known whether the completions of {len(unknown)} of {len(observations)} groups start from "
                "the same state: their observations are equal, but their environment may keep a part of its state "
                "outside of this process, and `reset` got no seed. If `reset` chooses at random, give it the seed of "
                "the group: `def reset(self, seed, **kwargs)`."
            )
        if differing and not self._has_warned:
            self._has_warned = True
            reason = next(iter(reasons.values()), "its completions are on several processes")
            logger.warning(
                f"{len(differing)} of {len(compared)} groups have completions that start from different states "
                f"of their environment, which counts as `environments/different_start_fraction`: {reason}. "
                + (f"{self._comparison}, so that it compares different examples. " if self._comparison else "")
                + "Let `reset` choose the example by a column of the dataset, or by `seed`: `def reset(self, seed, "
                "**kwargs)`."
            )
