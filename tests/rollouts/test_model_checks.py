"""Models that are refused: frozen weights, optimizers of other weights or inside the backward pass,
quantized weights that would be copied or converted, and changes that the engine process would lose."""

import logging
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from support.models import LORA, TOKENIZER, tiny_model
from support.runs import build_trainer
from torch import nn
from transformers import BitsAndBytesConfig, FineGrainedFP8Config
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

from pacs_trl.rollouts import model_checks
from pacs_trl.rollouts.model_checks import (
    changes_in_place,
    check_adapter_of_tied_weights,
    check_optimizers,
    check_quantization,
    check_trainable,
    flash_attention_4_error,
    missing_attention,
    warn_of_rounded_updates,
)


def frozen():
    return tiny_model().requires_grad_(False)


def adapter_for_inference(tmp_path):
    get_peft_model(tiny_model(), LORA).save_pretrained(tmp_path / "adapter")
    return PeftModel.from_pretrained(tiny_model(), tmp_path / "adapter")


def disabled_adapter():
    model = get_peft_model(tiny_model(), LORA)
    model.disable_adapter_layers()
    return model


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_run_that_would_train_nothing_is_refused(tmp_path, beta):
    with pytest.raises(ValueError, match="is_trainable=True"):
        build_trainer(tmp_path, model=adapter_for_inference(tmp_path), beta=beta)


def test_frozen_weights_are_refused():
    for model in (frozen(), disabled_adapter(), get_peft_model(tiny_model(), LORA).merge_and_unload()):
        with pytest.raises(ValueError, match="requires_grad"):
            check_trainable(model, None)
    with pytest.raises(ValueError, match="inference_mode=True"):
        check_trainable(tiny_model(), LoraConfig(inference_mode=True))
    check_trainable(frozen(), LORA)
    check_trainable(tiny_model(), None)
    check_trainable("a/path", None)


def adamw(model) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def test_an_optimizer_without_the_trained_weights_is_refused(tmp_path, caplog):
    model = tiny_model()
    with pytest.raises(ValueError, match="optimizers.*none of the weights"):
        build_trainer(tmp_path, model=model, more={"optimizers": (adamw(tiny_model()), None)})
    for model_or_path, peft_config in ((model, LORA), ("a/path", None)):
        with pytest.raises(ValueError, match="optimizers: .*later"):
            check_optimizers(model_or_path, peft_config, (adamw(model), None))
    check_optimizers(model, None, (adamw(model), None))
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        check_optimizers(model, None, (adamw(model.lm_head), None))
    assert "1 of" not in caplog.text and "not in the optimizer" in caplog.text


def test_a_scheduler_of_another_optimizer_is_refused():
    model = tiny_model()
    scheduler = torch.optim.lr_scheduler.ConstantLR(adamw(model))
    for optimizer in (None, adamw(model)):
        with pytest.raises(ValueError, match="scheduler belongs to another optimizer"):
            check_optimizers(model, None, (optimizer, scheduler))
    check_optimizers(model, None, (scheduler.optimizer, scheduler))


def test_steps_inside_the_backward_pass_are_refused():
    model = tiny_model()
    with pytest.raises(ValueError, match="LayerWiseDummyOptimizer uses gradients inside"):
        check_optimizers(model, None, (LayerWiseDummyOptimizer(optimizer_dict={}, lr=0.1), None))
    model.lm_head.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ValueError, match="embed_tokens.weight has a hook"):
        check_optimizers(model, None, (None, None))


def test_packed_weights_are_neither_copied_nor_converted():
    model = tiny_model()
    settings = {"generation_dtype": None, "rollout_lag": 0, "use_vllm": False}
    settings |= {"trust_remote_code": False, "model_init_kwargs": None}
    lag, dtype = ({**settings, key: value} for key, value in (("rollout_lag", 1), ("generation_dtype", "bfloat16")))
    four_bits, fp8 = BitsAndBytesConfig(load_in_4bit=True), FineGrainedFP8Config()
    refused = [(lag, four_bits, "rollout_lag"), (lag, fp8, "rollout_lag"), (dtype, fp8, "generation_dtype.*fp8")]
    for args, quantization, words in refused:
        with pytest.raises(ValueError, match=words):
            check_quantization(model, SimpleNamespace(**args), quantization)
        model.config.quantization_config = quantization.to_dict()  # of a checkpoint
        with pytest.raises(ValueError, match=words):
            check_quantization(model, SimpleNamespace(**args))
        del model.config.quantization_config
    for args, quantization in ((settings, fp8), (dtype, four_bits), (lag, None), (lag, {"dequantize": True})):
        check_quantization(model, SimpleNamespace(**args), quantization)


class Halved(nn.Linear):
    def forward(self, states):
        return super().forward(states) / 2


def replaced_layer(model):
    model.model.layers[0].mlp.down_proj = Halved(64, 32, bias=False)


def patched_layer(model):
    mlp = model.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda states: forward(states) / 2


def hooked_layer(model):
    model.model.norm.register_forward_hook(lambda norm, inputs, output: output / 2)


def scaled_attention(model):
    model.model.layers[0].self_attn.scaling *= 2


def longer_vocabulary(model):
    model.model.embed_tokens = nn.Embedding(len(TOKENIZER) + 2, 32)


CHANGES = {
    replaced_layer: "model.layers.0.mlp.down_proj is a Halved",
    patched_layer: "model.layers.1.mlp.forward is replaced",
    hooked_layer: "model.norm.forward has a hook",
    scaled_attention: "model.layers.0.self_attn.scaling is 0.5",
    longer_vocabulary: "model.embed_tokens.weight has the shape",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("with_adapter", [False, True])
def test_changes_that_the_engine_process_would_lose_are_named(change, with_adapter):
    model = tiny_model()
    change(model)
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])) if with_adapter else model
    (description, *others) = changes_in_place(model)
    assert CHANGES[change] in description and not others


def test_weights_and_new_tokens_are_no_changes():
    state = torch.get_rng_state()
    model = tiny_model()
    model.resize_token_embeddings(len(TOKENIZER) + 2, mean_resizing=False)
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    model.add_adapter("ref", LoraConfig(r=2, target_modules=["q_proj"]))
    model.enable_input_require_grads()
    torch.set_rng_state(state)
    assert changes_in_place(model) == [] and torch.equal(torch.get_rng_state(), state)
    assert changes_in_place(model.merge_and_unload()) == []


def test_a_merged_adapter_is_a_change():
    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"]))
    model.merge_adapter()
    assert "adapter is merged" in changes_in_place(model)[0]


def test_a_lag_refuses_changes_before_the_run(tmp_path):
    model = tiny_model()
    patched_layer(model)
    with pytest.raises(ValueError, match="rollout_lag.*mlp.forward is replaced"):
        build_trainer(tmp_path, model=model, rollout_lag=1)


TIED = {"embed_tokens": True, "lm_head": True, "q_proj": False}


@pytest.mark.parametrize("name", TIED)
@pytest.mark.parametrize("key", ["target_modules", "modules_to_save"])
@pytest.mark.parametrize("tied", [True, False])
def test_adapters_of_tied_weights_are_refused_with_merged_transfer(name, key, tied):
    names = {"target_modules": ["k_proj"]} | {key: [name]}
    model = get_peft_model(tiny_model(tie_word_embeddings=tied), LoraConfig(r=2, **names))
    if TIED[name] and tied:
        with pytest.raises(ValueError, match="tie_word_embeddings.*vllm_sync_adapter"):
            check_adapter_of_tied_weights(model)
    else:
        check_adapter_of_tied_weights(model)


def test_an_adapter_that_keeps_weights_tied_can_be_merged():
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    check_adapter_of_tied_weights(get_peft_model(tiny_model(), config))
    check_adapter_of_tied_weights(tiny_model())


@pytest.mark.parametrize(
    "implementation, dtype, bf16, capability, words",
    [
        ("flash_attention_4", "float32", False, 9, "half precision"),
        ("flash_attention_4", None, False, 9, "half precision"),
        ("flash_attention_4", "bfloat16", False, 8, "a GPU of compute capability 8"),
        ("flash_attention_4", "float32", True, 0, "no GPU"),
        ("flash_attention_4", "float32", True, 9, None),
        ("flash_attention_4", torch.bfloat16, False, 10, None),
        ("sdpa", "float32", False, 0, None),
    ],
)
def test_where_flash_attention_4_cannot_train(implementation, dtype, bf16, capability, words):
    args = SimpleNamespace(bf16=bf16, fp16=False)
    error = flash_attention_4_error(args, {"attn_implementation": implementation, "dtype": dtype}, capability)
    assert error is None if words is None else words in error and "attn_implementation: sdpa" in error


def test_an_attention_that_is_not_installed_is_refused_before_loading(tmp_path, model_path, monkeypatch):
    installed = {"flash_attn"}
    monkeypatch.setattr(model_checks, "find_spec", lambda name: True if name in installed else None)
    assert missing_attention("flash_attention_2") is None and missing_attention("sdpa") is None
    assert "flash_attn_interface" in missing_attention("flash_attention_3")
    installed.clear()
    with pytest.raises(ValueError, match="flash_attention_2 needs the package flash_attn.*sdpa"):
        build_trainer(tmp_path, model=model_path, model_init_kwargs={"attn_implementation": "flash_attention_2"})
    installed.add("kernels")  # transformers downloads a kernel in its place
    assert missing_attention("flash_attention_2") is None


def test_updates_that_half_precision_rounds_away_are_named(caplog):
    """2^-9 of a weight of 0.02 is 3.9e-5. An adapter has its own precision, and FSDP trains copies in float32."""
    args = SimpleNamespace(
        learning_rate=1e-6, model_init_kwargs=None, bf16=True, fp16=False, process_index=0, fsdp="", deepspeed=None
    )
    half = tiny_model().bfloat16()

    def warnings(model, peft_config=None, **settings):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            warn_of_rounded_updates(model, SimpleNamespace(**vars(args) | settings), peft_config)
        return caplog.text

    expected = "dtype=bfloat16 with learning_rate=1e-06: half precision rounds away updates below about 4e-05"
    assert expected in warnings(half)
    assert expected in warnings("a/model", model_init_kwargs={"dtype": "bfloat16"})
    assert "Set dtype: float32 and bf16: true" in warnings("a/model", model_init_kwargs={"dtype": torch.bfloat16})
    assert warnings(half, learning_rate=4e-5) == warnings(half, LORA) == warnings(tiny_model()) == ""
    assert warnings("a/model") == warnings(half, fsdp="full_shard") == ""
