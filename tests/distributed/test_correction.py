"""Token weights on two processes: they are where the rows are learnt from, extremes and statistics are of all rows."""

import os

import pytest
import torch
from processes import on_two
from replay import Replay, SteerAndVerlTrainer, build_trainer, trainable_weights


pytestmark = pytest.mark.trains


class Sampled(Replay):
    """Rows as if an engine had drawn them, which gave every token about the same probability."""

    def __call__(self, prompts, trainer):
        output = super().__call__(prompts, trainer)
        output["logprobs"] = [[-5.4 + 0.1 * (token % 3) for token in ids] for ids in output["completion_ids"]]
        return output


def train(output_dir, rows_per_process: int) -> dict:
    """Two generations of two updates; rows of wrong completions have no gradient and are left out."""
    trainer = build_trainer(
        output_dir,
        replay=Sampled(),
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=100.0,
        trainer_class=SteerAndVerlTrainer,
        token_weight_mapping="linear",
        hidden_state_stride=3,
        score_estimator="none",
        class_weighting="only_positive",
        group_layout="split",
        per_device_train_batch_size=rows_per_process,
        steps_per_generation=2,
        max_steps=4,
    )
    trainer.train()
    logs = [
        {k: v for k, v in e.items() if k.startswith(("sampling/", "steer/", "hidden/"))}
        for e in trainer.state.log_history
        if "loss" in e
    ]
    return {"weights": trainable_weights(trainer.model), "logs": logs}


def train_and_save(directory):
    torch.save(train(directory, rows_per_process=4), directory / f"of_{os.environ['RANK']}.pt")


def test_two_processes_learn_what_one_does(tmp_path):
    on_two(train_and_save, tmp_path, outputs=tmp_path)
    found, expected = torch.load(tmp_path / "of_0.pt"), train(tmp_path / "one", rows_per_process=8)
    for name, value in expected["weights"].items():
        assert torch.allclose(found["weights"][name], value, rtol=1e-5, atol=1e-6), name
    for of_two, of_one in zip(found["logs"], expected["logs"], strict=True):
        # the mean distance of float32 ratios from 1
        bonus = of_two.pop("hidden/bonus")
        assert bonus == pytest.approx(of_one.pop("hidden/bonus"), abs=6 * 2**-23)
        assert of_two == pytest.approx(of_one, rel=1e-5)
    assert [len(log) for log in expected["logs"]] == [9, 4, 9, 4]
