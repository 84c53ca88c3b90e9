"""Names of metrics and of columns of completion tables: each has one source."""

from collections.abc import Iterable, Sequence

from ..errors import UserError


# Columns of the table of completions besides those of reward functions.
TABLE_COLUMNS = ("step", "prompt", "completion", "advantage", "image")

# Metrics are also logged under the names that they had before version 0.2, until version 0.3.
FORMER_METRIC_NAMES = {
    "update/forwarded_fraction": "pacs/forwarded_fraction",
    "update/non_finite_steps": "pacs/non_finite_steps",
    "labels/uniform_group_fraction": "pacs/uniform_group_fraction",
    "labels/mean": "pacs/label_mean",
}

# What trainers log themselves: names, and beginnings of names.
_METRICS = (
    "loss",
    "grad_norm",
    "learning_rate",
    "epoch",
    "step",
    "step_time",
    "total_flos",
    "num_tokens",
    "num_input_tokens_seen",
    "reward",
    "reward_std",
    "frac_reward_zero_std",
    "entropy",
    "entropy_coef",
    "kl",
    "policy_loss",
    "aux_loss",
    "cispo_clip_ratio",
)
_PREFIXES = (
    "train_",
    "eval_",
    "rewards/",
    "completions/",
    "tools/",
    "environments/",
    "clip_ratio/",
    "sampling/",
    "vespo/",
    "update/",
    "labels/",
    "pacs/",
    "time/",
    "perf/",
    "async/",
    "adaptive/",
    "guidance/",
    "refill/",
    "spread_filter/",
    "steer/",
    "hidden/",
    "process/",
    "ppo/",
    "genac/",
)


def distinct_names(names: Sequence[str], taken: Iterable[str] = TABLE_COLUMNS) -> list[str]:
    """Return names that all differ, also from those `taken`: a repeated one gets the suffix `_2`, `_3`, and so on."""
    taken = set(taken)
    distinct: list[str] = []
    for name in names:
        if name in distinct or name in taken:
            number = 2
            while f"{name}_{number}" in {*names, *distinct, *taken}:
                number += 1
            name = f"{name}_{number}"
        distinct.append(name)
    return distinct


def check_metric_name(name: str) -> None:
    """Raise a `ValueError` if a reward function logs a metric under a name that the trainer uses."""
    if name in _METRICS or name.startswith(_PREFIXES):
        raise UserError(
            f"A reward function called log_metric({name!r}, ...), but the trainer logs a metric of this name, which "
            "would become a mean of both. Use another name, for example one with your own prefix."
        )


def check_column_name(column: str, reward_names: Sequence[str]) -> None:
    """Raise a `ValueError` if a reward function logs a column that the table of completions already has."""
    if column in TABLE_COLUMNS or column in reward_names:
        raise UserError(
            f"A reward function called log_extra({column!r}, ...), but the table of completions has a column of this "
            "name already, which it would replace. Use another name."
        )
