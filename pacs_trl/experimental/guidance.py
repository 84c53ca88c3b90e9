"""Guidance ([arXiv 2506.11425](https://huggingface.co/papers/2506.11425)): where all completions of a prompt are
wrong, some are generated again with help.

Extension point: generate more or different completions. Help is a hint in the prompt, or a second turn with a failed
attempt and what the verifier says of it, as in Agent-RLVR. Right answers take the places of wrong ones, and are
learned from as answers to the plain prompt. A failed guided attempt is dropped, since as a negative of another prompt
it would only be pushed down, unless all are to be learned from by their rewards. No engine has generated these rows
from the plain prompt, so they have no `sampling_logps`. See docs/adaptive_rollouts.md.
"""

import inspect
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset
from trl.data_utils import is_conversational

from ..rollouts.step_sizes import Step
from ..settings import bounded, function_of_user
from ..update.groups import split_into_steps
from ..update.rows import Rollout
from ..verification import Outcome, gold_texts
from ..verification.shared import shared_code_verifier, shared_verifier
from ._redraw import RIGHT, Redraw, RedrawingConfig, RedrawingTrainer, in_equal_shares, judged_labels


logger = logging.getLogger(__name__)

Guidance = Literal["hint", "feedback"]
HintFunction = Callable[[dict, list[str]], str | None]

HINT = "\n\nHint: {hint}"
WRONG = "Your final answer is wrong. Find the mistake and solve the problem again."
# What the verifier says of an attempt; never the gold answer.
FEEDBACK = {
    Outcome.NO_ANSWER: (
        "No final answer was found in your solution. Solve the problem again and state the final answer."
    ),
    Outcome.TIMEOUT: "Your final answer could not be checked. Solve the problem again and simplify the final answer.",
    Outcome.TOO_LONG: "Your solution is too long to be read. Solve the problem again, in fewer words.",
}
# Of programs: the first test that failed, and never what was expected there.
FAILED = "Your program is wrong. {failed} Find the mistake and write the whole program again."
NO_PROGRAM = (
    "No program was found in your solution. "
    "Write the whole program in a block that begins with ```python and is closed."
)


def check_guidance(
    guidance: Guidance, hint: HintFunction | None, dataset: Any, *, tools: Any = None, environments: Any = None
) -> None:
    """
    Whether the data have what `guidance` needs; warns of hints that contain the gold answer.

    Args:
        guidance (`str`):
            Setting of that name.
        hint (`Callable`, *optional*):
            Argument `hint` of [`GuidanceTrainer`].
        dataset:
            The training set.
        tools, environments:
            Arguments `tools` and `environment_factory` of [`PACSTrainer`].

    Raises:
        `ValueError`: if there are no hints, or a second turn cannot be made.
    """
    if hint is not None and guidance != "hint":
        raise ValueError(
            f"The function that gives hints would never be asked with guidance={guidance!r}. Set guidance='hint', or "
            "leave the function out."
        )
    if hint is not None:
        try:
            inspect.signature(hint).bind({}, [])
            wrong = "it is asynchronous" if inspect.iscoroutinefunction(hint) else ""
        except (TypeError, ValueError) as error:
            wrong = str(error)
        if wrong:
            raise ValueError(
                f"{hint!r} cannot be asked for hints: {wrong}. It must be a function `hint(row, failed_completions)`, "
                "which returns text or None."
            )
    if guidance == "feedback" and tools:
        raise ValueError(
            "guidance='feedback' puts a failed attempt into the prompt as one message, and attempts with tools have "
            "several. Use guidance='hint'."
        )
    if environments is not None:
        raise ValueError(
            f"guidance={guidance!r} writes into the prompt, and with an environment_factory the environment does. "
            "Leave one out."
        )
    columns = getattr(dataset, "column_names", None)
    if guidance == "hint" and hint is None and columns is not None and "hint" not in columns:
        raise ValueError(
            f"guidance='hint' needs a column `hint`, and the training set has {', '.join(columns)}. Add the column "
            "(empty where "
            "there is no hint), give GuidanceTrainer a function `hint(row, failed_completions)` (in a recipe: "
            "hint_function), or set guidance='feedback'."
        )
    if not isinstance(dataset, Dataset):
        return
    if guidance == "feedback" and len(dataset) and not is_conversational(dataset[0]):
        raise ValueError(
            "guidance='feedback' answers a failed attempt in a second turn, and the prompts are texts, which have no "
            "turns. Make them lists of messages (`pacs_trl.data.build_prompt`), or use guidance='hint'."
        )
    if hint is None and guidance == "hint":
        hints = dataset.select_columns([name for name in ("hint", "solution") if name in dataset.column_names])
        for row in hints:
            check_hint(row["hint"])
        told = sum(contains_answer(row["hint"], row.get("solution")) for row in hints)
        if told:
            logger.warning(
                "%d of %d hints contain the gold answer word for word. An answer that is copied from its hint teaches "
                "to write the answer without the way to it. Take the answers out of the hints.",
                told,
                len(dataset),
            )


def check_hint(hint: Any) -> None:
    """
    Raises:
        `ValueError`: if a hint is neither text nor `None`.
    """
    if hint is not None and not isinstance(hint, str):
        raise ValueError(f"A hint must be text, or None where there is none, got {hint!r:.100}.")


def contains_answer(hint: str | None, solution: Any) -> bool:
    """Whether a gold answer stands in a hint, not as part of a longer word or number."""
    return bool(hint) and any(
        re.search(rf"(?<![\w.]){re.escape(text)}(?!\w|\.\d)", hint) for text in gold_texts(solution)
    )


def guide_failed_groups(
    again: Redraw,
    guidance: Guidance,
    hint: HintFunction | None,
    max_fraction: float,
    num_steps: int,
    learns_from_all: bool = False,
) -> None:
    """
    Generate guided attempts for groups without a right answer, and put those that are right in place of wrong ones.

    Args:
        again ([`Redraw`]):
            The generation.
        guidance (`str`), hint (`Callable`, *optional*):
            See [`check_guidance`].
        max_fraction (`float`):
            Most attempts of an optimizer step, as a share of its rows. Of a group at most half is attempted.
        num_steps (`int`):
            Optimizer steps that share the generation.
        learns_from_all (`bool`, *optional*):
            Whether wrong attempts take the places of wrong answers too; one without a reward never does.
    """
    trainer = again.trainer
    # A function of the user's may ask another model, so one process asks for all, and tells all if it cannot.
    found: list[Any] = [([], {}), None]
    if trainer.accelerator.is_main_process:
        try:
            found[0] = _Helper(again, guidance, hint).attempts(max_fraction, num_steps)
        except Exception as error:
            found[1] = f"Failed to generate hints: {type(error).__name__}: {error}"
            logger.exception(found[1])
    broadcast_object_list(found, from_process=0)
    (prompts, counts), failure = found
    if failure is not None:
        raise ValueError(failure)
    slots = [(group, again.inputs[group] | {"prompt": prompt}) for group, prompt in prompts]
    attempts = again.draw(slots, "guidance")
    solved = [row for row in attempts if row.label > RIGHT]
    kept = [row for row in attempts if row.label == row.label] if learns_from_all else solved
    kept = [_under_plain_prompt(again, row) for row in kept]
    for row in kept:
        rows = again.groups[row.group]
        rows[max(i for i, other in enumerate(rows) if "guided" not in other.extra)] = row
    again.log({"guidance/attempted": len(slots), "guidance/solved": len(solved), **counts})
    if kept:
        again.log({"guidance/logp": _mean_logp(again, kept)})


def _under_plain_prompt(again: Redraw, row: Rollout) -> Rollout:
    unknown = None if row.sampling_logps is None else np.full_like(row.sampling_logps, np.nan)
    plain = again.groups[row.group][0].prompt_ids
    weight, extra = again.trainer.args.guided_weight, row.extra | {"guided": np.array(True)}
    return replace(row, prompt_ids=plain, sampling_logps=unknown, weight=weight, extra=extra)


def _mean_logp(again: Redraw, rows: Sequence[Rollout]) -> float:
    """Per token, under the current policy and the plain prompt."""
    own = rows[again.process :: again.num_processes]
    logps = again.trainer.score([row.prompt_ids.tolist() for row in own], [row.completion_ids.tolist() for row in own])
    sums = gather_object([(float(values.sum()), len(values)) for values in logps])
    return sum(total for total, _ in sums) / max(sum(number for _, number in sums), 1)


class _Helper:
    """Makes the prompts of guided attempts, on the main process."""

    def __init__(self, again: Redraw, guidance: Guidance, hint: HintFunction | None):
        self.again, self.guidance, self.hint = again, guidance, hint
        trainer = again.trainer
        self.room = trainer.model.config.to_dict().get("max_position_embeddings")
        if trainer.use_vllm and trainer.args.vllm_max_model_length is not None:
            self.room = trainer.args.vllm_max_model_length
        self.too_long = self.told = 0

    def attempts(self, max_fraction: float, num_steps: int) -> tuple[list[tuple[int, Any]], dict[str, int]]:
        """Pairs of group and prompt, and what is counted."""
        found = []
        for rows in split_into_steps(self.again.rollouts, num_steps):
            failed = [group for group in dict.fromkeys(row.group for row in rows) if self._has_failed(group)]
            prompts = {group: prompts for group in failed if (prompts := self._prompts(group))}
            shares = in_turns([len(each) for each in prompts.values()], int(max_fraction * len(rows)))
            for (group, own), number in zip(prompts.items(), shares, strict=True):
                found += [(group, prompt) for prompt in own[:number]]
        return found, {"guidance/too_long": self.too_long, "guidance/answer_in_hint": self.told}

    def _has_failed(self, group: int) -> bool:
        labels = judged_labels(self.again.groups[group])
        return bool(labels) and max(labels) <= RIGHT

    def _prompts(self, group: int) -> list[Any]:
        """For half of a group's places; none without help, or where the prompt would leave no room for an answer."""
        rows, row_of_data = self.again.groups[group], self.again.inputs[group]
        texts = self.again.trainer.processing_class.batch_decode(
            [row.completion_ids for row in rows], skip_special_tokens=True
        )
        if self.guidance == "feedback":
            cut = self.again.trainer.are_truncated([row.completion_ids for row in rows])
            found = [self._second_turn(row_of_data, *attempt) for attempt in list(zip(texts, cut))[: len(rows) // 2]]
        else:
            hint = row_of_data.get("hint") if self.hint is None else self.hint(dict(row_of_data), texts)
            if not hint:
                return []
            check_hint(hint)
            self.told += contains_answer(hint, row_of_data.get("solution"))
            found = [with_hint(row_of_data["prompt"], hint)] * (len(rows) // 2)
        fitting = [prompt for prompt in found if self._fits(prompt)]
        self.too_long += len(fitting) < len(found)
        return fitting

    def _second_turn(self, row_of_data: dict, attempt: str, is_truncated: bool) -> list[dict]:
        message = WRONG
        if self.again.trainer.grades_answers:
            solution = [row_of_data.get("solution")]
            outcome = shared_verifier().grade_detailed([attempt], solution, [is_truncated])[0].outcome
            message = FEEDBACK.get(outcome, WRONG)
        elif self.again.trainer.grades_programs:
            grade = shared_code_verifier().grade_detailed([attempt], [row_of_data.get("solution")])[0]
            message = FAILED.format(failed=grade.failed) if grade.failed else FEEDBACK[Outcome.TOO_LONG]
            message = NO_PROGRAM if grade.outcome is Outcome.NO_ANSWER else message
        turn = [{"role": "assistant", "content": attempt}, {"role": "user", "content": message}]
        return [*row_of_data["prompt"], *turn]

    def _fits(self, prompt: Any) -> bool:
        trainer = self.again.trainer
        length = len(trainer._tokenize_prompts([prompt])[0][0]) + (trainer.max_completion_length or 0)
        return self.room is None or length <= self.room


def with_hint(prompt: Any, hint: str) -> Any:
    """A prompt, text or messages, with a hint behind its last words."""
    text = HINT.format(hint=hint)
    if isinstance(prompt, str):
        return prompt + text
    return [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + text}]


def in_turns(limits: Sequence[int], total: int) -> list[int]:
    """`total` shared out one by one in turns, to none more than its limit."""
    shares = [0] * len(limits)
    for turn in range(max(limits, default=0)):
        for i, limit in enumerate(limits):
            if turn < limit and total > 0:
                shares[i] += 1
                total -= 1
    return shares


def _guided_rows(given: Any, step: Step) -> int:
    return int(given.max_guided_fraction * min(step.rows_per_update, step.rows_per_generation))


@dataclass
class GuidanceConfig(RedrawingConfig):
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

    def most_additional(self, step: Step) -> int:
        steps = max(1, step.steps_per_generation // step.gradient_accumulation_steps)
        most = min(steps * _guided_rows(self, step), int(step.prompts_per_generation) * (step.num_generations // 2))
        return super().most_additional(step) + in_equal_shares(most, step.num_processes)

    @classmethod
    def errors(cls, given: Any, step: Step | None) -> list[str]:
        errors = super().errors(given, step)
        if given.hint_function is not None and given.guidance != "hint":
            errors.append(
                f"hint_function={given.hint_function!r} would be ignored with guidance={given.guidance!r}. Set "
                "guidance='hint', or remove the key."
            )
        if given.class_weighting == "only_negative" and given.guided_completions == "right":
            errors.append(
                "class_weighting='only_negative' leaves out the half of the loss that right guided answers have. Use "
                "class_weighting='balanced'."
            )
        if step is not None and _guided_rows(given, step) < 1:
            rows = min(step.rows_per_update, step.rows_per_generation)
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
        row of
            the data set, all of whose completions (texts) are wrong, or `None`. By default that of `hint_function`, or
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
        tools, environments = arguments.get("tools"), arguments.get("environment_factory")
        check_guidance(
            args.guidance, self._hint, arguments.get("train_dataset"), tools=tools, environments=environments
        )

    def redraw(self, again: Redraw, num_steps: int) -> None:
        super().redraw(again, num_steps)
        args, learns_from_all = self.args, self.args.guided_completions == "all"
        guide_failed_groups(again, args.guidance, self._hint, args.max_guided_fraction, num_steps, learns_from_all)
