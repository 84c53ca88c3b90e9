"""Runs whose vLLM server fails: they stop with their state saved, and go on from there."""

import pytest
from support.models import assert_same_models
from support.rollouts import addition_dataset
from support.runs import build_trainer
from support.vllm_server import LoopbackVLLM, play_installed, server_settings

from pacs_trl import PPOTrainer


@pytest.fixture
def installed(monkeypatch):
    play_installed(monkeypatch.setattr)


@pytest.fixture
def server(model_path):
    with LoopbackVLLM(model_path) as server:
        yield server


def trainer_with(server, model_path, output_dir, num_prompts=64, eval_dataset=None, **more):
    settings = {"learning_rate": 3e-3, "optim": "adamw_torch", "max_steps": 5, "save_steps": 100, **more}
    data = {"train_dataset": addition_dataset(num_prompts), "eval_dataset": eval_dataset}
    return build_trainer(output_dir, model=model_path, more=data, **(server_settings(server.url) | settings))


# settings, the generation that fails, the optimizer step whose state is saved, and the generations that have led to it
SCHEDULES = {
    "one update per generation": ({}, 2, 2, 2),
    "two generations per update": ({"gradient_accumulation_steps": 2, "steps_per_generation": 1}, 5, 2, 4),
    "PPO, whose critic goes on too": ({"steps_per_generation": 2, "trainer_class": PPOTrainer}, 2, 4, 2),
    # 2 prompts a generation, 10 an epoch: the third update has one generation only, the fourth has 5 and 6
    "an epoch that ends within an update": (
        {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "num_prompts": 10},
        *(6, 3, 5),
    ),
}


@pytest.mark.parametrize(("schedule", "fails", "step", "drawn"), SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.slow
def test_a_run_whose_server_dies_saves_its_state_and_resumes_bit_by_bit(
    tmp_path, installed, server, model_path, schedule, fails, step, drawn
):
    """The run stops with its state saved, and goes on from there as if nothing had happened."""
    straight = trainer_with(server, model_path, tmp_path / "straight", **schedule)
    straight.train()
    seeds, server.seeds = server.seeds, []
    server.fail_generation = fails
    stopped = trainer_with(server, model_path, tmp_path / "stopped", save_only_model=True, **schedule)
    (tmp_path / "stopped" / f"checkpoint-{step}").mkdir(parents=True)  # an old directory is written over
    with pytest.raises(
        RuntimeError, match=rf"(?s)stopped answering after optimizer step {step} .*engine is dead.*vllm serve"
    ) as error:
        stopped.train()
    checkpoint = tmp_path / "stopped" / f"checkpoint-{step}"
    assert checkpoint.is_dir() and str(checkpoint) in str(error.value)

    server.fail_generation, server.dead = None, False
    resumed = trainer_with(server, model_path, tmp_path / "stopped", **schedule)
    server.seeds = []
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert server.seeds == seeds[drawn:]
    assert_same_models(straight, resumed)
    names = ("loss", "reward", "completions/mean_length", "num_tokens")  # nothing is counted twice
    logs = [
        [[entry.get(name) for name in names] for entry in run.state.log_history[:5]] for run in (straight, resumed)
    ]
    assert logs[0] == logs[1]


def test_a_healthy_server_that_refuses_a_request_is_not_said_to_be_down(
    tmp_path, installed, server, model_path, monkeypatch
):
    """A prompt that does not fit, say: starting the server again would not help, and the error does not say that it is
    down."""
    monkeypatch.setitem(server.answers, "/v1/completions", 400)
    with pytest.raises(RuntimeError, match="is healthy, but did not generate after optimizer step 0 .*400"):
        trainer_with(server, model_path, tmp_path).train()
    trainer = trainer_with(server, model_path, tmp_path)
    server.dead = True
    with pytest.raises(RuntimeError, match="after optimizer step 0 .*status 503.*No optimizer step"):
        trainer.train()
    assert not list(tmp_path.glob("checkpoint-*"))


@pytest.mark.slow
def test_a_run_whose_server_dies_during_evaluation_resumes_after_the_last_step(
    tmp_path, installed, server, model_path
):
    """The optimizer step before it is over, and what it drew stays drawn."""
    settings = {"eval_strategy": "steps", "eval_steps": 2, "num_generations_eval": 2, "per_device_eval_batch_size": 2}
    stopped = trainer_with(server, model_path, tmp_path, eval_dataset=addition_dataset(2), **settings)
    server.fail_generation = 2
    with pytest.raises(RuntimeError, match="stopped answering after optimizer step 2 .*engine is dead"):
        stopped.train()
    server.fail_generation, server.dead = None, False
    straight, resumed = (trainer_with(server, model_path, tmp_path) for _ in range(2))
    straight.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same_models(straight, resumed)
