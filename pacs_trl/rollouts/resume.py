"""What a run needs to continue from a checkpoint exactly as if it had never stopped, beyond what Trainer saves.

TRL's trainer continues exactly only where a generation batch ends: the rows it still has to learn from, its step
counter, the order of later epochs and the random state of vLLM are not part of its checkpoints. The trainers here save
the first two with the functions below, and make the other two functions of seeds and counters. A process may be killed
while it writes, so a checkpoint is looked at before it is used.
"""

import contextlib
import hashlib
import json
import logging
import random
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftConfig
from safetensors import SafetensorError, safe_open
from torch.utils.data import Sampler
from transformers.utils import ADAPTER_CONFIG_NAME
from trl.trainer.utils import RepeatSampler

from ..settings.command_line import NO_ROOM, FailedRun
from ..update.rows import Rollout, from_state, to_state


logger = logging.getLogger(__name__)

# transformers loads an optimizer onto `args.device`, which is "cpu:0" with several processes on CPUs, a name that
# torch.load does not know.
torch.serialization.register_package(
    50, lambda storage: None, lambda storage, location: storage if location.startswith("cpu:") else None
)

# Settings that a checkpoint and the run that resumes from it must share, whatever is learnt from the rollouts.
SHARED_SETTINGS = (
    # the data of a step
    "seed",
    "shuffle_dataset",
    "num_generations",
    "num_iterations",
    "steps_per_generation",
    "gradient_accumulation_steps",
    "generation_batch_size",
    "max_completion_length",
    "max_tool_calling_iterations",
    "chat_template_kwargs",
    "generation_kwargs",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "vllm_structured_outputs_regex",
    "reward_weights",
    "mask_truncated_completions",
    # the loss; the temperature divides its logits too
    "beta",
    "sync_ref_model",
    "ref_model_mixup_alpha",
    "ref_model_sync_steps",
    "disable_dropout",
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_clip_max",
    # of the optimizer, where those in the checkpoint win without a word
    "optim",
    "learning_rate",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
)


class EpochSampler(Sampler):
    """TRL's sampler, shuffled by seed and epoch. TRL's own goes on with the generator of the epoch before, so that a
    run resumed after the first epoch would see the order of the first one again."""

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


@contextmanager
def own_random_numbers(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the global generators of Python, NumPy, the CPU, and `device` inside, and restore their states
    afterwards."""
    accelerator = None if device.type == "cpu" else torch.get_device_module(device)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    of_accelerator = accelerator and accelerator.get_rng_state()
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if accelerator is not None:
        accelerator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if accelerator is not None:
            accelerator.set_rng_state(of_accelerator)


def rows_to_save(steps: Sequence[Sequence[Rollout]], process: int, num_processes: int) -> dict[tuple[int, int], dict]:
    """
    This process's part of the rows of a generation batch: those it learns from, and its share of those nobody has
    scored.

    Args:
        steps (sequence of sequences of [`Rollout`]):
            Rows of each optimizer step, the same on every process except for `ref_logps` and `old_logps`.
        process (`int`), num_processes (`int`):
            This process and the number of processes.

    Returns:
        `dict`: from (optimizer step, row) to the row as tensors.
    """
    return {
        (k, i): to_state(row)
        for k, rows in enumerate(steps)
        for i, row in enumerate(rows)
        if row.ref_logps is not None or row.old_logps is not None or i % num_processes == process
    }


def merge_rows(parts: Sequence[dict[tuple[int, int], dict]]) -> list[list[Rollout]]:
    """Inverse of [`rows_to_save`], from the parts of all processes."""
    rows: dict[tuple[int, int], dict] = {}
    for part in parts:
        for place, row in part.items():
            if place not in rows or row["ref_logps"] is not None or row["old_logps"] is not None:
                rows[place] = row
    steps: list[list[Rollout]] = [[] for _ in range(1 + max((k for k, _ in rows), default=-1))]
    for k, i in sorted(rows):
        steps[k].append(from_state(rows[k, i]))
    return steps


def plain_settings(args: Any, names: Sequence[str]) -> dict[str, Any]:
    """Settings by name as JSON gives them back, so that those of a checkpoint can be compared with those of today."""
    return json.loads(json.dumps({name: getattr(args, name) for name in names}, default=str))


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


# Settings of LoRA that a checkpoint and the run that resumes from it must share.
_ADAPTER_SETTINGS = ("r", "lora_alpha", "lora_dropout", "target_modules", "modules_to_save", "use_rslora", "use_dora")


def check_same_adapter(checkpoint: str, adapter: PeftConfig | None) -> None:
    """
    Compare the adapter of a checkpoint with that of the run that resumes from it.

    Args:
        checkpoint (`str`):
            Directory of a checkpoint.
        adapter ([`~peft.PeftConfig`], *optional*):
            Adapter that the run trains; `None` if it trains the whole model. Modules given by one word are not
            compared: peft finds their names when it has the model.

    Raises:
        `ValueError`: if one is an adapter and the other a whole model, or they are different adapters.
    """
    file = Path(checkpoint, ADAPTER_CONFIG_NAME)
    saved = json.loads(file.read_text()) if file.is_file() else None
    if (saved is None) != (adapter is None):
        kinds = ("a whole model", "an adapter (LoRA)")
        raise ValueError(
            f"{checkpoint} holds {kinds[saved is not None]}, but this run trains {kinds[adapter is not None]}. Set "
            f"use_peft: {str(saved is not None).lower()} to continue that run, or choose another output_dir."
        )
    if saved is None or adapter is None:
        return
    given = {name: getattr(adapter, name, None) for name in _ADAPTER_SETTINGS}
    if isinstance(given["target_modules"], str) or given["target_modules"] is None:
        del given["target_modules"]
    plain = [{k: sorted(v) if isinstance(v, list | set) else v for k, v in each.items()} for each in (saved, given)]
    check_same_settings(checkpoint, *plain)
    bases = [name and Path(name).name for name in (saved["base_model_name_or_path"], adapter.base_model_name_or_path)]
    if all(bases) and bases[0] != bases[1]:
        logger.warning(
            "%s holds an adapter of %s, and this run trains one of %s. Resume with the model that the run was started "
            "with, unless it has only moved.",
            checkpoint,
            saved["base_model_name_or_path"],
            adapter.base_model_name_or_path,
        )


def cannot_write(error: BaseException) -> bool:
    """Whether a file could not be written because a disk is full or broken. safetensors and torch say so in texts
    only."""
    if isinstance(error, OSError):
        return error.errno in NO_ROOM
    texts = [f"os error {number})" for number in NO_ROOM] + ["PytorchStreamWriter", "unexpected pos", "iostream error"]
    of_library = isinstance(error, SafetensorError) or type(error) is RuntimeError
    return of_library and any(text in str(error) for text in texts)


@contextlib.contextmanager
def reporting_full_disk(output_dir: str) -> Iterator[None]:
    """
    Raises:
        `FailedRun`: if a file cannot be written for lack of space; names where the run can be continued.
    """
    try:
        yield
    except Exception as error:
        if not cannot_write(error):
            raise
        last = last_checkpoint(output_dir)
        where = (
            f"from {last}, the last complete checkpoint" if last else "from the beginning: no checkpoint is complete"
        )
        raise FailedRun(
            f"The run in {output_dir} can no longer write files: {str(error).splitlines()[0].rstrip('.')}. Free some "
            f"space, and continue with `--resume_from_checkpoint last`, {where}."
        ) from error


def defect(checkpoint: str | Path) -> str | None:
    """
    Why nothing can be continued from a checkpoint: the first file that is missing or torn.

    `trainer_state.json` is written last, when all processes have written theirs. Torn files are told by their ends, so
    large ones are not read.

    Args:
        checkpoint (`str` or `Path`):
            Directory of a checkpoint.

    Returns:
        `str` or `None`: what is wrong, in words; `None` for a checkpoint that is whole.
    """
    checkpoint = Path(checkpoint)
    try:
        json.loads((checkpoint / "trainer_state.json").read_text())
    except OSError:
        return "it has no trainer_state.json, which is written last"
    except ValueError:
        return "its trainer_state.json is torn"
    for file in sorted(checkpoint.rglob("*")):
        saved_by_torch = file.suffix in (".pt", ".pth") or file.name == "optimizer.bin"
        if saved_by_torch and not zipfile.is_zipfile(file):
            return f"its {file.relative_to(checkpoint)} is torn"
        if file.suffix == ".safetensors":
            try:
                with safe_open(file, framework="pt"):
                    pass
            except SafetensorError:
                return f"its {file.relative_to(checkpoint)} is torn"
    return None


def last_checkpoint(output_dir: str | Path) -> str | None:
    """
    The last checkpoint of a run that is whole. A process that was killed while it wrote leaves one that is not, which
    a warning names.

    Args:
        output_dir (`str` or `Path`):
            Directory of the run; it need not exist.

    Returns:
        `str` or `None`: its directory.
    """
    steps = (re.fullmatch(r"checkpoint-(\d+)", path.name) for path in Path(output_dir).glob("checkpoint-*"))
    for step in sorted((int(match[1]) for match in steps if match), reverse=True):
        checkpoint = Path(output_dir) / f"checkpoint-{step}"
        wrong = defect(checkpoint)
        if wrong is None:
            return str(checkpoint)
        logger.warning(
            "%s is not complete: %s. The process was stopped while it was being written, so it is passed over; the "
            "run will write it again.",
            checkpoint,
            wrong,
        )
    return None


def check_complete(checkpoint: str) -> None:
    """
    Raises:
        `ValueError`: if a checkpoint is not whole; names the last one beside it that is.
    """
    wrong = defect(checkpoint) if Path(checkpoint).is_dir() else None
    if wrong is not None:
        other = last_checkpoint(Path(checkpoint).parent)
        remedy = f"Resume from {other}" if other else "Start a new run"
        raise ValueError(
            f"{checkpoint} is not complete: {wrong}. It is no checkpoint, or the process was stopped while it was "
            f"being written. {remedy}."
        )
