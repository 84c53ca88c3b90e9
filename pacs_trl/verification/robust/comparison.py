"""Comparison of an answer with a gold, kind by kind: choices, matrices, relations, sequences, ratios, and leaves."""

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from sympy import Add, Basic, Expr, Mul, pi

from .exact import is_carried_out, is_equal_expression, is_near, is_proportional, rational_value
from .intervals import intervals_of, is_same_intervals
from .leaves import Choice, Clock, Leaf, has_variables, parse_expression
from .quantities import combines_names, is_quantity, is_simple_quantity, names_in
from .units import read_unit
from .values import Based, Matrix, Ratio, Relation, Residue, Sequence, Union, read_value, with_other_variable


def is_equal(gold: Any, answer: Any) -> bool:
    """Whether an answer equals a gold. Not symmetric: the gold decides about units, percent, and brackets."""
    if isinstance(gold, Choice) or isinstance(answer, Choice):
        return _is_equal_choice(gold, answer)
    if isinstance(gold, Matrix) or isinstance(answer, Matrix):
        return _is_equal_matrix(gold, answer)
    gold_set, answer_set = intervals_of(gold), intervals_of(answer)
    if gold_set is not None and answer_set is not None:
        if is_same_intervals(gold_set, answer_set):
            return True
        # Pairs may be points, and inequalities may be written for other quantities: both are compared below.
        if type(gold) is not type(answer) or isinstance(gold, Union):
            return False
    if isinstance(gold, Relation) or isinstance(answer, Relation):
        return _is_equal_relation(gold, answer)
    if isinstance(gold, Union) and isinstance(answer, Union):
        return _is_permutation(gold.parts, answer.parts)
    if isinstance(gold, Sequence) or isinstance(answer, Sequence):
        return _is_equal_sequence(gold, answer)
    if isinstance(gold, Clock) or isinstance(answer, Clock):
        return _is_equal_clock(gold, answer)
    if isinstance(gold, Residue) or isinstance(answer, Residue):
        return _is_equal_residue(gold, answer)
    if isinstance(gold, Ratio) or isinstance(answer, Ratio):
        return _is_equal_ratio(gold, answer)
    if isinstance(gold, Based) or isinstance(answer, Based):
        return _is_equal_based(gold, answer)
    return isinstance(gold, Leaf) and isinstance(answer, Leaf) and _is_equal_leaf(gold, answer)


def _is_equal_leaf(gold: Leaf, answer: Leaf) -> bool:
    if gold.text == answer.text or _letter(gold) and _letter(gold) == _letter(answer):
        return True
    if gold.value is None or answer.value is None:
        return is_same_words(gold.text, answer.text)
    if answer.is_quotient and not gold.is_quotient:
        return False
    if not is_carried_out(answer.value) and is_carried_out(gold.value) and not has_variables(gold.value):
        return False
    if answer.is_percent and not gold.is_percent:
        return gold.unit is None and _same_value(gold, answer)
    if gold.is_percent and not answer.is_percent and answer.unit is None:
        return _same_value(gold, answer) or _same_value(gold, answer, Fraction(100))
    return (gold.is_percent == answer.is_percent) and _same_quantity(gold, answer)


def _same_quantity(gold: Leaf, answer: Leaf) -> bool:
    """Whether two numbers with their units are equal. A missing unit is the one of the other number, but multiples of
    pi without a unit are angles in radians."""
    gold_unit, answer_unit = gold.unit, answer.unit
    if _is_in_degrees(answer) and gold_unit is None and _is_multiple_of_pi(gold):
        return is_equal_expression(gold.value, _as_expression(answer) * pi / 180, None, None)
    if _is_in_degrees(gold) and answer_unit is None and _is_multiple_of_pi(answer):
        answer_unit = read_unit("radian")
    if gold_unit is None or answer_unit is None:
        return _same_value(gold, answer)
    if gold_unit.dimension == answer_unit.dimension:
        return _same_value(gold, answer, answer_unit.factor / gold_unit.factor)
    half_turn = Mul(180, 1 / pi, evaluate=False)
    if (gold_unit.dimension, answer_unit.dimension) == ("degree", "radian"):
        return is_equal_expression(gold.value, Mul(_as_expression(answer), half_turn, evaluate=False), None, None)
    if (gold_unit.dimension, answer_unit.dimension) == ("radian", "degree"):
        return is_equal_expression(Mul(_as_expression(gold), half_turn, evaluate=False), answer.value, None, None)
    return False


def _is_in_degrees(leaf: Leaf) -> bool:
    return leaf.unit is not None and leaf.unit.dimension == "degree"


def _is_multiple_of_pi(leaf: Leaf) -> bool:
    return isinstance(leaf.value, Basic) and leaf.value.has(pi)


def _as_expression(leaf: Leaf) -> Basic:
    value = leaf.value
    return value if isinstance(value, Basic) else Add(value.numerator, 0) / value.denominator


def _same_value(gold: Leaf, answer: Leaf, factor: Fraction = Fraction(1)) -> bool:
    """Whether the gold is the answer times a factor. Decimals count only without a factor, because a product has no
    number of decimals."""
    if factor == 1:
        return is_equal_expression(gold.value, answer.value, gold.num_decimals, answer.num_decimals)
    if isinstance(answer.value, Basic):
        product = Mul(factor.numerator, answer.value, evaluate=False) / factor.denominator
    else:
        product = answer.value * factor
    return is_equal_expression(gold.value, product, None, None)


_SAME_MEANING = [
    {"yes", "true", "correct"},
    {"no", "false", "incorrect"},
    {"nosolution", "nosolutions", "emptyset", "norealsolution", "norealsolutions", "doesnotexist", "none", "dne"},
    {"undefined", "dne", "doesnotexist"},
    {"infinitelymany", "infinitelymanysolutions", "infinity", "infty"},
    {"allrealnumbers", "allreals", "allrealvalues"},
]


VERDICTS = ("yes", "no", "true", "false")
_VERDICT = re.compile(
    r"^\s*(?:\\text\s*\{\s*)?(?:(yes|true)\s*[,.;:](?!.*\b(?:no|false)\b)|(no|false)\s*[,.;:](?!.*\b(?:yes|true)\b))\s*\S",
    re.IGNORECASE,
)


def _words(text: str) -> str:
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"^(?:the|an?|on)\s+", "", text.strip().lower())
    text = re.sub(r"(?<=\d)\s+(?=\d)", "_", text)  # `1 2` is not 12
    return re.sub(r"[\s.!,\"'\\]|\\ ", "", text).strip("-")


def is_same_words(gold: str, answer: str) -> bool:
    left, right = _words(gold), _words(answer)
    if not left or not right:
        return False
    if left in VERDICTS and (verdict := _VERDICT.match(answer)):  # "Yes, it is possible"
        right = (verdict[1] or verdict[2]).lower()
    return left == right or any(left in group and right in group for group in _SAME_MEANING)


def _is_equal_choice(gold: Any, answer: Any) -> bool:
    if isinstance(gold, Choice) and isinstance(answer, Choice):
        return gold.letter == answer.letter
    if isinstance(gold, Choice):
        if isinstance(answer, Leaf) and _letter(answer) == gold.letter:
            return True
        return is_equal(read_value(gold.text), answer)
    if isinstance(gold, Leaf) and _letter(gold):
        return answer.letter == _letter(gold)
    return is_equal(gold, read_value(answer.text)) and not isinstance(gold, Choice)


def _letter(leaf: Leaf) -> str:
    """Return the letter of a choice: of "B", "(b)", or "Option B"; empty for other leaves."""
    match = re.fullmatch(r"\(?(?:option|choice)?\(?([A-Ja-j])\)?", leaf.text.replace(" ", ""), re.IGNORECASE)
    return match[1].upper() if match else ""


def _is_equal_matrix(gold: Any, answer: Any) -> bool:
    if isinstance(gold, Matrix) and isinstance(answer, Matrix):
        gold_rows, answer_rows = gold.rows, answer.rows
        if [len(row) for row in gold_rows] != [len(row) for row in answer_rows]:
            return False
        return all(map(_all_equal, gold_rows, answer_rows))
    if isinstance(gold, Matrix) and isinstance(answer, Relation) and answer.operators[-1] == "=":
        return is_equal(gold, read_value(answer.sides[-1], True))
    if isinstance(gold, Matrix) and isinstance(answer, Sequence) and answer.brackets in ("()", "[]", "{}"):
        cells = [cell for row in gold.rows for cell in row]
        if all(isinstance(item, Sequence) for item in answer.items) and len(gold.rows) == len(answer.items):
            return all(_all_equal(row, item.items) for row, item in zip(gold.rows, answer.items))
        is_vector = len(gold.rows) == 1 or all(len(row) == 1 for row in gold.rows)
        return is_vector and answer.brackets != "{}" and _all_equal(cells, answer.items)
    if isinstance(gold, Sequence) and isinstance(answer, Matrix) and gold.brackets in ("()", "[]"):
        is_vector = len(answer.rows) == 1 or all(len(row) == 1 for row in answer.rows)
        return is_vector and _all_equal(gold.items, [cell for row in answer.rows for cell in row])
    if isinstance(gold, Relation) and gold.operators[-1] == "=":
        return is_equal(read_value(gold.sides[-1], True), answer)
    return False


def _all_equal(golds: Any, answers: Any) -> bool:
    return len(golds) == len(answers) and all(is_equal(gold, answer) for gold, answer in zip(golds, answers))


def _is_permutation(golds: tuple, answers: tuple) -> bool:
    """Whether each gold equals another answer, in any order."""
    if len(golds) != len(answers) or len(golds) > 200:
        return False
    left = list(answers)
    for gold in golds:
        match = next((index for index, answer in enumerate(left) if is_equal(gold, answer)), None)
        if match is None:
            return False
        del left[match]
    return True


def _is_equal_clock(gold: Any, answer: Any) -> bool:
    """Whether two times of day are equal; one of them may lack "a.m." and "p.m.", or count 24 hours."""
    gold_minutes, answer_minutes = _minutes(gold), _minutes(answer)
    if gold_minutes is None or answer_minutes is None:
        return False
    if isinstance(gold, Clock) and isinstance(answer, Clock):
        return gold_minutes == answer_minutes
    without_half = answer_minutes if isinstance(gold, Clock) else gold_minutes
    counts_24_hours = without_half >= 13 * 60
    period = 24 * 60 if counts_24_hours else 12 * 60
    return gold_minutes % period == answer_minutes % period


def _minutes(value: Any) -> int | None:
    if isinstance(value, Clock):
        return value.minutes
    if isinstance(value, Ratio) and _is_time(value.text):
        return int(value.parts[0] * 60 + value.parts[1])
    if isinstance(value, Leaf) and re.fullmatch(r"[1-9]|1[0-2]", value.text):
        return int(value.text) * 60
    return None


def _is_equal_residue(gold: Any, answer: Any) -> bool:
    """Whether two residues are equal; one of them may lack the modulus."""
    if isinstance(gold, Residue) and isinstance(answer, Residue):
        return gold.modulus == answer.modulus and is_equal(gold.value, answer.value)
    if isinstance(gold, Residue):
        return is_equal(gold.value, answer)
    return is_equal(gold, answer.value)


_UNORDERED = ("", "{}", "\u00b1")


# A point with its name, `P(3,-1)`, or the letters of several choices, `AC`.
_NAMED = re.compile(r"^(?:[A-Z]'?(?=\()|(?=[A-H]{2,6}$))(\(.*\)|[A-H]+)$")


def _sorted_letters(sequence: Sequence) -> list[str]:
    """Return the letters of a list of choices, sorted; empty if an item is no letter."""
    letters = [_letter(item) if isinstance(item, Leaf) else "" for item in sequence.items]
    return sorted(letters) if all(letters) and sequence.brackets in ("", "{}") else []


def _is_equal_sequence(gold: Any, answer: Any) -> bool:
    """Whether two values are equal, one or both of which are sequences."""
    if isinstance(gold, Sequence) and isinstance(answer, Sequence):
        return _is_same_sequence(gold, answer)
    if isinstance(gold, Sequence):
        return _is_sequence_without_brackets(gold, answer)
    return _is_value_in_sequence(gold, answer)


def _has_single_item(sequence: Sequence) -> bool:
    """Whether a sequence is a value in the brackets of a set or list, as `\\{5\\}`."""
    return len(sequence.items) == 1 and sequence.brackets in ("{}", "[]")


def _is_sequence_without_brackets(gold: Sequence, answer: Any) -> bool:
    """Whether an answer is the only item of a sequence, its letters, its point with a name, or the empty set."""
    if _has_single_item(gold):
        return is_equal(gold.items[0], answer)
    if not isinstance(answer, Leaf):
        return False
    if named := _NAMED.match(answer.text):
        return _sorted_letters(gold) == sorted(answer.text) or is_equal(gold, read_value(named[1], True))
    return not gold.items and is_same_words("emptyset", answer.text)


def _is_value_in_sequence(gold: Any, answer: Sequence) -> bool:
    """Whether a gold is the only item of a sequence, its letters, its point with a name, or the empty set."""
    if _has_single_item(answer):
        return is_equal(gold, answer.items[0])
    if not isinstance(gold, Leaf):
        return False
    if named := _NAMED.match(gold.text):
        return _sorted_letters(answer) == sorted(gold.text) or is_equal(read_value(named[1], True), answer)
    return not answer.items and is_same_words(gold.text, "emptyset")


def _is_same_sequence(gold: Sequence, answer: Sequence) -> bool:
    """Whether two sequences have equal items, in any order if both are lists or sets."""
    is_set_of_one = gold.brackets == "{}" and len(gold.items) == 1
    if is_set_of_one and answer.brackets != "{}":
        return is_equal(gold.items[0], answer)
    golds, answers = _flat(gold), _flat(answer)
    if gold.brackets in _UNORDERED and answer.brackets in _UNORDERED:
        return _is_permutation(_distinct(golds, gold), _distinct(answers, answer))
    return _brackets_agree(gold.brackets, answer.brackets, len(golds)) and _all_equal(golds, answers)


def _brackets_agree(gold: str, answer: str, num_items: int) -> bool:
    """Whether items in the brackets of an answer, at least one pair of which orders them, may be those in the brackets
    of a gold. Two items may be the ends of an interval, whose brackets count."""
    if gold == answer:
        return True
    if gold in _UNORDERED:
        return gold == "" and answer in ("()", "[]")
    if answer in ("", "\u00b1"):
        return gold == "()" or num_items != 2
    return answer != "{}" and num_items != 2


def _flat(sequence: Sequence) -> tuple:
    """Return the items of a sequence, with both values of each plus-minus sign, as in `3 \\pm 1, 7`."""
    items: list = []
    for item in sequence.items:
        is_pair = isinstance(item, Sequence) and (
            item.brackets == "\u00b1" or item.brackets == "{}" and not sequence.brackets
        )
        items += item.items if is_pair else [item]
    return tuple(items)


def _distinct(items: tuple, sequence: Sequence) -> tuple:
    """Return the items of a set without repetitions; lists keep theirs."""
    if sequence.brackets != "{}":
        return items
    distinct: list = []
    for item in items:
        if not any(is_equal(other, item) for other in distinct):
            distinct.append(item)
    return tuple(distinct)


def _is_equal_ratio(gold: Any, answer: Any) -> bool:
    if isinstance(gold, Ratio) and isinstance(answer, Ratio):
        if gold.text == answer.text:
            return True
        if _is_time(gold.text) and _is_time(answer.text) or len(gold.parts) != len(answer.parts):
            return gold.text.lstrip("0") == answer.text.lstrip("0")
        products = zip(gold.parts, answer.parts, strict=True)
        return 0 not in answer.parts and len({left / right for left, right in products}) == 1
    if isinstance(gold, Ratio):
        ratio = _quotient(gold)
        return ratio is not None and isinstance(answer, Leaf) and _is_equal_leaf(Leaf("", ratio), answer)
    ratio = _quotient(answer)
    return ratio is not None and isinstance(gold, Leaf) and _is_equal_leaf(gold, Leaf("", ratio))


def _quotient(ratio: Ratio) -> Any:
    return ratio.parts[0] / ratio.parts[1] if len(ratio.parts) == 2 and ratio.parts[1] else None


def _is_time(text: str) -> bool:
    return bool(re.fullmatch(r"\d{1,2}:[0-5]\d", text))


def _is_equal_based(gold: Any, answer: Any) -> bool:
    if isinstance(gold, Based) and isinstance(answer, Based):
        return gold == answer
    if isinstance(gold, Based):
        return isinstance(answer, Leaf) and answer.text.lstrip("0").upper() == gold.digits
    return answer.base == 10 and isinstance(gold, Leaf) and is_equal(gold, read_value(answer.digits))


def _is_equal_relation(gold: Any, answer: Any) -> bool:
    """Whether two relations are equal, or one of them states the value that the other is."""
    if isinstance(answer, Relation) and answer.operators[-1] == r"\approx":
        return _is_equal_approximation(gold, answer)
    if isinstance(gold, Relation) and isinstance(answer, Relation):
        return _is_same_relation(gold, answer)
    if isinstance(gold, Relation):
        return _is_value_in_gold(gold, answer)
    return _is_value_in_answer(gold, answer)


_ARGUMENT = re.compile(r"^([A-Za-z])\s*(?:\(\s*([a-z])\s*\)|_\s*\{?\s*([a-z])\s*\}?)$")


def _with_argument_of(gold: Relation, answer: Relation) -> Relation:
    """Return `f(t) = 2t` as `f(x) = 2x` if the gold is an equation for `f(x)`; other relations unchanged."""
    gold_function, answer_function = _ARGUMENT.match(gold.sides[0]), _ARGUMENT.match(answer.sides[0])
    if not (gold_function and answer_function) or gold_function[1] != answer_function[1]:
        return answer
    argument, other = answer_function[2] or answer_function[3], gold_function[2] or gold_function[3]
    sides = [with_other_variable(side, argument, other) for side in answer.sides]
    is_name_of_function = gold_function[1] in (argument, other)
    if argument == other or is_name_of_function or None in sides:
        return answer
    return Relation(tuple(side for side in sides if side is not None), answer.operators)


def _is_same_relation(gold: Relation, answer: Relation) -> bool:
    answer = _with_argument_of(gold, answer)
    gold_value, answer_value = _stated_value(gold), _stated_value(answer)
    if gold_value is not None and answer_value is not None:
        is_chain = len(gold.sides) > 2 or len(answer.sides) > 2
        if is_chain or _defined_name(gold) == _defined_name(answer):
            return is_equal(gold_value, answer_value)
    return _same_equation(gold, answer)


def _is_value_in_gold(gold: Relation, answer: Any) -> bool:
    if isinstance(answer, Sequence) and (point := _point(gold)) is not None:
        return is_equal(point, answer)
    gold_value = _stated_value(gold, is_simple_quantity)
    if isinstance(gold_value, Residue) and not isinstance(answer, Residue):
        return False  # `x \\equiv 3 \\pmod 7` is many numbers
    return gold_value is not None and is_equal(gold_value, answer)


def _is_value_in_answer(gold: Any, answer: Relation) -> bool:
    if isinstance(gold, Sequence) and (point := _point(answer)) is not None:
        return is_equal(gold, point)
    answer_value = _stated_value(answer)
    if answer_value is None and _states_combination(answer):
        answer_value = _read_side(answer.sides[1])
    return answer_value is not None and is_equal(gold, answer_value)


def _stated_value(relation: Relation, names_quantity: Callable[[str], bool] = is_quantity) -> Any:
    """Return the value that a relation states: `x = 3`, `E[X] = 3`, `12 = x`, `6 \\cdot 7 = 42`, `x = 6/2 = 3`, and
    `D \\in S`; `None` if it is an inequality or an equation to solve."""
    sides, operators = relation.sides, set(relation.operators)
    first, last = sides[0], sides[-1]
    if operators == {r"\in"} and len(sides) == 2:
        return read_value(last, True)
    if operators != {"="} or _is_line(sides) or _is_wrong_calculation(sides):
        return None
    is_chain = len(sides) > 2
    if is_chain or names_quantity(first):
        return _read_side(last)
    if names_quantity(last):
        return _read_side(first)
    return _read_side(last) if _is_calculation(first, last) else None


def _is_line(sides: tuple[str, ...]) -> bool:
    """Whether sides are the symmetric equations of a line, each with a variable of its own."""
    variables = [names_in(side) for side in sides]
    is_alone = all(len(names) == 1 for names in variables)
    return len(sides) > 2 and is_alone and len(set().union(*variables)) == len(sides)


# `\sin 30`, whose angle may be in degrees.
_SINE_OF_NUMBER = re.compile(r"\\(?:sin|cos|tan)(?![A-Za-z])(?!.*\\(?:pi|circ)(?![A-Za-z]))", re.DOTALL)


def _is_wrong_calculation(sides: tuple[str, ...]) -> bool:
    """Whether a number of a chain of equations differs from the last one by more than rounding, as in `2 + 2 = 5`.
    Numbers with a unit or in percent are not compared."""
    values = [_read_side(side) for side in sides if not _SINE_OF_NUMBER.search(side)]
    numbers = [value for value in values if isinstance(value, Leaf) and not value.is_percent and value.unit is None]
    return any(_contradicts(number, numbers[-1]) for number in numbers[:-1])


def _contradicts(number: Leaf, result: Leaf) -> bool:
    """Whether a number is neither equal to a result nor rounded to it. Two whole numbers must be equal."""
    if re.fullmatch(r"-?\d+", result.text) and (exact := rational_value(number.value)) is not None:
        if exact.denominator == 1:
            return exact != result.value
        if abs(exact - result.value) <= Fraction(1, 2) and abs(result.value) >= 10:
            return False
    is_different = is_near(number.value, result.value) is False
    return is_different and not is_equal_expression(number.value, result.value, None, None)


def _states_combination(relation: Relation) -> bool:
    """Whether an equation states the value of an expression of several names, as in `a+b = 12`, which is no equation
    for one of them."""
    if relation.operators != ("=",):
        return False
    left, right = relation.sides
    return combines_names(left) and not names_in(left) & names_in(right) and right.strip() != "0"


def _is_calculation(left: str, right: str) -> bool:
    """Whether the left side is a task without variables and the right one a number, as in `6 \\cdot 7 = 42`."""
    is_task = parse_expression(left) is not None or "," not in left and re.search(r"\d", left)
    result = _read_side(right)
    is_number = isinstance(result, Leaf) and not has_variables(result.value)
    return bool(is_task and not names_in(left) and is_number)


def _read_side(text: str) -> Any:
    is_list = text.strip()[:1] in ("(", "[", "\\") and "," in text
    return read_value(text, commas_separate=is_list)


_SINGLE_VARIABLE = re.compile(r"^[A-Za-z](?:_\{?\w\}?)?$")


def _point(relation: Relation) -> Sequence | None:
    """Return `x = y = 1` as the point (1, 1); `None` for other relations."""
    variables = relation.sides[:-1]
    if len(variables) < 2 or set(relation.operators) != {"="} or not all(map(_SINGLE_VARIABLE.match, variables)):
        return None
    return Sequence("()", (read_value(relation.sides[-1]),) * len(variables))


def _defined_name(relation: Relation) -> str:
    """Return the side of a relation that is a name, by default the first one; a function of `x` is `y`."""
    first, last = relation.sides[0], relation.sides[-1]
    name = re.sub(r"\s|\\cdot", "", last if is_quantity(last) and not is_quantity(first) else first)
    return "y" if name == "f(x)" else name


def _is_equal_approximation(gold: Any, answer: Relation) -> bool:
    """Whether the gold is one side of `5\\sqrt{5} \\approx 11.18`, whose sides must be near each other."""
    rounded = read_value(answer.sides[-1])
    if is_quantity(answer.sides[-2]):
        return is_equal(gold, rounded)
    exact = read_value(answer.sides[-2])
    if not (isinstance(exact, Leaf) and isinstance(rounded, Leaf) and is_near(exact.value, rounded.value)):
        return False
    return is_equal(gold, exact) or is_equal(gold, rounded)


_FLIPPED = {"<": ">", ">": "<", r"\leq": r"\geq", r"\geq": r"\leq", "=": "=", r"\neq": r"\neq"}


def _same_equation(gold: Relation, answer: Relation) -> bool:
    """Whether two equations or inequalities hold at the same points."""
    if _is_line(gold.sides) and _is_line(answer.sides):
        return _is_permutation(tuple(map(_read_side, gold.sides)), tuple(map(_read_side, answer.sides)))
    if len(gold.sides) != 2 or len(answer.sides) != 2:
        texts = [re.sub(r"\s", "", "".join(each.sides) + "".join(each.operators)) for each in (gold, answer)]
        return texts[0] == texts[1]
    gold_difference, answer_difference = _difference(gold), _difference(answer)
    if gold_difference is None or answer_difference is None:
        return gold == answer
    gold_operator, answer_operator = gold.operators[0], answer.operators[0]
    if gold_operator == answer_operator:
        is_two_sided = gold_operator in ("=", r"\neq")
        if is_two_sided and is_proportional(gold_difference, answer_difference):
            return True
        return is_equal_expression(gold_difference, answer_difference, None, None)
    if _FLIPPED.get(gold_operator) == answer_operator:
        return is_equal_expression(gold_difference, Mul(-1, answer_difference, evaluate=False), None, None)
    return False


def _difference(relation: Relation) -> Expr | None:
    """Return the left side minus the right one, not evaluated; `None` if one of them cannot be read."""
    left, right = (parse_expression(side) for side in relation.sides)
    if left is None or right is None:
        return None
    return Add(left, Mul(-1, right, evaluate=False), evaluate=False)
