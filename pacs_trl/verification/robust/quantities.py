"""Sides of equations that name a quantity, such as `x`, `AB`, `\\det A`, or `E[X]`: the other side is its value."""

import re

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


# What is computed from the rest of the side: an integral, a limit, a determinant, or words such as "Area of".
_OPERATION = re.compile(
    r"^\\(?:i{0,2}int|oint|sum|prod|lim|limsup|liminf|det|max|min|sup|inf|dim|deg|Pr)(?![A-Za-z])"
    r"|^\\text\s*\{[^{}]*[A-Za-z]{3}[^{}]*\}\s*(?:\(.*\)|\[.*\]|[^\d+*/^]*)$"
)
_FUNCTION = re.compile(
    rf"^(?:\\mathbb\{{[EP]\}}|([fghFGHPQEDV])'*){_INDEX}\s*(?:\^\{{-1\}}\s*)?(?:\\cdot\s*)?(?=[(\[])"
)
_FUNCTION_OF_ANGLE = re.compile(r"^\\(?:sin|cos|tan|cot|log|ln)(?![A-Za-z])\s*\(?(?:\\(?:angle\s*)?)?[A-Za-z]+\s*\)?$")
_MEASURE = re.compile(r"^\|([^|]+)\|$|^\\\|([^|]+)\\\|$")
_AREA = re.compile(r"^\[[A-Z]{3,}\]$")


def is_quantity(side: str) -> bool:
    """Whether a side names a quantity: a name, the value of a function, the length or size of a name or of several, an
    area `[ABC]`, or what an operation such as `\\int`, `\\lim`, or `\\det` computes."""
    side = side.strip()
    if is_name(side) or _OPERATION.match(side) or _FUNCTION_OF_ANGLE.match(side) or _AREA.match(side):
        return True
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
    return {re.sub(r"\s", "", name) for name in _VARIABLE.findall(_NO_VARIABLE.sub(" ", side))}
