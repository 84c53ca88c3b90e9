"""How likely the policy finds the reference answer, after a completion's reasoning and without any: labels without a verifier.

RLPR ([arXiv 2506.18254](https://huggingface.co/papers/2506.18254)) puts the reference answer in the place of a completion's own
answer, and takes the mean probability of its tokens, `s`. Without the reasoning, behind the prompt alone, it is `s0`, which says how
far the answer could be guessed: found when a run begins, under its policy, for the whole training set. Checkpoints keep it, so that
a run that goes on knows it.
"""

import hashlib
import inspect
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset


FILE = "probability_without_reasoning.json"
THINK = ("<think>", "</think>")
TAGS = ("<answer>", "</answer>")
BOX = "\\boxed{"


class Edited(NamedTuple):
    """A completion with the reference answer in the place of its own, and where that begins and ends in the text."""

    text: str
    start: int
    end: int


def with_reference(text: str | None, answer: str, prompt: Any = None) -> Edited | None:
    """
    Return the text up to the answer, the white space behind that (in tags a space if none), the reference answer, and the end.

    The answer stands in `<answer> ... </answer>`, whose first tag must be there once; or, in a text without that tag that was
    generated from a prompt without it, in its only `\\boxed{...}`. `None` for any other text.
    """
    in_tags = TAGS[0] in (text or "") or TAGS[0] in str(prompt)
    opening, closing = (TAGS[0], f" {TAGS[1]}") if in_tags else (BOX, "}")
    if text is None or text.count(opening) != 1:
        return None
    before, after = text.split(opening)
    space = re.match(r"\s*", after)[0] or (" " if in_tags else "")  # type: ignore[index]
    start = len(before) + len(opening) + len(space)
    return Edited(f"{before}{opening}{space}{answer}{closing}", start, start + len(answer))


def is_well_formed(text: str | None, prompt: Any = None) -> bool:
    """
    Return whether a completion has the form that its prompt names.

    A prompt with `<think>` asks for `<think> ... </think> ... <answer> ... </answer>` from the first character on, each tag once
    (`format_mode=R1` of the authors); any other one for the two answer tags once each, in order (`R1_nothink`). Where neither
    prompt nor text has an answer tag it is one box that is closed.
    """
    text, asked = text or "", str(prompt)
    tags = (*THINK, *TAGS) if THINK[0] in asked else TAGS
    if any(tag in text or tag in asked for tag in tags):
        in_order = re.search(".*".join(map(re.escape, tags)), text, re.DOTALL)
        starts = THINK[0] not in tags or text.startswith(THINK[0])
        return starts and in_order is not None and all(text.count(tag) == 1 for tag in tags)
    return text.count(BOX) == 1 and "}" in text.split(BOX)[1]


def reference_text(answer: Any) -> str:
    """A reference answer as text: of alternatives the first."""
    first = next(iter(answer), None) if isinstance(answer, list) else answer
    return "" if first is None else str(first).strip()


def asks_for_reference(function: Any) -> bool:
    """Whether a reward function has a parameter `reference_probability`."""
    return callable(function) and "reference_probability" in inspect.signature(function).parameters


def check_reference_answers(reward_funcs: Any, dataset: Any, guidance: str | None, tools: Any = None) -> None:
    """
    Raises:
        `ValueError`: if a reward function asks for probabilities of reference answers, and the training set has no length, no answers
            or empty ones, or there are guided attempts or tools.
    """
    if not any(map(asks_for_reference, reward_funcs if isinstance(reward_funcs, list) else [reward_funcs])):
        return
    if not isinstance(dataset, Dataset) or "solution" not in dataset.column_names:
        columns = ", ".join(dataset.column_names or []) if isinstance(dataset, Dataset | IterableDataset) else ""
        raise ValueError(
            "probability_reward looks at the answers of the whole training set first: it must have a length (streaming=False) and a "
            f"column `solution`. This one is a {type(dataset).__name__} with {columns or 'no known columns'}."
        )
    if guidance is not None:
        raise ValueError(
            f"guidance={guidance!r} makes no sense with probability_reward: what the answer's probability is without reasoning is known "
            "of plain prompts only, and a hint moves both. Remove guidance."
        )
    if tools:
        raise ValueError(
            "tools make no sense with probability_reward: it takes the probability of the answer behind one turn of reasoning, and what a "
            "tool said would be missing. Remove tools, or use another reward."
        )
    empty = [i for i, answer in enumerate(dataset["solution"]) if not reference_text(answer)]
    if empty:
        raise ValueError(
            f"{len(empty)} of {len(dataset)} reference answers are empty, the first in row {empty[0]}: probability_reward has nothing "
            "whose probability it could take. Leave these rows out, or fill the column of answers."
        )


def _key(prompt: Any, answer: Any) -> str:
    text = json.dumps([prompt, reference_text(answer)], default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


class ReferenceProbability:
    """
    What a reward function with a parameter `reference_probability` gets.

    Args:
        trainer ([`RolloutTrainer`]): Scores, renders prompts, knows the training set.
    """

    is_well_formed = staticmethod(is_well_formed)

    def __init__(self, trainer):
        self.trainer = trainer
        self.without: dict[str, float] = {}  # by prompt and answer

    def after_reasoning(self, prompts: Sequence, texts: Sequence[str | None], answers: Sequence[Any]) -> list[float]:
        """Mean probability of each reference answer behind the reasoning of a completion; 0 for a malformed one, and for one that
        the answer makes longer than `max_completion_length` tokens. All processes must call it equally often."""
        edited = [
            with_reference(text, reference_text(answer), prompt)
            for prompt, text, answer in zip(prompts, texts, answers, strict=True)
        ]
        return self._mean(prompts, edited, self.trainer.args.max_completion_length)

    def without_reasoning(self, prompts: Sequence, answers: Sequence[Any]) -> list[float]:
        """The same right behind the prompt, under the policy at the start of the run. Of prompts outside of the training set it is
        that of today. All processes must call it equally often."""
        keys = [_key(*pair) for pair in zip(prompts, answers, strict=True)]
        missing = {key: i for i, key in enumerate(keys) if key not in self.without}
        found = self.without | self._score_without([(key, prompts[i], answers[i]) for key, i in missing.items()])
        return [found[key] for key in keys]

    def begin(self) -> None:
        """Find it for the training set at the start of a run, on all processes together."""
        accelerator, wanted = self.trainer.accelerator, list(self._training_problems().values())
        own = wanted[accelerator.process_index :: accelerator.num_processes]
        self.without = dict(gather_object(list(self._score_without(own).items())))

    def save(self, checkpoint: Path) -> None:
        """Write down what is known, on one process."""
        (checkpoint / FILE).write_text(json.dumps(self.without))

    def load(self, checkpoint: Path) -> None:
        """
        What the run knew that goes on from a checkpoint.

        Raises:
            `ValueError`: if it knew nothing, or not of all of these data.
        """
        self.without = json.loads((checkpoint / FILE).read_text()) if (checkpoint / FILE).is_file() else {}
        known = self._training_problems().keys()
        if missing := known - self.without.keys():
            raise ValueError(
                f"Of {len(missing)} of {len(known)} training problems the probability of the answer without reasoning is not known: "
                f"{checkpoint / FILE} is missing, or of other data. It belongs to the policy at the start of the run, which this one "
                "is no longer. Put file and data back, or start a new run."
            )

    def _training_problems(self) -> dict[str, tuple[str, Any, Any]]:
        rows = self.trainer.train_dataset.select_columns(["prompt", "solution"])
        keys = (_key(row["prompt"], row["solution"]) for row in rows)
        return {key: (key, row["prompt"], row["solution"]) for key, row in zip(keys, rows, strict=True)}

    def _score_without(self, rows: Sequence[tuple[str, Any, Any]]) -> dict[str, float]:
        answers = [reference_text(answer) for _, _, answer in rows]
        edited = [Edited(f" {answer} ", 1, 1 + len(answer)) for answer in answers]
        return dict(zip((row[0] for row in rows), self._mean([row[1] for row in rows], edited, None), strict=True))

    def _mean(self, prompts: Sequence, edited: Sequence[Edited | None], longest: int | None) -> list[float]:
        """Mean probability of the tokens of each answer; 0 where there is none."""
        tokenizer, places, rows = self.trainer._tokenizer, {}, []
        for i, each in enumerate(edited):
            if each is None:
                continue
            tokens = tokenizer(each.text, add_special_tokens=False, return_offsets_mapping=True)
            where = [j for j, (a, b) in enumerate(tokens["offset_mapping"]) if a < each.end and b > each.start]
            ids = [*tokens["input_ids"], tokenizer.eos_token_id]
            if where and (longest is None or len(ids) <= longest):
                places[i] = where
                rows.append(ids)
        prompt_ids = self.trainer._tokenize_prompts([prompts[i] for i in places])[0] if places else []
        logps = self.trainer.score(prompt_ids, rows)
        found = dict.fromkeys(range(len(edited)), 0.0)
        for (i, where), of_row in zip(places.items(), logps, strict=True):
            found[i] = of_row[where].exp().mean().item()
        return list(found.values())
