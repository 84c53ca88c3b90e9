"""Recipes as values: what is refused, for a run and for a launch elsewhere, and what written settings repeat."""

from pathlib import Path

import pytest
import yaml
from transformers import HfArgumentParser, TrainingArguments
from trl import TrlParser

from pacs_trl.methods import METHODS
from pacs_trl.recipe import Recipe, config_class, read_recipe, settings_without_effect
from pacs_trl.settings import parse_mapping


LORA = {"use_peft": True, "lora_target_modules": ["q_proj"]}
EVALUATES = {"eval_strategy": "steps", "eval_split_size": 8}
MEASURES = {"eval_strategy": "steps", "eval_benchmarks": ["math_500", "aime_2024"]}
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


def read(num_processes: int = 1, **changes) -> Recipe:
    return Recipe.from_settings({k: v for k, v in (RECIPE | changes).items() if v != "absent"}, num_processes)


def test_a_key_that_stands_twice_is_refused():
    with pytest.raises(ValueError, match="seed"):
        parse_mapping("seed: 1\nbeta: 0\nseed: 2\n", "recipe 'x'")
    assert parse_mapping("seed: 1\ngeneration_kwargs: {seed: 2}\n", "recipe 'x'")["seed"] == 1


REFUSED = yaml.safe_load((Path(__file__).parent / "data" / "refused_recipes.yaml").read_text())


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_what_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        read(**changes)


def test_a_launch_with_deepspeed_needs_it(monkeypatch):
    monkeypatch.setattr("pacs_trl.settings.names.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="DeepSpeed, which is not installed. Run `pip install"):
        read(deepspeed={"zero_optimization": {"stage": 2}})


def test_their_neighbors_are_legal():
    read(**EVALUATES, load_best_model_at_end=True, eval_steps=40, save_steps=80, eval_delay=1)
    best = {"load_best_model_at_end": True, "eval_steps": 40, "save_steps": 80}
    for metric in ("eval/pass@1", "eval_pass@8_lower", "eval/math_500/pass@4"):
        training = read(**MEASURES, **best, metric_for_best_model=metric).training
        assert training.metric_for_best_model == f"eval_{metric[5:]}" and training.greater_is_better
    assert read(**MEASURES, **best).training.metric_for_best_model == "eval_pass@1"
    assert read(**EVALUATES, **best).training.metric_for_best_model == "eval_reward"
    plateau = {"eval_strategy": "epoch", "eval_split_size": 8, "lr_scheduler_type": "reduce_lr_on_plateau"}
    training = read(**plateau, save_steps=0.5).training
    assert training.metric_for_best_model == "eval_reward" and training.lr_scheduler_kwargs["mode"] == "max"
    read(lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr_rate": 0.1})
    read(lr_scheduler_type="constant", lr_scheduler_kwargs={})
    read(accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": True}})
    read(debug="underflow_overflow", pad_to_multiple_of="16", logging_steps="2", tf32=True)
    read(dataloader_prefetch_factor=2, dataloader_num_workers=1, report_to=["wandb", "trackio"])
    read(score_estimator="grpo", steps_per_generation=4, num_iterations=2, first_update_score="dr_grpo")
    read(score_estimator="grpo", proxy="mean_logp")
    read(max_tokens_per_micro_batch=1001)
    for longest, stride in ((16, 5), (None, 170)):
        read(method="verl", max_completion_length=longest, hidden_state_stride=stride)
    two_functions = {"reward_funcs": ["math_reward", "my.reward"]}
    read(**two_functions, reward_weights=[0.5, 0.5])
    read(**two_functions, method="real", reward_weights=[0, 1])
    read(**two_functions, method="grpo", reward_weights=[0.5, 2.0])
    for method in ("pacs", "real", "grpo"):  # they may return `None` for each other's problems
        read(**two_functions, method=method)


def test_the_former_name_of_packing_is_read_from_recipes():
    with pytest.warns(FutureWarning, match="`padding_free` is now called `packing`"):
        assert read(padding_free="never").training.packing == "never"


WITHOUT_EFFECT = [
    ({"use_peft": False, "lora_r": 8, "lora_alpha": 16}, "lora_r and lora_alpha have no effect with use_peft: false"),
    ({"vllm_mode": "server"}, "vllm_mode has no effect with use_vllm: false"),
    ({"use_vllm": True, "vllm_server_port": 8}, "vllm_server_port has no effect with vllm_mode: colocate"),
    ({"save_strategy": "no", "save_steps": 9}, "save_steps has no effect with save_strategy: no"),
]


@pytest.mark.parametrize(("changes", "words"), WITHOUT_EFFECT)
def test_settings_that_a_switch_turns_off_are_warned_of_once(changes, words, caplog, tmp_path):
    settings = RECIPE | {"bf16": False, "use_cpu": True, "report_to": "none", "output_dir": str(tmp_path)} | changes
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(settings))
    read_recipe(["--config", str(tmp_path / "recipe.yaml")])
    assert [record.message.startswith(words) for record in caplog.records] == [True]


def test_settings_that_a_switch_turns_on_or_of_an_engine_of_their_own_are_no_warning():
    engine = {"rollout_lag": 1, "rollout_engine": "vllm", "vllm_max_model_length": 2000}
    for changes in ({}, LORA | {"lora_r": 8}, {"use_vllm": True, "vllm_mode": "colocate"}, engine):
        assert not settings_without_effect(read(**changes))


@pytest.mark.parametrize("method", METHODS)
def test_parsers_of_trl_and_transformers_read_every_configuration(method):
    """As in scripts of TRL that only change their imports."""
    words = ["--output_dir", "out", "--use_cpu", "--bf16", "no", "--num_generations", "4", "--eval_num_samples", "8"]
    for parser in (TrlParser, HfArgumentParser):
        (args,) = parser(config_class(method)).parse_args_into_dataclasses(words)
        assert args.num_generations == 4


def test_step_sizes_equal_those_worked_by_hand():
    step = read(4, num_iterations=2).step
    assert (step.completions_per_generation, step.completions_per_update, step.updates_per_generation) == (512, 128, 8)
    assert step.generations_per_update == 1 and step.num_generation_batches(9) == 2
    # one optimizer step over two generations
    step = read(steps_per_generation=2).step
    assert (step.completions_per_generation, step.completions_per_update) == (16, 32)
    assert step.updates_per_generation == 1 and step.generations_per_update == 2
    assert step.num_generation_batches(5) == 10
    # the same by completions
    assert read(steps_per_generation=None, generation_batch_size=16).step == step


def test_a_recipe_is_read_for_another_launch_than_this(tmp_path):
    """64 processes and bfloat16 on GPUs, whatever this machine is; nothing of it is left behind."""
    recipe = read(64, per_device_train_batch_size=1, steps_per_generation=4, tf32=True)
    assert recipe.step.completions_per_generation == 256 and recipe.training.bf16
    assert TrainingArguments(str(tmp_path), use_cpu=True).world_size == 1


def test_texts_are_values_of_their_types():
    """As YAML and a command line give them; `settings` repeat the run, and hold no token."""
    settings = {"learning_rate": "1e-5", "reward_weights": ["1e-0"], "use_vllm": "yes", "num_iterations": "2"}
    settings |= {"model_init_kwargs": '{"dtype": "bfloat16"}', "hub_token": "s3cr3t", "no_startup_check": True} | LORA
    recipe = read(**settings)
    values = recipe.training
    assert (values.learning_rate, values.num_iterations) == (1e-5, 2) and values.use_vllm is True
    assert values.reward_weights == [1.0] and values.model_init_kwargs == {"dtype": "bfloat16"}
    assert values.hub_token == "s3cr3t" and "hub_token" not in recipe.settings and not values.startup_check


@pytest.mark.parametrize(("written", "value"), [("false", "none"), ("True", "group"), ("batch", "batch")])
def test_scale_rewards_is_a_boolean_or_a_name_in_recipes_files_of_trl_and_command_lines(tmp_path, written, value):
    file = tmp_path / "config.yaml"
    file.write_text(f"output_dir: {tmp_path}\nuse_cpu: true\nbf16: false\nscale_rewards: {written}\n")
    words = ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "no", "--scale_rewards", written]
    parser = TrlParser([config_class("grpo")])
    configs = [
        read(method="grpo", scale_rewards=yaml.safe_load(written)).training,
        read(method="grpo", scale_rewards=written).training,
        *parser.parse_args_and_config(["--config", str(file)]),
        *parser.parse_args_and_config(words),
    ]
    assert [config.scale_rewards for config in configs] == [value] * 4


@pytest.mark.parametrize(("written", "value"), [(True, True), (False, False), ("true", True), ("no", False)])
def test_fsdp_is_a_boolean_in_recipes_and_on_command_lines(written, value):
    assert bool(read(4, fsdp=written).training.fsdp) is value


def test_a_list_is_a_pair_of_numbers_where_the_setting_is_one():
    assert read(method="rloo", reward_clip_range=[0, "0.5"]).training.reward_clip_range == (0.0, 0.5)
    with pytest.raises(ValueError, match="reward_clip_range.*'low'"):
        read(method="rloo", reward_clip_range=["low", 1])


def test_one_process_of_several_without_a_launcher_is_refused(monkeypatch, tmp_path):
    """It would wait for the others without a word."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    with pytest.raises(ValueError, match="RANK"):
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
