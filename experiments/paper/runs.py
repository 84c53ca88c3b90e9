"""Warm start, training, and log history of a miniature run in this process."""

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from experiments.miniature.files import warm_start_of, write_data


def start_of(recipe, seed: int | None = None, **settings) -> Path:
    """Return the warm start of a [`~recipe.Recipe`] with the seed of the run or another, or its pretrained model, and
    write the problems of the miniature; `settings` as in [`warm_start`]."""
    write_data()
    seed = recipe.training.seed if seed is None else seed
    return warm_start_of(recipe.model.model_name_or_path, seed=seed, **settings)


def train_once(
    arguments: Sequence[str], start: Path, output_dir: Path, trainer_class: type | None = None, show: bool = False
) -> list[dict[str, Any]]:
    """
    Train from a warm start with the arguments of [`~train.main`], unless it is done; an interrupted run continues from
    its last checkpoint. Printed lines go to `train.log` in `output_dir`, or with `show` to stdout.

    Returns:
        `list[dict]`: The `log_history` of the trainer.
    """
    from pacs_trl import train
    from pacs_trl.report.report import read_log_history

    state = output_dir / "trainer_state.json"
    if not state.is_file():  # written when training is over
        output_dir.mkdir(parents=True, exist_ok=True)
        places = ["--model_name_or_path", str(start), "--output_dir", str(output_dir)]
        is_interrupted = any(output_dir.glob("checkpoint-*"))
        resuming = ["--resume_from_checkpoint", "last"] if is_interrupted else []
        # The trainer writes its lines to standard output, the progress bar to standard error.
        with (output_dir / "train.log").open("a") as log, redirect_stdout(sys.stdout if show else log):
            train.main([*arguments, *places, *resuming], trainer_class)
    return read_log_history(state)
