"""Resuming on another number of processes.

A run with the same number of completions per optimizer step continues, whatever the number of processes that computed
the checkpoint. Most state is the same on all processes, and is read from the file of the first. The exceptions:

- Positions (`_step`, `_data_position`) are counted in accumulation slots, whose size depends on the number of
  processes. They are converted with the number of slots per generation batch.
- Waiting completions are merged and scheduled again (`waiting_rollouts.merge_rollouts`), late batches merged and
  divided ([`divide_batches`]).
- Sharded weights, optimizers, snapshots, and KL references are saved by `torch.distributed.checkpoint`, which
  redistributes them.
- Random states are per process and cannot be divided: the generators are seeded anew ([`seed_process`]). Requests to
  vLLM have seeds that do not depend on the number of processes (`request_seeds.py`).
"""

import re
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed

from ..errors import UserError
from ..update.step_sizes import BatchSizes
from .checkpoint_files import FILE_LIST, KL_REFERENCE, POLICY_COPY, check_complete
from .request_seeds import request_seed


class SavedRun(NamedTuple):
    """
    What a checkpoint says about the processes that wrote it.

    Attributes:
        num_processes (`int`): Their number.
        sharding (`str`): How they shared the weights, see [`sharding_of`].
        sizes (`dict`): The batch-size settings of the run, by name; `completions_per_step` may be `None`.
    """

    num_processes: int
    sharding: str
    sizes: dict[str, Any]

    @property
    def batch_sizes(self) -> BatchSizes:
        return BatchSizes(num_processes=self.num_processes, **self.sizes)


def sharding_of(distributed_type: str | DistributedType) -> str:
    """Return how processes share the weights: `"FSDP"`, `"DeepSpeed"`, or `"none"`, each process has all of them."""
    return {DistributedType.FSDP: "FSDP", DistributedType.DEEPSPEED: "DeepSpeed"}.get(distributed_type, "none")


def facts_to_save(sizes: BatchSizes, distributed_type: DistributedType) -> dict[str, Any]:
    """Return what [`SavedRun`] holds of a run, as plain values."""
    return SavedRun(sizes.num_processes, sharding_of(distributed_type), sizes.settings)._asdict()


def saved_run(state: dict[str, Any], checkpoint: str | Path) -> SavedRun:
    """Return what the state file of a checkpoint says about its processes. Raises a `ValueError` if another version of
    this package has written it, or if the list of its files is missing."""
    if "processes" not in state:
        raise UserError(
            f"{checkpoint} was written by an earlier version of pacs_trl, which did not store what it needs to "
            "continue. Start a new run from its weights with model_name_or_path."
        )
    if not Path(checkpoint, FILE_LIST).is_file():
        raise UserError(
            f"{checkpoint} has no {FILE_LIST}, the list of its files, so other files may be missing too. Copy the "
            "whole checkpoint again, or resume from another one."
        )
    try:
        saved = SavedRun(**state["processes"])
        # Raises for settings that this version does not have.
        BatchSizes(num_processes=saved.num_processes, **saved.sizes)
    except TypeError as error:
        raise UserError(
            f"{checkpoint} was written by another version of pacs_trl, which stores its batch sizes differently. "
            "Resume with that version, or start a new run from its weights with model_name_or_path."
        ) from error
    return saved


def read_saved_run(checkpoint: str | Path) -> SavedRun:
    """Read what a checkpoint says about the processes that wrote it. Raises a `ValueError` if it does not exist, is
    incomplete, or has no state."""
    check_complete(str(checkpoint))
    file = next(Path(checkpoint).glob("*_state_0.pt"), None)
    if file is None:
        raise UserError(
            f"{checkpoint} has no state of a run: it was written by another trainer or with save_only_model=True, and "
            "cannot be continued. Start a new run from its weights with model_name_or_path."
        )
    return saved_run(torch.load(file, map_location="cpu", weights_only=True), checkpoint)


def check_batch(saved: SavedRun, checkpoint: str | Path, now: BatchSizes, *, keeps_batch: bool) -> None:
    """Raise a `ValueError` unless a launch has as many completions per optimizer step and per generation batch as a
    checkpoint. `keeps_batch` says whether the recipe sets `keep_global_batch`."""
    compared = {"An optimizer step": "completions_per_update", "A generation batch": "completions_per_generation"}
    for what, name in compared.items():
        completions, completions_now = getattr(saved.batch_sizes, name), getattr(now, name)
        if completions == completions_now:
            continue
        remedy = f"Set keep_global_batch: true to keep {completions}"
        if keeps_batch:
            remedy = (
                "Remove expected_processes, or set it to the number that the batch sizes of the run are written for"
            )
        raise UserError(
            f"{what} of {checkpoint} has {completions} completions over {saved.num_processes} processes, and one of "
            f"this launch {completions_now} over {now.num_processes}. {remedy}, or start a new run from its weights "
            "with model_name_or_path."
        )


def check_processes(
    saved: SavedRun, checkpoint: str | Path, num_processes: int, sharding: str, *, needs_same_number: bool = False
) -> None:
    """Raise a `ValueError` if a run with these processes cannot continue from a checkpoint. `needs_same_number` is
    that of its configuration."""
    if needs_same_number and saved.num_processes != num_processes:
        raise UserError(
            f"{checkpoint} was written by {saved.num_processes} processes, and this launch has {num_processes}: the "
            f"method depends on their number. Launch {saved.num_processes} processes."
        )
    if saved.sharding != sharding:
        names = {"FSDP": "FSDP", "DeepSpeed": "DeepSpeed", "none": "DDP or one process"}
        raise UserError(
            f"{checkpoint} was written with {names[saved.sharding]}, and this launch uses {names[sharding]}: their "
            "optimizer states have different files. Launch with the former, or start a new run from its weights with "
            "model_name_or_path."
        )
    if saved.batch_sizes.is_sliced and saved.num_processes != num_processes:
        raise UserError(
            f"{checkpoint} was written by {saved.num_processes} processes, and its optimizer steps are no equal parts "
            f"of a generation batch, so it does not continue on {num_processes}. Launch {saved.num_processes}, or "
            "start a new run from its weights with model_name_or_path."
        )
    if saved.sharding == "DeepSpeed" and saved.num_processes != num_processes:
        raise UserError(
            f"{checkpoint} was written by {saved.num_processes} processes with DeepSpeed, whose optimizer states fit "
            f"only that number, and this launch has {num_processes}. Launch {saved.num_processes} processes; runs "
            "with DDP or FSDP2 continue on another number."
        )


def converted_positions(saved: BatchSizes, now: BatchSizes, positions: Sequence[int]) -> list[int]:
    """Convert numbers of accumulation slots between two numbers of processes, by way of generation batches."""
    factor = Fraction(now.steps_per_generation, saved.steps_per_generation)
    converted = [position * factor for position in positions]
    # Checkpoints are written after optimizer steps, which are equal parts of a generation batch: positions are whole.
    assert all(position.denominator == 1 for position in converted), converted
    return [int(position) for position in converted]


def seed_process(run_seed: int, global_step: int, accelerator: Accelerator) -> None:
    """Seed the generators of this process for a run with the seed `run_seed` that has resumed after optimizer step
    `global_step` on another number of processes."""
    stream = f"{run_seed}/{global_step}/{accelerator.num_processes} processes"
    set_seed(request_seed(stream, accelerator.process_index))


def remove_parts_of_missing_processes(checkpoint: Path, num_processes: int) -> None:
    """Remove the files of processes from `num_processes` on, which an earlier checkpoint of more processes has left in
    a folder that is overwritten."""
    for file in checkpoint.glob("*.pt*"):
        part = re.fullmatch(rf"(?:\w+_state|{POLICY_COPY}|{KL_REFERENCE})_(\d+)\.pth?", file.name)
        if part is not None and int(part[1]) >= num_processes:
            file.unlink()


def divide_batches(parts: Sequence[dict[int, dict]], process: int, num_processes: int) -> dict[int, dict]:
    """
    Return the late batches of a process from those that all processes of a checkpoint have saved, see
    [`LateBatches.state`]. Reward functions are called again when a batch is taken. A batch that did not arrive on
    all processes is generated again.
    """
    divided: dict[int, dict] = {}
    for number in sorted(set().union(*parts)):
        shares = [part.get(number, {}) for part in parts]
        stopped = [share for share in shares if "weights" in share]
        if all("output" in share for share in shares):
            divided[number] = _divide_batch(shares, process, num_processes)
        elif stopped:
            divided[number] = {"step": stopped[0]["step"], "weights": stopped[0]["weights"]}
    return divided


def _divide_batch(shares: Sequence[dict], process: int, num_processes: int) -> dict[str, Any]:
    """Return the part of a process of a batch that has arrived; `shares` are those of the processes that saved it."""
    first = shares[0]
    prompts: list = []
    for share in shares:
        prompts += share["prompts"]
    output = dict(first["output"])
    for name, values in first["output"].items():
        if isinstance(values, list) and len(values) == len(first["prompts"]):  # an entry per completion
            merged: list = []
            for share in shares:
                merged += share["output"][name]
            output[name] = _share(merged, process, num_processes)
    return {
        "step": first["step"],
        "seconds": first["seconds"],
        "idle": first["idle"],
        "prompts": _share(prompts, process, num_processes),
        "output": output,
        "rewards": {},
    }


def _share(rows: list, process: int, num_processes: int) -> list:
    """Return the rows of a process; `rollout_lag` refuses shares that are not equal."""
    size = len(rows) // num_processes
    return rows[process * size : (process + 1) * size]
