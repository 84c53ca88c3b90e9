"""Experiment trackers of a run: an id that persists across processes, the recipe, and tables of completions.

TRL and transformers send the metrics. Here are the recipe, and the completions of every logged step under a separate
key; under TRL's single key a tracker shows only the latest.
"""

import importlib
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from accelerate import PartialState
from transformers import TrainerCallback
from trl import GRPOConfig

from ..errors import UserError
from ..redaction import published, published_recipe


_WITH_TABLES = ("wandb", "trackio")  # TensorBoard has no tables


@contextmanager
def tracked_run(training: GRPOConfig, settings: dict[str, Any], *, resuming: bool) -> Iterator["TrackingCallback"]:
    """
    Log to one run of each tracker in `report_to` inside the context; a resumed run continues the previous tracker run.
    Yields the callback to add to the trainer, which must be constructed inside the context.

    The id in `output_dir/run_id` is the wandb run id, part of the trackio run name, and the folder of TensorBoard's
    events. Trackers receive `settings`, the resolved recipe, filtered by [`~redaction.published`]. Raises a
    `ValueError` if wandb has no API key and stdin is not a terminal.
    """
    callback = TrackingCallback(settings)
    if not training.report_to or not PartialState().is_main_process:
        yield callback
        return
    output_dir = Path(str(training.output_dir))
    file = output_dir / "run_id"
    earlier = file.read_text().strip() if resuming and file.is_file() else None
    identity = os.environ.get("WANDB_RUN_ID") or earlier or secrets.token_hex(4)
    output_dir.mkdir(parents=True, exist_ok=True)
    file.write_text(identity + "\n")
    if training.run_name is None:
        training.run_name = f"{output_dir.name}-{identity}"
    wanted = {
        "WANDB_RUN_ID": identity,
        "WANDB_RESUME": "allow",
        "TENSORBOARD_LOGGING_DIR": str(output_dir / "runs" / identity),
    }
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    words, sys.argv = sys.argv, sys.argv[:1]  # wandb sends the command line, which may have secrets
    try:
        if "wandb" in training.report_to:
            _require_key(importlib.import_module("wandb"))
        yield callback
    finally:
        sys.argv = words
        for name in added:
            del os.environ[name]
        if "wandb" in training.report_to:
            importlib.import_module("wandb").finish()  # otherwise the next run of this process would continue it


def _require_key(wandb) -> None:
    can_ask = sys.stdin is not None and sys.stdin.isatty()
    if can_ask or wandb.setup().settings.mode != "online":
        return
    if not wandb.login(prompt=False, verify=False):
        raise UserError(
            "report_to names wandb, which has no API key here. Run `wandb login`, set WANDB_API_KEY, or "
            "WANDB_MODE=offline to keep the run on this machine, or remove wandb from report_to."
        )


class TrackingCallback(TrainerCallback):
    """Send the recipe to wandb and trackio, and the completions of each logged step as a table
    `completions/step_<step>`, those of an evaluation as `eval_completions/step_<step>`. TRL writes completions after
    it calls callbacks, so they are sent with the next log."""

    def __init__(self, settings: dict[str, Any]):
        self.settings = published_recipe(settings)
        self._first_step = 0  # completions of earlier steps were sent before
        self._sent: set[str] = set()  # files of completions

    def on_train_begin(self, args, state, control, **kwargs):
        self._first_step, self._sent = state.global_step, set()
        # transformers has already sent the model config, with the path that it was loaded from.
        name = published({"_name_or_path": kwargs["model"].config.name_or_path})
        for tracker in _trackers(args, state):
            tracker.config.update({"recipe": self.settings, **name}, allow_val_change=True)

    def on_log(self, args, state, control, logs=None, **kwargs):
        for file in sorted((Path(args.output_dir) / "completions").glob("*_*.parquet")):
            kind, _, number = file.stem.rpartition("_")
            step = int(number)
            if not self._first_step < step <= state.global_step or file.name in self._sent:
                continue
            table = _read_table(file, unique_prompts=args.log_unique_prompts)
            name = "completions" if kind == "completions" else f"{kind}_completions"
            for tracker in _trackers(args, state):
                tracker.log({f"{name}/step_{step:05d}": tracker.Table(dataframe=table), "train/global_step": step})
            self._sent.add(file.name)


def _read_table(file: Path, *, unique_prompts: bool) -> pd.DataFrame:
    table = pd.read_parquet(file)
    if unique_prompts:
        table = table[~table["prompt"].astype(str).duplicated()]
    for column in ("prompt", "completion"):  # conversations come back as arrays of messages
        table[column] = [c.tolist() if isinstance(c, np.ndarray) else c for c in table[column]]
    return table


def _trackers(args, state) -> list:
    return [importlib.import_module(n) for n in _WITH_TABLES if n in args.report_to and state.is_world_process_zero]
