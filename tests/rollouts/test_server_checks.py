"""Refusals of continuous rollouts before the model is loaded: servers, code of the user, and data."""

import copy

import pytest
from datasets import Dataset
from support.models import TOKENIZER
from support.rollouts import addition_dataset, digit_reward
from support.runs import build_trainer
from support.vllm_server import LoopbackVLLM, play_installed, server_settings
from torch import nn

from pacs_trl.rollouts import server_checks
from pacs_trl.rollouts.checks import serve_command


SETTINGS = {"rollout_schedule": "continuous", "max_completion_length": 16}


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    play_installed(monkeypatch.setattr)
    monkeypatch.setattr(server_checks, "find_spec", lambda name: True)


@pytest.fixture
def server(model_path):
    with LoopbackVLLM(model_path) as server:
        yield server


def refused(tmp_path, server, model_path, message, reward=None, more=None, **settings):
    """The message has two sentences: what is wrong, and what to do."""
    with pytest.raises(ValueError, match=message) as error:
        build_trainer(
            tmp_path, model=model_path, reward=reward, more=more, **(SETTINGS | server_settings(server.url) | settings)
        )
    assert "from_pretrained" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parallel_config": {}, "weight_transfer_config": None}, "neither our worker extension nor the NCCL backend"),
        ({"model_config": {"dtype": "torch.bfloat16"}}, "computes in bfloat16, and training in float32"),
        ({"model_config": {"max_model_len": 20}}, "a context of 20 tokens, and prompts with completions have"),
        ({"model_config": {"logprobs_mode": "raw_logprobs"}}, "reports raw_logprobs"),
        ({"scheduler_config": {"stream_interval": 4}}, "--stream-interval"),
        ({"scheduler_config": {"max_num_batched_tokens": 2048}}, "Add --max-num-batched-tokens 8192"),
    ],
    ids=str,
)
def test_a_server_that_cannot_generate_continuously(tmp_path, server, model_path, change, message):
    config = server.info["vllm_config"]
    for part, values in change.items():
        config[part] = values if part not in ("model_config", "scheduler_config") else config[part] | values
    refused(tmp_path, server, model_path, f"The vLLM server at {server.url} .*{message}.*--worker-extension-cls")


def test_a_server_without_development_mode(tmp_path, server, model_path):
    server.answers["/server_info"] = 404
    refused(tmp_path, server, model_path, "has no development endpoints.*VLLM_SERVER_DEV_MODE=1")


def test_a_version_of_vllm_that_was_not_tested(tmp_path, server, model_path):
    server.vllm_version = "0.30.2"
    refused(tmp_path, server, model_path, "has version 0.30.2, and rollout_schedule: continuous is tested with 0.31")


def test_a_server_with_another_model(tmp_path, server, model_path):
    server.models["data"][0] |= {"id": "other", "root": "other"}
    refused(tmp_path, server, model_path, "serves 'other', but this run trains.*--worker-extension-cls")


def test_the_command_of_the_message_starts_such_a_server(tmp_path, server, model_path):
    """On CPUs by another module, and with as many tokens in a batch as slots have."""
    settings = SETTINGS | server_settings(server.url) | {"vllm_max_model_length": 64, "max_staleness": 1}
    args = build_trainer(tmp_path, model=model_path, **settings).args
    command = serve_command("model", args=args, dtype="float32")
    assert "python -m vllm.entrypoints.openai.api_server --model model --max-num-seqs 16" in command
    assert "--max-num-batched-tokens 1024" in command
    args.use_cpu = False
    assert "VLLM_SERVER_DEV_MODE=1 vllm serve model --max-model-len 64 --dtype bfloat16" in serve_command(
        "model", args=args, dtype="bfloat16"
    )


def test_code_of_the_user_that_cannot_run_in_another_process(tmp_path, server, model_path):
    def local_reward(completions, **kwargs):
        return digit_reward(completions)

    def needs_policy(completions, compute_logps, **kwargs):
        return digit_reward(completions)

    for reward in (local_reward, lambda completions, **kwargs: digit_reward(completions)):
        refused(tmp_path, server, model_path, "sends the reward function .* to another process, which fails", reward)
    refused(tmp_path, server, model_path, "no `compute_logps` for 'needs_policy'. Remove", needs_policy)
    refused(tmp_path, server, model_path, "has no reward model", nn.Linear(2, 1))
    refused(tmp_path, server, model_path, "sends the tool 'local_tool'", digit_reward, {"tools": [local_tool_of()]})


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
    refused(tmp_path, server, model_path, "no `response_template`.*Set `response_template`", digit_reward, more)


def test_data_that_the_worker_cannot_read(tmp_path, server, model_path):
    text = Dataset.from_list([{"prompt": "1 + 1 =", "solution": "2"}] * 4)
    refused(tmp_path, server, model_path, "prompts that are lists of messages", more={"train_dataset": text})
    stream = {"train_dataset": addition_dataset().to_iterable_dataset()}
    refused(tmp_path, server, model_path, "does not support a streaming dataset", more=stream, max_steps=2)
    more = {"rollout_func": lambda prompts, trainer: {}}
    refused(tmp_path, server, model_path, "does not support rollout_func", digit_reward, more)


def test_aiohttp_is_missing(tmp_path, server, model_path, monkeypatch):
    monkeypatch.setattr(server_checks, "find_spec", lambda name: None)
    refused(tmp_path, server, model_path, "needs aiohttp, which is not installed. Run `pip install aiohttp`")
