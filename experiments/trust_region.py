"""How far K updates on a rollout move its log-ratios: the prediction of docs/reuse.md. `python -m experiments.trust_region` draws it.

One group of n completions, m of them right, with one log-ratio for the right ones and one for the wrong ones; the *gap* d is their
difference in nats. Without scores the gap grows by the same step in every update. PACS multiplies the step by the *force*

    force(d) = (w_1 sigmoid(-beta (n - m) / (n - 1) d) + w_0 sigmoid(-beta m / (n - 1) d)) / ((w_1 + w_0) / 2)

which is 1 at d = 0 and falls within a width of 1 / beta. Nothing here imports torch.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from pacs_trl.report.plots import COLORS, DASHES, PAGE_WIDTH, PANEL_HEIGHT, STYLE
from pacs_trl.reproduce.records import Records


MOMENTUM = 0.9  # Adam's beta_1
BETAS = (1.0, 3.0, 10.0, 30.0)


def force(gap, beta: float, size: int = 8, num_right: int | None = None, *, weighted: bool = True):
    """Share of its first step that a group with this gap still takes; `num_right` is half of the group if left out."""
    right = size / 2 if num_right is None else num_right
    weights = (size / (2 * right), size / (2 * (size - right))) if weighted else (1.0, 1.0)
    slopes = (size - right) / (size - 1), right / (size - 1)
    pulls = [
        w * np.exp(-np.logaddexp(0, beta * slope * np.asarray(gap))) for w, slope in zip(weights, slopes, strict=True)
    ]
    return 2 * (pulls[0] + pulls[1]) / sum(weights)


def first_step(size: int, num_right: int, *, weighted: bool) -> float:
    """How fast the gap of a group begins to grow, relative to a group of which half is right."""
    return size**2 / (4 * num_right * (size - num_right)) if weighted else 1.0


def width(beta: float, size: int = 8, left: float = 0.5) -> float:
    """Gap in nats at which a group of which half is right is left with this share of its force."""
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


def gaps_under_adam(updates: int, beta: float, pace: float, shared: float, size: int = 8) -> np.ndarray:
    """
    Mean gap before each of `updates` updates on a rollout and after the last, `(updates + 1,)`, once training has settled.

    Adam divides by the root mean square of the gradient, which remembers hundreds of updates: scores that saturate make each update
    smaller within a rollout, and all of them larger together. Its momentum spreads the pull of one update over about ten; what is
    left of that of earlier rollouts moves the present one only as far as its gradient is `shared`.

    Args:
        pace (`float`): Nats per update, if every gradient had the same length and direction; proportional to the learning rate.
        shared (`float`): Cosine of the gradients of two rollouts in the gap, 0 to 1.
    """
    forces = np.ones(updates)
    for _ in range(60):
        scale = np.sqrt(np.mean(forces**2))
        ages = np.arange(updates - 1, -1, -1)
        carried = (1 - MOMENTUM) * np.sum(MOMENTUM**ages * forces) / (1 - MOMENTUM**updates)
        gaps, own = [0.0], 0.0
        for k in range(updates):
            own = MOMENTUM * own + (1 - MOMENTUM) * float(force(gaps[-1], beta, size))
            gaps.append(gaps[-1] + pace / scale * (own + shared * MOMENTUM ** (k + 1) * carried))
        forces = 0.5 * forces + 0.5 * force(np.array(gaps[:-1]), beta, size)
    return np.array(gaps)


def fitted(gaps: Sequence[float]) -> tuple[float, float]:
    """Pace and shared part that explain the gaps before each update (the first is 0) of a method that nothing stops, best."""
    measured, best = np.array(gaps), (math.inf, 0.0, 0.0)
    for shared in np.linspace(0, 1, 101):
        shape = gaps_under_adam(len(gaps), 1e-9, 1.0, shared)[:-1]
        pace = float(shape @ measured / (shape @ shape))
        best = min(best, (float(np.sum((pace * shape - measured) ** 2)), pace, float(shared)))
    return best[1:]


CLIP = (math.log(1.2), math.log(0.8))  # of GRPO
TOKENS = (1, 4)  # that move, in the example of the figure


def measured_gaps(results_dir: Path, name: str) -> np.ndarray:
    """Mean gap before each update on a rollout, of an arm of `reuse.py` by its name: a row for each seed."""
    logs = [run.training["log_history"] for run in Records(results_dir).runs(name, name) if run.training]
    return np.array([[log["gap"] for log in history if "gap" in log] for history in logs])


def draw(pace: float, shared: float, measured: Mapping[tuple[int, float], np.ndarray], path: Path) -> None:
    """What is left of a step against the gap; gaps within a rollout of 8 updates; gaps at the last update against K.
    `measured` are gaps by K and beta, drawn as dots."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(PAGE_WIDTH, 1.15 * PANEL_HEIGHT), layout="constrained")
        left, middle, right = figure.subplots(1, 3)
        gaps, most = np.linspace(0, 3, 301), 16
        for beta, color, dash in zip(BETAS, COLORS, DASHES, strict=False):
            look = {"color": color, "linestyle": dash, "label": f"beta {beta:g}"}
            left.plot(gaps, force(gaps, beta), **look)
            middle.plot(range(8), gaps_under_adam(8, beta, pace, shared)[:-1], **look)
            ends = [gaps_under_adam(updates, beta, pace, shared)[-2] for updates in range(2, most + 1)]
            right.plot(range(2, most + 1), ends, **look)
            for (updates, of_beta), values in measured.items():
                if of_beta == beta and updates == 8:
                    middle.plot(range(8), values.mean(axis=0), "o", color=color)
                if of_beta == beta and updates > 1:
                    right.plot([updates] * len(values), values[:, -1], "o", color=color, alpha=0.6)
        for tokens, dash in zip(TOKENS, (":", (0, (1, 3))), strict=True):
            edge = tokens * (CLIP[0] - CLIP[1])
            label = f"clip, {tokens} token{'s' * (tokens > 1)}"
            left.plot([0, edge, edge, 3], [1, 1, 0, 0], color="#777777", linestyle=dash, label=label)
        left.set(title="what is left of a step", xlabel="gap (nats)", ylabel="force", ylim=(0, 1.05), xlim=(0, 3))
        middle.set(
            title="gap before each of 8 updates", xlabel="updates on the rollout", ylabel="nats", ylim=(0, None)
        )
        right.set(title="gap before the last update", xlabel="K", ylabel="nats", ylim=(0, None), xticks=[2, 4, 8, 16])
        note = "lines: prediction; dots: measured, in the middle the mean over seeds" if measured else None
        handles = left.get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=len(handles[0]), title=note, title_fontsize=7)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=200)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    root = Path(__file__).parents[1]
    parser.add_argument("--results_dir", type=Path, default=root / "docs/results/reuse", help="of `experiments.reuse`")
    parser.add_argument("--prefix", default="addition/", help="of the names of its arms: the task")
    parser.add_argument("--rate", default="0.0001", help="learning rate of its arms, as in their names")
    parser.add_argument("--output", type=Path, default=root / "docs/images/reuse.png")
    args = parser.parse_args()
    name = f"{args.prefix}rloo-k8-{args.rate}"
    free = measured_gaps(args.results_dir, name)
    if len(free) == 0:
        parser.error(
            f"{args.results_dir} has no run of {name}, to which pace and shared part are fitted: experiments.reuse makes it."
        )
    pace, shared = fitted(free.mean(axis=0))
    print(f"RLOO, K = 8: pace {pace:.4f} nats per update, shared {shared:.2f}")
    measured = {}
    for updates in (2, 4, 8, 16):
        for beta in BETAS:
            found = measured_gaps(args.results_dir, f"{args.prefix}pacs-k{updates}-beta{beta:g}-balanced-{args.rate}")
            if len(found):
                measured[updates, beta] = found
                expected = gaps_under_adam(updates, beta, pace, shared)[-2]
                print(
                    f"K = {updates}, beta {beta:g}: predicted {expected:.3f}, measured {found[:, -1].round(3).tolist()}"
                )
    draw(pace, shared, measured, args.output)


if __name__ == "__main__":
    main()
