"""A recipe as values: everything that is wrong with it at once, whatever the machine, and the run refuses it too."""

import re
from dataclasses import fields

import pytest
import yaml
from transformers import TrainingArguments

from pacs_trl.recipe import METHODS, SECOND_NAMES, Recipe, _second_name_errors, read_recipe
from pacs_trl.settings import parse_mapping


LORA = {"use_peft": True, "lora_target_modules": ["q_proj"]}
EVALUATES = {"eval_strategy": "steps", "eval_split_size": 8}
RECIPE = {
    "model_name_or_path": "Qwen/Qwen3-4B",
    "dataset_name": "deepscaler",
    "num_generations": 8,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 4,
    "steps_per_generation": 16,
    "max_completion_length": 1000,
    "bf16": True,
}


def errors_of(world_size: int | None = 1, **changes) -> list[str]:
    settings = {key: value for key, value in (RECIPE | changes).items() if value != "absent"}
    return Recipe.from_settings(settings, world_size)[1]


COUNTS = [
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
    ("num_generations", None, "at least 2, got None"),
    ("generation_batch_size", 0, "at least 1, got 0"),
]


@pytest.mark.parametrize(("name", "value", "words"), COUNTS)
def test_counts(name, value, words):
    number, epochs = errors_of(**{name: value}, num_train_epochs="two")  # the rest is looked at
    assert f"{name} must be a whole number of {words}" in number
    assert "Nearest legal value: " in number or re.search(r"Its default is [18]\.", number)
    assert epochs == "`num_train_epochs` is refused: invalid float value: 'two'."


def test_a_key_that_stands_twice():
    with pytest.raises(ValueError, match="The recipe 'x' has seed more than once, of which the last would win"):
        parse_mapping("seed: 1\nbeta: 0\nseed: 2\n", "recipe 'x'")
    assert parse_mapping("seed: 1\ngeneration_kwargs: {seed: 2}\n", "recipe 'x'")["seed"] == 1


WRONG = [
    ({"temperature": 0, "top_p": 2}, "temperature must be above 0, got 0", "top_p must be above 0 and at most 1"),
    ({"learning_rate": float("nan")}, "learning_rate must be at least 0, got nan"),
    ({"learning_rate": None}, "learning_rate must have a value, got null"),
    ({"learning_rate": "-1e-6", "adam_beta1": 1.5}, "got '-1e-6'", "adam_beta1 must be at least 0 and below 1"),
    ({"reward_weights": [0.5, 0.5]}, "must have one weight for each of the 1 reward functions (math_reward)"),
    ({"reward_weights": [0.5]}, "must not be negative and must sum to 1, not 0.5"),
    ({"reward_weights": ["a"]}, "reward_weights must be a list of finite numbers"),
    ({"reward_funcs": []}, "reward_funcs is empty"),
    ({"reward_funcs": "math_reward"}, "reward_funcs must be a list, got 'math_reward'. Write [math_reward]."),
    ({"verification_cpu_seconds": 9, "lora_r": 0}, "lora_r must be a whole number", "`cpu_seconds`"),
    ({"verification_cpu_seconds": 9}, "`cpu_seconds`"),
    ({"verification_protocol": "mine"}, "verification_protocol must be one of authors, trl"),
    ({"save_steps": 0, "vllm_mode": "sideways"}, "save_steps must be above 0", "one of colocate, server"),
    ({"use_vllm": True, "vllm_tensor_parallel_size": 0}, "vllm_tensor_parallel_size must be a whole number"),
    ({"bf16": [True], "output_dir": 5}, "bf16 must be true or false, got a list", "output_dir must be text, got 5"),
    ({"save_strategy": False}, "YAML reads an unquoted no or off as false: quote it"),
    ({"dtype": "half", "seed": -1}, "dtype must be one of auto, bfloat16", "seed must be a whole number"),
    ({"accelerator_config": {"a": 1}, "env": 5}, "env must be a mapping", "unexpected keyword argument 'a'"),
    ({"generation_kwargs": {"temprature": 0.5}}, "generation_kwargs have temprature, which transformers does not know"),  # noqa: E501
    (
        {"generation_kwargs": {"top_k": 5, "max_tokens": 9}, "optim_args": "a=1", "fsdp_config": {"version": 2}},
        "optim_args='a=1' would be ignored: optim=adamw_torch_fused takes adam_beta1",
        "fsdp_config would be ignored, because fsdp is not set",
        "must not have max_tokens, top_k: completions would be drawn with another value",
    ),
    (
        {"liger_kernel_config": {"rope": True}, "eval_steps": 9, "sync_ref_model": True, "lora_r": 8, "lora_alpha": 16},  # noqa: E501
        "sync_ref_model=True needs a reference model, and beta=0 has none",
        "eval_steps=9 would be ignored",
        "liger_kernel_config would be ignored",
        "lora_alpha, lora_r would be ignored, and the whole model trained",
    ),
    ({"lr_scheduler_type": "constant", "warmup_steps": 5}, "warmup_steps=5 would be ignored with lr_scheduler_type"),
    ({"max_steps": 0}, "max_steps must be a whole number of at least 1, or -1, got 0"),
    ({"model_init_kwargs": "abc"}, "model_init_kwargs must be a mapping, got 'abc', which is no JSON of one"),
    ({"parallelism_config": "x"}, "parallelism_config must be left out, as no recipe can spell it"),
    ({"dataset_name": "absent"}, "The recipe names no data: `dataset_name` is missing"),
    ({"method": "pcas"}, "`method` must be one of pacs, grpo, ppo, dars"),
    (
        {"pacs_betta": 1.0, "epsilon": 0.3, "per_device_train_batch_size": 3},
        "`pacs_betta` is not a setting of method pacs. Did you mean `pacs_beta`?",
        "gradient_accumulation_steps=4 = 12. Nearest legal values: gradient_accumulation_steps=8",  # 48 = 6 groups
        "PACSConfig does not take epsilon=0.3",
    ),
    ({"steps_per_generation": None, "generation_batch_size": 100}, "Nearest legal values: 96 or 104"),
    ({"generation_batch_size": 128}, "give only one of them"),
    (
        {"reference": "snapshot", "proxy": "mean_logp", "max_tokens_per_micro_batch": 999, "lora_dropout": 1},
        "lora_dropout must be at least 0 and below 1",
        "reference='snapshot' would be ignored with proxy='mean_logp'",
        "max_tokens_per_micro_batch=999 cannot hold one sequence",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "words"), [(changes, words) for changes, *words in WRONG])
def test_values_that_stop_or_spoil_any_run(tmp_path, changes, words):
    """All of them at once, never a traceback; and the run refuses them before it starts."""
    errors = errors_of(**changes)
    assert len(errors) == len(words), errors
    assert [sentence for sentence, error in zip(words, errors, strict=True) if sentence not in error] == []
    settings = RECIPE | {"use_cpu": True, "bf16": False, "output_dir": str(tmp_path)} | changes
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({k: v for k, v in settings.items() if v != "absent"}))
    with pytest.raises(ValueError) as refusal:
        read_recipe(["--config", str(tmp_path / "recipe.yaml")])
    assert [sentence for sentence in words if sentence not in str(refusal.value)] == []


# What transformers and TRL refuse between settings, in words of ours.
OF_THE_LIBRARIES = [
    ({"fp16": True, "bf16": True}, "fp16 and bf16 are both true"),
    ({"fp16_full_eval": True, "bf16_full_eval": True}, "fp16_full_eval and bf16_full_eval are both true"),
    ({"auto_find_batch_size": True}, "auto_find_batch_size=True would lower the batch"),
    ({"log_completions_hub_repo": "a/b"}, "log_completions_hub_repo='a/b' would stay empty"),
    ({"dataloader_prefetch_factor": 2}, "dataloader_prefetch_factor=2 would be ignored"),
    ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "goes by the results of evaluations"),
    ({"lr_scheduler_type": "greedy"}, "goes by the results of evaluations"),
    ({"vllm_importance_sampling_clip_min": 4.0}, "clip_min=4.0 must be below vllm_importance_sampling_clip_max=3.0"),
    (
        {
            "vllm_importance_sampling_correction": True,
            "vllm_importance_sampling_mode": "token_truncate",
            "vllm_importance_sampling_clip_max": None,
        },
        "has nothing to truncate at",
    ),
    ({"pad_to_multiple_of": "x"}, "pad_to_multiple_of must be a whole number, 'auto' or 'none', got 'x'"),
    ({"logging_steps": 2.5}, "logging_steps=2.5 must be a whole number"),
    ({"save_steps": 2.5}, "save_steps=2.5 must be a whole number"),
    (EVALUATES | {"eval_steps": 2.5}, "eval_steps=2.5 must be a whole number"),
    ({"load_best_model_at_end": True}, "save_strategy is steps and eval_strategy is no"),
    (
        EVALUATES | {"load_best_model_at_end": True, "eval_steps": 30, "save_steps": 80},
        "save_steps=80 must be a multiple of eval_steps=30",
    ),
    (
        EVALUATES | {"load_best_model_at_end": True, "eval_steps": 0.3, "save_steps": 3},
        "save_steps=3 must be a multiple of eval_steps=0.3",
    ),
    (EVALUATES | {"per_device_eval_batch_size": 3}, "must hold whole groups of num_generations_eval=8"),
    ({"eval_strategy": "sometimes"}, "eval_strategy must be one of no, steps, epoch; got 'sometimes'"),
    ({"optim": "adam_fast"}, "optim must be one of adamw_torch, "),
    ({"debug": "tpu"}, "debug must be some of underflow_overflow, tpu_metrics_debug; got tpu"),
    ({"accelerator_config": "no.json"}, "accelerator_config: the file 'no.json' does not exist"),
    ({"fsdp": True, "fsdp_config": "no.json"}, "fsdp_config: the file 'no.json' does not exist"),
    ({"deepspeed": "no.json"}, "deepspeed: the file 'no.json' does not exist"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "words"), OF_THE_LIBRARIES)
def test_what_the_libraries_refuse_is_known_before(tmp_path, changes, words):
    (error,) = errors_of(**changes)
    assert words in error
    settings = {"output_dir": str(tmp_path), "bf16": False, "use_cpu": True} | RECIPE | changes
    settings = {
        key: value
        for key, value in settings.items()
        if key not in ("dataset_name", "model_name_or_path", "eval_split_size")
    }
    with pytest.raises((ValueError, OSError, ImportError)):  # the last one where DeepSpeed is not installed
        METHODS["grpo"](**settings)


def test_their_neighbours_are_legal():
    """The rules of the libraries refuse no more than the libraries do."""
    best = EVALUATES | {"load_best_model_at_end": True, "eval_steps": 40, "save_steps": 80}
    assert errors_of(**best, eval_delay=1) == []
    assert (
        errors_of(eval_strategy="epoch", eval_split_size=8, lr_scheduler_type="reduce_lr_on_plateau", save_steps=0.5)
        == []
    )
    assert errors_of(debug="underflow_overflow", pad_to_multiple_of="16", logging_steps="2") == []
    assert errors_of(dataloader_prefetch_factor=2, dataloader_num_workers=1, tf32=True) == []


def test_step_sizes_by_hand():
    step = Recipe.from_settings(RECIPE | {"num_iterations": 2}, 4)[0].step
    assert (step.rows_per_generation, step.rows_per_update, step.updates_per_generation) == (512, 128, 8)
    assert step.generations_per_update == 1 and step.rollouts(9) == 2
    # one optimizer step over two generations
    recipe, errors = Recipe.from_settings(RECIPE | {"steps_per_generation": 2}, 1)
    step = recipe.step
    assert errors == [] and (step.rows_per_generation, step.rows_per_update) == (16, 32)
    assert step.updates_per_generation == 1 and step.generations_per_update == 2 and step.rollouts(5) == 10
    # the same by rows
    by_rows = {"steps_per_generation": None, "generation_batch_size": 16}
    assert Recipe.from_settings(RECIPE | by_rows, 1)[0].step == step


def test_batch_sizes_are_not_judged_where_processes_are_not_known():
    recipe, errors = Recipe.from_settings(RECIPE | {"per_device_train_batch_size": 3}, None)
    assert errors == [] and recipe.step is None


def test_a_recipe_is_read_for_another_launch_than_this(tmp_path):
    """64 processes and bfloat16 on GPUs, whatever this machine is; nothing of it is left behind."""
    settings = RECIPE | {"per_device_train_batch_size": 1, "steps_per_generation": 4, "tf32": True}
    recipe, errors = Recipe.from_settings(settings, 64)
    assert errors == [] and recipe.step.rows_per_generation == 256 and recipe.training.bf16
    assert TrainingArguments(str(tmp_path), use_cpu=True).world_size == 1


def test_a_setting_with_two_names_has_one_value():
    """transformers 5.23 has them; `plan` and the trainers read the older one."""
    values = {"activation_checkpointing": False, "gradient_checkpointing": True}
    assert _second_name_errors(values, {"activation_checkpointing": False}) == []
    assert values == {"activation_checkpointing": False, "gradient_checkpointing": False}
    values = {"activation_checkpointing": None, "gradient_checkpointing": True}
    assert _second_name_errors(values, {"gradient_checkpointing": True}) == [] and values["gradient_checkpointing"]
    both = {"activation_checkpointing": False, "gradient_checkpointing": True}
    (error,) = _second_name_errors(dict(both), both)
    assert "activation_checkpointing=False and gradient_checkpointing=True are one setting under two names" in error
    known = {field.name for field in fields(TrainingArguments)}
    for new, old in SECOND_NAMES.items():
        if new in known:  # the table is applied
            changes = {new: False if old == "gradient_checkpointing" else {"use_reentrant": False}}
            assert getattr(Recipe.from_settings(RECIPE | changes, 1)[0].training, old) == changes[new]


def test_texts_are_values_of_their_types():
    """As YAML and a command line give them; `settings` repeat the run, and hold no token."""
    given = {"learning_rate": "1e-5", "reward_weights": ["1e-0"], "use_vllm": "yes", "num_iterations": "2"}
    given |= {"model_init_kwargs": '{"dtype": "bfloat16"}', "hub_token": "s3cr3t"} | LORA
    recipe, errors = Recipe.from_settings(RECIPE | given, 1)
    values = recipe.training
    assert errors == [] and (values.learning_rate, values.num_iterations) == (1e-5, 2) and values.use_vllm is True
    assert values.reward_weights == [1.0] and values.model_init_kwargs == {"dtype": "bfloat16"}
    assert values.hub_token == "s3cr3t" and "hub_token" not in recipe.settings


def test_one_process_of_several_without_a_launcher(monkeypatch, tmp_path):
    """It would wait for the others without a word."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    with pytest.raises(ValueError, match="WORLD_SIZE=2 .* no launcher .* RANK.* Start it with `accelerate launch`"):
        read_recipe(["--config", str(tmp_path / "recipe.yaml")])


@pytest.mark.parametrize(
    "more", [{}, {"accelerator_config": {"non_blocking": True}}, {"debug": "underflow_overflow"}, {"optim": "sgd"}]
)
def test_written_settings_can_be_read_again(tmp_path, more):
    settings = RECIPE | LORA | {"report_to": "none", "use_cpu": True, "bf16": False} | more
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(settings | {"output_dir": str(tmp_path)}))
    first = read_recipe(["--config", str(file)])
    assert first.model.lora_target_modules == "q_proj"  # as TRL has it
    file.write_text(yaml.safe_dump(first.settings))
    assert first.settings.items() >= more.items()
    assert read_recipe(["--config", str(file)]).settings == first.settings
