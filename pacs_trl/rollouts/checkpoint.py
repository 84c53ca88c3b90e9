"""Bitwise resumable checkpoints: state, seeds, and comparison of settings.

TRL's trainer resumes exactly only at the end of a generation batch. Its checkpoints lack the completions for later
optimizer steps, the step counter, the data order of later epochs, and the random state of vLLM. This module saves the
first two (`waiting_rollouts.py` has the form of completions), and derives the other two from seeds and counters.
`checkpoint_files.py` tells complete checkpoints from incomplete ones.
"""

import json
import logging
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed.checkpoint as distributed_checkpoint
import yaml
from accelerate.utils import gather_object, set_seed
from peft import PeftConfig, PeftModel
from safetensors import SafetensorError, safe_open
from torch.utils.data import Sampler
from transformers import PreTrainedConfig
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from trl import GRPOConfig
from trl.trainer.utils import RepeatSampler

from ..errors import NO_ROOM, FailedRun, UserError
from ..rewards import shared_arguments
from ..settings.trl_settings import GRPO_LOSS_SETTINGS
from ..update.reference import SnapshotReference, StoredWeights, is_sharded, weights_of
from ..update.step_sizes import BatchSizes
from . import process_count
from .checkpoint_files import KL_REFERENCE, POLICY_COPY, check_complete, last_checkpoint, last_resumable_checkpoint
from .prompt_order import PromptOrder
from .protocols import CheckedTrainer, EvaluatingTrainer, SamplingTrainer, SeededTrainer
from .request_seeds import request_seed
from .rollout_config import RolloutConfig


if TYPE_CHECKING:
    from .resumable_trainer import ResumableTrainer


logger = logging.getLogger(__name__)

# transformers loads an optimizer onto `args.device`. With several CPU processes this is "cpu:0", which torch.load does
# not accept by default.
torch.serialization.register_package(
    50, lambda storage: None, lambda storage, location: storage if location.startswith("cpu:") else None
)

_SETTINGS = yaml.safe_load(Path(__file__).with_name("checkpoint_settings.yaml").read_text(encoding="utf-8"))


# Seeds --------------------------------------------------------------------------------------------------------------


class EpochSampler(Sampler):
    """TRL's sampler with a shuffle order that depends on seed and epoch only. TRL keeps using the generator of the
    previous epoch, so a run that resumes after the first epoch would repeat its order."""

    def __init__(self, sampler: RepeatSampler, epoch: Callable[[], int]):
        self.sampler = sampler
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.sampler.shuffle:
            assert self.sampler.seed is not None  # that of the run
            self.sampler.generator.manual_seed(self.sampler.seed + self.epoch())
        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)


def next_seeds(trainer: SeededTrainer, prompts: Sequence[Sequence[int]]) -> list[int]:
    """Return the seeds of the next vLLM requests of this process, one per prompt of token ids."""
    if not trainer.model.training:  # an evaluation has seeded the generators, see `seeded_random_numbers`
        return [random.getrandbits(31) for _ in prompts]
    return trainer._request_seeds.next(prompts)


def next_call_seed(trainer: SeededTrainer) -> int:
    """Return the seed of the next call of a vLLM server with the prompts of all processes."""
    if not trainer.model.training:
        return random.getrandbits(31)
    return trainer._request_seeds.next_of_all()


def engine_index(args: RolloutConfig, process_index: int) -> int:
    """Return the index of the colocated engine of a process; processes that share one (tensor parallelism) need equal
    seeds."""
    return process_index // args.vllm_tensor_parallel_size


def evaluation_seed(trainer: EvaluatingTrainer) -> int:
    """Return the seed of this process for an evaluation; several evaluations at one step get different seeds."""
    step, number = trainer._evaluations
    trainer._evaluations = (trainer.state.global_step, number + 1 if step == trainer.state.global_step else 1)
    engine = engine_index(trainer.args, trainer.accelerator.process_index)
    stream = f"{trainer.args.seed}/{engine}/evaluation/{trainer.state.global_step}"
    return request_seed(stream, trainer._evaluations[1])


@contextmanager
def seeded_random_numbers(seed: int, device: torch.device) -> Iterator[None]:
    """Seed all random number generators inside the context, and restore their states on exit."""
    states = random_states(device)
    set_seed(seed)
    try:
        yield
    finally:
        restore_random_states(states, device)


def random_states(device: torch.device) -> dict[str, Any]:
    """Return the states of all random number generators of this process."""
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state(device)
    return states


def restore_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Restore what [`random_states`] returned."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["cpu"])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states["device"], device)


def indices_of_generation(trainer: SamplingTrainer, number: int) -> list[int]:
    """Return the indices of the dataset rows of a generation batch, one per completion of all processes."""
    order = prompt_order(trainer)
    first = number * order.batch_size
    indices = [order[position] for position in range(first, first + order.batch_size)]
    return [index for index in indices for _ in range(trainer.num_generations)]


def prompt_order(trainer: SamplingTrainer) -> PromptOrder:
    """Return the order of the prompts of a run, which is that of its sampler."""
    sampler = trainer._get_train_sampler().sampler
    return PromptOrder(sampler.num_samples, sampler.batch_size, sampler.shuffle, sampler.seed)


# Settings -----------------------------------------------------------------------------------------------------------


def plain_settings(args: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return the named settings after a JSON round trip, so that they can be compared with those of a checkpoint."""
    return json.loads(json.dumps({name: getattr(args, name) for name in names}, default=str))


def check_same_settings(checkpoint: str, saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Raise a `ValueError` that lists the settings that differ between a run and a checkpoint."""
    differing = [
        f"{name}: {saved.get(name)!r} in the checkpoint, {value!r} now"
        for name, value in current.items()
        if saved.get(name) != value
    ]
    if differing:
        raise UserError(
            f"{checkpoint} has other settings: {'; '.join(differing)}. Restore these settings, or start a new run "
            "from its weights with model_name_or_path."
        )


def fixed_settings(args: Any) -> dict[str, Any]:
    """Return the settings that are fixed when a trainer is constructed, in the form of [`plain_settings`]."""
    live = re.compile("|".join(_SETTINGS["live"]))
    return plain_settings(args, [field.name for field in fields(args) if not live.fullmatch(field.name)])


def check_fixed(trainer: CheckedTrainer) -> None:
    """Raise a `ValueError` that lists the settings that were changed after a trainer was constructed. Those of the
    optimizer may change until it is created."""
    now = fixed_settings(trainer.args)
    if trainer.optimizer is None:
        trainer._fixed_settings |= {name: now[name] for name in trainer.optimizer_settings}
    before = trainer._fixed_settings
    changed = [
        f"args.{name} was changed from {before[name]!r} to {now[name]!r}" for name in now if before[name] != now[name]
    ]
    if changed:
        raise UserError(
            f"{', '.join(changed)} after construction: the trainer has already read it. Restore the value, or "
            "construct a new trainer with it."
        )


# Entries of a model's configuration that decide the shapes of its weights.
_SHAPES = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "num_local_experts",
    "moe_intermediate_size",
)


def check_same_model(checkpoint: str, config: PreTrainedConfig) -> None:
    """Raise a `ValueError` if the weights in a checkpoint have other shapes than those of a model with this
    configuration."""
    if not Path(checkpoint, CONFIG_NAME).is_file():  # an adapter
        return
    saved = json.loads(Path(checkpoint, CONFIG_NAME).read_text(encoding="utf-8"))
    saved = saved.get("text_config", saved)
    now = config.get_text_config().to_dict()  # attributes of layers that differ cannot be read
    differing = [
        f"{name}: {saved[name]!r} in the checkpoint, {now[name]!r} now"
        for name in _SHAPES
        if name in saved and name in now and saved[name] != now[name]
    ]
    if differing:
        raise UserError(
            f"{checkpoint} holds another model than this run trains ({'; '.join(differing)}). Set model_name_or_path "
            "to the model that the run was started with, or choose another output_dir."
        )


# LoRA settings that must be equal in a checkpoint and in the run that resumes from it.
_ADAPTER_SETTINGS = (
    "r",
    "lora_alpha",
    "lora_dropout",
    "bias",
    "layers_to_transform",
    "modules_to_save",
    "use_rslora",
    "use_dora",
)
# Those that peft may replace when it adds an adapter to a model: names by which "all-linear" is meant, and those of
# fused experts.
_RESOLVED_ADAPTER_SETTINGS = ("target_modules", "target_parameters", "rank_pattern", "alpha_pattern")


def check_same_adapter(checkpoint: str, adapter: PeftConfig | None, *, is_in_model: bool = True) -> None:
    """Raise a `ValueError` unless a checkpoint has the adapter that the run trains, `None` if it trains the whole
    model. Settings that peft resolves with the model are compared if the adapter `is_in_model`."""
    file = Path(checkpoint, ADAPTER_CONFIG_NAME)
    saved = json.loads(file.read_text()) if file.is_file() else None
    if (saved is None) != (adapter is None):
        if saved is None:
            kind, trained_kind, use_peft = "a whole model", "an adapter (LoRA)", "false"
        else:
            kind, trained_kind, use_peft = "an adapter (LoRA)", "a whole model", "true"
        raise UserError(
            f"{checkpoint} holds {kind}, but this run trains {trained_kind}. Set use_peft: {use_peft} to continue "
            "that run, or choose another output_dir."
        )
    if saved is None or adapter is None:
        return
    names = _ADAPTER_SETTINGS + (_RESOLVED_ADAPTER_SETTINGS if is_in_model else ())
    current = {name: getattr(adapter, name, None) for name in names}
    check_same_settings(checkpoint, _with_sorted_lists(saved), _with_sorted_lists(current))
    bases = [saved["base_model_name_or_path"], adapter.base_model_name_or_path]
    if all(bases) and Path(bases[0]).name != Path(bases[1]).name:
        logger.warning(
            "%s holds an adapter of %s, and this run trains one of %s. Resume with the model that the run was started "
            "with, unless it has only moved.",
            *(checkpoint, *bases),
        )


def _with_sorted_lists(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings whose lists, tuples, and sets, of module names or layers, can be compared in any order."""
    collections = (list, tuple, set)
    return {name: sorted(value) if isinstance(value, collections) else value for name, value in settings.items()}


# State --------------------------------------------------------------------------------------------------------------


def state_name(trainer: "ResumableTrainer") -> str:
    return f"{trainer._name.lower()}_state"


def save_state(trainer: "ResumableTrainer", directory: Path) -> None:
    """Save the state of this process that Trainer does not save."""
    sizes = BatchSizes.of(trainer.args, trainer.accelerator.num_processes)
    state = {
        "attributes": {name: getattr(trainer, name) for name in trainer._saved_attributes},
        "settings": _shared_settings(trainer),
        "metrics": dict(trainer._metrics["train"]),
        "losses": trainer._logged_loss.state(),
        "prompt_digest": trainer._prompt_digest,
        "processes": process_count.facts_to_save(sizes, trainer.accelerator.distributed_type),
        **trainer._unfinished_state(),
    }
    torch.save(state, _part(trainer, directory, trainer.accelerator.process_index))
    if trainer.args.sync_ref_model:  # which changes the reference of the KL term
        with _kl_reference(trainer) as reference:
            _save_weights(trainer, reference, directory, KL_REFERENCE)


def save_last_step(trainer: "ResumableTrainer") -> None:
    """Save a checkpoint after the last optimizer step, unless it already exists. All processes must call this."""
    step = trainer.state.global_step
    if step > 0 and trainer._saved_step != step:  # overwriting an existing one could lose it
        save_only_model, trainer.args.save_only_model = trainer.args.save_only_model, False
        trainer._save_checkpoint(trainer.model, trial=None)
        trainer.args.save_only_model = save_only_model


def load_state(trainer: "ResumableTrainer", directory: Path) -> process_count.SavedRun:
    """Load the state that [`save_state`] saved, and return what it says about the processes that wrote it. Raises a
    `ValueError` if the run has different settings, or if an earlier version has not saved the reference of the KL
    term."""
    state = _read_state(trainer, directory)
    saved = process_count.saved_run(state, directory)
    # Earlier versions did not save all settings that are compared.
    current = {name: value for name, value in _shared_settings(trainer).items() if name in state["settings"]}
    check_same_settings(str(directory), state["settings"], current)
    _warn_of_other_prompts(trainer, directory, state.get("prompt_digest"))
    for name, value in state["attributes"].items():
        setattr(trainer, name, value)
    now = BatchSizes.of(trainer.args, trainer.accelerator.num_processes)
    passes, batches = trainer._data_position
    trainer._step, batches = process_count.converted_positions(saved.batch_sizes, now, [trainer._step, batches])
    trainer._data_position = passes, batches
    trainer._metrics["train"].update(state["metrics"])
    trainer._logged_loss.restore(state["losses"])
    if trainer.args.sync_ref_model:
        _load_kl_reference(trainer, directory)
    trainer._load_run(directory, state)
    if directory.resolve().parent == Path(trainer.args.output_dir).resolve():
        trainer._saved_step = trainer.state.global_step
    return saved


def _warn_of_other_prompts(trainer: "ResumableTrainer", directory: Path, saved_digest: str | None) -> None:
    """Log a warning, on the first process, if a run resumes with another training set, as far as that is known."""
    digests = {saved_digest, trainer._prompt_digest}
    if None not in digests and len(digests) > 1 and trainer.accelerator.is_main_process:
        logger.warning(
            "%s was written with other prompts in the training set, or in another order, so this run continues with "
            "other prompts than without a stop. Resume with the data that the run was started with, unless this is "
            "meant.",
            directory,
        )


def _read_state(trainer: "ResumableTrainer", directory: Path) -> dict[str, Any]:
    """Read the state of this process that [`save_state`] saved; that of process 0 if the number of processes has
    changed."""
    first = _read_part(trainer, directory, 0)
    process, number = trainer.accelerator.process_index, trainer.accelerator.num_processes
    if process == 0 or process_count.saved_run(first, directory).num_processes != number:
        return first
    return _read_part(trainer, directory, process)


def read_parts(trainer: "ResumableTrainer", directory: Path) -> list[dict[str, Any]]:
    """Read the states that all processes of a checkpoint have saved."""
    first = _read_part(trainer, directory, 0)
    number = process_count.saved_run(first, directory).num_processes
    return [first, *(_read_part(trainer, directory, process) for process in range(1, number))]


def saved_run(trainer: "ResumableTrainer", directory: Path) -> process_count.SavedRun:
    """Return what a checkpoint says about the processes that wrote it."""
    return process_count.saved_run(_read_part(trainer, directory, 0), directory)


def _part(trainer: "ResumableTrainer", directory: Path, process: int) -> Path:
    """Return the file of a checkpoint with the state of a process."""
    return directory / f"{state_name(trainer)}_{process}.pt"


def _read_part(trainer: "ResumableTrainer", directory: Path, process: int) -> dict[str, Any]:
    return torch.load(_part(trainer, directory, process), map_location="cpu", weights_only=True)


def read_memory(trainer: "ResumableTrainer", directory: Path) -> dict[str, Any] | None:
    """Return what `_unfinished_state` of an exact trainer has saved about memory; `None` in older checkpoints."""
    return _read_state(trainer, directory).get("memory")


def read_data_position(trainer: "ResumableTrainer", directory: Path) -> tuple[int, int]:
    """Return the number of passes over the training data before a checkpoint, and the batches of the pass in which it
    was written, for this number of processes."""
    state = _read_state(trainer, directory)
    saved = process_count.saved_run(state, directory)
    now = BatchSizes.of(trainer.args, trainer.accelerator.num_processes)
    passes, batches = state["attributes"]["_data_position"]
    return passes, *process_count.converted_positions(saved.batch_sizes, now, [batches])


def _shared_settings(trainer: "ResumableTrainer") -> dict[str, Any]:
    added_to_trl = {f.name for f in fields(trainer.args)} - {f.name for f in fields(GRPOConfig)}
    added_and_equal = sorted(added_to_trl - {*_SETTINGS["free"]})
    names = [*_SETTINGS["equal"], *GRPO_LOSS_SETTINGS, *added_and_equal, *trainer._equal_settings]
    if trainer.args.rollout_schedule == "continuous":  # state of a server and of an engine process differs
        names.append("use_vllm")
    settings = plain_settings(trainer.args, names)
    sizes = BatchSizes.of(trainer.args, trainer.accelerator.num_processes)
    settings |= {
        "completions per optimizer step": sizes.completions_per_update,
        "completions per generation batch": sizes.completions_per_generation,
    }
    verification = shared_arguments()
    names_of_verification = {f.name for f in fields(verification)} - {*_SETTINGS["free_verification"]}
    settings |= plain_settings(verification, sorted(names_of_verification))
    return settings | {"reward functions": trainer.reward_func_names}


def _load_kl_reference(trainer: "ResumableTrainer", directory: Path) -> None:
    if next(directory.glob(f"{KL_REFERENCE}*"), None) is None:
        raise UserError(
            f"{directory} was written by an earlier version of pacs_trl, which did not save the reference that "
            "sync_ref_model changes. Start a new run from its weights with model_name_or_path."
        )
    with torch.no_grad(), _kl_reference(trainer) as reference:
        _load_weights(trainer, reference, directory, KL_REFERENCE)


def _kl_reference(trainer: "ResumableTrainer") -> AbstractContextManager[StoredWeights]:
    assert trainer.ref_model is not None  # TRL refuses sync_ref_model without one
    return weights_of(trainer.ref_model)


def save_policy_copy(trainer: "ResumableTrainer", policy_copy: SnapshotReference, directory: Path) -> None:
    """Save a copy of the policy's weights."""
    _save_weights(trainer, policy_copy, directory, POLICY_COPY)


def load_policy_copy(trainer: "ResumableTrainer", policy_copy: SnapshotReference, directory: Path) -> None:
    """Load the weights that [`save_policy_copy`] saved into `policy_copy`."""
    _load_weights(trainer, policy_copy, directory, POLICY_COPY)


def _save_weights(trainer: "ResumableTrainer", weights: StoredWeights, directory: Path, name: str) -> None:
    """Save weights besides those of the policy. Shards of FSDP2 are saved in a form that another number of processes
    can load."""
    if (shards := weights.sharded_state()) is not None:
        distributed_checkpoint.save(shards, checkpoint_id=directory / name)
        return
    process = trainer.accelerator.process_index
    if process == 0 or is_sharded(trainer.model_wrapped):
        torch.save(weights.state_dict(), directory / f"{name}_{process}.pt")


def _load_weights(trainer: "ResumableTrainer", weights: StoredWeights, directory: Path, name: str) -> None:
    if (shards := weights.sharded_state()) is not None:
        distributed_checkpoint.load(shards, checkpoint_id=directory / name)
        return
    process = trainer.accelerator.process_index if is_sharded(trainer.model_wrapped) else 0
    file = directory / f"{name}_{process}.pt"
    weights.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))


# Files --------------------------------------------------------------------------------------------------------------


def load_converted_weights(model: Any, directory: Path) -> bool:
    """
    Load the weights of a checkpoint whose names or shapes are not those of the model in memory, and return whether
    they are not. transformers converts the weights of some models when it reads and saves them, such as those of
    Qwen2.5-VL and of mixtures of experts, and Trainer loads the files as they are, which leaves such a model as it
    was.
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
    if checkpoint is None:
        if not resume_from_checkpoint:
            return None
        raise UserError(f"There is no complete checkpoint in {trainer.args.output_dir}. Start a new run.")
    check_complete(checkpoint)
    if not _part(trainer, Path(checkpoint), 0).is_file():
        inside = last_checkpoint(checkpoint)
        remedy = f"Did you mean {inside}?" if inside else "Start a new run from its weights with model_name_or_path."
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
    if len(set(names)) > 1:
        examples = ", ".join(f"{name} (rank {names.index(name)})" for name in dict.fromkeys(names))
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
        # safetensors and torch raise generic errors; only the message tells
        texts = [f"os error {n})" for n in NO_ROOM] + ["PytorchStreamWriter", "unexpected pos", "iostream error"]
        if isinstance(error, OSError):
            cannot_write = error.errno in NO_ROOM
        else:
            is_library_error = isinstance(error, SafetensorError) or type(error) is RuntimeError
            cannot_write = is_library_error and any(text in str(error) for text in texts)
        if not cannot_write:
            raise
        last = last_checkpoint(output_dir)
        where = f"from {last}" if last else "from the beginning: no checkpoint is complete"
        raise FailedRun(
            f"The run in {output_dir} can no longer write files: {str(error).splitlines()[0].rstrip('.')}. Free some "
            f"space, and continue with `--resume_from_checkpoint last`, {where}."
        ) from error
