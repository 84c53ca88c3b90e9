"""Evaluation during training: the weights of a run with it are those of a run without it, bit for bit."""

import copy
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from pacs_trl import PACSConfig, PACSTrainer
from pacs_trl.data import build_prompt
from pacs_trl.evaluation.benchmarks import load_benchmark
from pacs_trl.evaluation.callback import EvaluationCallback, preserved_random_states
from pacs_trl.evaluation.requests import SamplingSettings, sample_seed


def noisy_reward(completions, **kwargs):
    """Rewards in [0, 1] that read every global random state: if one is disturbed, the weights differ."""
    noise = (random.random() + np.random.rand() + torch.rand(()).item()) / 3
    return [(len(completion[0]["content"]) + noise * i) % 1 for i, completion in enumerate(completions)]


TRAINERS = {"grpo": (GRPOTrainer, GRPOConfig), "pacs": (PACSTrainer, PACSConfig)}


def make_trainer(boxing_model, output_dir, method="grpo", **config):
    model, tokenizer = boxing_model
    sums = [{"prompt": build_prompt(f"{a}+{b}", instruction="")} for a in range(4) for b in range(4)]
    trainer_class, config_class = TRAINERS[method]
    args = config_class(
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
    return trainer_class(
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


@pytest.mark.parametrize("config", [{}, {"gradient_checkpointing": True}, {"method": "pacs"}])
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


class LoopbackVLLM:
    """What TRL's `vllm_generation` does around an engine, with an engine that answers with the seed of the request."""

    temperature, top_p, top_k, min_p, repetition_penalty, max_completion_length = 1.0, 1.0, 0, None, 1.0, 8

    def __init__(self, mode):
        self.mode, self.generation_kwargs, self.seen, self.num_syncs = mode, {}, [], 0
        self.llm = Engine()
        healthy = SimpleNamespace(get=lambda url: SimpleNamespace(status_code=200))
        self.vllm_client = SimpleNamespace(generate=None, session=healthy, base_url="")

    def sync_weights(self):
        self.num_syncs += 1

    def generate(self, prompts, images, num_generations, profiler):
        params = SamplingParams(seed=self.generation_kwargs.get("seed"), temperature=self.temperature)
        if self.mode == "colocate":
            answers = self.llm.generate(prompts, sampling_params=params)
        else:
            answers = [[params.seed % 7, params.seed % 5] for _ in prompts]
        self.seen.append((params.seed, self.temperature, self.max_completion_length, len(prompts)))
        return prompts, answers, [[[0.0]] * len(answer) for answer in answers], None


class SamplingParams(SimpleNamespace):
    def clone(self):
        return SamplingParams(**vars(self))


class Engine:
    def generate(self, prompts, sampling_params):
        each = sampling_params if isinstance(sampling_params, list) else [sampling_params] * len(prompts)
        return [[params.seed % 7, params.seed % 5] for params in each]


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_a_vllm_evaluation_takes_no_seed_of_training(boxing_model, sums, tmp_path, mode):
    trainer = make_trainer(boxing_model, tmp_path, "pacs")
    trainer.use_vllm, trainer.vllm_mode, trainer.vllm_generation = True, mode, LoopbackVLLM(mode)
    trainer._last_loaded_step = -1
    trainer._seed_requests()
    prompt_ids = [[1, 2], [3]]
    first = trainer._generate_single_turn(prompt_ids, None, {}, 1)[0]
    before = vars(trainer)["_num_requests"], copy.deepcopy(trainer._metrics)
    benchmark = load_benchmark(f"math_500={sums}")
    settings = SamplingSettings(0.5, 1.0, 0, 2)
    callback = EvaluationCallback(trainer, [benchmark], every_steps=1, n=2, settings=settings, prompt_instruction="")
    trainer.vllm_generation.seen.clear()
    drawn = callback._draw(benchmark)
    seeds = [sample_seed(0, "math_500", sample) for sample in range(2)]
    assert trainer.vllm_generation.seen == [(seed, 0.5, 2, 12) for seed in seeds]
    for (_, sample), completion in drawn.items():
        tokens = [seeds[sample] % 7, seeds[sample] % 5]
        assert completion.text == boxing_model[1].decode(tokens, skip_special_tokens=True)
        assert completion.num_tokens == 2
    # The next request of training has the seed it would have had, and nothing of the evaluation is in its metrics.
    assert (trainer._num_requests, trainer._metrics) == before and trainer.vllm_generation.temperature == 1.0
    second = trainer._generate_single_turn(prompt_ids, None, {}, 1)[0]
    again = make_trainer(boxing_model, tmp_path, "pacs")
    again.use_vllm, again.vllm_mode, again.vllm_generation = True, mode, LoopbackVLLM(mode)
    again._last_loaded_step = -1
    again._seed_requests()
    assert [again._generate_single_turn(prompt_ids, None, {}, 1)[0] for _ in range(2)] == [first, second]


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
