"""Conversion of LiveCodeBench, GPQA, HumanEval, and MBPP rows into rows with a problem and an answer.

A row without one of the columns raises a `KeyError`. LiveCodeBench stores private tests as base64, zlib, and pickle. A
pickle can run any program, so they are unpacked in the sandbox. Prompt and sampling are ours, not those of the
benchmarks' own runners.
"""

import builtins
import json
import re
from collections.abc import Sequence
from typing import Any

from ..verification.code import CodeVerifier


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
_UNPACK = """
import base64, pickle, sys, zlib
sys.stdout.write(pickle.loads(zlib.decompress(base64.b64decode(sys.stdin.read()))))
"""
GPQA_INSTRUCTION = "\n\nPlease reason step by step, and put the letter of the right option within \\boxed{}."


def livecodebench_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the problems of the window, with their public and private tests. Raises a `ValueError` for tests that
    cannot be unpacked, or an empty window."""
    first, last = LIVECODEBENCH_WINDOW
    chosen = [row for row in rows if first <= str(row["contest_date"])[:10] <= last]
    if not chosen:
        raise ValueError(f"None of the {len(rows)} rows of LiveCodeBench is from {first} to {last}. Use other files.")
    packed = [row["private_test_cases"] for row in chosen]
    unpacked = _unpack([text for text in packed if not text.lstrip().startswith("[")])
    converted = []
    for row, text in zip(chosen, packed, strict=True):
        private = text if text.lstrip().startswith("[") else next(unpacked)
        cases = json.loads(row["public_test_cases"]) + json.loads(private)
        tests = _tests(cases, json.loads(row["metadata"]).get("func_name"))
        task = "Read the input from standard input and write the answer to standard output."
        if row.get("starter_code"):
            task = f"Complete this code:\n```python\n{row['starter_code'].strip()}\n```"
        problem = f"{row['question_content'].strip()}\n\n{task}"
        converted.append({"id": row["question_id"], "problem": problem, "answer": tests})
    return converted


def _tests(cases: list[dict[str, str]], name: str | None) -> dict[str, Any]:
    """Convert the tests of a program, or of a function if a name is given."""
    if name is None:
        read: list[dict[str, Any]] = [{"input": case["input"], "output": case["output"]} for case in cases]
        return {"type": "stdin_stdout", "cases": read, "compare": "lines", "prelude": _PRELUDE}
    read = [
        {"input": [json.loads(line) for line in case["input"].split("\n")], "output": json.loads(case["output"])}
        for case in cases
    ]
    return {"type": "function", "name": name, "cases": read, "compare": "tokens", "prelude": _PRELUDE}


def _unpack(texts: list[str]):
    """Yield the text in each pickle."""
    if not texts:
        return
    limits = {"cpu_seconds": 60.0, "timeout_seconds": 120.0, "memory_limit_mb": 4096, "output_limit_mb": 1024}
    with CodeVerifier(num_workers=2, **limits) as verifier:
        for start in range(0, len(texts), 8):  # some are a hundred megabytes
            part = texts[start : start + 8]
            for execution in verifier.run([_UNPACK] * len(part), part):
                if execution.outcome is not None:
                    why = (execution.messages.strip().splitlines() or [execution.error])[-1]
                    raise ValueError(f"Private tests of LiveCodeBench cannot be unpacked: {why}. Check the file.")
                yield execution.output


def gpqa_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return questions with their options and the letter of the correct one, which is stored first; each sample shows
    the options in its own order."""
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


def humaneval_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the problems of HumanEval, whose asserts are in a function `check`."""
    return [
        {
            "id": row["task_id"],
            "problem": f"Complete this function:\n```python\n{row['prompt'].strip()}\n```",
            "answer": _asserts(row["test"], row["entry_point"], row["prompt"]),  # with its imports and helpers
        }
        for row in rows
    ]


def mbpp_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the problems of MBPP, or of its sanitized version; the asserts are part of the problem, as usual."""
    converted = []
    for row in rows:
        text, asserts = row.get("text") or row["prompt"], "\n".join(row["test_list"])
        setup = row.get("test_setup_code") or "\n".join(row.get("test_imports") or [])
        defined = re.findall(r"^\s*(?:def|class)\s+(\w+)", row.get("code") or "", re.MULTILINE)
        called = re.findall(r"(\w+)\(", asserts)
        name = min(called, key=lambda name: (name not in defined, name in vars(builtins)), default=None)
        problem = f"{text}\n\nThe program must pass these tests:\n```python\n{asserts}\n```"
        converted.append({"id": row["task_id"], "problem": problem, "answer": _asserts(f"{setup}\n{asserts}", name)})
    return converted


def _asserts(code: str, name: str | None, prelude: str = "") -> dict[str, Any]:
    return {"type": "asserts", "code": code, "entry_point": name, "prelude": prelude}
