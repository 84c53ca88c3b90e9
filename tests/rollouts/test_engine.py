"""The engine that replaces TRL's, with a stand-in that generates from prompt and seed alone."""

import itertools
import threading
from types import SimpleNamespace

from support.fake_llm import SamplingParams, play_colocated
from support.processes import start
from support.rollouts import addition_dataset, digit_reward
from support.runs import build_trainer
from support.seeds import shifted

from pacs_trl.rollouts.background import in_background
from pacs_trl.rollouts.engine_proxies import CountingClient, SeededLLM
from pacs_trl.rollouts.request_seeds import request_seed


def test_every_request_of_a_colocated_engine_gets_a_seed():
    calls, numbers = [], itertools.count()

    def generate(prompts, sampling_params):
        names = [prompt["prompt_token_ids"] for prompt in prompts]
        calls.append([(name, p.seed, p.max_tokens) for name, p in zip(names, sampling_params, strict=True)])
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7])]) for _ in prompts]

    def params(tokens, **more):
        return SamplingParams(max_tokens=tokens, **more)

    llm = SeededLLM(SimpleNamespace(generate=generate), lambda prompts: list(itertools.islice(numbers, len(prompts))))
    a, b, c = ({"prompt_token_ids": name} for name in "abc")
    llm.generate([a, b], params(5))
    llm.generate([a, b], [params(6), params(7)])
    assert calls == [[("a", 0, 5), ("b", 1, 5)], [("a", 2, 6), ("b", 3, 7)]]
    # a request that has a seed keeps it, and takes none of the others
    llm.generate([a, b, c], (params(5, seed=99), params(5), params(5, seed=0)))
    assert calls[-1] == [("a", 99, 5), ("b", 4, 5), ("c", 0, 5)]


def test_a_rollout_function_gets_seeds_too_of_which_an_evaluation_takes_none(tmp_path, model_path, monkeypatch):
    def rollout(conversations, trainer):
        ids = [trainer._tokenizer(prompt[0]["content"])["input_ids"] for prompt in conversations]
        prompts = [{"prompt_token_ids": each} for each in ids]
        drawn = trainer.vllm_generation.llm.generate(prompts, SamplingParams(max_tokens=8), use_tqdm=False)
        return {"prompt_ids": ids, "completion_ids": [o.outputs[0].token_ids for o in drawn], "logprobs": None}

    settings = play_colocated(monkeypatch) | {"num_generations_eval": 2, "per_device_eval_batch_size": 2}
    more = {"train_dataset": addition_dataset(64), "rollout_func": rollout}
    trainer = build_trainer(
        tmp_path, model=model_path, reward=digit_reward, more=more, steps_per_generation=2, **settings
    )
    for _ in range(2):
        trainer.evaluate(addition_dataset(2))
    trainer.train()
    seeds = [params.seed for _, params in trainer.vllm_generation.llm.requests]
    expected = [request_seed(f"{shifted(42)}/0/1", i) for i in range(16)]
    assert len(set(seeds[:8])) == 8 and not set(seeds[:8]) & set(expected) and seeds[8:] == expected


def request_and_end():
    """Send a request for two completions of each of two prompts, whose answer never comes."""
    is_sent = threading.Event()

    def generate(**request):
        is_sent.set()
        threading.Event().wait()

    client = CountingClient(SimpleNamespace(generate=generate))
    in_background(client.generate, [[1], [1], [2], [2]])
    assert is_sent.wait(60)


def test_a_request_in_flight_does_not_keep_the_process_from_ending(tmp_path):
    """After a signal, when the last optimizer step is saved."""
    process = start(request_and_end, output=tmp_path / "out")
    process.join(100)
    exit_code = process.exitcode
    process.kill()
    assert exit_code == 0, (tmp_path / "out").read_text()[-3000:]
