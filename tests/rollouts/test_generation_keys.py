"""End tokens in `generation_kwargs`, and what a model's own generation configuration changes."""

import logging

import pytest
import torch
from support.models import TOKENIZER, tiny_model
from support.rollouts import MAX_COMPLETION_LENGTH
from support.runs import build_trainer


DIGITS = [*TOKENIZER("0123456789")["input_ids"], *range(128, 256)]


@pytest.mark.parametrize("settings", [{}, {"fast_generation": True}], ids=str)
def test_completions_end_at_the_tokens_of_generation_kwargs(tmp_path, settings):
    """No padding behind them is trained on, and they do not count as truncated."""
    graded = []

    def reward(completions, completion_ids, truncated, **kwargs):
        graded.extend(zip(map(list, completion_ids), truncated, strict=True))
        return [float(len(ids) % 2) for ids in completion_ids]

    keys = {"eos_token_id": [TOKENIZER.eos_token_id, *DIGITS]}
    build_trainer(tmp_path, reward=reward, generation_kwargs=keys, max_steps=1, **settings).train()
    ends = {TOKENIZER.eos_token_id, *DIGITS}
    assert any(ids[-1] in DIGITS for ids, _ in graded)
    for ids, truncated in graded:
        assert not ends & set(ids[:-1]) and truncated == (ids[-1] not in ends)
        assert len(ids) == MAX_COMPLETION_LENGTH or not truncated


def test_beams_train_as_in_trl_and_warn(tmp_path):
    with pytest.warns(UserWarning, match="'num_beams': 2.*not sampled from the policy.*biased"):
        trainer = build_trainer(tmp_path, generation_kwargs={"num_beams": 2, "length_penalty": -0.1}, max_steps=1)
    assert trainer.train().global_step == 1


def model_with(**keys):
    model = tiny_model()
    for name, value in keys.items():
        setattr(model.generation_config, name, value)
    return model


@pytest.mark.parametrize("key", ["penalty_alpha", "guidance_scale", "forced_eos_token_id"])
def test_a_model_whose_own_generation_does_not_sample_the_policy_is_refused(tmp_path, key):
    with pytest.raises(ValueError, match=f"generation_config has {key}=2"):
        build_trainer(tmp_path, model=model_with(**{key: 2}))


def test_generation_settings_of_a_model_that_reshape_the_policy_are_warned_of(tmp_path, caplog):
    """A warning names what nothing in the settings overrides."""
    with caplog.at_level(logging.WARNING):
        build_trainer(tmp_path, model=model_with(no_repeat_ngram_size=2, min_p=0.1, top_p=0.8, num_beams=1))
    (message,) = [record.message for record in caplog.records if "generation_config" in record.message]
    assert "no_repeat_ngram_size=2, min_p=0.1:" in message
    caplog.clear()
    keys = {"generation_kwargs": {"no_repeat_ngram_size": 0}, "min_p": 0.0}
    build_trainer(tmp_path, model=model_with(no_repeat_ngram_size=2, min_p=0.1), **keys)
    assert not any("generation_config" in record.message for record in caplog.records)


@pytest.mark.slow
def test_continuous_batching_does_not_round_the_trained_weights(tmp_path):
    """TRL converts the model to bfloat16 before it generates."""
    model = tiny_model()
    build_trainer(tmp_path, model=model, use_transformers_continuous_batching=True, bf16=True, max_steps=1).train()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
