"""More completions of hard prompts: the second stage of DARS ([arXiv 2508.13755](https://huggingface.co/papers/2508.13755)).

The authors drop groups that are still all right or all wrong, and learn from `R - mean`. Here every group stays, and one of a
single class has no gradient by itself (docs/adaptive_rollouts.md).
"""

from .redraw import RIGHT, Redraw, judged_labels
from .schedules import Schedule, additional_completions, within_budget


def extend_hard_groups(again: Redraw, *, schedule: Schedule, max_generations: int, budget: int | None) -> None:
    """
    Draw more completions of the prompts that `schedule` calls hard.

    The success rate is the mean of the labels that there are, scaled to `num_generations` completions. A prompt without any label
    says nothing about how hard it is, and gets no more.

    Args:
        again ([`Redraw`]):
            The generation; its groups grow.
        schedule (`str`), max_generations (`int`):
            See [`additional_completions`].
        budget (`int`, *optional*):
            Most completions on top, on all processes together.
    """
    size = again.trainer.num_generations
    groups = {group: labels for group, rows in again.groups.items() if (labels := judged_labels(rows))}
    correct = [size * sum(labels) / len(labels) for labels in groups.values()]
    kinds = {"schedule": schedule, "max_generations": max_generations}
    wanted = [additional_completions(number, size, **kinds) for number in correct]
    granted = within_budget(wanted, [-number for number in correct], budget)
    numbers = dict(zip(groups, granted, strict=True))
    slots = [(group, again.inputs[group]) for group, number in numbers.items() for _ in range(number)]
    for row in again.draw(slots, "adaptive"):
        again.groups[row.group].append(row)
    hopeless = [group for group, number in numbers.items() if number and max(groups[group]) <= RIGHT]
    rescued = [group for group in hopeless if max(judged_labels(again.groups[group])) > RIGHT]
    again.log(
        {
            "adaptive/wanted": sum(wanted),
            "adaptive/additional": sum(granted),
            "adaptive/extended_groups": sum(number > 0 for number in granted),
            "adaptive/hopeless_groups": len(hopeless),
            "adaptive/rescued_groups": len(rescued),
        }
    )
