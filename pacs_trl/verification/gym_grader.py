"""Problems of reasoning-gym: entries named by (task, config, seed, index), rebuilt and scored in worker processes.

Some of its scorers evaluate the answer of the model as Python, so each answer is scored in a separate process, which
is confined as programs are, and must be a literal, because code could write any score.
"""

import ast
import builtins
import json
import os
import signal
import sys
from functools import lru_cache
from typing import Any

from . import Outcome, confinement
from .numerals import last_number


@lru_cache(maxsize=64)
def _stored_dataset(name: str) -> Any:
    from reasoning_gym.factory import create_dataset

    named = json.loads(name)
    return create_dataset(named["task"], seed=named["seed"], size=named["size"], **named["config"])


def grade_entry(answer: str, solution: str, cpu_seconds: float) -> tuple[Outcome, float]:
    """Return outcome and score of an answer to the entry that `solution` names. The scorer runs in a confined child
    process, so that an answer that takes it over changes no other grade."""
    try:
        name = json.loads(solution)
        index, is_number = name.pop("index"), name.pop("answer", "") == "last_number"
        entries = _stored_dataset(json.dumps(name, sort_keys=True))
        entry = entries[index]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return Outcome.GOLD_UNPARSEABLE, 0.0
    if is_number and not (answer := last_number(answer)):
        return Outcome.NO_ANSWER, 0.0
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _confine(writer)
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
            os.write(writer, str(_score(answer, entries, entry)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    report = os.read(reader, 64)  # the score as text; empty if the child has ended without one
    os.close(reader)
    if report:
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    try:
        share = float(report)
    except ValueError:
        timed_out = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
        return (Outcome.TIMEOUT if timed_out else Outcome.KILLED), 0.0
    share = min(max(share, 0.0), 1.0) if share == share else 0.0
    return (Outcome.CORRECT if share == 1.0 else Outcome.WRONG), share


def _score(answer: str, entries: Any, entry: dict[str, Any]) -> float:
    evaluate = builtins.eval

    def evaluate_answer(source: Any, *names: Any) -> Any:
        if names and not any(mark in answer for mark in ("'", '"', "__")):  # of sympy: names are symbols
            return evaluate(source, *names)
        return evaluate(source) if source in str(entry) else ast.literal_eval(source)

    builtins.eval = evaluate_answer
    try:
        return float(entries.score_answer(answer, entry))
    except MemoryError:
        raise
    except Exception:  # an answer that the scorer cannot read
        return 0.0


def _confine(writer: int) -> None:
    """Let this process read installed packages and write to a descriptor, and nothing else, where the kernel can."""
    confinement.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ends with the worker
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    confinement.close_other_files(writer)
    missing, packages = confinement.missing_layers(), [path for path in sys.path if path.endswith("-packages")]
    readable = [*confinement.readable_places(), *packages]
    ruleset = None if "landlock" in missing else confinement.landlock_ruleset(readable)
    confinement.confine(ruleset, filter_calls="seccomp" not in missing)
