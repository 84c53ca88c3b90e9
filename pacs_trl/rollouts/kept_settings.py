"""Settings that a trainer has been built from, and that can no longer be changed.

A trainer, its engine, and its update copy most settings when they are constructed, so that a later `trainer.args.KEY =
VALUE` would be ignored, while checkpoints record the new value. Only what is named here is read again.
"""

import re
from dataclasses import fields
from typing import Any

from .checkpoint import check_same_settings, plain_settings


# Read by Trainer whenever it needs them. A setting that is missing here, of a later version, say, counts as built in.
_LIVE_GROUPS = ("dataloader", "eval", "hub", "logging", "lr_scheduler", "save", "trackio", "warmup")
_LIVE = {
    *("output_dir", "run_name", "project", "push_to_hub", "resume_from_checkpoint", "ignore_data_skip"),
    *("num_train_epochs", "max_steps", "max_grad_norm", "torch_empty_cache_steps", "include_num_input_tokens_seen"),
    *("per_device_eval_batch_size", "prediction_loss_only"),
    *("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
    *("do_train", "do_eval", "do_predict", "restore_callback_states_from_checkpoint"),
}
# Built into the optimizer, which Trainer creates in the first run and keeps.
OF_OPTIMIZER = {
    *("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
    *("optim", "optim_args", "optim_target_modules"),
}


def settings_of_construction(args: Any) -> dict[str, Any]:
    """Settings that are built into a trainer when it is constructed, as [`plain_settings`]."""
    live = re.compile(rf"({'|'.join(_LIVE_GROUPS)})_")
    names = {field.name for field in fields(args)} - _LIVE - OF_OPTIMIZER
    return plain_settings(args, sorted(name for name in names if not live.match(name)))


def check_kept(kept: dict[str, Any], args: Any) -> None:
    """Raise a `ValueError` that names the settings that were changed after a trainer had been built from them."""
    remedy = "construct a new trainer with these settings"
    check_same_settings("The trainer", kept, plain_settings(args, list(kept)), kind="trainer", remedy=remedy)
