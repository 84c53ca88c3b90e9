"""Reward functions cannot change what is trained, end the command, or return what float32 cannot hold."""

import asyncio
import signal
import sys
import threading
from dataclasses import dataclass
from functools import partial, wraps
from types import SimpleNamespace

import pytest
import torch
from support.forked_engine import forked_engine
from support.late_runs import trainer_of
from support.models import TOKENIZER, assert_same_models, tiny_model
from support.rollouts import addition_dataset, digit_reward
from support.runs import build_trainer
from support.scripted import run_recipe
from torch import nn
from transformers import Qwen3ForSequenceClassification

from pacs_trl import GRPOTrainer, PACSTrainer, REALTrainer
from pacs_trl.data.environments import prepare_environments
from pacs_trl.errors import FailedRun, exit_code
from pacs_trl.rewards import math_reward
from pacs_trl.rollouts.reward_functions import independent_copy, with_truncated
from pacs_trl.rollouts.user_code import stoppable_tools
from pacs_trl.settings.names import function_of_user
from pacs_trl.update.rollout import as_numbers


class Handle:
    """An object of a user, such as an environment."""


def test_copies_share_no_container_and_keep_other_objects():
    shared, handle = [1, 2], Handle()
    value = {"ids": [shared, shared], "rows": ({"a": [shared]},), "tensor": torch.zeros(2), "handle": [handle]}
    copied = independent_copy(value)
    assert copied["ids"] == [[1, 2], [1, 2]] and copied["rows"] == ({"a": [[1, 2]]},)
    assert copied["handle"][0] is handle
    copied["ids"][0].append(3)
    copied["rows"][0]["a"][0].clear()
    copied["tensor"].add_(1)
    assert shared == [1, 2] and copied["ids"][1] == [1, 2] and value["tensor"].tolist() == [0, 0]


def half_reward(completions, **kwargs):
    return [0.5] * len(completions)


@pytest.mark.parametrize(
    ("trainer_class", "remedy"),
    [(PACSTrainer, "Divide reward_weights by 2"), (REALTrainer, "Write one function that returns 0 or 1")],
)
def test_weights_with_which_labels_may_be_above_1_are_warned_of_once(tmp_path, caplog, trainer_class, remedy):
    """Before a completion satisfies both functions, which ends the run."""
    trainer = build_trainer(tmp_path, reward=[digit_reward, half_reward], trainer_class=trainer_class)
    of_each_other = torch.tensor([[1.0, torch.nan], [torch.nan, 1.0], [torch.nan, torch.nan]])
    assert trainer._compute_labels(of_each_other)[:2].tolist() == [1, 1] and not caplog.records
    for _ in range(2):
        assert trainer._compute_labels(torch.tensor([[1.0, 0.0], [0.0, 1.0]])).tolist() == [1, 1]
    (record,) = caplog.records
    assert "may reach 2," in record.message and "(digit_reward, half_reward)" in record.message
    assert remedy in record.message


def test_weights_that_sum_to_1_are_no_warning(tmp_path, caplog):
    weights = {"reward_weights": [0.5, 0.5]}
    trainer = build_trainer(tmp_path, reward=[digit_reward, half_reward], **weights)
    assert trainer._compute_labels(torch.tensor([[1.0, 1.0], [0.0, 1.0]])).tolist() == [1, 0.5]
    assert not caplog.records


def destructive(completions, completion_ids, prompts, solution, **kwargs):
    """Return rewards, and change everything that was given."""
    rewards = digit_reward(completions)
    for ids in completion_ids:
        del ids[1:]
    for messages in (*completions, *prompts):
        messages[0]["content"] = ""
        messages.append({"role": "user", "content": "more"})
    solution.clear()
    return rewards


async def destructive_async(completions, **kwargs):
    return destructive(completions, **kwargs)


def without_gradients(completions, **kwargs):
    """Return rewards, and disable gradients for good, as code for inference does."""
    torch.set_grad_enabled(False)
    return digit_reward(completions)


@pytest.mark.parametrize("trainer_class", [PACSTrainer, GRPOTrainer])
def test_reward_functions_that_disable_gradients_change_no_weights(tmp_path, trainer_class):
    settings = {"trainer_class": trainer_class, "steps_per_generation": 2}
    expected = build_trainer(tmp_path, reward=digit_reward, **settings)
    expected.train()
    trainer = build_trainer(tmp_path, reward=without_gradients, **settings)
    with torch.enable_grad():  # restores it
        trainer.train()
    assert_same_models(trainer, expected)


@pytest.mark.parametrize("lag", [0, 1])
def test_reward_functions_that_change_their_arguments_change_no_weights(tmp_path, lag):
    """Neither those of the model, nor what the next reward function, an evaluation, or a table gets."""
    seen = []

    def last(completions, completion_ids, prompts, solution, **kwargs):
        seen.append((completions, completion_ids, prompts, solution))
        return digit_reward(completions)

    settings = {"rollout_lag": lag, "max_steps": 4, "save_strategy": "no", "trainer_class": GRPOTrainer}
    settings |= {"eval_strategy": "steps", "eval_steps": 2, "reward_weights": [0.3, 0.3, 0.4]}
    trainers, arguments = [], []
    with forked_engine():
        for functions in ([destructive, destructive_async, last], [digit_reward, digit_reward, last]):
            seen.clear()
            trainers.append(trainer_of(tmp_path, reward=functions, **settings))
            trainers[-1].train()
            arguments.append(list(seen))
    assert_same_models(*trainers)
    assert arguments[0] == arguments[1] and len(arguments[0]) > 2


@pytest.mark.parametrize("lag", [0, 1])
def test_completions_of_a_group_share_no_object(tmp_path, lag):
    shared = []

    def reward(prompts, completions, **kwargs):
        shared.append(len({id(prompt[0]) for prompt in prompts}) < len(prompts))
        return digit_reward(completions)

    with forked_engine():
        trainer_of(tmp_path, reward=reward, rollout_lag=lag, max_steps=2, save_strategy="no").train()
    assert shared and not any(shared)


def test_rows_of_generate_more_share_no_object(tmp_path):
    trainer, rows = build_trainer(tmp_path), []
    generate = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: rows.extend(inputs) or generate(inputs)
    trainer.train()
    rows.clear()
    trainer.generate_more([addition_dataset()[0]], 4)
    assert len({id(row["prompt"][0]) for row in rows}) == 4


def test_with_a_lag_rewards_may_need_the_main_thread(tmp_path):
    """Alarms, as in the time limits of math-verify, work in the main thread alone."""
    threads = []

    def with_alarm(completions, **kwargs):
        threads.append(threading.current_thread())
        before = signal.signal(signal.SIGALRM, lambda *_: None)
        signal.signal(signal.SIGALRM, before)
        return digit_reward(completions)

    with forked_engine():
        trainer_of(tmp_path, reward=with_alarm, max_steps=4, save_strategy="no").train()
    assert set(threads) == {threading.main_thread()}


@pytest.mark.parametrize("lag", [0, 1])
def test_functions_with_exactly_the_arguments_of_trl_are_called(tmp_path, lag):
    def exact(prompts, completions, completion_ids, solution, trainer_state, log_extra, log_metric):
        return digit_reward(completions)

    with forked_engine():
        trainer = trainer_of(tmp_path, reward=exact, rollout_lag=lag, max_steps=2, save_strategy="no")
        trainer.train()
    assert trainer.state.global_step == 2


@dataclass
class ParityReward:
    """A reward function with fields, which is not hashable."""

    odd: float = 1.0

    def __call__(self, completions, **kwargs):
        return [self.odd * reward for reward in digit_reward(completions)]


@pytest.mark.parametrize("reward", [ParityReward(), [ParityReward()]], ids=["alone", "in a list"])
def test_reward_functions_need_not_be_hashable(tmp_path, reward):
    expected = build_trainer(tmp_path, reward=digit_reward)
    expected.train()
    trainer = build_trainer(tmp_path, reward=reward)
    trainer.train()
    assert_same_models(expected, trainer)
    assert trainer.reward_func_names == ["ParityReward"]


def test_a_column_with_the_name_of_the_argument_truncated_reaches_functions():
    """But not functions of this package, whose argument it is."""
    column = {"completions": ["a"], "truncated": ["of the data"]}
    for function in (reads_truncated, passes_on, takes_completions):
        assert with_truncated(function, column, [True]) == column
    for function in OF_THE_PACKAGE:
        assert with_truncated(function, column, [True])["truncated"] == [True]


def reads_truncated(completions, truncated=None):
    return [0.0 if cut else 1.0 for cut in truncated]


def takes_completions(completions, solution):
    return digit_reward(completions)


def passes_on(completions, solution, **kwargs):
    """Call another function with the columns of the dataset, as scripts for TRL do."""
    names_of_trl = ("prompts", "completion_ids", "trainer_state", "log_extra", "log_metric")
    columns = {name: value for name, value in kwargs.items() if name not in names_of_trl}
    return takes_completions(completions, solution, **columns)


@wraps(math_reward)
def wrapped_math_reward(*args, **kwargs):
    return math_reward(*args, **kwargs)


OF_THE_PACKAGE = (math_reward, wrapped_math_reward, partial(math_reward, log_extra=None), partial(wrapped_math_reward))


def test_functions_get_the_argument_truncated_if_they_have_such_a_parameter():
    arguments = {"completions": ["a"]}
    for function in (reads_truncated, partial(reads_truncated), *OF_THE_PACKAGE):
        assert with_truncated(function, arguments, [True])["truncated"] == [True]
    for function in (passes_on, takes_completions, partial(passes_on, solution=None)):
        assert with_truncated(function, arguments, [True]) == arguments


def test_functions_that_pass_on_all_keyword_arguments_get_those_of_trl(tmp_path):
    expected = build_trainer(tmp_path, reward=digit_reward)
    expected.train()
    trainer = build_trainer(tmp_path, reward=passes_on)
    trainer.train()
    assert_same_models(expected, trainer)


def test_missing_rewards_may_be_nan(tmp_path):
    """As `None`: the same weights, and labels, with both."""

    def missing(value):
        def reward(completions, **kwargs):
            return [value if i % 4 == 1 else label for i, label in enumerate(digit_reward(completions))]

        return reward

    trainers = []
    for value in (None, float("nan")):
        trainers.append(build_trainer(tmp_path, reward=missing(value)))
        trainers[-1].train()
        assert trainers[-1]._labels.isnan().tolist() == [i % 4 == 1 for i in range(8)]
    assert_same_models(*trainers)


def leaves(completions, **kwargs):
    sys.exit(0)


async def leaves_later(completions, **kwargs):
    await asyncio.sleep(0)
    sys.exit(0)


async def cancels(completions, **kwargs):
    raise asyncio.CancelledError


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("function", [leaves, leaves_later, cancels], ids=lambda function: function.__name__)
def test_a_reward_function_cannot_end_the_process(tmp_path, function, lag):
    words = "raised CancelledError" if function is cancels else r"called sys.exit\(0\)"
    with forked_engine():
        trainer = trainer_of(tmp_path, reward=function, rollout_lag=lag, save_strategy="no")
        with pytest.raises(FailedRun, match=f"The reward function '{function.__name__}' {words}"):
            trainer.train()


def test_a_command_whose_code_exits_has_failed(tmp_path, model_path, monkeypatch, capsys):
    """Also code that nothing wraps, here a callback."""

    def main(argv):
        run_recipe(tmp_path, model_path, *argv)

    assert exit_code("pacs-trl train", main, ["--reward_funcs", "test_reward_functions.leaves"]) == 1
    assert "'leaves' called sys.exit(0)" in capsys.readouterr().err
    monkeypatch.setattr("pacs_trl.rollouts.timing.StepTimer.on_step_end", lambda *args, **kwargs: sys.exit(0))
    assert exit_code("pacs-trl train", main, []) == 1
    assert "called sys.exit(0), which would end the command" in capsys.readouterr().err


def test_rewards_that_are_no_list_of_numbers():
    for result in ({0: 0.5, 1: 0.5}, {0.5, 1.0}, "10", ["1", "0"], [b"1", b"0"]):
        with pytest.raises(ValueError, match="'reward' returned"):
            as_numbers(result, "reward", len(result))


def test_a_function_that_reads_no_completions_may_be_called_without_them(tmp_path):
    """As that of an environment, by a user who tries it."""
    trainer = build_trainer(tmp_path, reward=lambda **columns: [1.0, None])
    assert trainer.reward_funcs[0](environments=["first", "second"]) == [1.0, None]


def test_rewards_that_float32_cannot_hold():
    assert as_numbers([1e18, -1e18], "reward", 2) == [1e18, -1e18]
    for result in ([1e39, 0.0], [0.0, -1e19], [10**400, 0]):
        with pytest.raises(ValueError, match="'reward' returned"):
            as_numbers(result, "reward", len(result))


class RewardModel(nn.Module):
    """A reward model that returns the logits `scores(number of texts)`."""

    def __init__(self, scores):
        super().__init__()
        self.scores, self.config = scores, SimpleNamespace(_name_or_path="judge", architectures=None)
        self.warnings_issued = {}

    def forward(self, input_ids, attention_mask):
        return SimpleNamespace(logits=self.scores(len(input_ids)))


SCORES = {
    "NaN": (lambda n: torch.full((n, 1), torch.nan), "returned nan"),
    "infinity": (lambda n: torch.full((n, 1), torch.inf), "returned inf"),
    "two labels": (lambda n: torch.zeros(n, 2), r"returned logits of shape \(8, 2\)"),
    "a label per token": (lambda n: torch.zeros(n, 3, 1), r"returned logits of shape \(8, 3, 1\)"),
}


@pytest.mark.parametrize(("scores", "words"), SCORES.values(), ids=SCORES)
def test_scores_of_reward_models_are_checked(tmp_path, scores, words):
    more = {"reward_processing_classes": TOKENIZER}
    with pytest.raises(ValueError, match=f"reward model 'judge' {words}"):
        build_trainer(tmp_path, trainer_class=GRPOTrainer, reward=RewardModel(scores), more=more).train()


def test_reward_models_of_several_labels_are_refused(tmp_path):
    config = tiny_model().config
    config.num_labels = 2
    with pytest.raises(ValueError, match="Qwen3ForSequenceClassification, has 2 labels.*num_labels=1"):
        build_trainer(tmp_path, model="no model", reward=Qwen3ForSequenceClassification(config))


class Leaving:
    """An environment whose `reset` ends the process."""

    def reset(self, **kwargs) -> None:
        sys.exit(0)


def test_modules_and_environments_that_exit_are_errors_before_training(tmp_path, monkeypatch):
    (tmp_path / "module_that_exits.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"reward_funcs: 'module_that_exits.f' cannot be imported.*SystemExit: 0"):
        function_of_user("module_that_exits.f", "reward_funcs")
    with pytest.raises(ValueError, match=r"The environment failed.*SystemExit: 0"):
        prepare_environments(Leaving, {"train_dataset": addition_dataset()})


def test_tools_that_exit_fail():
    """The model is told, as of other exceptions of tools: it may have written the code that the tool runs."""

    async def later():
        sys.exit(1)

    with pytest.raises(FailedRun, match=r"The tool 'f' called sys.exit\(0\)"):
        stoppable_tools({"f": lambda: sys.exit(0)})["f"]()
    with pytest.raises(FailedRun, match=r"The tool 'g' called sys.exit\(1\)"):
        asyncio.run(stoppable_tools({"g": later})["g"]())
