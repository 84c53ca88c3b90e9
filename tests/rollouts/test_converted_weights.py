"""Checkpoints whose weights transformers converts when it reads and saves them: experts in one tensor, and MXFP4."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import TOKENIZER
from support.rollouts import addition_dataset, digit_reward
from support.runs import config
from support.seeds import shifted
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GptOssConfig,
    Mxfp4Config,
    Qwen3MoeConfig,
)

from pacs_trl import GRPOConfig, GRPOTrainer
from pacs_trl.rollouts.mxfp4 import check_mxfp4


SIZES = {"vocab_size": len(TOKENIZER), "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 256, "num_experts_per_tok": 2}
SIZES |= {"eos_token_id": TOKENIZER.eos_token_id, "pad_token_id": TOKENIZER.pad_token_id, "bos_token_id": None}


def train(directory: Path, model, resume=None, more=None, **settings):
    settings = {"save_steps": 1, "learning_rate": 1e-2, "router_aux_loss_coef": 0.0, "beta": 0.1} | settings
    args = config(directory, GRPOConfig, save_strategy="steps", **settings)
    arguments = {"train_dataset": addition_dataset(), "processing_class": TOKENIZER} | (more or {})
    trainer = GRPOTrainer(str(model), digit_reward, args=args, **arguments)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    return trainer


def check_run(tmp_path, checkpoint):
    """Train, resume from the middle and from the best checkpoint, and load the saved model."""
    trainer = train(tmp_path / "run", checkpoint)
    resumed = train(tmp_path / "resumed", checkpoint, str(tmp_path / "run" / "checkpoint-1"))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run", dtype=torch.float32)
    middle = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-1", dtype=torch.float32)
    for name, weights in trainer.model.state_dict().items():
        assert weights.dtype == torch.float32
        assert torch.equal(weights, resumed.model.state_dict()[name]), name
        assert torch.equal(weights, saved.state_dict()[name]), name
    resumed.state.best_model_checkpoint = str(tmp_path / "run" / "checkpoint-1")
    resumed._load_best_model()
    for name, weights in resumed.model.state_dict().items():
        assert torch.equal(weights, middle.state_dict()[name]), name
    return trainer


@pytest.fixture
def mixture(tmp_path) -> Path:
    shape = {"num_experts": 4, "moe_intermediate_size": 16, "intermediate_size": 32}
    torch.manual_seed(shifted(0))
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SIZES, **shape, initializer_range=0.1)).float()
    model.save_pretrained(tmp_path / "mixture")
    return tmp_path / "mixture"


def test_experts_are_loaded_from_checkpoints(tmp_path, mixture):
    names = load_file(mixture / "model.safetensors").keys()
    trainer = check_run(tmp_path, mixture)
    assert not names <= trainer.model.state_dict().keys()  # otherwise nothing is tested


@pytest.fixture
def packed(tmp_path) -> Path:
    """gpt-oss with random MXFP4 weights, as it is published."""
    shape = {"num_local_experts": 2, "intermediate_size": 32, "layer_types": ["full_attention"]}
    torch.manual_seed(shifted(0))
    model = AutoModelForCausalLM.from_config(GptOssConfig(**SIZES, **shape)).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "gpt-oss")
    weights = {}
    for name, tensor in load_file(tmp_path / "gpt-oss" / "model.safetensors").items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, width, height = tensor.shape
            bits = torch.randint(256, (experts, height, width // 32, 16), dtype=torch.uint8)
            exponents = torch.randint(121, 124, (experts, height, width // 32), dtype=torch.uint8)
            weights |= {f"{name}_blocks": bits, f"{name}_scales": exponents}
        else:
            weights[name] = tensor
    save_file(weights, tmp_path / "gpt-oss" / "model.safetensors", metadata={"format": "pt"})
    file = tmp_path / "gpt-oss" / "config.json"
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantization}))
    return tmp_path / "gpt-oss"


def test_mxfp4_weights_are_trained_and_saved_dequantized(tmp_path, packed):
    trainer = check_run(tmp_path, packed)
    before = AutoModelForCausalLM.from_pretrained(packed, quantization_config=Mxfp4Config(dequantize=True))
    for name, weights in before.state_dict().items():
        if "experts" in name:
            assert not torch.equal(weights.float(), trainer.model.state_dict()[name]), name


def test_dequantized_model_in_memory_is_saved_whole(tmp_path, packed):
    model = AutoModelForCausalLM.from_pretrained(packed, quantization_config=Mxfp4Config(dequantize=True)).float()
    args = config(tmp_path / "run", GRPOConfig, router_aux_loss_coef=0.0, max_steps=1)
    trainer = GRPOTrainer(model, digit_reward, args=args, train_dataset=addition_dataset(), processing_class=TOKENIZER)
    trainer.save_model()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run", dtype=torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), saved.parameters(), strict=True))


def test_mxfp4_weights_with_another_quantization_are_refused(tmp_path, packed):
    more = {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    with pytest.raises(ValueError, match="MXFP4.*another quantization"):
        train(tmp_path / "run", packed, more=more)


def test_vllm_with_mxfp4_weights_is_refused(packed):
    arguments = {"quantization_config": None}
    with pytest.raises(ValueError, match="use_vllm: vLLM would load the MXFP4 weights"):
        check_mxfp4(str(packed), AutoConfig.from_pretrained(packed), SimpleNamespace(use_vllm=True), arguments)
