"""The tests of a programming problem, the program in a completion, and whether an output is the expected one.

Pure functions of texts and numbers, in time linear in their length: they run in the trainer. A test is a mapping

    {"type": "stdin_stdout", "cases": [{"input": "1 2\\n", "output": "3\\n"}, ...]}
    {"type": "function", "name": "add", "cases": [{"input": [1, 2], "output": 3}, ...]}

or the same as JSON text, which is how a data set holds it. Further keys, all optional: `compare` (see
[`ProblemTests`]), `prelude` (source put before every program, such as imports), `writable` (a folder to write to),
`language` ("python").
"""

import json
import math
import sys
import textwrap
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, Literal, NamedTuple, get_args


Compare = Literal["floats", "tokens", "lines"]

# How far a number may lie from one that is expected, absolutely or relatively, where numbers are compared as such.
TOLERANCE = 1e-6
# Longer outputs are wrong without being read: as a multiple of what is expected, and at least.
_MOST_TIMES, _AT_LEAST = 4, 1 << 16


class ProblemTests(NamedTuple):
    """
    What a program is run on.

    Args:
        function (`str`, *optional*): Name of the function (or method of `Solution`) that is called; `None` for
        programs that read
            their input and write their output.
        cases (`tuple[tuple[str, Any], ...]`): Input text (arguments as JSON) and expected output (text or value).
        compare (`str`): `"floats"`: equal tokens, and where a decimal fraction is expected any number within 1e-6 of
        it; `"tokens"`:
            equal tokens (values); `"lines"`: LiveCodeBench's rule, equal lines, or lines of equal decimal numbers
            (values).
        prelude (`str`): Source put before the program.
        writable (`bool`): Whether the program has a folder to write to.
    """

    function: str | None
    cases: tuple[tuple[str, Any], ...]
    compare: Compare = "floats"
    prelude: str = ""
    writable: bool = False


def read_tests(value: Any) -> ProblemTests:
    """
    Tests as a mapping or as JSON text.

    Raises:
        ValueError: When they are missing, of another language, or do not have the form above.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"Tests must be JSON, got {value[:80]!r} ({error}).") from error
    if not isinstance(value, Mapping):
        raise ValueError(f"Tests must be a mapping with `type` and `cases`, got {str(value)[:80]!r}.")
    if (language := value.get("language", "python")) not in ("python", "python3"):
        raise ValueError(
            f"Only Python programs are run, but these tests are for {language!r}: leave such problems out."
        )
    kind, name, compare = value.get("type"), value.get("name"), value.get("compare", "floats")
    if kind not in ("stdin_stdout", "function"):
        raise ValueError(f"`type` of tests must be 'stdin_stdout' or 'function', got {kind!r}.")
    if kind == "function" and not (isinstance(name, str) and name.isidentifier()):
        raise ValueError(f"`name` of tests must be that of the function to call, got {name!r}.")
    if compare not in get_args(Compare):
        raise ValueError(f"`compare` of tests must be one of {', '.join(get_args(Compare))}, got {compare!r}.")
    cases = value.get("cases")
    if not isinstance(cases, list | tuple) or not cases:
        raise ValueError(f"`cases` of tests must be a list with at least one case, got {str(cases)[:80]!r}.")
    read = tuple(_read_case(case, index, kind) for index, case in enumerate(cases))
    prelude = value.get("prelude") or ""
    if not isinstance(prelude, str):
        raise ValueError(f"`prelude` of tests must be source text, got {str(prelude)[:80]!r}.")
    return ProblemTests(name if kind == "function" else None, read, compare, prelude, value.get("writable") is True)


def _read_case(case: Any, index: int, kind: str) -> tuple[str, Any]:
    if not isinstance(case, Mapping) or not {"input", "output"} <= case.keys():
        raise ValueError(f"Case {index} of the tests must have `input` and `output`, got {str(case)[:80]!r}.")
    given, expected = case["input"], case["output"]
    if kind == "function":
        if not isinstance(given, list | tuple):
            raise ValueError(f"`input` of case {index} must be the list of arguments, got {str(given)[:80]!r}.")
        try:
            return json.dumps(given), json.loads(json.dumps(expected))
        except (TypeError, RecursionError) as error:  # a number of numpy's, a set, a thousand lists in each other
            raise ValueError(f"Case {index} of the tests cannot be written as JSON: {error}.") from error
    if not isinstance(given, str) or not isinstance(expected, str):
        raise ValueError(f"`input` and `output` of case {index} must be text, got {str(case)[:80]!r}.")
    return given, expected


def json_of_tests(value: Any) -> str | None:
    """
    Tests as the JSON text that a data set holds, from a mapping or JSON text of the form above, or from the
    `verification_info` of open-r1's and PrimeIntellect's sets; `None` when there is no case or it cannot be read.

    Raises:
        ValueError: When the tests are of another language.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if not isinstance(value, Mapping):
        return None
    if (language := value.get("language", "python")) not in ("python", "python3"):
        raise ValueError(
            f"Only Python programs are run, but these tests are for {language!r}: leave such problems out."
        )
    try:
        value = _from_verification_info(value["test_cases"] or []) if "test_cases" in value else value
        read_tests(value)
        return json.dumps(value, ensure_ascii=False)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # of any other form
        return None


def _from_verification_info(cases: list[dict]) -> dict[str, Any] | None:
    """Cases with `type`, `input`, `output` and, for functions, `fn_name`; of functions, the output is in a list of its
    own."""
    if not cases or len({(case.get("type"), case.get("fn_name")) for case in cases}) != 1:
        return None
    if cases[0].get("type") != "function_call":
        return {
            "type": "stdin_stdout",
            "cases": [{"input": case["input"], "output": case["output"]} for case in cases],
        }

    def value_of(cell: Any) -> Any:
        return json.loads(cell) if isinstance(cell, str) else cell

    read = [{"input": value_of(case["input"]), "output": value_of(case["output"])} for case in cases]
    for case in read:
        if isinstance(case["output"], list) and len(case["output"]) == 1:
            case["output"] = case["output"][0]
    return {"type": "function", "name": cases[0]["fn_name"], "cases": read}


def last_program(text: str) -> str | None:
    """
    The last closed ``` block of Python (or of no named language) in a completion; `None` when there is none.

    A block that is not closed is no answer: the completion was cut in the middle of it.
    """
    program: str | None = None
    block: list[str] | None = None
    language = ""
    for line in text.split("\n"):
        fence, mark, info = line.lstrip().partition("```")
        if fence or not mark:
            if block is not None:
                block.append(line)
        elif block is None or info.strip():  # one that names a language opens a block, whatever is still open
            language, block = (info.split() or [""])[0].lower(), []
        else:
            if language in ("", "python", "python3", "py"):
                program = textwrap.dedent("\n".join(block))
            block = None
    return program if program and program.strip() else None


_CALL = """
import json, sys
_namespace = {{"__name__": "solution"}}
exec(compile({source!r}, "solution.py", "exec"), _namespace)
_solution = _namespace.get("Solution")
_function = _namespace.get({name!r}) or getattr(_solution and _solution(), {name!r}, None)
if _function is None:
    raise NameError("the program defines no function " + {name!r})
_value = _function(*json.load(sys.__stdin__))
print("\\n" + json.dumps(_value), file=sys.__stdout__)
"""


def runnable(tests: ProblemTests, source: str) -> str:
    """The program that reads an input and writes an output: the given one, or one that calls its function with
    JSON."""
    source = f"{tests.prelude}\n{source}" if tests.prelude else source
    return source if tests.function is None else _CALL.format(source=source, name=tests.function)


def is_expected(tests: ProblemTests, expected: Any, output: str) -> bool:
    """
    Whether an output is the expected one, as a whole.

    Raises:
        ValueError: When a function has returned nothing that can be read.
    """
    if tests.function is None:
        return _is_short(output, len(expected)) and _equal_texts(expected, output, tests.compare)
    try:
        if not _is_short(output, len(json.dumps(expected))):
            return False
        value = json.loads(output.strip().rpartition("\n")[2])
        return _equal_values(expected, value, tolerant=tests.compare == "floats")
    except RecursionError as error:
        raise ValueError("a value nested too deeply") from error


def _is_short(output: str, expected: int) -> bool:
    return len(output) <= _MOST_TIMES * expected + _AT_LEAST


def _equal_texts(expected: str, output: str, compare: Compare) -> bool:
    if compare == "lines":
        ours, theirs = ([line.strip() for line in text.strip().split("\n")] for text in (expected, output))
        return len(ours) == len(theirs) and all(
            one == other or _equal_decimals(one, other) for one, other in zip(ours, theirs, strict=True)
        )
    ours, theirs = expected.split(), output.split()
    return len(ours) == len(theirs) and all(
        one == other or (compare == "floats" and _is_close(one, other))
        for one, other in zip(ours, theirs, strict=True)
    )


def _equal_decimals(expected: str, output: str) -> bool:
    try:
        return [Decimal(token) for token in expected.split()] == [Decimal(token) for token in output.split()]
    except InvalidOperation:
        return False


def _is_close(expected: str, output: str) -> bool:
    """Whether a token is a number near an expected decimal fraction; whole numbers are equal or not."""
    if not set(expected) & set(".eE") or len(output) > 100:
        return False
    try:
        one, other = float(expected), float(output)
    except ValueError:
        return False
    return math.isfinite(one) and math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def _equal_values(expected: Any, value: Any, tolerant: bool) -> bool:
    if isinstance(expected, list):
        return (
            isinstance(value, list)
            and len(expected) == len(value)
            and all(_equal_values(one, other, tolerant) for one, other in zip(expected, value, strict=True))
        )
    if isinstance(expected, dict):
        return (
            isinstance(value, dict)
            and expected.keys() == value.keys()
            and all(_equal_values(expected[key], value[key], tolerant) for key in expected)
        )
    if tolerant and isinstance(expected, float) and isinstance(value, int | float):
        if (
            not math.isfinite(expected) or abs(value) > sys.float_info.max
        ):  # a whole number may be too large for a float
            return False
        return math.isclose(expected, value, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return expected == value
