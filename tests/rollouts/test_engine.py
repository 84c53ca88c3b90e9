"""The engine that replaces TRL's, with a stand-in that generates from prompt and seed alone."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from fake_llm import SamplingParams, play_colocated
from replay import addition_dataset, build_trainer, digit_reward
from seeds import shifted
from transformers import AutoModelForCausalLM

from pacs_trl.rollouts.checkpoint import request_seed
from pacs_trl.rollouts.engine import SeededLLM


class Counting:
    """Seeds 0, 1, 2, ..."""

    def __init__(self):
        self.counter = itertools.count()

    def __call__(self, n):
        return list(itertools.islice(self.counter, n))


def test_every_request_of_a_colocated_engine_gets_a_seed():
    def params(tokens=1, seed=None):
        return SimpleNamespace(max_tokens=tokens, seed=seed, clone=lambda: params(tokens, seed))

    calls = []
    llm = SeededLLM(
        SimpleNamespace(
            generate=lambda prompts, sampling_params: calls.append(
                [(prompt, p.seed, p.max_tokens) for prompt, p in zip(prompts, sampling_params, strict=True)]
            ),
        ),
        Counting(),
    )
    llm.generate(["a", "b"], params(5))
    llm.generate(["a", "b"], [params(6), params(7)])
    assert calls == [
        [("a", 0, 5), ("b", 1, 5)],
        [("a", 2, 6), ("b", 3, 7)],
    ]
    # a request that has a seed keeps it, and takes none of the others
    llm.generate(["a", "b", "c"], (params(5, seed=99), params(5), params(5, seed=0)))
    assert calls[-1] == [("a", 99, 5), ("b", 4, 5), ("c", 0, 5)]


def prompts(*ids):
    return [{"prompt_token_ids": list(each)} for each in ids]


def trainer_of(output_dir, model_path, settings, **more):
    arguments = {"train_dataset": addition_dataset(64), **more.pop("arguments", {})}
    reward = more.pop("reward", digit_reward)
    training = {"learning_rate": 3e-3, "optim": "adamw_torch", "steps_per_generation": 2, "max_steps": 4}
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    return build_trainer(output_dir, model=model, reward=reward, more=arguments, **(training | settings | more))


@pytest.fixture
def colocated(monkeypatch):
    return play_colocated(monkeypatch)


def seeds_of(trainer):
    return [params.seed for _, params in trainer.vllm_generation.llm.requests]


def test_a_rollout_function_gets_seeds_too(tmp_path, model_path, colocated):
    def rollout(given, trainer):
        ids = [trainer._tokenizer(prompt[0]["content"])["input_ids"] for prompt in given]
        drawn = trainer.vllm_generation.llm.generate(prompts(*ids), SamplingParams(max_tokens=8), use_tqdm=False)
        return {"prompt_ids": ids, "completion_ids": [o.outputs[0].token_ids for o in drawn], "logprobs": None}

    trainer = trainer_of(tmp_path, model_path, colocated, arguments={"rollout_func": rollout})
    trainer.train()
    assert seeds_of(trainer) == [request_seed(f"{shifted(42)}/0", i) for i in range(32)]


def test_an_evaluation_takes_no_seeds_from_training(tmp_path, model_path, colocated):
    trainer = trainer_of(tmp_path, model_path, colocated, num_generations_eval=2, per_device_eval_batch_size=2)
    for _ in range(2):
        trainer.evaluate(addition_dataset(2))
    of_evaluation = seeds_of(trainer)
    assert len(set(of_evaluation)) == 8 and trainer._num_requests == 0
    trainer.train()
    of_training = seeds_of(trainer)[8:]
    assert of_training == [request_seed(f"{shifted(42)}/0", i) for i in range(32)] and not set(of_training) & set(
        of_evaluation
    )
