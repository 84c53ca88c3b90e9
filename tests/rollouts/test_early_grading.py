"""Grading of finished completions during generation, with an engine made of lists."""

import threading

import pytest

from pacs_trl.rollouts import early_grading
from pacs_trl.rollouts.early_grading import EarlyGrading
from pacs_trl.verification import Outcome, Verifier


TEXTS = {1: r"\boxed{12}", 2: r"\boxed{13}", 3: r"\boxed{7}", 4: "The 7 of"}


def decode(completions):
    return [TEXTS[token] for (token,) in completions]


def is_truncated(completions):
    return [token == 4 for (token,) in completions]


@pytest.fixture
def verifier(monkeypatch):
    verifier = Verifier(num_workers=1)  # its processes start with the first completion that is graded
    monkeypatch.setattr(early_grading, "shared_verifier", lambda: verifier)
    yield verifier
    verifier.close()


def test_finished_completions_are_known_when_they_are_asked_for(verifier):
    early = EarlyGrading(decode, is_truncated)
    with early.expecting([[5], [5], [6]], ["12", "12", "7"]):
        for finished in ([([5], (1,))], [], [([5], (2,)), ([6], (3,))]):
            early.add(finished)
    early.wait()
    assert not verifier.counts  # nothing is counted before the reward function asks
    grades = verifier.grade_detailed([TEXTS[1], TEXTS[2], TEXTS[3]], ["12", "12", "7"])
    assert [grade.outcome for grade in grades] == [Outcome.CORRECT, Outcome.WRONG, Outcome.CORRECT]
    assert [grade.seconds for grade in grades] == [0.0, 0.0, 0.0]
    assert sum(verifier.counts.values()) == 3


def test_a_truncated_completion_is_graded_as_the_reward_function_grades_it(verifier):
    early = EarlyGrading(decode, is_truncated)
    with early.expecting([[6]], ["7"]):
        early.add([([6], (3,)), ([6], (4,))])
    early.wait()
    cut, whole = (verifier.grade_detailed([TEXTS[4]], ["7"], truncated=[truncated])[0] for truncated in (True, False))
    assert (cut.outcome, whole.outcome) == (Outcome.NO_ANSWER, Outcome.CORRECT)
    assert cut.seconds == 0.0 < whole.seconds  # only the first was graded early


def test_only_the_rows_of_the_batch_are_graded(verifier, monkeypatch):
    graded = []
    monkeypatch.setattr(
        verifier, "grade_early", lambda texts, solutions, truncated: graded.extend(zip(texts, solutions))
    )
    early = EarlyGrading(decode, is_truncated)
    early.add([([5], (1,))])  # before anything is expected
    assert not early.expects_rows
    with early.expecting([[6], [7]], ["13", None]):  # no gold answer: the reward function says what that means
        assert early.expects_rows
        early.add([([6], (2,)), ([7], (3,)), ([9], (1,))])
    assert not early.expects_rows
    early.add([([6], (3,))])  # what is drawn after the batch
    early.wait()
    with pytest.raises(KeyError), early.expecting([[6]], ["13"]):
        raise KeyError
    assert not early.expects_rows and graded == [(TEXTS[2], "13")]


def test_what_waits_is_graded_together(verifier, monkeypatch):
    first_began, rest_is_there = threading.Event(), threading.Event()
    batches = []

    def grade_early(texts, solutions, truncated):
        batches.append(texts)
        first_began.set()
        assert rest_is_there.wait(30)

    monkeypatch.setattr(verifier, "grade_early", grade_early)
    early = EarlyGrading(decode, is_truncated)
    with early.expecting([[5]], ["12"]):
        early.add([([5], (1,))])
        assert first_began.wait(30)
        early.add([([5], (2,))])
        early.add([([5], (3,))])
    rest_is_there.set()
    early.wait()
    assert batches == [[TEXTS[1]], [TEXTS[2], TEXTS[3]]]


def test_a_failure_reaches_the_trainer(verifier, monkeypatch):
    def break_down(texts, solutions, truncated):
        raise RuntimeError("The verification processes broke down twice")

    monkeypatch.setattr(verifier, "grade_early", break_down)
    early = EarlyGrading(decode, is_truncated)
    with early.expecting([[5]], ["12"]):
        early.add([([5], (1,))])
    with pytest.raises(RuntimeError, match="broke down twice"):
        early.wait()
    early.wait()  # said once
