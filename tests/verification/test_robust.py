"""Protocol `robust` on the table of graded answers and on rewritten golds, without processes."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.seeds import shifted
from watching import read_jsonl

from benchmarks.graders import pairs_of
from pacs_trl.verification import Outcome, Verifier, gold_texts, robust
from pacs_trl.verification.robust.exact import TooLarge, rational_value
from pacs_trl.verification.robust.leaves import parse_expression
from pacs_trl.verification.worker import grade_one


TABLE = yaml.safe_load((Path(__file__).parents[1] / "data" / "graded_answers.yaml").read_text(encoding="utf-8"))
HOSTILE = read_jsonl("hostile.jsonl")


def label(gold, completion):
    return int(grade_one(completion, gold_texts(gold), "robust") is Outcome.CORRECT)


@pytest.mark.parametrize("kind", [kind for kind in TABLE if kind != "no clear answer"])
def test_answers_of_the_table_have_their_labels(kind):
    labels = [[gold, completion, label(gold, completion)] for gold, completion, _ in TABLE[kind]]
    assert [row for row, expected in zip(labels, TABLE[kind]) if row != expected] == []


def test_rewritten_golds_are_right_and_near_misses_wrong():
    golds = list(dict.fromkeys(row["answer"] for row in read_jsonl("math_500.jsonl")))[:80]
    right, wrong = pairs_of(golds)
    assert len(right) == 240 and len(wrong) > 700
    assert [pair for pair in right if not label(pair[1], pair[0])] == []
    assert [pair for pair in wrong if label(pair[1], pair[0])] == []


def test_solutions_of_benchmarks_are_right():
    rows = [(row["solution"], row["answer"]) for row in read_jsonl("math_500.jsonl")[:150]]
    rows += [(row["Solution"], row["Answer"]) for row in read_jsonl("aime_2024.jsonl")]
    rows += [(row["answer"], row["answer"].rpartition("####")[2]) for row in read_jsonl("gsm8k_test_200.jsonl")]
    assert [gold for completion, gold in rows if not label(gold, completion)] == []


def test_hostile_answers_are_graded_within_the_limits():
    texts = ["".join(text * count for text, count in row["parts"]) for row in HOSTILE]
    with Verifier(num_workers=2, protocol="robust", cpu_seconds=0.15) as verifier:
        grades = verifier.grade_detailed(texts, [row["gold"] for row in HOSTILE])
    right = {row["description"] for row, grade in zip(HOSTILE, grades) if grade.outcome is Outcome.CORRECT}
    outcomes = [grade.outcome for grade in grades]
    assert outcomes.count(Outcome.TOO_LONG) == 3
    assert outcomes.count(Outcome.KILLED) == 0
    assert outcomes.count(Outcome.TIMEOUT) < 15
    # In these only the characters around the right answer are hostile.
    characters = {
        "null bytes in the box",
        "right-to-left overrides",
        "full-width digits",
        "control characters",
        "lone surrogate",
    }
    assert right == characters


def test_random_pieces_never_raise():
    chance = random.Random(shifted(0))
    golds = ["5", r"\frac{1}{2}", "(1,2)", r"\{1,2\}", "x^2+1", r"x\ge 3", "1:2", "52_8", r"50\%", "(B) 12", "y=2x+1"]
    for _ in range(1500):
        completion = "".join(chance.choices(PIECES, k=chance.randrange(1, 12)))
        gold = chance.choice([*golds, "".join(chance.choices(PIECES, k=4))])
        for text in (completion, rf"\boxed{{{completion}}}", ""):
            assert grade_one(text, (gold,), "robust") in Outcome


PIECES = (
    r"\boxed{ } { $ \( \) ( ) [ ] 1 2.5 1,234 0 x = < \le \in \cup \frac \frac{1}{2} \frac{1}{0} ^ _ ! \% \pm ° ½ √ ²"
    r" 三 分之 \text{ cm or , ; : - + * / \\ \begin{pmatrix} \end{pmatrix} & \infty ∅ \{ \} e5 10^{ _8 (B) <think>"
    r" </think> <answer> #### ٣ \sqrt{ | \log_ i nan"
).split() + [" ", "\n", "The answer is ", "\x00", "\ud800", "\u202e"]


def test_a_comparison_that_raises_is_unequal_and_memory_errors_are_raised(monkeypatch):
    def fail(error):
        def is_equal(gold, answer):
            raise error

        return is_equal

    monkeypatch.setattr(robust, "is_equal", fail(RecursionError()))
    assert grade_one("5", ("6",), "robust") is Outcome.WRONG
    monkeypatch.setattr(robust, "is_equal", fail(MemoryError()))
    with pytest.raises(MemoryError):
        grade_one("5", ("7",), "robust")


def test_hostile_texts_take_linear_time():
    """Quadratic searches would take minutes, which the kernel ends after seconds of CPU time."""
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (40, 40))\n"
        "from pacs_trl.verification.robust import final_answers, normalize\n"
        r"pieces = [r'\boxed{', r'\boxed ', r'\boxed{1} ', '{', '$', r'\(', '**', '<answer>', '</think> 5', '= ',]"
        "\n"
        "for piece in [*pieces, 'the answer is 5. ', 'Solution: 5 = ', '#### ', '1 111',"
        " '-', '二', '`', '<b ', '<<', '~ ', ' ']:\n"
        "    text = piece * (200_000 // len(piece))\n"
        r"    for text in (text, r'\boxed{' + text + '}', 'The answer is ' + text):"
        "\n"
        "        [normalize(answer) for answer in final_answers(text)]\n"
        "print('done')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr


def test_readable_golds_are_told_from_others():
    golds = ["7", r"\text{Evelyn}", r"\emptyset", "(1, 2]", "x = 3", "So it is 26.", r"\frac{1}{", r"\boxed{}", "{"]
    outcomes = [grade_one("", (gold,), "robust") for gold in golds]
    assert [outcome is not Outcome.GOLD_UNPARSEABLE for outcome in outcomes] == [True] * 6 + [False] * 3


def test_large_numbers_are_refused_before_they_are_computed():
    for text in (r"10^{10^{10}}", r"(10^9)!", r"\frac{1}{2^{10^9}}", r"3^{4^{5^{6}}}"):
        with pytest.raises(TooLarge):
            rational_value(parse_expression(text))
