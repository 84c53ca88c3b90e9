"""Output of rollout functions: lengths, types, and ranges are checked once, where it enters the trainer."""

import copy

import numpy as np
import pytest
import torch
from support.forked_engine import forked_engine
from support.late_runs import trainer_of
from support.models import TOKENIZER, tiny_model
from support.rollouts import Replay, digit_reward
from support.runs import build_trainer

from pacs_trl.errors import FailedRun
from pacs_trl.rollouts.rollout_output import checked_output


GOOD = {
    "prompt_ids": [[1, 2], [3]],
    "completion_ids": [[4, 5, 6], [7]],
    "logprobs": [[-1.0, None, -2], [0.0]],
    "env_mask": [[1, 0, True], [1]],
    "turns": [1, 2],
    "source": "a game",
}
CONFIG = tiny_model(max_position_embeddings=8).config


def check(output, **more):
    return checked_output(output, num_prompts=2, config=CONFIG, **more)


def changed(key, place, value):
    output = copy.deepcopy(GOOD)
    output[key][place] = value
    return output


# Output, and words of the message.
REFUSED = {
    "no dict": ([GOOD], "a list"),
    "no log-probs": ({"prompt_ids": [], "completion_ids": []}, "no logprobs"),
    "a prompt too many": (GOOD | {"prompt_ids": [[1], [2], [3]]}, "3 entries in prompt_ids for 2 prompts"),
    "a completion too few": (GOOD | {"completion_ids": [[1]]}, "1 completions for 2 prompts"),
    "log-probs of one completion": (GOOD | {"logprobs": [[-1.0, -1.0, -1.0]]}, "1 entries in logprobs"),
    "a mask of one completion": (GOOD | {"env_mask": [[1, 1, 1]]}, "1 entries in env_mask"),
    "a column of three": (GOOD | {"turns": [1, 2, 3]}, "3 entries in turns"),
    "a column that is no list": (GOOD | {"turns": torch.tensor([1, 2])}, "a Tensor as turns"),
    "a column of a reward argument": (GOOD | {"trainer_state": [1, 2]}, "'trainer_state'"),
    "a log-prob too few": (changed("logprobs", 0, [-1.0, -1.0]), r"2 entries in logprobs\[0\] for 3 tokens"),
    "a log-prob too many": (changed("logprobs", 1, [-1.0, -1.0]), r"2 entries in logprobs\[1\] for 1 tokens"),
    "a mask too short": (changed("env_mask", 0, [1]), r"1 entries in env_mask\[0\] for 3 tokens"),
    "a mask of weights": (changed("env_mask", 1, [0.5]), r"0.5 as env_mask\[1\]\[0\]"),
    "an empty prompt": (changed("prompt_ids", 1, []), r"no token in prompt_ids\[1\]"),
    "a number for a prompt": (changed("prompt_ids", 1, 5), r"5 as prompt_ids\[1\]"),
    "a fraction for an id": (changed("completion_ids", 1, [5.7]), r"5.7 as completion_ids\[1\]\[0\]"),
    "an id of 64 bits": (changed("completion_ids", 1, [2**32 + 5]), r"4294967301 as completion_ids\[1\]\[0\]"),
    "a negative id": (changed("prompt_ids", 0, [0, -1]), r"-1 as prompt_ids\[0\]\[1\]"),
    "an id beyond the vocabulary": (changed("completion_ids", 1, [len(TOKENIZER)]), rf"to {len(TOKENIZER) - 1},"),
    "a flag for an id": (changed("completion_ids", 1, [True]), r"True as completion_ids\[1\]\[0\]"),
    "a probability": (changed("logprobs", 1, [0.8]), r"0.8 as logprobs\[1\]\[0\]"),
    "an infinite log-prob": (changed("logprobs", 1, [-float("inf")]), r"-inf as logprobs\[1\]\[0\]"),
    "text for a log-prob": (changed("logprobs", 1, ["-1"]), r"'-1' as logprobs\[1\]\[0\]"),
    "beyond the context": (changed("prompt_ids", 0, [1] * 6), "max_position_embeddings=8"),
}


@pytest.mark.parametrize(("output", "words"), REFUSED.values(), ids=REFUSED)
def test_invalid_outputs_are_refused(output, words):
    with pytest.raises(ValueError, match=f"rollout_func .*{words}"):
        check(output)


def test_lag_needs_logprobs_and_tools_make_the_mask():
    with pytest.raises(ValueError, match="logprobs, which rollout_lag needs"):
        check(GOOD | {"logprobs": None}, needs_logprobs=True)
    with pytest.raises(ValueError, match="env_mask beside tools"):
        check(GOOD, has_tools=True)


def test_numbers_of_every_kind_become_new_lists():
    expected = {**GOOD, "env_mask": [[1, 0, 1], [1]]}
    checked = check(GOOD)
    assert checked == expected and check(GOOD | {"logprobs": None})["logprobs"] is None
    assert checked["completion_ids"][0] is not GOOD["completion_ids"][0]
    arrays = {"prompt_ids": [np.array([1, 2]), (3,)], "completion_ids": [torch.tensor([4, 5, 6]), [np.int32(7)]]}
    assert check(GOOD | arrays) == expected


def test_an_empty_completion_is_allowed():
    empty = {"completion_ids": [[4, 5, 6], []], "logprobs": [[-1.0] * 3, []], "env_mask": [[1, 1, 1], []]}
    assert check(GOOD | empty)["completion_ids"] == [[4, 5, 6], []]


def test_a_trainer_checks_what_its_rollout_function_returns(tmp_path):
    def shorter_mask(prompts, trainer):
        output = Replay(tools=True)(prompts, trainer)
        return output | {"env_mask": [mask[:-1] for mask in output["env_mask"]]}

    with pytest.raises(ValueError, match=r"entries in env_mask\[0\]"):
        build_trainer(tmp_path, replay=shorter_mask).train()


async def wrong_context(prompts, generate):
    await generate([[]] * len(prompts))


async def wrong_logprobs(prompts, generate):
    prompt_ids = [[1, 2]] * len(prompts)
    output = await generate(prompt_ids)
    return {"prompt_ids": prompt_ids, **output, "logprobs": [of[1:] for of in output["logprobs"]]}


@pytest.mark.parametrize(
    ("function", "words"),
    [(wrong_context, r"no token in prompt_ids\[0\]"), (wrong_logprobs, r"entries in logprobs\[0\]")],
)
def test_a_late_rollout_is_checked_before_its_rewards(tmp_path, function, words):
    with forked_engine():
        trainer = trainer_of(tmp_path, rollout_func=function, reward=digit_reward, save_strategy="no")
        with pytest.raises(FailedRun, match=f"rollout_func .*{words}"):
            trainer.train()
