"""Benchmarks whose rows need more than a name of columns: LiveCodeBench and GPQA, turned into rows of a problem and an
answer.

LiveCodeBench packs its private tests as base64, zlib and pickle. A pickle can run any program, so they are unpacked by
a program in the sandbox, like those of a model. The prompt, its sentence and the sampling are ours, not those of the
benchmarks' own runners.
"""

import json
from collections.abc import Sequence
from typing import Any

from ..verification.code import CodeVerifier


# The window of the PACS paper's evaluation, both days included: 322 problems by the grid of its scores.
LIVECODEBENCH_WINDOW = ("2024-07-01", "2025-01-01")
# What LiveCodeBench's runner puts before a program.
_LIVECODEBENCH_PRELUDE = "\n".join(
    [
        *(
            f"from {name} import *"
            for name in (
                "string re datetime collections heapq bisect copy math random statistics itertools functools operator "
                "io sys json builtins typing"
            ).split()
        ),
        "import string, re, datetime, collections, heapq, bisect, copy, math, random, statistics, itertools, "
        "functools",
        "import operator, io, sys, json",
        "sys.setrecursionlimit(50000)",
    ]
)
_UNPACK = """
import base64, pickle, sys, zlib
sys.stdout.write(pickle.loads(zlib.decompress(base64.b64decode(sys.stdin.read()))))
"""
GPQA_INSTRUCTION = "\n\nPlease reason step by step, and put the letter of the right option within \\boxed{}."


def livecodebench_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """
    Problems of the window, with their public and private tests.

    Raises:
        `ValueError`: for a row without one of LiveCodeBench's columns, tests that cannot be unpacked, or an empty
        window.
    """
    first, last = LIVECODEBENCH_WINDOW
    try:
        chosen = [row for row in rows if first <= str(row["contest_date"])[:10] <= last]
        packed = [row["private_test_cases"] for row in chosen]
        unpacked = _unpack([text for text in packed if not text.lstrip().startswith("[")])
        converted = []
        for row, text in zip(chosen, packed, strict=True):
            private = text if text.lstrip().startswith("[") else next(unpacked)
            cases = json.loads(row["public_test_cases"]) + json.loads(private)
            name = json.loads(row["metadata"]).get("func_name")
            converted.append(
                {
                    "id": row["question_id"],
                    "problem": _livecodebench_problem(row["question_content"], row.get("starter_code")),
                    "answer": _livecodebench_tests(cases, name),
                }
            )
    except KeyError as error:
        raise ValueError(f"A row of LiveCodeBench has no column {error}.") from error
    if not converted:
        raise ValueError(f"None of the {len(rows)} rows of LiveCodeBench is from {first} to {last}.")
    return converted


def _livecodebench_problem(question: str, starter_code: str | None) -> str:
    if not starter_code:
        return f"{question.strip()}\n\nRead the input from standard input and write the answer to standard output."
    return f"{question.strip()}\n\nComplete this code:\n```python\n{starter_code.strip()}\n```"


def _livecodebench_tests(cases: list[dict[str, str]], name: str | None) -> dict[str, Any]:
    common = {"prelude": _LIVECODEBENCH_PRELUDE}
    if name is None:
        read: list[dict[str, Any]] = [{"input": case["input"], "output": case["output"]} for case in cases]
        return {"type": "stdin_stdout", "cases": read, "compare": "lines", **common}
    read = [
        {"input": [json.loads(line) for line in case["input"].split("\n")], "output": json.loads(case["output"])}
        for case in cases
    ]
    return {"type": "function", "name": name, "cases": read, "compare": "tokens", **common}


def _unpack(texts: list[str]):
    """What pickles of a text hold, one after the other."""
    if not texts:
        return
    limits = {"cpu_seconds": 60.0, "timeout_seconds": 120.0, "memory_limit_mb": 4096, "output_limit_mb": 1024}
    with CodeVerifier(num_workers=2, **limits) as verifier:
        for start in range(0, len(texts), 8):  # some are a hundred megabytes
            part = texts[start : start + 8]
            for execution in verifier.run([_UNPACK] * len(part), part):
                if execution.outcome is not None:
                    why = (execution.messages.strip().splitlines() or [execution.error])[-1]
                    raise ValueError(f"Private tests of LiveCodeBench cannot be unpacked: {why}.")
                yield execution.output


def gpqa_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """
    Multiple choice: question, options and the letter of the right one, which comes first; each sample has an order of
    its own.

    Raises:
        `ValueError`: for a row without one of GPQA's columns.
    """
    converted = []
    for index, row in enumerate(rows):
        try:
            options = [row["Correct Answer"], *(row[f"Incorrect Answer {number}"] for number in (1, 2, 3))]
            question = row["Question"].strip()
        except KeyError as error:
            raise ValueError(f"Row {index} of GPQA has no column {error}.") from error
        options = [option.strip() for option in options]
        converted.append(
            {"id": row.get("Record ID") or str(index), "problem": question, "options": options, "answer": "A"}
        )
    return converted
