"""A run that resumes on another number of processes ends with the weights of one that was not stopped, but for the
order of sums."""

import os

import pytest
import torch
from processes import on_several
from replay import Replay, build_trainer, relative_error, tiny_model, trainable_weights

from pacs_trl import GRPOTrainer, PACSTrainer, REALTrainer


pytestmark = [pytest.mark.distributed, pytest.mark.trains]

# 16 completions per generation batch and 8 per optimizer step, in all
SIZES = {
    1: {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "steps_per_generation": 8},
    2: {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "steps_per_generation": 2},
}
RUNS = {
    "PACS": {"trainer_class": PACSTrainer},
    "PACS, snapshot": {"trainer_class": PACSTrainer, "reference": "snapshot", "reference_reset_steps": 2},
    "GRPO, used twice": {"trainer_class": GRPOTrainer, "num_iterations": 2, "beta": 0.1, "shuffle_minibatches": True},
    "REAL": {"trainer_class": REALTrainer},
}
SHARED = {"save_strategy": "steps", "save_steps": 1, "max_steps": 6, "optim": "adamw_torch", "learning_rate": 1e-3}
STOPPED_AFTER = 3  # in the middle of a generation batch, or of its use


def train(directory, number, name, resume=None):
    replay = Replay()
    trainer = build_trainer(directory / name, replay=replay, **SHARED, **SIZES[number], **RUNS[name])
    trainer.train(resume_from_checkpoint=resume)
    history = [e for e in trainer.state.log_history if "loss" in e]
    return {"weights": trainable_weights(trainer.model), "losses": [e["loss"] for e in history]}


def checkpoint(directory, name) -> str:
    return str(directory / name / f"checkpoint-{STOPPED_AFTER}")


def on_two_processes(directory):
    """Runs from the start, and runs that continue those of one process."""
    return {
        "straight": {name: train(directory / "two", 2, name) for name in RUNS},
        "continued": {
            name: train(directory / "two again", 2, name, checkpoint(directory / "one", name)) for name in RUNS
        },
    }


def run_and_save(directory):

    torch.save(on_two_processes(directory), directory / f"result.{os.environ['RANK']}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    one = {name: train(directory / "one", 1, name) for name in RUNS}
    on_several(2, run_and_save, directory, outputs=directory)
    two = torch.load(directory / "result.0.pt")
    back = {name: train(directory / "one again", 1, name, checkpoint(directory / "two", name)) for name in RUNS}
    return {"one": one, "one to two": two["continued"], "two": two["straight"], "two to one": back}


@pytest.mark.parametrize("change", ["two", "one to two", "two to one"])
@pytest.mark.parametrize("name", RUNS)
def test_the_weights_are_those_of_a_run_without_a_stop(runs, name, change):
    expected, result = runs["one"][name], runs[change][name]
    start = trainable_weights(tiny_model())
    moved = {key: expected["weights"][key] - start[key] for key in start}
    moved_here = {key: result["weights"][key] - start[key] for key in start}
    assert relative_error(moved_here, moved) < 1e-5
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)
