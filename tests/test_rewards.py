"""Reward functions with TRL's signature: forms of completions, metrics, and the stop on an untrustworthy batch."""

import json

import pytest
from datasets import Dataset

from pacs_trl import rewards
from pacs_trl.rewards import (
    VerificationArguments,
    VerificationFailure,
    code_reward,
    configure_verification,
    math_reward,
    shared_verifier,
)
from pacs_trl.rollouts.dataset_checks import check_golds
from pacs_trl.verification import Verifier


# The protocol that evaluates what it reads, so that a completion can reach the time limit.
AUTHORS = VerificationArguments(
    verification_protocol="authors", verification_num_workers=1, verification_cpu_seconds=0.3
)
ENDLESS = r"\boxed{9^{9^9} - 1}"


@pytest.fixture(scope="module", autouse=True)
def small_shared_verifier():
    configure_verification(AUTHORS)
    yield
    shared_verifier().close()


@pytest.fixture(autouse=True)
def fresh_window(monkeypatch):
    monkeypatch.setattr(rewards, "_windows", {})
    monkeypatch.setattr(rewards, "_kinds_with_warning", set())


def conversational(text):
    return [{"role": "assistant", "content": text}]


class TestMathReward:
    def test_text_and_last_messages_are_graded_and_other_completions_are_wrong(self):
        """Text, messages of which the last one counts, and what is no text."""
        turns = conversational(r"\boxed{1}") + conversational(r"\boxed{3}")
        others = [None, 3, [], [{"role": "assistant"}], [{"content": None}]]
        completions = ["The answer is 3", conversational("The answer is 3"), turns, *others]
        assert math_reward(completions, solution=["3"] * 8) == [1.0] * 3 + [0.0] * 5

    def test_metrics_are_shares_of_all_outcomes(self):
        metrics, columns = {}, {}
        labels = math_reward(
            [r"\boxed{1}", r"\boxed{2}", "none", r"\boxed{1}", ENDLESS],
            solution=["1", "1", "1", None, "42"],
            log_metric=metrics.__setitem__,
            log_extra=columns.__setitem__,
        )
        assert labels == [1.0, 0.0, 0.0, None, 0.0]
        seen = ["correct", "wrong", "no_answer", "gold_unparseable", "timeout"]
        shares = {f"verification/{name}": 0.2 for name in seen}
        assert metrics == shares | {"verification/killed": 0.0, "verification/too_long": 0.0}
        assert columns == {"solution": ["1", "1", "1", "None", "42"], "verification": seen}

    def test_truncated_completions_have_no_answer_unless_a_box_is_closed(self):
        texts, golds, metrics = ["The 9 that", r"\boxed{9} that", "It is 9."], ["9"] * 3, {}
        cut = [True, True, False]
        assert math_reward(texts, solution=golds, truncated=cut, log_metric=metrics.__setitem__) == [0.0, 1.0, 1.0]
        assert metrics["verification/no_answer"] == pytest.approx(1 / 3)
        assert math_reward(texts, solution=golds) == [1.0] * 3  # not told: taken for whole


def test_the_default_reward_is_not_gamed_by_form():
    assert VerificationArguments().verification_protocol == Verifier().protocol == "robust"
    rewards_of = {
        "57": 1.0,
        "54 + 3 = 57": 1.0,
        r"\boxed{57} and again \boxed{57}": 1.0,
        "54 + 3 =": 0.0,
        "54 + 3": 0.0,
        r"\boxed{57} or \boxed{58}": 0.0,
        r"<think>\boxed{57}</think> It is 58.": 0.0,
        r"It is 57, so \boxed{}": 0.0,
    }
    configure_verification(VerificationArguments(verification_num_workers=1))
    try:
        assert math_reward([*rewards_of], solution=["57"] * len(rewards_of)) == [*rewards_of.values()]
        assert math_reward([r"\boxed{57}"] * 3, solution=[None, "$$", "57"]) == [None, None, 1.0]
    finally:
        configure_verification(AUTHORS)


class TestUntrustworthyBatch:
    def test_a_trainer_reports_unreadable_golds_of_its_training_set(self, caplog):
        rows = Dataset.from_dict({"prompt": ["a", "b"], "solution": ["1", "It is two."]})
        check_golds(rows)
        check_golds(rows.to_iterable_dataset())
        (record,) = caplog.records
        assert "1 of 2 gold answers" in record.message and "row 1: 'It is two.'" in record.message

    def test_a_trainer_counts_golds_by_kind(self, caplog):
        golds = [["1"], ["1e3"], [], ["$$"], ["It is two."], ["2", "3"]]
        check_golds(Dataset.from_dict({"prompt": ["a"] * 6, "solution": golds}))
        (record,) = caplog.records
        assert "4 of 6 gold answers of the training set" in record.message
        assert "1 missing" in record.message and "(row 2: [])" in record.message
        assert "2 unreadable" in record.message and "row 3: ['$$']" in record.message
        assert "1 in e-notation" in record.message and "row 1: ['1e3']" in record.message
        assert "1 of three or more words" in record.message and "row 4: ['It is two.']" in record.message

    def test_the_first_unreadable_gold_is_named(self, caplog):
        for _ in range(2):
            assert math_reward([r"\boxed{1}", r"\boxed{1}"], solution=["1", "$$"]) == [1.0, None]
        (record,) = caplog.records
        assert "'$$'" in record.message and "verification/gold_unparseable" in record.message

    def test_stops_with_three_examples(self):
        golds = ["1"] * 40 + [None] * 60
        failure = "60 of the last 100 .* verification_max_failure_share=0.5"
        with pytest.raises(VerificationFailure, match=failure) as info:
            math_reward([r"text \boxed{1}"] * 100, solution=golds)
        assert str(info.value).count("gold_unparseable: gold 'None', completion ends in") == 3

    def test_one_bad_prompt_in_a_small_batch_goes_on(self):
        for _ in range(7):
            math_reward([r"\boxed{1}"] * 8, solution=[None] * 8)
        with pytest.raises(VerificationFailure, match="64 of the last 64"):
            math_reward([r"\boxed{1}"] * 8, solution=[None] * 8)

    def test_the_window_moves_on_wrong_answers_are_no_failures_and_the_share_can_be_set(self, monkeypatch):
        math_reward([r"\boxed{1}"] * 60, solution=[None] * 60)
        math_reward([r"\boxed{1}"] * 256, solution=["1"] * 256)
        assert [entry[0].name for entry in rewards._windows["answers"]] == ["CORRECT"] * 256
        assert math_reward([r"\boxed{1}", "no"] * 100, solution=["2"] * 200) == [0.0] * 200
        monkeypatch.setattr(rewards, "_arguments", VerificationArguments(verification_max_failure_share=1.0))
        assert math_reward([r"\boxed{1}"] * 256, solution=[None] * 256) == [None] * 256


SQUARE = {"type": "stdin_stdout", "cases": [{"input": "2", "output": "4"}, {"input": "3", "output": "9"}]}


def program(source):
    return f"```python\n{source}\n```"


class TestCodeReward:
    @pytest.fixture(autouse=True)
    def any_level(self):
        configure_verification(VerificationArguments(verification_num_workers=1, code_isolation="rlimits"))
        yield
        configure_verification(AUTHORS)

    def test_programs_get_labels_metrics_and_columns(self):
        metrics, columns = {}, {}
        square = program("print(int(input()) ** 2)")
        completions = [square, conversational(program("print(4)")), program("print(x)"), "none", square]
        labels = code_reward(
            completions,
            solution=[SQUARE, json.dumps(SQUARE), SQUARE, SQUARE, "{"],
            log_metric=metrics.__setitem__,
            log_extra=columns.__setitem__,
        )
        assert labels == [1.0, 0.0, 0.0, 0.0, None]
        shares = {"correct", "wrong", "error", "no_answer", "gold_unparseable"}
        assert {name for name, share in metrics.items() if share == 0.2} == {f"verification/{name}" for name in shares}
        assert metrics["verification/tests_passed"] == pytest.approx(0.3)
        assert columns["verification"] == ["correct", "wrong", "error", "no_answer", "gold_unparseable"]
        assert columns["error"][2] == "NameError"

    def test_share_of_tests(self):
        settings = {"verification_num_workers": 1, "code_isolation": "rlimits", "code_label": "share"}
        configure_verification(VerificationArguments(**settings))
        completions = [program("print(9)"), "none", program("print(1)")]
        assert code_reward(completions, solution=[SQUARE, SQUARE, None]) == [0.5, 0.0, None]

    def test_too_many_unreadable_tests_stop_the_run(self):
        assert code_reward([program("while True: pass")] * 100, solution=["{"] * 40 + [None] * 10 + [SQUARE] * 50)
        with pytest.raises(VerificationFailure, match="200 of the last 250 completions could not be verified"):
            code_reward([program("print(1)")] * 150, solution=["{"] * 150)
