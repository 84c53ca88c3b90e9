"""Continuous rollouts with a real vLLM engine in the engine process."""

from types import SimpleNamespace

import pytest
import torch
from support.models import assert_same_models, load_weights
from support.rollouts import addition_dataset
from support.runs import Recorder, build_trainer, spy_on
from transformers import AutoModelForCausalLM

from pacs_trl import GRPOTrainer


SETTINGS = {
    "rollout_schedule": "continuous",
    "rollout_engine": "vllm",
    "max_staleness": 3,
    "max_completion_length": 40,
    "temperature": 1.3,
    "vllm_max_model_length": 64,
    "vllm_gpu_memory_utilization": 0.02,
    "optim": "adamw_torch",
    "learning_rate": 3e-3,
    "save_strategy": "steps",
    "save_steps": 1,
    "max_steps": 6,
}


def trainer_of(directory, checkpoint, callbacks=()):
    """A trainer, and the groups that it will have taken."""
    groups = []
    trainer = build_trainer(
        directory,
        model=AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32),
        trainer_class=GRPOTrainer,
        more={"train_dataset": addition_dataset(12), "callbacks": list(callbacks)},
        **SETTINGS,
    )
    trainer.eos_token_ids = [*trainer.eos_token_ids, *range(100, 120)]  # so that lengths differ
    create = trainer._create_source

    def create_source():
        source = create()
        spy_on(source, "_take_next", lambda *_: groups.extend(source.taken["finished"]))
        return source

    trainer._create_source = create_source
    return trainer, groups


@pytest.fixture(scope="module")
def straight(tmp_path_factory, checkpoint):
    """A run without a stop: its directory, trainer, groups, and the weights before each step."""
    directory, recorder = tmp_path_factory.mktemp("straight"), Recorder()
    trainer, groups = trainer_of(directory, checkpoint, [recorder])
    trainer.train()
    return SimpleNamespace(directory=directory, trainer=trainer, groups=groups, weights=recorder.weights)


def test_each_token_has_the_log_prob_of_the_weights_that_it_is_noted_with(checkpoint, straight):
    """Given the whole prefix, also where weights were replaced inside a completion."""
    policy = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    num_mixed = 0
    for group in straight.groups:
        for ids, logps, versions in zip(group.completion_ids, group.logps, group.versions, strict=True):
            num_mixed += len(set(versions)) > 1
            for version in set(versions):
                load_weights(policy, straight.weights[version])
                with torch.no_grad():
                    logits = policy(input_ids=torch.tensor([group.prompt_ids + ids])).logits[0] / 1.3
                all_logps = logits[len(group.prompt_ids) - 1 : -1].log_softmax(-1)
                expected = all_logps.gather(1, torch.tensor(ids)[:, None])[:, 0]
                is_of_version = torch.tensor(versions) == version
                assert (expected - torch.tensor(logps))[is_of_version].abs().max() < 1e-5
    assert num_mixed > 0
    assert len({group.staleness(number // 2) for number, group in enumerate(straight.groups)}) > 2


def test_two_runs_end_with_equal_bits(tmp_path, checkpoint, straight):
    trainer, groups = trainer_of(tmp_path, checkpoint)
    trainer.train()
    assert [vars(group) for group in groups] == [vars(group) for group in straight.groups]
    assert_same_models(straight.trainer, trainer)


def test_a_resumed_run_ends_with_equal_bits(tmp_path, checkpoint, straight):
    trainer, groups = trainer_of(tmp_path, checkpoint)
    trainer.train(resume_from_checkpoint=str(straight.directory / "checkpoint-3"))
    assert [vars(group) for group in groups] == [vars(group) for group in straight.groups[6:]]
    assert_same_models(straight.trainer, trainer)
