"""Sides of equations that name a quantity, such as `x`, `AB`, `\\det A`, or `E[X]`: the other side is its value."""

import re

from .english import changes_value
from .values import brackets_around


_ACCENTED = r"\\(?:angle|triangle|overline|overrightarrow|widehat|vec|bar|hat|tilde)(?![A-Za-z])\s*\{?[A-Za-z]+\}?"
_INDEX = r"(?:\s*_\s*(?:\{[^{}]*\}|\w))?"
_NAME = re.compile(
    rf"^(?:(?:\\text\s*\{{[^{{}}]*\}}|{_ACCENTED}|\\?[A-Za-z]+'*|[A-Za-z]\w*)"
    rf"{_INDEX}(?:\s*\^\s*\{{-1\}}(?=\s*(?:\(|\\cdot)))?"
    r"(?:\s*:\s*[A-Za-z](?![A-Za-z]))*(?:\s*\([A-Za-z0-9,\s]*\)|\\cdot \([A-Za-z0-9,\s]*\))?)?$"
    r"|^\([A-Za-z]\w*(?:\s*,\s*[A-Za-z]\w*)*\)$"
)
_WORDS = re.compile(r"^[A-Za-z](?:[A-Za-z\s()\-]|\\text\s*\{[^{}]*\})*$")


def is_name(side: str) -> bool:
    """Whether a side is a name, such as `x`, `x_1`, `f(2)`, `\\angle ABC`, `(x, y)`, words, or nothing."""
    side = side.strip()
    return bool(_NAME.match(side) or _WORDS.match(side))


# What is computed from the rest of the side: an integral, a limit, or a determinant.
_LIMIT = r"\{(?:[^{}]|\{[^{}]*\})*\}|\\?\w+?"
_OPERATION = re.compile(
    r"^\\(?P<operator>i{0,2}int|oint|sum|prod|lim|limsup|liminf|det|max|min|sup|inf|dim|deg|Pr)(?![A-Za-z])"
    rf"(?:\s*_\s*(?P<from>{_LIMIT}))?(?:\s*\^\s*(?P<to>{_LIMIT}))?(?P<operand>.+)$"
)
_ARITHMETIC = re.compile(r"[-+*/]|\\(?:cdot|times|div|pm|mp)(?![A-Za-z])")
_NESTED = re.compile(r"\([^()]*\)|\[[^\[\]]*\]|\{[^{}]*\}|\|[^|]*\|")
_TERM_OF_SEQUENCE = re.compile(r"[A-Za-z]\s*_")
# Words for what is computed, such as "Area of", and of what.
_WORDS_AND_OPERAND = re.compile(r"^\\text\s*\{([^{}]*[A-Za-z]{3}[^{}]*)\}\s*(?:\(.*\)|\[.*\]|[^\d+*/^]*)$")
_FUNCTION = re.compile(
    rf"^(?:\\mathbb\{{[EP]\}}|([fghFGHPQEDV])'*){_INDEX}\s*(?:\^\{{-1\}}\s*)?(?:\\cdot\s*)?(?=[(\[])"
)
_FUNCTION_OF_ANGLE = re.compile(r"^\\(?:sin|cos|tan|cot|log|ln)(?![A-Za-z])\s*\(?(?:\\(?:angle\s*)?)?[A-Za-z]+\s*\)?$")
_MEASURE = re.compile(r"^\|([^|]+)\|$|^\\\|([^|]+)\\\|$")
_AREA = re.compile(r"^\[[A-Z]{3,}\]$")


def is_quantity(side: str) -> bool:
    """Whether a side names a quantity: what `is_simple_quantity` names, an area in words, or what an operation such as
    `\\int`, `\\lim`, or `\\det` computes."""
    if words := _WORDS_AND_OPERAND.match(side.strip()):
        return is_name(side) or not changes_value(words[1])
    return is_simple_quantity(side) or _is_operation(side.strip())


def _is_operation(side: str) -> bool:
    """Whether a side is an operator with its operand alone: no sum or product around it, and no variable bounds, which
    would make an equation for the bound; but a sum of terms such as `a_k` may end at any `n`."""
    operation = _OPERATION.match(side)
    if operation is None:
        return False
    operand = previous = operation["operand"].strip()
    lower, upper = (operation["from"] or "").rpartition("=")[2], operation["to"] or ""
    if operation["operator"] in ("sum", "prod") and names_in(lower + " " + upper):
        if operation["to"] and not _TERM_OF_SEQUENCE.match(operand):
            return False
    elif "int" in operation["operator"] and names_in(lower + " " + upper):
        return False
    elif operation["operator"] == "det" and r"\lambda" in operand:
        return False  # an equation for eigenvalues
    while (operand := _NESTED.sub(" ", previous)) != previous:
        previous = operand
    return not _ARITHMETIC.search(operand)


def is_simple_quantity(side: str) -> bool:
    """Whether a side names a quantity without words and operators: a name, the value of a function, the length or size
    of a name or of several, an area `[ABC]`, or a definite integral."""
    side = side.strip()
    if is_name(side) or _FUNCTION_OF_ANGLE.match(side) or _AREA.match(side):
        return True
    if (operation := _OPERATION.match(side)) and operation["operator"] == "int" and operation["to"]:
        return _is_operation(side)
    if measure := _MEASURE.match(side):
        measured = measure[1] or measure[2]
        return is_name(measured) or len(names_in(measured)) != 1
    if function := _FUNCTION.match(side):
        argument = brackets_around(side[function.end() :])
        # `P(P+1)` is a product.
        is_product = function[1] and argument and re.search(rf"(?<!\\){function[1]}(?!'*\s*[(\[])", argument[1])
        return argument is not None and not is_product
    return False


_GREEK = (
    r"\\(?:alpha|beta|gamma|delta|(?:var)?epsilon|zeta|eta|(?:var)?theta|iota|kappa|lambda|mu|nu|xi|rho|sigma|tau"
    r"|(?:var)?phi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi|Sigma|Phi|Psi|Omega|ell)(?![A-Za-z])"
)
# Letters beside each other are a product, and capitals a segment or an angle.
_VARIABLE = re.compile(rf"(?:{_GREEK}|[A-Z]{{2,}}|[A-Za-z])'*{_INDEX}")
_NO_VARIABLE = re.compile(
    rf"\\text\s*\{{[^{{}}]*\}}|(?!{_GREEK})\\[A-Za-z]+" r"|e(?=\s*\^)|(?<![A-Za-z\\_{])i(?![A-Za-z])"
)


def names_in(side: str) -> set[str]:
    """Return the names in a side: `x_1` and `x_2`, or `AB` and `CD`, but not `e` in `e^x`, `i`, and `\\pi`."""
    return set(_occurrences(side))


def _occurrences(side: str) -> list[str]:
    return [re.sub(r"\s", "", name) for name in _VARIABLE.findall(_NO_VARIABLE.sub(" ", side))]


_FUNCTION_VALUE = re.compile(r"(?:\\mathbb\{[EP]\}|[fghFGHPQEDV])'*\s*(?:\([^()]*\)|\[[^\[\]]*\])")
_DERIVATIVE = re.compile(r"^\\frac\{d\s*[A-Za-z]\}\{d\s*[A-Za-z]\}$")
_COORDINATES = {"x", "y", "z"}
_PLAIN_COMBINATION = re.compile(r"^[A-Za-z](?:\s*[-+]\s*[A-Za-z])+$|^[xyz](?:\s*[xyz])+$")


def combines_names(side: str) -> bool:
    """Whether a side combines several names, each of which occurs once, as in `a+b`, `m+10n`, or `\\frac{m}{n}`.
    With `x`, `y`, or `z` only sums, differences, and products of letters count: `2x+3y` is a side of an equation for a
    line. A value such as `f(x)` or `P(A)` is one name."""
    if _DERIVATIVE.match(side.strip()):
        return True
    functions = set(_FUNCTION_VALUE.findall(side))
    names = _occurrences(_FUNCTION_VALUE.sub(" ", side))
    if len(names) + len(functions) < 2 or len(set(names)) < len(names):
        return False
    return not _COORDINATES & set(names) or bool(_PLAIN_COMBINATION.match(side.strip()))
