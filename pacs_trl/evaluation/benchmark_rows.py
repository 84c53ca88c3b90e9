"""Conversion of the rows of benchmarks, as their authors publish them, into problems and answers.

Each function takes rows of one benchmark and returns rows with `id`, `problem`, and `answer`. Tests of programs have
the form of `verification/cases.py`.
"""

import builtins
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import UserError
from ..verification.code import CodeVerifier


Rows = list[dict[str, Any]]

# The window of the PACS paper's evaluation, both days included: 322 problems, as its scores imply.
LIVECODEBENCH_WINDOW = ("2024-07-01", "2025-01-01")
# Imports that LiveCodeBench's runner prepends to a program.
_MODULES = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json"
).split()
_PRELUDE = "\n".join(
    [
        *(f"from {name} import *" for name in (*_MODULES, "builtins", "typing")),
        f"import {', '.join(_MODULES[:12])}",
        f"import {', '.join(_MODULES[12:])}",
        "sys.setrecursionlimit(50000)",
    ]
)
# A program that writes the text in the pickle that it reads. A pickle can run any program, so it runs in the sandbox.
_UNPACK = """
import base64, pickle, sys, zlib
sys.stdout.write(pickle.loads(zlib.decompress(base64.b64decode(sys.stdin.read()))))
"""
_PICKLES_PER_CALL = 8  # some are a hundred megabytes


def livecodebench(rows: Sequence[dict[str, Any]]) -> Rows:
    """Convert the rows of the window, with public and private tests. Raises a `ValueError` for tests that cannot be
    unpacked, or an empty window."""
    first, last = LIVECODEBENCH_WINDOW
    in_window = [row for row in rows if first <= str(row["contest_date"])[:10] <= last]
    if not in_window:
        raise UserError(f"None of the {len(rows)} rows of LiveCodeBench is from {first} to {last}. Use other files.")
    pickled = [row["private_test_cases"] for row in in_window if not _is_json_list(row["private_test_cases"])]
    unpacked = _unpack(pickled)
    converted = []
    for row in in_window:
        private_tests = row["private_test_cases"]
        if not _is_json_list(private_tests):
            private_tests = next(unpacked)
        cases = json.loads(row["public_test_cases"]) + json.loads(private_tests)
        function = json.loads(row["metadata"]).get("func_name")
        task = "Read the input from standard input and write the answer to standard output."
        if row.get("starter_code"):
            task = f"Complete this code:\n```python\n{row['starter_code'].strip()}\n```"
        converted.append(
            {
                "id": row["question_id"],
                "problem": f"{row['question_content'].strip()}\n\n{task}",
                "answer": _tests_of_function(function, cases) if function is not None else _tests_of_program(cases),
            }
        )
    return converted


def _is_json_list(text: str) -> bool:
    return text.lstrip().startswith("[")


def _tests_of_program(cases: Rows) -> dict[str, Any]:
    """Return LiveCodeBench's tests of a program that reads standard input."""
    return {
        "type": "stdin_stdout",
        "cases": [{"input": case["input"], "output": case["output"]} for case in cases],
        "compare": "lines",
        "prelude": _PRELUDE,
    }


def _tests_of_function(name: str, cases: Rows) -> dict[str, Any]:
    """Return LiveCodeBench's tests of a function; an input has one argument in JSON per line."""
    calls = []
    for case in cases:
        arguments = [json.loads(line) for line in case["input"].split("\n")]
        calls.append({"input": arguments, "output": json.loads(case["output"])})
    return {"type": "function", "name": name, "cases": calls, "compare": "tokens", "prelude": _PRELUDE}


def _unpack(pickles: list[str]) -> Iterator[str]:
    """Yield the text in each pickle (compressed, in base64)."""
    if not pickles:
        return
    verifier = CodeVerifier(
        num_workers=2, cpu_seconds=60.0, timeout_seconds=120.0, memory_limit_mb=4096, output_limit_mb=1024
    )
    with verifier:
        for start in range(0, len(pickles), _PICKLES_PER_CALL):
            inputs = pickles[start : start + _PICKLES_PER_CALL]
            for execution in verifier.run([_UNPACK] * len(inputs), inputs):
                if execution.outcome is not None:
                    lines = execution.messages.strip().splitlines() or [execution.error]
                    raise UserError(f"Private tests of LiveCodeBench cannot be unpacked: {lines[-1]}. Check the file.")
                yield execution.output


def gpqa(rows: Sequence[dict[str, Any]]) -> Rows:
    """Convert questions with options, of which the correct one is stored first; each sample has its own order."""
    names = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
    return [
        {
            "id": row.get("Record ID") or str(index),
            "problem": row["Question"].strip(),
            "options": [row[name].strip() for name in names],
            "answer": "A",
        }
        for index, row in enumerate(rows)
    ]


def humaneval(rows: Sequence[dict[str, Any]]) -> Rows:
    """Convert problems whose asserts are in a function `check`; the prompt has their imports and helpers."""
    return [
        {
            "id": row["task_id"],
            "problem": f"Complete this function:\n```python\n{row['prompt'].strip()}\n```",
            "answer": _asserts(row["test"], row["entry_point"], row["prompt"]),
        }
        for row in rows
    ]


def mbpp(rows: Sequence[dict[str, Any]]) -> Rows:
    """Convert problems of MBPP, or of its sanitized version; the asserts are part of the problem, as usual."""
    converted = []
    for row in rows:
        text = row.get("text") or row["prompt"]
        asserts = "\n".join(row["test_list"])
        setup = row.get("test_setup_code") or "\n".join(row.get("test_imports") or [])
        entry_point = _tested_function(asserts, row.get("code") or "")
        converted.append(
            {
                "id": row["task_id"],
                "problem": f"{text}\n\nThe program must pass these tests:\n```python\n{asserts}\n```",
                "answer": _asserts(f"{setup}\n{asserts}", entry_point),
            }
        )
    return converted


def _tested_function(asserts: str, solution: str) -> str | None:
    """Return the name of the function that asserts test: the first that they call and the solution defines, rather one
    that is not built in; `None` if they call nothing."""
    called = re.findall(r"(\w+)\(", asserts)
    defined = re.findall(r"^\s*(?:def|class)\s+(\w+)", solution, re.MULTILINE)
    candidates = [name for name in called if name in defined] or called
    candidates = [name for name in candidates if name not in vars(builtins)] or candidates
    return candidates[0] if candidates else None


def _asserts(code: str, entry_point: str | None, prelude: str = "") -> dict[str, Any]:
    return {"type": "asserts", "code": code, "entry_point": entry_point, "prelude": prelude}
