"""Rewards with a lag: plain functions are called in the main thread when their batch is taken, asynchronous ones when
it arrives, in order, with the values and logs of a call when it is taken."""

import random
import threading
from types import SimpleNamespace

import pytest
import torch
from support.forked_engine import forked_engine
from support.late_runs import trainer_of
from support.models import TOKENIZER, assert_same_models
from support.rollouts import digit_reward
from transformers import TrainerState

from pacs_trl import GRPOTrainer
from pacs_trl.rollouts import early_rewards


called: list[tuple] = []  # name, texts, optimizer step of the state, whether in the main thread


def note(name, completions, step):
    is_main = threading.current_thread() is threading.main_thread()
    called.append((name, [turns[0]["content"] for turns in completions], step, is_main))


async def early(completions, prompts, completion_ids, solution, truncated, log_metric, log_extra, **kwargs):
    assert prompts[0][0]["role"] == "user"
    note("early", completions, kwargs["trainer_state"].global_step)
    log_metric("share", sum(truncated) / len(truncated))
    log_extra("answer", [torch.tensor(len(ids)) for ids in completion_ids])
    noise = random.random() * 0.1  # global random numbers are those of a run that was not resumed
    return [None if i == 0 else 0.9 * reward + noise for i, reward in enumerate(digit_reward(completions))]


def package_reward(completions, **kwargs):
    note("package_reward", completions, kwargs["trainer_state"].global_step)
    return digit_reward(completions)


def plain(completions, **kwargs):
    note("plain", completions, kwargs["trainer_state"].global_step)
    return digit_reward(completions)


async def async_of_state(completions, trainer_state, **kwargs):
    note("async_of_state", completions, trainer_state.global_step)
    return digit_reward(completions)


def policy_reward(completions, completion_ids, compute_logps, **kwargs):
    compute_logps(completion_ids, completion_ids)
    note("policy_reward", completions, None)
    return digit_reward(completions)


FUNCTIONS = [early, package_reward, plain, async_of_state, policy_reward]


def run(directory, resume=None, **settings):
    all_settings = {"reward_weights": [0.2] * 5, "max_steps": 8, "rollout_lag": 2} | settings
    called.clear()
    random.seed(7)
    with forked_engine():
        trainer = trainer_of(directory, GRPOTrainer, reward=FUNCTIONS, **all_settings)
        trainer.train(resume_from_checkpoint=resume)
    return trainer, list(called)


@pytest.mark.filterwarnings("ignore")
def test_functions_that_need_neither_the_main_thread_nor_the_policy_are_called_early(tmp_path, monkeypatch):
    monkeypatch.setattr(early_rewards, "FUNCTIONS", (package_reward,))
    straight, calls = run(tmp_path / "straight", eval_strategy="steps", eval_steps=4)
    texts = [[r.completion_ids.tolist() for r in kept] for kept in straight.kept]
    assert len(texts) == 4
    for name in ("early", "package_reward", "plain", "async_of_state", "policy_reward"):
        is_early, is_plain = name in ("early", "package_reward"), name in ("plain", "policy_reward")
        function_calls = [(contents, step, is_main) for each, contents, step, is_main in calls if each == name]
        training = [each for each in function_calls if len(each[0]) == 16]
        assert len(training) == 4 and len(function_calls) > 4, f"{name}: once per batch, and in the evaluation"
        assert [is_main for *_, is_main in training] == [is_plain] * 4
        if name != "policy_reward":
            late = [0, 0, 0, 2] if is_early else [0, 2, 4, 6]
            assert [step for _, step, _ in training] == late
        assert [contents for contents, *_ in training] == [
            straight._tokenizer.batch_decode(ids, skip_special_tokens=True) for ids in texts
        ]
    logs = [log for log in straight.state.log_history if "rewards/early/mean" in log]
    assert all("share" in log for log in logs)
    resumed, again = run(tmp_path / "resumed", resume=str(tmp_path / "straight" / "checkpoint-3"), eval_strategy="no")
    logged = resumed._logs["extra"]["answer"]
    assert list(logged) == [f"tensor({len(ids)})" for ids in texts[-1]]
    assert [each[0] for each in again if each[3]] == ["plain", "policy_reward"] * 2
    assert_same_models(straight, resumed)


class Wrong(Exception):
    pass


async def wrong_at_second(completions, **kwargs):
    called.append(())
    if len(called) == 2:
        raise Wrong
    return digit_reward(completions)


async def too_few(completions, **kwargs):
    return digit_reward(completions)[1:]


@pytest.mark.parametrize(
    ("function", "error", "at"), [(wrong_at_second, Wrong, 2), (too_few, ValueError, 0)], ids=["raises", "too few"]
)
def test_an_error_ends_the_run_when_its_batch_is_taken(tmp_path, function, error, at):
    called.clear()
    with forked_engine():
        trainer = trainer_of(tmp_path, reward=function)
        with pytest.raises(error):
            trainer.train()
    assert trainer.state.global_step == at


def test_columns_of_a_rollout_function_are_those_of_a_call_without_a_lag(monkeypatch):
    """A value that is no list is that of each completion, and a function that changes a list changes no batch."""

    def take_turns(completions, level, turns, **kwargs):
        called.append((list(level), [turns.pop(0) for _ in completions]))
        return [1.0 for _ in completions]

    monkeypatch.setattr(early_rewards, "FUNCTIONS", (take_turns,))
    called.clear()
    trainer = SimpleNamespace(
        processing_class=TOKENIZER,
        _tokenizer=TOKENIZER,
        reward_funcs=[take_turns],
        reward_arguments=lambda: {},
        state=TrainerState(),
    )
    rows = [{"prompt": "1 + 1"}, {"prompt": "1 + 2"}]
    output = {"completion_ids": [[5], [6]], "logprobs": [[0.0], [0.0]], "level": "easy", "turns": [1, 2]}
    results = early_rewards.EarlyRewards(trainer).compute(rows, output, step=0)
    assert results[0]["rewards"] == [1.0, 1.0]
    assert called == [(["easy", "easy"], [1, 2])]
    assert output["turns"] == [1, 2]
