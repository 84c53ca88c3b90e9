"""Bitwise resumable checkpoints: state besides Trainer's, and the checkpoint to resume from.

TRL's trainer resumes exactly only at the end of a generation batch. Its checkpoints lack the completions for later
optimizer steps, the step counter, the data order of later epochs, and the random state of vLLM. This module saves the
first two (`waiting_rollouts.py` has the form of completions); the other two follow from seeds and counters
(`prompt_order.py`, `request_seeds.py`). `compared_settings.py` compares a run with the checkpoint that it resumes
from, and `checkpoint_files.py` tells complete checkpoints from incomplete ones.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as distributed_checkpoint
from accelerate.utils import gather_object
from peft import PeftConfig, PeftModel
from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..errors import NO_ROOM, FailedRun, UserError
from ..update.reference import SnapshotReference, StoredWeights, is_sharded, weights_of
from ..update.step_sizes import BatchSizes
from . import process_count
from .checkpoint_files import KL_REFERENCE, POLICY_COPY, check_complete, last_checkpoint, last_resumable_checkpoint
from .compared_settings import check_same_adapter, check_same_model, check_same_settings, settings_to_compare


if TYPE_CHECKING:
    from .resumable_trainer import ResumableTrainer


logger = logging.getLogger(__name__)

# transformers loads an optimizer onto `args.device`. With several CPU processes this is "cpu:0", which torch.load does
# not accept by default.
torch.serialization.register_package(
    50, lambda storage: None, lambda storage, location: storage if location.startswith("cpu:") else None
)


# State --------------------------------------------------------------------------------------------------------------


def state_name(trainer: "ResumableTrainer") -> str:
    """Return the start of the names of state files, which says which trainer has written them."""
    return f"{trainer._name.lower()}_state"


def _state_file(trainer: "ResumableTrainer", directory: Path, process: int) -> Path:
    """Return the file of a checkpoint with the state of a process."""
    return directory / f"{state_name(trainer)}_{process}.pt"


def save_state(trainer: "ResumableTrainer", directory: Path) -> None:
    """Save the state of this process that Trainer does not save."""
    sizes = BatchSizes.of(trainer.args, trainer.accelerator.num_processes)
    state = {
        "attributes": {name: getattr(trainer, name) for name in trainer._saved_attributes},
        "settings": settings_to_compare(trainer),
        "metrics": dict(trainer._metrics["train"]),
        "losses": trainer._logged_loss.state(),
        "prompt_digest": trainer._prompt_digest,
        "processes": process_count.facts_to_save(sizes, trainer.accelerator.distributed_type),
        **trainer._unfinished_state(),
    }
    torch.save(state, _state_file(trainer, directory, trainer.accelerator.process_index))
    if trainer.args.sync_ref_model:  # which changes the reference of the KL term
        with _kl_reference(trainer) as reference:
            _save_weights(trainer, reference, directory, KL_REFERENCE)


def save_last_step(trainer: "ResumableTrainer") -> None:
    """Save a checkpoint after the last optimizer step, unless it already exists. All processes must call this."""
    step = trainer.state.global_step
    if step == 0 or trainer._saved_step == step:  # overwriting an existing one could lose it
        return
    save_only_model = trainer.args.save_only_model
    trainer.args.save_only_model = False
    trainer._save_checkpoint(trainer.model, trial=None)
    trainer.args.save_only_model = save_only_model


def load_state(trainer: "ResumableTrainer", directory: Path) -> process_count.SavedRun:
    """Load the state that [`save_state`] saved, and return what it says about the processes that wrote it. Raises a
    `ValueError` if the run has different settings, or if an earlier version has not saved the reference of the KL
    term."""
    state = _read_state(trainer, directory)
    saved_run = process_count.saved_run(state, directory)

    saved_settings = state["settings"]
    # Earlier versions did not save all settings that are compared.
    current_settings = {name: value for name, value in settings_to_compare(trainer).items() if name in saved_settings}
    check_same_settings(str(directory), saved_settings, current_settings)
    _warn_of_other_prompts(trainer, directory, state.get("prompt_digest"))

    for name, value in state["attributes"].items():
        setattr(trainer, name, value)
    passes, saved_batches = trainer._data_position
    saved_positions = [trainer._step, saved_batches]
    sizes = BatchSizes.of(trainer.args, trainer.accelerator.num_processes)
    trainer._step, batches = process_count.converted_positions(saved_run.batch_sizes, sizes, saved_positions)
    trainer._data_position = (passes, batches)
    trainer._metrics["train"].update(state["metrics"])
    trainer._logged_loss.restore(state["losses"])
    if trainer.args.sync_ref_model:
        _load_kl_reference(trainer, directory)
    trainer._load_run(directory, state)

    if directory.resolve().parent == Path(trainer.args.output_dir).resolve():
        trainer._saved_step = trainer.state.global_step
    return saved_run


def _warn_of_other_prompts(trainer: "ResumableTrainer", directory: Path, saved_digest: str | None) -> None:
    """Log a warning, on the first process, if a run resumes with another training set, as far as that is known."""
    is_known = saved_digest is not None and trainer._prompt_digest is not None
    if is_known and saved_digest != trainer._prompt_digest and trainer.accelerator.is_main_process:
        logger.warning(
            "%s was written with other prompts in the training set, or in another order, so this run continues with "
            "other prompts than without a stop. Resume with the data that the run was started with, unless this is "
            "meant.",
            directory,
        )


def _read_state(trainer: "ResumableTrainer", directory: Path) -> dict[str, Any]:
    """Read the state of this process that [`save_state`] saved; that of process 0 if the number of processes has
    changed."""
    state_of_first = _read_state_of(trainer, directory, 0)
    process, num_processes = trainer.accelerator.process_index, trainer.accelerator.num_processes
    if process == 0 or process_count.saved_run(state_of_first, directory).num_processes != num_processes:
        return state_of_first
    return _read_state_of(trainer, directory, process)


def _read_state_of(trainer: "ResumableTrainer", directory: Path, process: int) -> dict[str, Any]:
    """Read the state that a process has saved, onto the CPU."""
    return torch.load(_state_file(trainer, directory, process), map_location="cpu", weights_only=True)


def read_states(trainer: "ResumableTrainer", directory: Path) -> list[dict[str, Any]]:
    """Read the states that all processes of a checkpoint have saved."""
    state_of_first = _read_state_of(trainer, directory, 0)
    num_processes = process_count.saved_run(state_of_first, directory).num_processes
    others = [_read_state_of(trainer, directory, process) for process in range(1, num_processes)]
    return [state_of_first, *others]


def saved_run(trainer: "ResumableTrainer", directory: Path) -> process_count.SavedRun:
    """Return what a checkpoint says about the processes that wrote it."""
    return process_count.saved_run(_read_state_of(trainer, directory, 0), directory)


def read_memory(trainer: "ResumableTrainer", directory: Path) -> dict[str, Any] | None:
    """Return the [`StepMemory.state`] that an exact trainer has saved; `None` in older checkpoints."""
    return _read_state(trainer, directory).get("memory")


def read_data_position(trainer: "ResumableTrainer", directory: Path) -> tuple[int, int]:
    """Return the number of passes over the training data before a checkpoint, and the batches of the pass in which it
    was written, for this number of processes."""
    state = _read_state(trainer, directory)
    saved_sizes = process_count.saved_run(state, directory).batch_sizes
    sizes = BatchSizes.of(trainer.args, trainer.accelerator.num_processes)
    passes, saved_batches = state["attributes"]["_data_position"]
    (batches,) = process_count.converted_positions(saved_sizes, sizes, [saved_batches])
    return passes, batches


# Weights besides those of the policy --------------------------------------------------------------------------------


def save_policy_copy(trainer: "ResumableTrainer", policy_copy: SnapshotReference, directory: Path) -> None:
    """Save a copy of the policy's weights."""
    _save_weights(trainer, policy_copy, directory, POLICY_COPY)


def load_policy_copy(trainer: "ResumableTrainer", policy_copy: SnapshotReference, directory: Path) -> None:
    """Load the weights that [`save_policy_copy`] saved into `policy_copy`."""
    _load_weights(trainer, policy_copy, directory, POLICY_COPY)


def _kl_reference(trainer: "ResumableTrainer") -> AbstractContextManager[StoredWeights]:
    assert trainer.ref_model is not None  # TRL refuses sync_ref_model without one
    return weights_of(trainer.ref_model)


def _load_kl_reference(trainer: "ResumableTrainer", directory: Path) -> None:
    if not any(directory.glob(f"{KL_REFERENCE}*")):
        raise UserError(
            f"{directory} was written by an earlier version of pacs_trl, which did not save the reference that "
            "sync_ref_model changes. Start a new run from its weights with model_name_or_path."
        )
    with torch.no_grad(), _kl_reference(trainer) as reference:
        _load_weights(trainer, reference, directory, KL_REFERENCE)


def _save_weights(trainer: "ResumableTrainer", weights: StoredWeights, directory: Path, name: str) -> None:
    """Save weights besides those of the policy. Shards of FSDP2 are saved in a form that another number of processes
    can load."""
    shards = weights.sharded_state()
    if shards is not None:
        distributed_checkpoint.save(shards, checkpoint_id=directory / name)
        return
    process = trainer.accelerator.process_index
    if process == 0 or is_sharded(trainer.model_wrapped):
        torch.save(weights.state_dict(), directory / f"{name}_{process}.pt")


def _load_weights(trainer: "ResumableTrainer", weights: StoredWeights, directory: Path, name: str) -> None:
    shards = weights.sharded_state()
    if shards is not None:
        distributed_checkpoint.load(shards, checkpoint_id=directory / name)
        return
    process = trainer.accelerator.process_index if is_sharded(trainer.model_wrapped) else 0
    file = directory / f"{name}_{process}.pt"
    weights.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))


def load_converted_weights(model: Any, directory: Path) -> bool:
    """
    Load the weights of a checkpoint if their names are not those of the model in memory, and return whether this was
    so. transformers converts the weights of some models when it reads and saves them, such as those of Qwen2.5-VL and
    of mixtures of experts; Trainer loads the files as they are, which would leave such a model unchanged.
    """
    file, index = directory / SAFE_WEIGHTS_NAME, directory / SAFE_WEIGHTS_INDEX_NAME
    if file.is_file():
        with safe_open(file, framework="pt") as weights:
            names = set(weights.keys())
    elif index.is_file():
        names = set(json.loads(index.read_text())["weight_map"])
    else:
        return False
    if names <= model.state_dict().keys():
        return False
    loaded = type(model).from_pretrained(directory, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    return True


# Start and end of a run ---------------------------------------------------------------------------------------------


def checkpoint_to_resume(trainer: "ResumableTrainer", resume_from_checkpoint: str | bool | None) -> str | None:
    """Return the checkpoint to resume from: the named one, the last complete one in `output_dir` if the argument is
    `True`, or `None`. All processes must call this. Raises a `ValueError` if the checkpoint is incomplete or not that
    of the other processes, or comes from another trainer or another kind of model."""
    checkpoint = None
    if resume_from_checkpoint is True:
        checkpoint = last_resumable_checkpoint(trainer.args.output_dir)
    elif resume_from_checkpoint:
        checkpoint = str(resume_from_checkpoint)
    _check_same_checkpoint(checkpoint)
    if checkpoint is None and resume_from_checkpoint:
        raise UserError(f"There is no complete checkpoint in {trainer.args.output_dir}. Start a new run.")
    if checkpoint is None:
        return None

    check_complete(checkpoint)
    if not _state_file(trainer, Path(checkpoint), 0).is_file():
        remedy = "Start a new run from its weights with model_name_or_path."
        inside = last_checkpoint(checkpoint)  # of an output_dir
        if inside is not None:
            remedy = f"Did you mean {inside}?"
        raise UserError(
            f"{checkpoint} has no {state_name(trainer)}_0.pt: it was written by another trainer or with "
            f"save_only_model=True, and cannot be continued. {remedy}"
        )
    process_count.check_processes(
        saved_run(trainer, Path(checkpoint)),
        checkpoint,
        trainer.accelerator.num_processes,
        process_count.sharding_of(trainer.accelerator.distributed_type),
        needs_same_number=trainer.args.needs_same_number_of_processes,
    )
    check_same_model(checkpoint, trainer.model.config)
    adapters: dict[str, PeftConfig] = trainer.model.peft_config if isinstance(trainer.model, PeftModel) else {}
    check_same_adapter(checkpoint, adapters.get("default"))
    return checkpoint


def _check_same_checkpoint(checkpoint: str | None) -> None:
    """Raise a `ValueError` on all processes, which must all call this, if they would resume from checkpoints with
    different names."""
    names = gather_object(["no checkpoint" if checkpoint is None else Path(checkpoint).name])
    distinct_names = list(dict.fromkeys(names))
    if len(distinct_names) > 1:
        examples = ", ".join(f"{name} (rank {names.index(name)})" for name in distinct_names)
        raise UserError(
            f"Processes would continue from different checkpoints: {examples}. Put output_dir on a file system that "
            "all nodes share, and name the checkpoint in resume_from_checkpoint."
        )


@contextmanager
def reporting_full_disk(output_dir: str) -> Iterator[None]:
    """Convert errors of a full or broken disk to a [`FailedRun`] that names the checkpoint to resume from."""
    try:
        yield
    except Exception as error:
        if not _is_full_disk(error):
            raise
        last = last_checkpoint(output_dir)
        where = f"from {last}" if last else "from the beginning: no checkpoint is complete"
        raise FailedRun(
            f"The run in {output_dir} can no longer write files: {str(error).splitlines()[0].rstrip('.')}. Free some "
            f"space, and continue with `--resume_from_checkpoint last`, {where}."
        ) from error


def _is_full_disk(error: Exception) -> bool:
    """Return whether an error says that a disk is full or broken."""
    if isinstance(error, OSError):
        return error.errno in NO_ROOM
    # safetensors and torch raise generic errors; only the message tells
    if not isinstance(error, SafetensorError) and type(error) is not RuntimeError:
        return False
    texts_of_safetensors = [f"os error {number})" for number in NO_ROOM]
    texts_of_torch = ["PytorchStreamWriter", "unexpected pos", "iostream error"]
    return any(text in str(error) for text in texts_of_safetensors + texts_of_torch)
