"""Complete and incomplete checkpoints.

A process may be killed while it writes a checkpoint, a disk may become full, and a copy may miss files. Trainer and
the libraries below it continue without some of the files (optimizer, scheduler, random states, scaler), as if the run
had never had them. Every checkpoint that can be continued therefore has a list of its files and their sizes.
"""

import json
import logging
import re
import zipfile
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ..errors import UserError


logger = logging.getLogger(__name__)

FILE_LIST = "checkpoint_files.json"
# Weights besides those of the policy: NAME_PROCESS.pt, or with FSDP2 a folder NAME.
POLICY_COPY = "pacs_reference"
KL_REFERENCE = "kl_reference"
_WRITTEN_LAST = "trainer_state.json"
_NOT_LISTED = (FILE_LIST, _WRITTEN_LAST, "README.md")


def write_file_list(checkpoint: Path) -> None:
    """Record the names and sizes of the files of a checkpoint that all processes have written, all but the state of
    Trainer."""
    sizes = {}
    for file in sorted(checkpoint.rglob("*")):
        if file.is_file() and file.name not in _NOT_LISTED:
            sizes[file.relative_to(checkpoint).as_posix()] = file.stat().st_size
    (checkpoint / FILE_LIST).write_text(json.dumps(sizes, indent=0) + "\n", encoding="utf-8")


def defect(checkpoint: str | Path) -> str | None:
    """Return why a checkpoint is incomplete, or `None` if it is complete. Large files are not read in full: they are
    compared with the list of files, and truncation is detected from their footers or headers."""
    checkpoint = Path(checkpoint)
    if not (checkpoint / _WRITTEN_LAST).is_file():
        return f"it has no {_WRITTEN_LAST}, which is written last"
    for file in sorted(checkpoint.rglob("*")):
        if file.is_file() and _is_truncated(file):
            return f"its {file.relative_to(checkpoint)} is truncated"
    if not (checkpoint / FILE_LIST).is_file():  # written with `save_only_model`, or by an earlier version
        return None
    for name, size in json.loads((checkpoint / FILE_LIST).read_text(encoding="utf-8")).items():
        file = checkpoint / name
        if not file.is_file():
            return f"it has no {name}"
        is_text = file.suffix in (".json", ".jinja", ".md", ".txt")  # which may have been edited
        if file.stat().st_size != size and not is_text:
            return f"its {name} has {file.stat().st_size} bytes instead of {size}"
    return None


def _is_truncated(file: Path) -> bool:
    if file.suffix == ".json":
        try:
            json.loads(file.read_text(encoding="utf-8"))
        except ValueError:
            return True
    if file.suffix == ".safetensors":
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError:
            return True
    if file.suffix in (".pt", ".pth") or file.name == "optimizer.bin":  # saved by torch
        return not zipfile.is_zipfile(file)
    return False


def last_checkpoint(output_dir: str | Path) -> str | None:
    """Return the last complete checkpoint in `output_dir`, or `None`; the directory need not exist. Incomplete
    checkpoints, left by a process that was killed while writing, are skipped with a warning."""
    for checkpoint in _from_last_to_first(output_dir):
        if (wrong := defect(checkpoint)) is None:
            return str(checkpoint)
        logger.warning("%s is not complete: %s. It is skipped; the run will write it again.", checkpoint, wrong)
    return None


def last_resumable_checkpoint(output_dir: str | Path) -> str | None:
    """Return the last complete checkpoint in `output_dir` with the state of a run, or `None`: `save_only_model` leaves
    weights alone."""
    if (last := last_checkpoint(output_dir)) is None or has_state(last):
        return last
    checkpoints = _from_last_to_first(output_dir)
    return next((str(path) for path in checkpoints if has_state(path) and defect(path) is None), last)


def _from_last_to_first(output_dir: str | Path) -> list[Path]:
    """Return the checkpoints in `output_dir`, the one after the most optimizer steps first. Copies have other
    modification times."""
    steps = (re.fullmatch(r"checkpoint-(\d+)", path.name) for path in Path(output_dir).glob("checkpoint-*"))
    numbers = sorted((int(match[1]) for match in steps if match), reverse=True)
    return [Path(output_dir) / f"checkpoint-{number}" for number in numbers]


def has_state(checkpoint: str | Path) -> bool:
    """Return whether a run can continue from a checkpoint, if it is complete."""
    return any(Path(checkpoint).glob("*_state_0.pt"))


def check_complete(checkpoint: str) -> None:
    """Raise a `ValueError` if a checkpoint is missing or incomplete; the error names the last complete one."""
    if not Path(checkpoint).is_dir():
        raise UserError(f"The checkpoint {checkpoint!r} does not exist (relative to {Path.cwd()}). Correct the path.")
    if (wrong := defect(checkpoint)) is not None:
        other = last_checkpoint(Path(checkpoint).parent)
        remedy = f"Resume from {other}" if other else "Start a new run"
        raise UserError(
            f"{checkpoint} is not complete: {wrong}. It is no checkpoint, or the process was stopped while it was "
            f"being written. {remedy}."
        )


def check_output_dir(output_dir: str | Path, checkpoint: str | None, *, resumes: bool) -> None:
    """
    Raise a `ValueError` if a run would overwrite the checkpoints or the model of another one.

    Args:
        checkpoint (`str`, *optional*): The checkpoint from which the run continues.
        resumes (`bool`): Whether the run was told to continue from a checkpoint in `output_dir`, if there is one.
    """
    output_dir = Path(output_dir)
    steps = [re.fullmatch(r"checkpoint-(\d+)", path.name) for path in output_dir.glob("checkpoint-*") if path.is_dir()]
    if checkpoint is None and not resumes and (numbers := [int(match[1]) for match in steps if match]):
        raise UserError(
            f"{output_dir} already contains checkpoint-{max(numbers)} of another run. Continue it with "
            "`--resume_from_checkpoint last`, or choose another output_dir."
        )
    continues_run = checkpoint is not None and Path(checkpoint).resolve().parent == output_dir.resolve()
    holds_model = any((output_dir / name).is_file() for name in ("config.json", "adapter_config.json"))
    if holds_model and not continues_run:
        raise UserError(
            f"{output_dir} already contains a model, which this run would overwrite. Choose another output_dir, or "
            "remove the directory; to train that model further, set it as model_name_or_path."
        )
