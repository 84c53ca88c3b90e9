"""Minibatches, breadth, class weights, the actor term, and label noise on problems with many answers.

    python -m experiments.open_questions    # trains what is not recorded and prints the table of the page

The arms start from the warm starts of `many_answers.py` and have its seeds, so that both pages' records are paired.
"""

from argparse import ArgumentParser
from typing import Any

import torch

from experiments.many_answers import (
    GRPO,
    KEPT,
    OTHERS,
    PENALTY,
    RESULTS,
    ROLLOUT,
    SEEDS,
    Arm,
    read_records,
    train_missing,
)
from experiments.many_answers_tables import LEVEL, at_pass_1, at_point, cells, markdown, paired_difference


RATE, UPDATES = 1e-3, 320

# Each arm with the arm that it is compared with.
RLOO, NO_WEIGHTS = OTHERS[0], ROLLOUT._replace(weighting="none")
FOUR = [arm._replace(minibatches=4) for arm in (RLOO, NO_WEIGHTS, ROLLOUT, Arm("PACS", 10.0))]
BREADTH = FOUR[2]._replace(breadth=True)
PLAIN_KEPT = KEPT[0.3]._replace(weighting="none")
CLASSES = [(ROLLOUT, RLOO), (PLAIN_KEPT, RLOO), (KEPT[0.3], PLAIN_KEPT), (KEPT[0.3], ROLLOUT)]
ACTOR = [(arm._replace(actor=1.0), arm) for arm in (ROLLOUT, KEPT[0.3], PLAIN_KEPT)]
NOISY = [(arm._replace(noise=0.2), arm) for arm in (GRPO, ROLLOUT, *(KEPT[b] for b in (0.1, 0.3, 1.0)), PENALTY[0.1])]
PAIRS = [(BREADTH, FOUR[2]), *zip(FOUR[1:], FOUR, strict=False), *CLASSES, *ACTOR, *NOISY]
NEW = [*FOUR, PLAIN_KEPT, *(arm for arm, _ in [*ACTOR, *NOISY])]


def at_last_update(record: dict[str, Any]) -> dict[int, dict[str, float]]:
    """Return the metrics of each seed after `UPDATES` updates, or half as many on twice the minibatches."""
    point = min(UPDATES / record["every"], 8)
    return {seed: at_point(record, i, point) for i, seed in enumerate(SEEDS)}


def main() -> None:
    torch.set_num_threads(1)
    train_missing(RESULTS, [(arm, RATE) for arm in NEW], SEEDS, updates=UPDATES, every=UPDATES // 8)
    train_missing(RESULTS, [(BREADTH, RATE)], SEEDS, updates=UPDATES // 2, every=UPDATES // 16)  # the same rollouts
    records = {r["arm"]: r for r in read_records(RESULTS) if r["seeds"] == SEEDS and r["rate"] == RATE}
    rows, names = [], ["pass@64", "distinct", "entropy", "updates"]
    for arm, base in PAIRS:
        arm_level, base_level = (at_pass_1(records[each.name], LEVEL) for each in (arm, base))
        arm_end, base_end = (at_last_update(records[each.name]) for each in (arm, base))
        row = [arm.name, base.name, str(len(arm_level)), *cells(list(arm_level.values()), ["pass@64", "updates"])]
        row += [paired_difference(arm_level, base_level, name) for name in names]
        row += cells(list(arm_end.values()), ["pass@1"])
        row += [paired_difference(arm_end, base_end, name) for name in ("pass@1", "entropy")]
        rows.append(row)
    heads = ["arm", "minus", "reached", "pass@64", "updates", *(f"difference in {name}" for name in names)]
    markdown([*heads, "pass@1 at the end", "difference", "difference in entropy at the end"], rows)


if __name__ == "__main__":
    ArgumentParser(description=__doc__).parse_args()  # no options but --help
    main()
