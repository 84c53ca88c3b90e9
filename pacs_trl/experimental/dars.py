"""DARS ([arXiv 2508.13755](https://huggingface.co/papers/2508.13755)): more completions of hard prompts; and refill,
other prompts in place of uniform groups.

Extension point: generate more or different completions. DARS generates again for hard prompts, until the cumulative
advantage of a group is that of an easier one; DARS-B does so with a whole generation in one optimizer step. The
authors drop groups that are still uniform; here every group stays, and a uniform one has zero gradient. Refill is
DAPO's dynamic sampling ([arXiv 2503.14476](https://huggingface.co/papers/2503.14476)) with a bounded number of rounds.
See docs/adaptive_rollouts.md; vectors of the authors' code are in `tests/data/dars_vectors.json`.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from ..pacs_config import PACSConfig
from ..settings import bounded
from ..update.step_sizes import Step
from ._redraw import CORRECT, Redraw, RedrawingTrainer, known_labels


Schedule = Literal["equal_treatment", "hardness_weighted"]

# A quotient that is whole but for rounding is not rounded up.
_ROUNDING = 1e-9


def additional_completions(
    num_correct: float, num_generations: int, *, schedule: Schedule, max_generations: int, use_std: bool = False
) -> int:
    """
    Return the completions to generate on top of `num_generations`, 0 for a success rate of one half and above.

    With the success rate `u` and the cumulative advantage `S(u) = 2 u (1 - u)` per completion (with `use_std`
    `2 sqrt(u (1 - u))`), a prompt with `u` below 1/2 gets as many as lift `N S` to its peak `P`, the value at `u =
    1/2`: `ceil((P - N S) / S)` for `"equal_treatment"`; to `2 (1 - u) P` for `"hardness_weighted"`; but no more than
    `max_generations` in all. `u` is at least half a correct completion.

    Args:
        num_correct (`float`): Correct completions, or the sum of soft labels.
        num_generations (`int`): Completions that there are, `N`.
        schedule (`str`): `"equal_treatment"` or `"hardness_weighted"`.
        max_generations (`int`): Most completions of a prompt.
        use_std (`bool`, *optional*, defaults to `False`): Whether advantages are divided by the group's standard
            deviation.

    Raises:
        `ValueError`: if `num_correct` does not lie between 0 and `num_generations`.
    """
    if not 0 <= num_correct <= num_generations:
        raise ValueError(
            f"num_correct={num_correct} must lie between 0 and num_generations={num_generations}: it is the sum of "
            "labels in [0, 1]."
        )
    rate = max(num_correct, 0.5) / num_generations
    if rate >= 0.5:
        return 0
    share, peak = 2 * rate * (1 - rate), 0.5 * num_generations
    if use_std:
        share, peak = 2 * math.sqrt(rate * (1 - rate)), float(num_generations)
    if schedule == "hardness_weighted":
        peak *= 2 * (1 - rate)
    wanted = math.ceil((peak - num_generations * share) / share - _ROUNDING)
    return max(0, min(wanted, max_generations - num_generations))


def within_budget(wanted: Sequence[int], hardness: Sequence[float], budget: int | None) -> list[int]:
    """Return the share of each prompt in `budget` completions: the hardest first, of equally hard ones the first, the
    last one in part."""
    left = math.inf if budget is None else budget
    granted = [0] * len(wanted)
    for i in sorted(range(len(wanted)), key=lambda i: -hardness[i]):
        granted[i] = int(min(wanted[i], left))
        left -= granted[i]
    return granted


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, num_prompts: int) -> list[int]:
    return random.Random(f"{seed}/refill/{epoch}").sample(range(num_prompts), num_prompts)


def prompts_from(position: int, seed: int, num_prompts: int) -> Iterator[int]:
    """Yield dataset rows from the `position`-th on, without end: one shuffled order of all of them after the other."""
    while True:
        epoch, place = divmod(position, num_prompts)
        yield _order(seed, epoch, num_prompts)[place]
        position += 1


@dataclass
class DARSConfig(PACSConfig):
    """
    Configuration class for the [`DARSTrainer`]: every parameter of [`PACSConfig`], and:

    Parameters:
        adaptive_rollouts (`str`, *optional*):
            `"equal_treatment"` or `"hardness_weighted"` generates more completions of hard prompts, as DARS does; with
            `None` every prompt has `num_generations`.
        max_generations (`int`, *optional*):
            With `adaptive_rollouts`: most completions of a prompt. The authors use 32 (`"equal_treatment"`) and 64.
        adaptive_rollouts_budget (`int`, *optional*):
            With `adaptive_rollouts`: most completions on top of a generation, on all processes together; the hardest
            prompts come first. `None` is no bound but `max_generations`.
        refill_uniform_groups (`bool`, *optional*, defaults to `False`):
            Whether to generate completions of other prompts in place of groups that are all right or all wrong.
        max_refill_rounds (`int`, *optional*, defaults to `3`):
            With `refill_uniform_groups`: how often in a generation.
    """

    adaptive_rollouts: str | None = field(default=None, metadata={"choices": ["equal_treatment", "hardness_weighted"]})
    max_generations: int | None = bounded(None, least=2)
    adaptive_rollouts_budget: int | None = bounded(None, least=1)
    refill_uniform_groups: bool = False
    max_refill_rounds: int = bounded(3, least=1)

    @classmethod
    def errors(cls, given: Any, step: Step | None) -> list[str]:
        errors = super().errors(given, step)
        adaptive, most, size = given.adaptive_rollouts, given.max_generations, given.num_generations
        ignored = {"max_refill_rounds": not given.refill_uniform_groups and given.max_refill_rounds != 3}
        if adaptive is None:
            ignored["max_generations"] = most is not None
            ignored["adaptive_rollouts_budget"] = given.adaptive_rollouts_budget is not None
            if not given.refill_uniform_groups:
                errors.append("Set adaptive_rollouts, refill_uniform_groups, or both: else it would be PACS.")
        elif most is None or most <= size:
            errors.append(
                f"max_generations={most} must be above num_generations={size}: it is the most completions of a "
                f"prompt. The authors generate up to {size * (4 if adaptive == 'equal_treatment' else 8)}."
            )
        return errors + [f"{name} would be ignored. Remove the key." for name, is_set in ignored.items() if is_set]


class DARSTrainer(RedrawingTrainer):
    """[`PACSTrainer`] that generates more completions of hard prompts, and other prompts in place of uniform
    groups."""

    _name = "DARS"
    _config_class = DARSConfig
    _own_shared_settings = (
        *("adaptive_rollouts", "max_generations", "adaptive_rollouts_budget"),
        *("refill_uniform_groups", "max_refill_rounds", *RedrawingTrainer._own_shared_settings),
    )
    _counters = (*RedrawingTrainer._counters, "num_refilled")
    _saved_attributes = (*RedrawingTrainer._saved_attributes, "num_refilled")

    def _prepare_loading(self, model, args, arguments) -> None:
        super()._prepare_loading(model, args, arguments)
        if args.refill_uniform_groups and not hasattr(arguments.get("train_dataset"), "__len__"):
            raise ValueError(
                "refill_uniform_groups=True takes prompts from the whole training set, and a stream has no length. "
                "Load it into memory (streaming=False), or remove the key."
            )

    def redraw(self, again: Redraw, num_steps: int) -> None:
        super().redraw(again, num_steps)
        if self.args.adaptive_rollouts is not None:
            self._extend_hard_groups(again)
        if self.args.refill_uniform_groups:
            self._refill_uniform_groups(again)

    def _extend_hard_groups(self, again: Redraw) -> None:
        """The success rate is the mean of the labels that there are, scaled to `num_generations` completions. A prompt
        without any label gets no more."""
        size, args = self.num_generations, self.args
        groups = {group: labels for group, rows in again.groups.items() if (labels := known_labels(rows))}
        correct = [size * sum(labels) / len(labels) for labels in groups.values()]
        kinds = {"schedule": args.adaptive_rollouts, "max_generations": args.max_generations}
        wanted = [additional_completions(number, size, **kinds) for number in correct]
        granted = within_budget(wanted, [-number for number in correct], args.adaptive_rollouts_budget)
        numbers = dict(zip(groups, granted, strict=True))
        slots = [(group, again.inputs[group]) for group, number in numbers.items() for _ in range(number)]
        for row in again.draw(slots, "adaptive"):
            again.groups[row.group].append(row)
        hopeless = [group for group, number in numbers.items() if number and max(groups[group]) <= CORRECT]
        rescued = [group for group in hopeless if max(known_labels(again.groups[group])) > CORRECT]
        again.log(
            {
                "adaptive/wanted": sum(wanted),
                "adaptive/additional": sum(granted),
                "adaptive/extended_groups": sum(number > 0 for number in granted),
                "adaptive/hopeless_groups": len(hopeless),
                "adaptive/rescued_groups": len(rescued),
            }
        )

    def _refill_uniform_groups(self, again: Redraw) -> None:
        """Replace uniform groups, and those without two labels, until none is left or for `max_refill_rounds`. A new
        prompt takes the number of the group that it replaces."""
        rounds, replaced, most = 0, 0, self.args.max_refill_rounds
        for rounds in range(most + 1):
            uniform = [group for group, rows in again.groups.items() if len(set(known_labels(rows))) < 2]
            if not uniform or rounds == most:
                break
            again.inputs |= dict(zip(uniform, self._next_prompts(again, len(uniform)), strict=True))
            slots = [(group, again.inputs[group]) for group in uniform for _ in range(self.num_generations)]
            again.groups |= {group: [] for group in uniform}
            for row in again.draw(slots, "refill"):
                again.groups[row.group].append(row)
            replaced += len(uniform)
        generations = 1 + self._step // (self.args.steps_per_generation * self.num_iterations)
        epochs = (generations * len(again.groups) + self.num_refilled) / len(self.train_dataset)
        again.log({"refill/rounds": rounds, "refill/prompts": replaced, "refill/epochs": epochs})

    def _next_prompts(self, again: Redraw, number: int) -> list[dict]:
        """The next dataset rows that are not in the generation; any, if a whole epoch has not enough others."""
        found, size = [], len(self.train_dataset)
        here = [row["prompt"] for row in again.inputs.values()]
        for looked, index in enumerate(prompts_from(self.num_refilled, self.args.seed, size)):
            row = self.train_dataset[index]
            self.num_refilled += 1
            if row["prompt"] not in here or looked >= size:
                here.append(row["prompt"])
                found.append(row)
            if len(found) == number:
                break
        return found

    def _reset_run(self) -> None:
        super()._reset_run()
        self.num_refilled = 0  # prompts that replaced uniform groups
