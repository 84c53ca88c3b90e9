"""`pacs-trl plan`: what it says of a recipe and a launch, each conflict with its values and remedy."""

import pytest

from pacs_trl.plan.check import check_recipe, main


FSDP2 = ("--accelerate-config", "recipes/accelerate_configs/fsdp2_8x8.yaml")
ZERO2 = ("--accelerate-config", "recipes/accelerate_configs/zero2.yaml")
NOBODY, THREE, EIGHT, SIXTY_FOUR = (("--num-processes", n) for n in ("0", "3", "8", "64"))
NULLS = ("--num_generations", "null", "--learning_rate", "null", "--steps_per_generation", "null")
WHOLE = (*EIGHT, "--gradient_accumulation_steps", "32", "--steps_per_generation=128")
BF16, GRPO, PPO, FEW = {"dtype": "bfloat16"}, {"method": "grpo"}, {"method": "ppo"}, {"max_train_samples": 1000}
GENAC = {"method": "genac"}
SERVERS = {"use_vllm": True, "vllm_mode": "server", "vllm_server_host": "policy", "critic_model_name_or_path": "Qwen/Qwen3-0.6B",  # noqa: E501
           "critic_vllm_server_base_url": "http://critic:8000"}  # fmt: skip
ODD, WRITTEN, PAIRS = {"save_steps": 30}, {"expected_processes": 64}, {"vllm_tensor_parallel_size": 2}
BIG, SMALL, UNKNOWN = ({"model_name_or_path": n} for n in ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B", "someone/something"))
NO_EXPRESSION, SCORE = {"lora_target_modules": ["*_proj"], "use_peft": True}, {"score_estimator": "grpo"}
BAD, FIVE = (
    {"num_iterations": 0, "reward_funcs": ["maths_reward"], "tools": ["run_pyton"]},
    {"steps_per_generation": 5},
)
VLLM = {"use_vllm": True, "max_prompt_length": 500, "vllm_gpu_memory_utilization": 0.3}
# 67.4 GiB of training state on one process; 0.95 x 131.3 GiB leave 57.3 GiB, 0.436 of the memory
FITTING = {"use_vllm": True, "vllm_enable_sleep_mode": True, "vllm_gpu_memory_utilization": 0.42}
LARGE = FITTING | {"vllm_gpu_memory_utilization": 0.75}
SNAPSHOT = {"reference": "snapshot", "save_total_limit": 2}
LENGTHS = "between 1 and max_completion_length=1000"
INTERRUPTED = "nearest: 28 or 32); checkpoints then hold rollouts too, and resuming stays exact"

# Arguments, changes of the recipe, exit status, what is said ("no: " what is not).
SAID = {
    "legal": ((*FSDP2, "--mean-length", "500"), {}, 0, "No conflicts.", "4.02e9 parameters", "fits", "GPU hours",
              "1024 prompts x 8 completions = 8192 rows, 128 per process", "4 optimizer steps per generation",
              "256 prompts x 8 = 2048 rows (8 rows x 64 processes x 4 accumulation steps)",
              "rollout steps      120 (3.0 epochs of 40315 problems)", "completions        983,040",
              "tokens generated   491.5 million at a mean of 500 per completion, at most 983.0 million",
              # 12 bytes x 4.02e9 = 45.0 GiB with float32 weights; 480 / 80 of them
              "checkpoint           45.0 GiB   weights, two Adam moments; 6 of them: 270 GiB"),
    "overrides": (WHOLE, WRITTEN, 0, "no: prompts instead of", "8 processes, DDP", "no: DOES NOT FIT",
                  "1024 prompts x 8 completions = 8192 rows, 1024 per process"),
    "another batch": (EIGHT, WRITTEN, 0,
                      "A generation has 128 prompts instead of 1,024. The recipe is written for 64 processes",
                      "An optimizer step has 32 prompts instead of 256."),
    # 18 bytes x 8.19e9
    "too large": ((), BIG | {"steps_per_generation": 4}, 1, "DOES NOT FIT", "(training state 137, activations",
                  "an H200 has 131", "launch with accelerate_configs/fsdp2.yaml", "use_peft: true"),
    "shared": (FSDP2, BIG, 0, "fits"),
    # 80e9 bytes are 74.5 GiB, 24e9 are 22.4; half as fast as in its data sheet with sparsity
    "H100": ((*FSDP2, "--gpu", "h100-80"), BIG, 0, "of 75 GiB on an H100: fits", "Time on H100", "35% of 989 TFLOP/s"),
    "A100": ((*FSDP2, "--gpu", "a100-80"), FITTING, 0, "35% of 312 TFLOP/s", "at 60% of 2.04 TB/s"),
    "RTX 4090": (("--gpu=RTX4090",), {}, 1, "of 22 GiB on an RTX 4090: DOES NOT FIT", "and an RTX 4090 has 22."),
    "vLLM, small card": (("--gpu", "l40s"), LARGE | SMALL, 1, "an L40S's 45, and training needs 10", "0.864 TB/s"),
    "snapshot": (FSDP2, SNAPSHOT, 0, "checkpoint           59.9 GiB", "reference snapshot; 2 of them: 120 GiB"),
    "unknown model": ((), UNKNOWN, 0, "not estimated, because the shape of 'someone/something' is not known"),
    # 2 x 40315 // 1024 generations x 4
    "epochs": (SIXTY_FOUR, {"max_steps": None, "num_train_epochs": 2}, 0, "optimizer steps    312"),
    "no data file": ((), {"dataset_name": "mine.jsonl"}, 0, "The data file 'mine.jsonl' does not exist here (seen from /"),  # noqa: E501
    "unknown data": ((), {"max_steps": None, "dataset_name": "a/b"}, 0, "unknown: max_steps is not set"),
    "end within a generation": ((), {"max_steps": 481}, 0, "ends in the middle of a generation"),
    "text that is no YAML": (("--system_prompt", "Answer {briefly: "), {}, 0),
    "mean length 0": (("--mean-length", "0"), {}, 1, f"{LENGTHS}, got 0", "no: tokens generated"),
    "mean length -5": (("--mean-length", "-5"), {}, 1, f"{LENGTHS}, got -5", "no: tokens generated"),
    "mean length 1001": (("--mean-length", "1001"), {}, 1, f"{LENGTHS}, got 1001", "no: tokens generated"),
    "too few problems": (FSDP2, FEW, 1, "A generation needs 1024 different prompts, but 1000 problems are trained on"),
    "just enough": (FSDP2, {"max_train_samples": 1024}, 0),
    "recipe, launch": (NOBODY, BAD, 1, "4 conflict(s)", "no tool 'run_pyton'", "--num-processes must be at least 1, got 0",  # noqa: E501
                       "num_iterations"),
    "contradiction and launch": ((), BIG | SCORE, 1, "2 conflict(s)", "score_estimator='grpo' cannot", "DOES NOT FIT"),
    "three processes": (THREE, FIVE, 1, "=5 must be a multiple of gradient_accumulation_steps=4", "=4 or 8"),
    "bfloat16": ((), BF16, 1, "dtype=bfloat16 with learning_rate=1e-06", "Set dtype: float32"),
    "bfloat16, LoRA": ((), BF16 | {"use_peft": True}, 0),
    "interrupted GRPO": (FSDP2, ODD | GRPO, 0, INTERRUPTED),
    "interrupted PACS": (FSDP2, ODD, 0, INTERRUPTED),
    "interrupted PPO": (FSDP2, ODD | PPO, 0, INTERRUPTED),
    "no saving": ((), ODD | GRPO | {"save_strategy": "no"}, 0, "no: Disk", "no: rollouts too"),
    "vLLM, short": ((), VLLM | {"vllm_max_model_length": 1499}, 1, "at least 1500"),
    "vLLM, long enough": ((), VLLM | {"vllm_max_model_length": 1500}, 0),
    "vLLM over processes": (THREE, VLLM | PAIRS, 1, "must divide the number of processes (3)"),
    "vLLM beside training": ((), LARGE, 1, "vllm_gpu_memory_utilization=0.75 takes 98 GiB of an H200's 131",
                             "Set vllm_gpu_memory_utilization=0.4 or less, or accelerate_configs/fsdp2.yaml"),
    "vLLM, shared": (FSDP2, LARGE, 0),
    "vLLM, small": ((), FITTING, 0),
    "vLLM, awake": ((), FITTING | {"vllm_enable_sleep_mode": False}, 1, "vllm_enable_sleep_mode: true"),
    "vLLM server": ((), FITTING | {"vllm_mode": "server", "vllm_gpu_memory_utilization": 0.9}, 0),
    "unbounded": (("--max_completion_length", "null"), {}, 1, "max_completion_length is not set"),
    "PPO with DeepSpeed": (ZERO2, PPO, 1, "DeepSpeed"),
    "no critic": (FSDP2, PPO | {"critic_model_name_or_path": "./no/critic"}, 1, "directory './no/critic' does not exist"),  # noqa: E501
    "GenAC with DeepSpeed": (ZERO2, GENAC, 1, "GenAC trains two models, which DeepSpeed does not do"),
    # 8192 completions x (16 segments and the state before the last token); 35 % of 1024 tokens
    "GenAC": (FSDP2, GENAC, 0, "at most 139,264 answers of 358 tokens per rollout step"),
    "GenAC, short engine": (FSDP2, GENAC | VLLM | {"vllm_max_model_length": 2000}, 1, "plus critic_max_new_tokens=1024",  # noqa: E501
                            "Set it to at least 2524"),
    "GenAC, two shapes": (FSDP2, GENAC | FITTING | {"critic_model_name_or_path": "Qwen/Qwen3-0.6B"}, 1,
                          "The critic 'Qwen/Qwen3-0.6B' has another shape than the policy, and one vLLM engine"),
    "GenAC, two servers": (FSDP2, GENAC | SERVERS, 0, "per rollout step; written by a server"),
    "unknown critic": (FSDP2, PPO | {"critic_model_name_or_path": "me/mine"}, 0, "the shape of 'me/mine' is not known"),  # noqa: E501
    "nothing": ((), {"dataset_name": None, "model_name_or_path": None}, 1, "names no data", "names no model"),
    "no directory": ((), {"model_name_or_path": "./nope"}, 1, "1 conflict(s)", "The model directory './nope' does not exist"),  # noqa: E501
    "no task": ((), {"model_name_or_path": "miniature/no"}, 1, "1 conflict(s)", "There is no miniature task 'no'"),
    "no expression": ((), NO_EXPRESSION, 1, "'*_proj' alone is a regular expression, and this is none"),
    "nulls": (NULLS, {}, 1, "2 conflict(s)", "num_generations must be a whole number of at least 2, got None",
              "Its default is 8.", "learning_rate must have a value, got null"),
    "no numbers": (("--num_train_epochs", "two"), {"gradient_accumulation_steps": "four"}, 1, "2 conflict(s)",
                   "`num_train_epochs` is refused: invalid float value: 'two'.", "no: usage:"),
}  # fmt: skip


@pytest.mark.parametrize("case", SAID.values(), ids=SAID)
def test_what_is_said(plan, case):
    arguments, changes, status, *sentences = case
    found, output = plan(*arguments, **changes)
    assert found == status, output
    for sentence in sentences:
        assert (sentence.removeprefix("no: ") in output) != sentence.startswith("no: "), sentence


def test_reward_functions(plan, tmp_path, monkeypatch):
    (tmp_path / "own_rewards.py").write_text("def sure(completions, **kwargs):\n    return [1.0] * len(completions)\n")
    (tmp_path / "broken_rewards.py").write_text("import no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert plan(reward_funcs=["math_reward", "own_rewards.sure"])[0] == 0
    assert plan("--reward_funcs", "own_rewards.sure")[0] == 0
    names = ("maths_reward", "own_rewards.unsure", "broken_rewards.sure", "nowhere.sure")
    status, output = plan("--reward_funcs", *names)
    assert status == 1 and "4 conflict(s)" in output
    assert "There is no reward function 'maths_reward'" in output and "math_reward" in output
    assert "'own_rewards' has no function 'unsure'" in output and "'nowhere.sure' cannot be imported here" in output
    assert "'broken_rewards.sure' cannot be imported here (ModuleNotFoundError: No module named 'no_such" in output


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
    assert status == (0 if copies else 1)
    assert ("make float32 copies" in output) == copies == ("Set dtype: float32" not in output)


@pytest.mark.parametrize("config", ["{fsdp_version: 1}", "{fsdp_offload_params: false}"])
def test_ppo_with_fsdp_1(plan, launch_file, config):
    file = launch_file("distributed_type: FSDP", "num_processes: 8", f"fsdp_config: {config}")
    status, output = plan("--accelerate-config", file, method="ppo")
    assert status == 1 and "FSDP2 only, and the accelerate file asks for fsdp_version 1. Set fsdp_version: 2" in output
    assert plan("--accelerate-config", file)[0] == 0


def test_recipes_that_are_no_mapping(tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    for text, words in (("a: [1\nb: }", "is not YAML: while parsing"), ("", "got nothing"), ("- a", "got list")):
        recipe.write_text(text)
        assert main(["--config", str(recipe)]) == 1
        assert words in capsys.readouterr().out
    with pytest.raises(ValueError, match="does not exist"):
        check_recipe("no/such.yaml", [], 1)
