"""The committed list of expected outcomes of TRL's tests, and the table made of it."""

from collections import Counter

import outcomes
import pytest
import table
import yaml


EXPECTED = yaml.safe_load(outcomes.EXPECTED.read_text())
LISTED = Counter(test for area in EXPECTED["areas"].values() for test in area)


def test_the_comparison_with_trl_has_the_current_table():
    assert table.PAGE.read_text() == table.page_with_table(), "run `python tests/trl_suite/table.py`"


def test_the_readme_has_the_same_number_as_the_list():
    results = outcomes.expected_outcomes("pacs_trl")
    passed = sum(outcome == "passed" for outcome in results.values())
    assert f"{passed} of {len(results)} tests" in (table.PAGE.parents[1] / "README.md").read_text()


def test_each_test_of_trl_is_in_one_area():
    assert [test for test, times in LISTED.items() if times > 1] == []


@pytest.mark.parametrize("kind", ["differs", "refused", "PACS", "not for PACS"])
def test_each_exception_has_a_reason_and_names_tests_of_the_list(kind):
    for exception in EXPECTED[kind]:
        assert exception["reason"] and "\n" not in exception["reason"]
        assert exception["tests"] and {*exception["tests"]} <= {*LISTED}


def test_outcomes_that_are_not_expected_are_named(tmp_path):
    test = next(test for test, outcome in outcomes.expected_outcomes("pacs_trl").items() if outcome == "passed")
    records = {
        test: {"outcome": "failed", "error": "ValueError: no"},
        "GRPO test_of_another_version": {"outcome": "passed"},
    }
    assert outcomes.unexpected("pacs_trl", records) == [f"failed, expected passed: {test} ValueError: no"]


def test_names_of_tests_are_unique_over_files_and_models():
    path = "/tmp/x/tests/test_{}_trainer.py::TestTrainer::test_train[trl-internal-testing/tiny-Qwen3ForCausalLM]"
    names = [outcomes.short_name(path.format(method)) for method in ("grpo", "rloo")]
    assert names == ["GRPO test_train[tiny-Qwen3ForCausalLM]", "RLOO test_train[tiny-Qwen3ForCausalLM]"]
