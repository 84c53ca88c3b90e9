"""What a generative critic is asked, and how its answer is read (GenAC, arXiv 2604.10701, figure 3).

One template file says everything. Placeholders are replaced by what is known of a state; no gold answer is among them.
The text that touches `{score}` on both sides, up to the next space, are the tags of an answer:
`<answer>{score}</answer>`. A template without the placeholders of in-context conditioning (who acts, how often it has
been right, how far it is) leaves it out.
"""

import re
from pathlib import Path
from typing import NamedTuple


TEMPLATES = Path(__file__).parent / "critic_prompts"

NEEDED = ("problem", "response", "score")
CONDITIONING = ("actor", "success_rate", "tokens_used", "token_limit")

_PLACEHOLDER = re.compile(r"\{(\w+)\}")
HIGHEST = 10


class State(NamedTuple):
    """
    Before an action of the policy.

    Attributes:
        problem (`str`): As the policy was asked.
        response (`str`): What it has written so far.
        tokens_used (`int`): The same in tokens.
    """

    problem: str
    response: str
    tokens_used: int


class Actor(NamedTuple):
    """Who continues: name and size, tokens it may write, and the smoothed share of right answers, `None` before the
    first."""

    name: str
    token_limit: int
    success_rate: float | None


class CriticPrompt:
    """
    A template, read.

    Args:
        template (`str`): Its text.
        name (`str`): What errors call it.

    Attributes:
        tags (pair of `str`): Around the integer of an answer.

    Raises:
        `ValueError`: if a placeholder is missing or unknown, or nothing touches `{score}` on a side.
    """

    def __init__(self, template: str, name: str = "critic_prompt"):
        self.template = template.strip()
        found = _PLACEHOLDER.findall(self.template)
        missing = [f"{{{word}}}" for word in NEEDED if word not in found]
        unknown = sorted({f"{{{word}}}" for word in found if word not in (*NEEDED, *CONDITIONING)})
        if missing or unknown:
            wrong = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has {', '.join(unknown)}"] * bool(unknown)
            raise ValueError(
                f"The critic's template {name} {' and '.join(wrong)}: the critic is told of a state by "
                f"{', '.join(f'{{{word}}}' for word in (*NEEDED, *CONDITIONING))}, of which it needs the first three. "
                f"Mend the template, or take one of {', '.join(shipped())}."
            )
        around = re.search(r"(\S+)\{score\}(\S*[^\s.,;:])", self.template)  # a sentence may end behind the tags
        if around is None or self.template.count("{score}") != 1 or _PLACEHOLDER.search("".join(around.groups())):
            raise ValueError(
                f"The critic's template {name} must have {{score}} once, between the tags of an answer and without a "
                "space, as in <answer>{score}</answer>: by them the answer is read."
            )
        self.tags = (around[1], around[2])
        self._answer = re.compile(rf"{re.escape(around[1])}\s*([0-9]{{1,2}})\s*{re.escape(around[2])}")

    @classmethod
    def read(cls, name: str) -> "CriticPrompt":
        """
        A template by its file, or by its name among those of this package.

        Raises:
            `ValueError`: if there is no such file, or it is no template.
        """
        file = TEMPLATES / f"{name}.txt" if name in shipped() else Path(name).expanduser()
        try:
            return cls(file.read_text(encoding="utf-8"), name)
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"critic_prompt={name!r} is neither a text file that can be read (seen from {Path.cwd()}) nor one of "
                f"{', '.join(shipped())}."
            ) from error

    def render(self, state: State, actor: Actor) -> str:
        """The question. What stands in problem and response stays as it is, braces too."""
        rate = "unknown" if actor.success_rate is None else f"{actor.success_rate:.0%}"
        words = {
            "problem": state.problem,
            "response": state.response,
            "score": "integer",
            "actor": actor.name,
            "success_rate": rate,
            "tokens_used": str(state.tokens_used),
            "token_limit": str(actor.token_limit),
        }
        return _PLACEHOLDER.sub(lambda match: words[match[1]], self.template)

    def parse(self, answer: str) -> float | None:
        """The value in [0, 1] that the last tags of an answer hold; `None` where there is no integer from 0 to 10 in
        them."""
        found = self._answer.findall(answer)
        return int(found[-1]) / HIGHEST if found and int(found[-1]) <= HIGHEST else None

    def write(self, value: float) -> str:
        """The answer that says a value, rounded to tenths."""
        return f"{self.tags[0]}{round(HIGHEST * value)}{self.tags[1]}"

    def check_vocabulary(self, tokenizer, name: str) -> None:
        """
        Raises:
            `ValueError`: if a tokenizer cannot write the answers.
        """
        lost = [
            score
            for score in map(self.write, (i / HIGHEST for i in range(HIGHEST + 1)))
            if tokenizer.decode(tokenizer(score, add_special_tokens=False)["input_ids"], skip_special_tokens=True)
            != score
        ]
        if lost:
            raise ValueError(
                f"The critic {name} cannot write {lost[0]}: its tokenizer does not give the tags back, so that no "
                "answer could be "
                "read. Use a template with tags that its vocabulary has (critic_prompt), or another critic."
            )


def shipped() -> list[str]:
    """Names of the templates of this package."""
    return sorted(path.stem for path in TEMPLATES.glob("*.txt"))
