"""Reading tests, finding the program in a completion, comparing outputs: pure functions."""

import contextlib
import json
import sys
from pathlib import Path

import pytest
import yaml

from pacs_trl.verification.cases import (
    ProblemTests,
    is_expected,
    json_of_tests,
    last_program,
    read_tests,
    refuse_long_outputs,
    runnable,
)
from pacs_trl.verification.exchange import encode, refuse


def expected_of(compare, expected, output, function=None):
    return is_expected(ProblemTests(function, (("", expected),), compare), expected, output)


CASES = yaml.safe_load((Path(__file__).parents[1] / "data" / "comparisons.yaml").read_text())


class TestComparison:
    @pytest.mark.parametrize(
        ("function", "compare", "expected", "output", "right"),
        [
            *((None, *case) for case in CASES["texts"]),
            *(("f", *case) for case in CASES["values"]),
            (None, "floats", "2.5", "2.5" + "0" * 200, False),
            ("f", "floats", 1.0, "1" + "0" * 400, False),  # too large for a float
            ("f", "floats", [1.5], "[-1" + "0" * 400 + "]", False),
        ],
    )
    def test_outputs_are_compared_as_texts_or_values(self, function, compare, expected, output, right):
        assert expected_of(compare, expected, output, function) is right

    @pytest.mark.parametrize("output", ["", "nothing", "[" * 50_000])
    def test_an_output_without_a_value_is_an_error(self, output):
        with pytest.raises(ValueError):
            expected_of("floats", 1, output, "f")

    @pytest.mark.parametrize(
        "value", [{"object": []}, {"object": ""}, {"object": [1, {}]}, {"object": 1}, {"bytes": [-1]}]
    )
    def test_a_malformed_value_of_an_assert_is_an_error(self, value):
        """The program may write it."""
        tests = read_tests({"type": "asserts", "code": "assert f(1) == 2", "entry_point": "f"})
        with pytest.raises(ValueError):
            is_expected(tests, 2, json.dumps({"value": value}))

    @pytest.mark.parametrize("depth", [400, 900, 5000])
    def test_values_nested_too_deeply_are_an_error(self, depth):
        """Python 3.13 compares 400 lists in each other, 3.11 does not."""
        expected = []
        for _ in range(depth):
            expected = [expected]
        compared = depth == 400 and sys.version_info >= (3, 12)
        with contextlib.nullcontext() if compared else pytest.raises(ValueError):
            assert expected_of("floats", expected, "[" * (depth + 1) + "]" * (depth + 1), "f")

    @pytest.mark.parametrize("expected", ["é" * 90_000, "😀" * 90_000, b"z" * 90_000], ids=["é", "😀", "bytes"])
    def test_a_long_value_may_be_several_times_as_long_in_json(self, expected):
        tests = ProblemTests("f", (("", expected),), are_asserts=True)
        assert is_expected(tests, expected, json.dumps({"value": encode(expected, refuse)}))
        assert isinstance(expected, bytes) or expected_of("floats", expected, json.dumps(expected), "f")

    def test_an_endless_output_is_not_read(self):
        assert not expected_of("tokens", "x", "x" + " " * 100_000)


class TestLastProgram:
    @pytest.mark.parametrize(("completion", "program"), CASES["blocks"])
    def test_the_last_block_of_python_is_the_program(self, completion, program):
        assert last_program(completion) == program

    @pytest.mark.parametrize(("completion", "program"), CASES["named_blocks"])
    def test_the_last_block_is_the_program_unless_it_only_calls_the_tested_function(self, completion, program):
        assert last_program(completion, "f") == program

    def test_time_is_linear(self):
        assert last_program("```python\n" * 20_000) is None
        calls = ("f()" * 60_000, "f()\n" * 45_000, "print(f" + "(" * 190_000, "import " + " " * 190_000 + "f()")
        imports = ("from solution import " * 9_000, "from main import f\n" * 10_000, "import\\\n" * 20_000)
        others = ("f " * 90_000, "def " * 45_000, "def" + "\n" * 190_000, "class " * 30_000, "pass " * 38_000)
        ends = (
            "pass" + " " * 190_000 + "x",
            "pass " * 38_000 + "x",
            "raise " + " " * 190_000 + "x",
            "... " * 45_000 + "x",
        )
        stubs = tuple(f"def f():\n    {end}" for end in ends)
        for program in calls + imports + others + stubs:
            completion = f"```\n{program}\n```\n```\n1\n```"
            assert last_program(completion, "f").strip() in (program.strip(), "1")
            assert last_program(f"```\n{program}\n```", "f").strip() == program.strip()
        assert last_program("`" * 200_000) is None
        assert last_program("~" * 200_000 + "`") is None
        assert last_program("```" + " " * 200_000 + "`") is None


PRELUDE = "from math import sqrt\nresult = sqrt(16)"
FUTURE = "from __future__ import annotations"


class TestPrelude:
    @pytest.mark.parametrize(
        "source",
        [
            "answer = result",
            f"{FUTURE}\nanswer = result",
            f"# -*- coding: utf-8 -*-\n\n{FUTURE}\n{FUTURE}  # twice\nanswer = result",
            "from __future__ import (annotations,\n  division)\nanswer = result",
            f"{FUTURE}; answer = result",
            f"{FUTURE};answer = result",
            f'"""A program \\""" that\n{FUTURE}\n"""\n{FUTURE}\nanswer = result',
            f"'A program'\n# comment\n{FUTURE}\nanswer = result",
            f"r'''A\nprogram'''\n{FUTURE}\r\nanswer = result",
            f'"""A program"""\nanswer = result\ntext = """\n{FUTURE}\n"""',
            f'text = """\n{FUTURE}\n"""\nanswer = result',
            "from __future__ import annotations as _\nanswer = result",
        ],
    )
    def test_a_prelude_stands_before_the_program_and_after_its_future_imports(self, source):
        names = {}
        exec(runnable(ProblemTests(None, (), prelude=PRELUDE), source), names)
        assert names["answer"] == 4
        assert names.get("text", FUTURE).strip() == FUTURE

    def test_a_program_that_does_not_parse_stands_after_the_prelude(self):
        assert runnable(ProblemTests(None, (), prelude=PRELUDE), "def") == f"{PRELUDE}\ndef"

    def test_time_is_linear(self):
        for start in ("\n", "#\n", ";", '"', '""" ', "\\", FUTURE + "\n", "from __future__ import (", "'\\"):
            source = start * (200_000 // len(start))
            assert source[-100:] in runnable(ProblemTests(None, (), prelude=PRELUDE), source)


STDIN = {"type": "stdin_stdout", "cases": [{"input": "1", "output": "2"}]}


class TestReading:
    def test_json_is_as_good_as_a_mapping(self):
        assert read_tests(json.dumps(STDIN)) == read_tests(STDIN) == ProblemTests(None, (("1", "2"),))

    def test_cases_of_a_function_are_read(self):
        tests = read_tests({"type": "function", "name": "f", "cases": [{"input": [1, "a"], "output": (1, 2)}]})
        assert tests == ProblemTests("f", (('[1, "a"]', [1, 2]),))

    @pytest.mark.parametrize(
        ("value", "key"),
        [
            (None, "mapping"),
            ("{", "JSON"),
            ("[" * 100_000, "JSON"),
            ([], "mapping"),
            ({}, "type"),
            (STDIN | {"type": "unit"}, "unit"),
            (STDIN | {"cases": []}, "cases"),
            (STDIN | {"cases": [{"input": "1"}]}, "Case 0"),
            (STDIN | {"cases": [{"input": 1, "output": "2"}]}, "Case 0"),
            (STDIN | {"compare": "near"}, "compare"),
            (STDIN | {"language": "cpp"}, "cpp"),
            ({"type": "function", "cases": STDIN["cases"]}, "name"),
            ({"type": "function", "name": "f; import os", "cases": STDIN["cases"]}, "name"),
            ({"type": "function", "name": "f", "cases": [{"input": 1, "output": 2}]}, "Case 0"),
            ({"type": "function", "name": "f", "cases": [{"input": [{1}], "output": 2}]}, "Case 0"),
            ({"type": "function", "name": "f", "cases": [{"input": [], "output": {(1, 2): 3}}]}, "Case 0"),
            (STDIN | {"prelude": ["import math"]}, "prelude"),
        ],
    )
    def test_malformed_tests_are_refused(self, value, key):
        with pytest.raises(ValueError, match=key):
            read_tests(value)

    @pytest.mark.parametrize(
        "tests",
        [
            STDIN | {"cases": [*STDIN["cases"], {"input": "", "output": "é" * (5 << 20)}]},
            {"type": "function", "name": "f", "cases": [{"input": [], "output": "é" * (2 << 20)}]},  # \u00e9 in JSON
            {"type": "asserts", "entry_point": "f", "code": f"assert f(1) == '{'x' * (5 << 20)}'\n" * 2},
        ],
        ids=["text", "value", "asserts"],
    )
    def test_an_output_that_no_program_may_write_is_refused(self, tests):
        with pytest.raises(ValueError, match=r"MiB.*write 8.*output_limit_mb"):
            json_of_tests(tests)
        refuse_long_outputs(read_tests(tests), 13)

    def test_columns_of_data_sets_become_tests(self):
        info = {"language": "python", "test_cases": [{"type": "stdin_stdout", "input": "1", "output": "2"}]}
        assert json.loads(json_of_tests(info)) == json.loads(json_of_tests(json.dumps(info))) == STDIN
        calls = [{"type": "function_call", "fn_name": "f", "input": "[1, 2]", "output": "[3]"}]
        assert json.loads(json_of_tests(STDIN)) == STDIN
        broken = [None, [], [{}], 5, [5], "[]", [{"type": ["function"]}], calls, calls + info["test_cases"]]
        for value in (None, "", "x", 3, {}, *({"test_cases": cases} for cases in broken)):
            assert json_of_tests(value) is None
        with pytest.raises(ValueError, match="for 'cpp'"):
            json_of_tests(info | {"language": "cpp"})
