"""The question to a generative critic, and the value in its answer (GenAC, arXiv 2604.10701, figure 3).

A template file defines both. Placeholders are replaced by what is known of a state; the gold answer is not among them.
The text that touches `{score}` on both sides, up to the next space, are the tags of an answer:
`<answer>{score}</answer>`. A template without the placeholders of in-context conditioning leaves it out.
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
    """A problem as the policy was asked, the response so far as text, and its tokens."""

    problem: str
    response: str
    tokens_used: int


class Actor(NamedTuple):
    """The policy: name and size, tokens it may generate, and its smoothed success rate, `None` before the first."""

    name: str
    token_limit: int
    success_rate: float | None


class CriticPrompt:
    """
    A template.

    Args:
        name (`str`): A file, or the name of one of the shipped templates.

    Attributes:
        tags (pair of `str`): Around the integer of an answer.

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
        if missing := NEEDED - found or found - NEEDED - CONDITIONING:
            raise ValueError(
                f"critic_prompt={name!r} lacks or does not know the placeholders {sorted(missing)}. It needs "
                f"{sorted(NEEDED)} and may have {sorted(CONDITIONING)}."
            )
        around = re.search(r"(\S+)\{score\}(\S*[^\s.,;:])", self.template)  # a sentence may end behind the tags
        if around is None or self.template.count("{score}") != 1 or _PLACEHOLDER.search("".join(around.groups())):
            raise ValueError(
                f"critic_prompt={name!r} must have {{score}} once, between the tags of an answer and without a space. "
                "Write for example <answer>{score}</answer>."
            )
        self.tags = (around[1], around[2])
        self._answer = re.compile(rf"{re.escape(around[1])}\s*([0-9]{{1,2}})\s*{re.escape(around[2])}")

    def render(self, state: State, actor: Actor) -> str:
        """Return the question. Braces in problem and response are kept."""
        rate = "unknown" if actor.success_rate is None else f"{actor.success_rate:.0%}"
        words = {name: str(value) for name, value in state._asdict().items()}
        words |= {"score": "integer", "actor": actor.name, "success_rate": rate, "token_limit": str(actor.token_limit)}
        return _PLACEHOLDER.sub(lambda match: words[match[1]], self.template)

    def parse(self, answer: str) -> float | None:
        """Return the value in [0, 1] in the last tags of an answer; `None` without an integer from 0 to 10 there."""
        found = self._answer.findall(answer)
        return int(found[-1]) / HIGHEST if found and int(found[-1]) <= HIGHEST else None

    def write(self, value: float) -> str:
        """Return the answer with a value, rounded to tenths."""
        return f"{self.tags[0]}{round(HIGHEST * value)}{self.tags[1]}"


def shipped() -> list[str]:
    """Return the names of the templates of this package."""
    return sorted(path.stem for path in TEMPLATES.glob("*.txt"))
