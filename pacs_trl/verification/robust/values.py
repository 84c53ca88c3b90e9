"""Values of answers: numbers, expressions, tuples, sets, intervals, matrices, relations, and words.

[`read_value`] takes an answer that `notation.normalize` has rewritten; `leaves.py` reads what stands in no brackets.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from .leaves import LETTER, LETTER_AND_TEXT, WORDS, Choice, Leaf, read_leaf, read_two_units
from .notation import MAX_LENGTH


@dataclass(frozen=True)
class Sequence:
    """Values in a pair of brackets: "()", "[]", "(]", "[)", "{}", "" for a list without brackets, or "\u00b1"
    for the two values of a plus-minus sign."""

    brackets: str
    items: tuple


@dataclass(frozen=True)
class Union:
    parts: tuple


@dataclass(frozen=True)
class Matrix:
    rows: tuple


@dataclass(frozen=True)
class Relation:
    """`sides` are texts, one more than `operators`."""

    sides: tuple[str, ...]
    operators: tuple[str, ...]


@dataclass(frozen=True)
class Ratio:
    parts: tuple[Fraction, ...]
    text: str


@dataclass(frozen=True)
class Based:
    """Digits in a base other than ten: `52_8`."""

    digits: str
    base: int


@dataclass(frozen=True)
class Residue:
    """A value modulo a number: `3 \\pmod 7`."""

    value: Any
    modulus: str


_MATRIX = re.compile(r"^\\begin\{([bpvVB]?matrix|array)\}(?:\{[^{}]*\})?(.*)\\end\{\1\}$", re.DOTALL)
_SCALED_MATRIX = re.compile(
    r"^(-|-?\d+|-?\\frac\{-?\d+\}\{\d+\})\s*(?:\\cdot\s*)?(\\begin\{[bp]matrix\}.*)$", re.DOTALL
)
_TRANSPOSED = re.compile(r"^(.*[\])}])\s*\^\s*\{?\s*(?:T|\\top|\\intercal|\\text\s*\{T\})\s*\}?$", re.DOTALL)
_LINES = re.compile(r"^\\begin\{(?:cases|aligned|align\*?|gathered)\}(.*)\\end\{\w+\*?\}$", re.DOTALL)
# `]a,b[` and `[a,b[`, where a bracket that turns away from the interval excludes its end.
_TURNED_BRACKETS = re.compile(r"([\[\]])([^\[\]();,]+[,;][^\[\]();,]+)([\[\]])")
_VARIABLE_OF_SET = r"[A-Za-z](?:\s*\\in\s*\\mathbb\{[A-Z]\})?\s*"
# `\{x \mid x > 2\}` and `\{x : x > 2\}`, or without braces, which are removed if no backslash stands before them.
_SET_BUILDER = re.compile(
    rf"^\\\{{\s*{_VARIABLE_OF_SET}(?:\\mid(?![A-Za-z])|\\vert(?![A-Za-z])|\||:)\s*(?P<in_braces>.+)\\\}}$"
    rf"|^{_VARIABLE_OF_SET}(?:\\mid(?![A-Za-z])|\|)\s*(?P<bare>[^|]+)$"
)
# That a parameter is a whole number: `k \in \mathbb{Z}`, "for any integer k", "where k is an integer".
_CONDITION = re.compile(
    r"[\s,]*(?:\\cdot\s*)?(?:\(?\s*([kmn])\s*\\in\s*(?:\\mathbb\{[ZN]\}|[ZN])(?:\^?\{?[*+]\}?)?\s*\)?"
    r"|\\text\s*\{\s*,?\s*for\s+(?:(?:an|any|all|every|each|some)\s+)?integers?\s*\}\s*([kmn])"
    r"|\\text\s*\{\s*,?\s*(?:where|with)\s*\}\s*([kmn])\s*\\text\s*\{\s*is\s+(?:an|any)\s+integer\s*\}"
    r"|\\text\s*\{\s*,?\s*(?:for\s+(?:(?:an|any|all|every|each|some)\s+)?integers?\s+([kmn])"
    r"|(?:where|with)\s+([kmn])\s+is\s+(?:an|any)\s+integer)\s*\})$"
)
# Where a function is defined, and from which number on a formula holds.
_FOR_ALL = re.compile(
    r"^(?P<definition>[A-Za-z]\s*\((?P<variable>[a-z])\)\s*=.*?)[\s,]*"
    r"(?:\\text\s*\{\s*,?\s*for\s+(?:all|every|any|each)(?:\s+real)?\s*\}|\\forall(?![A-Za-z]))\s*(?P=variable)"
    r"(?:\s*\\in\s*\\mathbb\{R\})?$"
)
_FROM_FIRST_NUMBER = re.compile(r"\s*\\text\s*\{\s*,?\s*for(?:\s+all)?\s*\}\s*([kmn])\s*\\geq\s*[01]$")
_RESIDUE = re.compile(
    r"^(.+?)\s*(?:\\cdot\s*)?(?:\\[pb]?mod(?![A-Za-z])|\(\s*(?:\\text\s*\{\s*mod\s*\}|mod(?![A-Za-z]))"
    r"|\\text\s*\{\s*\(?\s*mod(?![A-Za-z]))\s*\{?\s*(\w+)\s*(?:\}?\s*\)?|\)?\s*\})$"
)
_BASED = re.compile(
    r"\(?([0-9A-Fa-f]+)\)?\s*(?:_\s*\{?\s*\(?|(?:\\text\s*\{\s*)?(?:in\s+)?base\s*\}?)\s*(?:\\text\s*\{\s*)?"
    r"(\d+|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve)\s*\}?\s*\)?\s*\}?"
)
_BASES = "two three four five six seven eight nine ten eleven twelve".split()
# `- \frac{1}{2}\text{j}`, of which normalized text has `\text` for any font.
_UNIT_VECTOR = re.compile(
    r"\s*([-+]?\s*(?:\d+(?:\.\d+)?|\\frac\s*\{\d+\}\s*\{\d+\})?)\s*\\(?:text|hat|vec)\s*\{\s*"
    r"(?:\\text\s*\{\s*)?\\?([ijk])(?:math)?\s*\}(?:\s*\})?\s*"
)
_UNIT_VECTORS = re.compile(rf"(?:{_UNIT_VECTOR.pattern}){{2,3}}")
_RELATION = re.compile(r"\\(?:leq|geq|neq|approx|equiv|in|sim)(?![A-Za-z])|[<>]|(?<![\\!<>:])=|:=")


def read_value(text: str, commas_separate: bool = False) -> Any:
    """Return the value of an answer. With `commas_separate`, as where the gold is a tuple, `1,234` are two numbers."""
    text = text.strip()
    if len(text) > MAX_LENGTH:
        return Leaf(text)
    text = _without_grouping_braces(text)
    if system := _LINES.match(text):
        lines = [line.replace("&", "") for line in re.split(r"\\\\", system[1]) if line.strip()]
        return read_value(", ".join(lines), True)
    if (matrix := _read_matrix(text)) is not None:
        return matrix
    text = _without_condition(_with_usual_brackets(_without_transposition(text)))
    if (condition_of_set := _read_set_builder(text)) is not None:
        return condition_of_set
    if (quantity := read_two_units(text)) is not None:
        return quantity
    if (vector := _read_unit_vectors(text)) is not None:
        return vector
    if (union := _read_union(text)) is not None:
        return union
    brackets = brackets_around(text)
    if not commas_separate and (brackets is None or "," not in brackets[1]):
        text = join_thousands(text)
    items = _items(text)
    if len(items) > 1 and not _is_sentence(text):
        return Sequence("", tuple(read_value(item, commas_separate) for item in items))
    if (unlabelled := _without_label(text)) != text:
        return read_value(unlabelled, commas_separate)
    if (choice := LETTER_AND_TEXT.match(text)) and choice[1].isupper():
        return Choice(choice[1], choice[2].strip())
    if (relation := _read_relation(text)) is not None:
        return relation
    if residue := _RESIDUE.match(text):
        return Residue(read_value(residue[1]), residue[2])
    if (bracketed := _read_bracketed(text, commas_separate)) is not None:
        return bracketed
    if r"\pm" in text or r"\mp" in text:
        return _read_plus_minus(text)
    if (ratio := _read_ratio(text)) is not None:
        return ratio
    if (based := _read_based(text)) is not None:
        return based
    return read_leaf(text)


def _items(text: str) -> list[str]:
    return [item for item in _split(text, (",", ";")) if item.strip()]


def _without_transposition(text: str) -> str:
    """Return the row of `(1, 2)^T`: rows and columns are equal."""
    transposed = _TRANSPOSED.match(text)
    return transposed[1] if transposed and "," in text else text


def _with_usual_brackets(text: str) -> str:
    if text.startswith("]") or text.endswith("["):
        return _TURNED_BRACKETS.sub(_usual_brackets, text)
    return text


def _without_condition(text: str) -> str:
    """
    Return a text without what is said of its variables: the set of a parameter, as in `k\\pi, k \\in \\mathbb{Z}`, the
    real line as the domain of a function, and the numbers from 0 or 1 on, as in `2^n - 1 \\text{ for } n \\geq 1`.

    The parameter of multiples of an angle becomes `n`.
    """
    if for_all := _FOR_ALL.match(text):
        return for_all["definition"]
    parameter = "k"
    if condition := _CONDITION.search(text) or _FROM_FIRST_NUMBER.search(text):
        without_condition = text[: condition.start()]
        parameter = next(filter(None, condition.groups()))
        if parameter not in without_condition:
            return text
        text = without_condition
    if r"\pi" in text or r"^{\circ}" in text:
        return with_other_variable(text, parameter, "n") or text
    return text


# A word, a command, or a letter, which is a variable.
_LETTERS = re.compile(r"\\text\s*\{[^{}]*\}|\\?[A-Za-z]{3,}|\\[A-Za-z]+|[A-Za-z]")


def with_other_variable(text: str, variable: str, other: str) -> str | None:
    """Return a text with another name of a variable; `None` if it contains a variable of this name."""
    if other in _LETTERS.findall(text):
        return None
    return _LETTERS.sub(lambda match: other if match.group() == variable else match.group(), text)


def _read_set_builder(text: str) -> Relation | None:
    """Return the relation that defines a set, as in `\\{x \\mid x > 2\\}`; `None` for other texts."""
    set_builder = _SET_BUILDER.match(text)
    if set_builder is None:
        return None
    condition = read_value(set_builder["in_braces"] or set_builder["bare"], True)
    return condition if isinstance(condition, Relation) else None


def _read_unit_vectors(text: str) -> Sequence | None:
    """Return a sum of multiples of unit vectors, `2\\hat{i} - \\hat{j}`, as a point; `None` for others."""
    if not _UNIT_VECTORS.fullmatch(text):
        return None
    components = {vector: factor.replace(" ", "") for factor, vector in _UNIT_VECTOR.findall(text)}
    if len(components) < 2 or len(components) < len(_UNIT_VECTOR.findall(text)):
        return None
    factors = (components.get(vector, "0") for vector in ("ijk" if "k" in components else "ij"))
    return Sequence(
        "()", tuple(read_value(factor + "1" if factor in ("", "+", "-") else factor) for factor in factors)
    )


def _read_union(text: str) -> Union | None:
    parts = _split(text, (r"\cup",))
    if len(parts) == 1 and re.search(r"[)\]]\s*U\s*[(\[]", text):
        parts = _split(text, ("U",))
    is_between_bars = len(_split(parts[0], ("|",))) % 2 == 0  # `|A \cup B|`
    if len(parts) == 1 or is_between_bars:
        return None
    return Union(tuple(read_value(part, True) for part in parts))


_KIND_OF_BRACKET = {"(": "(", "[": "[", r"\langle": "(", ")": ")", "]": "]", r"\rangle": ")", r"\}": "}"}


def _read_bracketed(text: str, commas_separate: bool) -> Any | None:
    """Return a sequence in brackets, or the value in brackets around a single one; `None` for other texts."""
    brackets = brackets_around(text)
    if brackets is None:
        return None
    opening, inside, closing = brackets
    items = _items(inside)
    if opening == r"\{":
        return Sequence("{}", tuple(read_value(item, True) for item in items))
    if len(items) > 1:
        kind = _KIND_OF_BRACKET[opening] + _KIND_OF_BRACKET[closing]
        return Sequence(kind, tuple(read_value(item, True) for item in items))
    is_letter = opening == "(" and LETTER.match(text)
    if opening in ("(", "[") and not is_letter and (items or opening == "("):
        return read_value(inside, commas_separate)
    return None


def _read_plus_minus(text: str) -> Sequence:
    upper = text.replace(r"\pm", "+").replace(r"\mp", "-")
    lower = text.replace(r"\pm", "-").replace(r"\mp", "+")
    return Sequence("\u00b1", tuple(read_value(each.lstrip("+ "), True) for each in (upper, lower)))


def _read_ratio(text: str) -> Ratio | None:
    text = re.sub(r"^(\d+)\s*(?:\\text\s*\{\s*to\s*\}|to)\s*(\d+)$", r"\1:\2", text)
    if not re.fullmatch(r"\d+(?:\.\d+)?(?:\s*:\s*\d+(?:\.\d+)?)+", text):
        return None
    return Ratio(tuple(Fraction(part.strip()) for part in text.split(":")), re.sub(r"\s", "", text))


def _read_based(text: str) -> Based | None:
    based = _BASED.fullmatch(text)
    if based is None or not any(character.isdigit() for character in based[1]):
        return None
    base = _BASES.index(based[2]) + 2 if based[2] in _BASES else int(based[2])
    return Based(based[1].lstrip("0").upper() or "0", base)


def _read_matrix(text: str) -> Any | None:
    """Return a matrix, multiplied by the number before it; a cell if it has only one; `None` for other texts."""
    if matrix := _MATRIX.match(text):
        rows = [row for row in re.split(r"\\\\", matrix[2]) if row.strip() and row.strip() != r"\hline"]
        if len(rows) == 1 and "&" not in rows[0]:
            return read_value(rows[0])
        return Matrix(tuple(tuple(read_value(cell, True) for cell in row.split("&")) for row in rows))
    scaled = _SCALED_MATRIX.match(text)
    if scaled is None:
        return None
    factor = read_value("-1" if scaled[1] == "-" else scaled[1])
    matrix_value = _read_matrix(scaled[2])
    if not isinstance(factor, Leaf) or not isinstance(factor.value, Fraction) or not isinstance(matrix_value, Matrix):
        return None
    rows = []
    for row in matrix_value.rows:
        if not all(isinstance(cell, Leaf) and isinstance(cell.value, Fraction) for cell in row):
            return None
        rows.append(tuple(Leaf(cell.text, factor.value * cell.value) for cell in row))
    return Matrix(tuple(rows))


def _usual_brackets(match: re.Match) -> str:
    opening = "(" if match[1] == "]" else "["
    closing = ")" if match[3] == "[" else "]"
    return f"{opening}{match[2]}{closing}"


def join_thousands(text: str) -> str:
    """Return a text whose thousands separators are removed: `1,234`, `12,34,567`, `1 234 567`, and `1.234.567`."""
    text = re.sub(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])", lambda match: match.group().replace(",", ""), text)
    text = re.sub(r"(?<![\d.,])\d{1,2}(?:,\d{2})+,\d{3}(?![\d,])", lambda match: match.group().replace(",", ""), text)
    text = re.sub(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d,/])", lambda match: match.group().replace(" ", ""), text)
    text = re.sub(
        r"(?<![\d.,])\d{1,3}(?:\.\d{3})+,\d+(?![\d.,])",
        lambda match: match.group().replace(".", "").replace(",", "."),
        text,
    )
    return re.sub(r"(?<![\d.,])\d{1,3}(?:\.\d{3}){2,}(?![\d.,])", lambda match: match.group().replace(".", ""), text)


_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|.", re.DOTALL)
_OPENING = frozenset({"(", "[", "{", r"\{", r"\langle", r"\lfloor", r"\lceil", r"\begin"})
_CLOSING = frozenset({")", "]", "}", r"\}", r"\rangle", r"\rfloor", r"\rceil", r"\end"})


def _split(text: str, separators: tuple[str, ...]) -> list[str]:
    """Return the parts of a text between separators that are in no brackets."""
    parts = [""]
    depth = 0
    for token in _TOKEN.findall(text):
        if token in _OPENING:
            depth += 1
        elif token in _CLOSING:
            depth -= 1
        if depth == 0 and token in separators:
            parts.append("")
        else:
            parts[-1] += token
    return parts if depth == 0 else [text]


def _without_grouping_braces(text: str) -> str:
    while text.startswith("{") and text.endswith("}") and len(_split_at_top(text)) == 1:
        text = text[1:-1].strip()
    return text


def _split_at_top(text: str) -> list[str]:
    """Return the bracketed groups at the top level of a text that consists of such groups only."""
    groups = [""]
    depth = 0
    for token in _TOKEN.findall(text):
        if token in _OPENING:
            depth += 1
        groups[-1] += token
        if token in _CLOSING:
            depth -= 1
            if depth == 0:
                groups.append("")
    return [group for group in groups if group.strip()]


def brackets_around(text: str) -> tuple[str, str, str] | None:
    """Return opening bracket, content, and closing bracket if one pair of brackets encloses the text."""
    tokens = _TOKEN.findall(text)
    if len(tokens) < 2 or tokens[0] not in ("(", "[", r"\{", r"\langle"):
        return None
    if tokens[-1] not in (")", "]", r"\}", r"\rangle") or len(_split_at_top(text)) != 1:
        return None
    return tokens[0], "".join(tokens[1:-1]).strip(), tokens[-1]


_TEXT_LABEL = re.compile(
    r"^(?:\\text\s*\{\s*)?(?:(?:the\s+)?(?:final\s+|correct\s+)?answer(?:\s+is)?\s*:?|[A-Za-z][A-Za-z ]{1,40}:)"
    r"\s*\}?\s*(?=[^\s}])",
    re.IGNORECASE,
)


def _without_label(text: str) -> str:
    """Return a text without a label in words in front of it: "Total: 5" is "5"."""
    label = _TEXT_LABEL.match(text)
    if label is None:
        return text
    rest = text[label.end() :]
    return rest.removesuffix("}") if rest.count("}") > rest.count("{") else rest


def _is_sentence(text: str) -> bool:
    return bool(WORDS.match(text)) and len(re.findall(r"[^\W\d_]{2,}", text)) > 6


def _read_relation(text: str) -> Relation | None:
    sides = [""]
    operators = []
    depth = 0
    position = 0
    while position < len(text):
        match = _RELATION.match(text, position) if depth == 0 else None
        if match and match.group() in ("=", ":=", "<", ">") or match and match.group().startswith("\\"):
            operators.append("=" if match.group() in (":=", r"\equiv") else match.group())
            sides.append("")
            position = match.end()
            continue
        token = _TOKEN.match(text, position).group()  # type: ignore[union-attr]
        depth += (token in _OPENING) - (token in _CLOSING)
        sides[-1] += token
        position += len(token)
    if not operators or depth != 0:
        return None
    return Relation(tuple(side.strip() for side in sides), tuple(operators))
