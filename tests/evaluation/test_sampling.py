"""The in-process sampler: the right distribution, one stream per completion, nothing else disturbed."""

import random

import numpy as np
import torch

from pacs_trl.evaluation.engines import TransformersEngine
from pacs_trl.evaluation.requests import Request, SamplingSettings, sample_seed
from pacs_trl.evaluation.sampling import SeededSampler


PROMPTS = [[{"role": "user", "content": "1+2"}], "1+", [{"role": "user", "content": "3+4 and a longer question"}]]


def sample(model, tokenizer, prompts, n, settings, seed=0, batch_size=64):
    """`n` completions of each prompt."""
    keys = [(i, j) for i in range(len(prompts)) for j in range(n)]
    requests = [Request("", j, sample_seed(seed, str(i), j), prompts[i]) for i, j in keys]
    engine = TransformersEngine(model, tokenizer, batch_size=batch_size)
    answers = [answer for _, answer in engine.generate(requests, settings)]
    return [answers[start : start + n] for start in range(0, len(answers), n)]


def chosen(sampler, logits, step=0):
    scores = sampler(torch.zeros(logits.shape[0], step, dtype=torch.long), logits)
    assert (scores == 0).sum() == logits.shape[0] and torch.isinf(scores).sum() == scores.numel() - logits.shape[0]
    return scores.argmax(-1)


def test_the_token_is_the_inverse_of_the_cumulative_distribution():
    # Probabilities 0.5, 0.25, 0.25: uniforms below 0.5 give token 0, below 0.75 token 1, the rest token 2.
    sampler = SeededSampler(SamplingSettings(1.0, 1.0, 0, 5), seeds=[0], prompt_length=0)
    sampler.uniforms = torch.tensor([[0.0, 0.499, 0.5, 0.749, 0.75]], dtype=torch.float64)
    logits = torch.tensor([[2.0, 1.0, 1.0]]).log()
    assert [chosen(sampler, logits, step).item() for step in range(5)] == [0, 0, 1, 1, 2]


def test_frequencies_follow_temperature_and_nucleus():
    # 40,000 independent rows. Logits ln(8, 4, 2, 1) at temperature 2 weigh sqrt(8) : 2 : sqrt(2) : 1; a nucleus of 0.8
    # keeps the first three (0.39 + 0.28 < 0.8 <= 0.39 + 0.28 + 0.20).
    rows = 40_000
    sampler = SeededSampler(SamplingSettings(2.0, 0.8, 0, 1), seeds=range(rows), prompt_length=0)
    tokens = chosen(sampler, torch.tensor([[8.0, 4.0, 2.0, 1.0]]).log().expand(rows, -1))
    weights = np.sqrt([8, 4, 2])
    expected = np.append(weights / weights.sum(), 0.0)
    observed = np.bincount(tokens.numpy(), minlength=4) / rows
    assert observed[3] == 0
    np.testing.assert_allclose(observed, expected, atol=4 * 0.5 / np.sqrt(rows))  # four standard errors


def test_tokens_outside_top_k_are_never_sampled():
    sampler = SeededSampler(SamplingSettings(1.0, 1.0, 2, 1), seeds=range(500), prompt_length=0)
    tokens = chosen(sampler, torch.tensor([[0.0, 1.0, 2.0, -torch.inf]]).expand(500, -1))
    assert set(tokens.tolist()) == {1, 2}


def test_a_completion_depends_on_its_seed_alone(boxing_model):
    settings = SamplingSettings(1.0, 1.0, 0, 12)
    together = sample(*boxing_model, PROMPTS, 6, settings, seed=1, batch_size=18)
    assert together == sample(*boxing_model, PROMPTS, 6, settings, seed=1, batch_size=5)
    assert together == [row[:6] for row in sample(*boxing_model, PROMPTS, 9, settings, seed=1)]
    assert together != sample(*boxing_model, PROMPTS, 6, settings, seed=2)
    assert len({c.text for c in together[0]}) > 1


def test_a_model_trained_to_box_answers_samples_boxes(boxing_model):
    (completions,) = sample(*boxing_model, PROMPTS[:1], 50, SamplingSettings(1.0, 1.0, 0, 8))
    boxed = [c for c in completions if c.text in {rf"\boxed{{{d}}}" for d in range(10)}]
    assert len(boxed) > 40  # in theory 999 of 1,000
    # The box is one token, then a digit, the closing brace and the end token, which counts.
    assert all(c.num_tokens == 4 and c.finish_reason == "stop" for c in boxed)
    settings = SamplingSettings(temperature=0, max_new_tokens=2)
    (completions,) = sample(*boxing_model, PROMPTS[:1], 3, settings)
    assert completions == completions[:1] * 3  # greedy
    assert all(c.num_tokens == 2 and c.finish_reason == "length" for c in completions)


def test_generation_config_of_the_checkpoint_does_not_leak(boxing_model):
    model, tokenizer = boxing_model
    settings = SamplingSettings(1.0, 1.0, 0, 8)
    before = sample(model, tokenizer, ["1+2"], 20, settings)
    saved = model.generation_config.to_dict()
    model.generation_config.update(
        repetition_penalty=50.0, no_repeat_ngram_size=1, top_k=1, min_new_tokens=8, do_sample=True
    )
    try:
        assert sample(model, tokenizer, ["1+2"], 20, settings) == before
    finally:
        model.generation_config.update(**saved)


def test_random_states_and_mode_are_left_alone(boxing_model):
    model, tokenizer = boxing_model
    model.train()
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    sample(model, tokenizer, PROMPTS, 2, SamplingSettings(max_new_tokens=4))
    assert model.training
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[:2]
    assert torch.equal(torch.get_rng_state(), states[2])
    model.eval()


def test_seeds_are_distinct_and_pinned():
    seeds = {sample_seed(s, p, j) for s in range(3) for p in ("a", "b", "1", "11") for j in range(50)}
    assert len(seeds) == 3 * 4 * 50
    assert all(0 <= seed < 2**53 for seed in seeds)
    # Pinned: a change would silently orphan every store.
    assert sample_seed(0, "math_500/a", 1) == 8035683153547300
