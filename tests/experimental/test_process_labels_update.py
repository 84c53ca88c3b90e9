"""Gradients of labels in several places of a completion, against one step in float64 without padding (long_way.py)."""

import pytest
import torch
from support.long_way import CORRECTION, TWO_UPDATES, WeightedTokens, train_and_compare
from support.models import LORA, trainable_weights
from support.rollouts import Replay
from support.runs import build_trainer
from support.seeds import shifted

from pacs_trl.experimental.process_labels import ProcessLabelsTrainer


pytestmark = pytest.mark.trains

SNAPSHOT = {**TWO_UPDATES, "reference": "snapshot"}
SMALL_MICRO_BATCHES = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "steps_per_generation": 8}
STEPS = {
    "aligned": {},
    "whole groups": {"group_layout": "whole", **TWO_UPDATES},
    "split groups, padded": {"group_layout": "split", "packing": "never", **TWO_UPDATES},
    "mean log-probability, scaled": {"proxy": "mean_logp", "pacs_beta": 0.5, **TWO_UPDATES},
    "groups larger than micro-batches": {**SMALL_MICRO_BATCHES, "max_steps": 4, "class_weighting": "only_positive"},
    "truncated and masked, snapshot": {**SNAPSHOT, "mask_truncated_completions": True, "class_weighting": "none"},
    "two iterations": {"num_iterations": 2, "max_steps": 4},
}


@pytest.mark.parametrize("settings", STEPS.values(), ids=STEPS)
def test_gradient_of_labels_in_several_places_equals_the_long_way(tmp_path, settings):
    replay = Replay(steps=True, unverifiable=0.1, tools="mask_truncated_completions" in settings)
    trainer, _ = train_and_compare(tmp_path, replay, trainer_class=ProcessLabelsTrainer, **settings)
    assert 0.3 < trainer.state.log_history[0]["process/labels"] < 3


def test_gradient_with_token_weights_kl_term_and_lora_equals_the_long_way(tmp_path, model_path):
    settings = {**CORRECTION, "beta": 0.1, **TWO_UPDATES}

    class Both(WeightedTokens, ProcessLabelsTrainer):
        pass

    train_and_compare(tmp_path, Replay(steps=True), model=model_path, trainer_class=Both, **settings)
    torch.manual_seed(shifted(0))
    settings = {"trainer_class": ProcessLabelsTrainer, "peft_config": LORA, **TWO_UPDATES}
    train_and_compare(tmp_path, Replay(steps=True), **settings)


@pytest.mark.parametrize("settings", [TWO_UPDATES, {**SNAPSHOT, "group_layout": "split"}], ids=["plain", "snapshot"])
def test_one_position_for_each_completion_is_plain_pacs_bit_by_bit(tmp_path, settings):
    def outcomes(completions, label, completion_ids, **kwargs):
        return [None if y is None else [(len(ids) - 1, y)] for ids, y in zip(completion_ids, label)]

    runs = []
    for arguments in ({}, {"reward": outcomes, "trainer_class": ProcessLabelsTrainer}):
        trainer = build_trainer(tmp_path, replay=Replay(unverifiable=0.1, soft=True), **arguments, **settings)
        trainer.train()
        kept = ("loss", "grad_norm", "entropy", "pacs/")
        logs = [{k: v for k, v in e.items() if k.startswith(kept)} for e in trainer.state.log_history[:-1]]
        runs.append((logs, trainable_weights(trainer.model)))
    assert runs[0][0] == runs[1][0] and len(runs[0][0]) == 4
    assert all(torch.equal(weight, runs[1][1][name]) for name, weight in runs[0][1].items())
