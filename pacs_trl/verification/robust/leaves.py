"""Leaves of answers: numbers with their units, expressions, choices, and words.

Numbers are exact fractions, and other expressions are parsed by latex2sympy without being evaluated.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import math_verify.parser
from sympy import Basic, Derivative, Expr, Integral, Limit, Product, Sum

from ..numerals import MAX_EXPONENT
from .notation import CURRENCY_UNITS
from .number_words import english_number
from .units import Unit, is_unit_word, read_unit


@dataclass(frozen=True)
class Leaf:
    """A number, an expression, or words. `value` is `None` for words; `num_decimals` is `None` for exact numbers."""

    text: str
    value: Any = None
    num_decimals: int | None = None
    unit: Unit | None = None
    is_percent: bool = False
    is_quotient: bool = False  # a division of whole numbers that was not carried out, as `12/4`


@dataclass(frozen=True)
class Choice:
    """A letter of a multiple-choice question, with the text beside it, if any."""

    letter: str
    text: str


@dataclass(frozen=True)
class Clock:
    """A time of day with "a.m." or "p.m.", in minutes after midnight."""

    minutes: int


_TIMES_TEN = r"(?:[eE]|\s*(?:\\cdot|x)\s*10\s*\^\s*\{?\s*)"
LETTER = re.compile(r"^\(?\s*(?:\\text\s*\{)?\s*\(?([A-Z])\)?\s*\}?\s*\)?$")
_NUMBER = re.compile(
    rf"""
    (?P<sign>[-+]\s*)?
    (?P<currency>\\?\$|[\u20ac\u00a3\u00a5\u20b9])?\s*(?P<sign_after>(?<=[$\u20ac\u00a3\u00a5\u20b9])-)?
    (?:
        (?P<whole>\d+)\s*\\frac\s*\{{\s*(?P<n1>\d+)\s*\}}\s*\{{\s*(?P<d1>\d+)\s*\}}
        | (?P<whole2>\d+)(?:\s+|\s+and\s+)(?P<n2>\d+)\s*/\s*(?P<d2>\d+)(?![\d.])
        | \\frac\s*\{{\s*(?P<n3>-?\d+)\s*\}}\s*\{{\s*(?P<d3>-?\d+)\s*\}}
        | (?P<n4>\d+)\s*/\s*(?P<d4>\d+)(?![\d.])
        | (?P<before>\d*)\.(?P<once>\d*)\\(?:overline|dot|bar)\s*\{{?\s*(?P<repeating>\d+)\s*\}}?
        | 10\s*\^\s*\{{\s*(?P<power>-?\d+)\s*\}}
        | (?P<digits>\d+(?:\.\d*)?|\.\d+)(?:{_TIMES_TEN}(?P<exponent>[-+]?\s*\d+)\s*\}}?)?
    )
    """,
    re.VERBOSE,
)
_UNIT_IN_TEXT = re.compile(r"\s*\\text\s*\{\s*((?:[^{}]|\^\s*\{[^{}]*\})*)\s*\}\s*(\^\s*\{?\s*-?\d\s*\}?)?$")
_UNIT_WORDS = re.compile(
    r"^\s*(?:[A-Za-z\u00a2$\u20ac]+(?:[ ./-]+[A-Za-z]+)*\.?(?:\s*\^\s*\{?\s*\d\s*\}?)?"
    r"|[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]+)$"
)
LETTER_AND_TEXT = re.compile(r"^(?:(?:option|choice|answer)\s+)?\(?([A-J])(?:\)|\.|:|\)\.)\s*(.+)$", re.IGNORECASE)
WORDS = re.compile(r"^(?:\\text\s*\{[^{}]*\}|[^\W\d_]|[\s,.'\-])+$")


_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_OTHER_VALUE = re.compile(
    r"squared|cubed|factorial|at (?:least|most)|is (?:wrong|incorrect|false)"
    r"|is not (?:the|an?|right|correct)(?: [a-z]+)*|[\u4e00-\u9fff]?(?:以上|以下|以内)"
)
# As in "8 or more people". Normalized text has a comma for "or" and "and".
_BOUND = re.compile(
    r"(?:[a-z]+(?: [a-z]+)?)?, (?:more|less|fewer|greater|larger|smaller|higher|lower|above|below|over|under|up)\b"
    r"(?! than)"
)
# As in "14 apples (or 15 if you count this one)" and "14 or 15 apples".
_ALTERNATIVE = re.compile(
    r"(?P<unit>(?:[a-z]+(?: [a-z]+)?)?) ?"
    r"(?:\(, (?P<in_brackets>\d[^()]*)\)|, (?:maybe |perhaps |possibly )?(?P<after>\d[\d.,/]*(?: [a-z]+){0,2}))"
)
# As in "3 boys and 4 girls".
_SECOND_COUNT = re.compile(
    r"[a-z]+(?: [a-z]+)?, (?:(?P<digits>\d{1,9})|(?P<numeral>[a-z]+))(?: [a-z]+)? (?P<unit>[a-z]+s)"
)
_BINOMIAL = re.compile(r"(?<![A-Za-z\\])C\s*\((\d+),\s*(\d+)\)")
# Combinations and arrangements of `n` things as written in Chinese: `C_{10}^{3}` and `A_{5}^{2}`.
_SELECTIONS = re.compile(r"(?<![A-Za-z\\])([CA])\s*_\s*\{?(\d{1,4})\}?\s*\^\s*\{?(\d{1,4})\}?")
_SCALE = re.compile(r"^(\\text\s*\{)?\s*(thousand|million|billion|trillion|万|亿)(?![A-Za-z])\s*", re.IGNORECASE)
_SCALES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12, "万": 4, "亿": 8}
_CLOCK = re.compile(r"^(\d{1,2})(?::([0-5]\d))?\s*([ap])\.?\s?m\.?$", re.IGNORECASE)
_UNIT_NAME = r"\s*([A-Za-z]+|[\u4e00-\u9fff]+)"
_TWO_UNITS = re.compile(rf"^(\d+){_UNIT_NAME}[\s,]*(\d+(?:\.\d+)?){_UNIT_NAME}$")
_DEGREES_AND_MINUTES = re.compile(r"^(\d+)\^\{\\circ\}\s*(\d+(?:\.\d+)?)\s*'$")


def _selections(match: re.Match) -> str:
    total, chosen = int(match[2]), int(match[3])
    if match[1] == "C" or chosen > total:
        return rf"\binom{{{total}}}{{{chosen}}}"
    return rf"\frac{{{total}!}}{{{total - chosen}!}}"


def read_two_units(text: str) -> Leaf | None:
    """Return a quantity in two units, such as `1 hour 30 minutes`, in the smaller one; `None` for other texts."""
    text = _TEXT.sub(r" \1 ", text).strip()
    if match := _DEGREES_AND_MINUTES.match(text):
        return Leaf(text, int(match[1]) + Fraction(match[2]) / 60, unit=read_unit("degree"))
    match = _TWO_UNITS.match(text)
    if match is None or not (is_unit_word(match[2]) and is_unit_word(match[4])):
        return None
    large, small = read_unit(match[2]), read_unit(match[4])
    if large is None or small is None or large.dimension != small.dimension or large.factor <= small.factor:
        return None
    return Leaf(text, int(match[1]) * large.factor / small.factor + Fraction(match[3]), unit=small)


def _read_clock(text: str) -> Clock | None:
    match = _CLOCK.match(_TEXT.sub(r"\1", text).strip())
    if match is None or not 1 <= int(match[1]) <= 12:
        return None
    hour = int(match[1]) % 12 + (12 if match[3].lower() == "p" else 0)
    return Clock(60 * hour + int(match[2] or 0))


_MAX_DIGITS = 4000  # that Python converts
# Groups of `_NUMBER` for the whole part, numerator, and denominator of mixed numbers and fractions.
_GROUPS_OF_FRACTIONS = (("whole", "n1", "d1"), ("whole2", "n2", "d2"), (None, "n3", "d3"), (None, "n4", "d4"))


def read_number(text: str, match: re.Match) -> tuple[Fraction, int | None] | None:
    """Return the value of a match of `_NUMBER`, and the number of its decimals if it is written in decimals; `None`
    for a fraction that is none, such as `1/0` and `2 5/3`, and for more digits than are computed."""
    sign = -1 if (match["sign"] or "").strip() == "-" or match["sign_after"] else 1
    for whole, numerator, denominator in _GROUPS_OF_FRACTIONS:
        if match[numerator] is not None:
            if int(match[denominator]) == 0 or len(match[numerator]) > MAX_EXPONENT:
                return None
            value = Fraction(int(match[numerator]), int(match[denominator]))
            if whole:
                if not 0 < value < 1:
                    return None
                value += int(match[whole])
            return sign * value, None
    if match["repeating"]:
        before, once, repeating = match["before"] or "0", match["once"], match["repeating"]
        value = Fraction(int(before + once), 10 ** len(once))
        value += Fraction(int(repeating), (10 ** len(repeating) - 1) * 10 ** len(once))
        return sign * value, None
    if match["power"]:
        exponent = int(match["power"])
        return (sign * Fraction(10) ** exponent, None) if abs(exponent) <= MAX_EXPONENT else None
    digits = match["digits"]
    exponent = int((match["exponent"] or "0").replace(" ", ""))
    if len(digits) > _MAX_DIGITS or abs(exponent) > MAX_EXPONENT:
        return None
    value = Fraction(digits.rstrip(".")) * Fraction(10) ** exponent
    num_decimals = len(digits.partition(".")[2]) - exponent if "." in digits else None
    return sign * value, num_decimals


# An angle in degrees beside a trigonometric function, which takes radians.
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*\^\{\\circ\}")
_ONLY_TEXTS = re.compile(r"(?:\\text\s*\{[^{}]*\}\s*)+")
_UNIT_AFTER_EXPRESSION = re.compile(r"(?<=[\s}\d)])\s*([A-Za-z]{2,}(?:/[A-Za-z]+)?)(\s*\^\s*\{?\d\}?)?$")
_CURRENCY_BEFORE = re.compile(r"^\s*(?:\\?\$|[\u20ac\u00a3\u00a5\u20b9])")


def read_leaf(text: str) -> Leaf | Choice | Clock:
    """Return a choice, a time of day, a number with its unit, words, or an expression, whichever the text is first."""
    compact = re.sub(r"\s+(?!\d)|(?<!\d)\s+", "", text)  # `2 5` is not 25
    if choice := LETTER_AND_TEXT.match(text):
        return Choice(choice[1].upper(), choice[2].strip())
    if _TRIGONOMETRIC.search(text):
        text = _DEGREES.sub(r"{\\frac{\1\\pi}{180}}", text)
    if (clock := _read_clock(text)) is not None:
        return clock
    if number := _NUMBER.match(text):
        if _is_other_value(number, text[number.end() :]):
            return Leaf(compact)
        if (quantity := _read_quantity(text, compact, number)) is not None:
            return quantity
    if _ONLY_TEXTS.fullmatch(text) or WORDS.match(text) and not _is_product_of_letters(text):
        words = _TEXT.sub(r"\1", text)
        is_number_in_text = words.strip() != text and re.search(r"\d", words)
        return read_leaf(words.strip()) if is_number_in_text else Leaf(words)
    return _read_expression(text, compact)


def _read_expression(text: str, compact: str) -> Leaf:
    """Return an expression with its unit, degree sign, or percent sign."""
    unit = None
    expression = text
    is_percent = False
    if in_text := _UNIT_IN_TEXT.search(text):
        unit = read_unit(in_text[1] + (in_text[2] or ""))
        expression = text[: in_text.start()]
    elif text.endswith("%"):
        is_percent = True
        expression = text.removesuffix("%")
    elif in_letters := _UNIT_AFTER_EXPRESSION.search(text):
        is_unit = all(is_unit_word(word) for word in in_letters[1].split("/"))
        before = text[: in_letters.start()]
        if is_unit and not before.rstrip().endswith(("\\", "_", "^")):
            unit = read_unit(in_letters[1] + (in_letters[2] or ""))
            expression = before
    if expression.endswith(r"^{\circ}"):
        unit = read_unit("degree")
        expression = expression.removesuffix(r"^{\circ}")
    expression = _CURRENCY_BEFORE.sub("", expression)
    expression = _BINOMIAL.sub(r"\\binom{\1}{\2}", expression)
    expression = _SELECTIONS.sub(_selections, expression)
    return Leaf(compact, parse_expression(expression.strip()), unit=unit, is_percent=is_percent)


def _is_other_value(number: re.Match, words: str) -> bool:
    """Whether the words after a number make another value of it: "squared" or "is wrong" alone, a bound as in "8 or
    more", another number after "or", or a second count, as in "3 boys and 4 girls". But "2 hours and 30 minutes" is
    one quantity."""
    words = _TEXT.sub(r"\1", words).strip()
    if _OTHER_VALUE.fullmatch(words) or _BOUND.match(words):
        return True
    if alternative := _ALTERNATIVE.fullmatch(words):
        return _is_other_number(number, alternative)
    second = _SECOND_COUNT.fullmatch(words)
    if second is None or is_unit_word(second["unit"]):
        return False
    count = int(second["digits"]) if second["digits"] else english_number(second["numeral"])
    return count is not None and count > 0


def _is_other_number(number: re.Match, alternative: re.Match) -> bool:
    """Whether a number differs from the one after "or", which may be rounded, or in a unit of the same dimension."""
    text = alternative["in_brackets"] or alternative["after"]
    other_number = _NUMBER.match(text)
    if other_number is None or "%" in text:
        return False
    value, other = read_number(number.group(), number), read_number(text, other_number)
    if value is None or other is None or other[0] == 0 and alternative["unit"]:
        return False
    other_words = text[other_number.end() :].strip()
    unit, other_unit = _unit_in_table(alternative["unit"]), _unit_in_table(other_words)
    if number["currency"]:
        unit = _unit_of_currency(number)
    if other_unit and (unit is None or unit.dimension != other_unit.dimension):
        return False
    factor = other_unit.factor / unit.factor if unit and other_unit else Fraction(1)
    if other_words.startswith("dozen"):
        factor = Fraction(12)
    difference = abs(value[0] - other[0] * factor)
    is_rounded = other[1] is not None and difference < Fraction(10) ** -other[1]
    return difference != 0 and not is_rounded


def _unit_in_table(words: str) -> Unit | None:
    return read_unit(words) if words and is_unit_word(words.split()[0]) else None


def _is_product_of_letters(text: str) -> bool:
    """Whether a short word such as `ab` or `x` is a product of variables."""
    return bool(re.fullmatch(r"-?\s*[A-Za-z]{1,2}(?:\s+[A-Za-z])*|[A-Za-z](?:\s*-\s*[A-Za-z])*", text))


_MICRO = re.compile(r"^\\mu\s*(?=[mgs](?![A-Za-z]))")
_OHM = re.compile(r"^(?:\\text\s*\{\s*)?([kM]?)\s*\}?\s*\\Omega\s*\}?$")
_UNITS_IN_TEXTS = re.compile(r"(?:\\text\s*\{[^{}]*\}\s*(?:\^\s*\{?\d\}?)?\s*(?:[/.]|\\cdot)?\s*)+")
_DEGREE = r"^{\circ}"


def _read_quantity(text: str, compact: str, match: re.Match) -> Leaf | None:
    """Return a number with its unit or percent sign; `None` if other text follows the match of `_NUMBER`."""
    number = read_number(text, match)
    if number is None:
        return None
    value, num_decimals = number
    denominator = match["d3"] or match["d4"]
    is_quotient = denominator is not None and value.denominator == 1 and abs(int(denominator)) != 1
    rest = _OHM.sub(r"\\text{\1ohm}", _MICRO.sub("u", text[match.end() :].strip()))
    if scale := _SCALE.match(rest):
        power = _SCALES[scale[2].lower()]
        value *= 10**power
        num_decimals = None if num_decimals is None else num_decimals - power
        rest = f"{scale[1] or ''}{rest[scale.end() :]}".replace(r"\text{}", "").strip()
    if rest.startswith("%"):
        after = rest.removeprefix("%").strip()
        is_whole = not after or after.startswith("of ") or _UNIT_WORDS.match(after) or _UNIT_IN_TEXT.match(after)
        return Leaf(compact, value, num_decimals, None, True, is_quotient) if is_whole else None
    if rest.startswith(_DEGREE):
        after = _TEXT.sub(r"\1", rest.removeprefix(_DEGREE)).strip()
        if after in ("C", "F"):
            return Leaf(compact, value, num_decimals, Unit(f"temperature {after}", Fraction(1)))
        return None if after else Leaf(compact, value, num_decimals, read_unit("degree"), is_quotient=is_quotient)
    has_space = text[match.end() : match.end() + 1] == " "
    unit_text = _unit_text(rest, has_space)
    if unit_text is None:
        return None
    unit = read_unit(unit_text)
    if unit is None and match["currency"]:
        unit = _unit_of_currency(match)
    return Leaf(compact, value, num_decimals, unit, is_quotient=is_quotient)


def _unit_text(rest: str, has_space: bool) -> str | None:
    """Return what `read_unit` reads of the text after a number, empty without a unit; `None` if it is no unit."""
    if in_text := _UNIT_IN_TEXT.fullmatch(rest):
        return in_text[1] + (in_text[2] or "")
    is_unit = not rest or _UNITS_IN_TEXTS.fullmatch(rest) or _UNIT_WORDS.match(rest) and _is_unit(rest, has_space)
    return rest if is_unit else None


def _unit_of_currency(number: re.Match) -> Unit | None:
    return read_unit(CURRENCY_UNITS[number["currency"].removeprefix("\\")])


def _is_unit(rest: str, has_space: bool) -> bool:
    words = re.findall(r"[A-Za-z]+", rest)
    if not words:  # Chinese
        return True
    if is_unit_word(words[0]):
        return True
    return has_space and all(len(word) > 2 for word in words[:1])


# `2 5`, which the parser reads as 7, but not `\log_2 5`.
_TWO_NUMBERS = re.compile(r"(?<![_\d.])[\d.]+\s+\d")


def parse_expression(text: str) -> Expr | None:
    """Return the expression that latex2sympy reads, not evaluated; `None` if it cannot be read."""
    if not text or text.count("{") != text.count("}"):
        return None
    if _TWO_NUMBERS.search(text):
        return None
    try:
        parsed = math_verify.parser.parse_latex_cached(text)
    except MemoryError:
        raise
    except Exception:  # the parser raises errors of any type
        return None
    if not isinstance(parsed, Expr) or parsed.has(Sum, Product, Integral, Derivative, Limit):
        return None  # equal only as texts: their values may take minutes
    return parsed


def has_variables(value: Any) -> bool:
    return isinstance(value, Basic) and any(symbol.name != "i" for symbol in value.free_symbols)
