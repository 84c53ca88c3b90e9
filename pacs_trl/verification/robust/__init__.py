"""Protocol `robust`: grades answers as people and models write them.

`final_answers.py` extracts the answer of a completion, `notation.py` rewrites it into one spelling per meaning,
`values.py` reads it, and `comparison.py` decides whether it equals the gold.
"""

import re
from functools import lru_cache
from typing import Any

from .. import Outcome
from .comparison import VERDICTS, is_equal, is_same_words
from .final_answers import final_answers, read_final_answers
from .last_values import last_words
from .leaves import Leaf
from .notation import normalize
from .values import Relation, Sequence, Union, read_value


# Longer golds are solutions, whose final answer is the gold; longer completions are more than an answer in words.
_MAX_GOLD_LENGTH = 300
_MAX_WORDS_LENGTH = 60


@lru_cache(maxsize=1024)  # the completions of a prompt share their gold
def _read_golds(golds: tuple[str, ...]) -> list[Any]:
    values = []
    for gold in golds:
        # Marks alone, such as `$$`, are no gold.
        texts = [text for text in _gold_texts(gold) if re.search(r"\w", text)]
        alternatives = [read_value(text) for text in texts]
        if texts and all(is_equal(alternatives[0], value) for value in alternatives[1:]):
            values.append(alternatives[0])
        elif texts:
            values.append(read_value(", ".join(texts)))
    return values


def _gold_texts(gold: str) -> list[str]:
    """Return the normalized texts of a gold: the contents of its boxes, or its final answer if it is a solution."""
    has_box = any(command in gold for command in (r"\boxed", r"\fbox", r"\framebox"))
    if has_box or "\n" in gold.strip() or len(gold) > _MAX_GOLD_LENGTH:
        return [normalize(text) for text in final_answers(gold)]
    return [normalize(gold)]


# What remains of an expression that could not be read.
_NOTATION_OF_WORDS = re.compile(r"\\(?:text|emptyset|mathbb|ldots)(?![A-Za-z])|\\[{}]")


def _is_readable(value: Any) -> bool:
    """Whether a gold is an expression or words, not an expression that could not be read."""
    if not isinstance(value, Leaf) or value.value is not None:
        return True
    words = _NOTATION_OF_WORDS.sub("", value.text)
    return "\\" not in words and words.count("{") == words.count("}") and len(words) <= 100


def grade(text: str, golds: tuple[str, ...]) -> Outcome:
    """Grade a completion against alternative golds. An empty completion checks whether one of the golds is readable:
    one that is not equals only the same text."""
    gold_values = _read_golds(golds)
    if not gold_values or not text and not any(map(_is_readable, gold_values)):
        return Outcome.GOLD_UNPARSEABLE
    answers = read_final_answers(text)
    texts = [normalize(each) for each in answers.texts]
    if any(texts) and any(_is_right(gold, texts) for gold in gold_values):
        return Outcome.CORRECT
    if answers.in_sentence and any(_is_right(gold, [normalize(answers.in_sentence)]) for gold in gold_values):
        return Outcome.CORRECT
    if answers.unmarked and any(_is_answer_in_words(gold, answers.unmarked) for gold in gold_values):
        return Outcome.CORRECT
    return Outcome.WRONG if any(texts) else Outcome.NO_ANSWER


def _is_answer_in_words(gold: Any, text: str) -> bool:
    """Whether a text without any mark of an answer is or ends with the gold in words, such as "B" or "Evelyn"."""
    if not isinstance(gold, Leaf):
        return False
    if len(text) <= _MAX_WORDS_LENGTH:
        whole = normalize(text)
        is_number_in_words = whole[:1].isdigit() and not re.search(r"\d", text)
        if (is_number_in_words or not re.search(r"\d", gold.text)) and _is_right(gold, [whole]):
            return True
    is_letter = re.fullmatch(r"\(?[A-J]\)?", gold.text)
    is_verdict = gold.text.lower() in VERDICTS
    if not is_letter and not is_verdict and (gold.value is not None or re.search(r"\d", gold.text)):
        return False
    return any(_is_right(gold, [normalize(words)]) for words in last_words(text) if not is_letter or words.isupper())


def _is_right(gold: Any, texts: list[str]) -> bool:
    """Whether the texts are the gold; a comparison that raises is unequal."""
    try:
        return _is_answer(gold, texts)
    except MemoryError:
        raise
    except Exception:  # sympy and its parsers raise errors of any type
        return False


def _is_answer(gold: Any, texts: list[str]) -> bool:
    if isinstance(gold, Leaf) and gold.text.lower() in VERDICTS and is_same_words(gold.text, texts[0]):
        return True
    commas_separate = _has_commas(gold)
    values = [read_value(text, commas_separate) for text in texts]
    answer = values[0] if len(values) == 1 else Sequence("", tuple(values))
    if is_equal(gold, answer):
        return True
    if len(texts) > 1:
        return all(is_equal(gold, value) for value in values)
    if (
        isinstance(gold, Leaf)
        and _has_several_notations(answer)
        and all(is_equal(gold, item) for item in answer.items)
    ):
        return True
    if isinstance(gold, Leaf) and re.fullmatch(r"-?\d+,\d+", texts[0]) and not re.search(r",\d{3}$", texts[0]):
        return is_equal(gold, read_value(texts[0].replace(",", ".")))  # a decimal comma
    return False


def _has_several_notations(answer: Any) -> bool:
    """Whether an answer is a list of different texts, which may be one value, as in "1/2 or 0.5"."""
    is_list = isinstance(answer, Sequence) and answer.brackets == ""
    return is_list and any(item != answer.items[0] for item in answer.items)


def _has_commas(gold: Any) -> bool:
    if isinstance(gold, Relation):
        return any("," in side for side in gold.sides)
    return isinstance(gold, Sequence | Union)
