"""Code of the user and data that the worker of continuous rollouts, another process, cannot use."""

import copy
import sys
from types import ModuleType

import pytest
from datasets import Dataset
from support.continuous_refusals import assert_continuous_is_refused
from support.models import TOKENIZER
from support.rollouts import addition_dataset, digit_reward
from support.vllm_server import LoopbackVLLM, play_installed
from torch import nn

from pacs_trl.rollouts import worker_checks


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    play_installed(monkeypatch.setattr)
    monkeypatch.setattr(worker_checks, "find_spec", lambda name: True)


@pytest.fixture
def server(model_path):
    with LoopbackVLLM(model_path) as server:
        yield server


def test_code_of_the_user_that_cannot_run_in_another_process_is_refused(tmp_path, server, model_path):
    def local_reward(completions, **kwargs):
        return digit_reward(completions)

    def needs_policy(completions, compute_logps, **kwargs):
        return digit_reward(completions)

    for reward in (local_reward, lambda completions, **kwargs: digit_reward(completions)):
        assert_continuous_is_refused(
            tmp_path, server, model_path, "sends the reward function .* to another process, which fails", reward
        )
    assert_continuous_is_refused(
        tmp_path, server, model_path, "no `compute_logps` for 'needs_policy'. Remove", needs_policy
    )
    assert_continuous_is_refused(tmp_path, server, model_path, "has no reward model", nn.Linear(2, 1))
    assert_continuous_is_refused(
        tmp_path, server, model_path, "sends the tool 'local_tool'", digit_reward, {"tools": [local_tool_of()]}
    )


def test_a_function_of_a_notebook_is_refused(tmp_path, server, model_path, monkeypatch):
    """pickle names it, and the other process has another main module."""
    notebook = ModuleType("__main__")
    exec("def reward(completions, **kwargs):\n    return [0.0] * len(completions)", vars(notebook))
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    assert_continuous_is_refused(
        tmp_path, server, model_path, "cannot import it from a notebook.*Define it in a module", notebook.reward
    )


def local_tool_of():
    def local_tool(a: int) -> int:
        """
        Return a number.

        Args:
            a: The number.
        """
        return a

    return local_tool


def tool(a: int) -> int:
    """
    Return a number.

    Args:
        a: The number.
    """
    return a


def test_tools_need_a_template_that_reads_their_calls(tmp_path, server, model_path):
    tokenizer = copy.deepcopy(TOKENIZER)
    more = {"tools": [tool], "processing_class": tokenizer}
    assert_continuous_is_refused(
        tmp_path, server, model_path, "no `response_template`.*Set `response_template`", digit_reward, more
    )


def test_data_that_the_worker_cannot_read_are_refused(tmp_path, server, model_path):
    text = Dataset.from_list([{"prompt": "1 + 1 =", "solution": "2"}] * 4)
    assert_continuous_is_refused(
        tmp_path, server, model_path, "prompts that are lists of messages", more={"train_dataset": text}
    )
    stream = {"train_dataset": addition_dataset().to_iterable_dataset()}
    assert_continuous_is_refused(
        tmp_path, server, model_path, "does not support a streaming dataset", more=stream, max_steps=2
    )
    more = {"rollout_func": lambda prompts, trainer: {}}
    assert_continuous_is_refused(tmp_path, server, model_path, "does not support rollout_func", digit_reward, more)


def test_a_missing_aiohttp_is_reported(tmp_path, server, model_path, monkeypatch):
    monkeypatch.setattr(worker_checks, "find_spec", lambda name: None)
    assert_continuous_is_refused(
        tmp_path, server, model_path, "needs aiohttp, which is not installed. Run `pip install aiohttp`"
    )
