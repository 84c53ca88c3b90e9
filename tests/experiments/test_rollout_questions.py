"""The committed records of the study belong to its present settings, and make the table of its page."""

import shutil
from pathlib import Path

import pytest

from experiments import rollout_questions


PAGE = Path(__file__).parents[2] / "docs/results/open_questions/README.md"


def test_the_committed_records_make_the_table_of_the_page(tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.miniature.warm_start.warm_start", lambda *_, **__: pytest.fail("no record"))
    monkeypatch.chdir(tmp_path)
    shutil.copy(PAGE.with_name("records.jsonl.gz"), tmp_path)
    monkeypatch.setattr("sys.argv", ["rollout_questions", "--results_dir", str(tmp_path)])
    rollout_questions.main()
    rows = [line for line in (tmp_path / "table.md").read_text().splitlines() if line.startswith(("| VERL", "| DARS"))]
    assert len(rows) == 4
    assert set(rows) <= set(PAGE.read_text().splitlines())
