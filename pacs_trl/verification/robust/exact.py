"""Comparison of numbers and expressions: exact where both sides are rational, else with sixty digits.

Sizes are bounded before anything is evaluated: the digits of `10^{10^{10}}` are never computed.
"""

import math
from fractions import Fraction
from typing import Any

import sympy
from sympy import Add, Basic, Expr, Float, Integer, Mul, Pow, Rational, UnevaluatedExpr, binomial, factorial


_MAX_BITS = 400_000  # about 120,000 digits
_DIGITS = 60
_EQUAL = sympy.Float("1e-40")


class TooLarge(ArithmeticError):
    """A number whose digits are not computed."""


def rational_value(expression: Any) -> Fraction | None:
    """Return the exact value of a rational number, or of sums, products, powers, factorials, and binomials of such;
    `None` for other expressions. Raises [`TooLarge`] before it computes more than `_MAX_BITS` bits."""
    if isinstance(expression, Fraction):
        return expression
    if isinstance(expression, Rational):
        return Fraction(int(expression.p), int(expression.q))
    if isinstance(expression, Float):
        return Fraction(str(expression)) if expression.is_finite else None
    if isinstance(expression, UnevaluatedExpr):
        return rational_value(expression.args[0])
    if not isinstance(expression, Add | Mul | Pow | factorial | binomial):
        return None
    arguments = []
    for argument in expression.args:
        value = rational_value(argument)
        if value is None:
            return None
        arguments.append(value)
    if isinstance(expression, Add):
        return sum(arguments, Fraction(0))
    if isinstance(expression, Mul):
        _refuse_large(sum(map(_bits, arguments)))
        return math.prod(arguments, start=Fraction(1))
    if isinstance(expression, Pow):
        base, exponent = arguments
        if exponent.denominator != 1 or base == 0 and exponent < 0:
            return None
        if exponent == 0:
            return Fraction(1)
        if base in (0, 1):
            return base
        if base == -1:
            return base ** (exponent.numerator % 2)
        _refuse_large(_bits(base) * abs(exponent.numerator))
        return base**exponent.numerator
    if any(argument.denominator != 1 or argument < 0 for argument in arguments):
        return None
    _refuse_large(max(arguments).numerator * 16)
    if isinstance(expression, factorial):
        return Fraction(math.factorial(arguments[0].numerator))
    return Fraction(math.comb(arguments[0].numerator, arguments[1].numerator))


def _bits(value: Fraction) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length()


def _refuse_large(bits: int) -> None:
    if bits > _MAX_BITS:
        raise TooLarge


_MAX_TOWER = 3


def _has_large_number(expression: Basic) -> bool:
    """Whether a part of an expression has too many digits to evaluate it: a power, a factorial, or a power tower."""
    try:
        if _tower_height(expression) > _MAX_TOWER:
            return True
        for part in sympy.preorder_traversal(expression):
            if isinstance(part, Pow | factorial | binomial):
                rational_value(part)
    except TooLarge:
        return True
    return False


def _tower_height(expression: Basic) -> int:
    """Return how many exponents of an expression stand above each other."""
    if isinstance(expression, sympy.exp):
        return 1 + _tower_height(expression.args[0])
    if isinstance(expression, Pow) and not isinstance(expression.exp, Rational):
        return 1 + _tower_height(expression.exp)
    return max((_tower_height(argument) for argument in expression.args), default=0)


def is_equal_number(gold: Fraction, answer: Fraction, gold_decimals: int | None, answer_decimals: int | None) -> bool:
    """
    Whether two numbers are equal, or one of them is the other rounded.

    Args:
        gold_decimals, answer_decimals (`int`, *optional*): Number of decimals with which the number is written; `None`
            for an exact one. The number with fewer decimals may be the other one rounded or cut off, if that moves it
            by less than five millionths of its size.
    """
    if gold == answer:
        return True
    if gold_decimals == answer_decimals or gold == 0 or answer == 0:
        return False
    num_decimals = min(each for each in (gold_decimals, answer_decimals) if each is not None)
    difference = abs(gold - answer)
    return difference < Fraction(10) ** -num_decimals and difference <= abs(gold) * Fraction(5, 1_000_000)


def is_equal_expression(gold: Any, answer: Any, gold_decimals: int | None, answer_decimals: int | None) -> bool:
    """Whether two values of leaves are equal: fractions or expressions of sympy."""
    if gold == answer:
        return True
    try:
        gold_number, answer_number = rational_value(gold), rational_value(answer)
    except TooLarge:
        return False
    if gold_number is not None and answer_number is not None:
        return is_equal_number(gold_number, answer_number, gold_decimals, answer_decimals)
    gold, answer = _sympified(gold), _sympified(answer)
    if _has_large_number(gold) or _has_large_number(answer):
        return False
    names = sorted(_names(gold) | _names(answer))
    if names:
        return _is_equal_function(gold, answer, names)
    return _is_equal_constant(gold, answer, gold_decimals, answer_decimals)


def _sympified(value: Any) -> Expr:
    value = Rational(value.numerator, value.denominator) if isinstance(value, Fraction) else value
    imaginary = {symbol: sympy.I for symbol in value.free_symbols if symbol.name == "i"}
    return value.xreplace(imaginary)


def _names(expression: Basic) -> set[str]:
    return {str(symbol) for symbol in expression.free_symbols} | {
        str(part) for part in expression.atoms(sympy.core.function.AppliedUndef)
    }


def _is_equal_constant(gold: Expr, answer: Expr, gold_decimals: int | None, answer_decimals: int | None) -> bool:
    left, right = _evaluate(gold), _evaluate(answer)
    if left is None or right is None:
        return False
    if gold_decimals is not None or answer_decimals is not None:
        if not (left.is_real and right.is_real):
            return False
        return is_equal_number(Fraction(str(left)), Fraction(str(right)), gold_decimals, answer_decimals)
    return _is_close(left, right)


def _evaluate(expression: Expr) -> Expr | None:
    if expression in (sympy.oo, -sympy.oo, sympy.zoo, sympy.nan):
        return None
    try:
        value = expression.evalf(_DIGITS, maxn=_DIGITS + 140)
    except (ValueError, TypeError, ArithmeticError, AttributeError, NotImplementedError, RecursionError):
        return None
    real, imaginary = value.as_real_imag()
    return value if real.is_Number and imaginary.is_Number and real.is_finite and imaginary.is_finite else None


def _is_close(left: Expr, right: Expr) -> bool:
    size = max(abs(left), abs(right))
    if size == 0:
        return True
    difference = abs((left - right).evalf(_DIGITS))
    return bool(difference <= _EQUAL * size)


# Points at which functions are compared: distinct irrational values of both signs for each variable. Functions with
# `floor` or `ceiling`, whose variables are whole numbers, are compared with each other at whole numbers.
_NUM_POINTS = 4
_NUM_WHOLE_POINTS = 8


def _points(names: list[str], has_steps: bool) -> list[dict[str, Expr]]:
    if has_steps:
        steps = range(_NUM_WHOLE_POINTS)
        return [{name: Integer(5 + step + 4 * index) for index, name in enumerate(names)} for step in steps]
    points = []
    for number in range(_NUM_POINTS):
        sign = -1 if number == 3 else 1
        points.append(
            {
                name: sign * sympy.Float(math.sqrt(2 + 3 * number + 7 * index) / 3 + index * 0.1, _DIGITS)
                for index, name in enumerate(names)
            }
        )
    return points


def _is_equal_function(gold: Expr, answer: Expr, names: list[str]) -> bool:
    if len(names) > 12:
        return False
    num_equal = 0
    has_steps = gold.has(sympy.floor, sympy.ceiling) and answer.has(sympy.floor, sympy.ceiling)
    for values in _points(names, has_steps):
        left, right = (_evaluate(_substitute(each, values)) for each in (gold, answer))
        if left is None and right is None:
            continue
        if left is None or right is None or not _is_close(left, right):
            return False
        num_equal += 1
    return num_equal >= 2


def _substitute(expression: Expr, values: dict[str, Expr]) -> Expr:
    functions = {part: values[str(part)] for part in expression.atoms(sympy.core.function.AppliedUndef)}
    expression = expression.xreplace(functions)
    return expression.xreplace({symbol: values[str(symbol)] for symbol in expression.free_symbols})


def is_near(exact: Any, rounded: Any) -> bool | None:
    """Whether a number is another one rounded to two digits or more; `None` if one of them cannot be evaluated."""
    if exact is None or rounded is None:
        return None
    exact, rounded = _sympified(exact), _sympified(rounded)
    if _has_large_number(exact) or _has_large_number(rounded) or exact.free_symbols or rounded.free_symbols:
        return None
    left, right = _evaluate(exact), _evaluate(rounded)
    if left is None or right is None:
        return None
    return bool(abs(left - right) <= abs(left) / 100)


def is_proportional(gold: Expr, answer: Expr) -> bool:
    """Whether two expressions differ by a constant factor other than zero, so that both vanish at the same points."""
    gold, answer = _sympified(gold), _sympified(answer)
    names = sorted(_names(gold) | _names(answer))
    if not names or _names(gold) != _names(answer) or _has_large_number(gold) or _has_large_number(answer):
        return False
    factor = None
    for values in _points(names, has_steps=False):
        left, right = (_evaluate(_substitute(each, values)) for each in (gold, answer))
        if left is None or right is None or left == 0 or right == 0:
            return False
        quotient = (left / right).evalf(_DIGITS)
        if factor is not None and not _is_close(factor, quotient):
            return False
        factor = quotient
    return True


def is_carried_out(expression: Any) -> bool:
    """Whether an expression contains no sum, product, or power of plain numbers, and no whole quotient of them:
    `54 + 3`, `6 \\cdot 7`, `2^{10}`, and `12/4` are tasks, not answers."""
    if not isinstance(expression, Basic):
        return True
    for part in sympy.preorder_traversal(expression):
        if isinstance(part, Add) and sum(_is_plain(argument) for argument in part.args) > 1:
            return False
        if isinstance(part, Mul):
            factors = [argument for argument in part.args if _is_plain(argument) and abs(argument) != 1]
            if len(factors) > 1:
                return False
        if isinstance(part, Pow) and _is_plain(part.base) and _is_plain(part.exp) and part.exp.is_integer:
            if part.exp != -1 and part.base != 10:
                return False
        if isinstance(part, Pow) and str(part.base) == "i" and _is_plain(part.exp) and part.exp != -1:
            return False
    return True


def _is_plain(expression: Basic) -> bool:
    return isinstance(expression, Integer | Rational | Float)
