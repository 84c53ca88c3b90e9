"""Evaluation during training: the weights of a run with it are those of a run without it, bit for bit."""

import copy
import random

import numpy as np
import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from pacs_trl.data import build_prompt
from pacs_trl.evaluation.benchmarks import load_benchmark
from pacs_trl.evaluation.callback import EvaluationCallback, preserved_random_states
from pacs_trl.evaluation.sampling import SamplingSettings


def noisy_reward(completions, **kwargs):
    """Rewards that read every global random state: if one is disturbed, the weights differ."""
    noise = random.random() + np.random.rand() + torch.rand(()).item()
    return [len(completion[0]["content"]) % 3 + noise * i for i, completion in enumerate(completions)]


def make_trainer(boxing_model, output_dir, **config):
    model, tokenizer = boxing_model
    sums = [{"prompt": build_prompt(f"{a}+{b}", instruction="")} for a in range(4) for b in range(4)]
    args = GRPOConfig(
        output_dir=str(output_dir),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        max_steps=4,
        learning_rate=1e-2,
        logging_steps=2,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        seed=3,
        **config,
    )
    return GRPOTrainer(
        model=copy.deepcopy(model),
        processing_class=tokenizer,
        reward_funcs=noisy_reward,
        args=args,
        train_dataset=Dataset.from_list(sums),
    )


def train(boxing_model, output_dir, sums=None, every_steps=2, **config):
    trainer = make_trainer(boxing_model, output_dir, **config)
    if sums is not None:
        trainer.add_callback(
            EvaluationCallback(
                trainer,
                [load_benchmark(f"math_500={sums}")],
                every_steps=every_steps,
                n=8,
                ks=[1, 8],
                settings=SamplingSettings(1.0, 1.0, 0, 8),
                prompt_instruction="",
            )
        )
    trainer.train()
    return trainer


@pytest.mark.parametrize("config", [{}, {"gradient_checkpointing": True}])
def test_weights_are_bit_equal_with_and_without(boxing_model, sums, tmp_path, config):
    plain = train(boxing_model, tmp_path / "plain", **config)
    watched = train(boxing_model, tmp_path / "watched", sums, **config)
    start = boxing_model[0].state_dict()
    moved = False
    for name, weight in plain.model.state_dict().items():
        assert torch.equal(weight, watched.model.state_dict()[name]), name
        moved = moved or not torch.equal(weight, start[name])
    assert moved
    for before, after in zip(
        (log for log in plain.state.log_history if "loss" in log),
        (log for log in watched.state.log_history if "loss" in log),
        strict=True,
    ):
        timed = {"epoch", "num_tokens", "reward", "loss", "entropy", "grad_norm"}
        assert {key: before[key] for key in timed & before.keys()} == {key: after[key] for key in timed & after.keys()}


def test_the_curve_is_in_the_log(boxing_model, sums, tmp_path):
    trainer = train(boxing_model, tmp_path, sums, every_steps=3)
    curve = [log for log in trainer.state.log_history if "eval_math_500/pass@1" in log]
    # Before the first step, every third step, and after the last one.
    assert [log["step"] for log in curve] == [0, 3, 4]
    assert all(0 <= log["eval_math_500/pass@1"] <= log["eval_math_500/pass@8"] <= 1 for log in curve)
    assert curve[0]["eval_math_500/pass@8"] > 0 and 0 < curve[0]["eval_math_500/mean_tokens"] <= 8


def test_evaluation_of_the_same_weights_repeats(boxing_model, sums, tmp_path):
    runs = [train(boxing_model, tmp_path / name, sums) for name in ("a", "b")]
    curves = [[log for log in run.state.log_history if "eval_math_500/pass@1" in log] for run in runs]
    assert curves[0] == curves[1]


def test_random_states_come_back_after_an_error():
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    with pytest.raises(KeyError), preserved_random_states():
        random.random(), np.random.rand(3), torch.rand(3)
        raise KeyError
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[:2]
    assert torch.equal(torch.get_rng_state(), states[2])


@pytest.mark.parametrize(
    ("settings", "message"), [({"every_steps": 0}, "every_steps"), ({"every_steps": 1, "ks": [2]}, "1 <= k <= n")]
)
def test_settings_are_checked(boxing_model, sums, tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        EvaluationCallback(None, [], **settings)
