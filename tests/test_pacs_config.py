"""Settings that PACSConfig rejects and accepts."""

import itertools
import math
from dataclasses import MISSING, fields
from typing import Literal, get_origin, get_type_hints

import pytest

from pacs_trl import PACSConfig
from pacs_trl.pacs_config import NOT_SUPPORTED, SHAPES_ONLY_GRPO
from pacs_trl.recipe import config_class, method_names
from pacs_trl.update.step_sizes import Step


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
    "entropy_target": 0.4,
    "use_bias_correction_kl": False,
    "use_adaptive_entropy": True,
    "router_aux_loss_coef": 0.001,
}


@pytest.mark.parametrize("name", [*SHAPES_ONLY_GRPO, *NOT_SUPPORTED])
def test_settings_of_grpos_loss_are_refused(name):
    default = next(f.default for f in fields(PACSConfig) if f.name == name)
    assert default is not MISSING
    value = OFF_DEFAULT[name] if name in OFF_DEFAULT else default / 2 + 0.1
    with pytest.raises(ValueError, match=f"{name}="):
        make(**{name: value})
    make(**{name: default})


def illegal_values(config_class):
    for each in fields(config_class):
        if legal := each.metadata.get("metavar"):
            outside = {"at least": -1, "above": 0, "at most": 1, "below": 0}
            ends = [condition.rpartition(" ") for condition in legal.split(" and ")]
            values = [float(bound) + outside[words] for words, _, bound in ends]
            yield from ((each.name, value) for value in (*values, math.nan, math.inf))
        elif each.metadata.get("choices") or get_origin(get_type_hints(config_class)[each.name]) is Literal:
            yield each.name, "unknown"


@pytest.mark.parametrize("method", method_names())
def test_values_out_of_range_and_unknown_choices(method):
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
        assert (not Step(size, processes, accumulation, steps, group, iterations).errors()) == legal
