"""Prompt of a generative critic, and parsing of its answer (GenAC, arXiv 2604.10701, figure 3).

A template of `critic_prompts` defines both. The text directly before and after `{score}` are the tags of an answer:
`<answer>{score}</answer>`.
"""

import re
from pathlib import Path
from typing import NamedTuple


TEMPLATES = Path(__file__).parent / "critic_prompts"
HIGHEST = 10
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


class State(NamedTuple):
    """Problem, partial response as text, and the number of its tokens."""

    problem: str
    response: str
    tokens_used: int


class Actor(NamedTuple):
    """The policy: name and size, completion limit in tokens, and smoothed success rate (`None` at the start)."""

    name: str
    token_limit: int
    success_rate: float | None


class CriticPrompt:
    """Template of a critic prompt by name; `tags` is the text around the integer of an answer."""

    def __init__(self, name: str):
        self.template = (TEMPLATES / f"{name}.txt").read_text(encoding="utf-8").strip()
        before, after = re.findall(r"(\S+)\{score\}(\S*[^\s.,;:])", self.template)[0]  # a sentence may end after them
        self.tags = (before, after)
        self._answer = re.compile(rf"{re.escape(before)}\s*([0-9]{{1,2}})\s*{re.escape(after)}")

    def render(self, state: State, actor: Actor) -> str:
        """Return the prompt of a state. Braces in problem and response are kept."""
        rate = "unknown" if actor.success_rate is None else f"{actor.success_rate:.0%}"
        words = {name: str(value) for name, value in state._asdict().items()}
        words |= {"score": "integer", "actor": actor.name, "success_rate": rate, "token_limit": str(actor.token_limit)}
        return _PLACEHOLDER.sub(lambda match: words[match[1]], self.template)

    def parse(self, answer: str) -> float | None:
        """Return the value in [0, 1] from the last tags of an answer; `None` without an integer from 0 to 10."""
        found = self._answer.findall(answer)
        return int(found[-1]) / HIGHEST if found and int(found[-1]) <= HIGHEST else None

    def write(self, value: float) -> str:
        """Return an answer that contains a value rounded to tenths."""
        return f"{self.tags[0]}{round(HIGHEST * value)}{self.tags[1]}"
