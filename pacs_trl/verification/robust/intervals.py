"""Sets of real numbers as intervals: brackets, unions, inequalities in one variable, and the real line."""

import re
from fractions import Fraction
from itertools import permutations
from typing import Any

from sympy import oo

from .exact import is_equal_expression
from .leaves import Leaf, has_variables
from .quantities import is_name
from .values import Relation, Sequence, Union, read_value


# An interval: left end, whether it is open, right end, whether it is open. Ends are values of leaves or infinite.
_Interval = tuple[Any, bool, Any, bool]
_OPEN_END = {"<": True, ">": True, r"\leq": False, r"\geq": False}


def intervals_of(value: Any) -> list[_Interval] | None:
    """Return a set of real numbers as intervals: of intervals in brackets, unions, inequalities in one variable, and
    `x \\in`; `None` for other values."""
    if isinstance(value, Union):
        return _joined([intervals_of(part) for part in value.parts])
    if isinstance(value, Relation):
        return _intervals_of_relation(value)
    if isinstance(value, Leaf) and re.sub(r"\\text|[\s{}]", "", value.text).lower() in _REAL_LINE:
        return [(-oo, True, oo, True)]
    if isinstance(value, Leaf) and (difference := _WITHOUT_POINTS.match(value.text)):
        base = intervals_of(read_value(difference[1], True))
        return None if base is None else _without_points(base, difference[2].split(","))
    if isinstance(value, Sequence):
        if value.brackets == "" and value.items and all(isinstance(item, Relation) for item in value.items):
            return _intervals_of_relations(value.items)
        if len(value.items) == 2 and value.brackets in ("()", "[]", "(]", "[)"):
            left, right = (_end(item) for item in value.items)
            if left is not None and right is not None:
                return [(left, value.brackets[0] == "(", right, value.brackets[1] == ")")]
    return None


def _intervals_of_relations(relations: tuple[Relation, ...]) -> list[_Interval] | None:
    """Return the union of inequalities for one name. Two whose union is the real line are meant as an intersection:
    `x > -1, x < 4`."""
    names = {side for relation in relations for side in relation.sides if is_name(side)}
    if len(names) > 1 or any("=" in relation.operators for relation in relations):
        return None
    intervals = _joined([intervals_of(relation) for relation in relations])
    if intervals is not None and len(intervals) == len(relations) == 2:
        below, above = intervals if intervals[0][0] == -oo else intervals[::-1]
        (left, _, upper, upper_open), (lower, lower_open, right, _) = below, above
        if (
            left == -oo
            and right == oo
            and isinstance(lower, Fraction)
            and isinstance(upper, Fraction)
            and lower < upper
        ):
            return [(lower, lower_open, upper, upper_open)]
    return intervals


_REAL_LINE = {r"\mathbbr", "allrealnumbers", "allreals", "allrealvalues", "realnumbers", "\u5168\u4f53\u5b9e\u6570"}
_WITHOUT_POINTS = re.compile(r"^(.+?)(?:\\setminus|\\backslash|-)\s*\\\{([^{}]*|\\frac.*)\\\}$")


def _without_points(intervals: list[_Interval], texts: list[str]) -> list[_Interval] | None:
    """Return intervals without some points inside the last of them."""
    points = [_end(read_value(text)) for text in texts]
    if not all(isinstance(point, Fraction) for point in points):
        return None
    for point in sorted(points):
        left, left_open, right, right_open = intervals[-1]
        if not _is_below(left, point) or not _is_below(point, right):
            return None
        intervals = [*intervals[:-1], (left, left_open, point, True), (point, True, right, right_open)]
    return intervals


def _is_below(left: Any, right: Any) -> bool:
    return left == -oo or right == oo or bool(left < right)


def _joined(parts: list[list[_Interval] | None]) -> list[_Interval] | None:
    intervals: list[_Interval] = []
    for part in parts:
        if part is None:
            return None
        intervals += part
    return intervals


def _end(item: Any) -> Any:
    if not isinstance(item, Leaf) or item.value is None or has_variables(item.value):
        return None
    return item.value


def _intervals_of_relation(relation: Relation) -> list[_Interval] | None:
    sides, operators = relation.sides, relation.operators
    if operators == (r"\in",):
        return intervals_of(read_value(sides[1], True))
    if operators == (r"\neq",) and is_name(sides[0]):
        end = _end(read_value(sides[1]))
        return None if end is None else [(-oo, True, end, True), (end, True, oo, True)]
    if not all(operator in _OPEN_END for operator in operators):
        return None
    if len(sides) == 2 and (inside := _ABSOLUTE_VALUE.match(sides[0])):
        summand = Fraction((inside[1] or "0").replace(" ", ""))
        return _intervals_of_absolute_value(operators[0], summand, _end(read_value(sides[1])))
    is_rising = [operator in ("<", r"\leq") for operator in operators]
    if len(set(is_rising)) > 1:
        return None
    if not is_rising[0]:
        sides, operators = sides[::-1], operators[::-1]
    if len(sides) == 2:
        if is_name(sides[0]) and (end := _end(read_value(sides[1]))) is not None:
            return [(-oo, True, end, _OPEN_END[operators[0]])]
        if is_name(sides[1]) and (end := _end(read_value(sides[0]))) is not None:
            return [(end, _OPEN_END[operators[0]], oo, True)]
        return None
    if len(sides) == 3 and is_name(sides[1]):
        left, right = _end(read_value(sides[0])), _end(read_value(sides[2]))
        if left is not None and right is not None:
            return [(left, _OPEN_END[operators[0]], right, _OPEN_END[operators[1]])]
    return None


_ABSOLUTE_VALUE = re.compile(r"^(?:\||\\l?vert)\s*[A-Za-z]\s*([-+]\s*\d+(?:\.\d+)?)?\s*(?:\||\\r?vert)$")


def _intervals_of_absolute_value(operator: str, summand: Fraction, bound: Any) -> list[_Interval] | None:
    """Return the solutions of `|x + summand| < bound`, or of another relation, for a positive bound."""
    if not isinstance(bound, Fraction) or bound <= 0:
        return None
    is_open = _OPEN_END[operator]
    left, right = -summand - bound, -summand + bound
    if operator in ("<", r"\leq"):
        return [(left, is_open, right, is_open)]
    return [(-oo, True, left, is_open), (right, is_open, oo, True)]


def is_same_intervals(gold: list[_Interval], answer: list[_Interval]) -> bool:
    if len(gold) != len(answer) or len(gold) > 6:
        return False
    return any(
        all(
            left[1] == right[1]
            and left[3] == right[3]
            and _same_end(left[0], right[0])
            and _same_end(left[2], right[2])
            for left, right in zip(gold, order)
        )
        for order in permutations(answer)
    )


def _same_end(left: Any, right: Any) -> bool:
    return is_equal_expression(left, right, None, None)
