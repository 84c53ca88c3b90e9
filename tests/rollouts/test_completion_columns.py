"""Columns that reward functions add to the completions table."""

from collections import deque

import numpy as np
import pandas as pd
import pytest
import torch
from support.rollouts import addition_dataset, digit_reward
from support.runs import build_trainer
from transformers import TrainerCallback

from pacs_trl.rollouts.completion_columns import align_columns, new_column, unify_types


def unified(*values):
    columns = {"note": deque(values, maxlen=8)}
    unify_types(columns)
    return list(columns["note"])


def test_columns_of_one_type_stay_as_they_are():
    assert unified(1, 2.5, None) == [1, 2.5, None]
    assert unified("a", None) == ["a", None]
    assert unified(True, False) == [True, False]
    assert unified(np.float64(0.5), torch.tensor(2)) == [0.5, 2]


def test_columns_of_several_types_are_text():
    assert unified(1, "a", None) == ["1", "a", None]
    assert unified(True, 2) == ["True", "2"]
    assert unified([1], {"a": 1}) == ["[1]", "{'a': 1}"]
    assert unified(2**70, 1) == [str(2**70), "1"]


def test_tables_of_completions_go_on_after_a_log_that_has_failed(tmp_path):
    """`log` disables them while it writes a log without new completions."""

    class Full(TrainerCallback):
        def on_log(self, args, state, control, **kwargs):
            raise OSError("no space left")

    trainer = build_trainer(tmp_path, log_completions=True, more={"callbacks": [Full()]})
    with pytest.raises(OSError, match="no space left"):
        trainer.log({})
    assert trainer.log_completions


@pytest.mark.parametrize("values", [["one"], "text", 5, None, {"a": 1}], ids=repr)
def test_columns_without_one_value_per_completion_are_refused(values):
    with pytest.raises(ValueError, match="log_extra.*8 completions"):
        new_column("note", values, 8, {})


def test_a_second_column_of_a_name_gets_a_number():
    assert new_column("note", [1], 1, {}) == "note"
    assert new_column("note", [1], 1, {"note": [2], "note_2": [3]}) == "note_3"


def test_a_column_of_later_completions_is_empty_for_earlier_ones():
    """Of the last three completions, more were generated for one prompt, and only these have the column."""
    columns = {"note": deque([1], maxlen=3), "of_evaluation": [2, 3]}
    align_columns(columns, 3)
    assert list(columns["note"]) == [None, None, 1] and columns["of_evaluation"] == [None, 2, 3]


def test_completions_table_keeps_columns_of_any_values(tmp_path):
    """From two functions, also in some batches only."""
    calls = []

    def first(completions, log_extra, **kwargs):
        calls.append(len(completions))
        log_extra("mixed", [i if i % 2 else "text" for i in range(len(completions))])
        log_extra("shared", list(range(len(completions))))
        if len(calls) == 2:
            log_extra("late", [float(i) for i in range(len(completions))])
        return digit_reward(completions)

    def second(completions, log_extra, **kwargs):
        log_extra("shared", ["second"] * len(completions))
        return digit_reward(completions)

    settings = {"log_completions": True, "max_steps": 3, "reward_weights": [0.5, 0.5]}
    trainer = build_trainer(tmp_path, reward=[first, second], **settings)
    trainer.train()
    tables = [pd.read_parquet(file) for file in sorted((tmp_path / "completions").glob("*.parquet"))]
    assert len(tables) == 3 and all(len(table) == calls[0] for table in tables)
    assert set(tables[0]["mixed"]) >= {"text", "1"} and set(tables[0]["shared_2"]) == {"second"}
    assert tables[0]["shared"].tolist() == list(range(calls[0]))
    assert "late" not in tables[0] and tables[1]["late"].tolist() == [float(i) for i in range(calls[0])]
    assert tables[2]["late"].isna().all()
    trainer.evaluate(addition_dataset(4))
    (table,) = [pd.read_parquet(file) for file in (tmp_path / "completions").glob("eval_*.parquet")]
    assert set(table["mixed"]) >= {"text", "1"} and set(table["shared_2"]) == {"second"}


def test_log_extra_of_the_wrong_length_ends_the_run_by_name(tmp_path):
    def reward(completions, log_extra, **kwargs):
        log_extra("note", ["one"])
        return digit_reward(completions)

    with pytest.raises(ValueError, match="log_extra\\('note'"):
        build_trainer(tmp_path, reward=reward, max_steps=1).train()
