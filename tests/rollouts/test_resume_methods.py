"""Runs of each method that go on from a checkpoint, within a generation and between two, end with the same bits."""

import pytest
import torch
from support.long_way import RaggedGroups
from support.rollouts import Replay, digit_reward
from support.runs import assert_resumes, build_trainer
from support.seeds import shifted

from pacs_trl import GRPOTrainer, PPOTrainer, REALTrainer, RLOOTrainer


pytestmark = pytest.mark.trains

# completions are sampled; two minibatches are used twice each
REUSED = {"reward": digit_reward, "steps_per_generation": 2, "num_iterations": 2, "max_steps": 6}
RAGGED = {"trainer_class": RaggedGroups, "replay": Replay(), "per_device_train_batch_size": 16}
RAGGED |= {"steps_per_generation": 2, "max_steps": 4, "actor_term_coef": 0.5}
# the KL reference follows the policy after each step
FOLLOWED = {
    "beta": 0.1,
    "sync_ref_model": True,
    "ref_model_sync_steps": 1,
    "ref_model_mixup_alpha": 0.9,
    "max_steps": 3,
}

METHODS = {  # settings, and the steps after which a run is resumed
    "grpo": (REUSED | {"trainer_class": GRPOTrainer, "beta": 0.1}, [1, 3, 4]),
    "cispo": (REUSED | {"trainer_class": GRPOTrainer, "loss_type": "cispo", "top_entropy_quantile": 0.5}, [1, 3, 4]),
    "rloo": (REUSED | {"trainer_class": RLOOTrainer, "beta": 0.1}, [1, 3, 4]),
    "real": (REUSED | {"trainer_class": REALTrainer}, [1, 3, 4]),
    "groups of different sizes": (RAGGED, [3]),
    "grpo, reference that follows": (FOLLOWED | {"trainer_class": GRPOTrainer}, [2]),
    "ppo, reference that follows": (FOLLOWED | {"trainer_class": PPOTrainer}, [2]),
}


# Their losses are of the kinds of GRPO's and of PACS's, and the reference is saved as GRPO's.
SLOW = ("cispo", "real", "ppo, reference that follows")


@pytest.mark.parametrize(
    ("settings", "steps"),
    [pytest.param(*METHODS[name], id=name, marks=[pytest.mark.slow] if name in SLOW else []) for name in METHODS],
)
def test_a_resumed_run_is_bit_identical(tmp_path, model_path, settings, steps):
    def build(output_dir):
        torch.manual_seed(shifted(0))
        saving = {"save_strategy": "steps", "save_steps": 1}
        return build_trainer(output_dir, model=model_path, **(saving | settings))

    assert_resumes(build, tmp_path, *steps)
