"""Other prompts in place of those whose completions are all right or all wrong: DAPO's dynamic sampling.

DAPO ([arXiv 2503.14476](https://huggingface.co/papers/2503.14476)) draws until a batch is full of mixed groups. Here so many rounds
as the configuration allows, and a group that is still uniform then stays: it has no gradient by itself.
"""

import random
from collections.abc import Iterator
from functools import lru_cache

from .redraw import Redraw, judged_labels


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, num_prompts: int) -> list[int]:
    return random.Random(f"{seed}/refill/{epoch}").sample(range(num_prompts), num_prompts)


def prompts_from(position: int, seed: int, num_prompts: int) -> Iterator[int]:
    """Rows of the data set from the `position`-th on, without end: one shuffled order of all of them after the other."""
    while True:
        epoch, place = divmod(position, num_prompts)
        yield _order(seed, epoch, num_prompts)[place]
        position += 1


def refill_uniform_groups(again: Redraw, max_rounds: int) -> None:
    """
    Draw other prompts in place of uniform groups, and of those without two labels, until none is left or for `max_rounds`.

    Args:
        again ([`Redraw`]):
            The generation; a new prompt takes the number of the group that it replaces.
        max_rounds (`int`):
            Most rounds.
    """
    trainer, rounds, replaced = again.trainer, 0, 0
    for rounds in range(max_rounds + 1):
        uniform = [group for group, rows in again.groups.items() if len(set(judged_labels(rows))) < 2]
        if not uniform or rounds == max_rounds:
            break
        again.inputs |= dict(zip(uniform, _next_prompts(again, len(uniform)), strict=True))
        slots = [(group, again.inputs[group]) for group in uniform for _ in range(trainer.num_generations)]
        again.groups |= {group: [] for group in uniform}
        for row in again.draw(slots, "refill"):
            again.groups[row.group].append(row)
        replaced += len(uniform)
    generations = 1 + trainer._step // (trainer.args.steps_per_generation * trainer.num_iterations)
    epochs = (generations * len(again.groups) + trainer.num_refilled) / len(trainer.train_dataset)
    again.log({"refill/rounds": rounds, "refill/prompts": replaced, "refill/epochs": epochs})


def _next_prompts(again: Redraw, number: int) -> list[dict]:
    """The next rows of the data set that are not in the generation; any, if a whole epoch has not enough others."""
    trainer, found, size = again.trainer, [], len(again.trainer.train_dataset)
    here = [row["prompt"] for row in again.inputs.values()]
    for looked, index in enumerate(prompts_from(trainer.num_refilled, trainer.args.seed, size)):
        row = trainer.train_dataset[index]
        trainer.num_refilled += 1
        if row["prompt"] not in here or looked >= size:
            here.append(row["prompt"])
            found.append(row)
        if len(found) == number:
            break
    return found
