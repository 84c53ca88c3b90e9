"""Numbers as people write them: separators, signs, currencies, fractions, exponents, and digits of other scripts.

The trainer imports this module, so it needs only the standard library.
"""

import re
import unicodedata


MINUS_SIGNS = "\u2212\u2010\u2011\u2012\u2013\uff0d\ufe63\u207b"
SPACES = "\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"
# Marks of width zero and of the direction of writing.
INVISIBLE = "\u200b\u200c\u200d\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2060\u2061\u2062\u2063"
INVISIBLE += "\u2066\u2067\u2068\u2069\ufeff"
CURRENCIES = "$\u20ac\u00a3\u00a5\u20b9\u20bd\u20a9\u20ba\u20ab\u0e3f"

# A number with a larger exponent is no answer, and its digits would fill the memory.
MAX_EXPONENT = 1000

_OTHER_SIGNS = "\uff0b\uff0c\uff0e\uff0f\u2044\uff05\ufe6a\u066a\u066b\u066c"
_ASCII_SIGNS = "+,.//%%%.,"

_REPLACEMENTS = {ord(character): "-" for character in MINUS_SIGNS}
_REPLACEMENTS |= {ord(character): " " for character in SPACES}
_REPLACEMENTS |= {ord(character): "" for character in INVISIBLE}
_REPLACEMENTS |= {ord(other): sign for other, sign in zip(_OTHER_SIGNS, _ASCII_SIGNS, strict=True)}
_DIGIT_OF_OTHER_SCRIPT = re.compile(r"(?![0-9])\d")


def plain_characters(text: str) -> str:
    """Return the text with ASCII digits, minus signs, and spaces, and without invisible characters."""
    if text.isascii():
        return text
    text = text.translate(_REPLACEMENTS)
    return _DIGIT_OF_OTHER_SCRIPT.sub(lambda match: str(unicodedata.digit(match.group())), text)


# `1\,234`, `1{,}234`, and `1,\!234`: three digits follow.
_LATEX_SEPARATOR = re.compile(r"(?<=\d)(?:\{,\}|,?\\!|\\[,;: ]|~)(?=\d{3}(?!\d))")
_WHOLE_BEFORE_FRACTION = re.compile(r"(?<=\d)(?=\\[dtc]?frac)")
_LATEX_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{\s*(\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))")

_GROUPED_INTEGER = r"""
    \d{1,3}(?:,\d{3})+(?!\d)           # 1,234,567
    | \d{1,2}(?:,\d{2})+,\d{3}(?!\d)   # 12,34,567
    | \d{1,3}(?:[ ]\d{3})+(?!\d)       # 1 234 567
    | \d{1,3}(?:'\d{3})+(?!\d)         # 1'234'567
"""
_DOT_GROUPS = r"\d{1,3}(?:\.\d{3})+,\d+|\d{1,3}(?:\.\d{3}){2,}"  # 1.234,5 and 1.234.567
_POWER_OF_TEN = r"(?:[eE]|\s*(?:\\times|\\cdot|[\u00d7\u00b7*x])\s*10\s*(?:\^|\*\*)\s*\{?\s*)(?P<exponent>[-+]?\d+)"

NUMBER = re.compile(
    rf"""
    (?P<sign>(?<![\w)\]}}])[-+])?      # the minus of `10-3` and `pages 3-5` is no sign
    (?:\\?[{CURRENCIES}]\s?)?
    (?:
        (?P<dot_groups>{_DOT_GROUPS})(?![\d,.]*\d)
        | (?<!\d/)(?:(?P<whole>\d+)\s)?(?P<numerator>\d+)\s?/\s?(?P<denominator>\d+)(?!\d*[/.]?\d)
        | (?P<decimal>(?:(?:{_GROUPED_INTEGER}|\d+)(?:\.\d+)?|(?<!\d)\.\d+))(?:{_POWER_OF_TEN})?
    )
    """,
    re.VERBOSE,
)


def number_text(match: re.Match) -> str:
    """Return a match of `NUMBER` as text that `Fraction` reads; empty if its exponent is above `MAX_EXPONENT`."""
    sign = "-" if match["sign"] == "-" else ""
    if match["dot_groups"]:
        return sign + match["dot_groups"].replace(".", "").replace(",", ".")
    if match["numerator"]:
        numerator, denominator = int(match["numerator"]), int(match["denominator"])
        return f"{sign}{int(match['whole'] or 0) * denominator + numerator}/{denominator}"
    decimal = re.sub("[ ,']", "", match["decimal"])
    if match["exponent"] is None:
        return sign + decimal
    exponent = int(match["exponent"])
    return f"{sign}{decimal}e{exponent}" if abs(exponent) <= MAX_EXPONENT else ""


def last_number(text: str) -> str:
    """
    Return the last number in the last 1,000 characters of a text, in a form that `Fraction` reads: `1,234` is "1234",
    `2 1/2` is "5/2", and `3 \\times 10^8` is "3e8". Empty if there is none.

    A fraction that is a whole number, such as `12/4`, is a division that was not carried out: its denominator is the
    last number.
    """
    text = plain_characters(text[-1000:])
    text = _LATEX_SEPARATOR.sub("", text)
    text = _WHOLE_BEFORE_FRACTION.sub(" ", text)
    text = _LATEX_FRACTION.sub(lambda match: f"{match[1] or match[2]}/{match[3] or match[4]}", text)
    matches = list(NUMBER.finditer(text))
    if not matches:
        return ""
    last = matches[-1]
    if last["numerator"] and (int(last["denominator"]) == 0 or int(last["numerator"]) % int(last["denominator"]) == 0):
        return last["denominator"]
    return number_text(last)
