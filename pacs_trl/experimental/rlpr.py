"""RLPR ([arXiv 2506.18254](https://huggingface.co/papers/2506.18254)): labels without a verifier, from the policy's
probability of the reference answer.

Extension points: rewards that need the policy's log-probs, and labels of a completion. `probability_reward` replaces a
completion's answer by the reference answer, and `s` is the mean probability of its tokens; `s0` is the same directly
after the prompt. `s0` is computed for the whole training set at the start of a run and saved in checkpoints. The
spread filter masks out groups with similar labels. See docs/related_methods.md.
"""

import hashlib
import inspect
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object

from ..data.columns import is_in_memory
from ..errors import UserError
from ..pacs_config import PACSConfig
from ..pacs_trainer import PACSTrainer
from ..rewards import completion_text, shared_arguments
from ..settings.fields import setting


THINK = ("<think>", "</think>")
TAGS = ("<answer>", "</answer>")
BOX = "\\boxed{"


class EditedCompletion(NamedTuple):
    """A completion with the reference answer at the characters from `start` to before `end` of `text`."""

    text: str
    start: int
    end: int


def with_reference(text: str | None, answer: str, prompt: Any = None) -> EditedCompletion | None:
    """
    Return a completion with the reference answer in place of its own: the text up to its answer with leading white
    space (in tags at least a space), the reference answer, and the closing tag.

    The answer is in `<answer> ... </answer>`, whose opening tag must occur once; or, if neither text nor prompt has
    that tag, in the only `\\boxed{...}`. Any other text gives `None`.
    """
    if text is None:
        return None
    opening, space, closing = BOX, "", "}"
    if TAGS[0] in text or TAGS[0] in str(prompt):
        opening, space, closing = TAGS[0], " ", f" {TAGS[1]}"
    if text.count(opening) != 1:
        return None
    before_tag, after_tag = text.split(opening)
    num_spaces = len(after_tag) - len(after_tag.lstrip())
    if num_spaces:
        space = after_tag[:num_spaces]
    before_answer = f"{before_tag}{opening}{space}"
    start = len(before_answer)
    return EditedCompletion(f"{before_answer}{answer}{closing}", start, start + len(answer))


def is_well_formed(text: str | None, prompt: Any = None) -> bool:
    """
    Return whether a completion has the format that its prompt names.

    With `<think>` in the prompt it is `<think> ... </think> ... <answer> ... </answer>` from the first character on,
    each tag once (the authors' `format_mode=R1`); otherwise the two answer tags once each, in order (`R1_nothink`).
    If neither prompt nor text has a tag, it is one closed box.
    """
    text = text or ""
    prompt_text = str(prompt)
    thinks = THINK[0] in prompt_text
    tags = (*THINK, *TAGS) if thinks else TAGS
    has_tags = any(tag in text or tag in prompt_text for tag in tags)
    if not has_tags:
        return text.count(BOX) == 1 and "}" in text.split(BOX)[1]
    if thinks and not text.startswith(THINK[0]):
        return False
    if any(text.count(tag) != 1 for tag in tags):
        return False
    places = [text.index(tag) for tag in tags]
    return places == sorted(places)


def reference_text(answer: Any) -> str:
    """Return a reference answer as text, the first one of several alternatives."""
    first = next(iter(answer), None) if isinstance(answer, list) else answer
    return "" if first is None else str(first).strip()


def _key(prompt: Any, answer: Any) -> str:
    """Return a short key of a prompt and its reference answer, equal on all processes and in a resumed run."""
    text = json.dumps([prompt, reference_text(answer)], default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def probability_reward(
    completions: list,
    prompts: list,
    solution: list,
    *,
    reference_probability: "RLPRTrainer | None" = None,
    truncated: list[bool] | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    **kwargs: Any,
) -> list[float]:
    """
    Return `0.9 * max(0, s - s0) + 0.1 * format`, without a verifier: `s` is the mean token probability of the
    reference answer in place of the completion's answer, 0 without one; `s0` the same directly after the prompt
    under the initial policy of the run; `format` is 1 for a well-formed completion, see [`is_well_formed`].

    Args:
        completions (`list`), prompts (`list`): Plain (`str`) or conversational.
        solution (`list`): Reference answers: any text, or a list of alternatives, whose first one is used.
        reference_probability ([`RLPRTrainer`]): Passed by the trainer.
        truncated (`list[bool]`, *optional*): Completions without an end-of-sequence token, passed by the trainer. They
            have `s = 0` unless well formed or `verification_grade_truncated` is set.
        log_metric (`Callable`, *optional*): Passed by TRL.
        **kwargs: Further columns that TRL passes; unused.

    Returns:
        `list[float]`: One label in [0, 1] per completion.
    """
    if reference_probability is None:
        raise UserError("`probability_reward` needs log-probs of the policy. Set `method: rlpr`.")
    texts = [completion_text(completion) for completion in completions]
    formats = [float(is_well_formed(text, prompt)) for text, prompt in zip(texts, prompts, strict=True)]
    if truncated is not None and not shared_arguments().verification_grade_truncated:
        for i, is_truncated in enumerate(truncated):
            if is_truncated and not formats[i]:
                texts[i] = None
    after_reasoning = reference_probability.after_reasoning(prompts, texts, solution)  # s
    without_reasoning = reference_probability.without_reasoning(prompts, solution)  # s0
    if log_metric is not None and texts:
        log_metric("probability/after_reasoning", sum(after_reasoning) / len(texts))
        log_metric("probability/without_reasoning", sum(without_reasoning) / len(texts))
        log_metric("probability/format", sum(formats) / len(texts))
    return [
        0.9 * max(0.0, s - s0) + 0.1 * format_reward
        for s, s0, format_reward in zip(after_reasoning, without_reasoning, formats, strict=True)
    ]


# As in RLPR: generations that are ignored, generations whose mean starts the moving average, and its decay.
_IGNORED, _COLLECTED, _DECAY = 5, 5, 0.99


def filter_by_spread(
    labels: torch.Tensor, num_generations: int, share: float, history: list[float]
) -> tuple[torch.Tensor, dict[str, float], list[float]]:
    """
    Mask out groups whose spread, the standard deviation of their labels, is far below its moving average.

    Args:
        labels (`torch.Tensor` of shape `(B,)`): Of a generation on all processes, NaN without a verdict.
        num_generations (`int`): Completions of a group, adjacent.
        share (`float`): A group below `share` times the average is masked out. RLPR: 0.5 with Qwen, 0.9 with Llama, 1
            with Gemma.
        history (list of `float`): `[0.0]` at the start of a run, then the returned one: the number of generations, and
            their mean spreads until the average begins; then only the average.

    Returns:
        Labels with NaN for the completions of masked groups, metrics, and the next `history`.
    """
    grid = labels.view(-1, num_generations).double()
    num_labels = (~grid.isnan()).sum(dim=1)
    mean_labels = grid.nansum(dim=1) / num_labels.clamp(min=1)
    squares = ((grid - mean_labels[:, None]) ** 2).nansum(dim=1)
    spreads = (squares / (num_labels - 1).clamp(min=1)).sqrt()  # unbiased, one per group
    has_spread = num_labels >= 2
    mean_spread = math.nan
    if has_spread.any():
        mean_spread = spreads[has_spread].mean().item()

    num_before, *means = history  # `means` is the average alone after the first generations
    has_average = num_before >= _IGNORED + _COLLECTED and bool(means)
    bound = 0.0
    if has_average:
        bound = share * means[0]
    is_dropped = has_spread & (spreads < bound)

    if has_spread.any() and num_before >= _IGNORED:
        if has_average:
            means = [_DECAY * means[0] + (1 - _DECAY) * mean_spread]
        else:
            means = [*means, mean_spread]
    number = num_before + 1
    if number == _IGNORED + _COLLECTED and means:
        means = [sum(means) / len(means)]
    metrics = {
        "spread_filter/spread": mean_spread,
        "spread_filter/bound": bound,
        "spread_filter/dropped_fraction": (is_dropped.sum() / has_spread.sum().clamp(min=1)).item(),
    }
    kept_labels = labels.masked_fill(is_dropped.repeat_interleave(num_generations), math.nan)
    return kept_labels, metrics, [number, *means]


@dataclass
class RLPRConfig(PACSConfig):
    """Configuration class for the [`RLPRTrainer`]: every parameter of [`PACSConfig`], and the spread filter."""

    supports_rollout_lag = False
    supports_images = False

    spread_filter: float | None = setting(
        None,
        "Mask out groups whose labels have a standard deviation below this share of its moving average, "
        "after ten generations: for soft labels, which are never all equal. RLPR uses 0.5 with Qwen "
        "models.",
        above=0,
        most=2,
    )


class RLPRTrainer(PACSTrainer):
    """[`PACSTrainer`] whose reward functions may use probabilities of reference answers, and whose labels may be
    filtered by their spread."""

    args: RLPRConfig
    _spreads: list[float]  # `history` of `filter_by_spread`
    _without_reasoning: dict[str, float]  # by key, of the training set under the initial policy
    _name = "RLPR"
    _paper = {"title": "RLPR: Extrapolating RLVR to General Domains without Verifiers", "id": "2506.18254"}
    _config_class = RLPRConfig
    _saved_attributes = (*PACSTrainer._saved_attributes, "_spreads", "_without_reasoning")

    def _before_loading(self, model, args, arguments) -> None:
        super()._before_loading(model, args, arguments)
        reward_funcs, dataset = arguments["reward_funcs"], arguments["train_dataset"]
        if not isinstance(reward_funcs, list):
            reward_funcs = [reward_funcs]
        self._needs_reference = any(
            callable(function) and "reference_probability" in inspect.signature(function).parameters
            for function in reward_funcs
        )
        if not self._needs_reference:
            return
        has_answers = is_in_memory(dataset) and "solution" in dataset.column_names
        has_answers = has_answers and all(reference_text(answer) for answer in dataset["solution"])
        uses_tools = arguments["tools"] or arguments["environment_factory"]
        if uses_tools or not has_answers:
            raise UserError(
                "probability_reward needs a training set in memory (streaming=False), a column `solution` without "
                "empty answers, and no tools. Change these, or use another reward."
            )

    def reward_arguments(self) -> dict[str, Any]:
        return super().reward_arguments() | {"reference_probability": self}

    def after_reasoning(self, prompts: Sequence, texts: Sequence[str | None], answers: Sequence[Any]) -> list[float]:
        """Return the mean token probability of each reference answer after the reasoning of a completion: 0 if the
        completion is malformed or exceeds `max_completion_length` tokens with that answer. All processes must call
        it equally often."""
        edited = [
            with_reference(text, reference_text(answer), prompt)
            for prompt, text, answer in zip(prompts, texts, answers, strict=True)
        ]
        return self._mean_probabilities(prompts, edited, self.args.max_completion_length)

    def without_reasoning(self, prompts: Sequence, answers: Sequence[Any]) -> list[float]:
        """Return the mean token probability of each reference answer directly after the prompt, under the initial
        policy of the run; under the current policy for prompts outside of the training set. All processes must call
        it equally often."""
        keys = [_key(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
        missing = {}
        for key, prompt, answer in zip(keys, prompts, answers, strict=True):
            if key not in self._without_reasoning:
                missing[key] = (prompt, answer)
        probabilities = self._without_reasoning | self._compute_without_reasoning(missing)
        return [probabilities[key] for key in keys]

    def _compute_without_reasoning(self, pairs: dict[str, tuple[Any, Any]]) -> dict[str, float]:
        """Return the mean token probability of each answer directly after its prompt, under the current policy, by
        the key of the pair of prompt and answer."""
        prompts = [prompt for prompt, _ in pairs.values()]
        answers = [reference_text(answer) for _, answer in pairs.values()]
        edited = [EditedCompletion(f" {answer} ", 1, 1 + len(answer)) for answer in answers]
        return dict(zip(pairs, self._mean_probabilities(prompts, edited, None), strict=True))

    def _mean_probabilities(
        self, prompts: Sequence, edited_completions: Sequence[EditedCompletion | None], max_length: int | None
    ) -> list[float]:
        """Return the mean probability of the tokens of each reference answer; 0 without a text, or if it has more than
        `max_length` tokens."""
        tokenizer = self._tokenizer
        answer_positions: dict[int, list[int]] = {}  # in the tokens of completion `i`, of those that are evaluated
        completion_ids = []
        for i, edited in enumerate(edited_completions):
            if edited is None:
                continue
            tokens = tokenizer(edited.text, add_special_tokens=False, return_offsets_mapping=True)
            ids = [*tokens["input_ids"], tokenizer.eos_token_id]
            positions = []
            for position, (first_character, end_character) in enumerate(tokens["offset_mapping"]):
                if first_character < edited.end and end_character > edited.start:
                    positions.append(position)
            fits = max_length is None or len(ids) <= max_length
            if positions and fits:
                answer_positions[i] = positions
                completion_ids.append(ids)
        prompt_ids = []
        if answer_positions:
            prompt_ids = self._tokenize_prompts([prompts[i] for i in answer_positions])[0]
        probabilities = [0.0] * len(edited_completions)
        for i, logps in zip(answer_positions, self.compute_logps(prompt_ids, completion_ids), strict=True):
            probabilities[i] = logps[answer_positions[i]].exp().mean().item()
        return probabilities

    def _compute_labels(self, rewards_per_func: torch.Tensor) -> torch.Tensor:
        labels = super()._compute_labels(rewards_per_func)
        share = self.args.spread_filter
        if share is None or not self.model.training:
            return labels
        labels, metrics, self._spreads = filter_by_spread(labels, self.num_generations, share, self._spreads)
        self.record_metrics(metrics)
        return labels

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if self._needs_reference and resume_from_checkpoint is None:
            pairs = {}
            for prompt, answer in zip(self.train_dataset["prompt"], self.train_dataset["solution"], strict=True):
                pairs[_key(prompt, answer)] = (prompt, answer)
            all_pairs = list(pairs.items())
            pairs_of_process = all_pairs[self.accelerator.process_index :: self.accelerator.num_processes]
            probabilities = self._compute_without_reasoning(dict(pairs_of_process))
            self._without_reasoning = dict(gather_object(list(probabilities.items())))
        return prepared

    def _reset_run(self) -> None:
        super()._reset_run()
        self._spreads = [0.0]
        self._without_reasoning = {}
