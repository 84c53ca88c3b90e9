"""Grading of one completion with math-verify, and the loop of the worker process.

The pool (`pool.py`) forks workers and may kill them at any time, so they hold no state. A worker sets the limits that
the kernel enforces: CPU time per item and address space. The pool enforces wall-clock limits.
"""

import math
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import product
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import math_verify.parser
from latex2sympy2_extended import NormalizationConfig
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy import Add, Basic, Integer, Mul, Number, Pow, Rational, factorial

from . import Outcome, robust
from .gym_grader import grade_entry
from .numerals import last_number


# Completions repeat their answers; math-verify caches only 20 of them.
math_verify.parser.parse_latex_cached = lru_cache(maxsize=4096)(math_verify.parser.parse_latex_cached.__wrapped__)


class Protocol(NamedTuple):
    """Parsers of a gold answer and of a completion; an empty list means that there is none."""

    parse_gold: Callable[[str], list]
    parse_completion: Callable[[str], list]


def _parse(text: str, *configs: Any, **kwargs: Any) -> list:
    """Call `math_verify.parse` without its time limit, and raise `MemoryError`."""
    try:
        return parse(text, list(configs), parsing_timeout=None, raise_on_error=True, **kwargs)
    except MemoryError:
        raise
    except Exception:  # as in math-verify, an extractor that raises finds no answer
        return []


_LATEX = LatexExtractionConfig()
_EXPRESSION = ExprExtractionConfig()
_TRL_LATEX = LatexExtractionConfig(
    normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
)


def _last_number(text: str) -> list:
    number = last_number(text)
    return [Rational(Fraction(number))] if number else []


PROTOCOLS = {
    # The last number of each text: an unevaluated expression such as `7 + 15 =` is no answer to `7 + 15`.
    "number": Protocol(parse_gold=_last_number, parse_completion=_last_number),
    # The grader of the PACS authors: the gold in a box, parsed as LaTeX; the completion by both extractors.
    "authors": Protocol(
        parse_gold=lambda gold: _parse(gold if "\\boxed" in gold else f"\\boxed{{{gold}}}", _LATEX),
        parse_completion=lambda text: _parse(text, _EXPRESSION, _LATEX),
    ),
    # `trl.rewards.accuracy_reward`: the gold unchanged; the completion as LaTeX with an anchor, first match only.
    "trl": Protocol(
        parse_gold=lambda gold: _parse(gold, _LATEX, _EXPRESSION),
        parse_completion=lambda text: _parse(text, _TRL_LATEX, extraction_mode="first_match"),
    ),
}


@lru_cache(maxsize=1024)  # the completions of a prompt share their gold
def _parsed_golds(golds: tuple[str, ...], protocol: str) -> list[tuple]:
    """Return the parsed answers of the golds that can be parsed."""
    parsed = (PROTOCOLS[protocol].parse_gold(gold) for gold in golds)
    return [tuple(gold) for gold in parsed if gold]


def grade_one(text: str, golds: tuple[str, ...], protocol: str) -> Outcome:
    """Grade one completion against alternative gold answers, by a key of `PROTOCOLS`: `CORRECT`, `WRONG`, `NO_ANSWER`,
    or `GOLD_UNPARSEABLE`. An empty completion checks the golds: `GOLD_UNPARSEABLE` if none is an expression."""
    if protocol == "robust":
        return robust.grade(text, golds)
    parsed_golds = _parsed_golds(golds, protocol)
    if not text:  # math-verify compares as strings what it cannot parse
        parsed_golds = [gold for gold in parsed_golds if not all(isinstance(item, str) for item in gold)]
    if not parsed_golds:
        return Outcome.GOLD_UNPARSEABLE
    answer = tuple(PROTOCOLS[protocol].parse_completion(text))
    if not answer:
        return Outcome.NO_ANSWER
    return Outcome.CORRECT if any(_is_equal(gold, answer) for gold in parsed_golds) else Outcome.WRONG


def _is_equal(gold: tuple, answer: tuple) -> bool:
    # Pairs of an expression and its text. Matrices have no hash.
    is_hashable = all(isinstance(item, Basic | str) for item in gold + answer)
    return _equal(gold, answer) if is_hashable else _equal.__wrapped__(gold, answer)


@lru_cache(maxsize=4096)
def _equal(gold: tuple, answer: tuple) -> bool:
    """Call `math_verify.verify` pair by pair, and raise `MemoryError` instead of returning inequality."""
    if is_out_of_scale(gold, answer):
        return False
    for gold_item, answer_item in product(gold, answer):
        try:
            if verify(gold_item, answer_item, timeout_seconds=None, raise_on_error=True):
                return True
        except MemoryError:
            raise
        except Exception:  # as in math-verify, a comparison that raises is unequal
            continue
    return False


_LARGEST_ORDINARY = Integer(10) ** 1000
_SMALLEST_HUGE_LOG2 = 2.0**20  # numbers of more than 300,000 digits
_ROUNDED_DOWN = 1.0 - 1e-9  # rounding must not lift a lower bound


def is_out_of_scale(gold: Sequence, answer: Sequence) -> bool:
    """Whether the parsed gold is an ordinary number and the parsed answer, a power tower or factorial, is provably too
    large to equal it. math-verify would compute its digits until the time limit, with the same verdict."""
    gold_values = [item for item in gold if not isinstance(item, str)]
    answer_values = [item for item in answer if not isinstance(item, str)]
    if not gold_values or not answer_values:
        return False
    if {item for item in gold if isinstance(item, str)} & {item for item in answer if isinstance(item, str)}:
        return False  # equal as texts
    is_ordinary = all(isinstance(v, Number) and v.is_finite and abs(v) <= _LARGEST_ORDINARY for v in gold_values)
    return is_ordinary and all((log2_lower_bound(v) or 0.0) > _SMALLEST_HUGE_LOG2 for v in answer_values)


def log2_lower_bound(expression: Any) -> float | None:
    """Return a lower bound (at least 0) on log2 of a sum, product, power, or factorial of positive integers, without
    evaluating it; `None` for other expressions."""
    if isinstance(expression, Integer):
        return math.log2(expression) * _ROUNDED_DOWN if expression > 0 else None
    if not isinstance(expression, Add | Mul | Pow | factorial):
        return None
    bounds = [bound for argument in expression.args if (bound := log2_lower_bound(argument)) is not None]
    if len(bounds) < len(expression.args):
        return None
    if isinstance(expression, Add):
        return max(bounds)
    if isinstance(expression, Mul):
        return sum(bounds)
    last = min(bounds[-1], 64.0)  # without the cap a tower would overflow the float
    if isinstance(expression, Pow):
        return bounds[0] * 2.0**last
    return max(0.0, 2.0**last * (last - 1.4427))  # Stirling: n! >= (n / e)**n, and log2(e) < 1.4427


def serve(connection: Connection, *, protocol: str, cpu_seconds: float, memory_limit_mb: int) -> None:
    """Grade items until the pool closes the connection, and send each outcome at once. The interval timer counts CPU
    time, and its signal ends the process even if the interpreter is held."""
    if sys.platform == "linux":  # macOS refuses this limit
        resource.setrlimit(resource.RLIMIT_AS, (memory_limit_mb << 20, memory_limit_mb << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    while True:
        for text, golds in connection.recv():
            if protocol == "reasoning_gym":
                connection.send(grade_entry(text, golds[0], cpu_seconds))
                continue
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
            outcome = grade_one(text, golds, protocol)
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            connection.send((outcome, 0.0))
