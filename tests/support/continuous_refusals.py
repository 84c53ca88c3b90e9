"""Runs with continuous rollouts that are refused before the model is loaded, with a vLLM server on this machine."""

import pytest

from support.runs import build_trainer
from support.vllm_server import server_settings


SETTINGS = {"rollout_schedule": "continuous", "max_completion_length": 16}


def assert_continuous_is_refused(tmp_path, server, model_path, message, reward=None, more=None, **settings):
    """The message has two sentences: what is wrong, and what to do."""
    with pytest.raises(ValueError, match=message) as error:
        build_trainer(
            tmp_path, model=model_path, reward=reward, more=more, **(SETTINGS | server_settings(server.url) | settings)
        )
    assert "from_pretrained" not in str(error.value)
