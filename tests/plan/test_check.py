"""`pacs-trl plan`: what it says of a recipe and a launch, each conflict with its values and remedy."""

import sys
from pathlib import Path

import pytest

from pacs_trl.plan.check import main


FSDP2 = ("--accelerate-config", "recipes/accelerate_configs/fsdp2_8x8.yaml")
DDP = ("--accelerate-config", "recipes/accelerate_configs/ddp.yaml")
ZERO2 = ("--accelerate-config", "recipes/accelerate_configs/zero2.yaml")
ZERO3 = ("--accelerate-config", "recipes/accelerate_configs/zero3.yaml")
NOBODY, THREE, EIGHT = (("--num-processes", n) for n in ("0", "3", "8"))
WHOLE = (*EIGHT, "--gradient_accumulation_steps", "32", "--steps_per_generation=128")
BF16, GRPO, PPO, FEW = {"dtype": "bfloat16"}, {"method": "grpo"}, {"method": "ppo"}, {"max_train_samples": 1000}
WRITTEN, PAIRS = {"expected_processes": 64}, {"use_vllm": True, "vllm_tensor_parallel_size": 2}
BIG, SMALL, UNKNOWN = ({"model_name_or_path": n} for n in ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B", "someone/something"))
NO_EXPRESSION, SCORE = {"lora_target_modules": ["*_proj"], "use_peft": True}, {"score_estimator": "grpo"}
ONE_NODE = ("--accelerate-config", "recipes/accelerate_configs/fsdp2.yaml")
LARGEST = {
    "model_name_or_path": "Qwen/Qwen3-32B",
    "gradient_checkpointing": "auto",
    "max_completion_length": 8192,
    "max_tokens_per_micro_batch": "auto",
}
LONG = {
    "use_vllm": True,
    "vllm_enable_sleep_mode": True,
    "vllm_gpu_memory_utilization": 0.4,
    "vllm_max_model_length": 1400,
    "max_prompt_length": 512,
    "num_generations": 8,
}
GYM = {"dataset_name": "reasoning_gym"}
BAD = {"reward_funcs": ["maths_reward"], "tools": ["run_pyton"]}
# 59.9 GiB of training state on one process; 0.95 x 131.3 GiB leave 64.8 GiB, 0.494 of the memory
FITTING = {"use_vllm": True, "vllm_enable_sleep_mode": True, "vllm_gpu_memory_utilization": 0.48}
CONTINUOUS = {"use_vllm": True, "vllm_mode": "server", "rollout_schedule": "continuous", "steps_per_generation": 4}
AUTO = {"gradient_checkpointing": "auto", "max_tokens_per_micro_batch": "auto"}
QWEN_14B, QWEN_32B = ({"model_name_or_path": f"Qwen/Qwen3-{size}"} for size in ("14B", "32B"))
LORA = {"use_peft": True, "gradient_checkpointing": True, "dtype": "bfloat16"}
LARGE, LARGER = (FITTING | {"vllm_gpu_memory_utilization": share} for share in (0.75, 0.8))

# Arguments, changes of the recipe, exit status, words of the output ("no: " those that it does not have).
SAID = {
    "legal": ((*FSDP2, "--mean-length", "500"), {}, 0, "No conflicts.", "4.02e9 parameters", "fits", "GPU hours",
              "1024 prompts x 8 = 8192 completions, 128 per process", "4 optimizer steps per generation",
              "256 prompts x 8 = 2048 completions (8 x 64 processes x 4 accumulation steps)",
              "generations        120 (3.0 epochs of 40315 problems)", "completions        983,040",
              "491,520,000 with 500"),
    "overrides": (WHOLE, WRITTEN, 0, "no: prompts instead of", "8 processes, DDP", "no: DOES NOT FIT",
                  "1024 prompts x 8 = 8192 completions, 1024 per process"),
    "another batch": (EIGHT, WRITTEN, 0, "128 prompts instead of 1,024", "64 processes", "32 prompts instead of 256"),  # noqa: E501
    # 16 bytes x 8.19e9
    "too large": ((), BIG | {"steps_per_generation": 4}, 1, "DOES NOT FIT", "(training state 122, rounded weights",
                  "fsdp2.yaml"),
    # a gradient of 32.8e9 weights in float32 is 122 GiB on each GPU, and their state on eight of them 61
    "too large, sharded": (ONE_NODE, LARGEST, 1, "training state 61, activations 8, gathered weights 3, collected "
                           "gradient 122, of 131 GiB", "use ZeRO-3", "no: shard the training"),
    "sharded": (FSDP2, BIG, 0, "fits"),
    # 80e9 bytes are 74.5 GiB, 24e9 are 22.4
    "H100": ((*FSDP2, "--gpu", "h100-80"), BIG, 0, "of 75 GiB on an H100: fits", "Time on H100", "% of 989 TFLOP/s"),
    "B200": ((*FSDP2, "--gpu", "b200"), BIG, 0, "of 168 GiB on a B200: fits", "Time on B200"),
    "RTX 4090": (("--gpu=RTX4090",), {}, 1, "of 22 GiB on an RTX 4090: DOES NOT FIT"),
    "vLLM, small card": (("--gpu", "l40s"), LARGER | SMALL, 1, "GiB on an L40S, and training needs 9 ", "0.864 TB/s"),
    "unknown model": ((), UNKNOWN, 0, "unknown model 'someone/something': download its config.json"),
    "no data file": ((), {"dataset_name": "mine.jsonl"}, 0, "'mine.jsonl' does not exist"),
    "unknown data": ((), {"max_steps": None, "dataset_name": "a/b"}, 0, "unknown: max_steps is not set"),
    "text that is no YAML": (("--system_prompt", "Answer {briefly: "), {}, 0),
    "mean length 1001": (("--mean-length", "1001"), {}, 1, "mean_length is 1001", "no: tokens generated"),
    "too few problems": (FSDP2, FEW, 1, "1024 different prompts", "1000 (max_train_samples=1000"),
    "no problem left": ((), {"eval_split_size": 50_000}, 1, "the training set has 0 (", "Use more problems"),
    "launch": (NOBODY, {}, 1, "1 conflict(s)", "--num_processes"),
    "two names": ((), BAD, 1, "2 conflict(s)", "run_pyton", "maths_reward"),
    "contradiction": ((), SCORE, 1, "1 conflict(s)", "score_estimator"),
    "vLLM over processes": (THREE, PAIRS, 1, "vllm_tensor_parallel_size=2"),
    "three processes": (THREE, {"steps_per_generation": 5}, 1, "gradient_accumulation_steps=4"),
    "bfloat16": ((), BF16, 0, "dtype=bfloat16 with learning_rate=1e-06", "Set dtype: float32"),
    "bfloat16, LoRA": ((), BF16 | {"use_peft": True}, 0),
    "on a CPU": ((), {"use_cpu": True, "bf16": False}, 0, "not estimated on a CPU", "no: H200", "no: hours",
                 "no: not compiled"),
    "as many processes as the recipe says": (WHOLE, {"expected_processes": 8}, 0, "no: prompts instead of"),
    "long completions": ((), LONG, 1, "max_prompt_length=512", "does not fit into vllm_max_model_length=1400"),
    "no room for a prompt": ((), LONG | {"max_prompt_length": None, "vllm_max_model_length": 1000}, 1,
                             "leaves no room for a prompt in vllm_max_model_length=1000", "no: =None"),
    "fitting completions": ((), LONG | {"vllm_max_model_length": 1512}, 0),
    "unknown LoRA targets": ((), {"use_peft": True, "lora_target_modules": ["q_prj"]}, 1, "q_prj", "q_proj"),
    "a name without an owner": ((), {"dataset_name": "gsm8kk"}, 0, "no named set and no file", "`openai/gsm8k`"),
    "output_dir that is a file": ((), {"output_dir": "setup.cfg"}, 1, "is a file. Name another directory"),
    "unknown kind of adapter": ((), {"use_peft": True, "lora_task_type": "LM"}, 1, "task type", "Correct"),
    "unknown attention": ((), {"attn_implementation": "flash_attention_9"}, 1, "does not exist", "sdpa"),
    "LoRA targets": ((), {"use_peft": True, "lora_target_modules": ["q_proj"]}, 0),
    "no flash-attn": ((), {"attn_implementation": "flash_attention_2"}, 0, "needs the package flash_attn", "sdpa"),
    "FlashAttention 4": ((), {"attn_implementation": "flash_attention_4"}, 0),
    "FlashAttention 4, A100": (("--gpu", "a100-80"), {"attn_implementation": "flash_attention_4"}, 1,
                               "Hopper and Blackwell GPUs, and the plan is for an A100"),
    "no such problems": ((), GYM | {"reasoning_gym": {"chain_sums": None}}, 1, "chain_sums", "chain_sum"),
    "no saving": ((), GRPO | {"save_strategy": "no"}, 0, "no: checkpoint"),
    "vLLM beside training": ((), LARGE, 1, "vllm_gpu_memory_utilization=0.75 takes 98 of 131 GiB on an H200", "0.45 or less", "no: sleep_mode: true"),  # noqa: E501
    "vLLM, sharded": (FSDP2, LARGE, 0),
    "vLLM, small": ((), FITTING, 0),
    "vLLM, awake": ((), FITTING | {"vllm_enable_sleep_mode": False}, 1, "vllm_enable_sleep_mode: true"),
    # 14.8e9 weights are 27.5 GiB in bfloat16, and 0.3 of 74.5 GiB 22.4
    "vLLM, smaller than the model": (
        ("--gpu", "h100-80"), LORA | FITTING | QWEN_14B | {"vllm_gpu_memory_utilization": 0.3}, 1,
        "0.3 gives vLLM 22.4 of 75 GiB on an H100", "need 27.8 GiB", "set it to 0.4 or more.", "DOES NOT FIT",
    ),
    "vLLM, tensor parallelism": (
        (*ONE_NODE, "--gpu", "h100-80"), LORA | FITTING | QWEN_32B, 1,
        "gives vLLM 35.8 of 75 GiB", "need 61.5 GiB", "no: set it to",
        "To make them fit, set vllm_tensor_parallel_size: 2, use a GPU with more memory or set vllm_mode: server.",
    ),
    # 59.9 GiB for training leave 10.9 GiB, of which 0.1 is less than 8.04e9 bytes of weights
    "vLLM, no share": (
        ("--gpu", "h100-80"), FITTING | AUTO, 1,
        "and training needs 60 GiB. To make both fit, shard the training state (fsdp2.yaml), use a GPU with more "
        "memory or set vllm_mode: server", "no: set it to",
    ),
    "vLLM, no share with DDP": (
        (*DDP, "--gpu", "h100-80"), FITTING | AUTO, 1,
        "shard the training state", "no: 0.1", "no: or less",
    ),
    # of 14.8e9 weights 13.2e9 in layers with 0.56 bytes and 1.6e9 with two
    "four bits": (("--gpu", "rtx4090"), LORA | QWEN_14B | AUTO | {"load_in_4bit": True}, 0,
                  "training state       10.", "of 22 GiB on an RTX 4090: fits", "8 bytes per trained weight",
                  "0.714 per frozen weight", "no: 16 bytes"),
    "DDP": (DDP, SMALL, 0, "20 bytes per trained weight (weight 4, gradient 4, moments 8, DDP's buckets 4)."),
    "vLLM server": ((), FITTING | {"vllm_mode": "server", "vllm_gpu_memory_utilization": 0.9}, 0),
    "continuous, adapters": ((), CONTINUOUS | {"use_peft": True, "vllm_sync_adapter": True}, 0,
                             "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve",
                             "--enable-lora --max-lora-rank 16 --max-loras 6", "no: worker-extension"),
    "continuous, no adapter": ((), CONTINUOUS | {"vllm_sync_adapter": True}, 1, "trains all weights"),
    "unbounded": (("--max_completion_length", "null"), {}, 1, "max_completion_length is not set"),
    "PPO with DeepSpeed": (ZERO2, PPO, 1, "DeepSpeed"),
    "compiled": (ZERO2, {"compile_layers": True}, 0, "no: Decoder layers"),
    "compiled, ZeRO-3": (ZERO3, {"compile_layers": True}, 1, "compile_layers: true is not possible: ZeRO-3"),
    "not compiled, ZeRO-3": (ZERO3, {}, 0, "Decoder layers are not compiled", "ZeRO-3"),
    "compiled, quantized": ((), {"compile_layers": True, "load_in_4bit": True}, 1, "quantized with bitsandbytes"),
    "compiled twice": ((), {"compile_layers": True, "torch_compile": True}, 1, "torch_compile"),
    "no critic": (FSDP2, PPO | {"critic_model_name_or_path": "./no/critic"}, 1, "'./no/critic'"),
    "GenAC": (FSDP2, {"method": "genac"}, 0, "fits"),
    "unknown critic": (FSDP2, PPO | {"critic_model_name_or_path": "me/mine"}, 0, "unknown model 'me/mine'"),
    "nothing": ((), {"dataset_name": None}, 1, "dataset_name"),
    "no directory": ((), {"model_name_or_path": "./nope"}, 1, "1 conflict(s)", "'./nope'"),
    "no expression": ((), NO_EXPRESSION, 1, "lora_target_modules"),
    "no number": (("--num_train_epochs", "two"), {}, 1, "1 conflict(s)", "num_train_epochs", "no: usage:"),
}  # fmt: skip


@pytest.mark.parametrize("case", SAID.values(), ids=SAID)
def test_plan_prints_the_sentences_of_a_case_and_ends_with_its_status(plan, case):
    arguments, changes, status, *sentences = case
    exit_status, output = plan(*arguments, **changes)
    assert exit_status == status, output
    for sentence in sentences:
        assert (sentence.removeprefix("no: ") in output) != sentence.startswith("no: "), sentence


def test_a_missing_reasoning_gym_is_a_conflict_that_names_its_extra(plan, monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    status, output = plan(**GYM, reasoning_gym={"chain_sum": None})
    assert status == 1 and "the task chain_sum cannot be imported" in output and "extra [gym]" in output


def test_reward_functions_that_cannot_be_imported_are_conflicts(plan, tmp_path, monkeypatch):
    (tmp_path / "own_rewards.py").write_text("def sure(completions, **kwargs):\n    return [1.0] * len(completions)\n")
    (tmp_path / "broken_rewards.py").write_text("import no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert plan(reward_funcs=["math_reward", "own_rewards.sure"])[0] == 0
    assert plan("--reward_funcs", "own_rewards.sure")[0] == 0
    names = ("maths_reward", "own_rewards.unsure", "broken_rewards.sure", "nowhere.sure")
    status, output = plan("--reward_funcs", *names)
    assert status == 1 and "4 conflict(s)" in output and all(name in output for name in names)


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MULTI_GPU"])
@pytest.mark.parametrize("in_file", ["'no'", "bf16", None])
@pytest.mark.parametrize("in_recipe", [{"bf16": False}, {"bf16": True}, {"bf16": None}, {"bf16": False, "fp16": True}])
def test_bfloat16_weights_stay_without_mixed_precision(plan, launch_file, kind, in_file, in_recipe):
    """accelerate's `fsdp2_prepare_model` copies to float32 `if accelerator.mixed_precision != "no"`, which is what the
    recipe says, else the file. TRL's default is bf16. DDP never copies."""
    line = f"mixed_precision: {in_file}" if in_file else ""
    file = launch_file(f"distributed_type: {kind}", "num_processes: 2", "fsdp_config: {fsdp_version: 2}", line)
    copies = kind != "MULTI_GPU" and (in_recipe != {"bf16": False} or in_file == "bf16")
    status, output = plan("--accelerate-config", file, dtype="bfloat16", **in_recipe)
    assert status == 0
    assert ("train float32 copies" in output) == copies == ("Set dtype: float32" not in output)


@pytest.mark.parametrize("config", ["{fsdp_version: 1}", "{fsdp_offload_params: false}"])
def test_ppo_with_fsdp_1_is_a_conflict(plan, launch_file, config):
    file = launch_file("distributed_type: FSDP", "num_processes: 8", f"fsdp_config: {config}")
    status, output = plan("--accelerate-config", file, method="ppo")
    assert status == 1 and "FSDP 1" in output
    assert plan("--accelerate-config", file)[0] == 0


def test_recomputation_of_fsdp_excludes_that_of_the_trainer_and_counts_like_it(plan, launch_file):
    lines = ("distributed_type: FSDP", "num_processes: 8", "mixed_precision: bf16")
    file = launch_file(*lines, "fsdp_config: {fsdp_version: 2, fsdp_activation_checkpointing: true}")
    for value in ("auto", True):
        status, output = plan("--accelerate-config", file, gradient_checkpointing=value)
        assert status == 1 and "fsdp_activation_checkpointing: true" in output
    status, by_fsdp = plan("--accelerate-config", file, gradient_checkpointing=False)
    assert status == 0
    without = launch_file(*lines, "fsdp_config: {fsdp_version: 2}")
    by_trainer = plan("--accelerate-config", without, gradient_checkpointing=True)[1]
    kept = plan("--accelerate-config", without, gradient_checkpointing=False)[1]
    estimates = [output.partition("Memory per GPU")[2] for output in (by_fsdp, by_trainer, kept)]
    assert estimates[0] == estimates[1] != estimates[2]


@pytest.mark.parametrize("name", ["continuous", "agent_continuous"])
def test_the_server_of_continuous_rollouts_is_that_of_the_recipe(capsys, name):
    recipe = f"recipes/miniature/{name}.yaml"
    main(["--config", recipe])
    (command,) = [line.strip() for line in capsys.readouterr().out.splitlines() if "--worker-extension-cls" in line]
    assert f"#   {command}\n" in Path(recipe).read_text()


def test_the_server_of_a_recipe_for_gpus_is_vllm_for_gpus(plan):
    settings = {"rollout_schedule": "continuous", "use_vllm": True, "vllm_mode": "server", "max_prompt_length": 24}
    _, output = plan(**settings, max_staleness=1, steps_per_generation=4)
    server = "CUDA_VISIBLE_DEVICES=1,2,3,4 VLLM_SERVER_DEV_MODE=1 vllm serve Qwen/Qwen3-4B --tensor-parallel-size 4"
    assert f"  {server} --max-model-len 1024 --dtype bfloat16" in output
    _, output = plan(**settings, max_staleness=1, steps_per_generation=4, bf16=False, fp16=True)
    assert "--dtype float16" in output
