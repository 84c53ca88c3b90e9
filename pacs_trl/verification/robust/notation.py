"""Notation of answers: rewrites what people and models type into LaTeX with one spelling per meaning."""

import re
import unicodedata

from ..numerals import CURRENCIES, plain_characters
from .number_words import english_number, latin_numerals


# Longer answers are compared as texts.
MAX_LENGTH = 2000

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_SUPERSCRIPTS = str.maketrans(
    "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207a\u207b\u207f", "0123456789+-n"
)
_SUBSCRIPTS = str.maketrans("\u2080\u2081\u2082\u2083\u2084\u2085\u2086\u2087\u2088\u2089", "0123456789")
_SUPERSCRIPT_RUN = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207a\u207b\u207f]+")
_SUBSCRIPT_RUN = re.compile("[\u2080-\u2089]+")

# `²⁄₃`, whose digits are neither exponent nor index.
_RAISED_FRACTION = re.compile("([\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+)[\u2044/]([\u2080-\u2089]+)")
_CIRCLED_DIGITS = re.compile("[\u2460-\u2473]{2,}")
_LONG_DASH_AS_MINUS = re.compile(r"(?:^|(?<=[=(,\[{]))\s*[\u2014\u2015](?=[\d\\(.$])")

_SYMBOLS = {
    "\u00b5": r"\mu ",
    "\u03bc": r"\mu ",
    "\u03c0": r"\pi ",
    "\u03b8": r"\theta ",
    "\u03b1": r"\alpha ",
    "\u03b2": r"\beta ",
    "\u03b3": r"\gamma ",
    "\u03bb": r"\lambda ",
    "\u03c6": r"\phi ",
    "\u03c9": r"\omega ",
    "\u03a9": r"\Omega ",
    "\u2126": r"\Omega ",
    "\u221e": r"\infty ",
    "\u2205": r"\emptyset ",
    "\u00d8": r"\emptyset ",
    "\u00b0": r"^{\circ}",
    "\u00ba": r"^{\circ}",
    "\u02da": r"^{\circ}",
    "\u00d7": r"\cdot ",
    "\u00b7": r"\cdot ",
    "\u22c5": r"\cdot ",
    "\u2219": r"\cdot ",
    "\u00f7": "/",
    "\u2215": "/",
    "\u00b1": r"\pm ",
    "\u2213": r"\mp ",
    "\u2264": r"\leq ",
    "\u2a7d": r"\leq ",
    "\u2265": r"\geq ",
    "\u2a7e": r"\geq ",
    "\u2260": r"\neq ",
    "\u2248": r"\approx ",
    "\u2208": r"\in ",
    "\u222a": r"\cup ",
    "\u2229": r"\cap ",
    "\u2216": r"\setminus ",
    "\u211d": r"\mathbb{R}",
    "\u2102": r"\mathbb{C}",
    "\u2124": r"\mathbb{Z}",
    "\u2220": r"\angle ",
    "\u25b3": r"\triangle ",
    "\u2236": ":",
    "\u3001": ",",
    "\u3002": ".",
    "\u2026": r"\ldots ",
    "\u201c": "",
    "\u201d": "",
    "\u2032": "'",
    "\u27e8": r"\langle ",
    "\u27e9": r"\rangle ",
}
_SYMBOL = re.compile("|".join(map(re.escape, _SYMBOLS)))
_UNICODE_ROOT = re.compile(
    "([\u221a\u221b\u221c])\\s*(?:\\{([^{}]*)\\}|\\(([^()]*)\\)|(\\d+(?:\\.\\d+)?|\\\\?[A-Za-z]+))"
)
_ROOT_DEGREE = {"\u221a": "", "\u221b": "[3]", "\u221c": "[4]"}


def ascii_notation(text: str) -> str:
    """Return a text with LaTeX in place of Unicode fractions, roots, exponents, and symbols."""
    if text.isascii():
        return text
    text = "".join(_vulgar_fraction(character) for character in text)
    text = _CIRCLED_DIGITS.sub(lambda match: ", ".join(match.group()), text)
    text = _LONG_DASH_AS_MINUS.sub("-", text)
    text = _RAISED_FRACTION.sub(
        lambda match: rf"\frac{{{match[1].translate(_SUPERSCRIPTS)}}}{{{match[2].translate(_SUBSCRIPTS)}}}", text
    )
    text = _SUPERSCRIPT_RUN.sub(lambda match: "^{" + match.group().translate(_SUPERSCRIPTS) + "}", text)
    text = _SUBSCRIPT_RUN.sub(lambda match: "_{" + match.group().translate(_SUBSCRIPTS) + "}", text)
    text = _UNICODE_ROOT.sub(
        lambda match: rf"\sqrt{_ROOT_DEGREE[match[1]]}{{{match[2] or match[3] or match[4] or ''}}}", text
    )
    text = "".join(each for each in text if each in _SYMBOLS or unicodedata.category(each) not in ("So", "Mn", "Cs"))
    text = _SYMBOL.sub(lambda match: _SYMBOLS[match.group()], text)
    return plain_characters(unicodedata.normalize("NFKC", plain_characters(text)))


def _vulgar_fraction(character: str) -> str:
    if character < "\u00bc" or unicodedata.category(character) != "No":
        return character
    numerator, bar, denominator = unicodedata.normalize("NFKC", character).partition("\u2044")
    return rf"\frac{{{numerator}}}{{{denominator}}}" if bar and denominator else character


_SPACES = re.compile(r"\s+")
_DOUBLE_BACKSLASH = re.compile(r"\\\\(?=[A-Za-z])")
_TEXT_WITHOUT_BRACES = re.compile(r"\\text(?![A-Za-z])(?!\s*\{)")
_ONLY_TEXT = re.compile(r"^\\text\s*\{\s*([^{}]+?)\s*\}$")
_DECIMAL_NUMBER = re.compile(r"[-+]?\d*\.\d")
_MONTH = "(?P<month>January|February|March|April|May|June|July|August|September|October|November|December)"
_DATE = re.compile(rf"(?P<day>\d{{1,2}})(?: of)? {_MONTH},?(?: (?P<year>\d{{4}}))?", re.IGNORECASE)

# Verbs that follow the answer in Japanese and Korean.
_COPULA = re.compile("(?:です|である|だ|となる|になる|とする|입니다|이다|예요|이에요|이며)$")

_SPACING = re.compile(
    r"(?<!\\)\\(?:[,;:! ]|quad(?![A-Za-z])|qquad(?![A-Za-z])|thinspace|enspace|hfill|newline)|~|[\t\n\r]"
)
_THOUSANDS_IN_LATEX = re.compile(r"(?<=\d)(?:\{\s*,\s*\}|(?:\\!)?,\\!|\\!,|\\[,;:! ]|~)\s*(?=\d{3}(?!\d))")
_THOUSANDS_IN_CODE = re.compile(r"(?<![\w.])\d{1,3}(?:_\d{3})+(?![\w.])")
_APOSTROPHE_BEFORE_THOUSANDS = re.compile(r"(?<=\d)['\u2019\u2018](?=\d{3}(?!\d))")
_DECIMAL_COMMA_IN_LATEX = re.compile(r"(?<=\d)\{\s*,\s*\}(?=\d)")
_SIZING = re.compile(
    r"\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])\s*\.?(?=[\s()\[\]\\|{}<>/]|$)"
    r"|\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|centering|boldmath)(?![A-Za-z])"
    r"|\\(?:tiny|scriptsize|footnotesize|small|normalsize|[lL]arge|LARGE|[hH]uge)(?![A-Za-z])"
)
_COLOR = re.compile(r"\\(?:text)?color\s*\{[^{}]*\}")
_STARRED_ENVIRONMENT = re.compile(r"(\\(?:begin|end)\{[a-z]+)\*\}")
_FRAME = re.compile(r"\\(?:underline|ensuremath|boxed|fbox)\s*\{([^{}]*)\}")
_MARK_AT_END = re.compile(r"\\(?:checkmark|blacksquare|qed|Box)\s*$")
_ONLY = re.compile(r"(?<=[A-JVX])\s+only(?=\s*\}?$)")  # as in "I and II only"
_FORMULAS = re.compile(r"(?<!\\)\$((?:[^$\\]|\\.)+)(?<!\\)\$")  # formulas in a sentence
_HEDGE = re.compile(
    r"^\s*(?:(?:approximately|about|roughly|around|exactly|simply|just|only|equal to)\s+"
    r"|\\(?:approx|sim)(?![A-Za-z])\s*"
    r"|\\text\s*\{\s*(?:approximately|about|roughly|around)\s*\}\s*|~\s*(?=\d))",
    re.IGNORECASE,
)
_MARK_OF_CONCLUSION = re.compile(
    r"^\s*(?:#{1,6}\s|\u2234|\u21d2|=>|\\(?:therefore|Rightarrow|implies)(?![A-Za-z]))\s*"
)
_MINUS_IN_WORDS = re.compile(
    r"^(?:\\text\s*\{\s*(?:negative|minus)\s*\}|(?:negative|minus)\s)\s*(?=[\d.\\$])", re.IGNORECASE
)
_MINUS_IN_TEXT = re.compile(r"^\\text\s*\{\s*(?:negative|minus)\s(?=[\d.]+\s*\}$)", re.IGNORECASE)
_CURRENCY_CODES = {"usd": "$", "us$": "$", "us\\$": "$", "eur": "\u20ac", "gbp": "\u00a3", "inr": "\u20b9"}
_CURRENCY_CODES |= {"rs": "\u20b9", "rs.": "\u20b9"}
_CURRENCY_CODE = re.compile(
    r"^(?:\\text\s*\{\s*)?(USD|US\\?\$|EUR|GBP|INR|Rs\.?)\s*\}?\s*(?=\d)",
    re.IGNORECASE,
)
_CENTS_BEFORE_NUMBER = re.compile(r"^\u00a2\s*(\d[\d.]*)$")
_CUT_DECIMALS = re.compile(r"(?<=\d)\s*\\ldots\s*$")
_REPEATING_DECIMALS = re.compile(r"(?<![\d.])(\d{0,20})\.(\d{0,20}?)(\d{1,6}?)\3{1,20}\s*\\ldots\s*$")
_FONT = re.compile(
    r"\\(?:mathrm|mathbf|mathit|mathsf|mathtt|textbf|textit|textrm|textsf|textnormal|texttt|mbox|hbox|operatorname\*?"
    r"|boldsymbol|bm|emph|rm|bf|it)(?![A-Za-z])"
)
_FONT_AROUND_MATH = re.compile(
    r"\\text\s*\{\s*([-+(\[]?[\d.,/\s:^%$\\]*[)\]]?)\s*\}|^\\text\s*\{\s*(\(?[A-Z]\)?\.?)\s*\}"
    r"|^\\text\s*\{\s*([A-J][.:)])\s*\}(?=\s*[^\s])"
    r"|^\\text\s*\{\s*([-\d./]+(?:\s*(?:,|and|or|to|,\s*and)\s*[-\d./]+)+|\([a-z]\)(?:\s*(?:,|and)\s*\([a-z]\))+)\s*\}$"
    r"|^\\text\s*\{\s*([A-Za-z]\s*=\s*[-\d./]+)\s*\}$"
    r"|^\\text\s*\{\s*((?:[A-J]|[IVX]+)(?:\s*(?:,|and|,\s*and)\s*(?:[A-J]|[IVX]+))+)\s*\}$"
)
_REAL_POINT = r"-?(?:[\d./]+|\\frac\s*\{\d+\}\s*\{\d+\})"
# The same answer once more: `0.5 \text{ (or } \frac{1}{2})`.
_ALTERNATIVE_IN_BRACKETS = re.compile(
    r"\s*\\text\s*\{\s*\(\s*(?:or(?:\s+equivalently)?|i\.\s?e\.|equivalently)\s*,?\s*\}\s*([^()]+)\)$"
)
_CONNECTIVE = re.compile(
    r"\s*,?\s*(?:\\text\s*\{\s*,?\s*(?:and|or|or\s+equivalently|i\.\s?e\.)\s*,?\s*\}|\\(?:lor|land|vee|wedge)(?![A-Za-z])|\\&"
    r"|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|或|和)\s*"
)
_OR = re.compile(r"\s*(?:\\text\s*\{\s*or\s*\}|\\(?:lor|vee)(?![A-Za-z])|(?<![A-Za-z\\])or(?![A-Za-z])|或)\s*")
_INEQUALITY = re.compile(r"[^=,]*(?:[<>]|\\[lg]eq?(?![A-Za-z]))[^=,]*")
_VARIABLE = re.compile(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])")
_LATEX_SYNONYMS = [
    (re.compile(r"\\(?:d|t|c|s)frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\(?:geqslant|geqq|ge)(?![A-Za-z])"), r"\\geq "),
    (re.compile(r"\\(?:leqslant|leqq|le)(?![A-Za-z])"), r"\\leq "),
    (re.compile(r"\\(?:gt)(?![A-Za-z])"), ">"),
    (re.compile(r"\\(?:lt)(?![A-Za-z])"), "<"),
    (re.compile(r"\\ne(?![A-Za-z])"), r"\\neq "),
    (re.compile(r">="), r"\\geq "),
    (re.compile(r"<="), r"\\leq "),
    (re.compile(r"!="), r"\\neq "),
    (re.compile(r"\\(?:times|cdotp|ast|bullet)(?![A-Za-z])"), r"\\cdot "),
    (re.compile(r"\\div(?![A-Za-z])"), "/"),
    (re.compile(r"\\(?:varnothing|emptyset|O)(?![A-Za-z])"), r"\\emptyset "),
    (re.compile(r"\\var(epsilon|phi|theta|rho|sigma)(?![A-Za-z])"), r"\\\1"),
    (re.compile(r"\\log\s*_\s*(?:e(?![A-Za-z])|\{\s*e\s*\})"), r"\\ln "),
    (
        re.compile(
            r"^(?:\\text\s*\{\s*)?(?:[Aa]ll|[Aa]ny)\s+real\s+(?:numbers|values)(?:\s+[a-z])?,?\s+except(?:\s+for)?\s*\}?"
            rf"\s*(?:[a-z]\s*=\s*)?({_REAL_POINT}(?:,\s*{_REAL_POINT})*)\s*\}}?$"
        ),
        r"\\mathbb{R} \\setminus \\{\1\\}",
    ),
    (re.compile(r"\\(?:dots|cdots|dotsc|dotsb|ldots)(?![A-Za-z])|\.\.\."), r"\\ldots "),
    (re.compile(r"\\(?:lbrace)(?![A-Za-z])"), r"\\{"),
    (re.compile(r"\\(?:rbrace)(?![A-Za-z])"), r"\\}"),
    (re.compile(r"\\(?:lbrack)(?![A-Za-z])"), "["),
    (re.compile(r"\\(?:rbrack)(?![A-Za-z])"), "]"),
    (re.compile(r"\\[lr]vert(?![A-Za-z])\s*"), "|"),
    (re.compile(r"\\[lr]Vert(?![A-Za-z])\s*"), r"\\|"),
    (re.compile(r"\\colon(?![A-Za-z])|\{:\}"), ":"),
    (re.compile(r"(?<=\d)(?:st|nd|rd|th|\^\s*\{?\s*\\text\s*\{\s*(?:st|nd|rd|th)\s*\}\s*\}?)(?![A-Za-z])"), ""),
    (re.compile(r"^\\?#(?=\d)"), ""),
    (re.compile(r"(?<!\d)(?<!\d\s)\\text\s*\{\s*([\u20ac\u00a3\u00a5\u20b9])\s*\}\s*(?=\d)"), r"\1"),
    (re.compile(r"(?<=\d)\s*\\text\s*\{\s*(?:remainder|[Rr])\s*\}\s*(?=\d+$)"), r"\\text{ R }"),
    (re.compile(r"\\(?:degree|degrees|textdegree|circ)(?![A-Za-z])"), r"\\circ "),
    (re.compile(r"(?<=\d)\s*\^\s*(?:o(?![A-Za-z])|\{\s*o\s*\}|\{?\s*\\text\s*\{\s*o\s*\}\s*\}?)"), r"^{\\circ}"),
    (re.compile(r"(?<!\^)(?<!\^\{)\\circ\s*(?![A-Za-z(])"), r"^{\\circ}"),
    (re.compile(r"\^\s*\{?\s*\\circ\s*\}?"), r"^{\\circ}"),
    (re.compile(r"\\mathbb\s*([A-Z])(?![A-Za-z])"), r"\\mathbb{\1}"),
    (re.compile(r"\\R(?![A-Za-z])"), r"\\mathbb{R}"),
    (re.compile(r"\\(?:therefore|because|implies|quad)(?![A-Za-z])"), " "),
    (re.compile(r"\\(?:percent)(?![A-Za-z])|\\text\s*\{\s*(?:%|\\%|percent|per cent|percentage|pct)\s*\}"), "%"),
    (re.compile(r"(?<=[\d\s}])(?:percent(?:age)?|per cent|pct)(?![A-Za-z])", re.IGNORECASE), "%"),
    (re.compile(r"\\%|\uff05"), "%"),
    (re.compile(r"(?<![A-Za-z\\])(?:infinity|inf|oo)(?![A-Za-z])", re.IGNORECASE), r"\\infty "),
    (re.compile(r"(?<![A-Za-z\\])pi(?![A-Za-z])"), r"\\pi "),
    (re.compile(r"\\?(?<![A-Za-z])lg(?![A-Za-z])"), r"\\log "),
    (re.compile(r"(?<![A-Za-z\\])(sin|cos|tan|cot|sec|csc|log|ln|exp)(?![A-Za-z])"), r"\\\1"),
    (re.compile(r"(?<![A-Za-z\\])sqrt\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"(?<![A-Za-z\\])sqrt\s*(\d+)"), r"\\sqrt{\1}"),
    (re.compile(r"(?<=[\w)}])\s*\*\*\s*(?=[\w({-])"), "^"),
    (re.compile(r"\*"), r"\\cdot "),
    (re.compile(r"(?<=[\w)}])\s*-\s*-(?=[\d\\(])"), "+"),
    (re.compile(r"--(?=[\d\\(])"), ""),
    (re.compile(r"\^\s*\(([^()]*)\)"), r"^{\1}"),
    (re.compile(r"\^\s*(-?\d+|[A-Za-z])"), r"^{\1}"),
    (re.compile(r"(?<=[\d)])\s*\("), r"\\cdot ("),
    (re.compile(r"\\frac\s*(\d)\s*(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac\s*(\d|[A-Za-z])\s*\{"), r"\\frac{\1}{"),
    (re.compile(r"(\\frac\s*\{[^{}]*\})\s*(\d|[A-Za-z])"), r"\1{\2}"),
    (re.compile(r"\\binom\s*(\d)\s*(\d)"), r"\\binom{\1}{\2}"),
    (re.compile(r"\{\s*(\w+)\s*\\choose\s*(\w+)\s*\}"), r"\\binom{\1}{\2}"),
    (re.compile(r"\\sqrt\s*(\d+|[A-Za-z])"), r"\\sqrt{\1}"),
    (re.compile(r"\\sqrt\s+\{"), r"\\sqrt{"),
]
_EMPHASIS = re.compile(r"^(\*\*\*|\*\*|\*|__|_|`{1,3})(?=\S)(.*\S)\1$", re.DOTALL)
_CODE_BLOCK = re.compile(r"^```[a-z]*\s+(.*\S)\s*```$", re.DOTALL)
_HTML = re.compile(r"</?(?:b|i|em|strong|u|span|p|br|div|code)(?:\s[^<>]{0,100})?/?>", re.IGNORECASE)
_HTML_EXPONENT = re.compile(r"<sup>([^<>]{1,50})</sup>", re.IGNORECASE)
_DELIMITERS = [("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")]
_ENDING = " \t\n\r.,;?:"


def strip_markup(text: str) -> str:
    """Return a text without the emphasis, math delimiters, and punctuation around it."""
    previous = None
    while text != previous:
        previous = text
        text = text.strip()
        if text.endswith((".", ",", ";", "?", ":")) and not text.endswith(("...", r"\,", r"\;", r"\:")):
            text = text.rstrip(_ENDING)
        text = text.removesuffix("\\\\").removesuffix("\\ ")
        if code_block := _CODE_BLOCK.match(text):
            text = code_block[1]
        if emphasis := _EMPHASIS.match(text):
            text = emphasis[2]
        for opening, closing in _DELIMITERS[1:]:  # one of a pair
            if text.endswith(closing) and opening not in text[: -len(closing)] and not text.endswith(r"\$"):
                text = text.removesuffix(closing).rstrip()
        for opening, closing in _DELIMITERS:
            inner = text[len(opening) : -len(closing)]
            if len(text) > len(opening) + len(closing) and text.startswith(opening) and text.endswith(closing):
                if "$" not in inner.replace(r"\$", "") and opening not in inner.replace(r"\$", ""):
                    text = inner
    return text


def _overline(match: re.Match) -> str:
    """Return `0.3636\\ldots` as `0.\\overline{36}`."""
    return rf"{match[1] or '0'}.{match[2]}\overline{{{match[3]}}}"


def normalize(text: str) -> str:
    """Return an answer as LaTeX with one spelling per meaning: plain characters, no sizing, spacing, or emphasis.
    Texts of more than `MAX_LENGTH` characters are returned as they are."""
    if len(text) > MAX_LENGTH:
        return text
    text = _without_markup(text)
    text = _with_plain_separators(text)
    text = _without_layout(text)
    text = _with_one_font(text)
    text = _CURRENCY_CODE.sub(lambda match: _CURRENCY_CODES[match[1].lower()], text)
    text = _CENTS_BEFORE_NUMBER.sub(r"\1 cents", text)
    text = _with_union(_ALTERNATIVE_IN_BRACKETS.sub(r", \1", text))
    text = _CONNECTIVE.sub(", ", text)
    for pattern, replacement in _LATEX_SYNONYMS:
        text = pattern.sub(replacement, text)
    text = strip_markup(_SPACES.sub(" ", text))
    text = _REPEATING_DECIMALS.sub(_overline, text)
    text = _HEDGE.sub("", text)
    if _DECIMAL_NUMBER.match(text):
        text = _CUT_DECIMALS.sub("", text)
    return _with_digits(text)


def _without_markup(text: str) -> str:
    """Return a text in plain characters, without HTML, Markdown, and delimiters around it."""
    text = _HTML_EXPONENT.sub(r"^{\1}", _CONTROL.sub("", text))
    text = strip_markup(_MARK_OF_CONCLUSION.sub("", _HTML.sub("", text)))
    text = strip_markup(ascii_notation(text))
    return text if text.isascii() else _COPULA.sub("", latin_numerals(text))


def _with_plain_separators(text: str) -> str:
    """Return a text without the thousands separators of LaTeX and code, and with points for decimal commas."""
    if r"\begin" not in text:
        text = text.replace("\\\\(", "(")
    text = _THOUSANDS_IN_LATEX.sub("", text)
    text = _APOSTROPHE_BEFORE_THOUSANDS.sub("", text)
    text = _THOUSANDS_IN_CODE.sub(lambda match: match.group().replace("_", ""), text)
    return _DECIMAL_COMMA_IN_LATEX.sub(".", text)


def _without_layout(text: str) -> str:
    """Return a text without sizes, colors, frames, inner delimiters, and spacing, and with single backslashes."""
    text = _STARRED_ENVIRONMENT.sub(r"\1}", text)
    text = _COLOR.sub("", _SIZING.sub("", text))
    text = _FRAME.sub(r"\1", _FRAME.sub(r"\1", text))  # at most one in another
    text = _ONLY.sub("", _MARK_AT_END.sub("", text))
    text = _FORMULAS.sub(r"\1", text)
    text = _HEDGE.sub("", text)
    if r"\\begin" in text:
        text = text.replace("\\\\", "\\")
    elif r"\begin" not in text:
        text = _DOUBLE_BACKSLASH.sub(r"\\", text)
    return _SPACES.sub(" ", _SPACING.sub(" ", text))


def _with_one_font(text: str) -> str:
    """Return a text with `\\text` for every font, around words only."""
    text = _TEXT_WITHOUT_BRACES.sub("", _FONT.sub(r"\\text", text))
    text = _MINUS_IN_TEXT.sub(r"\\text{-", _MINUS_IN_WORDS.sub("-", text))
    return _FONT_AROUND_MATH.sub(lambda match: f" {next(filter(None, match.groups()), '')} ", text)


def _with_union(text: str) -> str:
    """Return two inequalities for one variable with "or" between them as a union; others unchanged."""
    parts = _OR.split(text)
    is_union = len(parts) == 2 and all(map(_INEQUALITY.fullmatch, parts))
    is_union = is_union and len({*_VARIABLE.findall(parts[0]), *_VARIABLE.findall(parts[1])}) == 1
    return rf"{parts[0]} \cup {parts[1]}" if is_union else text


def _with_digits(text: str) -> str:
    """Return a number in English words, "thirteen", "thirteen (13)", or "thirteen apples", in digits, and a date as
    "June 20"."""
    words = _ONLY_TEXT.sub(r"\1", text)
    if date := _DATE.fullmatch(words):
        year = f", {date['year']}" if date["year"] else ""
        return rf"\text{{{date['month']} {date['day']}{year}}}"
    numeral, _, repetition = words.partition(" (")
    number = english_number(numeral)
    if repetition and repetition != f"{number})":
        return text
    if number is not None:
        return str(number)
    numeral, _, unit = text.partition(" ")
    number = english_number(numeral)
    is_quantity = number is not None and re.fullmatch(r"[A-Za-z ]+", unit)
    return f"{number} {unit}" if is_quantity else text


CURRENCY_UNITS = {"$": "dollar", "\u20ac": "euro", "\u00a3": "pound", "\u00a5": "yen", "\u20b9": "rupee"}
CURRENCY_UNITS |= {symbol: symbol for symbol in CURRENCIES if symbol not in CURRENCY_UNITS}
