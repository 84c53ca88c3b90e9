"""Tests of a programming problem, extraction of the program from a completion, and comparison of outputs.

Pure functions in linear time, which run in the trainer. Tests are a mapping

    {"type": "stdin_stdout", "cases": [{"input": "1 2\\n", "output": "3\\n"}, ...]}
    {"type": "function", "name": "add", "cases": [{"input": [1, 2], "output": 3}, ...]}
    {"type": "asserts", "code": "assert add(1, 2) == 3", "entry_point": "add"}

or its JSON, the form of datasets. Optional keys: `compare` (see [`ProblemTests`]), `prelude` (source before every
program and before asserts), `language` ("python").

Asserts depend on each other, for a program may have state: one process of the program answers all in order, and a
second one asks (`asserts.py`). Values are compared here if all have the form `f(literals) == literal`, else there.
"""

import ast
import json
import math
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from typing import Any, Literal, NamedTuple, get_args

from ..errors import UserError
from .exchange import decode, encode, refuse


Compare = Literal["floats", "tokens", "lines"]

# Absolute and relative tolerance of numbers.
TOLERANCE = 1e-6
# Longer answers, as a multiple of the expected length and in characters, are wrong without being parsed.
_MAX_FACTOR, _MIN_LIMIT = 4, 1 << 16
PASSED = object()
OUTPUT_LIMIT_MB = 8  # of the output of a program, by default


class ProblemTests(NamedTuple):
    """
    Tests of one programming problem.

    Args:
        function (`str`, *optional*): Function (or method of `Solution`) to call; `None` for programs with standard
            input and output.
        cases (`tuple[tuple[str, Any], ...]`): Input text (arguments as JSON) and expected output (text or value). For
            asserts that are compared by the second process: source that runs all of them, and `PASSED`.
        compare (`str`): `"tokens"`: equal tokens (values); `"floats"`: the same, but decimal fractions within 1e-6;
            `"lines"`: LiveCodeBench's rule, equal lines, or lines of equal decimal numbers (values).
        prelude (`str`): Source before the program.
        are_asserts (`bool`): Whether one process answers all cases, and values are compared exactly.
    """

    function: str | None
    cases: tuple[tuple[str, Any], ...]
    compare: Compare = "floats"
    prelude: str = ""
    are_asserts: bool = False

    @property
    def is_script(self) -> bool:
        """Whether the second process compares."""
        return any(expected is PASSED for _, expected in self.cases[:1])

    def cases_of_next_process(self, num_done: int) -> tuple[tuple[str, Any], ...]:
        """Return the cases that one process runs after the first `num_done`."""
        return self.cases[num_done:] if self.are_asserts else self.cases[num_done : num_done + 1]


class ProgramError(ValueError):
    """The class of an exception that a program raised in an assert."""


class UnusableTests(ValueError):
    """Tests for a language other than Python, asserts that cannot be run, or an output that is too long."""


def _read_mapping(value: Any) -> Mapping:
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    if not isinstance(value, Mapping):
        raise UserError(f"Tests must be a mapping, or its JSON, with `type` and `cases`, got {str(value)[:80]!r}.")
    if (language := value.get("language", "python")) not in ("python", "python3"):
        raise UnusableTests(f"These tests are for {language!r}, but only Python is supported. Remove the examples.")
    return value


def read_tests(value: Any) -> ProblemTests:
    """Read tests from a mapping or JSON. Raises a `ValueError` if they are missing, for another language, or not in
    the form above."""
    value = _read_mapping(value)
    kind, name, cases = value.get("type"), value.get("name"), value.get("cases")
    compare, prelude = value.get("compare", "floats"), value.get("prelude") or ""
    if kind == "asserts":
        return _read_asserts(value.get("code"), value.get("entry_point"), prelude)
    is_function = kind == "function"
    rules = {
        "type": is_function or kind == "stdin_stdout",
        "name": not is_function or isinstance(name, str) and name.isidentifier(),
        "compare": compare in get_args(Compare),
        "cases": isinstance(cases, list | tuple) and cases,
        "prelude": isinstance(prelude, str),
    }
    if broken := [key for key, holds in rules.items() if not holds]:
        raise UserError(f"`{broken[0]}` of tests is {value.get(broken[0])!r:.80}. Set it as docs/code.md says.")
    read = tuple(_read_case(case, index, is_function) for index, case in enumerate(cases))
    return ProblemTests(name if is_function else None, read, compare, prelude)


def _read_case(case: Any, index: int, is_function: bool) -> tuple[str, Any]:
    try:
        argument, expected = case["input"], case["output"]
        if is_function and isinstance(argument, list | tuple):
            return json.dumps(argument), json.loads(json.dumps(expected))
        if not is_function and isinstance(argument, str) and isinstance(expected, str):
            return argument, expected
        problem = "other types"
    except (KeyError, TypeError, RecursionError) as error:  # a set, deep nesting
        problem = repr(error)
    form = "the list of arguments and a value of JSON" if is_function else "text"
    raise UserError(f"Case {index} of the tests ({problem}) must have `input` and `output`, {form}: {case!r:.80}.")


def _read_asserts(code: Any, name: Any, prelude: str) -> ProblemTests:
    """Read asserts: those at the top level, in `check(candidate)`, and in `test_...()`."""
    if isinstance(name, str):
        name = name.removeprefix("Solution().")  # a method of that class is found by its name alone
    if not isinstance(name, str) or not name.isidentifier():
        raise UnusableTests(f"`entry_point` of asserts is {name!r:.80}. Set it to the function that they call.")
    try:
        tree = ast.parse(code)
        ast.parse(prelude)
        read = [_case_from_assert(statement, name) for statement in tree.body if not _has_no_effect(statement)]
        cases = [case for case in read if case]
        source = ast.unparse(tree)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise UnusableTests(f"Asserts do not parse ({error}): {code!r:.80}. Correct or remove them.") from error
    running = [node for part in tree.body if not isinstance(part, ast.ClassDef) for node in ast.walk(part)]
    num_tests = sum(isinstance(node, ast.Assert | ast.Raise) for node in running)
    if num_tests == 0 or re.search(rf"\bcheck\b|\b{name}\b", source) is None:
        raise UnusableTests(f"No assert that runs calls {name}: {code!r:.80}. Correct `entry_point` or `code`.")
    imported = {alias.name for node in running if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in running if isinstance(node, ast.ImportFrom)}
    packages = {module.partition(".")[0] for module in imported}
    if missing := packages - sys.stdlib_module_names - {"solution"}:
        raise UserError(f"Asserts import {', '.join(missing)}. Only the standard library is there.")
    _refuse_skipped_tests(tree)
    if None in read:
        script = f"from {_PACKAGE}.asserts import run_asserts\nrun_asserts({source!r}, {name!r}, {prelude!r})"
        at_top_level = sum(isinstance(statement, ast.Assert) for statement in tree.body)
        all_others = int(num_tests > at_top_level)
        cases = [(script, PASSED)] * (at_top_level + all_others)
    return ProblemTests(name, tuple(cases), "tokens", prelude, are_asserts=True)


def _refuse_skipped_tests(tree: ast.Module) -> None:
    """Raise a `ValueError` for tests that would not run, such as methods of a class that nothing uses, or that need
    an event loop."""
    nodes = list(ast.walk(tree))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    if "asyncio" in names or any(_is_asynchronous(node) for node in nodes):
        raise UserError("Asserts need an event loop, and none runs in the sandbox. Remove them.")
    for block in [part for part in tree.body if isinstance(part, ast.If)]:
        is_main = "__name__" in ast.unparse(block.test)
        if is_main and any(isinstance(node, ast.Assert) for node in ast.walk(block)):
            raise UserError("Tests under `if __name__` do not run. Move them to the top level.")
    for kind in [part for part in tree.body if isinstance(part, ast.ClassDef) and part.name not in names]:
        methods = [part for part in kind.body if isinstance(part, ast.FunctionDef)]
        if any(method.name.startswith("test") for method in methods):
            raise UserError(f"Tests in the class {kind.name} do not run. Make them functions.")


def _is_asynchronous(node: ast.AST) -> bool:
    """Whether a node defines a coroutine, or imports something of `asyncio` under another name. `import asyncio` alone
    needs no event loop."""
    if isinstance(node, ast.Import):
        return any(alias.name.partition(".")[0] == "asyncio" and alias.asname for alias in node.names)
    return isinstance(node, ast.AsyncFunctionDef) or (isinstance(node, ast.ImportFrom) and node.module == "asyncio")


def _has_no_effect(statement: ast.stmt) -> bool:
    """Whether asserts of calls with literals are the same without this statement: an import, or a docstring."""
    is_literal = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_literal or isinstance(statement, ast.Import | ast.ImportFrom)


def _case_from_assert(statement: Any, name: str) -> tuple[str, Any] | None:
    """Return arguments and value of `assert name(literals) == literal`; `None` for another statement."""
    try:
        called, (operator,), (expected,) = statement.test.left, statement.test.ops, statement.test.comparators
        if not isinstance(statement, ast.Assert) or not isinstance(operator, ast.Eq) or called.func.id != name:
            return None
        value, arguments = ast.literal_eval(expected), [ast.literal_eval(argument) for argument in called.args]
        encode(value, refuse)
        return None if called.keywords else (json.dumps(encode(arguments, refuse)), value)
    except (AttributeError, ValueError, TypeError, RecursionError, MemoryError):  # of another form, or no literals
        return None


def refuse_long_outputs(tests: ProblemTests, output_limit_mb: int) -> None:
    """Raise [`UnusableTests`] if no program may write what is expected."""
    answers = [_right_answer(tests, expected) for _, expected in tests.cases if expected is not PASSED]
    sizes = [len(answer.encode("utf-8", "surrogatepass")) for answer in answers]
    if tests.are_asserts:  # one process writes all values
        sizes = [sum(sizes)]
    if (size := max(sizes)) > output_limit_mb << 20:
        raise UnusableTests(
            f"The expected output has {size / (1 << 20):.1f} MiB, and a program may write {output_limit_mb}. Remove "
            "the problem, or raise output_limit_mb of CodeVerifier."
        )


def _right_answer(tests: ProblemTests, expected: Any) -> str:
    """Return an expected text, or an expected value as JSON."""
    if tests.function is None:
        return expected
    return json.dumps(encode(expected, refuse) if tests.are_asserts else expected)


def json_of_tests(value: Any) -> str | None:
    """Return tests as JSON, from a mapping or JSON in the form above, or from the `verification_info` of open-r1's
    sets; `None` without a case, or if they cannot be read. Raises [`UnusableTests`]."""
    try:
        value = _read_mapping(value)
        if (cases := value.get("test_cases")) is not None:
            if any(case["type"] != "stdin_stdout" for case in cases):
                return None
            cases = [{"input": case["input"], "output": case["output"]} for case in cases]
            value = {"type": "stdin_stdout", "cases": cases}
        refuse_long_outputs(read_tests(value), OUTPUT_LIMIT_MB)
        return json.dumps(value, ensure_ascii=False)
    except UnusableTests:
        raise
    except (ValueError, KeyError, TypeError, RecursionError):  # of any other form
        return None


# `python`, `py3`, `python3.12`, `python:solution.py`, and Pandoc's `{.python .numberLines}`.
_PYTHON_LABEL = re.compile(r"\{?\s*\.?(?:python|py)(?:3(?:\.\w+)?)?(?=[\s:}]|$)", re.IGNORECASE)


def _is_python(label: str) -> bool:
    return _PYTHON_LABEL.match(label) is not None


def last_program(text: str, name: str | None = None) -> str | None:
    """Return the last closed block of a completion with the label of Python, else the last one without a label; `None`
    if there is none, or it is blank. An open block belongs to a truncated completion.

    If a function or class is named, a last block that cannot define it is an example of its use or an output. The
    program is then the last block that plainly defines the name, if there is one."""
    blocks = _closed_blocks(text)
    labelled = [content for label, content in blocks if _is_python(label)]
    unlabelled = [content for label, content in blocks if not label or label.startswith(":")]
    programs = unlabelled + labelled  # the last one is the program
    program = programs[-1] if programs else ""
    if name is not None and not _may_define(program, name):
        program = next((earlier for earlier in reversed(programs) if _defines(earlier, name)), program)
    return program if program.strip() else None


def _closed_blocks(text: str) -> list[tuple[str, str]]:
    """Return label and content of the closed blocks of a completion, in order. A plain block has an empty label.

    Fences are Markdown's, at least three backticks or tildes. But one with a label opens a block even inside another,
    which the model forgot to close, unless that is Python between longer or other fences."""
    blocks = []
    lines: list[str] | None = None  # of the open block
    opening, label = "", ""
    for line in text.split("\n"):
        fence, info = _fence(line)
        is_as_long = fence.startswith(opening)
        opens_first = fence and lines is None
        reopens = fence and info and (is_as_long or not _is_python(label))
        closes = fence and not info and is_as_long
        if opens_first or reopens:
            opening, label, lines = fence, info, []
        elif lines is None:
            continue
        elif closes:
            blocks.append((label, textwrap.dedent("\n".join(lines))))
            lines = None
        else:
            lines.append(line)
    return blocks


# An answer is the module `solution`, which examples of its use import, sometimes under other names.
_IMPORT_OF_PROGRAM = re.compile(r"^from[ \t]+(?:solution|main|your_module)[ \t]+import\b.*", re.MULTILINE)
# A class whose methods are tested, and what may define a name that does not stand in the program.
_MAY_DEFINE_ANY = (
    r"\bclass\s+Solution\b|\bimport[\s\\]*\*|\b(?:exec|eval|globals|locals|vars|setattr|__dict__|__getattr__)\b"
)


def _may_define(program: str, name: str) -> bool:
    """Whether a program may define a name, in whatever form. One that only calls it, as in `print(name(1))`, or
    imports it from the module of the answer, cannot."""
    definition = rf"\b(?:def|class)[\s\\]+{name}\b"
    use_without_call = rf"\b{name}\b(?!\()"
    pattern = f"{definition}|{use_without_call}|{_MAY_DEFINE_ANY}"
    return re.search(pattern, _IMPORT_OF_PROGRAM.sub("", program)) is not None


_PLACEHOLDER = re.compile(r"(?:\bpass|\.\.\.)[ \t]*(?:#.*)?$|\braise[ \t]+NotImplementedError\b")


def _defines(program: str, name: str) -> bool:
    """Whether a program plainly defines a name at its top level, or as a method of the class `Solution`, and does not
    end with a placeholder, as code to start from does."""
    pattern = rf"^(?:async[ \t]+)?(?:def|class)[ \t]+{name}\b|^{name}[ \t]*=(?!=)"
    if re.search(r"^class[ \t]+Solution\b", program, re.MULTILINE):
        pattern += rf"|^[ \t]+def[ \t]+{name}\b"
    last_line = program.rstrip().rpartition("\n")[2]
    return re.search(pattern, program, re.MULTILINE) is not None and _PLACEHOLDER.search(last_line) is None


def _fence(line: str) -> tuple[str, str]:
    """Return the fence that a line begins with and what follows it; empty texts for other lines."""
    line = line.strip()
    info = line.lstrip(line[:1])
    fence = line.removesuffix(info)
    if len(fence) < 3 or fence[0] not in "`~" or "`" in info:
        return "", ""
    return fence, info.strip()


_PACKAGE = "pacs_trl.verification"


# A docstring, comments, and the `__future__` imports after them, which are an error anywhere else.
_BLANK = r"(?:\s|;|#[^\n]*\n)*"
_QUOTES = ('"{3}', "'{3}", '"', "'")
_DOCSTRING = "[rRuU]?(?:" + "|".join(rf"{quote}(?:(?!{quote})[^\\]|\\.)*{quote}" for quote in _QUOTES) + ")"
_FUTURE_IMPORT = r"from[ \t]+__future__[ \t]+import\b(?:[ \t]*\([^()]*\)|[^\n;#]*)"
_START_OF_PROGRAM = re.compile(rf"{_BLANK}(?:{_DOCSTRING}{_BLANK})?(?:{_FUTURE_IMPORT}{_BLANK})+", re.DOTALL)


def _with_prelude(prelude: str, source: str) -> str:
    """Return a program that begins with a prelude, but for `__future__` imports, which must stand before it."""
    start = _START_OF_PROGRAM.match(source)
    if start is None:
        return f"{prelude}\n{source}"
    return f"{start.group()}\n{prelude}\n{source[start.end() :]}"


def runnable(tests: ProblemTests, source: str) -> str:
    """Return a program with standard input and output: the source, or one that calls its function."""
    source = _with_prelude(tests.prelude, source) if tests.prelude else source
    if tests.function is None:
        return source
    if tests.are_asserts:
        return f"from {_PACKAGE}.calls import serve\nserve({source!r}, {tests.function!r}, {tests.prelude!r})"
    return f"from {_PACKAGE}.calls import call\ncall({source!r}, {tests.function!r})"


def input_of(tests: ProblemTests, cases: Sequence[tuple[str, Any]]) -> str:
    """Return the input of the process that answers these cases: text, or the source that the second one runs."""
    inputs = [text for text, _ in cases]
    if not tests.are_asserts or tests.is_script:
        return inputs[0]
    calls = f"[{', '.join(inputs)}]"
    return f"from {_PACKAGE}.asserts import run_calls\nrun_calls({calls!r}, {tests.function!r})"


def answers_in(tests: ProblemTests, output: str) -> list[str]:
    """Return the answers in what a process wrote: everything, or a line per assert. Raises [`UnusableTests`] if
    asserts do not call the program."""
    if not tests.are_asserts:
        return [output]
    answers = output.split("\n")[:-1]
    if tests.is_script and "no call" in answers:
        raise UnusableTests("No assert calls the function when they run. Correct `code`.")
    if "failed" in answers[len(tests.cases) :]:  # an `AssertionError` in a statement after the last case
        answers[len(tests.cases) - 1] = "failed"
    return answers


def is_expected(tests: ProblemTests, expected: Any, answer: str) -> bool:
    """Whether an answer is the expected one. Raises a `ValueError` if the return value of a function cannot be
    parsed, and a [`ProgramError`] for an exception in an assert."""
    if expected is PASSED:
        if answer not in ("passed", "failed"):
            raise ProgramError(answer)
        return answer == "passed"
    try:
        if len(answer) > _MAX_FACTOR * len(_right_answer(tests, expected)) + _MIN_LIMIT:
            return False
        if tests.function is None:
            return _equal_texts(expected, answer, tests.compare)
        value = json.loads(answer)
        if tests.are_asserts:
            if "raises" in value:
                raise ProgramError(value["raises"])
            return decode(value["value"], _decode_as_data) == expected
        return _equal_values(expected, value, tolerant=tests.compare == "floats")
    except (RecursionError, ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise UserError("a value nested too deeply, or no value") from error


def _decode_as_data(kind: str, content: Any) -> Any:
    """Decode an instance of a subclass of a standard type as that type."""
    if kind == "object" and content[1]:
        return decode(content[1][0], _decode_as_data)
    return refuse(kind)


def _equal_texts(expected: str, output: str, compare: Compare) -> bool:
    equal: Callable[[str, str], bool] = {"lines": _equal_decimals, "floats": _is_close, "tokens": str.__eq__}[compare]
    if compare == "lines":
        ours, theirs = ([line.strip() for line in text.strip().split("\n")] for text in (expected, output))
    else:
        ours, theirs = expected.split(), output.split()
    pairs = zip(ours, theirs, strict=False)
    return len(ours) == len(theirs) and all(one == other or equal(one, other) for one, other in pairs)


def _equal_decimals(expected: str, output: str) -> bool:
    try:
        return [Decimal(token) for token in expected.split()] == [Decimal(token) for token in output.split()]
    except InvalidOperation:
        return False


_INTEGER = re.compile(r"[+-]?[\d_]+")


def _is_close(expected: str, output: str) -> bool:
    """Whether a token is a number close to an expected decimal fraction."""
    if _INTEGER.fullmatch(expected) or len(output) > 100:  # integers must be equal as text
        return False
    try:
        one, other = float(expected), float(output)
    except ValueError:
        return False
    return math.isfinite(one) and math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def _equal_values(expected: Any, value: Any, tolerant: bool) -> bool:
    if isinstance(expected, list) and isinstance(value, list):
        pairs = zip(expected, value, strict=False)
        return len(expected) == len(value) and all(_equal_values(one, other, tolerant) for one, other in pairs)
    if isinstance(expected, dict) and isinstance(value, dict):
        return expected.keys() == value.keys() and all(
            _equal_values(expected[k], value[k], tolerant) for k in expected
        )
    if tolerant and isinstance(expected, float) and isinstance(value, int | float):
        if not math.isfinite(expected) or abs(value) > sys.float_info.max:  # an int may be too large for a float
            return False
        return math.isclose(expected, value, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return expected == value
