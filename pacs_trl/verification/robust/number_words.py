"""Numbers in words: Chinese numerals such as 二十五 and English ones such as "twenty-five"."""

import re


_CHINESE_DIGITS = {character: value for value, character in enumerate("零一二三四五六七八九")}
_CHINESE_DIGITS |= {"〇": 0, "两": 2}
_CHINESE_POWERS = {"十": 10, "百": 100, "千": 1000}
_CHINESE_NUMBER = re.compile("(?:[零一二三四五六七八九〇两十百千万亿]+)")
_CHINESE_FRACTION = re.compile(
    "([零一二三四五六七八九〇两十百千万亿]+)分之([零一二三四五六七八九〇两十百千万亿]+|\\d+(?:\\.\\d+)?)"
)


def chinese_number(text: str) -> int | None:
    """Return the value of a Chinese numeral such as 二十五 or 一万二千; `None` for other texts."""
    if not _CHINESE_NUMBER.fullmatch(text):
        return None
    if all(character in _CHINESE_DIGITS for character in text):
        return int("".join(str(_CHINESE_DIGITS[character]) for character in text))
    total = section = digit = 0
    for character in text:
        if character in _CHINESE_DIGITS:
            digit = _CHINESE_DIGITS[character]
        elif character in _CHINESE_POWERS:
            section += (digit or 1) * _CHINESE_POWERS[character]
            digit = 0
        else:
            total = (total + section + digit) * (10_000 if character == "万" else 100_000_000)
            section = digit = 0
    return total + section + digit


_ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
_ONES += " seventeen eighteen nineteen"
_ENGLISH_NUMBERS = {word: value for value, word in enumerate(_ONES.split())}
_TENS = {
    word: 10 * value for value, word in enumerate("twenty thirty forty fifty sixty seventy eighty ninety".split(), 2)
}
_ENGLISH_NUMBERS |= _TENS
_ENGLISH_NUMBERS |= {
    f"{ten}-{one}": _TENS[ten] + _ENGLISH_NUMBERS[one] for ten in _TENS for one in _ONES.split()[1:10]
}
_ENGLISH_POWERS = {"hundred": 100, "thousand": 1000, "million": 1_000_000}


def is_numeral(word: str) -> bool:
    """Whether a lowercase word, such as "five", "hundred", or the "millions" of a plural, is a part of a numeral."""
    return any(each in _ENGLISH_NUMBERS or each in _ENGLISH_POWERS for each in (word, word.removesuffix("s")))


def english_number(text: str) -> int | None:
    """Return the value of an English numeral such as "twenty-five" or "two hundred and six"; `None` for others."""
    words = text.lower().split()
    if len(words) > 12:
        return None
    total = section = 0
    for word in words:
        if word in _ENGLISH_NUMBERS:
            section += _ENGLISH_NUMBERS[word]
        elif word == "hundred":
            section = (section or 1) * 100
        elif word in _ENGLISH_POWERS:
            total += (section or 1) * _ENGLISH_POWERS[word]
            section = 0
        elif word != "and":
            return None
    return total + section if words and words != ["and"] else None


def latin_numerals(text: str) -> str:
    """Return a text with digits in place of a leading Chinese numeral, and of Chinese fractions and percentages."""

    def fraction(match: re.Match) -> str:
        denominator, numerator = chinese_number(match[1]), chinese_number(match[2])
        top = match[2] if numerator is None else str(numerator)
        return f"{top}\\%" if denominator == 100 else rf"\frac{{{top}}}{{{denominator}}}"

    text = _CHINESE_FRACTION.sub(fraction, text)
    leading = _CHINESE_NUMBER.match(text)
    if leading and (value := chinese_number(leading.group())) is not None:
        text = f"{value}{text[leading.end() :]}"
    return text
