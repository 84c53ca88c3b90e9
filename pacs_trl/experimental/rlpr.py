"""RLPR ([arXiv 2506.18254](https://huggingface.co/papers/2506.18254)): labels without a verifier, from the policy's
probability of the reference answer.

Extension points: rewards that need the policy's log-probs, and labels of a completion. `probability_reward` puts the
reference answer in the place of a completion's own answer, and takes the mean probability of its tokens, `s`. Directly
after the prompt it is `s0`, computed at the start of a run, under its policy, for the whole training set, and kept in
checkpoints. The spread filter removes groups whose labels lie close together. See docs/weights_and_labels.md.
"""

import hashlib
import inspect
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from datasets import Dataset

from ..pacs_config import PACSConfig
from ..pacs_trainer import PACSTrainer
from ..rewards import completion_text, shared_arguments
from ..settings import bounded


THINK = ("<think>", "</think>")
TAGS = ("<answer>", "</answer>")
BOX = "\\boxed{"


class Edited(NamedTuple):
    """A completion with the reference answer in the place of its own, and the place of that in the text."""

    text: str
    start: int
    end: int


def with_reference(text: str | None, answer: str, prompt: Any = None) -> Edited | None:
    """
    Return the text up to the answer, the white space there (in tags a space if none), the reference answer, and the
    closing tag.

    The answer stands in `<answer> ... </answer>`, whose first tag must be there once; or, in a text without that tag
    that was generated from a prompt without it, in its only `\\boxed{...}`. `None` for any other text.
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

    A prompt with `<think>` asks for `<think> ... </think> ... <answer> ... </answer>` from the first character on,
    each tag once (`format_mode=R1` of the authors); any other one for the two answer tags once each, in order
    (`R1_nothink`). Where neither prompt nor text has an answer tag it is one box that is closed.
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


def check_reference_answers(dataset: Any, tools: Any = None) -> None:
    """
    Raises:
        `ValueError`: if the training set has no length, no reference answers or empty ones, or there are tools.
    """
    has_answers = isinstance(dataset, Dataset) and "solution" in dataset.column_names and not tools
    empty = [i for i, answer in enumerate(dataset["solution"] if has_answers else []) if not reference_text(answer)]
    if not has_answers or empty:
        raise ValueError(
            "probability_reward needs a training set in memory (streaming=False) with a column `solution`, none of "
            f"whose answers is empty, and no tools. Remove empty answers (rows {empty[:5]}) and tools, or use another "
            "reward."
        )


def _key(prompt: Any, answer: Any) -> str:
    text = json.dumps([prompt, reference_text(answer)], default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


class ReferenceProbability:
    """
    Argument `reference_probability` of reward functions.

    Args:
        trainer ([`RLPRTrainer`]): Computes log-probs, tokenizes prompts, and has the training set.
    """

    is_well_formed = staticmethod(is_well_formed)

    def __init__(self, trainer):
        self.trainer = trainer
        self.without: dict[str, float] = {}  # by prompt and answer

    def after_reasoning(self, prompts: Sequence, texts: Sequence[str | None], answers: Sequence[Any]) -> list[float]:
        """Return the mean probability of each reference answer after the reasoning of a completion; 0 for a malformed
        one, and for one that the answer makes longer than `max_completion_length` tokens. All processes must call it
        equally often."""
        edited = [
            with_reference(text, reference_text(answer), prompt)
            for prompt, text, answer in zip(prompts, texts, answers, strict=True)
        ]
        return self._mean(prompts, edited, self.trainer.args.max_completion_length)

    def without_reasoning(self, prompts: Sequence, answers: Sequence[Any]) -> list[float]:
        """Return the same directly after the prompt, under the policy at the start of the run; for prompts outside of
        the training set, under the current policy. All processes must call it equally often."""
        keys = [_key(*pair) for pair in zip(prompts, answers, strict=True)]
        missing = {key: i for i, key in enumerate(keys) if key not in self.without}
        found = self.without | self._score_without([(key, prompts[i], answers[i]) for key, i in missing.items()])
        return [found[key] for key in keys]

    def begin(self) -> None:
        """Compute it for the training set at the start of a run, on all processes together."""
        accelerator, dataset = self.trainer.accelerator, self.trainer.train_dataset
        pairs = zip(dataset["prompt"], dataset["solution"], strict=True)
        wanted = list({_key(*pair): (_key(*pair), *pair) for pair in pairs}.values())
        own = wanted[accelerator.process_index :: accelerator.num_processes]
        self.without = dict(gather_object(list(self._score_without(own).items())))

    def _score_without(self, rows: Sequence[tuple[str, Any, Any]]) -> dict[str, float]:
        keys, prompts, answers = zip(*rows, strict=True) if rows else ((), (), ())
        answers = [reference_text(answer) for answer in answers]
        edited = [Edited(f" {answer} ", 1, 1 + len(answer)) for answer in answers]
        return dict(zip(keys, self._mean(prompts, edited, None), strict=True))

    def _mean(self, prompts: Sequence, edited: Sequence[Edited | None], longest: int | None) -> list[float]:
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


def probability_reward(
    completions: list,
    prompts: list,
    solution: list | None = None,
    *,
    reference_probability: "ReferenceProbability | None" = None,
    truncated: list[bool] | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    **kwargs: Any,
) -> list[float]:
    """
    Return `0.9 * max(0, s - s0) + 0.1 * format`, without a verifier: `s` is the mean probability of the tokens of the
    reference answer in the place of the completion's own one, 0 where that cannot be found; `s0` the same directly
    after the prompt under the policy at the start of the run; `format` whether the tags that the prompt names stand in
    the completion once each (or, without tags, one box).

    Args:
        completions (`list`), prompts (`list`): Plain (`str`) or conversational.
        solution (`list`): Reference answers: any text; of a list of alternatives the first.
        reference_probability ([`ReferenceProbability`]): Passed by [`RLPRTrainer`].
        truncated (`list[bool]`, *optional*): Passed by the trainer: completions without an end-of-sequence token. Of
            these `s` is 0 unless they are well formed, see `verification_grade_truncated`.
        log_metric (`Callable`, *optional*): Passed by TRL.
        **kwargs: Further columns that TRL passes; unused.

    Returns:
        `list[float]`: One label in [0, 1] per completion.
    """
    if reference_probability is None:
        raise ValueError("`probability_reward` needs a trainer that knows the policy's log-probs: set `method: rlpr`.")
    if solution is None:
        raise ValueError("`probability_reward` needs a column `solution`. Rename the column of reference answers.")
    texts = [completion_text(completion) for completion in completions]
    formats = [float(reference_probability.is_well_formed(*pair)) for pair in zip(texts, prompts, strict=True)]
    if truncated is not None and not shared_arguments().verification_grade_truncated:
        texts = [None if cut and not f else text for text, cut, f in zip(texts, truncated, formats, strict=True)]
    after = reference_probability.after_reasoning(prompts, texts, solution)
    without = reference_probability.without_reasoning(prompts, solution)
    if log_metric is not None and texts:
        for name, values in (("after_reasoning", after), ("without_reasoning", without), ("format", formats)):
            log_metric(f"probability/{name}", sum(values) / len(values))
    return [0.9 * max(0.0, s - s0) + 0.1 * f for s, s0, f in zip(after, without, formats, strict=True)]


# As in RLPR: steps that are ignored, steps whose mean starts the moving average, and its decay.
_IGNORED, _COLLECTED, _DECAY = 5, 5, 0.99


class SpreadFilter:
    """
    Compares the spread of a group, the standard deviation of its labels, with a moving average over generations.

    Args:
        share (`float`): A group below `share` times the average is masked out. RLPR: 0.5 with Qwen, 0.9 with Llama, 1
            with Gemma.

    Attributes:
        state (list of `float`): The number of generations, and their mean spreads until the average begins; then only
            the average.
    """

    def __init__(self, share: float):
        self.share = share
        self.state: list[float] = [0.0]

    def __call__(self, labels: torch.Tensor, num_generations: int) -> tuple[torch.Tensor, dict[str, float]]:
        """
        Return labels with NaN for the rows of groups without spread, and metrics.

        Args:
            labels (`torch.Tensor` of shape `(B,)`): Of a generation on all processes, NaN without a verdict.
            num_generations (`int`): Rows of a group, adjacent.
        """
        grid = labels.view(-1, num_generations).double()
        known = ~grid.isnan()
        count = known.sum(dim=1)
        mean = grid.nansum(dim=1) / count.clamp(min=1)
        squares = ((grid - mean[:, None]) ** 2).nansum(dim=1)
        spreads = (squares / (count - 1).clamp(min=1)).sqrt()  # unbiased
        has_spread = count >= 2
        number, *means = self.state
        of_step = spreads[has_spread].mean().item() if has_spread.any() else None
        active = number >= _IGNORED + _COLLECTED and bool(means)
        bound = self.share * means[0] if active else 0.0
        dropped = has_spread & (spreads < bound)
        if of_step is not None:
            if active:
                means = [_DECAY * means[0] + (1 - _DECAY) * of_step]
            elif number >= _IGNORED:
                means = [*means, of_step]
        self.state = [number + 1, *means]
        if number + 1 == _IGNORED + _COLLECTED and means:
            self.state = [number + 1, sum(means) / len(means)]
        metrics = {
            "spread_filter/spread": float("nan") if of_step is None else of_step,
            "spread_filter/bound": bound,
            "spread_filter/dropped_fraction": (dropped.sum() / has_spread.sum().clamp(min=1)).item(),
        }
        return labels.masked_fill(dropped.repeat_interleave(num_generations), torch.nan), metrics


@dataclass
class RLPRConfig(PACSConfig):
    """
    Configuration class for the [`RLPRTrainer`]: every parameter of [`PACSConfig`], and:

    Parameters:
        spread_filter (`float`, *optional*):
            Groups whose labels have a standard deviation below this share of its moving average are masked out, as in
            RLPR (0.5 with Qwen models): for soft labels, which are never all equal. It begins after ten generations.
    """

    spread_filter: float | None = bounded(None, above=0, most=2)


class RLPRTrainer(PACSTrainer):
    """[`PACSTrainer`] whose reward functions may ask for probabilities of reference answers, and whose labels may be
    filtered."""

    _name = "RLPR"
    _config_class = RLPRConfig
    _own_shared_settings = ("spread_filter", *PACSTrainer._own_shared_settings)

    def _prepare_loading(self, model, args, arguments) -> None:
        super()._prepare_loading(model, args, arguments)
        functions = arguments["reward_funcs"]
        functions = functions if isinstance(functions, list) else [functions]
        self._needs_reference = any(
            callable(each) and "reference_probability" in inspect.signature(each).parameters for each in functions
        )
        if self._needs_reference:
            check_reference_answers(arguments["train_dataset"], arguments["tools"])

    def _prepare_drawing(self) -> None:
        self.reference_probability = ReferenceProbability(self)
        super()._prepare_drawing()

    def reward_arguments(self) -> dict[str, Any]:
        return super().reward_arguments() | {"reference_probability": self.reference_probability}

    def _labels_of(self, rewards_per_func: torch.Tensor) -> torch.Tensor:
        labels = super()._labels_of(rewards_per_func)
        if self._spread_filter is None or not self.model.training:
            return labels
        labels, metrics = self._spread_filter(labels, self.num_generations)
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)
        return labels

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if self._needs_reference and resume_from_checkpoint is None:
            self.reference_probability.begin()
        return prepared

    def _reset_run(self) -> None:
        super()._reset_run()
        share = self.args.spread_filter
        self._spread_filter = SpreadFilter(share) if share is not None else None

    def _own_state(self) -> dict:
        spreads = self._spread_filter.state if self._spread_filter else None
        return super()._own_state() | {"spreads": spreads, "without_reasoning": self.reference_probability.without}

    def _load_own_state(self, checkpoint: Path, state: dict) -> None:
        super()._load_own_state(checkpoint, state)
        self.reference_probability.without = state["without_reasoning"]
        if self._spread_filter is not None:
            self._spread_filter.state = state["spreads"]
