"""Protocol `robust`: grades answers as people and models write them.

`final_answers.py` extracts the answer of a completion, `notation.py` rewrites it into one spelling per meaning,
`values.py` reads it, and `comparison.py` decides whether it equals the gold.
"""

import re
from functools import lru_cache
from typing import Any

from .. import Outcome
from .comparison import is_equal, is_same_words
from .final_answers import FinalAnswers, final_answers
from .notation import normalize
from .values import Leaf, Relation, Sequence, Union, read_value


_MAX_GOLD_LENGTH = 300


@lru_cache(maxsize=1024)
def _read_golds(golds: tuple[str, ...]) -> list[Any]:
    """Return the values of the golds that can be read."""
    values = []
    for gold in golds:
        text = _gold_text(gold)
        if not text:
            continue
        value = read_value(text)
        if _is_readable(value, text):
            values.append(value)
    return values


def _gold_text(gold: str) -> str:
    """Return the normalized answer in a gold: in its box if it has one, or its final answer if it is a solution."""
    if "boxed" in gold or "\n" in gold.strip() or len(gold) > _MAX_GOLD_LENGTH:
        answers = final_answers(gold)
        return ", ".join(normalize(text) for text in answers.texts)
    return normalize(gold)


def _is_readable(value: Any, text: str) -> bool:
    if isinstance(value, Leaf) and value.value is None:
        return not re.search(r"[\\{}]", value.text) and len(value.text) <= 100
    return True


def grade(text: str, golds: tuple[str, ...]) -> Outcome:
    """Grade a completion against alternative golds. An empty completion checks the golds."""
    gold_values = _read_golds(golds)
    if not gold_values:
        return Outcome.GOLD_UNPARSEABLE
    answers = final_answers(text) if text else FinalAnswers((), True)
    texts = [normalize(each) for each in answers.texts]
    if not any(texts):
        words = normalize(text) if len(text) <= 60 else ""
        is_word = any(
            isinstance(gold, Leaf) and gold.value is None and is_same_words(gold.text, words) for gold in gold_values
        )
        return Outcome.CORRECT if words and is_word else Outcome.NO_ANSWER
    for gold in gold_values:
        if _is_answer(gold, texts):
            return Outcome.CORRECT
    return Outcome.WRONG


def _is_answer(gold: Any, texts: list[str]) -> bool:
    commas_separate = _has_commas(gold)
    values = [read_value(text, commas_separate) for text in texts]
    answer = values[0] if len(values) == 1 else Sequence("", tuple(values))
    if is_equal(gold, answer):
        return True
    if len(texts) > 1:
        return len(values) > 1 and all(is_equal(gold, value) for value in values)
    if isinstance(gold, Leaf) and re.fullmatch(r"-?\d+,\d+", texts[0]) and not re.search(r",\d{3}$", texts[0]):
        return is_equal(gold, read_value(texts[0].replace(",", ".")))  # a decimal comma
    return False


def _has_commas(gold: Any) -> bool:
    if isinstance(gold, Relation):
        return any("," in side for side in gold.sides)
    return isinstance(gold, Sequence | Union)
