"""Settings of guided attempts, adaptive rollouts and refill: what is wrong between them, and how many completions they add."""

from typing import Any, NamedTuple

from .schedules import additional_completions, mean_over_rates
from .step_sizes import Step


class Additional(NamedTuple):
    """Completions of one kind beside the first ones of a generation, on all processes: at most, and expected if the success
    rates of prompts lie evenly between 0 and 1."""

    most: int
    expected: float


def additional(given: Any, step: Step) -> dict[str, Additional]:
    """
    What is drawn beside the first `num_generations` of each prompt of a generation, by what it is for.

    Args:
        given (`Any`):
            Values of the fields of [`PACSConfig`].
        step ([`Step`]):
            What its batch sizes come to.
    """
    found, size, prompts = {}, step.num_generations, int(step.prompts_per_generation)

    def in_equal_shares(number: int) -> int:
        return -(-number // step.num_processes) * step.num_processes

    if given.guidance is not None:
        steps = max(1, step.steps_per_generation // step.gradient_accumulation_steps)
        most = min(steps * _guided_rows(given, step), prompts * (size // 2))
        hopeless = mean_over_rates(size, lambda right: right == 0)
        found["guidance"] = Additional(in_equal_shares(most), min(most, prompts * hopeless * (size // 2)))
    if given.adaptive_rollouts is not None:
        kinds = {"schedule": given.adaptive_rollouts, "max_generations": given.max_generations}
        wanted = [additional_completions(right, size, **kinds) for right in range(size + 1)]
        budget = prompts * max(wanted) if given.adaptive_rollouts_budget is None else given.adaptive_rollouts_budget
        most = min(budget, prompts * max(wanted))
        mean = prompts * mean_over_rates(size, lambda right: wanted[right])
        found["adaptive"] = Additional(in_equal_shares(most), min(most, mean))
    if given.refill_uniform_groups:
        rounds, uniform = given.max_refill_rounds, mean_over_rates(size, lambda right: right in (0, size))
        expected = prompts * size * sum(uniform**n for n in range(1, rounds + 1))
        found["refill"] = Additional(rounds * in_equal_shares(prompts * size), expected)
    return found


def _guided_rows(given: Any, step: Step) -> int:
    return int(given.max_guided_fraction * min(step.rows_per_update, step.rows_per_generation))


def draw_errors(given: Any, step: Step | None) -> list[str]:
    """What is wrong between the settings of later draws, a sentence for each; arguments as in [`PACSConfig.errors`]."""
    return [*_guidance_errors(given, step), *_adaptive_errors(given, step), *_ignored(given)]


def _ignored(given: Any) -> list[str]:
    owners = {
        "max_guided_fraction": (0.25, "guidance", "'hint'"),
        "guided_completions": ("right", "guidance", "'hint'"),
        "guided_weight": (1.0, "guidance", "'hint'"),
        "max_generations": (None, "adaptive_rollouts", "'equal_treatment'"),
        "adaptive_rollouts_budget": (None, "adaptive_rollouts", "'equal_treatment'"),
        "max_refill_rounds": (3, "refill_uniform_groups", "True"),
    }
    return [
        f"{name}={getattr(given, name)!r} would be ignored without {owner}. Set {owner}={example}, or remove the key."
        for name, (default, owner, example) in owners.items()
        if getattr(given, name) != default and not getattr(given, owner)
    ]


def _guidance_errors(given: Any, step: Step | None) -> list[str]:
    if given.guidance is None:
        return []
    errors = []
    if given.class_weighting == "only_negative" and given.guided_completions == "right":
        errors.append(
            f"guidance={given.guidance!r} makes no sense with class_weighting='only_negative': guided answers are right ones, whose "
            "half of the loss is left out. Use class_weighting='balanced', or remove guidance."
        )
    if step is not None and _guided_rows(given, step) < 1:
        rows = min(step.rows_per_update, step.rows_per_generation)
        errors.append(
            f"max_guided_fraction={given.max_guided_fraction} of the {rows} completions of an optimizer step is not one. Raise it "
            f"to {1 / rows:.3g} or more, or remove guidance."
        )
    return errors


def _adaptive_errors(given: Any, step: Step | None) -> list[str]:
    most, size, errors = given.max_generations, given.num_generations, []
    if given.adaptive_rollouts is None:
        return []
    if most is None:
        errors.append(
            f"adaptive_rollouts={given.adaptive_rollouts!r} needs max_generations, the most completions of a prompt. The authors "
            f"draw {4 if given.adaptive_rollouts == 'equal_treatment' else 8} times num_generations={size} at most: "
            f"{size * (4 if given.adaptive_rollouts == 'equal_treatment' else 8)}."
        )
    elif most <= size:
        errors.append(
            f"max_generations={most} must be above num_generations={size}: completions are added to the first {size} of a prompt. "
            f"Raise it to {size + 1} or more, or remove adaptive_rollouts."
        )
    elif given.group_layout == "whole" and given.max_tokens_per_micro_batch is None:
        if given.per_device_train_batch_size < most:
            errors.append(
                f"group_layout='whole' must hold groups of max_generations={most} completions in a micro-batch of "
                f"per_device_train_batch_size={given.per_device_train_batch_size}. Use group_layout='auto'."
            )
    budget = given.adaptive_rollouts_budget
    if budget is not None and step is not None and budget % step.num_processes:
        below = budget // step.num_processes * step.num_processes
        nearest = " or ".join(str(n) for n in (below, below + step.num_processes) if n)
        errors.append(
            f"adaptive_rollouts_budget={budget} must be a multiple of the {step.num_processes} processes, which draw equally many. "
            f"Nearest legal values: {nearest}."
        )
    return errors
