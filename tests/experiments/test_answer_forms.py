"""Forms of answers that are counted in the completions of a run."""

from types import SimpleNamespace

import pandas as pd
import pytest

from experiments.answer_forms import has_different_boxes, is_unevaluated, shares_of_run


@pytest.mark.parametrize(
    "text", ["54 + 3", "54 + 3 =", "54+3 = ?", "I'll provide only 54 + 3 as is.", r"\boxed{54 + 3}"]
)
def test_a_sum_without_a_number_behind_it_is_unevaluated(text):
    assert is_unevaluated(text)


@pytest.mark.parametrize("text", ["57", "54 + 3 = 57", "54 + 3 = 57.", "54 + 3, or 57", "54", ""])
def test_a_sum_with_its_value_or_no_sum_is_not_unevaluated(text):
    assert not is_unevaluated(text)


def test_boxes_differ_by_their_contents():
    assert has_different_boxes(r"\boxed{57} \boxed{58}")
    assert not has_different_boxes(r"\boxed{57} and \boxed{ 57 }")
    assert not has_different_boxes("57 or 58")


def test_shares_of_the_completions_of_a_run(tmp_path):
    texts = ["54 + 3 =", "57", r"\boxed{57} \boxed{58}", "58"]
    table = pd.DataFrame(
        {
            "step": 2,
            "completion": [[{"role": "assistant", "content": text}] for text in texts],
            "solution": ["57"] * 4,
        }
    )
    (tmp_path / "completions").mkdir()
    table.to_parquet(tmp_path / "completions" / "completions_00002.parquet")
    verifier = SimpleNamespace(grade=lambda texts, golds: [float(text == gold) for text, gold in zip(texts, golds)])
    (row,) = shares_of_run(tmp_path, {"robust": verifier})
    assert row == {"update": 2, "unevaluated": 0.25, "several boxes": 0.25, "robust": 0.25}
