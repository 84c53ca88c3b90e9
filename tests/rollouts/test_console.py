"""The line of a step by hand, rewards before and after, and what of Trainer's own output is left alone."""

import pytest
from support.optional_packages import IPython  # noqa: F401 (skips without it)
from transformers import PrinterCallback, ProgressCallback
from transformers.utils.notebook import NotebookProgressCallback

from pacs_trl.rollouts.console import ConsoleCallback, change_of_reward, shorten_console, step_line


STEP = {"reward": 0.371, "entropy": 0.1949, "completions/mean_length": 20.6, "time/total": 1.16, "loss": 0.69}
STEP |= {"completions/clipped_ratio": 0.0475, "grad_norm": 0.001234}


@pytest.mark.parametrize(
    ("logs", "line"),
    [
        (STEP, "step 12/30  reward 0.37  entropy 0.19  length 21  truncated 0.05  grad_norm 0.0012  1.2 s"),
        (
            STEP | {"reward": None, "entropy": None, "grad_norm": float("nan")},
            "step 12/30  reward none  length 21  truncated 0.05  grad_norm nan  1.2 s",
        ),
        (
            {"eval_reward": 0.5, "eval_completions/mean_length": 9.0, "eval_runtime": 3.0},
            "evaluation at step 12/30  reward 0.50  length 9  3.0 s",
        ),
        (
            {"eval_hard_reward": 0.5, "eval_hard_runtime": 3.0, "eval_pass@1": 0.25},
            "evaluation of hard at step 12/30  reward 0.50  pass@1 0.250  3.0 s",
        ),
        ({"eval_pass@1": 0.25, "eval_runtime": 3.0}, "evaluation at step 12/30  pass@1 0.250  3.0 s"),
        ({"reward": 1.0}, "step 12/30  reward 1.00"),
        (
            {"loss": 0.69, "entropy": 0.1949, "grad_norm": 0.5, "time/total": 0.84},
            "step 12/30  same rollouts  entropy 0.19  grad_norm 0.5  0.8 s",
        ),
        ({"train_runtime": 60.0, "train_loss": 0.69}, None),
    ],
)
def test_a_step_is_printed_as_one_line(logs, line):
    assert step_line(logs, 12, 30) == line
    assert line is None or step_line(logs, 2, 30) == line.replace("step 12", "step  2")


def test_change_of_reward_compares_first_and_last_steps():
    rewards = [0.1, 0.2, *[0.5] * 16, 0.8, 0.9]
    history = [{"step": i, "reward": reward} for i, reward in enumerate(rewards)] + [{"train_runtime": 1.0}]
    assert change_of_reward(history) == "Reward 0.150 before, 0.850 after (first and last 2 logged steps of 20)."
    assert change_of_reward(history[:2]) == "Reward 0.100 before, 0.200 after (first and last logged step of 2)."
    assert change_of_reward([*history[:1], {"reward": None}]) is None


def test_notebooks_printers_and_bars_of_users_keep_their_callbacks():
    """Its table in notebooks, its dict with `disable_tqdm`, and a bar that the user has given."""
    mine, others = ProgressCallback(), [NotebookProgressCallback(), PrinterCallback()]
    for callbacks in ([mine, ProgressCallback(), *others], [ProgressCallback(), *others], others):
        shortened = list(callbacks)
        shorten_console(shortened)
        replaced = [new for old, new in zip(callbacks, shortened, strict=True) if new is not old]
        assert [type(callback) for callback in replaced] == [ConsoleCallback] * (len(callbacks) > 2)
        assert mine not in callbacks or mine in shortened
