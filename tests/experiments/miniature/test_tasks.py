import re
from collections import Counter

import pytest
from math_verify import parse, verify

from experiments.miniature.tasks import CALL, NUM_ADDITIONS, SUM_SIZES, TASKS, demonstrations, looks_right, problems
from experiments.miniature.tokenizer import build_tokenizer
from experiments.miniature.warm_start import MAX_COMPLETION_LENGTH
from pacs_trl.verification.code import CodeVerifier


def canonical(problem: str) -> tuple[str, ...]:
    """The operands, which are those of one operator, in order."""
    return tuple(sorted(re.findall(r"\d+", problem)))


def answer_of(row: dict) -> str:
    """The last message of a worked solution, which says the answer."""
    return row["solution"] if isinstance(row["solution"], str) else row["solution"][-1]["content"]


ARITHMETIC = [task for task in TASKS if task != "programs"]


@pytest.mark.parametrize("task", ARITHMETIC)
def test_problems_have_right_answers_and_disjoint_splits(task):
    """Answers are right, the seed decides the sample, and a fifth is held out that looks like the rest: also with the
    operands of + and * in another order no problem is in both splits."""
    train, test = problems(task, "train"), problems(task, "test")
    for row in test[:1000]:
        assert eval(row["problem"].removeprefix("What is ").partition("?")[0]) == int(row["answer"]), row
    assert len({row["problem"] for row in test}) == len(test)
    assert not {canonical(row["problem"]) for row in train} & {canonical(row["problem"]) for row in test}
    assert 0.17 < len(test) / (len(train) + len(test)) < 0.23
    # Same distribution of answer lengths: no share differs by more than 2 percentage points, or two standard errors.
    tolerance = max(0.02, 2 * (0.25 / len(test)) ** 0.5)
    train_lengths, test_lengths = (Counter(len(row["answer"]) for row in rows) for rows in (train, test))
    for length in train_lengths | test_lengths:
        assert abs(train_lengths[length] / len(train) - test_lengths[length] / len(test)) < tolerance
    first, again, other = (problems(task, "train", 50, seed=seed) for seed in (1, 1, 2))
    assert first == again != other and len({row["problem"] for row in first}) == 50


@pytest.mark.parametrize("task", ARITHMETIC)
def test_demonstrations_reach_the_answer_by_true_steps(task):
    """They are short, and graded correct."""
    train = {row["problem"]: row["answer"] for row in problems(task, "train")}
    for row in demonstrations(task, seed=3)[:500]:
        assert train[row["problem"]] == row["answer"]
        *steps, boxed = answer_of(row).rsplit(r"\boxed{", 1)
        assert boxed == row["answer"] + "}"
        for step in answer_of(row).replace(r"\boxed{", "").replace("}", "").split(","):
            assert len({eval(side) for side in step.split("=")}) == 1, row  # `a=b=c` states that neighbors are equal
    tokenizer, longest = build_tokenizer(), 28 if task == "addition" else MAX_COMPLETION_LENGTH
    for row in demonstrations(task, 100, seed=4):
        assert len(tokenizer(answer_of(row))["input_ids"]) < longest
        gold, wrong = parse(rf"\boxed{{{row['answer']}}}"), parse(rf"\boxed{{{int(row['answer']) + 1}}}")
        assert verify(gold, parse(answer_of(row))) and not verify(wrong, parse(answer_of(row)))


@pytest.mark.parametrize("num_terms", SUM_SIZES)
def test_guessing_does_not_find_a_sum(num_terms):
    """The most frequent answer, guessed always, is right in less than one case of twenty-five."""
    answers = Counter(row["answer"] for row in problems(f"terms_{num_terms}", "test"))
    assert max(answers.values()) < answers.total() / 25


def test_the_taught_mixture_is_shorter_sums_and_some_additions():
    rows = problems("arithmetic", "train") + problems("arithmetic", "test")
    terms = Counter(row["problem"].count("+") + 1 for row in rows)
    additions = sum(re.fullmatch(r"\d\d\+\d\d", row["problem"]) is not None for row in rows)
    assert set(terms) == {n - 1 for n in SUM_SIZES}
    assert NUM_ADDITIONS <= additions < NUM_ADDITIONS * 1.1  # sums of two tens are additions too
    # What is held out of the benchmarks is not taught.
    taught = {canonical(row["problem"]) for row in problems("arithmetic", "train")}
    for benchmark in ("terms", "addition", "grouped"):
        assert not taught & {canonical(row["problem"]) for row in problems(benchmark, "test")}


def test_nothing_that_is_taught_or_trained_has_parentheses():
    """The other domain of the tables; without its parentheses a held-out problem of it is held out of the others
    too."""
    assert all("(" in row["problem"] for row in problems("grouped", "test"))
    for task in set(ARITHMETIC) - {"grouped"}:
        assert not any("(" in row["problem"] for row in problems(task, "train"))


@pytest.mark.parametrize(
    ("task", "split", "number"), [("sums", "train", 1), ("terms", "dev", 1), ("terms", "test", 10**6)]
)
def test_unknown_tasks_splits_and_sizes_are_refused(task, split, number):
    with pytest.raises(ValueError, match="sums|dev|[Ss]ample"):
        problems(task, split, number)


class TestPrograms:
    def test_every_worked_program_passes_the_tests_of_its_problem(self):
        rows = demonstrations("programs", 40, seed=0)
        wrong = [row["solution"].replace("int(input())", "1").replace("print(", "print(0+") for row in rows]
        with CodeVerifier(num_workers=2, isolation="rlimits") as verifier:
            assert verifier.grade([row["solution"] for row in rows], [row["answer"] for row in rows]) == [1.0] * 40
            assert verifier.grade(wrong, [row["answer"] for row in rows]) == [0.0] * 40

    def test_programs_have_disjoint_splits_and_fit_the_length(self):
        train, test = problems("programs", "train"), problems("programs", "test")
        assert not {row["problem"] for row in train} & {row["problem"] for row in test}
        tokenizer = build_tokenizer()
        assert max(len(tokenizer(row["solution"])["input_ids"]) for row in demonstrations("programs")) < 48

    def test_a_right_answer_or_call_looks_right_and_others_do_not(self):
        for row in demonstrations("programs", 100):
            assert looks_right(row, row["solution"]) and not looks_right(row, row["solution"].replace("*", "+"))
        assert looks_right({"problem": "1+1", "answer": "2"}, r"so \boxed{2}")
        assert looks_right({"problem": "4*5", "answer": "20"}, CALL.format("4*5"))
        assert not looks_right({"problem": "4*5", "answer": "20"}, CALL.format("4*6"))
        assert not looks_right({"problem": "1+1", "answer": "2"}, r"so \boxed{12}")
