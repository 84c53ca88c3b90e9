"""Extraction of the final answer from a completion: tags, boxes, answer phrases, and the last formula or number.

Every step takes time linear in the length of the completion.
"""

import re
from typing import NamedTuple

from .last_values import (
    OPEN_EQUATION,
    ROUNDED_AFTER,
    last_match,
    last_position_of_value,
    last_values,
    value_of_sentence,
)


_END_OF_THOUGHT = re.compile(
    r"</(?:think|thinking|thought|reasoning)>|<\|end_of_thought\|>|\u25c1/think\u25b7|\[/THINK\]"
)
_ANSWER_TAG = re.compile(r"<(/?)(?:answer|final_answer|solution)>|<\|(begin|end)_of_solution\|>", re.IGNORECASE)

# A box and its brace, a bare box, or a brace. JSON turns the backslash and the b of `\boxed` into a backspace.
_BOX_OR_BRACE = re.compile(
    r"(?P<box>(?:\\|\x08o?)(?:[bB]oxed|f?box|fboxed|framebox|xed)\s*(?:\[[^\[\]]{0,20}\])?\s*\{)"
    r"|(?P<bare>\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*)"
    r"|(?P<escape>\\[{}\\])"
    r"|[{}]"
)
_BARE_CONTENT = re.compile(
    r"[-+]?\\?\$?\d+(?:[.,/]\d+)*|[A-Z](?![A-Za-z])|-?\\[dt]?frac\s*\{[^{}]*\}\s*\{[^{}]*\}|-?\\sqrt\s*\{[^{}]*\}"
    r"|-?\d*\\[A-Za-z]+|[a-z](?![A-Za-z])"
)
_MINUS_BEFORE_BOX = re.compile(r"(?:^|[=($\[:]|\bis)\s*\$?-\s*\$?$")

_CORRECTION = re.compile(
    r"\b(?:wait|no|actually|correction|instead|rather|sorry|mistake|wrong|hmm|recheck|however|but|oops|final)\b", re.I
)
_SENTENCE_END = re.compile(r"[.!?\u3002\uff01\uff1f]\s|[.!?\u3002]$|\n")
_WORD = re.compile(r"[^\W\d_]+")


# Tokens that end a turn, and tags of thoughts around text that has no other answer.
_TOKENS = re.compile(r"<\|[^<>|\n]{1,30}\|>|</?s>|</?(?:think|thinking|thought|reasoning)>")


class FinalAnswers(NamedTuple):
    """`texts` are the answers; `unmarked` is the text that ends with them if no tag, box, or phrase marks them, and
    `in_sentence` the value of an answer that is a sentence, as in "There are 5 apples"."""

    texts: list[str]
    unmarked: str = ""
    in_sentence: str = ""


class _Box(NamedTuple):
    start: int
    end: int
    content: str | None  # `None` if it is not closed


def _boxes(text: str) -> list[_Box]:
    """Return the outermost boxes of a text, in order. A box that is never closed ends the list."""
    boxes = []
    open_boxes: list[tuple[int, int] | None] = []  # for each open brace start of the box and of its content
    num_open = 0
    skip_to = 0
    for match in _BOX_OR_BRACE.finditer(text):
        if match.start() < skip_to or match["escape"]:
            continue
        if match["box"]:
            open_boxes.append((match.start(), match.end()))
            num_open += 1
        elif match["bare"] is not None:
            content = _BARE_CONTENT.match(text, match.end())
            if num_open == 0 and content:
                boxes.append(_Box(match.start(), content.end(), content.group()))
                skip_to = content.end()
        elif match.group() == "{":
            open_boxes.append(None)
        elif open_boxes:
            box = open_boxes.pop()
            if box is not None:
                num_open -= 1
                if num_open == 0:
                    boxes.append(_Box(box[0], match.end(), text[box[1] : match.start()]))
    first_open = next((box for box in open_boxes if box is not None), None)
    if first_open is not None:
        boxes = [box for box in boxes if box.start < first_open[0]]
        boxes.append(_Box(first_open[0], len(text), None))
    return boxes


def _boxed_answers(text: str, boxes: list[_Box]) -> list[str]:
    """Return the content of the last box and of those listed with it: no sentence that corrects them in between."""
    last = boxes[-1]
    if last.content is None or not last.content.strip():
        return []
    listed = [last]
    for box in reversed(boxes[:-1]):
        between = text[box.end : listed[0].start]
        if box.content is None or _separates(between):
            break
        listed.insert(0, box)
    contents = []
    for box in listed:
        content = (box.content or "").strip()
        if _MINUS_BEFORE_BOX.search(text[max(0, box.start - 10) : box.start]):
            content = f"-{content}"
        if content and content not in contents:
            contents.append(content)
    return contents


def _separates(between: str) -> bool:
    """Whether the text between two boxes starts another statement of the answer."""
    if len(between) > 400:
        return True
    num_words = len(_WORD.findall(between))
    return bool(_SENTENCE_END.search(between)) and (num_words > 3 or bool(_CORRECTION.search(between)))


_IS = r"\s(?:is|are|was|would\sbe|should\sbe|equals)(?![a-z])"
# What the answer belongs to, which may be an equation, as in "the solution to 2x = 10 is".
_OBJECT = rf"s?(?![a-z])(?:\s(?:to|of|for)\s(?:(?!{_IS})[^.\n:?]){{1,60}}?)?(?:\*\*|\s|\}})*"
_COLON = rf"(?:[:\uff1a]|=(?![^.\n:]{{0,60}}{_IS}))"
_NOT = r"(?:\s(?:thus|therefore|then|simply|indeed)(?![a-z]))?(?!\snot(?![a-z]))"
# What heads a solution, whose steps are no answer, and an option, which need not be the right one.
_HEADINGS = [
    rf"(?<![a-z])(?:answer|result|solution){_OBJECT}\s(?:is|are)\sas\sfollows\s*[:\uff1a]",
    rf"(?<![a-z])(?:result|solution){_OBJECT}{_COLON}",
    rf"(?<![a-z])(?<!correct\s)(?<!right\s)(?<!best\s)(?P<choice>choice|option){_OBJECT}(?:{_IS}|{_COLON}){_NOT}"
    r"(?=[^\w\n]*\d)",
    r"(?:结果)\s*(?:：|:)",
    r"(?<!\w)(?:lösung|ergebnis)\s*[:=]",
]
_PHRASES = [
    rf"(?<![a-z])(?:answer|choice|option){_OBJECT}(?:{_IS}|{_COLON}){_NOT}",
    rf"(?<![a-z])(?:result|solution){_OBJECT}{_IS}{_NOT}",
    r"(?:###?\s*|\*\*)(?:final\s)?answer(?:\*\*)?\s*\n",
    r"####(?=\s*[^\s#])",
    # Chinese, Japanese, Korean
    r"(?:故选|应选|故答案为|综上)\s*[:：]?\s*(?=\S)",
    r"(?:答案|答|结果|答え|정답|답)\s*(?:为|是|应为|应该是|は|은|는|：|:)",
    # French, Spanish, Portuguese, Italian
    r"(?<!\w)(?:r[eé]ponse|respuesta|resposta|risposta)(?:\s(?:finale?|correcte?a?|final))?\s*(?:est|es|é|è|:|=)(?!\w)",
    # German, Dutch, Swedish, Finnish, Polish, Czech, Turkish, Indonesian, Vietnamese
    r"(?<!\w)(?:antwort|lösung|ergebnis|antwoord|svar(?:et)?|vastaus|odpowiedź|odpověď|cevap|jawaban(?:nya)?|đáp\s(?:án|số))"
    r"\s*(?:ist|lautet|is|är|on|to|je|adalah|là|:|=)",
    # Russian, Ukrainian, Arabic, Hindi
    r"(?<!\w)(?:ответ|відповідь)\s*(?::|—|-|=|равен)?\s",
    r"(?:الإجابة|الجواب)\s*(?:هي|هو|:)",
    r"उत्तर\s*(?:है|:)",
]
_PHRASE = re.compile(
    "(?:(?P<heading>" + "|".join(_HEADINGS) + ")|" + "|".join(_PHRASES) + r")\s*[:：]?\s*", re.IGNORECASE
)
_FIRST_STEP = re.compile(r"[\s*]*1[.)][ \t]+\S")
_SECOND_STEP = re.compile(r"^[ \t]*(?:\*\*)?2[.)][ \t]", re.MULTILINE)
_SECOND_STEP_IN_LINE = re.compile(r"(?<!\S)(?:\*\*)?2[.)]\s")
_LONG_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{4}")
_LETTER = re.compile(r"[\s*$(]*[A-J](?:[).:*$\s]*$|[).:])")
_DELIMITERS = re.compile(r"[\s*$]|\\[\[\]()]")
_NAME_BEFORE = re.compile(
    r"^(?:[A-Za-z]\w*|\([A-Za-z](?:, ?[A-Za-z])*\)) ?(?:[=<>\u2264\u2265]|\\(?:le|ge)q?(?![a-z]))"
)
_VALUE = re.compile(r"(?![A-Za-z]{2}|[A-Za-z] [A-Za-z]).*(?:\d|\\[A-Za-z])|[A-Za-z]$|no solutions?$")
_OPERATION_ON_NUMBERS = re.compile(r"=|\d ?[+*\u00d7\u00f7] ?\d|\d [-/] \d|\\(?:times|cdot|div)(?! ?10 ?\^)")
_WORD_OF_TEXT = re.compile(r"(?<![\\A-Za-z])[^\W\d_]{2,}")
# What follows the answer in its sentence.
_AFTERTHOUGHT = re.compile(
    r"\s*(?:,\s*)?(?:\b(?:because|since|as\s(?:we|it|the)|which|where|so\sthat|hence|therefore|I\shope)\b"
    r"|\((?:because|since|as|which)\b|\u56e0\u4e3a)",
    re.I,
)
_REMARK = re.compile(r"(?<=\S)\s+\((?=[^()]*[A-Za-z]{2})[^()$\\]{1,100}\)\s*$")  # as in `5 (five)`
# As in "A, not B" and "17 instead of 18".
_REJECTED_VALUE = re.compile(r"(?:,\s+(?:and\s+)?not|\s(?:instead\s+of|rather\s+than))\s[^,\n]{1,100}$")
_SPACE = re.compile(r"\s*")
_ENVIRONMENT = re.compile(r"\\begin(\{(?:align|aligned|gather|gathered|cases)\*?\})")
_END_OF_STATEMENT = re.compile(r"(?<=[^\d\s])\.(?=\s|$)|(?<=\d)\.(?=\s|$)|[\u3002\uff01]|\n|!(?=\s)|;\s")


def _split_statement(text: str, start: int) -> tuple[str, int]:
    """Return the statement that starts at a position, and where it ends: the first sentence or line, but the whole of
    bold text and of a formula in delimiters."""
    start = _SPACE.match(text, start).end()  # type: ignore[union-attr]
    for emphasis in ("***", "**"):
        if text.startswith(emphasis, start):
            first = start + len(emphasis)
            end = text.find(emphasis, first)
            closed = text[first:end].strip()
            if end > 0 and closed and "\n" not in closed:
                return closed, end
            if end != first:
                start = _SPACE.match(text, first).end()  # type: ignore[union-attr]
    for opening, closing in (("$$", "$$"), (r"\[", r"\]")):
        first = start + len(opening)
        if text.startswith(opening, start) and (end := text.find(closing, first)) > 0:
            return text[first:end], end + len(closing)
    if (environment := _ENVIRONMENT.match(text, start)) and (end := text.find(rf"\end{environment[1]}", start)) > 0:
        end += len(rf"\end{environment[1]}")
        return text[start:end], end
    stop = _END_OF_STATEMENT.search(text, start)
    end = stop.start() if stop else len(text)
    return _without_remarks(text[start:end]), end


def _without_remarks(statement: str) -> str:
    """Return a statement without what follows the answer in its sentence."""
    if statement.count("**") % 2 and statement.rstrip().endswith("**"):  # the phrase stands in bold text, too
        statement = statement[: statement.rfind("**")]
    if afterthought := _AFTERTHOUGHT.search(statement):
        statement = statement[: afterthought.start()]
    statement = _REJECTED_VALUE.sub("", ROUNDED_AFTER.sub("", _REMARK.sub("", statement)))
    if re.search(r"[\w)]!\s*$", statement) and "$" not in statement:
        statement = statement.rstrip().removesuffix("!")  # an exclamation, not a factorial
    return statement


_RIGHT_CHOICE = re.compile(
    r"(?:option|choice|statement)\s*\(?([A-J])\)?\s+is\s+(?:the\s+)?(?:correct|right|true)", re.I
)


def _answer_in(text: str) -> FinalAnswers:
    """Return the final answer of a text without thoughts and tags."""
    boxes = _boxes(text)
    if boxes:
        answers = _boxed_answers(text, boxes)
        return FinalAnswers(answers, in_sentence=value_of_sentence(answers[0]) if len(answers) == 1 else "")
    end = _TOKENS.sub("\n", text[-20_000:])
    answer = _stated_answer(end)
    if answer is not None:
        return answer
    if choice := last_match(_RIGHT_CHOICE, end):
        return FinalAnswers([choice[1]])
    return FinalAnswers(last_values(end), unmarked=end)


def _stated_answer(text: str) -> FinalAnswers | None:
    """
    Return what follows the last phrase such as "the answer is"; `None` without a phrase.

    "Solution:", "Result:", and a number after "option" or "choice" are headings, which count only if an answer stands
    under them. A numbered list of steps states nothing.
    """
    phrases = list(_PHRASE.finditer(text))
    if phrases and phrases[-1]["heading"] and not _is_answer_under_heading(text, phrases[-1]):
        phrases = [phrase for phrase in phrases if not phrase["heading"]]
    if not phrases:
        return None
    start = phrases[-1].end()
    statement, end = _split_statement(text, start)
    if _is_list_of_steps(text, start) or not statement.strip(" *$.:\n"):
        return None
    if OPEN_EQUATION.search(statement):
        return FinalAnswers([])
    is_last_value = end >= last_position_of_value(text)
    return FinalAnswers([statement], in_sentence=value_of_sentence(statement) if is_last_value else "")


def _is_list_of_steps(text: str, start: int) -> bool:
    """Whether a line begins with "1." at a position, and a later one with "2."."""
    first = _FIRST_STEP.match(text, start)
    if first is None:
        return False
    line = text[text.rfind("\n", 0, first.end()) + 1 : first.end()]
    return bool(_FIRST_STEP.fullmatch(line) and _SECOND_STEP.search(text, start))


def _is_answer_under_heading(text: str, heading: re.Match) -> bool:
    """Whether a heading states a letter, a bare value on its line, or the last value, in no calculation in words."""
    statement, end = _split_statement(text, heading.end())
    if _LETTER.match(statement):
        return True
    is_on_line = "\n" not in heading.group() and text[heading.end() :].lstrip(" *")[:1] != "\n"
    is_option_of_several = heading["choice"] and text[: heading.start()].rstrip(" *")[-1:] not in ("", "\n")
    is_step = _FIRST_STEP.match(text, heading.end()) and _SECOND_STEP_IN_LINE.search(text, end)
    if is_on_line and not is_option_of_several and not is_step and _is_bare_value(statement):
        return True
    is_calculation_in_words = "=" in statement and _LONG_WORD.search(statement)
    return end >= last_position_of_value(text) and not is_calculation_in_words


def _is_bare_value(statement: str) -> bool:
    """Whether a statement is a value with at most a name before and two words after it, as in `x = 5` or "5 red
    apples"."""
    value = _NAME_BEFORE.sub("", _DELIMITERS.sub(" ", statement).strip(), count=1).strip().rstrip(".")
    is_value = _VALUE.match(value) and not _OPERATION_ON_NUMBERS.search(value)
    return bool(is_value) and len(_WORD_OF_TEXT.findall(value)) <= 2


def read_final_answers(text: str) -> FinalAnswers:
    """
    Return the final answer of a completion, several texts if boxes are listed beside each other: the last pair of
    answer tags, else the last boxes, else what follows the last phrase such as "the answer is", else the last formula
    or number.

    Thoughts in `<think>` count only if no answer follows them. An empty or unclosed box is no answer, whatever else
    the text contains.
    """
    thoughts = last_match(_END_OF_THOUGHT, text)
    if thoughts and text[thoughts.end() :].strip():
        answers = read_final_answers(text[thoughts.end() :])
        if answers.texts or answers.unmarked.strip() or _boxes(text[thoughts.end() :]):
            return answers
    opening = None
    for tag in _ANSWER_TAG.finditer(text):
        if tag[1] == "/" or tag[2] == "end":
            continue
        opening = tag
    if opening:
        closing = _ANSWER_TAG.search(text, opening.end())
        content = text[opening.end() : closing.start() if closing else len(text)]
        if not content.strip():
            return FinalAnswers([])
        if _boxes(content) or _PHRASE.search(content) or len(content) > 200:
            return _answer_in(content)
        return FinalAnswers([content], in_sentence=value_of_sentence(content))
    return _answer_in(text)


def final_answers(text: str) -> list[str]:
    return read_final_answers(text).texts
