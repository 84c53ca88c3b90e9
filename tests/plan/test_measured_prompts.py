"""Prompts that `plan` measures, and the errors that training would raise before it loads a model."""

import json

import pytest
import torch
from support.architectures import build
from transformers import GPT2Config, LlamaConfig, MambaConfig

from experiments.miniature.model import build_model
from experiments.miniature.tokenizer import build_tokenizer
from pacs_trl.data import PROMPT_INSTRUCTION
from pacs_trl.recipe import read_recipe
from pacs_trl.update.context_length import context_lengths


PROBLEMS = ["1+1", "What is the sum of ten and twelve?", "2+2"] * 3


@pytest.fixture
def model(tmp_path):
    """A directory with configuration and tokenizer, and no weights."""
    tokenizer = build_tokenizer()
    build_model(tokenizer).config.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def small(plan, model, tmp_path):
    """`plan` of a small run on a file, on that model."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"problem": p, "answer": "2"}) + "\n" for p in PROBLEMS))
    sizes = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "steps_per_generation": 1}

    def run(*arguments, **changes):
        settings = {"model_name_or_path": str(model), "dataset_name": str(data), "max_steps": 9, "save_steps": 1}
        return plan(*arguments, **(sizes | settings | changes))

    return run


def test_prompts_of_a_file_are_measured(small):
    asked = [[{"role": "user", "content": f"{problem} {PROMPT_INSTRUCTION}"}] for problem in PROBLEMS]
    ids = build_tokenizer().apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    mean, longest = sum(map(len, ids)) / 9, max(map(len, ids))
    status, output = small()
    assert status == 0, output
    assert f"  prompts            9, {mean:.0f} tokens on average, {longest} at most (measured)" in output
    assert "generations        9 (1.0 epochs of 9 problems)" in output
    assert "optimizer steps    36" in small(max_steps=None, num_train_epochs=4)[1]
    # 8 completions, their prompt once, of the one group in a micro-batch
    assert f"micro-batch of {8 * 1000 + longest + 7} tokens" in output
    status, output = small(max_prompt_length=len(ids[0]))
    assert f"  prompts            6, {len(ids[0])} tokens on average, {len(ids[0])} at most" in output
    status, output = small(model_name_or_path="Qwen/Qwen3-0.6B")  # not on this machine
    assert status == 0 and "  prompts            9 (measured)\n" in output


def test_prompts_without_gold_answers_are_measured_for_a_reward_that_needs_none(small, tmp_path, monkeypatch):
    (tmp_path / "lenient.py").write_text("def reward(completions, **kwargs):\n    return []\n")
    monkeypatch.syspath_prepend(tmp_path)
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": problem}) + "\n" for problem in PROBLEMS))
    for model in ({}, {"model_name_or_path": "Qwen/Qwen3-0.6B"}):  # here, and not on this machine
        status, output = small(dataset_name=str(data), reward_funcs=["lenient.reward"], **model)
        assert status == 0 and "  prompts            9" in output, output
    status, output = small(dataset_name=str(data))
    assert status == 1 and "`solution_column` 'solution' is not a column" in output


def test_what_training_would_say_of_model_and_data(small, model, tmp_path, monkeypatch):
    (tmp_path / "strict.py").write_text("def graded(completions, difficulty, **kwargs):\n    return []\n")
    monkeypatch.syspath_prepend(tmp_path)
    for changes, words in (
        ({"reward_funcs": ["strict.graded"]}, "'graded' cannot be called with the columns of the training set"),
        ({"problem_column": "question"}, "`problem_column` 'question' is not a column"),
        ({"max_tokens_per_micro_batch": 1010}, "do not fit into max_tokens_per_micro_batch=1010"),
        ({"max_prompt_length": 3}, "max_prompt_length=3"),
        (
            {"max_completion_length": 4090},
            "9 of 9 prompts do not fit into the context of the model, max_position_embed",
        ),
        ({"num_generations": 8, "per_device_train_batch_size": 80}, "10 different prompts"),
    ):
        status, output = small(**changes)
        assert status == 1 and "1 conflict(s)" in output and words in output, output
    (model / "chat_template.jinja").unlink()
    assert "1 conflict(s)" in (output := small()[1]) and "chat_template is not set" in output


def test_context_lengths_count_scaled_positions_and_windows():
    def lengths(config):
        return tuple(context_lengths(config).values())

    assert lengths(GPT2Config(n_positions=77)) == (77, None) and lengths(MambaConfig()) == (None, None)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
    assert lengths(LlamaConfig(max_position_embeddings=32, rope_parameters=yarn)) == (128, None)
    llama3 = yarn | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert lengths(LlamaConfig(max_position_embeddings=512, rope_parameters=llama3)) == (512, None)
    longrope = {"rope_type": "longrope", "original_max_position_embeddings": 32, "factor": 4.0, "rope_theta": 1e4}
    longrope |= {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
    sizes = {"max_position_embeddings": 128, "hidden_size": 128, "num_attention_heads": 4}
    assert lengths(LlamaConfig(**sizes, rope_parameters=longrope)) == (128, 32)


def test_bfloat16_needs_hardware_where_the_run_starts_only(small):
    assert "bf16" not in small()[1]
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="bf16"):
            read_recipe(["--config", "recipes/miniature/pacs.yaml", "--bf16", "true", "--use_cpu", "false"])


def test_a_directory_with_another_run_is_named_as_in_training(small, model, tmp_path):
    """A model or a checkpoint in `output_dir`; not if the run continues from there, or is finished."""
    output = tmp_path / "run"
    output.mkdir()
    assert small(output_dir=str(output))[0] == 0
    (output / "config.json").write_text("{}")
    status, text = small(output_dir=str(output))
    assert status == 1 and "already contains a model" in text
    (output / "trainer_state.json").write_text("{}")
    assert small("--resume_from_checkpoint", "last", output_dir=str(output))[0] == 0
    (output / "config.json").unlink()
    (output / "checkpoint-7").mkdir()
    status, text = small(output_dir=str(output))
    assert status == 1 and "already contains checkpoint-7" in text


def test_an_attention_that_the_model_does_not_have_is_refused_as_in_training(small, model):
    config = build("gpt_oss").config
    config.architectures = ["GptOssForCausalLM"]
    config.save_pretrained(model)
    assert small(attn_implementation="eager")[0] == 0
    status, text = small(attn_implementation="sdpa")
    assert status == 1 and "'gpt_oss' models have no sdpa. Set eager" in text


def test_packed_weights_are_refused_as_in_training(small, model):
    """MXFP4 weights of gpt-oss, which vLLM cannot replace."""
    build("gpt_oss").config.save_pretrained(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    assert small(bf16=False)[0] == 0
    status, text = small(use_vllm=True, vllm_gpu_memory_utilization=0.3)
    assert status == 1 and "vLLM would load the MXFP4 weights" in text
