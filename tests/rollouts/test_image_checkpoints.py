"""Checkpoints that read images, trained on text: their language model is trained, and the rest stays as it is."""

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from peft import LoraConfig
from safetensors.torch import load_file
from support.image_checkpoints import IMAGE_TOKENS, image_model, image_tokenizer, save_checkpoint
from support.rollouts import addition_dataset, digit_reward
from support.runs import config
from support.scripted import run_recipe
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen2Config

from pacs_trl import GRPOConfig, GRPOTrainer, PACSConfig, PACSTrainer
from pacs_trl.data.text_tokenizer import load_text_tokenizer
from pacs_trl.evaluation.engines import TransformersEngine
from pacs_trl.evaluation.requests import Request, SamplingSettings
from pacs_trl.rollouts.image_checkpoints import (
    context_of_language_model,
    has_language_model_inside,
    lora_of_language_model,
    names_outside_language_model,
)
from pacs_trl.update.packing import packing_backend


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in IMAGE_TOKENS if name not in ("qwen2_5_vl", "gemma3")]
OUTSIDE = ("visual", "vision", "projector", "connector")


REMOTE_CODE = """
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

class RemoteConfig(Gemma3Config):
    model_type = "remote_gemma3"

class RemoteModel(Gemma3ForConditionalGeneration):
    config_class = RemoteConfig
"""
AUTO_MAP = {"AutoConfig": "remote_code.RemoteConfig", "AutoModelForImageTextToText": "remote_code.RemoteModel"}


def train(directory: Path, model, *, trainer=GRPOTrainer, settings=GRPOConfig, resume=None, more=None, **args):
    args = config(directory, settings, **({"learning_rate": 1e-2, "max_completion_length": 6} | args))
    dataset = addition_dataset()
    trainer = trainer(model, digit_reward, args=args, train_dataset=dataset, **(more or {}))
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    return trainer


def changed(before: Path, after: Path) -> dict[str, bool]:
    weights = [load_file(Path(folder) / "model.safetensors") for folder in (before, after)]
    assert weights[0].keys() == weights[1].keys()
    return {name: not torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items()}


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "gemma3", *SLOW])
def test_language_model_is_trained_and_the_rest_saved_unchanged(tmp_path, model_type):
    checkpoint = save_checkpoint(model_type, tmp_path / "model")
    trainer = train(tmp_path / "run", checkpoint)
    constants = dict(trainer.model.named_buffers())  # Gemma 4 has one per layer
    for name, is_changed in changed(tmp_path / "model", tmp_path / "run").items():
        assert is_changed != (name in constants or any(part in name for part in OUTSIDE)), name
    assert trainer.forward_pass.fused == (model_type != "llama4")  # on which TRL's fused head fails
    assert trainer.forward_pass.packing == packing_backend(trainer.model)
    assert (tmp_path / "run" / "preprocessor_config.json").read_text() == (
        tmp_path / "model" / "preprocessor_config.json"
    ).read_text()
    assert ModelCard.load(tmp_path / "run" / "README.md").data.pipeline_tag == "image-text-to-text"
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "run")
    assert all(torch.equal(a, b) for a, b in zip(trainer.model.parameters(), loaded.parameters(), strict=True))


def test_run_resumes_bit_by_bit(tmp_path):
    checkpoint = save_checkpoint("qwen2_5_vl", tmp_path / "model")
    saving = {"trainer": PACSTrainer, "settings": PACSConfig, "save_strategy": "steps", "save_steps": 1}
    straight = train(tmp_path / "run", checkpoint, **saving)
    middle = tmp_path / "run" / "checkpoint-1"
    assert (middle / "preprocessor_config.json").is_file()
    resumed = train(tmp_path / "resumed", checkpoint, resume=str(middle), **saving)
    for (name, a), b in zip(straight.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.slow
def test_late_rollouts_come_from_a_copy_of_the_model(tmp_path):
    checkpoint = save_checkpoint("qwen2_5_vl", tmp_path / "model")
    trainer = train(tmp_path / "run", checkpoint, rollout_lag=1, max_steps=3)
    assert trainer.state.global_step == 3
    assert any(changed(tmp_path / "model", tmp_path / "run").values())


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"]])
@pytest.mark.parametrize("in_memory", [False, True])
def test_adapters_are_in_the_language_model_alone(tmp_path, targets, in_memory):
    model = save_checkpoint("gemma3", tmp_path / "model")  # whose tower has q_proj and v_proj too
    more = {"peft_config": LoraConfig(target_modules=targets, r=2, exclude_modules=["layers.1.mlp.up_proj"])}
    if in_memory:
        model = AutoModelForImageTextToText.from_pretrained(model)
        more["processing_class"] = image_tokenizer("gemma3")
    trainer = train(tmp_path / "run", model, more=more)
    adapted = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    assert len(adapted) == (2 * (2 * 7 - 1) if targets == "all-linear" else 2 * 2 * 2)
    assert all("language_model" in name and "lora" in name for name in adapted)


def test_adapters_outside_of_the_language_model_are_refused(tmp_path):
    checkpoint = save_checkpoint("gemma3", tmp_path / "model")
    more = {"peft_config": LoraConfig(target_modules=["q_proj", "fc1"], r=2)}
    with pytest.raises(ValueError, match="fc1.*trained part of the model has no such module"):
        train(tmp_path / "run", checkpoint, more=more)


def test_weights_that_text_does_not_reach_are_refused(tmp_path):
    tokenizer = image_tokenizer("gemma3")
    model = image_model("gemma3", tokenizer)
    model.get_decoder().requires_grad_(False)
    with pytest.raises(ValueError, match="outside of the language model"):
        train(tmp_path / "run", model, more={"processing_class": tokenizer})


@pytest.mark.parametrize("model_type", ["qwen3_vl", "smolvlm"])
def test_template_that_renders_blocks_alone_renders_text(tmp_path, model_type):
    checkpoint = save_checkpoint(model_type, tmp_path / "model", only_blocks=True)
    trainer = train(tmp_path / "run", checkpoint, max_steps=1)
    prompts = [row["prompt"] for row in trainer.train_dataset]
    ids = trainer._tokenize_prompts(prompts)[0]
    for prompt, text in zip(prompts, trainer.processing_class.batch_decode(ids), strict=True):
        assert text == f"<|im_start|>user\n{prompt[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    saved = (tmp_path / "run" / "chat_template.jinja").read_text()
    assert saved == (tmp_path / "model" / "chat_template.jinja").read_text()


def test_template_of_the_processor_is_used_if_the_tokenizer_has_none(tmp_path):
    tokenizer = image_tokenizer("smolvlm", only_blocks=True)
    template, tokenizer.chat_template = tokenizer.chat_template, None
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    message = {"role": "user", "content": "1+2"}
    assert "1+2" in load_text_tokenizer(str(tmp_path)).apply_chat_template([message], tokenize=False)


@pytest.mark.slow
def test_recipe_trains_and_evaluation_loads_the_model(tmp_path):
    checkpoint = save_checkpoint("idefics3", tmp_path / "model", only_blocks=True)
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps({"problem": f"{i}+2=", "answer": str(i + 2)}) + "\n" for i in range(32)))
    words = ["--dataset_name", str(data), "--model_name_or_path", checkpoint]
    trainer = run_recipe(tmp_path / "run", checkpoint, *words, max_completion_length=8)
    assert (tmp_path / "run" / "preprocessor_config.json").is_file()
    assert trainer.forward_pass.packing == "sdpa" and trainer.processing_class.padding_side == "left"
    engine = TransformersEngine.load(str(tmp_path / "run"))
    requests = [Request("p", i, i, [{"role": "user", "content": "1+2="}]) for i in range(2)]
    answers = list(engine.generate(requests, SamplingSettings(max_new_tokens=4)))
    assert [request for request, _ in answers] == requests


def test_adapter_of_an_image_checkpoint_is_evaluated(tmp_path):
    checkpoint = save_checkpoint("qwen2_5_vl", tmp_path / "model")
    train(
        tmp_path / "run", checkpoint, max_steps=1, more={"peft_config": LoraConfig(target_modules="all-linear", r=2)}
    )
    engine = TransformersEngine.load(str(tmp_path / "run"))
    (answer,) = engine.generate([Request("p", 0, 0, "1+2=")], SamplingSettings(max_new_tokens=4))
    assert any("lora" in name for name, _ in engine.model.named_parameters()) and answer[1].num_tokens <= 4


@pytest.mark.parametrize("model_type", IMAGE_TOKENS)
def test_what_is_outside_of_the_language_model(model_type):
    model = image_model(model_type, image_tokenizer(model_type))
    names = names_outside_language_model(model)
    assert has_language_model_inside(model.config) and not has_language_model_inside(Qwen2Config())
    assert names and all(name.count(".") <= 1 and any(part in name for part in OUTSIDE) for name in names)


def test_tool_loop_finds_the_context_of_the_language_model():
    model = image_model("gemma3", image_tokenizer("gemma3"))
    with context_of_language_model(model.config):
        assert model.config.max_position_embeddings == model.config.text_config.max_position_embeddings
    assert "max_position_embeddings" not in model.config.to_dict()


def test_the_layers_of_a_model_with_code_of_its_own_are_known_before_it_is_loaded(tmp_path):
    entries = image_model("gemma3", image_tokenizer("gemma3")).config.to_dict()
    entries |= {"model_type": "remote_gemma3", "architectures": ["RemoteModel"], "auto_map": AUTO_MAP}
    (tmp_path / "remote_code.py").write_text(REMOTE_CODE)
    (tmp_path / "config.json").write_text(json.dumps(entries))
    config = AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    adapter = LoraConfig(target_modules="all-linear")
    adapted = lora_of_language_model(adapter, str(tmp_path), config, trust_remote_code=True)
    assert "vision_tower" in adapted.exclude_modules and "q_proj" in adapted.target_modules
