"""Guidance ([arXiv 2506.11425](https://huggingface.co/papers/2506.11425)): where all completions of a prompt are
wrong, some are generated again with help.

Extension point: generate more or different completions. Help is a hint in the prompt, or a second turn with a failed
attempt and the verifier's message, as in Agent-RLVR. Correct completions replace wrong ones, and are learned from as
completions of the plain prompt. A failed guided attempt is dropped, since as a negative of another prompt it would
only be pushed down, unless all are to be learned from by their rewards. No engine has generated these completions from
the plain prompt, so they have no `sampling_logps`. See docs/adaptive_rollouts.md.
"""

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset
from trl.data_utils import is_conversational

from ..pacs_config import PACSConfig
from ..rewards import shared_code_verifier, shared_verifier
from ..settings import bounded
from ..settings.names import function_of_user
from ..update.groups import split_into_steps
from ..update.rows import Rollout
from ..update.step_sizes import Step
from ..verification import Outcome, gold_texts
from ._redraw import CORRECT, Redraw, RedrawingTrainer, known_labels


logger = logging.getLogger(__name__)

Guidance = Literal["hint", "feedback"]
HintFunction = Callable[[dict, list[str]], str | None]

HINT = "\n\nHint: {hint}"
WRONG = "Your final answer is wrong. Find the mistake and solve the problem again."
# By the outcome of the attempt; never the gold answer.
FEEDBACK = {
    Outcome.NO_ANSWER: (
        "No final answer was found in your solution. Solve the problem again and state the final answer."
    ),
    Outcome.TIMEOUT: "Your final answer could not be checked. Solve the problem again and simplify the final answer.",
    Outcome.TOO_LONG: "Your solution is too long to be read. Solve the problem again, in fewer words.",
}
# Of programs: the first test that failed, and never the expected output.
FAILED = "Your program is wrong. {failed} Find the mistake and write the whole program again."
NO_PROGRAM = (
    "No program was found in your solution. "
    "Write the whole program in a block that begins with ```python and is closed."
)


def check_guidance(guidance: Guidance, hint: HintFunction | None, arguments: dict[str, Any]) -> None:
    """
    Check that the data have the help, and warn of hints that contain the gold answer.

    Args:
        guidance (`str`), hint (`Callable`, *optional*): Setting of that name; argument of [`GuidanceTrainer`].
        arguments (`dict`): The other arguments of the trainer.

    Raises:
        `ValueError`: if there are no hints, or a second turn cannot be made.
    """
    dataset = arguments.get("train_dataset")
    columns = getattr(dataset, "column_names", None)
    first = dataset[0] if isinstance(dataset, Dataset) and len(dataset) else None
    if guidance == "feedback":
        has_turns = first is None or is_conversational(first)
        if hint is not None or arguments.get("tools") or arguments.get("environment_factory") or not has_turns:
            raise ValueError(
                "guidance='feedback' adds a second turn to conversational prompts. Remove hint, tools and "
                "environment_factory, or set guidance='hint'."
            )
    elif arguments.get("environment_factory") is not None:
        raise ValueError("guidance='hint' changes the prompt, and so does an environment_factory. Remove one of them.")
    elif hint is None and columns is not None and "hint" not in columns:
        raise ValueError(
            f"guidance='hint' needs a column `hint`, and the training set has {', '.join(columns)}. Add the column "
            "(empty where there is no hint), pass a function `hint(row, failed_completions)` (in a recipe: "
            "hint_function), or set guidance='feedback'."
        )
    elif hint is None and first is not None:
        hints = dataset.select_columns([name for name in ("hint", "solution") if name in columns])
        if told := sum(contains_answer(row["hint"], row.get("solution")) for row in hints):
            logger.warning(
                "%d of %d hints contain the gold answer word for word. A completion that copies it learns the answer "
                "without the way to it. Take the answers out of the hints.",
                *(told, len(dataset)),
            )


def contains_answer(hint: str | None, solution: Any) -> bool:
    """Return whether a gold answer is in a hint, not as part of a longer word or number."""
    return bool(hint) and any(
        re.search(rf"(?<![\w.]){re.escape(text)}(?!\w|\.\d)", str(hint)) for text in gold_texts(solution)
    )


def with_hint(prompt: Any, hint: str) -> Any:
    """Return a prompt, text or messages, with a hint at its end."""
    text = HINT.format(hint=hint)
    if isinstance(prompt, str):
        return prompt + text
    return [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + text}]


def in_turns(limits: Sequence[int], total: int) -> list[int]:
    """Return `total` shared out one by one in turns, to none more than its limit."""
    shares = [0] * len(limits)
    for turn in range(max(limits, default=0)):
        for i, limit in enumerate(limits):
            if turn < limit and total > 0:
                shares[i] += 1
                total -= 1
    return shares


@dataclass
class GuidanceConfig(PACSConfig):
    """
    Configuration class for the [`GuidanceTrainer`]: every parameter of [`PACSConfig`], and:

    Parameters:
        guidance (`str`, *optional*, defaults to `"hint"`):
            Help for prompts without a right answer: `"hint"` puts the column `hint` (or what a function says) into the
            prompt, `"feedback"` a failed attempt and the verifier's message. Right guided answers replace wrong ones,
            up to half of a group, and are learned from under the plain prompt.
        hint_function (`str`, *optional*):
            With `guidance="hint"`: `package.module.function` that gives the hints, instead of the column `hint`.
        max_guided_fraction (`float`, *optional*, defaults to `0.25`):
            Most guided attempts of an optimizer step, as a share of its completions.
        guided_completions (`str`, *optional*, defaults to `"right"`):
            Guided attempts that are learned from: `"right"` ones, or `"all"` with a reward, which take the places of
            wrong answers whatever their own reward is.
        guided_weight (`float`, *optional*, defaults to `1.0`):
            Factor on the gradient of guided completions.
    """

    guidance: Guidance = "hint"
    hint_function: str | None = None
    max_guided_fraction: float = bounded(0.25, above=0, most=0.5)
    guided_completions: Literal["right", "all"] = "right"
    guided_weight: float = bounded(1.0, above=0)

    @classmethod
    def errors(cls, given: Any, step: Step | None) -> list[str]:
        errors = super().errors(given, step)
        if given.hint_function is not None and given.guidance != "hint":
            errors.append(f"hint_function would be ignored with guidance={given.guidance!r}. Remove the key.")
        if given.class_weighting == "only_negative" and given.guided_completions == "right":
            errors.append(
                "class_weighting='only_negative' leaves out the half of the loss of correct guided completions. Use "
                "class_weighting='balanced'."
            )
        rows = min(step.rows_per_update, step.rows_per_generation) if step is not None else None
        if rows is not None and given.max_guided_fraction * rows < 1:
            errors.append(
                f"max_guided_fraction={given.max_guided_fraction} of the {rows} completions of an optimizer step is "
                f"not one. Raise it to {1 / rows:.3g} or more."
            )
        return errors


class GuidanceTrainer(RedrawingTrainer):
    """
    [`PACSTrainer`] that generates guided attempts for groups without a right answer.

    Args:
        hint (`Callable`, *optional*): With `guidance="hint"`: `hint(row, failed_completions)` returns the hint for a
            dataset row, all of whose completions (texts) are wrong, or `None`. By default that of `hint_function`, or
            the column `hint`. The main process calls it.

    All other arguments are those of [`PACSTrainer`].
    """

    _name = "guidance"
    _config_class = GuidanceConfig
    _own_shared_settings = (
        *("guidance", "max_guided_fraction", "guided_completions", "guided_weight"),
        *RedrawingTrainer._own_shared_settings,
    )

    def __init__(self, *args, hint: HintFunction | None = None, **kwargs):
        self._hint = hint
        super().__init__(*args, **kwargs)

    def _prepare_loading(self, model, args, arguments) -> None:
        super()._prepare_loading(model, args, arguments)
        if self._hint is None and args.hint_function is not None:
            self._hint = function_of_user(args.hint_function, "hint_function")
        check_guidance(args.guidance, self._hint, arguments)

    def redraw(self, again: Redraw, num_steps: int) -> None:
        """Generate guided attempts for groups without a correct completion, and replace wrong ones by them."""
        super().redraw(again, num_steps)
        args = self.args
        # The user's function may ask another model, so one process asks for all, and tells all if it cannot.
        found: list[Any] = [([], {}), None]
        if self.accelerator.is_main_process:
            try:
                found[0] = self._attempts(again, num_steps)
            except Exception as error:
                found[1] = f"Failed to generate hints: {type(error).__name__}: {error}"
                logger.exception(found[1])
        broadcast_object_list(found, from_process=0)
        (prompts, counts), failure = found
        if failure is not None:
            raise ValueError(failure)
        slots = [(group, again.inputs[group] | {"prompt": prompt}) for group, prompt in prompts]
        attempts = again.draw(slots, "guidance")
        solved = [row for row in attempts if row.label > CORRECT]
        kept = [row for row in attempts if row.label == row.label] if args.guided_completions == "all" else solved
        kept = [self._under_plain_prompt(again, row) for row in kept]
        for row in kept:
            rows = again.groups[row.group]
            rows[max(i for i, other in enumerate(rows) if "guided" not in other.extra)] = row
        again.log({"guidance/attempted": len(slots), "guidance/solved": len(solved), **counts})
        if kept:
            again.log({"guidance/logp": self._mean_logp(again, kept)})

    def _attempts(self, again: Redraw, num_steps: int) -> tuple[list[tuple[int, Any]], dict[str, int]]:
        """Pairs of group and prompt, on the main process, and metrics."""
        counts, found = {"guidance/too_long": 0, "guidance/answer_in_hint": 0}, []
        for rows in split_into_steps(again.rollouts, num_steps):
            prompts = {
                group: self._prompts(again, group, counts) for group in dict.fromkeys(row.group for row in rows)
            }
            shares = in_turns(list(map(len, prompts.values())), int(self.args.max_guided_fraction * len(rows)))
            for (group, own), number in zip(prompts.items(), shares, strict=True):
                found += [(group, prompt) for prompt in own[:number]]
        return found, counts

    def _prompts(self, again: Redraw, group: int, counts: dict[str, int]) -> list[Any]:
        """For half of the completions of a failed group; none without help, or where no completion would fit."""
        rows, row_of_data = again.groups[group], again.inputs[group]
        labels, ids = known_labels(rows), [row.completion_ids for row in rows]
        if not labels or max(labels) > CORRECT:
            return []
        texts = self.processing_class.batch_decode(ids, skip_special_tokens=True)
        if self.args.guidance == "feedback":
            attempts = list(zip(texts, self.are_truncated(ids), strict=True))[: len(rows) // 2]
            found = [self._second_turn(row_of_data, *attempt) for attempt in attempts]
        else:
            hint = row_of_data.get("hint") if self._hint is None else self._hint(dict(row_of_data), texts)
            if not hint:
                return []
            counts["guidance/answer_in_hint"] += contains_answer(hint, row_of_data.get("solution"))
            found = [with_hint(row_of_data["prompt"], hint)] * (len(rows) // 2)
        room = self.model.config.to_dict().get("max_position_embeddings")
        if self.use_vllm and self.args.vllm_max_model_length is not None:
            room = self.args.vllm_max_model_length
        lengths = [len(self._tokenize_prompts([prompt])[0][0]) + (self.max_completion_length or 0) for prompt in found]
        fitting = [prompt for prompt, length in zip(found, lengths, strict=True) if room is None or length <= room]
        counts["guidance/too_long"] += len(fitting) < len(found)
        return fitting

    def _second_turn(self, row_of_data: dict, attempt: str, is_truncated: bool) -> list[dict]:
        message, solution = WRONG, [row_of_data.get("solution")]
        if self.grades_answers:
            outcome = shared_verifier().grade_detailed([attempt], solution, [is_truncated])[0].outcome
            message = FEEDBACK.get(outcome, WRONG)
        elif self.grades_programs:
            grade = shared_code_verifier().grade_detailed([attempt], solution)[0]
            message = FAILED.format(failed=grade.failed) if grade.failed else FEEDBACK[Outcome.TOO_LONG]
            message = NO_PROGRAM if grade.outcome is Outcome.NO_ANSWER else message
        turn = [{"role": "assistant", "content": attempt}, {"role": "user", "content": message}]
        return [*row_of_data["prompt"], *turn]

    def _under_plain_prompt(self, again: Redraw, row: Rollout) -> Rollout:
        unknown = None if row.sampling_logps is None else np.full_like(row.sampling_logps, np.nan)
        plain, extra = again.groups[row.group][0].prompt_ids, row.extra | {"guided": np.array(True)}
        return replace(row, prompt_ids=plain, sampling_logps=unknown, weight=self.args.guided_weight, extra=extra)

    def _mean_logp(self, again: Redraw, rows: Sequence[Rollout]) -> float:
        """Per token, under the current policy and the plain prompt."""
        own = rows[again.process :: again.num_processes]
        logps = self.score([row.prompt_ids.tolist() for row in own], [row.completion_ids.tolist() for row in own])
        sums = gather_object([(float(values.sum()), len(values)) for values in logps])
        return sum(total for total, _ in sums) / max(sum(number for _, number in sums), 1)
