"""Problems of reasoning-gym: entries named by (task, config, seed, index), rebuilt and scored in worker processes.

Some of its scorers evaluate the answer of the model as Python, so each answer is scored in a process of its own, which
is confined as programs are.
"""

import json
import os
import signal
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from . import Grade, Outcome, Verifier, confinement, last_boxed


PROTOCOL = "reasoning_gym"


@dataclass(eq=False)
class GymVerifier(Verifier):
    """Score answers to entries of reasoning-gym in parallel, within limits; arguments as in [`Verifier`]. The answer
    is the last `<answer>...</answer>` of a completion, else its last closed box, else the whole completion. Each
    grade's `share` is the score, and a score of 1 is correct."""

    _PROTOCOLS: ClassVar[tuple[str, ...]] = (PROTOCOL,)
    protocol: str = PROTOCOL

    @classmethod
    def like(cls, other: Verifier) -> "GymVerifier":
        """Return a verifier with the limits of another."""
        names = ("num_workers", "timeout_seconds", "cpu_seconds", "memory_limit_mb", "grade_truncated")
        return cls(protocol=PROTOCOL, **{name: getattr(other, name) for name in names})

    def _prepare(self, completion: Any, solution: Any, is_truncated: bool) -> Any:
        text = str.__str__(completion) if isinstance(completion, str) else ""
        if len(text) > self.max_characters:
            return Grade(Outcome.TOO_LONG)
        answer = final_answer(text)
        if answer is None and (not is_truncated or self.grade_truncated):
            answer = text
        if not (answer := (answer or "").strip()):
            return Grade(Outcome.NO_ANSWER)
        return self._key(answer, str(solution)), (answer, (str(solution),))


def final_answer(text: str) -> str | None:
    """Return the content of the last `<answer>...</answer>`, else of the last closed box."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return text[start + len("<answer>") : end] if start >= 0 else last_boxed(text)


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
        index = name.pop("index")
        entries = _stored_dataset(json.dumps(name, sort_keys=True))
        entry = entries[index]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return Outcome.GOLD_UNPARSEABLE, 0.0
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
    found = os.read(reader, 64)  # empty if the child has ended
    os.close(reader)
    if found:
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    try:
        share = float(found)
    except ValueError:
        timed_out = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
        return (Outcome.TIMEOUT if timed_out else Outcome.KILLED), 0.0
    share = min(max(share, 0.0), 1.0) if share == share else 0.0
    return (Outcome.CORRECT if share == 1.0 else Outcome.WRONG), share


def _score(answer: str, entries: Any, entry: dict[str, Any]) -> float:
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
    confinement.close_files_but(writer)
    packages = [path for path in sys.path if path.endswith("-packages")]
    try:
        ruleset = confinement.landlock_ruleset([*confinement.readable_places(), *packages])
    except OSError:
        ruleset = None
    confinement.confine(ruleset, filter_calls=os.uname().machine in confinement.AUDIT_NAMES)
