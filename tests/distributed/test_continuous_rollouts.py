"""Continuous rollouts on two processes: the first one has the worker, and both train on its groups."""

import pytest
import torch
from support.models import trainable_weights
from support.processes import on_two, run_and_save
from support.rollouts import addition_dataset
from support.runs import build_trainer
from support.scripted_worker import play_worker, server_of
from support.tolerances import rounding_atol
from support.vllm_server import server_settings
from transformers import AutoModelForCausalLM, TrainerCallback

from pacs_trl.rewards import VerificationArguments


class Taken(TrainerCallback):
    def __init__(self):
        self.positions: list[int] = []

    def on_step_end(self, args, state, control, **kwargs):
        self.positions += [group.position for group in self.trainer._source._taken]


def train(directory, model, url, batch_size, max_steps, resume=None, patch=setattr):
    play_worker(patch)
    taken = Taken()
    trainer = build_trainer(
        directory,
        model=model,
        more={"train_dataset": addition_dataset(12), "callbacks": [taken]},
        per_device_train_batch_size=batch_size,
        max_steps=max_steps,
        rollout_schedule="continuous",
        max_staleness=2,
        save_strategy="steps",
        save_steps=1,
        **server_settings(url),
    )
    taken.trainer = trainer
    trainer.train(resume_from_checkpoint=resume)
    return {"weights": trainable_weights(trainer.model), "positions": taken.positions}


@pytest.mark.slow
def test_two_processes_train_as_one_and_one_goes_on(tmp_path, model_path, monkeypatch):
    # This process resumes; other tests may have changed its settings.
    monkeypatch.setattr("pacs_trl.rewards._arguments", VerificationArguments())
    model = AutoModelForCausalLM.from_pretrained(model_path)
    with server_of(model) as server:
        on_two(
            run_and_save,
            train,
            (tmp_path / "two", model_path, server.url, 4, 4),
            tmp_path,
            outputs=tmp_path,
        )
        first, second = (torch.load(tmp_path / f"result.{rank}") for rank in range(2))
        server_weights = dict(server.weights)
        alone = train(tmp_path / "one", model_path, server.url, 8, 4, patch=monkeypatch.setattr)
        checkpoint = str(tmp_path / "two" / "checkpoint-3")
        rest = train(tmp_path / "two", model_path, server.url, 8, 6, checkpoint, patch=monkeypatch.setattr)
    assert first["positions"] == alone["positions"] == list(range(8))
    assert second["positions"] == []
    assert rest["positions"] == list(range(6, 12))
    assert server_weights.keys() == first["weights"].keys()
    for name, weight in first["weights"].items():
        assert torch.equal(weight, second["weights"][name])
        assert torch.allclose(weight, alone["weights"][name], atol=rounding_atol(10_000, 1.0)), name
