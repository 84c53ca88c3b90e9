"""Answers to problems of reasoning-gym, hostile ones included: some of its scorers evaluate them as Python."""

import json

import pytest
from support.optional_packages import reasoning_gym  # noqa: F401 (skips without it)
from support.seeds import shifted

from pacs_trl.data.gym import gym_rows
from pacs_trl.rewards import VerificationArguments, configure_verification, reasoning_gym_reward
from pacs_trl.verification import Outcome, Verifier, final_answer


EVALUATING = ["binary_matrix", "spiral_matrix", "string_insertion", "simple_integration"]


@pytest.fixture(scope="module")
def verifier():
    with Verifier(num_workers=2, cpu_seconds=1.0, protocol="reasoning_gym") as verifier:
        yield verifier


@pytest.mark.parametrize("task", ["chain_sum", "basic_arithmetic", *EVALUATING])
def test_answers_of_entries_are_correct(verifier, task):
    rows = gym_rows({task: None}, 3, shifted(5))
    entries = reasoning_gym.create_dataset(task, seed=shifted(5), size=3)
    grades = verifier.grade_detailed([entry["answer"] for entry in entries], [row["solution"] for row in rows])
    assert [(grade.outcome, grade.share) for grade in grades] == [(Outcome.CORRECT, 1.0)] * 3


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("I think <answer>41</answer>, no: <answer> 42 </answer>.", " 42 "),
        (r"so \boxed{42}", "42"),
        (r"<answer>7</answer> \boxed{42}", "7"),
        ("<answer>42", None),
        ("</answer> 42 <answer>", None),
    ],
)
def test_the_last_answer_or_box_is_the_final_answer(text, answer):
    assert final_answer(text) == answer


def test_partial_scores_and_missing_answers_have_their_outcome(verifier):
    (row,) = gym_rows({"chain_sum": {"config": {"min_terms": 2, "max_terms": 2}}}, 1, shifted(5))
    entries = reasoning_gym.create_dataset("chain_sum", seed=shifted(5), size=1, min_terms=2, max_terms=2)
    answer = entries[0]["answer"]
    texts = [f"The answer is {answer}", f"The answer is \\boxed{{{answer}}}", answer, "", "x" * 300_000, None, answer]
    golds = [row["solution"]] * 6 + ['{"task": "chain_sum"}']
    grades = verifier.grade_detailed(texts, golds, [False, True, True, False, False, False, False])
    names = ["WRONG", "CORRECT", "NO_ANSWER", "NO_ANSWER", "TOO_LONG", "NO_ANSWER", "GOLD_UNPARSEABLE"]
    assert [grade.outcome.name for grade in grades] == names
    assert 0 < grades[0].share < 1 == grades[1].share


def test_the_last_number_is_graded(verifier):
    """`answer: last_number` grades the last number of what would be the answer; a cut completion has none."""
    (row,) = gym_rows({"chain_sum": {"config": {"min_digits": 2}, "answer": "last_number"}}, 1, shifted(5))
    answer = reasoning_gym.create_dataset("chain_sum", seed=shifted(5), size=1, min_digits=2)[0]["answer"]
    right, wrong = (f"3 + 4 = {answer}.", f"The answer is {answer}"), (f"{answer}, or {answer}0", f"-{answer}1")
    texts = [*right, *wrong, "no number", f"<answer> it is {answer} </answer> 5", right[0]]
    grades = verifier.grade_detailed(texts, [row["solution"]] * 7, [False] * 6 + [True])
    names = ["CORRECT"] * 2 + ["WRONG"] * 2 + ["NO_ANSWER", "CORRECT", "NO_ANSWER"]
    assert [grade.outcome.name for grade in grades] == names


def test_attacks_change_nothing_but_their_own_grade(verifier, tmp_path):
    mark = str(tmp_path / "mark")
    attacks = {
        f"__import__('os').system('touch {mark}')": "WRONG",
        f"open({mark!r}, 'w').write('x')": "WRONG",
        "__import__('socket').create_connection(('127.0.0.1', 22), 1)": "WRONG",
        "__import__('os').kill(__import__('os').getppid(), 9)": "WRONG",
        "[open('/etc/passwd').read()]": "WRONG",
        "__import__('reasoning_gym').algorithmic.binary_matrix.BinaryMatrixDataset.__setattr__": "WRONG",
        "setattr(__import__('sys').modules[type(self).__module__].BinaryMatrixDataset, 'score_answer', 1)": "WRONG",
        # the score of an answer that is written instead of it, to the descriptor that the process reports to
        **{f"[__import__('os').write({fd}, b'1.0'), __import__('os')._exit(0)]": "WRONG" for fd in range(3, 16)},
        "__import__('os')._exit(0)": "WRONG",
        "'x' * 10**11": "WRONG",
        "[0 for _ in iter(int, 1)]": "WRONG",
    }
    for task in EVALUATING[:3]:
        (row,) = gym_rows({task: None}, 1, shifted(7))
        right = reasoning_gym.create_dataset(task, seed=shifted(7), size=1)[0]["answer"]
        grades = verifier.grade_detailed([*attacks, right], [row["solution"]] * (len(attacks) + 1))
        outcomes = dict(zip(attacks, (grade.outcome.name for grade in grades)))
        assert outcomes == attacks, task
        assert grades[-1].outcome is Outcome.CORRECT
    assert not (tmp_path / "mark").exists()
    # sympy evaluates expressions, and no code
    (row,) = gym_rows({"simple_integration": None}, 1, shifted(7))
    code = "__import__('os').write(6, b'1.0')"
    expressions = ["9**(9**9) - 9**(9**9 - 1)", f'lambdify((), "{code}")()', "().__class__", code]
    grades = verifier.grade_detailed(expressions, [row["solution"]] * len(expressions))
    assert grades[0].outcome in (Outcome.TIMEOUT, Outcome.KILLED)
    assert [grade.outcome for grade in grades[1:]] == [Outcome.WRONG] * 3


def test_reward_has_labels_and_metrics_of_each_task():
    rows = gym_rows({"chain_sum": {"weight": 3}, "binary_matrix": {"weight": 1}}, 4, shifted(3))
    assert [row["task"] for row in rows] == ["chain_sum"] * 3 + ["binary_matrix"]
    answers = [reasoning_gym.create_dataset("chain_sum", seed=shifted(3), size=3)[i]["answer"] for i in range(3)]
    texts = [[{"role": "assistant", "content": text}] for text in (answers[0], f"It is {answers[1]}", "none", "[[7]]")]
    columns = {"solution": [row["solution"] for row in rows], "task": [row["task"] for row in rows]}
    for label in ("exact", "share"):
        configure_verification(VerificationArguments(verification_num_workers=1, reasoning_gym_label=label))
        metrics = {}
        labels = reasoning_gym_reward(texts, **columns, log_metric=metrics.__setitem__)
        assert labels[0] == 1.0 and labels[3] == 0.0
        assert (0 < labels[1] < 1) if label == "share" else labels[1] == 0.0
        assert metrics["reasoning_gym/binary_matrix"] == 0.0 and 1 / 3 < metrics["reasoning_gym/chain_sum"] < 1
    configure_verification(VerificationArguments())
    assert json.loads(rows[2]["solution"])["index"] == 2
