"""Automatic memory settings in `plan`: of the options that fit, the one that costs least."""

from dataclasses import replace

import pytest

from pacs_trl.plan import cost
from pacs_trl.plan.cost import GIB, GPUS, RECOMPUTATIONS
from pacs_trl.plan.estimates import Costs, Estimate
from pacs_trl.plan.launch import Launch
from pacs_trl.plan.sharding import Sharding
from pacs_trl.plan.workload import EFFICIENT_TOKENS, choose, recomputations_of
from pacs_trl.recipe import Recipe


AUTO = {"gradient_checkpointing": "auto", "max_tokens_per_micro_batch": "auto"}
SETTINGS = {
    "method": "pacs", "model_name_or_path": "Qwen/Qwen3-1.7B", "dataset_name": "deepscaler", "max_prompt_length": 512,
    "bf16": True, "learning_rate": 1e-6, "max_completion_length": 3584, "num_generations": 8,
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "steps_per_generation": 16, "max_steps": 10,
}  # fmt: skip
ONE = Launch(1, Sharding(), "one process")


def costs(gpu: str = "h200", compiled: bool = True, **changes) -> Costs:
    recipe = Recipe.from_settings({**SETTINGS, **AUTO, **changes}, 1)
    return Estimate(recipe, ONE, GPUS[gpu], compiled=compiled).costs


def test_no_recomputation_as_long_as_micro_batches_stay_efficient():
    """On an H200 all is kept; on an H100 with 24 GiB less for the state of a larger model it is not."""
    large, small = costs(), costs("h100-80")
    assert large.choice.recomputation == "none" and large.choice.max_tokens >= EFFICIENT_TOKENS
    assert (
        small.choice.recomputation == "none" and EFFICIENT_TOKENS <= small.choice.max_tokens < large.choice.max_tokens
    )
    assert costs("l40s").choice.recomputation != "none"


@pytest.mark.parametrize("room", [2, 3, 5, 8, 13, 21, 34, 55, 89])
@pytest.mark.parametrize("method", ["pacs", "grpo"])
def test_the_choice_is_the_fastest_that_fits(room, method):
    """Up to 2 %, within which less recomputation and smaller micro-batches win."""
    workload = costs(method=method).workload(1254)
    choice = choose(workload, room * GIB)
    most = {
        recomputation: workload.tokens_that_fit(recomputation, 0.9 * room * GIB) for recomputation in RECOMPUTATIONS
    }
    possible = [name for name in RECOMPUTATIONS if most[name] >= workload.longest]
    if not possible:
        assert choice is None
        return
    assert workload.longest <= choice.max_tokens <= most[choice.recomputation]
    seconds = workload.seconds(choice.recomputation, choice.max_tokens)
    for recomputation in possible:
        assert seconds <= 1.02 * workload.seconds(recomputation, min(most[recomputation], 10**6))


def test_split_groups_cost_a_forward_pass_after_the_first_update():
    """Three of four updates of a rollout: a group of 256 + 8 x 1,254 tokens fits into 10,288."""
    pacs, grpo = (costs(method=method).workload(1254) for method in ("pacs", "grpo"))
    assert not pacs.has_split_groups(10_288) and pacs.has_split_groups(10_287)
    whole, split = (pacs.passes(has_split_groups=pacs.has_split_groups(size)) for size in (10_288, 10_287))
    assert split.gradient == whole.gradient == 1 and split.forward == whole.forward + 3 / 4
    assert not grpo.has_split_groups(5_000)
    assert pacs.seconds("none", 10_287) > pacs.seconds("none", 10_288)


def test_small_micro_batches_cost_time():
    workload = costs(method="grpo").workload(1254)
    seconds = [workload.seconds("none", size) for size in (4096, 8192, 16384, 32768)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] - seconds[1] > 2 * (seconds[1] - seconds[2])  # above 8,192 tokens little is gained


def test_reentrant_recomputation_is_never_selective():
    """As a run chooses; TRL sets it for adapters with ZeRO-3."""
    reentrant = {"gradient_checkpointing_kwargs": {"use_reentrant": True}}
    assert costs("l40s").choice.recomputation == "selective"
    assert costs("l40s", **reentrant).choice.recomputation == "full"
    automatic = Recipe.from_settings({**SETTINGS, **AUTO}, 1).training
    for has_adapter, is_zero3, number in ((False, True, 3), (True, False, 3), (True, True, 2)):
        assert len(recomputations_of(automatic, has_adapter=has_adapter, is_zero3=is_zero3)) == number


def test_what_is_set_is_not_chosen():
    assert costs(gradient_checkpointing=True).choice.recomputation == "full"
    assert costs(max_tokens_per_micro_batch=9000).choice.max_tokens == 9000
    assert costs(max_tokens_per_micro_batch=None).choice.max_tokens is None
    fixed = costs(gradient_checkpointing=False, max_tokens_per_micro_batch=5000)
    assert fixed.choice[:2] == ("none", 5000) and fixed.micro_batch_tokens == 5000


# 28 layers of 50.3e6 weights, and 151,936 x 2,048 of the embedding, which is the head too
SHAPE = cost.KNOWN_MODELS["Qwen/Qwen3-1.7B"]
IN_LAYERS, EMBEDDED = 28 * SHAPE.layer_parameters, 151_936 * 2048
HALF, ADAPTER = {"dtype": "bfloat16"}, {"dtype": "bfloat16", "use_peft": True}
FOUR_BITS, DOUBLE = {"load_in_4bit": True}, {"load_in_4bit": True, "use_bnb_nested_quant": True}


def on_average(layer_bytes: float, other_bytes: float) -> float:
    return (layer_bytes * IN_LAYERS + other_bytes * (SHAPE.parameters - IN_LAYERS)) / SHAPE.parameters


BYTES_PER_WEIGHT = {
    "float32": ({}, 4, (4, 4, 8)),
    "bfloat16": (HALF, 2, (2, 2, 4)),
    "8-bit Adam": ({"optim": "adamw_torch_8bit"}, 4, (4, 4, 2)),
    "8-bit Adam, embeddings": ({"optim": "adamw_bnb_8bit"}, 4, (4, 4, 2 + 6 * EMBEDDED / SHAPE.parameters)),
    "bfloat16, 8-bit Adam": (HALF | {"optim": "adamw_torch_8bit"}, 2, (2, 2, 2)),
    "SGD": ({"optim": "sgd"}, 4, (4, 4, 0)),
    "SGD with momentum": ({"optim": "sgd", "optim_args": "momentum=0.9"}, 4, (4, 4, 4)),
    "32-bit moments": (HALF | {"optim": "paged_adamw_32bit"}, 2, (2, 2, 8)),
    "adapter": (ADAPTER, 2, (4, 4, 8)),
    "adapter, 8-bit Adam": (ADAPTER | {"optim": "adamw_8bit"}, 2, (4, 4, 2)),
    "8 bits": (ADAPTER | {"load_in_8bit": True}, on_average(1, 2), (2, 2, 4)),
    "4 bits": (ADAPTER | FOUR_BITS, on_average(0.5 + 4 / 64, 2), (2, 2, 4)),
    "4 bits, embeddings in float32": (FOUR_BITS | {"use_peft": True}, on_average(0.5625, 4), (2, 2, 4)),
    "4 bits, double": (ADAPTER | DOUBLE, on_average(0.5 + (1 + 4 / 256) / 64, 2), (2, 2, 4)),
}


@pytest.mark.parametrize(("settings", "frozen", "trained"), BYTES_PER_WEIGHT.values(), ids=BYTES_PER_WEIGHT)
def test_bytes_per_weight_follow_from_dtype_optimizer_and_quantization(settings, frozen, trained):
    estimated = costs(**settings)
    assert estimated.weights.frozen == pytest.approx(frozen)
    assert estimated.weights.trained == pytest.approx(trained) and not estimated.weights.assumptions
    number_frozen = SHAPE.parameters if "use_peft" in settings else 0
    assert estimated.state == pytest.approx(frozen * number_frozen + sum(trained) * estimated.trained_weights)


def test_sharded_training_keeps_float32_copies_of_half_precision_weights():
    """With mixed precision, also of the adapter of a quantized model."""
    for settings in (HALF, ADAPTER | FOUR_BITS):
        recipe = Recipe.from_settings({**SETTINGS, **AUTO, **settings}, 8)
        sharded = Estimate(recipe, Launch(8, Sharding("fsdp", 8), "eight processes", "FSDP", 2, "bf16")).costs
        assert sharded.weights.trained == (4, 4, 8)


def test_fsdp_collects_gradients_of_every_step_that_may_have_several_micro_batches():
    """Without gradient accumulation, too, where tokens bound a micro-batch: 4 bytes per weight."""
    launch, settings = Launch(8, Sharding("fsdp", 8), "", "FSDP", 2, "bf16"), {"gradient_accumulation_steps": 1}

    def collected(**changes) -> float:
        recipe = Recipe.from_settings({**SETTINGS, **settings, **changes}, 8)
        return Estimate(recipe, launch).costs.collected

    assert collected() == 0
    assert collected(max_tokens_per_micro_batch=9000) == collected(**AUTO) == 4 * SHAPE.parameters
    assert collected(max_tokens_per_micro_batch=9000, per_device_train_batch_size=1) == 0
    assert collected(gradient_accumulation_steps=2) == 4 * SHAPE.parameters


def test_plan_says_how_the_training_state_is_divided(plan, launch_file):
    """Of 4.02e9 weights on 8 processes: ZeRO-2 has 16 + 2 bytes / 8 and 2 bytes of each, and 1e9 for buckets."""
    zero_2 = launch_file("distributed_type: DEEPSPEED", "num_processes: 8", "mixed_precision: bf16")
    _, output = plan("--accelerate_config", zero_2)
    size = ((18 / 8 + 2) * cost.KNOWN_MODELS["Qwen/Qwen3-4B"].parameters + 1e9) / GIB
    assert f"training state      {size:5.1f} GiB" in output
    assert "each process keeps 1/8 of weights, gradients, moments, copied gradients; all copied weights" in output
    assert "20 bytes per trained weight (weight 4, gradient 4, moments 8, DeepSpeed's copies 4)" in output
    offloaded = launch_file(
        *("distributed_type: FSDP", "num_processes: 8", "mixed_precision: bf16"),
        "fsdp_config: {fsdp_version: 2, fsdp_offload_params: true, fsdp_reshard_after_forward: false}",
    )
    _, output = plan("--accelerate_config", offloaded)
    assert "training state  " not in output and "of all layers" in output
    assert "each process keeps weights, gradients, moments in memory of the CPU" in output
    assert "The time of the optimizer step on the CPU is not counted." in output


def test_weights_that_deepspeed_casts_have_two_bytes():
    """Of float32 weights under bf16: those of a KL reference, a snapshot, and below an adapter; FSDP keeps 4."""
    zero_2 = Launch(8, Sharding("deepspeed", 8, zero_stage=2), "", "DEEPSPEED", None, "bf16")
    fsdp = Launch(8, Sharding("fsdp", 8), "", "FSDP", 1, "bf16")

    def state(launch: Launch, **changes) -> float:
        recipe = Recipe.from_settings(SETTINGS | changes, 8)
        return Estimate(recipe, launch).costs.state

    for more in ({"beta": 0.1}, {"reference": "snapshot"}):
        assert state(zero_2, **more) - state(zero_2) == pytest.approx(2 * SHAPE.parameters)
        assert state(fsdp, **more) - state(fsdp) == pytest.approx(4 * SHAPE.parameters / 8)
    adapter = cost.lora_parameters(SHAPE, 16)
    expected = 2 * SHAPE.parameters + (16 / 8 + 2 + 2 / 8) * adapter + 2 * cost.ZERO_BUCKET
    assert state(zero_2, use_peft=True) == pytest.approx(expected)
    assert state(fsdp, use_peft=True) == pytest.approx(4 * SHAPE.parameters / 8 + 2 * adapter)


def test_a_snapshot_of_weights_in_half_precision_has_two_bytes():
    half = {"dtype": "bfloat16"}
    snapshot = costs(**half, reference="snapshot").state - costs(**half).state
    assert snapshot == pytest.approx(2 * SHAPE.parameters)


def test_what_is_not_known_about_weights_is_assumed_in_words(plan):
    _, output = plan(**SETTINGS | {"optim": "adafactor"})
    assert "  - optim: adafactor is counted with two moments per weight, as Adam has." in output
    _, output = plan(**SETTINGS | {"dtype": "auto"})
    assert "8 bytes per trained weight (weight 2, gradient 2, moments 4)." in output
    assert "  - dtype: auto is counted as half precision." in output
    quantization = {"quant_method": "awq", "bits": 4}
    _, output = plan(**SETTINGS | ADAPTER | {"model_init_kwargs": {"quantization_config": quantization}})
    assert "  - Weights that are quantized with awq are counted with 2 bytes." in output


def test_a_quantized_engine_needs_less_memory():
    """As the trainer does, in layers; the embedding has two bytes."""
    settings = ADAPTER | {"use_vllm": True, "vllm_max_model_length": 4096}
    plain, quantized = (costs(**settings, load_in_4bit=bits).engine_needed for bits in (False, True))
    assert plain - quantized == pytest.approx((2 - 0.5625) * IN_LAYERS)


def test_on_a_cpu_nothing_is_recomputed():
    choice = costs(use_cpu=True, bf16=False).choice
    assert choice[:2] == ("none", None)


def test_plan_prints_the_choice_and_its_reason(plan):
    _, output = plan(**AUTO | SETTINGS)
    assert "auto               no recomputation, micro-batches of " in output and "GiB that are left)" in output
    assert "packed: no padding" in output and "layers are compiled" in output
    _, output = plan("--gpu", "l40s", **AUTO | SETTINGS | {"compile_layers": False})
    assert "without recomputation" in output and "layers are compiled" not in output


def test_a_completion_that_does_not_fit_is_a_conflict(plan):
    status, output = plan("--gpu", "rtx4090", **AUTO | SETTINGS)
    assert status == 1 and "A completion of 4,096 tokens" in output and "use_peft: true" in output


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"packing": "never"}, "padded: packing is never"),
        (
            {"attn_implementation": "flex_attention"},
            "padded: attn_implementation=flex_attention is not packed, sdpa is",
        ),
        ({"attn_implementation": "sdpa"}, "packed: "),
    ],
)
def test_plan_says_whether_completions_are_packed(plan, settings, words):
    assert words in plan(**SETTINGS | settings)[1]


def test_compiled_layers_and_attention_follow_from_the_recipe():
    def executions(**changes):
        recipe = Recipe.from_settings({**SETTINGS, **changes}, 1)
        return Estimate(recipe, ONE).execution

    assert executions().compiled and executions().attention == "sdpa"
    assert not executions(compile_layers=False).compiled
    assert not executions(torch_compile=True).compiled
    assert executions(attn_implementation="flash_attention_4").attention == "fa4"
    zero3 = replace(ONE, sharding=Sharding("deepspeed", zero_stage=3), kind="DEEPSPEED")
    assert not Estimate(Recipe.from_settings(SETTINGS, 1), zero3).execution.compiled
