"""Settings that PACSConfig rejects and accepts."""

import itertools
import math
import warnings
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Literal, get_origin, get_type_hints

import pytest
from trl import TrlParser

from pacs_trl import PACSConfig
from pacs_trl.errors import UserError
from pacs_trl.methods import method_names
from pacs_trl.pacs_config import GRPO_LOSS_SETTINGS
from pacs_trl.recipe import config_class
from pacs_trl.settings.trl_settings import NEEDS, REFUSED
from pacs_trl.update.step_sizes import BatchSizes


def make(**settings):
    return PACSConfig("out", **({"bf16": False, "use_cpu": True} | settings))


OFF_DEFAULT = {
    "delta": 2.0,
    "epsilon": 0.3,
    "epsilon_high": 0.28,
    "importance_sampling_level": "sequence",
    "loss_type": "grpo",
    "scale_rewards": "none",
    "multi_objective_aggregation": "normalize_then_sum",
    "off_policy_mask_threshold": 0.5,
    "use_bias_correction_kl": False,
}


@pytest.mark.parametrize("name", GRPO_LOSS_SETTINGS)
def test_settings_of_grpos_loss_are_refused(name):
    default = next(f.default for f in fields(PACSConfig) if f.name == name)
    assert default is not MISSING
    value = OFF_DEFAULT[name] if name in OFF_DEFAULT else default / 2 + 0.1
    with pytest.raises(ValueError, match=f"{name}="):
        make(**{name: value})
    make(**{name: default})


REFUSED_VALUES = {
    "label_smoothing_factor": 0.1,
    "neftune_noise_alpha": 5.0,
    "train_sampling_strategy": "group_by_length",
    "length_column_name": "tokens",
    "data_seed": 3,
    "average_tokens_across_devices": False,
    "include_for_metrics": ["loss"],
    "label_names": ["solution"],
    "eval_do_concat_batches": False,
    "eval_accumulation_steps": 1,
}
NEEDING_VALUES = {
    "vllm_structured_outputs_regex": "a*",
    "transformers_continuous_batching_config": {"block_size": 32},
    "ref_model_mixup_alpha": 0.5,
    "ref_model_sync_steps": 5,
    "num_completions_to_print": 3,
    "log_unique_prompts": True,
    "liger_kernel_config": {"rope": True},
    "entropy_coef_min": 0.1,
    "entropy_coef_max": 0.5,
    "entropy_coef_delta": 0.1,
    "entropy_target": 0.4,
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_of_the_trainer_without_effect_are_refused(name):
    with pytest.raises(ValueError, match=f"{name}=.*Remove the key"):
        make(**{name: REFUSED_VALUES.get(name, True)})


@pytest.mark.parametrize("name", NEEDS)
def test_settings_that_need_another_one_are_refused_without_it(name):
    with pytest.raises(ValueError, match=f"{name}=.*{NEEDS[name]}"):
        make(**{name: NEEDING_VALUES[name]})


def test_the_former_name_of_packing_warns_and_works():
    with pytest.warns(FutureWarning, match="Set packing='never'") as warned:
        config = make(padding_free="never")
    assert config.packing == "never" and config.padding_free is None
    assert [Path(warning.filename).name for warning in warned] == ["test_pacs_config.py"]
    assert make().packing == make(packing="auto").packing == "auto"
    with pytest.raises(ValueError, match="padding_free must be one of auto, never"):
        make(padding_free="always")
    with pytest.raises(ValueError, match="packing='never' and padding_free='auto'.*contradict"):
        make(packing="never", padding_free="auto")


TRUNCATING = {"top_p": 0.9, "top_k": 5, "min_p": 0.1}
LATE_SERVER = {"use_vllm": True, "vllm_mode": "server", "rollout_lag": 1, "stale_logps": "recompute"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"top_p": 0.9}, "top_p=0.9"),
        ({"top_k": 20}, "top_k=20"),
        ({"min_p": 0.1}, "min_p=0.1"),
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1"),
        ({"generation_kwargs": {"no_repeat_ngram_size": 2}}, "no_repeat_ngram_size"),
        *(({"generation_kwargs": {key: value}}, f"'{key}': {value}") for key, value in TRUNCATING.items()),
        ({"use_vllm": True, "top_p": 0.9}, "top_p=0.9"),
        ({"use_vllm": True, "generation_kwargs": {"top_p": 0.9}}, "'top_p': 0.9"),
        ({"use_vllm": True, "generation_kwargs": {"frequency_penalty": 0.5}}, "frequency_penalty"),
        ({"top_p": 0.9} | LATE_SERVER, "top_p=0.9"),
    ],
    ids=str,
)
def test_truncated_sampling_trains_with_a_warning(settings, words):
    """Where no log-probs of an engine enter the loss."""
    with pytest.warns(UserWarning, match=f"{words}.*not sampled from the policy"):
        make(**settings)


def test_stop_words_of_vllm_are_warned_of():
    with pytest.warns(UserWarning, match="stop_token_ids"):
        make(use_vllm=True, generation_kwargs={"stop": ["</answer>"]})


@pytest.mark.parametrize(
    "settings",
    [
        {"generation_kwargs": {"num_beams": 1, "do_sample": True, "no_repeat_ngram_size": 0, "bad_words_ids": None}},
        {"generation_kwargs": {"eos_token_id": [1, 2], "pad_token_id": 0, "use_cache": True}},
        {"generation_kwargs": {"stop_token_ids": [1]}, "use_vllm": True},
        {"top_p": 1.0, "top_k": 0, "min_p": 0.0},
        {"top_p": 0.9, "generation_kwargs": {"top_p": 1.0, "top_k": 0, "min_p": 0.0}},
        {"cache_implementation": "static"},
        {"max_grad_norm": 0.0},
    ],
    ids=str,
)
def test_settings_that_change_nothing_or_are_honored_have_no_warning(settings):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        make(**settings)


def illegal_values(config_class):
    for each in fields(config_class):
        if legal := each.metadata.get("metavar"):
            below = [legal.least - 1] if legal.least is not None else [legal.above]
            above = [legal.most + 1] if legal.most is not None else [legal.below]
            values = [float(bound) for bound in below + above if bound is not None]
            yield from ((each.name, value) for value in (*values, math.nan, math.inf))
        elif each.metadata.get("choices") or get_origin(get_type_hints(config_class)[each.name]) is Literal:
            yield each.name, "unknown"


@pytest.mark.parametrize("method", method_names())
def test_values_out_of_range_and_unknown_choices_are_refused(method):
    """Of every setting of every method."""
    values = list(illegal_values(config_class(method)))
    assert len(values) > 8
    for name, value in values:
        with pytest.raises(ValueError, match=name):
            config_class(method)("out", bf16=False, use_cpu=True, **{name: value})


def test_all_values_out_of_range_are_named():
    with pytest.raises(ValueError, match="pacs_beta.* proxy"):
        make(pacs_beta=0.0, proxy="x")


def test_sizes_are_legal_where_groups_and_updates_are_whole():
    for size, processes, accumulation, steps, group, iterations in itertools.product(
        (1, 3, 4), (1, 2), (1, 2, 3, 6), (1, 2, 3, 4, 6), (2, 4, 5), (1, 2)
    ):
        rows = size * processes
        whole_groups = rows * accumulation % group == 0  # those of a generation are TRL's to check
        one_generation = steps % accumulation == 0
        several_generations = accumulation % steps == 0 and iterations == 1
        legal = whole_groups and (one_generation or several_generations)
        assert (not BatchSizes(size, processes, accumulation, steps, group, iterations).errors()) == legal


@pytest.mark.parametrize("key", ["compile_layers", "gradient_checkpointing"])
@pytest.mark.parametrize("number", [0, 1])
def test_0_and_1_are_booleans_in_files_python_and_on_command_lines(tmp_path, key, number):
    file = tmp_path / "config.yaml"
    file.write_text(f"output_dir: {tmp_path}\nuse_cpu: 1\n{key}: {number}\n")
    words = ["--output_dir", str(tmp_path), "--use_cpu", "1", f"--{key}", str(number)]
    configs = [
        PACSConfig(str(tmp_path), use_cpu=True, **{key: number}),
        *TrlParser([PACSConfig]).parse_args_and_config(["--config", str(file)]),
        *TrlParser([PACSConfig]).parse_args_and_config(words),
    ]
    assert all(getattr(config, key) is bool(number) for config in configs)
    with pytest.raises(UserError, match=f"{key} must be one of"):
        PACSConfig(str(tmp_path), use_cpu=True, **{key: 2})
