"""What a run needs to continue from a checkpoint exactly as if it had never stopped, beyond what Trainer saves.

TRL's trainer continues exactly only where a generation batch ends: the rows it still has to learn from, its step counter,
the order of later epochs and the random state of vLLM are not part of its checkpoints. The trainers here save the first
two with the functions below, and make the other two functions of seeds and counters.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import Sampler
from trl.trainer.utils import RepeatSampler

from .rollouts import Rollout, from_state, to_state


class EpochSampler(Sampler):
    """TRL's sampler, shuffled by seed and epoch. TRL's own goes on with the generator of the epoch before, so that a run
    resumed after the first epoch would see the order of the first one again."""

    def __init__(self, sampler: RepeatSampler, epoch: Callable[[], int]):
        self.sampler = sampler
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.sampler.shuffle:
            self.sampler.generator.manual_seed(self.sampler.seed + self.epoch())
        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)


def request_seed(stream: str, index: int) -> int:
    """A seed in [0, 2^31) for one request to vLLM; different for every stream (run seed and engine) and request."""
    digest = hashlib.sha256(f"{stream}/{index}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


def rows_to_save(steps: Sequence[Sequence[Rollout]], process: int, num_processes: int) -> dict[tuple[int, int], dict]:
    """
    This process's part of the rows of a generation batch: those it learns from, and its share of those nobody has scored.

    Args:
        steps (sequence of sequences of [`Rollout`]):
            Rows of each optimizer step, the same on every process except for `ref_logps`.
        process (`int`), num_processes (`int`):
            This process and the number of processes.

    Returns:
        `dict`: from (optimizer step, row) to the row as tensors.
    """
    return {
        (k, i): to_state(row)
        for k, rows in enumerate(steps)
        for i, row in enumerate(rows)
        if row.ref_logps is not None or i % num_processes == process
    }


def merge_rows(parts: Sequence[dict[tuple[int, int], dict]]) -> list[list[Rollout]]:
    """Inverse of [`rows_to_save`], from the parts of all processes."""
    rows: dict[tuple[int, int], dict] = {}
    for part in parts:
        for place, row in part.items():
            if place not in rows or row["ref_logps"] is not None:
                rows[place] = row
    steps: list[list[Rollout]] = [[] for _ in range(1 + max((k for k, _ in rows), default=-1))]
    for k, i in sorted(rows):
        steps[k].append(from_state(rows[k, i]))
    return steps


def check_same_settings(checkpoint: str, saved: dict[str, Any], current: dict[str, Any]) -> None:
    """
    Raises:
        `ValueError`: if a run would continue under other settings than its checkpoint was written with; names them.
    """
    differing = [
        f"{name}: {saved.get(name)!r} in the checkpoint, {value!r} now"
        for name, value in current.items()
        if saved.get(name) != value
    ]
    if differing:
        raise ValueError(
            f"{checkpoint} was written with other settings, so the run would not continue but silently become another "
            f"one. {'; '.join(differing)}. Restore these settings, or start a new run from its weights with "
            "model_name_or_path."
        )
