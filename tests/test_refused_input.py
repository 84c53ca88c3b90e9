"""Rewards, datasets, models, and settings that PACSTrainer refuses, before anything expensive where it can."""

import contextlib
import copy
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from support.forked_engine import forked_engine
from support.models import TOKENIZER, tiny_model
from support.rollouts import MAX_COMPLETION_LENGTH, Replay, addition_dataset, digit_reward
from support.runs import build_trainer
from transformers import CONFIG_MAPPING
from trl import GRPOConfig

from pacs_trl import GRPOTrainer, PACSConfig, PACSTrainer, PPOTrainer
from pacs_trl.data.prompts import prompt_lengths
from pacs_trl.errors import UserError
from pacs_trl.rollouts import argument_checks
from pacs_trl.rollouts.argument_checks import check_config_class
from pacs_trl.update.rollout import as_numbers


RESULTS = {
    "nothing": None,
    "a number": 0.5,
    "text": "right",
    "a mapping": {"right": 1.0},
    "texts": ["right"] * 8,
    "a list": [1.0, None, [1.0], 0.0, 1, True, 0.0, 1.0],
    "infinity": [0.0, -math.inf] * 4,
    "one too few": [1.0] * 7,
}


@pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS)
def test_results_that_are_no_rewards_are_refused(result):
    with pytest.raises(ValueError, match="'reward' returned"):
        as_numbers(result, "reward", 8)


def test_results_of_asynchronous_reward_functions_are_checked_too(tmp_path):
    async def fair_reward(completions, **kwargs):
        return RESULTS["infinity"]

    with pytest.raises(ValueError, match="'fair_reward' returned"):
        build_trainer(tmp_path, reward=(fair_reward,)).train()


def test_rewards_of_any_numeric_kind_are_read():
    kinds = [torch.tensor([0.0, 1.0]), np.array([0, 1]), (False, True), [np.float32(0.0), 1]]
    assert [as_numbers(kind, "reward", 2) for kind in kinds] == [[0.0, 1.0]] * 4


def test_nan_is_a_missing_reward():
    assert as_numbers([None, math.nan, 1.0, np.float32("nan")], "reward", 4) == [None, None, 1.0, None]


def test_reward_functions_whose_column_is_absent_are_refused(tmp_path):
    def graded(completions, difficulty, **kwargs):
        return [1.0] * len(completions)

    def content(prompts, completions, solution, *, trainer_state, compute_logps, hint=None, **kwargs):
        return [1.0] * len(completions)

    async def later(completions, environments, **kwargs):
        return [1.0] * len(completions)

    for reward, words in (([content, graded], "'graded'.*'difficulty'"), (later, "'environments'")):
        with pytest.raises(ValueError, match=words):
            build_trainer(tmp_path, reward=reward)
    rows = addition_dataset().add_column("difficulty", [1] * 32)
    with pytest.raises(ValueError, match=r"eval_dataset\['easy'\].*'difficulty'"):
        more = {"train_dataset": rows, "eval_dataset": {"hard": rows, "easy": addition_dataset()}}
        build_trainer(tmp_path, reward=graded, more=more)
    build_trainer(tmp_path, reward=[content, graded], more={"train_dataset": rows})
    build_trainer(tmp_path, reward=graded, replay=Replay())  # a rollout function may add the column


QUESTIONS = Dataset.from_dict({"question": ["1+1"] * 32, "solution": ["2"] * 32})


async def two_at_a_time(prompts, generate):
    """A rollout function."""


async def likely(completions, compute_logps, **kwargs):
    """A reward function."""


def needs_solution(completions, solution, **kwargs):
    """A reward function."""


def streamed() -> dict:
    return {"train_dataset": addition_dataset().to_iterable_dataset()}


def spoken_by(role: str, content: str | None = "Answer in French.") -> Dataset:
    question = {"role": "user", "content": "1+1"}
    return Dataset.from_dict({"prompt": [[{"role": role, "content": content}, question]] * 32})


QWEN = copy.deepcopy(TOKENIZER)  # leaves out roles that it does not know
QWEN.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()


def with_column(name: str, value: object = "x") -> Dataset:
    return addition_dataset().add_column(name, [value] * 32)


LAG, TINY = {"rollout_lag": 1}, {"model": None}
LATE_EVALUATION = {"rollout_func": two_at_a_time, "eval_dataset": addition_dataset()}
# Settings, and words of the message. Before the model is loaded, which does not exist, but for the tiny one.
REFUSED = {
    "LoRA target": (TINY | {"more": {"peft_config": LoraConfig(target_modules=["q_proj", "k_prog"])}}, "k_prog"),
    "too few prompts": (
        TINY | {"steps_per_generation": 2, "more": {"train_dataset": addition_dataset(3)}},
        "3 prompts",
    ),
    "no prompt": (TINY | {"more": {"train_dataset": QUESTIONS}}, "train_dataset .*`prompt`"),
    "no prompt to evaluate": (TINY | {"more": {"eval_dataset": {"sums": QUESTIONS}}}, r"eval_dataset\['sums'\]"),
    "unknown key of the template": (TINY | {"chat_template_kwargs": {"enable_thinkng": True}}, "enable_thinkng"),
    "a role that the template leaves out": (
        TINY | {"more": {"train_dataset": spoken_by("developer"), "processing_class": QWEN}},
        "Row 0 of train_dataset .*'developer'",
    ),
    "messages without content": (TINY | {"more": {"eval_dataset": spoken_by("user", None)}}, "Row 0 of eval_dataset"),
    "images": (TINY | {"more": {"train_dataset": with_column("image", "a.png")}}, "train_dataset has images"),
    "images to evaluate": (
        TINY | {"more": {"eval_dataset": with_column("images", ["a.png"])}},
        "eval_dataset has images",
    ),
    **{
        f"a column {name}": ({"more": {"train_dataset": with_column(name)}}, f"train_dataset has the column `{name}`")
        for name in ("completions", "prompts", "completion_ids", "log_metric", "log_extra")
    },
    "columns that are removed": (
        {"reward": needs_solution, "remove_unused_columns": True},
        "'needs_solution'.*train_dataset with remove_unused_columns=True.*'solution'",
    ),
    "dispatched batches": ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches"),
    "a reward's name": ({"reward": "math_reward"}, "reward_funcs"),
    "a number for a reward": ({"reward": [digit_reward, 1.0]}, "reward_funcs"),
    "a correction of nothing": ({"vllm_importance_sampling_correction": True}, "nothing to correct"),
    "a correction with a critic": (
        {"trainer_class": PPOTrainer, "vllm_importance_sampling_correction": True},
        "with a critic only the log-probs of vLLM",
    ),
    "lag, rollout function": (LAG | {"more": {"rollout_func": print}}, "rollout_func other than.* Remove rollout_lag"),
    "lag, evaluation": (LAG | {"more": LATE_EVALUATION}, "rollout_func with eval_dataset.* Remove rollout_lag"),
    "lag, tools": (LAG | {"more": {"tools": [print]}}, "does not support .*tools.* Remove rollout_lag"),
    "lag, stream": (LAG | {"more": streamed(), "max_steps": 2}, "streaming dataset.* Remove rollout_lag"),
    "lag, continuous batching": (
        LAG | {"use_transformers_continuous_batching": True},
        "use_transformers_continuous_batching.* Remove rollout_lag",
    ),
    "FlashAttention 4 in float32": (
        {"model_init_kwargs": {"attn_implementation": "flash_attention_4"}},
        "flash_attention_4 computes in half precision.* Set bf16: true, or attn_implementation: sdpa",
    ),
    "asynchronous reward of log-probs": (
        TINY | {"reward": likely},
        "'likely' is asynchronous and asks for `compute_logps`",
    ),
}


@pytest.mark.parametrize(("settings", "words"), REFUSED.values(), ids=REFUSED)
def test_arguments_are_refused_before_training(tmp_path, settings, words):
    with pytest.raises(ValueError, match=words):
        build_trainer(tmp_path, **({"model": "no/model"} | settings))


def test_a_process_that_generates_is_refused_where_the_system_is_not_linux(tmp_path, monkeypatch):
    monkeypatch.setattr(argument_checks, "sys", SimpleNamespace(platform="darwin"))
    with pytest.raises(ValueError, match="does not support a process that generates on darwin. Remove rollout_lag"):
        build_trainer(tmp_path, model="no/model", **LAG)


@pytest.mark.parametrize("variables", [{}, {"ACCELERATE_USE_FSDP": "True"}])
def test_a_process_that_generates_is_refused_with_fsdp_of_settings_or_of_the_launcher(
    tmp_path, monkeypatch, variables
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    settings = {} if variables else {"fsdp": True}
    with pytest.raises(ValueError, match="does not support FSDP or DeepSpeed without vLLM. Remove rollout_lag"):
        build_trainer(tmp_path, model="no/model", **LAG, **settings)


@pytest.mark.parametrize(("column", "value"), [("image", None), ("images", None), ("images", [])])
def test_columns_of_images_without_images_are_text(tmp_path, column, value):
    trainer = build_trainer(tmp_path, more={"train_dataset": with_column(column, value)}, reward=digit_reward)
    trainer.train()
    assert trainer.state.global_step == 2


class ConfigOfUser(PACSConfig):
    """A configuration of a trainer outside of the package."""


class OverridesLoss(PACSTrainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        return 0 * super().compute_loss(model, inputs, *args, **kwargs)


def test_models_overrides_and_arguments_that_are_refused_before_weights_are_loaded(tmp_path):
    """From directories that contain a configuration alone."""
    CONFIG_MAPPING["t5"]().save_pretrained(tmp_path / "t5")
    with pytest.raises(ValueError, match="'t5' models are encoder-decoders"):
        build_trainer(tmp_path, model=str(tmp_path / "t5"))
    tiny_model().config.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="OverridesLoss overrides compute_loss"):
        build_trainer(tmp_path, model=str(tmp_path / "model"), trainer_class=OverridesLoss)
    with pytest.raises(UserError, match="args is a trl.*GRPOConfig.* `from pacs_trl import PACSConfig`"):
        PACSTrainer(str(tmp_path / "model"), digit_reward, args=GRPOConfig(str(tmp_path), bf16=False))
    with pytest.raises(UserError, match=f"`from {__name__} import ConfigOfUser`"):
        check_config_class(GRPOConfig(str(tmp_path), bf16=False), ConfigOfUser)


def test_messages_of_a_stream_are_checked_when_they_arrive(tmp_path):
    more = {"train_dataset": spoken_by("developer").to_iterable_dataset(), "processing_class": QWEN}
    with pytest.raises(ValueError, match="Row 0 of the batch .*'developer'"):
        build_trainer(tmp_path, more=more).train()
    more = {"train_dataset": with_column("prompts").to_iterable_dataset()}
    with pytest.raises(ValueError, match="column `prompts`"):
        build_trainer(tmp_path, more=more).train()


@pytest.mark.parametrize("size", [6, 3])
def test_evaluations_with_incomplete_groups_or_without_prompts_are_refused(tmp_path, size):
    more = {"eval_dataset": addition_dataset(6)}
    trainer = build_trainer(tmp_path, more=more, num_generations_eval=4, per_device_eval_batch_size=size)
    with pytest.raises(ValueError, match="per_device_eval_batch_size"):
        trainer.evaluate()
    with pytest.raises(ValueError, match="`prompt`"):
        build_trainer(tmp_path).evaluate(QUESTIONS)


@pytest.mark.parametrize("is_path", [True, False])
def test_messages_without_template_and_prompts_beyond_the_context_are_refused(tmp_path, is_path):
    """From a directory without weights: it is found before they are loaded."""
    config = tiny_model().config
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(tmp_path / "model")
    arguments = {"model": str(tmp_path / "model") if is_path else tiny_model(), "reward": digit_reward}
    with pytest.raises(ValueError, match="chat template would ignore enable_thinkng"):
        build_trainer(tmp_path, chat_template_kwargs={"enable_thinkng": True}, **arguments)
    plain = copy.deepcopy(TOKENIZER)
    plain.chat_template = None
    with pytest.raises(ValueError, match="chat template"):
        build_trainer(tmp_path, more={"processing_class": plain}, **arguments)
    longest = max(prompt_lengths(addition_dataset()["prompt"][:], TOKENIZER))
    with pytest.raises(ValueError, match=f"max_position_embeddings=512.*max_completion_length to {512 - longest}"):
        build_trainer(tmp_path, max_completion_length=513 - longest, **arguments)
    with pytest.raises(OSError, match="model.safetensors") if is_path else contextlib.nullcontext():
        build_trainer(tmp_path, max_completion_length=512 - longest, **arguments)


@pytest.mark.parametrize("prompt", [None, "", [], [{"content": "1+1"}]], ids=repr)
def test_a_row_whose_prompt_is_none_is_named(tmp_path, prompt):
    text = [{"role": "user", "content": "2+2"}] if isinstance(prompt, list) else "2+2"
    rows = Dataset.from_list([{"prompt": text, "solution": "4"}] * 7 + [{"prompt": prompt, "solution": "2"}])
    with pytest.raises(ValueError, match="Row 7 of train_dataset"):
        build_trainer(tmp_path, model="no/model", more={"train_dataset": rows})


def test_prompts_over_the_token_budget_are_found_at_startup(tmp_path):
    rows = Dataset.from_list([{"prompt": "1+1" * (9 if i in (5, 6) else 1)} for i in range(8)])
    longest, more = 27 + MAX_COMPLETION_LENGTH, {"train_dataset": rows}
    with pytest.raises(ValueError, match=f"Row 5 .*max_tokens_per_micro_batch={longest - 1}.* {longest}"):
        build_trainer(tmp_path, more=more, max_tokens_per_micro_batch=longest - 1)
    build_trainer(tmp_path, more=more, max_tokens_per_micro_batch=longest)
    more = {"train_dataset": rows.to_iterable_dataset()}  # checked when they are generated
    build_trainer(tmp_path, more=more, max_tokens_per_micro_batch=longest - 1)


def long_row(row):
    row.prompt_ids, row.completion_ids = [1] * 12, [2] * MAX_COMPLETION_LENGTH
    return row


LONG = Replay(edit=lambda generation, rows: [*rows[:-1], long_row(rows[-1])])


def losing_rows(prompts, trainer):
    return {name: value and value[:-1] for name, value in Replay()(prompts, trainer).items()}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"replay": LONG, "max_tokens_per_micro_batch": 17}, "max_tokens_per_micro_batch=17 .*at least 28"),
        ({"replay": losing_rows}, "rollout_func returned 7"),
    ],
)
def test_rollouts_that_cannot_be_trained_are_refused(tmp_path, settings, words):
    with pytest.raises(ValueError, match=words):
        build_trainer(tmp_path, **settings).train()


def test_template_arguments_that_no_prompt_reads_are_warned_of(tmp_path, caplog):
    """Prompts that are text, and those of a stream, which may be text, too."""
    text = Dataset.from_dict({"prompt": ["1+1", "2+1"] * 16})
    unread = {"chat_template_kwargs": {"enable_thinking": False}}
    for dataset in (text, streamed()["train_dataset"]):
        caplog.clear()
        trainer = build_trainer(tmp_path, reward=squared_length, more={"train_dataset": dataset}, **unread)
        assert "does not read enable_thinking" in caplog.text
        trainer.train()
        assert trainer.state.global_step == 2


def with_added_token(token: str, **special: str) -> Any:
    """The tokenizer with a token that the tiny model has no embedding for."""
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.add_tokens([token])
    tokenizer.add_special_tokens(special)
    return tokenizer


@pytest.mark.parametrize("trainer_class", [PACSTrainer, GRPOTrainer])
@pytest.mark.parametrize("lag", [0, 1])
def test_tokens_of_prompts_without_an_embedding_are_named(tmp_path, trainer_class, lag):
    prompts = Dataset.from_dict({"prompt": ["1+1", "<think>"] * 16})
    more = {"train_dataset": prompts, "processing_class": with_added_token("<think>")}
    with forked_engine():
        trainer = build_trainer(tmp_path, trainer_class=trainer_class, more=more, rollout_lag=lag)
        with pytest.raises(ValueError, match=f"'<think>' with the id {len(TOKENIZER)}, and"):
            trainer.train()
    model = tiny_model()
    model.resize_token_embeddings(len(TOKENIZER) + 1)
    build_trainer(tmp_path, model=model, trainer_class=trainer_class, reward=squared_length, more=more).train()


def test_a_pad_token_without_an_embedding_is_named(tmp_path):
    more = {"processing_class": with_added_token("<think>", pad_token="<pad>")}
    with pytest.raises(ValueError, match="The pad token '<pad>' .*tokenizer.pad_token = tokenizer.eos_token"):
        build_trainer(tmp_path, more=more)
    more["processing_class"].pad_token = TOKENIZER.eos_token
    build_trainer(tmp_path, more=more).train()  # <think> is in no prompt


def squared_length(completions, completion_ids, **kwargs):
    return [float(len(ids) ** 2 % 2) for ids in completion_ids]


def squared(completions, square, **kwargs):
    """Reward function that reads a column which a transform makes."""
    return [float(value % 2) for value in square]


def made_on_the_fly(seen: list | None = None, **more: object) -> Dataset:
    """A dataset whose rows a transform makes from its only column, `number`."""

    def transform(batch):
        if seen is not None:
            seen.extend(batch["number"])
        columns = {"prompt": [f"{number}+1=" for number in batch["number"]]}
        columns["square"] = [number**2 for number in batch["number"]]
        return columns | {name: [value] * len(batch["number"]) for name, value in more.items()}

    return Dataset.from_dict({"number": list(range(32))}).with_transform(transform)


@pytest.mark.parametrize("trainer_class", [PACSTrainer, GRPOTrainer])
def test_columns_may_be_made_by_a_transform(tmp_path, trainer_class):
    """Training and evaluation read them, as does a saved model's card, without an error."""
    more = {"train_dataset": made_on_the_fly(), "eval_dataset": made_on_the_fly()}
    trainer = build_trainer(tmp_path, trainer_class=trainer_class, reward=squared, more=more)
    trainer.train()
    assert trainer.state.global_step == 2 and "eval_reward" in trainer.evaluate()
    trainer.save_model(tmp_path / "model")


def test_columns_of_a_transform_are_those_of_its_first_row(tmp_path):
    seen = []
    with pytest.raises(ValueError, match="'needs_solution'.*train_dataset, prompt, square .*'solution'"):
        build_trainer(tmp_path, model="none", reward=needs_solution, more={"train_dataset": made_on_the_fly(seen)})
    assert set(seen) == {0}  # others would be made twice
    with pytest.raises(ValueError, match="train_dataset has the column `log_extra`"):
        more = {"train_dataset": made_on_the_fly(log_extra=1)}
        build_trainer(tmp_path, model="none", more=more)
    with pytest.raises(ValueError, match="train_dataset has no column `prompt`"):
        more = {"train_dataset": addition_dataset().with_transform(lambda batch: {"text": batch["prompt"]})}
        build_trainer(tmp_path, model="none", more=more)


def test_a_transform_keeps_only_the_columns_that_trl_keeps(tmp_path):
    """With `remove_unused_columns` the transform of a run gets no others, and the check calls it as the run does."""

    def of_solution(batch):
        return {"prompt": [f"{solution}+1=" for solution in batch["solution"]]}

    more = {"train_dataset": addition_dataset().with_transform(of_solution)}
    with pytest.raises(UserError, match="transform of train_dataset reads the column 'solution'.*: false"):
        build_trainer(tmp_path, model="none", more=more, reward=squared_length, remove_unused_columns=True)
    more = {"train_dataset": addition_dataset().with_transform(lambda batch: {"prompt": batch["prompt"]})}
    build_trainer(tmp_path, more=more, reward=squared_length, remove_unused_columns=True).train()
