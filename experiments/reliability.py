"""Reliability diagram of the implicit critic sigmoid(psi)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from pacs_trl.report.plots import COLUMN_WIDTH, METHODS, STYLE, save_figure


def reliability_figure(
    scores: Sequence[float], labels: Sequence[float], path: Path, *, num_bins: int = 10
) -> list[Path]:
    """Plot the share of correct completions against sigmoid(psi): a calibrated critic lies on the diagonal."""
    bins = reliability_bins(scores, labels, num_bins=num_bins)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(COLUMN_WIDTH, COLUMN_WIDTH), layout="constrained")
        axes, counts = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
        axes.plot([0, 1], [0, 1], color="#888888", linewidth=0.8, linestyle="--", label="calibrated")
        kept = bins["count"] > 0
        error = 1.96 * np.sqrt(bins["label"] * (1 - bins["label"]) / np.maximum(bins["count"], 1))
        color, _, _ = METHODS["PACS"]
        points = bins["probability"][kept], bins["label"][kept]
        axes.errorbar(
            *points, yerr=error[kept], label="critic, 95 % intervals", elinewidth=0.8, color=color, marker="o"
        )
        axes.set(ylabel="share of correct completions", xlim=(0, 1), ylim=(-0.02, 1.02))
        axes.legend(loc="upper left", title=f"calibration error {bins['calibration_error']:.3f}", title_fontsize=7)
        edges = np.linspace(0, 1, num_bins + 1)
        counts.bar(edges[:-1], bins["count"], width=np.diff(edges), align="edge", color=color, alpha=0.5)
        counts.set(xlabel=r"$\sigma(\psi)$", ylabel="completions")
        counts.yaxis.set_major_locator(MaxNLocator(3, integer=True))
        return save_figure(figure, path)


def reliability_bins(scores: Sequence[float], labels: Sequence[float], *, num_bins: int = 10) -> dict[str, Any]:
    """
    Sort completions with psi and a label in [0, 1] into equal bins of sigmoid(psi).

    Returns:
        `dict` with arrays of shape `(num_bins,)`: `count`, mean `probability`, and mean `label` (nan in empty bins),
        and the expected calibration error `sum_b count_b / N * |label_b - probability_b|`.
    """
    score_array, label_array = np.asarray(scores, dtype=float), np.asarray(labels, dtype=float)
    probabilities = np.exp(-np.logaddexp(0.0, -score_array))
    index = np.minimum((probabilities * num_bins).astype(int), num_bins - 1)
    count = np.bincount(index, minlength=num_bins)
    with np.errstate(invalid="ignore"):
        probability = np.bincount(index, weights=probabilities, minlength=num_bins) / count
        label = np.bincount(index, weights=label_array, minlength=num_bins) / count
    gaps = np.abs(label - probability)[count > 0]
    error = float((count[count > 0] * gaps).sum() / score_array.size)
    return {"count": count, "probability": probability, "label": label, "calibration_error": error}
