"""Grading without processes: `pacs_trl.verification.worker` on parsed expressions."""

import math

import math_verify.parser
import pytest
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy import Integer, Symbol, factorial

from pacs_trl.verification import Outcome, worker
from pacs_trl.verification.worker import grade_one, is_out_of_scale, log2_lower_bound


def parsed(text):
    return parse(text, [ExprExtractionConfig(), LatexExtractionConfig()])


def expression(text):
    return parsed(f"\\boxed{{{text}}}")[0]


class TestLog2LowerBound:
    def test_bounds_equal_those_worked_by_hand(self):
        assert log2_lower_bound(Integer(8)) == pytest.approx(3.0)
        # 9^5 and 2 * 9^5: 5 * log2(9) = 15.84963, and one more.
        assert log2_lower_bound(expression("9^5")) == pytest.approx(15.84963)
        assert log2_lower_bound(expression("2 \\cdot 9^5")) == pytest.approx(16.84963)
        # A sum is at least its largest term: 9^5 + 7.
        assert log2_lower_bound(expression("9^5 + 7")) == pytest.approx(15.84963)
        # A tower: log2(9) * 9^9 = 3.169925 * 387420489.
        assert log2_lower_bound(expression("9^{9^9}")) == pytest.approx(1228093894, rel=1e-6)
        # 16! >= (16 / e)^16: 16 * (4 - 1.4427) = 40.9168, below log2(16!) = 44.25.
        assert log2_lower_bound(expression("16!")) == pytest.approx(40.9168)

    def test_other_forms_are_unknown(self):
        for text in ("-9^{9^9}", "x^{9^9}", "0.5", "\\frac{1}{2}", "9^{-9}", "9^{9^9} - 1", "\\sqrt{5}", "0"):
            assert log2_lower_bound(expression(text)) is None, text
        assert log2_lower_bound(Symbol("x")) is None

    def test_bounds_are_never_above_the_value(self):
        for base in range(1, 12):
            for exponent in range(1, 12):
                bound = log2_lower_bound(expression(f"{base}^{{{exponent}}}"))
                assert bound <= exponent * math.log2(base)
                bound = log2_lower_bound(expression(f"{base} \\cdot {exponent}!"))
                assert bound <= math.log2(base) + math.log2(math.factorial(exponent))

    def test_endless_towers_stay_finite(self):
        assert math.isfinite(log2_lower_bound(expression("9^{9^{9^{9^{9^9}}}}")))
        assert math.isfinite(log2_lower_bound(factorial(factorial(Integer(10) ** 9, evaluate=False), evaluate=False)))


class TestOutOfScale:
    def test_only_a_number_is_out_of_scale_of_a_huge_one(self):
        tower = parsed(r"\boxed{9^{9^{9}}}")
        assert all(is_out_of_scale(parsed(f"\\boxed{{{gold}}}"), tower) for gold in ("42", r"\frac{1}{2}", "0.25"))
        assert not is_out_of_scale(parsed(r"\boxed{x}"), tower)  # a symbol has no size
        assert not is_out_of_scale(parsed(r"\boxed{8^{8^{8}}}"), tower)  # nor has a gold that is not written out
        assert not is_out_of_scale(tower, tower)
        assert not is_out_of_scale(parsed(r"\boxed{512}"), parsed(r"\boxed{2^{9}}"))  # ordinary
        assert not is_out_of_scale(parsed(r"\boxed{1" + "0" * 1500 + "}"), tower)  # gold beyond the ordinary
        assert not is_out_of_scale(["text"], tower) and not is_out_of_scale(parsed("1"), ["text"])

    def test_same_verdict_as_math_verify_where_that_can_answer(self):
        """Numbers over the threshold that are still quick to write out."""
        for text in (r"\boxed{2^{2097153}}", r"\boxed{3^{1500000}}", r"\boxed{200000!}"):
            for gold in ("7", "0.5", r"\frac{1}{3}", "-1"):
                gold_parsed = parse(f"\\boxed{{{gold}}}", [LatexExtractionConfig()])
                assert is_out_of_scale(gold_parsed, parsed(text))
                assert verify(gold_parsed, parsed(text), timeout_seconds=30) is False


class TestGradeOne:
    def test_answers_have_the_outcomes_of_their_protocol(self):
        assert grade_one(r"\boxed{0.5}", ("\\frac12",), "authors") is Outcome.CORRECT
        assert grade_one(r"\boxed{0.5}", ("1", "2"), "authors") is Outcome.WRONG
        assert grade_one("nothing", ("1",), "authors") is Outcome.NO_ANSWER
        assert grade_one("1", ("p - q",), "trl") is Outcome.GOLD_UNPARSEABLE

    def test_matrices_are_compared_entry_by_entry(self):
        matrix = r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}"
        other = r"\begin{pmatrix} 1 & 2 \\ 3 & 5 \end{pmatrix}"
        for _ in range(2):
            assert grade_one(f"$\\boxed{{{matrix}}}$", (matrix,), "authors") is Outcome.CORRECT
            assert grade_one(f"$\\boxed{{{other}}}$", (matrix,), "authors") is Outcome.WRONG
        assert grade_one("$\\boxed{7}$", (matrix,), "authors") is Outcome.WRONG

    def test_a_cached_verdict_is_that_of_its_text(self):
        """The order of a list is not part of its expression, but of the text beside it."""
        pairs = [("1, 2", "(1, 2)", True), ("2, 1", "(1, 2)", False), ("2, 1", "2, 1", True), ("1, 2", "2, 1", True)]
        for answer, gold, equal in pairs + pairs[::-1]:
            outcome = grade_one(f"$\\boxed{{{answer}}}$", (gold,), "authors")
            assert (outcome is Outcome.CORRECT) is equal, (answer, gold)

    def test_an_extractor_or_comparison_that_raises_has_found_nothing(self, monkeypatch):
        worker._parsed_golds(("1",), "authors")  # the gold is read before the extractor breaks
        worker._equal.cache_clear()

        def broken(*args, **kwargs):
            raise RuntimeError("broken")

        with monkeypatch.context() as patch:
            patch.setattr(worker, "verify", broken)
            assert grade_one("1", ("1",), "authors") is Outcome.WRONG
        monkeypatch.setattr(math_verify.parser, "extract_match", broken)
        assert grade_one("1", ("1",), "authors") is Outcome.NO_ANSWER
        assert grade_one("1", ("no such gold yet",), "authors") is Outcome.GOLD_UNPARSEABLE

    @pytest.mark.parametrize("name", ["parse", "verify"])
    def test_running_out_of_memory_is_neither(self, monkeypatch, name):
        worker._parsed_golds(("1",), "authors")
        worker._equal.cache_clear()

        def exhausted(*args, **kwargs):
            raise MemoryError

        monkeypatch.setattr(worker, name, exhausted)
        with pytest.raises(MemoryError):
            grade_one("1", ("1",), "authors")
