"""Prompt of a generative critic, and parsing of its answer (GenAC, arXiv 2604.10701, figure 3).

A template file defines both. Its placeholders never include the gold answer. The text directly before and after
`{score}`, up to the next space, are the tags of an answer: `<answer>{score}</answer>`. Placeholders of in-context
conditioning are optional.
"""

import re
from pathlib import Path
from typing import NamedTuple


TEMPLATES = Path(__file__).parent / "critic_prompts"
NEEDED = {"problem", "response", "score"}
CONDITIONING = {"actor", "success_rate", "tokens_used", "token_limit"}
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
    """
    Template of a critic prompt.

    Args:
        name (`str`): File, or name of a template of this package.

    Attributes:
        tags (pair of `str`): Text around the integer of an answer.

    Raises:
        `ValueError`: if the file cannot be read, a placeholder is missing or unknown, or `{score}` has no tags.
    """

    def __init__(self, name: str):
        file = TEMPLATES / f"{name}.txt" if name in shipped() else Path(name).expanduser()
        try:
            self.template = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"critic_prompt={name!r} cannot be read from {Path.cwd()}. Name a text file, or one of "
                f"{', '.join(shipped())}."
            ) from error
        found = {*_PLACEHOLDER.findall(self.template)}
        around = re.search(r"(\S+)\{score\}(\S*[^\s.,;:])", self.template)  # a sentence may end after the tags
        is_complete = NEEDED <= found <= NEEDED | CONDITIONING and self.template.count("{score}") == 1
        if around is None or not is_complete or _PLACEHOLDER.search("".join(around.groups())):
            raise ValueError(
                f"critic_prompt={name!r} has the placeholders {sorted(found)}. It needs {sorted(NEEDED)}, may have "
                f"{sorted(CONDITIONING)}, and {{score}} stands once, in tags: <answer>{{score}}</answer>."
            )
        self.tags = (around[1], around[2])
        self._answer = re.compile(rf"{re.escape(around[1])}\s*([0-9]{{1,2}})\s*{re.escape(around[2])}")

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


def shipped() -> list[str]:
    """Return the names of the templates of this package."""
    return sorted(path.stem for path in TEMPLATES.glob("*.txt"))
