"""Detection of settings that were changed after construction, when a change no longer has an effect.

A trainer, its engine, and its update copy most settings when they are constructed. A later `trainer.args.KEY = VALUE`
would be ignored, while checkpoints record the new value. Only the settings listed here are read again.
"""

import re
from dataclasses import fields
from typing import Any

from .checkpoint import check_same_settings, plain_settings


# Settings that Trainer reads on use. All others, e.g. those of a later version, count as fixed at construction.
_LIVE_GROUPS = ("dataloader", "eval", "hub", "logging", "lr_scheduler", "save", "trackio", "warmup")
_LIVE = {
    *("output_dir", "run_name", "project", "push_to_hub", "resume_from_checkpoint", "ignore_data_skip"),
    *("num_train_epochs", "max_steps", "max_grad_norm", "torch_empty_cache_steps", "include_num_input_tokens_seen"),
    *("per_device_eval_batch_size", "prediction_loss_only"),
    *("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
    *("do_train", "do_eval", "do_predict", "restore_callback_states_from_checkpoint"),
}
_LOADED = {"eval_benchmarks", "eval_max_problems"}  # fixed, unlike the rest of its group
# Settings of the optimizer, which Trainer creates in the first run and keeps.
OF_OPTIMIZER = {
    *("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
    *("optim", "optim_args", "optim_target_modules"),
}


def settings_of_construction(args: Any) -> dict[str, Any]:
    """Return the settings that are fixed when a trainer is constructed, in the form of [`plain_settings`]."""
    live = re.compile(rf"({'|'.join(_LIVE_GROUPS)})_")
    names = {field.name for field in fields(args)} - _LIVE - OF_OPTIMIZER
    return plain_settings(args, sorted(name for name in names if name in _LOADED or not live.match(name)))


def check_kept(kept: dict[str, Any], args: Any) -> None:
    """Raise a `ValueError` that lists the settings that were changed after a trainer was constructed."""
    remedy = "construct a new trainer with these settings"
    check_same_settings("The trainer", kept, plain_settings(args, list(kept)), kind="trainer", remedy=remedy)
