"""Protocol `robust` on the table of graded answers, without processes."""

from pathlib import Path

import pytest
import yaml

from pacs_trl.verification import Outcome, gold_texts
from pacs_trl.verification.worker import grade_one


TABLE = yaml.safe_load((Path(__file__).parents[1] / "data" / "graded_answers.yaml").read_text(encoding="utf-8"))


def label(gold, completion):
    return int(grade_one(completion, gold_texts(gold), "robust") is Outcome.CORRECT)


@pytest.mark.parametrize("kind", [kind for kind in TABLE if kind != "no clear answer"])
def test_table_of_graded_answers(kind):
    labels = [[gold, completion, label(gold, completion)] for gold, completion, _ in TABLE[kind]]
    assert [row for row, expected in zip(labels, TABLE[kind]) if row != expected] == []
