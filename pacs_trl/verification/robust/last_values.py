"""The last value of a text in which nothing marks the answer: an expression, a formula, bold text, or a number.

Every step takes time linear in the length of the text.
"""

import re

from .english import states_value
from .units import is_unit_word


_FORMULA = re.compile(
    r"\$\$(?P<a>[^$]+)\$\$|(?<!\\)\$(?P<b>(?:[^$\n\\]|\\.){1,500})(?<!\\)\$"
    r"|\\\((?P<c>(?:[^\\]|\\(?!\)))+)\\\)|\\\[(?P<d>(?:[^\\]|\\(?!\]))+)\\\]"
)
_BOLD = re.compile(r"\*\*(?P<bold>[^*\n]{1,200})\*\*")
_NUMBERS = re.compile(
    r"""
    (?<![^\W\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af])(?<![.\u7b2c])  # no letter of a name, but Chinese characters
    (?:(?:negative|minus)\s(?=[\d.]))?(?:[-+\u2212](?=[\d.$\\\u20ac\u00a3]))?(?:\\?[$\u20ac\u00a3\u00a5\u20b9]\s?)?
    (?:
        \d+(?::\d+)+
        | (?:\d{1,3}(?:\ \d{3})+(?!\d)|\d[\d,.]*)(?:[eE][-+]?\d+)?(?:\s\d+/\d+|/\d+)?
        | \.\d+ | \\[dt]?frac\s*\{[^{}]*\}\s*\{[^{}]*\} | [\u00bd\u00bc\u00be]
    )
    (?:\s?(?:\\?%|\u00b0))?
    """,
    re.VERBOSE,
)
_CALCULATION = re.compile(r"<<[^<>]{0,200}>>")  # the calculator calls of GSM8K
# What follows the last equals sign, if it is an expression and ends the text.
_RIGHT_SIDE = re.compile(r"=[ \t]*([^=\n$*]{1,100}?)[ \t]*\.?\s*\Z")
_LONG_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}|^\$?[\d,.]+\s+\S*[A-Za-z]")  # or a number and a unit
# A rounded value after the exact one: "1/3, or about 33%".
ROUNDED_AFTER = re.compile(
    r"(?<=\S),?\s\(?or\s(?:about|approximately|approx\.|roughly)\s[^\n]{1,40}\s*\Z", re.IGNORECASE
)
OPEN_EQUATION = re.compile(r"(?:=|\u2248|\\approx)\s*(?:\?|_+|\.\.\.)?\s*(?:\\\)|\\\]|\$|\*)*\s*\Z")


def last_values(text: str) -> list[str]:
    """Return a text that is an expression as a whole, else its last formula, bold text, or number, whichever ends
    last."""
    tail = ROUNDED_AFTER.sub("", _CALCULATION.sub("", text[-2000:]))
    if OPEN_EQUATION.search(tail):
        return []
    if _is_expression(text):
        return [text.strip()]
    if (side := _RIGHT_SIDE.search(tail[-200:])) and not _LONG_WORD.search(side[1]):
        return [side[1]]
    formulas = list(_FORMULA.finditer(tail))
    formula, bold = formulas[-1] if formulas else None, last_match(_BOLD, tail)
    number = _result_in_last_line(tail) or last_match(_NUMBERS, tail)
    if bold and not _NUMBERS.search(bold["bold"]) and "$" not in bold["bold"] and "\\" not in bold["bold"]:
        bold = None
    if bold and _is_result_in_sentence(tail, bold):
        return [_content(bold)]
    ends = [match.end() for match in (formula, bold, number) if match]
    if not ends:
        return []
    last = next(match for match in (bold, formula, number) if match and match.end() == max(ends))
    before = tail[max(0, last.start() - 60) : last.start()]
    if _NEGATION_BEFORE.search(before):
        return []
    if last is number:
        return _number_in_context(tail, last)
    if last is formula:
        return [_listed_formulas(tail, formulas)]
    content = _content(last)
    return last_values(content) if len(_WORD.findall(content)) > 2 else [content]


_NUMBER_AND_UNIT = re.compile(rf"\s*(?:{_NUMBERS.pattern})(?:\ ?[A-Za-z]+)?\.?\s*", re.VERBOSE)
_VERB_BEFORE = re.compile(
    r"(?:[=\u2248]|\b(?:is|are|was|were|be|has|have|had|needs?|takes?|took|costs?|equals?|makes?|gets?|got|earns?|earned"
    r"|pays?|paid|spends?|spent|saves?|saved|requires?))\s(?:exactly\s|only\s|a\stotal\sof\s)?$",
    re.IGNORECASE,
)
# Numbers of a range, time, place, purpose, or reference, or in a condition, as in "between 1 and 100", "to buy 4
# tickets", and "as shown in step 2". Each keyword stands right before its number, so that matching is linear.
_MODIFIERS = re.compile(
    r"""
    (?:
        [^\d,;:()=.\n]*
        (?:
            \b(?:between|from|among|within|in|at|on|during|after|before|until|than|below|above|under|over|for|modulo)
            (?:\ (?:the|these|those|all))?
            | \b(?:divided|divisible)\ by | \bof\ (?:the|these|those|all) | [a-z]\^
            | \bto\ (?!be|equal|get|give|make|obtain|total|yield)[a-z]+
            | (?:,\ as\ [a-z]+\ in|\()\ ?(?:step|part|case|equation|figure|table)
        )
        \ ?\$?\d[\d,.]*\$?(?:(?:\ to|\ -|,?\ and|,?\ or|,)\ \$?\d[\d,.]*\$?)*
    )*
    [^\d,;:(=.\n]*(?:,?\s(?:when|if|since|because)\b[^,;:=\n]*)?[.!]?\s*
    """,
    re.VERBOSE | re.IGNORECASE,
)


def _is_result_in_sentence(text: str, bold: re.Match) -> bool:
    """Whether the last bold number of a text is the result that its last line states, as in "There are **17** integers
    between 1 and 100": the only bold text of the line, after a verb, and before numbers that only modify it."""
    before = text[text.rfind("\n", 0, bold.start()) + 1 : bold.start()]
    is_stated = _VERB_BEFORE.search(before[-60:]) and "**" not in before
    is_number = _NUMBER_AND_UNIT.fullmatch(bold["bold"])
    return bool(is_stated and is_number and _MODIFIERS.fullmatch(text, bold.end()))


def _content(match: re.Match) -> str:
    return next((group for group in match.groups() if group), match.group())


_NEGATION_BEFORE = re.compile(r"(?:\bnot(?:\s(?:be|equal(?:\sto)?))?|n't(?:\sbe)?)\s*[$\\(*]*\s*$", re.IGNORECASE)
_TEXT_COMMAND = re.compile(r"\\text\s*\{([^{}]*)\}")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}|[^\W\d_\u0370-\u03ffA-Za-z]{2,}")
_MARKDOWN = re.compile(r"\*\*|~~|^\s*(?:>|[-*]\s|\d+\.\s)")
_MATH_WORDS = {"or", "and", "pi", "sqrt", "sin", "cos", "tan", "ln", "log", "exp", "inf", "cm", "km", "mm", "kg"}


def _is_expression(text: str) -> bool:
    """Whether a short text contains no words but those of formulas."""
    text = text.strip()
    if not text or len(text) > 100 or "\n" in text or not re.search(r"\w", text) or _MARKDOWN.search(text):
        return False
    return all(word in _MATH_WORDS for word in _WORD.findall(_TEXT_COMMAND.sub("", text)))


_SENTENCE = re.compile(r"(?:[^\W\d_]|(?<=\w)-(?=\w)|[\s.,:;!'\u2019\"()*\u3002\uff0c])*")
_OPENING_DELIMITER = re.compile(r"(?:\$\$?|\\\(|\\\[)\s*$")
_PERCENTAGE = re.compile(r"(?:%|per\s?cent)$", re.IGNORECASE)
_CLOSING_DELIMITER = re.compile(r"^\s*(?:\$\$?|\\\)|\\\])")


def value_of_sentence(text: str) -> str:
    """Return the value in a sentence of three words or more, as in "There are 5 apples", where it is the only number
    or formula, and no word says that it is another value; empty for other texts."""
    sentence = _TEXT_COMMAND.sub(r"\1", text)
    values = last_values(sentence)
    if len(values) != 1:
        return ""
    before, value, after = sentence.rpartition(values[0])
    before, after = _OPENING_DELIMITER.sub("", before), _CLOSING_DELIMITER.sub("", after)
    words = before + " " + after
    is_sentence = len(re.findall(r"[^\W\d_]+", words)) > 1 and _SENTENCE.fullmatch(words)
    is_share = _PERCENTAGE.search(value) and after.split()[:1] == ["of"]
    return value if is_sentence and not is_share and states_value(before, after) else ""


def last_position_of_value(text: str) -> int:
    """Return where the last digit or formula of a text ends; 0 if it has none."""
    value = re.match(r".*(?:\d|\$|\\\)|\\\])", text, re.DOTALL)
    return value.end() if value else 0


_BETWEEN_FORMULAS = re.compile(r"\s*,?\s*(?:and|or|\u548c|\u6216|\u4ee5\u53ca)\s*")
_COMMA_BETWEEN_FORMULAS = re.compile(r"\s*[,\u3001\uff0c]\s*")


def _listed_formulas(text: str, formulas: list[re.Match]) -> str:
    """Return the last formula and those listed before it, as in "$x=1$, $x=2$, and $x=3$"."""
    listed = [_content(formulas[-1])]
    following = formulas[-1]
    for formula in reversed(formulas[:-1]):
        between = text[formula.end() : following.start()]
        is_listed = (
            _BETWEEN_FORMULAS.fullmatch(between) or len(listed) > 1 and _COMMA_BETWEEN_FORMULAS.fullmatch(between)
        )
        if not is_listed:
            break
        listed.insert(0, _content(formula))
        following = formula
    return ", ".join(listed)


_OPERAND_BEFORE = re.compile(r"[\d)]\s*[-+*/^\u00d7\u00f7\u2212]\s*$|\\(?:times|cdot|div|pm)\s*$")
_OPERATION_BEFORE = re.compile(
    r"(?:(?<=\s)|^)(\S{1,40}\s[-+*/\u2212]\s|[A-Za-z]\w?\s?(?:[<>\u2264\u2265\u2260]|<=|>=)\s?)$"
)
_MATH_CHARACTER = re.compile(
    r"[\u221a\u03c0\u221e\u00b2\u00b3^()<>\u2264\u2265\u2260|*/\[\]{}]|\\[A-Za-z]|\d[A-Za-z](?![A-Za-z])"
)
# A unit, a power of ten in words, or the half of the day.
_MEASURE_AFTER = re.compile(
    r"\s?(?:(?:thousand|million|billion|trillion|percent|per\scent|[ap]\.?m\.?)(?![A-Za-z])|\u4e07|\u4ebf"
    r"|(?!in\b)(?P<unit>[A-Za-z]{2,12}|[mgs](?=\.?\s*$))(?![A-Za-z])(?:\^?[23]|[\u00b2\u00b3])?)",
    re.IGNORECASE,
)


def _number_in_context(text: str, number: re.Match) -> list[str]:
    """Return a number with its unit, or the expression, point, or inequality that it ends; empty if it is the last
    operand of a sum or product that is not carried out."""
    expression = _expression_around(text, number)
    if expression is not None:
        return [expression]
    before = text[max(0, number.start() - 60) : number.start()]
    is_subtracted = number.group().startswith(("minus", "negative")) and re.search(r"\d\s*$", before)
    if is_subtracted or _OPERAND_BEFORE.search(before):
        return []
    measure = _MEASURE_AFTER.match(text, number.end())
    if measure and (measure["unit"] is None or is_unit_word(measure["unit"])):
        return [number.group() + measure.group()]
    return [number.group()]


_SPACE = re.compile(r"\s")
_BRACKETS = (("(", ")"), ("[", "]"), ("{", "}"))


def _expression_around(text: str, number: re.Match) -> str | None:
    """Return the expression that a number belongs to, such as `2√3`, `(1, 2)`, `x > 3`, or `3x + 2`; `None` if
    it stands alone or among words."""
    start = number.start()
    if number.group()[0].isdigit():
        start = max(text.rfind(" ", 0, start), text.rfind("\n", 0, start)) + 1
    space = _SPACE.search(text, number.end())
    end = space.start() if space else len(text)
    operation = _OPERATION_BEFORE.search(text[max(0, start - 60) : start])
    if operation and not operation[1].startswith("="):
        start -= len(operation[1])
    for opening, closing in _BRACKETS:
        if text.count(closing, start, end) == text.count(opening, start, end) + 1:
            position = text.rfind(opening, max(0, start - 60), start)
            start = position if position >= 0 else start
    expression = text[start:end].strip("*_`\"'").rstrip(".,;:?*!")
    if any(expression.count(opening) != expression.count(closing) for opening, closing in _BRACKETS):
        return None
    has_words = any(word not in _MATH_WORDS for word in _WORD.findall(expression))
    return expression if _MATH_CHARACTER.search(expression) and not has_words else None


def _result_in_last_line(text: str) -> re.Match | None:
    """Return the number after the last equals sign of the last line, as in "5 + 3 = 8 limbs after 15 days"."""
    end = len(text.rstrip())
    start = text.rfind("\n", 0, end) + 1
    equals = text.rfind("=", start, end)
    if equals < 0:
        return None
    result = _NUMBERS.search(text, equals + 1, end)
    if result is None or text[equals + 1 : result.start()].strip(" *$<>\\("):
        return None
    is_operand = re.match(r"\s*[-+*/^\u00d7\u00f7]\s*[\d(]", text[result.end() :])
    return None if is_operand else result


def last_match(pattern: re.Pattern, text: str) -> re.Match | None:
    last = None
    for match in pattern.finditer(text):
        last = match
    return last


_SENTENCE_END = re.compile(r"[.!?]\s|[\n\u3002\uff01\uff1f]")
_ALTERNATIVES = re.compile(r"\b(?:not|no|never|neither|nor|either|or|and|cannot|unless|if)\b|n't", re.IGNORECASE)
_VERDICT = re.compile(r"(yes|no)\b", re.IGNORECASE)


def last_words(text: str) -> list[str]:
    """Return the words with which the last sentence of a text ends, one to five of them, unless words before them
    negate them or name alternatives, and "yes" or "no" at its start."""
    text = text[-500:].strip().rstrip(".!*` \u3002").strip()
    start = max((match.end() for match in _SENTENCE_END.finditer(text)), default=0)
    sentence = re.sub(r"\\text(?:bf|it)?\s*\{([^{}]*)\}|[*_`]", lambda match: match[1] or "", text[start:])
    words = sentence.split()
    endings = []
    if verdict := _VERDICT.match(sentence):
        endings.append(verdict[1])
    for num_words in range(1, min(5, len(words)) + 1):
        is_alternative = words[-num_words].lower() in ("or", "and", "nor")
        if not is_alternative and not _ALTERNATIVES.search(" ".join(words[:-num_words])):
            endings.append(" ".join(words[-num_words:]))
    return endings
