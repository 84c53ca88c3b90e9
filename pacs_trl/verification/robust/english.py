"""Words of English sentences: whether a sentence states the number in it, or another one."""

import re

from .number_words import is_numeral


# Words that make another number of the one in a sentence, or none.
_OTHER_VALUE = frozenset(
    """
    not no never neither nor or but cannot cant without except excluding excludes besides apart wrong incorrect false
    undefined unknown insufficient unable undetermined indeterminate whether if unless unclear

    maybe perhaps might possibly probably guess about approximately around roughly nearly almost close closer closest
    near approaches

    than least most minimum maximum over under below above beyond before after until between among within exceed
    exceeds exceeding up down more less fewer greater larger smaller bigger longer shorter short past

    half halves twice double doubled triple tripled third thirds fourth fourths fifth fifths quarter quarters squared
    cube cubed power exponent root sqrt log logarithm ln exp sin cos tan pi factorial reciprocal inverse opposite
    negative plus minus add added subtract subtracted times multiplied divided dividing sum difference product quotient
    modulo mod multiple multiples factor factors divisor divisors divisible remainder from by increase increased
    decrease decreased extra additional another complement dozen

    each per every apiece step steps case cases part
    """.split()
)
# A sentence with one of these, and none of other languages, is taken for English.
_ENGLISH_WORDS = frozenset(
    """
    the there it this that these those they she he we you i has have had is are was were will be so total
    sold sells sell bought buys buy need needs earned earns paid pays spent spends made makes gets got used uses
    """.split()
)
_FOREIGN_WORDS = frozenset(
    "de del di du des la el los las le les il lo der die das dem den ein eine von als dan het een que y et und".split()
)
_WORD = re.compile(r"[^\W\d_]+")
# "half of 72" is not 72, but "a total of 72" is.
_TAKEN_OF = re.compile(r"\bof\s+(?:the\s+)?$", re.IGNORECASE)
_NAMED_OF = re.compile(r"\b(?:total|value|answer|result)\s+of\s+$", re.IGNORECASE)
# A total or another result in Chinese, as in 小明有, and what makes another number of it; 小明 and others are names.
_CHINESE_RESULT = re.compile(r"[\u4e00-\u9fff]{0,8}(?:一共|总共|有|是|需要|花|用|剩|得)[\u4e00-\u9fff]{0,3}\s*")
_CHINESE_OTHER_VALUE = re.compile(
    r"小(?![明红华丽刚强军芳亮东李王张林])|[或不没非无未少多大超过于约近至最比差半倍根方积商余每各加减乘除前后吗两二三四五六七八九十百千万亿错误假]"
)


def changes_value(words: str) -> bool:
    """Whether one of the words denies, qualifies, bounds, or distributes a number, computes another one from it, or is
    a number."""
    if re.search(r"n['\u2019]t\b|\bsquares?\s+of\b", words, re.IGNORECASE):
        return True
    return any(word in _OTHER_VALUE or is_numeral(word) for word in _WORD.findall(words.lower()))


def states_value(before: str, after: str) -> bool:
    """Whether the words before and after a number state it: in English none of them changes the value, in Chinese
    they say 一共 ("in total") or another such word, and in other languages they are not understood."""
    words = before + " " + after
    if not words.isascii():
        words = words.replace("\u2019", "'")
    if words.isascii():
        parts = set(_WORD.findall(words.lower()))
        is_english = bool(parts & _ENGLISH_WORDS) and not parts & _FOREIGN_WORDS
        is_taken_of = _TAKEN_OF.search(before) and not _NAMED_OF.search(before)
        return is_english and not is_taken_of and not changes_value(words)
    return bool(_CHINESE_RESULT.fullmatch(before.lstrip())) and not _CHINESE_OTHER_VALUE.search(words)
