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
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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


Edited = tuple[str, int, int]  # a completion with the reference answer at some characters: text, start, end


def with_reference(text: str | None, answer: str, prompt: Any = None) -> Edited | None:
    """
    Return the text up to the answer and its leading white space (in tags at least a space), the reference answer, and
    the closing tag.

    The answer is in `<answer> ... </answer>`, whose opening tag must occur once; or, if neither text nor prompt has
    that tag, in the only `\\boxed{...}`. Any other text gives `None`.
    """
    in_tags = TAGS[0] in (text or "") or TAGS[0] in str(prompt)
    opening, closing = (TAGS[0], f" {TAGS[1]}") if in_tags else (BOX, "}")
    if text is None or text.count(opening) != 1:
        return None
    before, after = text.split(opening)
    space = re.match(r"\s*", after)[0] or (" " if in_tags else "")  # type: ignore[index]
    start = len(before) + len(opening) + len(space)
    return f"{before}{opening}{space}{answer}{closing}", start, start + len(answer)


def is_well_formed(text: str | None, prompt: Any = None) -> bool:
    """
    Return whether a completion has the format that its prompt names.

    With `<think>` in the prompt it is `<think> ... </think> ... <answer> ... </answer>` from the first character on,
    each tag once (the authors' `format_mode=R1`); otherwise the two answer tags once each, in order (`R1_nothink`).
    If neither prompt nor text has a tag, it is one closed box.
    """
    text, asked = text or "", str(prompt)
    tags = (*THINK, *TAGS) if THINK[0] in asked else TAGS
    if any(tag in text or tag in asked for tag in tags):
        in_order = re.search(".*".join(map(re.escape, tags)), text, re.DOTALL)
        starts = THINK[0] not in tags or text.startswith(THINK[0])
        return starts and in_order is not None and all(text.count(tag) == 1 for tag in tags)
    return text.count(BOX) == 1 and "}" in text.split(BOX)[1]


def reference_text(answer: Any) -> str:
    """Return a reference answer as text, the first one of several alternatives."""
    first = next(iter(answer), None) if isinstance(answer, list) else answer
    return "" if first is None else str(first).strip()


def _key(prompt: Any, answer: Any) -> str:
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
    formats = [float(is_well_formed(*pair)) for pair in zip(texts, prompts, strict=True)]
    if truncated is not None and not shared_arguments().verification_grade_truncated:
        texts = [None if cut and not f else text for text, cut, f in zip(texts, truncated, formats, strict=True)]
    after = reference_probability.after_reasoning(prompts, texts, solution)
    without = reference_probability.without_reasoning(prompts, solution)
    if log_metric is not None and texts:
        for name, values in (("after_reasoning", after), ("without_reasoning", without), ("format", formats)):
            log_metric(f"probability/{name}", sum(values) / len(values))
    return [0.9 * max(0.0, s - s0) + 0.1 * f for s, s0, f in zip(after, without, formats, strict=True)]


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
    count = (~grid.isnan()).sum(dim=1)
    mean = grid.nansum(dim=1) / count.clamp(min=1)
    squares = ((grid - mean[:, None]) ** 2).nansum(dim=1)
    spreads = (squares / (count - 1).clamp(min=1)).sqrt()  # unbiased
    has_spread = count >= 2
    spread = spreads[has_spread].mean().item() if has_spread.any() else math.nan

    number, *means = history
    active = number >= _IGNORED + _COLLECTED and bool(means)
    bound = share * means[0] if active else 0.0
    dropped = has_spread & (spreads < bound)
    if has_spread.any() and number >= _IGNORED:
        means = [_DECAY * means[0] + (1 - _DECAY) * spread] if active else [*means, spread]
    number += 1
    if number == _IGNORED + _COLLECTED and means:
        means = [sum(means) / len(means)]
    metrics = {
        "spread_filter/spread": spread,
        "spread_filter/bound": bound,
        "spread_filter/dropped_fraction": (dropped.sum() / has_spread.sum().clamp(min=1)).item(),
    }
    return labels.masked_fill(dropped.repeat_interleave(num_generations), math.nan), metrics, [number, *means]


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
        functions, dataset = arguments["reward_funcs"], arguments["train_dataset"]
        self._needs_reference = any(
            callable(each) and "reference_probability" in inspect.signature(each).parameters
            for each in (functions if isinstance(functions, list) else [functions])
        )
        answers = dataset["solution"] if is_in_memory(dataset) and "solution" in dataset.column_names else [""]
        with_tools = arguments["tools"] or arguments["environment_factory"]
        if self._needs_reference and (with_tools or not all(map(reference_text, answers))):
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
        keys = [_key(*pair) for pair in zip(prompts, answers, strict=True)]
        pairs = dict(zip(keys, zip(prompts, answers, strict=True), strict=True))
        missing = {key: pair for key, pair in pairs.items() if key not in self._without_reasoning}
        probabilities = self._without_reasoning | self._compute_without_reasoning(missing)
        return [probabilities[key] for key in keys]

    def _compute_without_reasoning(self, pairs: dict[str, tuple[Any, Any]]) -> dict[str, float]:
        """Return the mean token probability of each answer directly after its prompt, under the current policy, by
        the key of the pair of prompt and answer."""
        prompts = [prompt for prompt, _ in pairs.values()]
        answers = [reference_text(answer) for _, answer in pairs.values()]
        edited = [(f" {answer} ", 1, 1 + len(answer)) for answer in answers]
        return dict(zip(pairs, self._mean_probabilities(prompts, edited, None), strict=True))

    def _mean_probabilities(
        self, prompts: Sequence, edited: Sequence[Edited | None], max_length: int | None
    ) -> list[float]:
        """Return the mean probability of the tokens at the edited characters; 0 without a text, or if it has more than
        `max_length` tokens."""
        tokenizer = self._tokenizer
        answer_tokens: dict[int, list[int]] = {}  # indices in the completion
        completion_ids = []
        for i, each in enumerate(edited):
            if each is None:
                continue
            text, start, end = each
            tokens = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            indices = [j for j, (first, last) in enumerate(tokens["offset_mapping"]) if first < end and last > start]
            ids = [*tokens["input_ids"], tokenizer.eos_token_id]
            if indices and (max_length is None or len(ids) <= max_length):
                answer_tokens[i] = indices
                completion_ids.append(ids)
        prompt_ids = self._tokenize_prompts([prompts[i] for i in answer_tokens])[0] if answer_tokens else []
        probabilities = [0.0] * len(edited)
        for i, logps in zip(answer_tokens, self.compute_logps(prompt_ids, completion_ids), strict=True):
            probabilities[i] = logps[answer_tokens[i]].exp().mean().item()
        return probabilities

    def _compute_labels(self, rewards_per_func: torch.Tensor) -> torch.Tensor:
        labels, share = super()._compute_labels(rewards_per_func), self.args.spread_filter
        if share is None or not self.model.training:
            return labels
        labels, metrics, self._spreads = filter_by_spread(labels, self.num_generations, share, self._spreads)
        self.record_metrics(metrics)
        return labels

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if self._needs_reference and resume_from_checkpoint is None:
            accelerator, dataset = self.accelerator, self.train_dataset
            pairs = {_key(*pair): pair for pair in zip(dataset["prompt"], dataset["solution"], strict=True)}
            process_pairs = dict(list(pairs.items())[accelerator.process_index :: accelerator.num_processes])
            probabilities = self._compute_without_reasoning(process_pairs)
            self._without_reasoning = dict(gather_object(list(probabilities.items())))
        return prepared

    def _reset_run(self) -> None:
        super()._reset_run()
        self._spreads = [0.0]
        self._without_reasoning = {}
