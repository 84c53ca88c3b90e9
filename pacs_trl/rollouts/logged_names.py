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

# Metrics that trainers log themselves, besides those of reward functions, `rewards/NAME/mean` and `rewards/NAME/std`.
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
    "clip_ratio/low_mean",
    "clip_ratio/low_min",
    "clip_ratio/high_mean",
    "clip_ratio/high_max",
    "clip_ratio/region_mean",
    "completions/mean_length",
    "completions/min_length",
    "completions/max_length",
    "completions/clipped_ratio",
    "completions/empty_ratio",
    "completions/mean_terminated_length",
    "completions/min_terminated_length",
    "completions/max_terminated_length",
    "environments/different_start_fraction",
    "hidden/effective_rank",
    "hidden/velocity",
    "hidden/acceleration",
    "hidden/bonus",
    "labels/mean",
    "labels/uniform_group_fraction",
    "process/labels",
    "process/label_mean",
    "process/mixed_fraction",
    "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max",
    "sampling/importance_sampling_ratio/min",
    "sampling/importance_sampling_ratio/mean",
    "sampling/importance_sampling_ratio/max",
    "tools/call_frequency",
    "tools/failure_frequency",
    "vespo/phi_seq_mean",
)
# Beginnings of names that only trainers log: those of evaluations and of the end of a run, and of whole subjects.
_PREFIXES = (
    "train_",
    "eval_",
    "update/",
    "pacs/",
    "time/",
    "perf/",
    "async/",
    "adaptive/",
    "guidance/",
    "refill/",
    "spread_filter/",
    "steer/",
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


def check_metric_name(name: str, reward_names: Sequence[str]) -> None:
    """Raise a `ValueError` if a reward function logs a metric under a name that the trainer uses. `reward_names` are
    those of all reward functions."""
    metrics_of_rewards = [f"rewards/{reward}/{statistic}" for reward in reward_names for statistic in ("mean", "std")]
    if name in _METRICS or name in metrics_of_rewards:
        raise UserError(
            f"A reward function called log_metric({name!r}, ...), but the trainer logs a metric of this name, which "
            "would become a mean of both. Use another name, for example one with your own prefix."
        )
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            raise UserError(
                f"A reward function called log_metric({name!r}, ...), but names that begin with {prefix!r} are those "
                "of metrics of the trainer. Use another prefix."
            )


def check_column_name(column: str, reward_names: Sequence[str]) -> None:
    """Raise a `ValueError` if a reward function logs a column that the table of completions already has."""
    if column in TABLE_COLUMNS or column in reward_names:
        raise UserError(
            f"A reward function called log_extra({column!r}, ...), but the table of completions has a column of this "
            "name already, which it would replace. Use another name."
        )
