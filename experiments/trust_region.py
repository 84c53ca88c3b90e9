"""Prediction of the gap after K updates on a rollout: the flow of docs/reuse.md.

`python -m experiments.trust_region` prints the table and draws the figure.

A group of n completions, m of them correct, has one log-ratio for the correct ones and one for the wrong ones; the
*gap* d is their difference in nats. Without scores every update adds the same step to the gap, and the steps add up to
a *distance*. PACS multiplies the step by the *force*

    force(d) = (w_1 sigmoid(-beta (n - m) / (n - 1) d) + w_0 sigmoid(-beta m / (n - 1) d)) / ((w_1 + w_0) / 2)

which is 1 at d = 0 and falls over a width of 1 / beta.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from experiments.figures import save
from experiments.paper.records import Records
from experiments.reuse import RESULTS, STAGES, Arm
from experiments.reuse_tables import curve, solved
from experiments.studies import markdown
from pacs_trl.report.plots import COLORS, DASHES, PAGE_WIDTH, PANEL_HEIGHT, STYLE


BETAS = (1.0, 3.0, 10.0, 30.0)


def force(gap, beta: float, size: int = 8, num_right: int | None = None, *, weighted: bool = True):
    """Return the share of its first step that a group with this gap still takes; `num_right` is half of the group by
    default."""
    right = size / 2 if num_right is None else num_right
    weights = (size / (2 * right), size / (2 * (size - right))) if weighted else (1.0, 1.0)
    slopes = (size - right) / (size - 1), right / (size - 1)
    pulls = [
        w * np.exp(-np.logaddexp(0, beta * slope * np.asarray(gap))) for w, slope in zip(weights, slopes, strict=True)
    ]
    return 2 * (pulls[0] + pulls[1]) / sum(weights)


def residuals_left(gap: float, beta: float, num_right: int, size: int = 8, *, weighted: bool = True) -> float:
    """Return the share of the weighted residuals that a group with this gap still has: the force if half of the group
    is correct, more if many wrong completions share a small score."""
    scores = beta * (size - num_right) / (size - 1) * gap, beta * num_right / (size - 1) * gap
    shares = (0.5, 0.5) if weighted else (num_right / size, 1 - num_right / size)
    return sum(2 * share / (1 + math.exp(score)) for share, score in zip(shares, scores, strict=True))


def first_step(size: int, num_right: int, *, weighted: bool) -> float:
    """Return the initial growth of the gap relative to a group of which half is correct."""
    return size**2 / (4 * num_right * (size - num_right)) if weighted else 1.0


def width(beta: float, size: int = 8, left: float = 0.5) -> float:
    """Return the gap in nats at which a half-correct group has this share of its force left."""
    return math.log(2 / left - 1) * 2 * (size - 1) / (size * beta)


def gap_of_flow(way: float, beta: float, size: int = 8) -> float:
    """
    Gap of a group of which half is right after `way` nats, the number of updates times the first step, in closed form.

    With `y = beta size / (2 (size - 1)) d` the flow `d' = 2 / (1 + e^y)` has `y + e^y = 1 + 2 (y' at 0) way`.
    """
    scale = beta * size / (2 * (size - 1))
    target = 1 + 2 * scale * way
    y = math.log(target) if target > 2 else target - 1
    for _ in range(60):  # Newton on a convex function
        y -= (y + math.exp(y) - target) / (1 + math.exp(y))
    return y / scale


def way_of_flow(gap: float, beta: float, size: int = 8) -> float:
    """Return the distance after which a half-correct group has this gap: the inverse of [`gap_of_flow`]."""
    scale = beta * size / (2 * (size - 1))
    return (scale * gap + math.exp(scale * gap) - 1) / (2 * scale)


CLIP = (math.log(1.2), math.log(0.8))  # of GRPO


class Cell(NamedTuple):
    """An arm of `reuse.py`, by seed: pass@1 in percent, and before the last update on a rollout the mean gap and (of
    PACS) the share of residuals left."""

    arm: Arm
    solved: dict[int, float]
    gaps: dict[int, float]
    left: dict[int, float]


def measured(results_dir: Path) -> list[Cell]:
    """Return all arms without delay that have several updates per rollout and recorded runs."""
    records, cells = Records(results_dir), []
    for arm in dict.fromkeys(arm for stage in STAGES.values() for arm in stage):
        runs = records.runs(arm.name, arm.name)
        if runs and arm.updates > 1 and arm.engine == "transformers":
            last = [{run.seed: curve(run, key)[-1] for run in runs if curve(run, key)} for key in ("gap", "force")]
            cells.append(Cell(arm, {run.seed: mean(solved(run, 1)) for run in runs}, *last))
    return cells


def predicted(cells: Sequence[Cell]) -> list[tuple[Cell, float, float]]:
    """Return each PACS cell with beta other than 1, restricted to the seeds of its counterpart with beta 1, with the
    distance of that counterpart and the predicted gap."""
    plain, found = {cell.arm: cell.gaps for cell in cells}, []
    for arm, *by_seed in cells:
        seeds = sorted(by_seed[0].keys() & plain.get(arm._replace(beta=1.0), {}).keys())
        if arm.method == "PACS" and arm.beta != 1 and seeds:
            way = way_of_flow(mean(plain[arm._replace(beta=1.0)][seed] for seed in seeds), 1.0)
            own = Cell(arm, *({seed: values[seed] for seed in seeds} for values in by_seed))
            found.append((own, way, gap_of_flow(way, arm.beta)))
    return found


def table(cells: Sequence[Cell]) -> list[str]:
    """Return prediction and measurement before the last update on a rollout."""
    columns = ["seeds", "distance with beta 1", "gap predicted", "gap measured", "measured / predicted"]
    columns += ["left, 4 of 8 correct", "left, 1 of 8 correct", "left, measured"]
    rows = []
    for cell, way, gap in predicted(cells):
        found, weighted = mean(cell.gaps.values()), cell.arm.weights == "balanced"
        left = [residuals_left(gap, cell.arm.beta, right, weighted=weighted) for right in (4, 1)]
        numbers = [way, gap, found, found / gap, *left, mean(cell.left.values())]
        rows.append([cell.arm.name, len(cell.gaps), *(f"{n:.2f}" for n in numbers)])
    return markdown(["", *columns], rows)


def draw(cells: Sequence[Cell], path: Path) -> None:
    """Plot the share of a step that is left against the gap, and measured gaps against predicted ones."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(PAGE_WIDTH, 1.2 * PANEL_HEIGHT), layout="constrained")
        left, right = figure.subplots(1, 2)
        gaps, colors = np.linspace(0, 3, 301), dict(zip(BETAS, COLORS, strict=False))
        for beta, dash in zip(BETAS, DASHES, strict=False):
            left.plot(gaps, force(gaps, beta), color=colors[beta], linestyle=dash, label=f"PACS, beta {beta:g}")
        edge = CLIP[0] - CLIP[1]
        left.plot([0, edge, edge, 3], [1, 1, 0, 0], color="#777777", linestyle=":", label="GRPO, clip of one token")
        for cell, _, gap in predicted(cells):
            right.plot([gap] * len(cell.gaps), list(cell.gaps.values()), "o", color=colors[cell.arm.beta], alpha=0.5)
        right.plot([0.05, 2], [0.05, 2], color="#777777", linewidth=0.8)
        left.set(title="share of the first step that is left", ylim=(0, 1.05), xlim=(0, 3))
        left.set(xlabel="gap between correct and wrong completions (nats)")
        right.set(title="gap before the last update (nats)", xlabel="predicted from beta 1", ylabel="measured")
        right.set(xscale="log", yscale="log")
        handles = left.get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=len(handles[0]))
        save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results_dir", type=Path, default=RESULTS, help="of `experiments.reuse`")
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "docs/images/reuse.png")
    args = parser.parse_args()
    cells = measured(args.results_dir)
    print("\n".join(table(cells)))
    draw(cells, args.output)


if __name__ == "__main__":
    main()
