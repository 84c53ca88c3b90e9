"""DARS ([arXiv 2508.13755](https://huggingface.co/papers/2508.13755)): more completions for hard prompts; and refill:
other prompts in place of uniform groups.

Extension point: generate more or different completions. DARS generates for hard prompts until the cumulative advantage
of the group equals that of an easier one; DARS-B takes one optimizer step per generation batch. The authors drop
groups that are still uniform; here they stay, with zero gradient. Refill is DAPO's dynamic sampling ([arXiv
2503.14476](https://huggingface.co/papers/2503.14476)) with a bounded number of rounds. See docs/related_methods.md.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from datasets import Dataset, IterableDataset

from ..errors import UserError
from ..pacs_config import PACSConfig
from ..settings.checks import ignored_settings
from ..settings.fields import setting
from ..update.step_sizes import BatchSizes
from ._generation import ExtendingTrainer, known_labels


Schedule = Literal["equal_treatment", "hardness_weighted"]

# Keeps the ceiling of a quotient that is an integer but for rounding.
_ROUNDING = 1e-9


def additional_completions(
    num_correct: float, num_generations: int, *, schedule: Schedule, max_generations: int, use_std: bool = False
) -> int:
    """
    Return the number of completions to generate in addition to `num_generations`: 0 from a success rate of 1/2 on.

    With the success rate `u` and the cumulative advantage `S(u) = 2 u (1 - u)` per completion (with `use_std`
    `2 sqrt(u (1 - u))`), additional completions raise `N S` to its peak `P`, the value at `u = 1/2`, for
    `"equal_treatment"`: `ceil((P - N S) / S)`; to `2 (1 - u) P` for `"hardness_weighted"`; up to `max_generations` in
    total. `u` is at least half a correct completion.

    Args:
        num_correct (`float`): Number of correct completions, or the sum of soft labels, in [0, `num_generations`].
        num_generations (`int`): Number of first completions, `N`.
        schedule (`str`): `"equal_treatment"` or `"hardness_weighted"`.
        max_generations (`int`): Maximum number of completions of a prompt.
        use_std (`bool`, *optional*, defaults to `False`): Whether advantages are divided by the group's standard
            deviation.

    Raises:
        `ValueError`: if `num_correct` is out of range.
    """
    if not 0 <= num_correct <= num_generations:
        raise UserError(f"num_correct={num_correct} must be between 0 and num_generations={num_generations}.")
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
    """Divide `budget` completions: the hardest prompts get what they want, the last one of them a part. Ties go to the
    first prompt."""
    left = math.inf if budget is None else budget
    granted = [0] * len(wanted)
    for i in sorted(range(len(wanted)), key=lambda i: -hardness[i]):
        granted[i] = int(min(wanted[i], left))
        left -= granted[i]
    return granted


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, num_prompts: int) -> list[int]:
    """Return the order of the dataset rows in an epoch of refill."""
    return random.Random(f"{seed}/refill/{epoch}").sample(range(num_prompts), num_prompts)


@dataclass
class DARSConfig(PACSConfig):
    """Configuration of [`DARSTrainer`]: every parameter of [`PACSConfig`], and those of additional rollouts."""

    supports_rollout_lag = False
    supports_images = False

    adaptive_rollouts: Schedule | None = setting(
        None,
        'DARS schedule of additional completions for hard prompts, `"equal_treatment"` or '
        '`"hardness_weighted"`. With `None` every prompt has `num_generations`.',
    )
    max_generations: int | None = setting(
        None, 'Maximum number of completions of a prompt. The authors use 32 (`"equal_treatment"`) and 64.', least=2
    )
    adaptive_rollouts_budget: int | None = setting(
        None,
        "Maximum number of additional completions of a generation batch, on all processes; the hardest "
        "prompts come first. `None` leaves only the bound of `max_generations`.",
        least=1,
    )
    refill_uniform_groups: bool = setting(
        False, "Whether to replace groups that are all correct or all wrong by completions of other prompts."
    )
    max_refill_rounds: int = setting(3, "Maximum number of refill rounds of a generation batch.", least=1)

    def errors(self, step: BatchSizes) -> list[str]:
        errors, most, size = super().errors(step), self.max_generations, self.num_generations
        if self.adaptive_rollouts is None and not self.refill_uniform_groups:
            errors.append("`method: dars` does nothing yet. Set adaptive_rollouts, refill_uniform_groups, or both.")
        if self.adaptive_rollouts is None:
            names = ("max_generations", "adaptive_rollouts_budget")
            errors += ignored_settings(self, names, "no schedule is set", "`adaptive_rollouts`")
        elif most is None or most <= size:
            errors.append(f"max_generations={most} must be above num_generations={size}. The authors use 32 and 64.")
        if not self.refill_uniform_groups:
            instead = "`refill_uniform_groups: true`"
            errors += ignored_settings(self, ["max_refill_rounds"], "there is no refill", instead)
        return errors


class DARSTrainer(ExtendingTrainer):
    """[`PACSTrainer`] with additional completions of hard prompts, and other prompts in place of uniform groups."""

    args: DARSConfig
    train_dataset: Dataset  # refill refuses a stream
    _name = "DARS"
    _paper = {
        "title": "Depth-Breadth Synergy in RLVR: Unlocking LLM Reasoning Gains with Adaptive Exploration",
        "id": "2508.13755",
    }
    _config_class = DARSConfig
    _saved_attributes = (*ExtendingTrainer._saved_attributes, "num_refilled")

    def _before_loading(self, model, args, arguments) -> None:
        super()._before_loading(model, args, arguments)
        if args.refill_uniform_groups and isinstance(arguments["train_dataset"], IterableDataset):
            raise UserError(
                "refill_uniform_groups draws prompts from the whole training set, which a streamed dataset does not "
                "support. Load the dataset (streaming=False), or remove the key."
            )

    def extend(self, num_steps: int) -> None:
        super().extend(num_steps)
        if self.args.adaptive_rollouts is not None:
            self._extend_hard_groups()
        if self.args.refill_uniform_groups:
            self._refill_uniform_groups()

    def _extend_hard_groups(self) -> None:
        """Generate by the mean of the known labels of each group; groups without a label stay as they are."""
        size, args = self.num_generations, self.args
        schedule, most = args.adaptive_rollouts, args.max_generations
        assert schedule is not None and most is not None  # a schedule needs a maximum, see `DARSConfig.errors`
        groups = {group: labels for group, rows in self.groups.items() if (labels := known_labels(rows))}
        correct = [size * sum(labels) / len(labels) for labels in groups.values()]
        wanted = [additional_completions(c, size, schedule=schedule, max_generations=most) for c in correct]
        granted = within_budget(wanted, [-number for number in correct], args.adaptive_rollouts_budget)
        numbers = dict(zip(groups, granted, strict=True))
        slots = [(group, self.examples[group]) for group, number in numbers.items() for _ in range(number)]
        for rollout in self.generate_for(slots, "adaptive"):
            self.groups[rollout.group].append(rollout)
        self.record_metrics(
            {
                "adaptive/wanted": sum(wanted),
                "adaptive/additional": sum(granted),
                "adaptive/extended_groups": sum(number > 0 for number in granted),
            }
        )

    def _refill_uniform_groups(self) -> None:
        """Replace uniform groups, and those with fewer than two labels, until none is left or the rounds are over. A
        new prompt takes the number of the group that it replaces."""
        rounds, replaced, most = 0, 0, self.args.max_refill_rounds
        for rounds in range(most + 1):
            uniform = [group for group, rows in self.groups.items() if len(set(known_labels(rows))) < 2]
            if not uniform or rounds == most:
                break
            self.examples |= dict(zip(uniform, self._next_prompts(len(uniform)), strict=True))
            slots = [(group, self.examples[group]) for group in uniform for _ in range(self.num_generations)]
            self.groups |= {group: [] for group in uniform}
            for rollout in self.generate_for(slots, "refill"):
                self.groups[rollout.group].append(rollout)
            replaced += len(uniform)
        generations = 1 + self._step // (self.args.steps_per_generation * self.num_iterations)
        epochs = (generations * len(self.groups) + self.num_refilled) / len(self.train_dataset)
        self.record_metrics({"refill/rounds": rounds, "refill/prompts": replaced, "refill/epochs": epochs})

    def _next_prompts(self, number: int) -> list[dict]:
        """Return the next dataset rows that are not in the generation batch, or any after a whole epoch."""
        size = len(self.train_dataset)
        num_refilled_before = self.num_refilled
        used = [example["prompt"] for example in self.examples.values()]
        examples: list[dict] = []
        while len(examples) < number:
            epoch, position = divmod(self.num_refilled, size)
            example = self.train_dataset[_order(self.args.seed, epoch, size)[position]]
            has_seen_all = self.num_refilled - num_refilled_before >= size
            if example["prompt"] not in used or has_seen_all:
                used.append(example["prompt"])
                examples.append(example)
            self.num_refilled += 1
        return examples

    def _reset_run(self) -> None:
        super()._reset_run()
        self.num_refilled = 0  # prompts that replaced uniform groups
