"""Traces of an oracle, from which a generative critic learns to reason before it learns from rewards.

One line of JSON for each: `problem` and `response` as text, `tokens_used` of the response, `success_rate` of who wrote
it (or null), and `answer`, the reasoning that ends with a score in the tags of the template. The question is rendered
when the file is used, so that one file serves templates with and without conditioning.
"""

import json
import os
from pathlib import Path
from typing import NamedTuple

from .critic_prompt import CriticPrompt, State


class Trace(NamedTuple):
    """A state, the share of right answers of who acts, and what the critic should say."""

    state: State
    success_rate: float | None
    answer: str


_COLUMNS = {
    "problem": (str,),
    "response": (str,),
    "tokens_used": (int,),
    "success_rate": (int, float, type(None)),
    "answer": (str,),
}


def read_traces(file: str | Path, prompt: CriticPrompt) -> list[Trace]:
    """
    The traces of a file.

    Raises:
        `ValueError`: if there is no such file or nothing in it, or a line is no trace or has no answer in the tags of
        `prompt`;
            names the first such line.
    """
    try:
        lines = Path(file).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"critic_sft_dataset={str(file)!r} cannot be read (seen from {Path.cwd()}): a supervised start needs a "
            "file of traces. Make one, or remove the key."
        ) from error
    traces = [
        _trace(f"critic_sft_dataset={str(file)!r}, line {i}", line, prompt)
        for i, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not traces:
        raise ValueError(f"critic_sft_dataset={str(file)!r} holds no traces: a supervised start would learn nothing.")
    return traces


def _trace(where: str, line: str, prompt: CriticPrompt) -> Trace:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise ValueError(f"{where} is no JSON object. A trace is one, with {', '.join(_COLUMNS)}.")
    wrong = [name for name, kinds in _COLUMNS.items() if type(row.get(name)) not in kinds or name not in row]
    if wrong:
        raise ValueError(
            f"{where} has no {' and no '.join(wrong)} of the right type: {', '.join(_COLUMNS)} make a trace."
        )
    if prompt.parse(row["answer"]) is None:
        raise ValueError(f"{where} has no answer like {prompt.write(0.7)}: the tags are those of critic_prompt.")
    return Trace(State(row["problem"], row["response"], row["tokens_used"]), row["success_rate"], row["answer"])


def write_traces(file: str | Path, traces: list[Trace]) -> None:
    """Inverse of [`read_traces`]; the file is written whole or not at all."""
    rows = [t.state._asdict() | {"success_rate": t.success_rate, "answer": t.answer} for t in traces]
    path = Path(file)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    os.replace(temporary, path)
