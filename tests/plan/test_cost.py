"""Formulas of `cost.py`: against transformers, peft, torch and the trainer, and by hand."""

from dataclasses import astuple, replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.seeds import shifted
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from pacs_trl.plan import cost
from pacs_trl.plan.cost import RECOMPUTATIONS, Execution, ModelShape, Passes
from pacs_trl.plan.sharding import Sharding


SMALL = ModelShape(3, 64, 160, 4, 2, head_dim=16, vocabulary=300, tied=True, qk_norm=True)


def transformers_model(shape: ModelShape, attn_implementation: str = "sdpa"):
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    sizes = dict(zip(names, astuple(shape), strict=False), vocab_size=shape.vocabulary, tie_word_embeddings=shape.tied)
    config_class = Qwen2Config if shape.qkv_bias else Qwen3Config if shape.qk_norm else LlamaConfig
    config = config_class(**sizes, **({} if shape.qkv_bias else {"head_dim": shape.head_dim}))
    return AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation)


LLAMAS = {"3.2-1B": 1.2, "3.2-3B": 3.2, "3.1-8B": 8.0, "3.3-70B": 70.6}  # 1e9 weights


@pytest.mark.parametrize("name", cost.KNOWN_MODELS)
def test_parameters_equal_those_of_transformers_and_of_the_model_card(name):
    with torch.device("meta"):
        model = transformers_model(cost.KNOWN_MODELS[name])
    assert cost.KNOWN_MODELS[name].parameters == sum(p.numel() for p in model.parameters())
    cards = {"Qwen/Qwen3-0.6B": 0.6, "Qwen/Qwen3-4B": 4.0, "Qwen/Qwen3-8B": 8.2, "Qwen/Qwen2.5-7B": 7.6}
    cards |= {"Qwen/Qwen3-14B": 14.8, "Qwen/Qwen3-32B": 32.8, "Qwen/Qwen2.5-0.5B-Instruct": 0.5}
    cards |= {f"meta-llama/Llama-{name}-Instruct": size for name, size in LLAMAS.items()}
    assert name not in cards or round(cost.KNOWN_MODELS[name].parameters / 1e9, 1) == cards[name]


def test_shape_is_read_from_a_directory(tmp_path):
    assert cost.model_shape("someone/something") is None
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    assert cost.model_shape(str(tmp_path)) is None
    transformers_model(SMALL).config.save_pretrained(tmp_path)
    assert cost.model_shape(str(tmp_path)) == SMALL


@pytest.mark.parametrize("model_type", cost._DENSE_DECODERS)
def test_parameters_of_other_dense_decoders_equal_those_of_transformers(model_type):
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "vocab_size": 300}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "head_dim": 16}
    config = AutoConfig.for_model(model_type, **sizes, **heads)
    with torch.device("meta"):
        number = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    assert cost.shape_of(config.to_dict()).parameters == number


def test_lora_parameters_equal_those_of_peft():
    model = get_peft_model(transformers_model(SMALL), LoraConfig(r=4, target_modules="all-linear"))
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert cost.lora_parameters(SMALL, 4) == trainable


def test_forward_flops_equal_the_counter_of_torch():
    length = 50
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        transformers_model(SMALL, "eager")(input_ids=torch.zeros(2, length, dtype=torch.long))
    # Eager attention computes the masked half too, as causal attention over twice the length would. Norms have no
    # products.
    assert counter.get_total_flops() == pytest.approx(SMALL.forward_flops(2 * length, 2 * length), rel=0.01)


def test_training_state_equals_that_worked_by_hand():
    def state(sharding: Sharding, trained_bytes=cost.FLOAT32_ADAM, frozen: float = 0, working_bytes: int = 2) -> float:
        settings = {"sharding": sharding, "trained_bytes": trained_bytes, "working_bytes": working_bytes}
        return cost.training_state_bytes(10.0, frozen, frozen_bytes=2, **settings)

    assert state(Sharding()) == 160
    assert state(Sharding("ddp")) == 200  # DDP has buckets
    assert state(Sharding("fsdp", 4)) == 40
    assert state(Sharding("fsdp", 4), frozen=100) == 40 + 200 / 4
    offloaded = Sharding("fsdp", 4, offloads_weights=True, offloads_optimizer=True)
    assert state(offloaded, frozen=100) == 0
    half = cost.TrainedBytes(2, 2, 4)
    assert state(Sharding(), half) == 80
    assert state(Sharding("ddp"), half) == 100
    assert state(Sharding("fsdp", 8), half) == 10
    assert state(Sharding(), frozen=100) == 160 + 200

    # ZeRO: 16 bytes that the optimizer updates and reads, and 2 + 2 for copies in half precision
    zero = {stage: Sharding("deepspeed", 4, zero_stage=stage) for stage in range(4)}
    assert state(zero[0]) == 160 + 20 + 20
    assert state(zero[1]) == 40 + 20 + 20
    assert state(zero[2]) == 40 + 20 + 5
    assert state(zero[3]) == 40 + 5 + 5
    assert state(zero[1], frozen=100) == 80 + 200 and state(zero[3], frozen=100) == 50 + 200 / 4
    without_optimizer = {stage: replace(sharding, offloads_optimizer=True) for stage, sharding in zero.items()}
    assert state(without_optimizer[1]) == 20 + 20  # gradients are offloaded after the last micro-batch
    assert state(without_optimizer[2]) == 20
    assert state(without_optimizer[3]) == 5
    assert state(replace(zero[3], offloads_weights=True), frozen=100) == 40 + 5
    assert state(replace(without_optimizer[3], offloads_weights=True), frozen=100) == 0
    assert state(zero[1], working_bytes=4) == 40 + 40 + 40


def test_gathered_weights_equal_those_worked_by_hand():
    """Of SMALL: a layer has 64 x (2 x 64 + 2 x 32) + 3 x 64 x 160 + 2 x 64 + 2 x 16 weights, the embedding
    300 x 64."""
    layer = 64 * 192 + 3 * 64 * 160 + 128 + 32
    two_layers = 2 * layer + 300 * 64
    assert SMALL.parameters > two_layers == 105_536
    assert cost.gathered_weights(SMALL, Sharding("ddp")) == 0
    assert cost.gathered_weights(SMALL, Sharding("deepspeed", 4, zero_stage=2)) == 0
    assert cost.gathered_weights(SMALL, Sharding("fsdp", 4)) == two_layers
    assert cost.gathered_weights(SMALL, Sharding("fsdp", 4, keeps_gathered=True)) == SMALL.parameters
    zero_3 = Sharding("deepspeed", 4, zero_stage=3)
    assert cost.gathered_weights(SMALL, zero_3) == SMALL.parameters  # below the 1e9 that it may keep
    assert cost.gathered_weights(cost.KNOWN_MODELS["Qwen/Qwen3-4B"], zero_3) == 1e9


def test_gathered_weights_of_the_kl_model_equal_those_worked_by_hand():
    """With FSDP 2 twice all of its weights, and 300 x 64 of the policy's head, or all of the policy's weights."""
    fsdp_2 = Sharding("fsdp", 4, wraps_kl_model_whole=True)
    assert cost.gathered_weights_in_kl_pass(SMALL, Sharding("fsdp", 4)) == 0
    assert cost.gathered_weights_in_kl_pass(SMALL, fsdp_2) == 2 * SMALL.parameters + 300 * 64
    kept = replace(fsdp_2, keeps_gathered=True)
    assert cost.gathered_weights_in_kl_pass(SMALL, kept) == 3 * SMALL.parameters


def test_seconds_of_decoding_equal_those_worked_by_hand():
    gpu = cost.H200._replace(bandwidth=1e12, bandwidth_share=0.5)
    weights = 1000 * 100
    cache = 8 * (10 * 100 + 100**2 / 2) * (2 * 3 * 2 * 16 * 2)  # all as long as can be
    needed = 8 * 110 * SMALL.kv_bytes_per_token
    for room, waves in ((1e12, 1), (needed / 2, 2)):  # half the cache that is needed: everything in two waves
        seconds = cost.decoding_seconds(SMALL, 8, 10, 100, 100, weight_bytes=1000, kv_cache_bytes=room, gpu=gpu)
        assert seconds == pytest.approx((waves * weights + cache) / 5e11)


@pytest.mark.parametrize(("scale", "ratio"), [(0.1, 2.0), (0.376, 1.72), (5.0, 1.07)])
def test_squared_lengths_are_those_of_drawn_ones(scale, ratio):
    """Lengths that stop with equal chance at each token, up to 8192 of them; a mean of 35 % at the scale 0.376."""
    generator = torch.Generator().manual_seed(shifted(0))
    draws = -torch.log(torch.rand(200_000, generator=generator, dtype=torch.float64))
    lengths = (draws * scale * 8192).clamp(max=8192)
    mean, squared = lengths.mean().item(), lengths.square().mean().item()
    assert cost.mean_square_length(mean, 8192) == pytest.approx(squared, rel=0.15)
    assert squared / mean**2 == pytest.approx(ratio, abs=0.03)
    assert cost.mean_square_length(8192, 8192) == 8192**2


TOKENS = 251  # no other size of the model


def saved(shape: ModelShape, dtype: str, autocast: bool) -> tuple[int, int]:
    """Bytes that autograd keeps, each storage once and weights left out; and bytes of the inputs of the layers."""
    model = transformers_model(shape).to(getattr(torch, dtype)).train().model
    storages: dict[int, torch.Tensor] = {}

    def keep(tensor):
        if TOKENS in tensor.shape:
            storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(input_ids=torch.zeros(1, TOKENS, dtype=torch.long), use_cache=False, output_hidden_states=True)
    # the graph is alive, so that no storage is counted under another's address
    inputs = sum(states.nbytes for states in output.hidden_states[:-1])
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values()), inputs


PRECISIONS = [("bfloat16", False, "bfloat16"), ("bfloat16", True, "bfloat16"), ("float32", True, "autocast")]


@pytest.mark.parametrize(("dtype", "autocast", "precision"), [*PRECISIONS, ("float32", False, "float32")])
@pytest.mark.parametrize("norms", [{"qk_norm": True}, {"qkv_bias": True}], ids=["qwen3", "qwen2"])
def test_activations_are_those_that_autograd_keeps(dtype, autocast, precision, norms):
    """A wider model than `SMALL`, so that what is counted per head and not per number hardly counts."""
    shape = ModelShape(3, 256, 768, 8, 2, head_dim=32, vocabulary=300, tied=True, **norms)
    kept, inputs = saved(shape, dtype, autocast)
    assert kept == pytest.approx(shape.activation_bytes(TOKENS, Execution(precision)), rel=0.05)
    # with checkpointing, the inputs of all layers and one layer: two layers less than without
    single, _ = saved(replace(shape, num_layers=1), dtype, autocast)
    planned = shape.activation_bytes(TOKENS, Execution(precision, "full"))
    assert inputs + single == pytest.approx(planned, rel=0.05)


@pytest.mark.parametrize("shape", [cost.KNOWN_MODELS["Qwen/Qwen3-4B"], SMALL], ids=["4B", "small"])
@pytest.mark.parametrize("precision", ["bfloat16", "autocast", "float32"])
def test_more_recomputation_and_compiled_layers_need_less_memory(shape, precision):
    kept = [shape.activation_bytes(1000, Execution(precision, recomputation)) for recomputation in RECOMPUTATIONS]
    assert kept[0] > kept[1] > kept[2]
    attended = shape.num_layers * (shape.attention_width * (4 if precision == "float32" else 2) + 4 * shape.num_heads)
    assert kept[1] - kept[2] == pytest.approx(1000 * attended)  # outputs of attention, and their normalizers
    assert shape.activation_bytes(1000, Execution(precision, compiled=True)) < kept[0]


def test_autocast_copies_weights_by_hand():
    """Two bytes per weight; with recomputation of one layer and the head, 300 x 64 weights."""
    assert SMALL.cast_bytes(Execution("bfloat16")) == SMALL.cast_bytes(Execution("float32")) == 0
    assert SMALL.cast_bytes(Execution("autocast")) == 2 * SMALL.parameters
    assert SMALL.cast_bytes(Execution("autocast", "full")) == 2 * (SMALL.layer_parameters + 300 * 64)


def test_seconds_of_an_update_equal_those_worked_by_hand():
    """A GPU on which each part but one takes no time."""
    fast = cost.Gpu("fast", 1e12, flops=1e30, bandwidth=1e30)
    sizes = {"tokens": 1e6, "mean_length": 0.0, "micro_batches": 0}
    layers = 2 * SMALL.num_layers * SMALL.layer_parameters * 1e6
    head = 2 * 300 * 64 * 1e6
    products = fast._replace(flops=1e12)
    for recomputation, passes in (("none", 3), ("selective", 4), ("full", 4)):
        seconds = cost.update_seconds(SMALL, products, Execution("float32", recomputation), Passes(1, 2), **sizes)
        assert seconds == pytest.approx(((passes + 2) * layers + (3 + 2) * head) / (0.75e12 * 0.95))
    # one more micro-batch launches the kernels of three layers: a gradient, and two forward passes
    more = {**sizes, "tokens": 0, "micro_batches": 1}
    seconds = cost.update_seconds(SMALL, fast, Execution("float32"), Passes(1, 2), **more)
    assert seconds == pytest.approx(3 * (1.1e-3 + 2 * 0.3e-3))
