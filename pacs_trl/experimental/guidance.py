"""Guidance ([arXiv 2506.11425](https://huggingface.co/papers/2506.11425)): guided attempts for prompts whose
completions are all wrong.

Extension point: generate more or different completions. Guidance is a hint in the prompt, or, as in Agent-RLVR, a
second turn with a failed attempt and the verifier's message. Correct guided completions replace wrong ones, and are
trained as completions of the plain prompt; failed ones are dropped. They have no `sampling_logps`, because no engine
generated them from the plain prompt. See docs/related_methods.md.
"""

import math
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Literal

import numpy as np
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from trl.data_utils import is_conversational

from ..data.columns import columns_of, is_in_memory
from ..errors import UserError
from ..pacs_config import PACSConfig
from ..rewards import shared_verifier
from ..settings.fields import setting
from ..update.context_length import context_lengths
from ..update.minibatch import split_into_minibatches
from ..update.rollout import Rollout
from ..update.step_sizes import BatchSizes
from ..verification import Outcome
from ._generation import CORRECT, ExtendingTrainer, known_labels


Guidance = Literal["hint", "feedback"]

HINT = "\n\nHint: {hint}"
WRONG = "Your final answer is wrong. Find the mistake and solve the problem again."
# Messages by outcome. They never contain the gold answer.
FEEDBACK = {
    Outcome.NO_ANSWER: (
        "No final answer was found in your solution. Solve the problem again and state the final answer."
    ),
    Outcome.TIMEOUT: "Your final answer could not be checked. Solve the problem again and simplify the final answer.",
    Outcome.TOO_LONG: "Your solution is too long to be read. Solve the problem again, in fewer words.",
}
NEEDS_CONVERSATIONS = (
    "guidance='feedback' adds a second turn to conversational prompts. Remove tools and environment_factory, make "
    "prompts lists of messages, or set guidance='hint'."
)


@dataclass
class GuidanceConfig(PACSConfig):
    """Configuration of [`GuidanceTrainer`]: every parameter of [`PACSConfig`], and those of guided attempts."""

    supports_rollout_lag = False
    supports_images = False

    guidance: Guidance = setting(
        "hint",
        'Guidance for prompts without a correct completion: `"hint"` appends the column `hint`, if it is '
        'not empty; `"feedback"` adds a turn with a failed attempt and the verifier\'s message. Correct '
        "guided completions replace up to half of a group.",
    )
    max_guided_fraction: float = setting(
        0.25,
        "Maximum number of guided attempts of an optimizer step, as a share of its completions.",
        above=0,
        most=0.5,
    )
    guided_weight: float = setting(1.0, "Factor on the gradient of guided completions.", above=0)

    def errors(self, step: BatchSizes) -> list[str]:
        errors = super().errors(step)
        if self.class_weighting == "only_negative":
            errors.append(
                "class_weighting='only_negative' drops the loss of correct guided completions. Use "
                "class_weighting='balanced'."
            )
        rows = min(step.completions_per_update, step.completions_per_generation)
        if self.max_guided_fraction * rows < 1:
            errors.append(
                f"max_guided_fraction={self.max_guided_fraction} of the {rows} completions of an optimizer step is "
                f"less than one. Raise it to {1 / rows:.3g} or more."
            )
        return errors


def last_user_turn(prompt: list[dict]) -> int | None:
    """Return the index of the last user turn of a conversation, `None` without one."""
    return max((i for i, turn in enumerate(prompt) if turn["role"] == "user"), default=None)


def check_hint(place: str, prompt: str | list[dict], hint: str | None) -> None:
    """Raise a `ValueError` if there is a hint, but the prompt has no user turn that it could be added to. `place` says
    where they are, as the subject of the message."""
    if hint and not isinstance(prompt, str) and last_user_turn(prompt) is None:
        raise UserError(
            f"{place} has the hint {hint!r:.100}, but its prompt has no user turn that guidance='hint' could add it "
            "to. Add a user turn, or leave the hint empty."
        )


def with_hint(prompt: str | list[dict], hint: str) -> str | list[dict]:
    """Return a prompt with a hint at the end of its text, or of its last user turn, which [`check_hint`] requires."""
    text = HINT.format(hint=hint)
    if isinstance(prompt, str):
        return prompt + text
    i = last_user_turn(prompt)
    assert i is not None
    content = prompt[i]["content"]
    content = content + text if isinstance(content, str) else [*content, {"type": "text", "text": text}]
    return [*prompt[:i], prompt[i] | {"content": content}, *prompt[i + 1 :]]


class GuidanceTrainer(ExtendingTrainer):
    """[`PACSTrainer`] with guided attempts for groups without a correct completion."""

    args: GuidanceConfig
    _name = "guidance"
    _paper = {
        "title": "Agent-RLVR: Training Software Engineering Agents via Guidance and Environment Rewards",
        "id": "2506.11425",
    }
    _config_class = GuidanceConfig

    def _before_loading(self, model, args, arguments) -> None:
        super()._before_loading(model, args, arguments)
        dataset, environment = arguments["train_dataset"], arguments["environment_factory"]
        columns = columns_of(dataset)
        if args.guidance == "feedback":
            refused = arguments["tools"] or environment
            if refused or isinstance(dataset, Dataset) and not is_conversational(dataset[0]):
                raise UserError(NEEDS_CONVERSATIONS)
        elif environment is not None:
            raise UserError("guidance='hint' and environment_factory both change the prompt. Remove one of them.")
        elif columns and "hint" not in columns:
            raise UserError(
                f"guidance='hint' needs a column `hint`, and the training set has {', '.join(columns)}. Add the "
                "column (empty where there is no hint), or set guidance='feedback'."
            )
        elif is_in_memory(dataset):
            prompts, hints = dataset["prompt"][:], dataset["hint"][:]  # faster than one row after the other
            for i, (prompt, hint) in enumerate(zip(prompts, hints, strict=True)):
                check_hint(f"Row {i} of train_dataset", prompt, hint)

    def _generate_rollouts(self, generation_batch) -> list[Rollout]:
        # Examples of a stream, and those that a transform makes, were not checked before.
        if self.args.guidance == "hint":
            for example in generation_batch:
                check_hint("An example", example["prompt"], example.get("hint"))
        elif not is_conversational(generation_batch[0]):
            raise UserError(NEEDS_CONVERSATIONS)
        return super()._generate_rollouts(generation_batch)

    def extend(self, num_steps: int) -> None:
        """Generate guided attempts for groups without a correct completion, and replace wrong ones by them."""
        super().extend(num_steps)
        # A grade may depend on the load of the machine, so one process grades for all.
        planned: list[Any] = [self._guided_prompts(num_steps) if self.accelerator.is_main_process else None]
        prompts, counts = broadcast_object_list(planned, from_process=0)[0]
        slots = [(group, self.examples[group] | {"prompt": prompt}) for group, prompt in prompts]
        attempts = self.generate_for(slots, "guidance")
        solved = [self._under_plain_prompt(each) for each in attempts if each.label > CORRECT]
        for attempt in solved:
            rollouts = self.groups[attempt.group]
            rollouts[max(i for i, other in enumerate(rollouts) if "guided" not in other.extra)] = attempt
        self.record_metrics({"guidance/attempted": len(slots), "guidance/solved": len(solved), **counts})

    def _guided_prompts(self, num_steps: int) -> tuple[list[tuple[int, Any]], dict[str, int]]:
        """Return pairs of group and guided prompt, and metrics."""
        counts = {"guidance/too_long": 0}
        pairs: list[tuple[int, Any]] = []
        for rollouts in split_into_minibatches(self.all_rollouts(), num_steps):
            groups = dict.fromkeys(rollout.group for rollout in rollouts)
            prompts = {group: self._group_prompts(group, counts) for group in groups}
            # one prompt of each group in turn, up to the limit
            in_turn = [
                (group, prompt)
                for turn in zip_longest(*prompts.values())
                for group, prompt in zip(groups, turn, strict=True)
                if prompt is not None
            ]
            within_limit = in_turn[: int(self.args.max_guided_fraction * len(rollouts))]
            pairs += sorted(within_limit, key=lambda pair: pair[0])  # stable
        return pairs, counts

    def _group_prompts(self, group: int, counts: dict[str, int]) -> list[Any]:
        """Return guided prompts for half of the completions of a failed group, with feedback of those that have a
        label; none that leaves no room for a completion."""
        rollouts, example = self.groups[group], self.examples[group]
        labels, half = known_labels(rollouts), len(rollouts) // 2
        prompts: list[Any]
        if not labels or max(labels) > CORRECT:
            return []
        if self.args.guidance == "feedback":
            # a truncated completion that is masked has neither a label nor its token ids
            ids = [rollout.completion_ids.tolist() for rollout in rollouts if not math.isnan(rollout.label)][:half]
            texts = self.processing_class.batch_decode(ids, skip_special_tokens=True)
            attempts = zip(texts, self.are_truncated(ids), strict=True)
            prompts = [self._with_feedback(example, *attempt) for attempt in attempts]
        elif hint := example.get("hint"):
            prompts = [with_hint(example["prompt"], hint)] * half
        else:
            return []
        room = context_lengths(self.model.config)["max_position_embeddings"]
        if self.use_vllm and self.args.vllm_max_model_length is not None:
            room = self.args.vllm_max_model_length
        if room is None:
            return prompts
        room -= self.max_completion_length or 0
        fitting = [prompt for prompt in prompts if len(self._tokenize_prompts([prompt])[0][0]) <= room]
        if len(fitting) < len(prompts):
            counts["guidance/too_long"] += 1
        return fitting

    def _with_feedback(self, example: dict, attempt: str, is_truncated: bool) -> list[dict]:
        message, solution = WRONG, [example.get("solution")]
        if self.grades_answers:
            outcome = shared_verifier().grade_detailed([attempt], solution, [is_truncated])[0].outcome
            message = FEEDBACK.get(outcome, WRONG)
        turns = [{"role": "assistant", "content": attempt}, {"role": "user", "content": message}]
        return [*example["prompt"], *turns]

    def _under_plain_prompt(self, attempt: Rollout) -> Rollout:
        unknown = None if attempt.sampling_logps is None else np.full_like(attempt.sampling_logps, np.nan)
        plain, extra = self.groups[attempt.group][0].prompt_ids, attempt.extra | {"guided": np.array(True)}
        return replace(attempt, prompt_ids=plain, sampling_logps=unknown, weight=self.args.guided_weight, extra=extra)
