"""GenAC on two processes equals itself on one: weights of policy and critic, with DDP and with FSDP2, and a resumed
run."""

from functools import partial

import pytest
from support import actor_critics
from support.actor_critics_on_two import assert_two_processes_equal_one, train
from support.problems import CRITIC_PROMPT
from support.sharding import FSDP2_ENVIRONMENT

from pacs_trl.experimental.genac import GenACTrainer


pytestmark = [pytest.mark.trains, pytest.mark.slow]

CRITIC = {"critic_prompt": CRITIC_PROMPT, "critic_max_new_tokens": 5, "critic_pretraining_steps": 1, "max_segments": 3}


def build(output_dir, model_path, **settings):
    trainer = actor_critics.build(GenACTrainer, output_dir, model_path, **CRITIC, **settings)
    trainer._critic_prompt.parse = lambda text: len(text) % 11 / 10  # an untrained critic writes no tags
    return trainer


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, model_path):
    return train(partial(build, model_path=model_path), tmp_path_factory.mktemp("one"), 1)


@pytest.mark.parametrize("mode", [{}, FSDP2_ENVIRONMENT], ids=["ddp", "fsdp2"])
def test_two_processes_equal_one_and_resume(tmp_path, model_path, one_process, mode):
    assert_two_processes_equal_one(partial(build, model_path=model_path), tmp_path, one_process, "genac/", mode)
