"""`pacs-trl plan`: estimates against independent counts, and each conflict with its values and remedy."""

import os
import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config, TrainingArguments

from pacs_trl.plan.check import as_if_launched, check_recipe, main, step_sizes
from pacs_trl.plan.cost import (
    KNOWN_MODELS,
    Gpu,
    ModelShape,
    decoding_seconds,
    lora_parameters,
    mean_square_length,
    model_shape,
    training_forward_equivalents,
    training_state_bytes,
)
from pacs_trl.recipe import read_recipe


REPOSITORY = Path(__file__).parents[2]
SMALL = ModelShape(3, 64, 160, 4, 2, head_dim=16, vocabulary=300, tied=True, qk_norm=True)


def transformers_model(shape: ModelShape, attn_implementation: str = "sdpa"):
    config_class = Qwen2Config if shape.qkv_bias else Qwen3Config
    head_dim = {} if shape.qkv_bias else {"head_dim": shape.head_dim}
    config = config_class(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        tie_word_embeddings=shape.tied,
        **head_dim,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation)


class TestModelShape:
    @pytest.mark.parametrize("name", KNOWN_MODELS)
    def test_parameters_equal_those_of_transformers(self, name):
        with torch.device("meta"):
            model = transformers_model(KNOWN_MODELS[name])
        assert KNOWN_MODELS[name].parameters == sum(p.numel() for p in model.parameters())

    @pytest.mark.parametrize(
        ("name", "billions"),  # as the model cards say
        [("Qwen/Qwen3-0.6B", 0.6), ("Qwen/Qwen3-4B", 4.0), ("Qwen/Qwen3-8B", 8.2), ("Qwen/Qwen2.5-7B", 7.6)],
    )
    def test_parameters_are_those_of_the_model_card(self, name, billions):
        assert round(KNOWN_MODELS[name].parameters / 1e9, 1) == billions

    def test_local_config(self, tmp_path):
        transformers_model(SMALL).config.save_pretrained(tmp_path)
        assert model_shape(str(tmp_path)) == SMALL

    def test_unknown(self, tmp_path):
        assert model_shape("someone/something") is None
        (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
        assert model_shape(str(tmp_path)) is None

    def test_lora_parameters_equal_those_of_peft(self):
        model = get_peft_model(transformers_model(SMALL), LoraConfig(r=4, target_modules="all-linear"))
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert lora_parameters(SMALL, 4, ["all-linear"]) == trainable
        assert lora_parameters(SMALL, 4, ["q_proj"]) == 3 * 4 * (64 + 64)

    def test_forward_flops_equal_the_counter_of_torch(self):
        length = 50
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            transformers_model(SMALL, "eager")(input_ids=torch.zeros(2, length, dtype=torch.long))
        # Eager attention computes the masked half too, as causal attention over twice the length would. Norms have no
        # matrix products.
        expected = SMALL.forward_flops(2 * length, 2 * length)
        assert counter.get_total_flops() == pytest.approx(expected, rel=0.01)


class TestCosts:
    def test_training_state_by_hand(self):
        trained = {"trained": 10.0, "frozen": 0.0, "frozen_bytes": 0}
        assert training_state_bytes(**trained, sharding="none", processes=4) == 180
        assert training_state_bytes(**trained, sharding="gradients", processes=4) == 20 + 40
        assert training_state_bytes(**trained, sharding="full", processes=4) == 40
        assert training_state_bytes(1.0, 100.0, frozen_bytes=2, sharding="none", processes=1) == 18 + 200

    def test_forward_passes_by_hand(self):
        costs = {
            method: training_forward_equivalents(method, checkpointing=True, updates=4)
            for method in ("pacs", "grpo", "ppo")
        }
        assert costs == {"pacs": 4 + 1.5, "grpo": 5, "ppo": 2 * 4 + 1 + 1}
        assert training_forward_equivalents("pacs", checkpointing=False, updates=1) == 3

    def test_decoding_by_hand(self):
        gpu = Gpu(bandwidth=1e12, decoding_share=0.5)
        weights = 2 * SMALL.parameters * 100
        cache = 8 * (10 * 100 + 100**2 / 2) * (2 * 3 * 2 * 16 * 2)  # all as long as can be
        seconds = decoding_seconds(SMALL, 8, 10, 100, 100, kv_cache_bytes=1e12, gpu=gpu)
        assert seconds == pytest.approx((weights + cache) / 5e11)
        # half the cache that is needed: everything in two waves
        needed = 8 * 110 * SMALL.kv_bytes_per_token
        seconds = decoding_seconds(SMALL, 8, 10, 100, 100, kv_cache_bytes=needed / 2, gpu=gpu)
        assert seconds == pytest.approx((2 * weights + cache) / 5e11)

    @pytest.mark.parametrize(("scale", "ratio"), [(0.1, 2.0), (0.376, 1.72), (5.0, 1.07)])
    def test_squared_lengths_are_those_of_drawn_ones(self, scale, ratio):
        """Lengths that stop with equal chance at each token, up to 8192 of them; a mean of 35 % at the scale 0.376."""
        generator = torch.Generator().manual_seed(0)
        draws = -torch.log(torch.rand(200_000, generator=generator, dtype=torch.float64))
        lengths = (draws * scale * 8192).clamp(max=8192)
        mean, squared = lengths.mean().item(), lengths.square().mean().item()
        assert mean_square_length(mean, 8192) == pytest.approx(squared, rel=0.02)
        assert squared / mean**2 == pytest.approx(ratio, abs=0.03)
        assert mean_square_length(8192, 8192) == 8192**2


PRECISIONS = [("bfloat16", False, "bfloat16"), ("bfloat16", True, "bfloat16"), ("float32", True, "autocast")]


class TestActivations:
    TOKENS = 251  # no other size of the model

    def saved(self, shape: ModelShape, dtype: str, autocast: bool) -> tuple[int, int]:
        """Bytes that autograd keeps, each storage once and weights left out; and bytes of the inputs of the layers."""
        model = transformers_model(shape).to(getattr(torch, dtype)).train().model
        storages: dict[int, torch.Tensor] = {}
        inputs = []
        for layer in model.layers:
            layer.register_forward_pre_hook(lambda module, args: inputs.append(args[0].nbytes))

        def keep(tensor):
            if self.TOKENS in tensor.shape:
                storages[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with hooks, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = model(input_ids=torch.zeros(1, self.TOKENS, dtype=torch.long), use_cache=False)
        assert output is not None  # the graph is alive, and no storage is counted under another's address
        return sum(tensor.untyped_storage().nbytes() for tensor in storages.values()), sum(inputs)

    @pytest.mark.parametrize(("dtype", "autocast", "precision"), [*PRECISIONS, ("float32", False, "float32")])
    @pytest.mark.parametrize("norms", [{"qk_norm": True}, {"qkv_bias": True}], ids=["qwen3", "qwen2"])
    def test_formula_and_measurement_agree(self, dtype, autocast, precision, norms):
        """A wider model than `SMALL`, so that what is counted per head and not per number hardly counts."""
        shape = ModelShape(3, 256, 768, 8, 2, head_dim=32, vocabulary=300, tied=True, **norms)
        saved, inputs = self.saved(shape, dtype, autocast)
        planned = shape.activation_bytes(self.TOKENS, checkpointing=False, precision=precision)
        assert saved == pytest.approx(planned, rel=0.05)
        # with checkpointing, the inputs of all layers and one layer: two layers less than without
        single, _ = self.saved(replace(shape, num_layers=1), dtype, autocast)
        planned = shape.activation_bytes(self.TOKENS, checkpointing=True, precision=precision)
        assert inputs + single == pytest.approx(planned, rel=0.05)


RECIPE = {
    "method": "pacs",
    "model_name_or_path": "Qwen/Qwen3-4B",
    "dtype": "float32",
    "dataset_name": "deepscaler",
    "num_generations": 8,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 4,
    "steps_per_generation": 16,
    "max_completion_length": 1000,
    "learning_rate": 1e-6,
    "max_steps": 480,
    "save_steps": 80,
    "bf16": True,
}
FSDP2 = "recipes/accelerate_configs/fsdp2_8x8.yaml"


@pytest.fixture
def plan(tmp_path, capsys, monkeypatch, request):
    """Run the command on `RECIPE` with changes (`None` removes a key), without network; return status and output."""

    def refuse(*args, **kwargs):
        raise AssertionError("plan must not use the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.chdir(request.config.rootpath)

    def run(*arguments: str, **changes) -> tuple[int, str]:
        file = tmp_path / "recipe.yaml"
        file.write_text(yaml.safe_dump({k: v for k, v in (RECIPE | changes).items() if v is not None}))
        status = main(["--config", str(file), *arguments])
        return status, capsys.readouterr().out

    run.file = tmp_path / "recipe.yaml"
    return run


class TestOutput:
    def test_a_legal_recipe(self, plan):
        status, output = plan("--accelerate-config", FSDP2, "--mean-length", "500")
        assert status == 0 and "No conflicts." in output
        assert "1024 prompts x 8 completions = 8192 rows, 128 per process" in output
        assert "256 prompts x 8 = 2048 rows (8 rows x 64 processes x 4 accumulation steps)" in output
        assert "4 optimizer steps per generation" in output
        assert "rollout steps      120 (3.0 epochs of 40315 problems)" in output
        assert "completions        983,040" in output
        assert "tokens generated   491.5 million at a mean of 500 per completion, at most 983.0 million" in output
        assert "4.02e9 parameters" in output and "fits" in output and "GPU hours" in output

    def test_overrides_and_number_of_processes(self, plan):
        arguments = ("--gradient_accumulation_steps", "32", "--steps_per_generation=128")
        status, output = plan("--num-processes", "8", *arguments)
        assert status == 0
        assert "1024 prompts x 8 completions = 8192 rows, 1024 per process" in output
        assert "DOES NOT FIT" not in output and "8 processes, DDP" in output

    def test_what_does_not_fit(self, plan):
        status, output = plan(model_name_or_path="Qwen/Qwen3-8B", steps_per_generation=4, save_steps=80)
        assert status == 1 and "DOES NOT FIT" in output
        assert "(training state 137, activations" in output and "an H200 has 131" in output  # 18 bytes x 8.19e9
        assert "launch with accelerate_configs/fsdp2.yaml" in output and "use_peft: true" in output
        status, output = plan("--accelerate-config", FSDP2, model_name_or_path="Qwen/Qwen3-8B", save_steps=80)
        assert status == 0 and "fits" in output

    def test_checkpoints(self, plan):
        """Qwen3-4B: 12 bytes x 4.02e9 = 45.0 GiB with float32 weights; 480 / 80 of them."""
        status, output = plan("--accelerate-config", FSDP2)
        assert (
            status == 0 and "checkpoint           45.0 GiB   weights, two Adam moments; 6 of them: 270 GiB" in output
        )
        _, output = plan("--accelerate-config", FSDP2, reference="snapshot", save_total_limit=2)
        assert "checkpoint           59.9 GiB" in output and "reference snapshot; 2 of them: 120 GiB" in output
        assert "Disk" not in plan(save_strategy="no")[1]

    def test_a_launch_that_changes_the_batch_is_said_in_words(self, plan):
        status, output = plan("--num-processes", "8", expected_processes=64)
        assert status == 0
        assert "A generation has one eighth of the recipe's batch: 128 prompts instead of 1,024." in output
        assert "An optimizer step has one eighth of the recipe's batch: 32 prompts instead of 256." in output
        arguments = ("--gradient_accumulation_steps", "32", "--steps_per_generation", "128")
        assert "recipe's batch" not in plan("--num-processes", "8", *arguments, expected_processes=64)[1]
        assert "has twice the recipe's batch" in plan("--num-processes", "8", expected_processes=4)[1]

    def test_unknown_model(self, plan):
        status, output = plan(model_name_or_path="someone/something")
        assert status == 0 and "not estimated, because the shape of 'someone/something' is not known" in output

    def test_epochs_instead_of_steps(self, plan):
        _, output = plan("--num-processes", "64", max_steps=None, num_train_epochs=2)
        assert "optimizer steps    312" in output  # 2 x 40315 // 1024 generations x 4
        _, output = plan(max_steps=None, dataset_name="someone/data")
        assert "unknown: max_steps is not set" in output

    def test_ppo_has_two_models(self, plan):
        state = []
        for method in ("grpo", "ppo"):
            _, output = plan("--accelerate-config", FSDP2, method=method)
            state.append(float(output.split("training state")[1].split()[0]))
        assert state[1] == pytest.approx(2 * state[0], abs=0.1)


class TestConflicts:
    @pytest.mark.parametrize(
        ("name", "value", "words"),
        [
            (
                "per_device_train_batch_size",
                0,
                "at least 1, got 0: it counts the rows of a micro-batch. Nearest legal value: 1",
            ),
            ("steps_per_generation", 0, "at least 1, got 0"),
            ("max_completion_length", 0, "at least 1, got 0"),
            ("gradient_accumulation_steps", 0, "at least 1, got 0"),
            ("gradient_accumulation_steps", 4.5, "at least 1, got 4.5"),
            ("gradient_accumulation_steps", "four", "at least 1, got 'four'"),
            ("num_iterations", -2, "at least 1, got -2"),
            ("num_generations", 1, "at least 2, got 1"),
            ("generation_batch_size", 0, "at least 1, got 0"),
        ],
    )
    def test_counts(self, plan, name, value, words):
        status, output = plan(**{name: value}, num_train_epochs="two")
        assert status == 1 and f"{name} must be a whole number of {words}" in output
        assert "`num_train_epochs` is refused" in output and "2 conflict(s)" in output  # the rest is looked at
        assert "Nearest legal value: " in output or "Its default is 1." in output

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            (
                {"temperature": 0, "top_p": 2},
                ["temperature must be above 0, got 0", "top_p must be above 0 and at most 1"],
            ),
            ({"learning_rate": float("nan")}, ["learning_rate must be at least 0, got nan"]),
            (
                {"learning_rate": "-1e-6", "adam_beta1": 1.5},
                ["got '-1e-6'", "adam_beta1 must be at least 0 and below 1"],
            ),
            (
                {"reward_weights": [0.5, 0.5]},
                ["must have one weight for each of the 1 reward functions (math_reward)"],
            ),
            ({"reward_weights": [0.5]}, ["must not be negative and must sum to 1, not 0.5"]),
            ({"reward_weights": ["a"]}, ["reward_weights must be a list of finite numbers"]),
            ({"reward_funcs": []}, ["reward_funcs is empty"]),
            ({"verification_cpu_seconds": 9, "lora_r": 0}, ["lora_r must be a whole number", "`cpu_seconds` must be"]),
            ({"verification_cpu_seconds": 9}, ["`cpu_seconds` must be positive and at most `timeout_seconds`"]),
            ({"verification_protocol": "mine"}, ["verification_protocol must be one of authors, trl"]),
            ({"model_name_or_path": "./nope"}, ["The model directory './nope' does not exist"]),
            ({"model_name_or_path": "miniature/division"}, ["There is no miniature task 'division'"]),
            ({"save_steps": 0, "vllm_mode": "sideways"}, ["save_steps must be above 0", "one of colocate, server"]),
            ({"use_vllm": True, "vllm_tensor_parallel_size": 0}, ["vllm_tensor_parallel_size must be a whole number"]),
            (
                {"bf16": [True], "output_dir": 5},
                ["bf16 must be true or false, got a list", "output_dir must be text, got 5"],
            ),
            ({"save_strategy": False}, ["YAML reads an unquoted no or off as false: quote it"]),
            ({"dtype": "half", "seed": -1}, ["dtype must be one of auto, bfloat16", "seed must be a whole number"]),
            ({"accelerator_config": {"a": 1}, "env": 5}, ["env must be a mapping", "unexpected keyword argument 'a'"]),
            ({"max_steps": 0}, ["max_steps must be a whole number of at least 1, or -1, got 0"]),
        ],
    )
    def test_values_that_stop_or_spoil_any_run(self, plan, changes, words):
        """All of them at once, never a traceback; and the run refuses them before it starts."""
        status, output = plan(**changes)
        assert status == 1 and f"{len(words)} conflict(s)" in output
        for sentence in words:
            assert sentence in output
        if "model_name_or_path" not in changes:
            arguments = ["--dataset_name", "gsm8k", "--use_cpu", "--bf16", "false"] if "bf16" not in changes else []
            with pytest.raises(ValueError, match=re.escape(words[0])):
                read_recipe(["--config", str(plan.file), *arguments])

    def test_null(self, plan):
        status, output = plan("--num_generations", "null", "--learning_rate", "null", "--steps_per_generation", "null")
        assert status == 1 and "2 conflict(s)" in output
        assert (
            "num_generations must be a whole number of at least 2, got None" in output
            and "Its default is 8." in output
        )
        assert "learning_rate must have a value, got null" in output

    def test_values_that_are_no_numbers(self, plan):
        """One sentence each instead of the usage of all settings."""
        status, output = plan("--num_train_epochs", "two", gradient_accumulation_steps="four")
        assert status == 1 and "2 conflict(s)" in output
        assert "`num_train_epochs` is refused: invalid float value: 'two'." in output
        assert "usage:" not in output

    def test_text_that_is_no_yaml(self, plan):
        assert plan("--system_prompt", "Answer {briefly: ")[0] == 0

    def test_reward_functions(self, plan, tmp_path, monkeypatch):
        (tmp_path / "own_rewards.py").write_text(
            "def sure(completions, **kwargs):\n    return [1.0] * len(completions)\n"
        )
        (tmp_path / "broken_rewards.py").write_text("import no_such_module\n")
        monkeypatch.syspath_prepend(tmp_path)
        assert plan(reward_funcs=["math_reward", "own_rewards.sure"])[0] == 0
        assert plan("--reward_funcs", "own_rewards.sure")[0] == 0
        status, output = plan(
            "--reward_funcs", "maths_reward", "own_rewards.unsure", "broken_rewards.sure", "nowhere.sure"
        )
        assert status == 1 and "4 conflict(s)" in output
        assert "There is no reward function 'maths_reward'" in output and "math_reward" in output
        assert "'own_rewards' has no function 'unsure'" in output
        assert (
            "'broken_rewards.sure' cannot be imported here (ModuleNotFoundError: No module named 'no_such_module')"
            in output
        )
        assert "'nowhere.sure' cannot be imported here" in output
        status, output = plan(reward_funcs="math_reward")
        assert status == 1 and "reward_funcs must be a list, got 'math_reward'. Write [math_reward]." in output

    @pytest.mark.parametrize("length", ["0", "-5", "1001"])
    def test_mean_length(self, plan, length):
        status, output = plan("--mean-length", length)
        assert status == 1 and f"between 1 and max_completion_length=1000, got {length}" in output
        assert "tokens generated" not in output

    def test_too_few_problems(self, plan):
        arguments = ("--accelerate-config", FSDP2)  # 1024 prompts a generation
        status, output = plan(*arguments, max_train_samples=1000)
        assert status == 1 and "A generation needs 1024 different prompts, but 1000 problems are trained on" in output
        assert plan(*arguments, max_train_samples=1024)[0] == 0

    def test_of_recipe_and_launch_together(self, plan):
        status, output = plan("--num-processes", "0", num_iterations=0, reward_funcs=["maths_reward"])
        assert status == 1 and "3 conflict(s)" in output
        assert "--num-processes must be at least 1, got 0" in output and "num_iterations must be" in output

    def test_recipes_that_are_no_mapping(self, tmp_path, capsys):
        recipe = tmp_path / "recipe.yaml"
        for text, words in (("a: [1\nb: }", "is not YAML: while parsing"), ("", "got nothing"), ("- a", "got list")):
            recipe.write_text(text)
            assert main(["--config", str(recipe)]) == 1
            assert words in capsys.readouterr().out

    def test_all_at_once(self, plan):
        status, output = plan(pacs_betta=1.0, epsilon=0.3, dtype="bfloat16", per_device_train_batch_size=3)
        assert status == 1
        assert "`pacs_betta` is not a setting of method pacs. Did you mean `pacs_beta`?" in output
        assert "per_device_train_batch_size=3 x 1 processes x steps_per_generation=16 = 48" not in output  # 6 groups
        assert "gradient_accumulation_steps=4 = 12. Nearest legal values: gradient_accumulation_steps=8" in output
        assert "PACSConfig does not take epsilon=0.3" in output

    def test_batch_sizes(self, plan):
        status, output = plan("--num-processes", "3", steps_per_generation=5)
        assert status == 1
        assert "steps_per_generation=5 must be a multiple of gradient_accumulation_steps=4" in output
        assert "steps_per_generation=4 or 8" in output

    def test_generation_batch_size(self, plan):
        status, output = plan(steps_per_generation=None, generation_batch_size=100)
        assert status == 1 and "Nearest legal values: 96 or 104" in output
        status, output = plan(generation_batch_size=128)
        assert status == 1 and "give only one of them" in output

    def test_bfloat16_weights(self, plan):
        status, output = plan(dtype="bfloat16")
        assert status == 1 and "dtype=bfloat16 with learning_rate=1e-06" in output and "Set dtype: float32" in output
        status, output = plan("--accelerate-config", FSDP2, dtype="bfloat16")
        assert status == 0 and "make float32 copies" in output
        assert plan(dtype="bfloat16", use_peft=True)[0] == 0

    @pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MULTI_GPU"])
    @pytest.mark.parametrize("in_file", ["'no'", "bf16", None])
    @pytest.mark.parametrize(
        "in_recipe", [{"bf16": False}, {"bf16": True}, {"bf16": None}, {"bf16": False, "fp16": True}]
    )
    def test_bfloat16_weights_stay_without_mixed_precision(self, plan, launch_file, kind, in_file, in_recipe):
        """accelerate's `fsdp2_prepare_model` copies to float32 `if accelerator.mixed_precision != "no"`, which is what the
        recipe says, else the file. TRL's default is bf16. DDP never copies."""
        line = f"mixed_precision: {in_file}" if in_file else ""
        file = launch_file(f"distributed_type: {kind}", "num_processes: 2", "fsdp_config: {fsdp_version: 2}", line)
        copies = kind != "MULTI_GPU" and (in_recipe != {"bf16": False} or in_file == "bf16")
        status, output = plan("--accelerate-config", file, dtype="bfloat16", **in_recipe)
        assert status == (0 if copies else 1)
        assert ("make float32 copies" in output) == copies == ("Set dtype: float32" not in output)

    def test_save_steps_off_the_boundary(self, plan):
        status, output = plan(save_steps=30, method="grpo")
        assert status == 1 and "nearest: 28 or 32" in output
        for method in ("pacs", "ppo"):
            status, output = plan("--accelerate-config", FSDP2, save_steps=30, method=method)
            assert status == 0 and "resuming stays exact" in output
        assert plan(save_steps=30, save_strategy="no", method="grpo")[0] == 0

    def test_vllm(self, plan):
        colocate = {"use_vllm": True, "max_prompt_length": 500}
        status, output = plan(vllm_max_model_length=1499, **colocate)
        assert status == 1 and "at least 1500" in output
        assert plan(vllm_max_model_length=1500, **colocate)[0] == 0
        status, output = plan("--num-processes", "3", vllm_tensor_parallel_size=2, **colocate)
        assert status == 1 and "must divide the number of processes (3)" in output

    def test_vllm_memory_fraction(self, plan):
        """Qwen3-4B: 67.4 GiB of training state on one process; 0.95 x 131.3 GiB leave 57.3 GiB, 0.436 of the memory."""
        colocate = {"model_name_or_path": "Qwen/Qwen3-4B", "use_vllm": True, "vllm_enable_sleep_mode": True}
        status, output = plan(vllm_gpu_memory_utilization=0.7, **colocate)
        assert status == 1 and "vllm_gpu_memory_utilization=0.7 takes 92 GiB of an H200's 131" in output
        assert "Set vllm_gpu_memory_utilization=0.4 or less, or accelerate_configs/fsdp2.yaml" in output
        assert plan("--accelerate-config", FSDP2, vllm_gpu_memory_utilization=0.7, **colocate)[0] == 0
        assert plan(vllm_gpu_memory_utilization=0.42, **colocate)[0] == 0
        # awake during updates, there are 4.6 GiB of activations beside it
        status, output = plan(vllm_gpu_memory_utilization=0.42, **colocate | {"vllm_enable_sleep_mode": False})
        assert status == 1 and "vllm_enable_sleep_mode: true" in output
        assert plan(vllm_mode="server", vllm_gpu_memory_utilization=0.9, **colocate)[0] == 0

    def test_unbounded_completions(self, plan):
        status, output = plan("--max_completion_length", "null")
        assert status == 1 and "max_completion_length is not set" in output

    def test_ppo_with_deepspeed(self, plan):
        status, output = plan("--accelerate-config", "recipes/accelerate_configs/zero2.yaml", method="ppo")
        assert status == 1 and "DeepSpeed" in output

    @pytest.mark.parametrize(("config", "version"), [("{fsdp_version: 1}", 1), ("{fsdp_offload_params: false}", 1)])
    def test_ppo_with_fsdp_1(self, plan, launch_file, config, version):
        file = launch_file("distributed_type: FSDP", "num_processes: 8", f"fsdp_config: {config}")
        status, output = plan("--accelerate-config", file, method="ppo")
        assert status == 1 and f"FSDP2 only, and the accelerate file asks for fsdp_version {version}" in output
        assert "Set fsdp_version: 2" in output
        assert plan("--accelerate-config", file)[0] == 0

    def test_unknown_method(self, plan):
        status, output = plan(method="pcas")
        assert status == 1 and "`method` must be one of pacs, grpo, ppo" in output

    def test_end_within_a_generation_is_a_note(self, plan):
        status, output = plan(max_steps=481)
        assert status == 0 and "ends in the middle of a generation" in output

    def test_conflicts_of_the_accelerate_file_and_of_the_recipe_are_reported_together(self, plan, launch_file):
        status, output = plan("--accelerate-config", launch_file("num_processes: 8"), pacs_betta=1.0)
        assert status == 1 and "2 conflict(s)" in output


def test_configuration_classes_see_the_planned_processes_only_inside(tmp_path):
    before = os.environ.get("WORLD_SIZE")
    with as_if_launched(64):
        assert TrainingArguments(str(tmp_path), use_cpu=True).world_size == 64
    assert os.environ.get("WORLD_SIZE") == before
    assert TrainingArguments(str(tmp_path), use_cpu=True).world_size == 1


def test_missing_recipe():
    with pytest.raises(ValueError, match="does not exist"):
        check_recipe("no/such.yaml", [], 1)


def test_step_sizes_by_hand():
    step, errors = step_sizes(RECIPE | {"num_iterations": 2}, 4)
    assert errors == []
    assert (step.rows_per_generation, step.rows_per_update, step.updates_per_generation) == (512, 128, 8)
    assert step.generations_per_update == 1 and step.rollouts(9) == 2
    # one optimizer step over two generations
    step, errors = step_sizes({"gradient_accumulation_steps": 4, "steps_per_generation": 2}, 1)
    assert (step.rows_per_generation, step.rows_per_update, step.updates_per_generation) == (16, 32, 1)
    assert step.generations_per_update == 2 and step.rollouts(5) == 10
