"""Simulated seconds of a whole step: generation and training in turn, one batch late, and continuous.

    python -m benchmarks.whole_step                     # shapes of Qwen3-1.7B, 4B, and 8B on eight H200
    python -m benchmarks.whole_step --staleness 1 2 4 8

**Simulated; not tested on a GPU.** Generation is that of `pacs_trl/plan/schedules.py`; seconds of an optimizer step
are those of `pacs_trl/plan/cost.py`, which is calibrated on one H200, divided by the number of GPUs that train.
Communication is left out, but for the transfer of weights at 50 GB/s. Lengths are those of `benchmarks.recorded`:
log-normal, with the mean as a share of the longest. In turn all GPUs generate and train, each with an engine.
Otherwise some GPUs generate and the others train, as many as are fastest.
"""

import argparse
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from benchmarks import table_of
from benchmarks.recorded import NUM_GENERATIONS, completion_lengths
from pacs_trl.plan.cost import (
    GPUS,
    KNOWN_MODELS,
    Execution,
    Gpu,
    ModelShape,
    Passes,
    optimizer_seconds,
    update_seconds,
)
from pacs_trl.plan.schedules import (
    Group,
    Schedule,
    Trainer,
    continuous,
    engine_on,
    in_turn,
    one_late,
    transfer_seconds,
)


PROMPT_TOKENS = 256
MICRO_BATCH_TOKENS = 16384

# Model, longest completion, mean as a share of it, and completions of an optimizer step on each GPU.
WORKLOADS = (
    ("Qwen3-1.7B", 4096, 0.35, 64),
    ("Qwen3-1.7B", 4096, 0.35, 256),
    ("Qwen3-4B", 8192, 0.35, 128),
    ("Qwen3-4B", 8192, 0.35, 512),
    ("Qwen3-8B", 8192, 0.2, 256),
    ("Qwen3-4B", 32768, 0.1, 64),
    ("Qwen3-4B", 32768, 0.1, 256),
)


class Best(NamedTuple):
    """The fastest split of the GPUs: how many generate, and what the simulation says of it."""

    generating: int
    schedule: Schedule


def recorded_groups(longest: int, mean_share: float, number: int) -> Iterator[Group]:
    """Yield groups without end: batches of `number` completions with recorded lengths, each with another seed."""
    seed = 0
    while True:
        lengths = completion_lengths(random.Random(seed), number, longest, mean_share=mean_share)
        for start in range(0, number, NUM_GENERATIONS):
            yield Group(PROMPT_TOKENS, lengths[start : start + NUM_GENERATIONS])
        seed += 1


def seconds_of_update(shape: ModelShape, gpu: Gpu, groups: list[Group], num_gpus: int) -> float:
    """Return the seconds of an optimizer step on some completions, with compiled layers and no recomputation."""
    lengths = [group.prompt + length for group in groups for length in group.completions]
    tokens = sum(lengths) - (NUM_GENERATIONS - 1) * sum(group.prompt for group in groups)  # a prompt is computed once
    seconds = update_seconds(
        shape,
        gpu,
        Execution("autocast", compiled=True),
        Passes(1, 0),
        tokens=tokens / num_gpus,
        mean_length=sum(length**2 for length in lengths) / tokens,
        micro_batches=max(1, tokens / num_gpus / MICRO_BATCH_TOKENS),
    )
    return seconds + optimizer_seconds(shape.parameters / num_gpus, gpu)


def simulate(workload: tuple[str, int, float, int], gpu: Gpu, num_gpus: int, staleness: list[int], steps: int) -> dict:
    """Return a row of the table: seconds per optimizer step of each schedule on the same GPUs."""
    model, longest, mean_share, per_gpu = workload
    shape, number = KNOWN_MODELS[f"Qwen/{model}"], per_gpu * num_gpus

    def groups() -> Iterator[Group]:
        return recorded_groups(longest, mean_share, number)

    num_groups = number // NUM_GENERATIONS
    batch = [group for group, _ in zip(groups(), range(num_groups), strict=False)]
    transfer = transfer_seconds(shape)

    def trainer(gpus: int) -> Trainer:
        return Trainer(num_groups, seconds_of_update(shape, gpu, batch, gpus), transfer)

    def best(simulate_split: Callable[[int], Schedule]) -> Best:
        splits = [Best(generating, simulate_split(generating)) for generating in range(1, num_gpus)]
        return min(splits, key=lambda split: split.schedule.seconds)

    together = in_turn(groups(), engine_on(shape, gpu, engines=num_gpus), trainer(num_gpus), steps)
    late = best(lambda s: one_late(groups(), engine_on(shape, gpu, engines=s), trainer(num_gpus - s), steps))
    row = {
        "model": model,
        "longest": longest,
        "mean / longest": mean_share,
        "completions": number,
        "in turn, s": together.seconds,
        "of it generation": f"{1 - trainer(num_gpus).update_seconds / together.seconds:.0%}",
        "one late, s": _with_speed(late, together),
    }
    for limit in staleness:

        def refill(generating: int, limit: int = limit) -> Schedule:
            engine = engine_on(shape, gpu, engines=generating)
            return continuous(groups(), engine, trainer(num_gpus - generating), steps, limit)

        refilled = best(refill)
        row[f"continuous, staleness {limit}, s"] = _with_speed(refilled, together)
        row[f"dropped, {limit}"] = f"{refilled.schedule.dropped:.1%}"
    return row


def _with_speed(best: Best, together: Schedule) -> str:
    times = together.seconds / best.schedule.seconds
    return f"{best.schedule.seconds:.3g} ({times:.1f}x, {best.generating} generate)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", choices=GPUS, default="h200")
    parser.add_argument("--num_gpus", type=int, default=8)
    parser.add_argument("--staleness", type=int, nargs="+", default=[4], help="max_staleness of continuous generation")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps to simulate; the second half counts")
    args = parser.parse_args()
    rows = [simulate(workload, GPUS[args.gpu], args.num_gpus, args.staleness, args.steps) for workload in WORKLOADS]
    print(f"Simulated, not tested on a GPU: {args.num_gpus} x {GPUS[args.gpu].name}, seconds per optimizer step")
    print(table_of(rows))


if __name__ == "__main__":
    main()
