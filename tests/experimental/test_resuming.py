"""Runs of related methods that go on from a checkpoint, within a generation or between two, end with the same bits."""

import pytest
import torch
from support.models import LORA
from support.related_methods import SteerAndVerlTrainer
from support.rollouts import Replay, boxed, digit_reward
from support.runs import assert_resumes, build_trainer
from support.seeds import shifted

from pacs_trl.experimental.process_labels import ProcessLabelsTrainer
from pacs_trl.experimental.rlpr import RLPRTrainer, probability_reward


pytestmark = pytest.mark.trains


def digit_steps(completions, completion_ids, **kwargs):
    """Labels of the first tokens, and of the text."""
    outcomes = digit_reward(completions)
    return [
        [*((t, ids[t] % 2) for t in range(min(ids[0] % 4, len(ids) - 1))), (len(ids) - 1, y)]
        for ids, y in zip(completion_ids, outcomes, strict=True)
    ]


# old log-probs and entropies are no longer those of the policy; with the running means of VERL
STEER = {"trainer_class": SteerAndVerlTrainer, "replay": Replay(), "reference": "snapshot", "hidden_state_stride": 3}
STEER |= {"steps_per_generation": 2, "num_iterations": 2, "max_steps": 4}
RLPR = {"trainer_class": RLPRTrainer, "reward": probability_reward, "more": {"rollout_func": boxed}}
RLPR |= {"max_completion_length": 12, "max_steps": 3, "learning_rate": 0.5, "spread_filter": 0.5}
TWO_REWARDS = {"reward": [probability_reward, digit_reward], "reward_weights": [0.5, 0.5]}

LABELS = {"reward": digit_steps, "trainer_class": ProcessLabelsTrainer, "more": {"peft_config": LORA}, "max_steps": 6}
LABELS |= {"steps_per_generation": 2}
METHODS = {  # settings, and the steps after which a run is resumed
    "STEER and VERL": (STEER, [2]),
    "STEER and VERL, LoRA": (STEER | {"more": {"peft_config": LORA}}, [2]),
    "labels in several places, LoRA": (LABELS, [2, 3, 5]),
    "RLPR": (RLPR, [1]),
    "RLPR, LoRA": (RLPR | TWO_REWARDS | {"more": {"rollout_func": boxed, "peft_config": LORA}}, [1]),
}


SLOW = ("STEER and VERL", "RLPR, LoRA")  # others resume the same state


@pytest.mark.parametrize(
    ("settings", "steps"),
    [pytest.param(*METHODS[name], id=name, marks=[pytest.mark.slow] if name in SLOW else []) for name in METHODS],
)
def test_a_resumed_run_is_bit_identical(tmp_path, model_path, settings, steps):
    def build(output_dir, **changed):
        torch.manual_seed(shifted(0))
        saving = {"save_strategy": "steps", "save_steps": 1}
        return build_trainer(output_dir, model=model_path, **(saving | settings | changed))

    straight, again = assert_resumes(build, tmp_path, *steps)
    for name in ("_spreads", "_without_reasoning", "verl_means"):  # of RLPR and VERL
        assert vars(again).get(name) == vars(straight).get(name) != [0.0], name
    if isinstance(straight, SteerAndVerlTrainer):
        with pytest.raises(ValueError, match="token_weight_min"):
            build(tmp_path, token_weight_min=0.7).train(str(tmp_path / "straight" / "checkpoint-2"))
