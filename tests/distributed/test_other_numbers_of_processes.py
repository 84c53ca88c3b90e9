"""A run that resumes on another number of processes ends with the weights of one that was not stopped, but for the
order of sums."""

import os
from unittest.mock import patch

import pytest
import torch
from support.models import relative_error, tiny_model, trainable_weights
from support.processes import on_several, run_and_save
from support.rollouts import Replay, addition_dataset
from support.runs import build_trainer
from support.vllm_server import LoopbackVLLM, play_installed, server_settings

from pacs_trl import GRPOTrainer, PACSTrainer, REALTrainer, RLOOTrainer, rewards


pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.trains]

# 16 completions per generation batch and 8 per optimizer step, in all
SIZES = {
    1: {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "steps_per_generation": 8},
    2: {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "steps_per_generation": 2},
    # shares of 6, 5, and 5
    3: {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "steps_per_generation": 2}
    | {"completions_per_step": 8},
}
RUNS = {
    "PACS": {"trainer_class": PACSTrainer},
    "PACS, snapshot": {"trainer_class": PACSTrainer, "reference": "snapshot", "reference_reset_steps": 2},
    "GRPO, used twice": {"trainer_class": GRPOTrainer, "num_iterations": 2, "beta": 0.1, "shuffle_minibatches": True},
    "REAL": {"trainer_class": REALTrainer},
    "RLOO": {"trainer_class": RLOOTrainer, "beta": 0.05},
}
# 24 completions per generation batch and 18 per optimizer step, in all
SLICED = {"gradient_accumulation_steps": 3, "steps_per_generation": 4, "num_iterations": 2}
SHARED = {"save_strategy": "steps", "save_steps": 1, "max_steps": 6, "optim": "adamw_torch", "learning_rate": 1e-3}
STOPPED_AFTER = 3  # in the middle of a generation batch, or of its use


def train(directory, number, name, resume=None):
    replay = Replay()
    trainer = build_trainer(directory / name, replay=replay, **SHARED, **SIZES[number], **RUNS[name])
    trainer.train(resume_from_checkpoint=resume)
    history = [e for e in trainer.state.log_history if "loss" in e]
    return {"weights": trainable_weights(trainer.model), "losses": [e["loss"] for e in history]}


def train_sliced(directory, number, resume=None):
    settings = SHARED | SLICED | {"per_device_train_batch_size": 6 // number, "trainer_class": GRPOTrainer}
    trainer = build_trainer(directory / "sliced", replay=Replay(logprobs=-5.0), **settings)
    trainer.train(resume_from_checkpoint=resume)
    mismatch = [{k: x for k, x in e.items() if k.startswith("sampling/")} for e in trainer.state.log_history]
    return {"weights": trainable_weights(trainer.model), "mismatch": mismatch}


def refusal_of_another_number(directory, number) -> str:
    """What a run says that would continue that of one process with optimizer steps of mixed slots."""
    with pytest.raises(ValueError, match="does not continue on") as error:
        train_sliced(directory / f"1 to {number}", number, checkpoint(directory / "1", "sliced"))
    return str(error.value)


def checkpoint(directory, name) -> str:
    return str(directory / name / f"checkpoint-{STOPPED_AFTER}")


def on_processes(directory):
    """Runs from the start, and runs that continue those of one process."""
    number = int(os.environ["WORLD_SIZE"])
    return {
        "straight": {name: train(directory / str(number), number, name) for name in RUNS},
        "sliced": train_sliced(directory / str(number), number) if number == 3 else None,
        "refusal": refusal_of_another_number(directory, number) if number == 3 else None,
        "continued": {
            name: train(directory / f"1 to {number}", number, name, checkpoint(directory / "1", name)) for name in RUNS
        },
    }


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    directory = tmp_path_factory.mktemp("one")
    with patch.object(rewards, "_arguments", rewards.VerificationArguments()):  # of the processes, too
        return directory, {name: train(directory / "1", 1, name) for name in RUNS}, train_sliced(directory / "1", 1)


def runs_of(number: int, one) -> dict[str, dict]:
    directory, result_of_one, sliced_of_one = one
    on_several(number, run_and_save, on_processes, (directory,), directory, outputs=directory)
    result, before = torch.load(directory / "result.0"), directory / str(number)
    with patch.object(rewards, "_arguments", rewards.VerificationArguments()):
        back = {name: train(directory / f"{number} to 1", 1, name, checkpoint(before, name)) for name in RUNS}
    sliced = sliced_of_one, result["sliced"]
    runs = {"1": result_of_one, "N": result["straight"], "1 to N": result["continued"], "N to 1": back}
    return runs | {"sliced": sliced}


@pytest.fixture(scope="module")
def two(one):
    return runs_of(2, one)


@pytest.fixture(scope="module")
def three(one):
    return runs_of(3, one)


# Shares of three processes are unequal.
@pytest.mark.parametrize("number", ["two", "three"])
@pytest.mark.parametrize("change", ["N", "1 to N", "N to 1"])
@pytest.mark.parametrize("name", RUNS)
def test_the_weights_are_those_of_a_run_without_a_stop(request, name, change, number):
    runs = request.getfixturevalue(number)
    expected, result = runs["1"][name], runs[change][name]
    start = trainable_weights(tiny_model())
    change_of_weights = {key: expected["weights"][key] - start[key] for key in start}
    assert relative_error({key: result["weights"][key] - start[key] for key in start}, change_of_weights) < 1e-5
    cancelling = 1e-6 if name == "RLOO" else None  # terms of about 1 with the ratios 1, of which the losses are sums
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5, abs=cancelling)


def test_steps_of_mixed_slots_do_not_depend_on_the_number_of_processes(three):
    """And do not continue on another one."""
    start = trainable_weights(tiny_model())
    alone, shared = ({key: run["weights"][key] - start[key] for key in start} for run in three["sliced"])
    assert relative_error(shared, alone) < 1e-5
    for expected, measured in zip(*(run["mismatch"] for run in three["sliced"]), strict=True):
        assert measured == pytest.approx(expected, rel=1e-4)
    assert any(three["sliced"][0]["mismatch"])


def train_with_server(directory, model, url, number, resume=None):
    play_installed(setattr)
    trainer = build_trainer(
        directory,
        model=model,
        more={"train_dataset": addition_dataset(64)},
        **server_settings(url) | SIZES[number] | SHARED,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainable_weights(trainer.model)


def test_a_vllm_server_generates_the_same_completions_for_another_number(tmp_path, model_path):
    stopped = str(tmp_path / "2" / f"checkpoint-{STOPPED_AFTER}")
    with LoopbackVLLM(model_path) as server:
        arguments = train_with_server, (tmp_path / "2", model_path, server.url, 2), tmp_path
        on_several(2, run_and_save, *arguments, outputs=tmp_path)
    with LoopbackVLLM(model_path) as server:
        arguments = train_with_server, (tmp_path / "1", model_path, server.url, 1), tmp_path / "1"
        (tmp_path / "1").mkdir()
        on_several(1, run_and_save, *arguments, outputs=tmp_path / "1")
    with LoopbackVLLM(model_path) as server:
        arguments = train_with_server, (tmp_path / "again", model_path, server.url, 1, stopped), tmp_path / "again"
        (tmp_path / "again").mkdir()
        on_several(1, run_and_save, *arguments, outputs=tmp_path / "again")
    start = trainable_weights(tiny_model())
    one_process, two_processes, continued = (torch.load(tmp_path / name / "result.0") for name in ("1", ".", "again"))
    change = {name: one_process[name] - start[name] for name in start}
    for weights in (two_processes, continued):
        assert relative_error({name: weights[name] - start[name] for name in start}, change) < 1e-5
