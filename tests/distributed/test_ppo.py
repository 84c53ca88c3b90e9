"""PPO on two processes equals itself on one: weights of both models, with DDP and FSDP2, and a resumed run."""

from functools import partial

import pytest
from support import actor_critics
from support.actor_critics_on_two import assert_two_processes_equal_one, train
from support.sharding import FSDP2_ENVIRONMENT

from pacs_trl import PPOTrainer


pytestmark = [pytest.mark.trains, pytest.mark.slow]


def build(output_dir, model_path, **settings):
    return actor_critics.build(PPOTrainer, output_dir, model_path, **settings)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, model_path):
    return train(partial(build, model_path=model_path), tmp_path_factory.mktemp("one"), 1)


@pytest.mark.parametrize("mode", [{}, FSDP2_ENVIRONMENT], ids=["ddp", "fsdp2"])
def test_two_processes_equal_one_and_resume(tmp_path, model_path, one_process, mode):
    assert_two_processes_equal_one(partial(build, model_path=model_path), tmp_path, one_process, "ppo/", mode)
