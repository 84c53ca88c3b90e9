"""Figures from results files, training logs and the diversity file, as PNG and SVG at column width.

Colors are those of Okabe and Ito, distinct for every common form of color blindness; each line also has its own marker
and dash. A method has the same in every figure (`looks`). Each function takes plain data and saves one figure; no
global state is changed.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from .paper import PublishedTable
from .tables import Measured, common_ks, methods, pass_at_k_cells, pass_at_k_rows


COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", "-.", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), ":")

# What every figure gives to these methods, whichever others it shows: colour, marker, dash.
START = ("#777777", "P", (0, (1, 1)))
METHODS = {
    "PACS": ("#0072B2", "o", "-"),
    "GRPO": ("#D55E00", "s", "--"),
    "PPO": ("#009E73", "^", "-."),
    "PACS without weights": ("#56B4E9", "D", (0, (5, 1))),
    **dict.fromkeys(("Base", "warm start", "start", "before"), START),
}
# For other names, in the order in which a figure has them.
OTHERS = (
    ("#CC79A7", "v", (0, (3, 1, 1, 1))),
    ("#E69F00", "X", (0, (5, 1, 1, 1))),
    ("#000000", "*", ":"),
    ("#8C6D31", "<", (0, (2, 1))),
    ("#7570B3", ">", (0, (7, 2))),
)

# Inches. One panel fills a column of a two-column page, two or more fill the page.
COLUMN_WIDTH, PAGE_WIDTH, PANEL_HEIGHT = 3.4, 7.0, 2.3

STYLE = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "legend.fontsize": 7,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.linewidth": 0.4,
    "grid.color": "#dddddd",
    "lines.linewidth": 1.3,
    "lines.markersize": 3.5,
    "legend.frameon": False,
    "svg.hashsalt": "pacs_trl",  # the same figure gives the same file
    "svg.fonttype": "none",
}

# What bands, bars and thin lines are.
INTERVALS = "bands and bars: 95 % intervals over problems"
RUNS = "thin lines: single runs; thick: their mean, a running mean over a tenth of the points"

# The panels of the training figure: key in the trainer's log, label of the axis.
TRAINING_PANELS = (
    ("reward", "reward"),
    ("entropy", "entropy (nats)"),
    ("completions/mean_length", "completion length (tokens)"),
    ("step_time", "time per step (s)"),
)


def pass_at_k_figure(
    results: Sequence[dict[str, Any]],
    benchmarks: Mapping[str, str],
    path: Path,
    published: Mapping[str, Sequence[PublishedTable]] | None = None,
    differences: Mapping[str, Mapping[int, Sequence[float]]] | None = None,
) -> list[Path]:
    """
    pass@k against k: the mean over the benchmarks, then a panel for each.

    Args:
        results: Parsed results files of one protocol.
        benchmarks: Titles by name.
        published: Published blocks by benchmark; numbers of methods that we have too are open markers.
        differences: `"A - B"` -> k -> percent of every seed, drawn in a panel of their own.
    """
    with matplotlib.rc_context(STYLE):
        by_method = methods(results)
        look_of = looks(by_method)
        whole = len(benchmarks) > 1 and all(benchmarks.keys() <= result["benchmarks"].keys() for result in results)
        figure, panels = panels_of(len(benchmarks) + whole + bool(differences))
        shown = iter(panels)
        if whole:
            panel, ks = next(shown), common_ks(results)
            for method, runs in by_method.items():
                draw_pass_at_k(panel, pass_at_k_cells(runs, list(benchmarks), ks), method, look_of[method])
            percent_against_k(panel, f"mean over {len(benchmarks)} benchmarks")
        if differences:
            _draw_differences(next(shown), differences, look_of)
        for panel, (name, title) in zip(shown, benchmarks.items(), strict=True):
            for row in pass_at_k_rows(results, name, published=(published or {}).get(name, ())):
                if row.kind == "ours":
                    draw_pass_at_k(panel, row.cells, row.method, look_of[row.method])
                elif row.kind == "published" and row.method in look_of:
                    hollow = look_of[row.method] | {"markerfacecolor": "white", "linewidth": 0.7, "alpha": 0.8}
                    ks, values = zip(*((k, cell.value) for k, cell in row.cells.items()), strict=True)
                    panel.plot(ks, values, label=f"{row.method} (published)", **hollow)
            percent_against_k(panel, title)
        label_rows(panels, "pass@k")
        legend_below(figure, panels, INTERVALS)
        return save_figure(figure, path)


def draw_pass_at_k(panel: Axes, cells: Mapping[int, Measured], label: str, look: dict[str, Any]) -> None:
    """One line of pass@k in percent with its 95 % intervals as a band."""
    ks = sorted(cells)
    panel.plot(ks, [cells[k].value for k in ks], label=label, **look)
    lower, upper = [cells[k].lower for k in ks], [cells[k].upper for k in ks]
    panel.fill_between(ks, lower, upper, color=look["color"], alpha=0.15, linewidth=0)


def percent_against_k(panel: Axes, title: str) -> None:
    """Axes of a panel of pass@k whose lines are drawn."""
    panel.set_xscale("log", base=2)
    ticks = sorted({round(k) for line in panel.get_lines() for k in line.get_xdata()})
    panel.set_xticks(ticks, [str(k) for k in ticks])
    panel.set(title=title, xlabel="k")
    percent_axis(panel)


def percent_axis(panel: Axes) -> None:
    """From 0 to 100 %, as in every panel of pass@k; a marker at the end is not cut."""
    panel.set_ylim(-2, 102)
    panel.yaxis.set_major_formatter(PercentFormatter(decimals=0))


def _draw_differences(
    panel: Axes, differences: Mapping[str, Mapping[int, Sequence[float]]], look_of: Mapping[str, dict[str, Any]]
) -> None:
    """A marker for every seed and a bar at their mean, in the look of what is subtracted."""
    ks = sorted({k for by_k in differences.values() for k in by_k})
    panel.axhline(0, color="#888888", linewidth=0.8)
    for i, (name, by_k) in enumerate(differences.items()):
        look = look_of[name.rsplit(" - ", 1)[1]]
        style = {"color": look["color"], "linestyle": ""}
        shift = 0.8 * (i + 0.5) / len(differences) - 0.4
        for k, values in by_k.items():
            place = ks.index(k) + shift
            panel.plot([place] * len(values), values, marker=look["marker"], markerfacecolor="white", **style)
            panel.plot([place], [np.mean(values)], marker="_", markersize=7, markeredgewidth=1.5, **style)
    panel.set_xticks(range(len(ks)), [str(k) for k in ks])
    first = {name.rsplit(" - ", 1)[0] for name in differences}
    panel.set(title=f"{first.pop() if len(first) == 1 else 'first'} minus other, by seed", xlabel="k")
    panel.set_ylabel("percentage points")


def training_figure(
    models: Mapping[str, Mapping[str, Sequence[Sequence[dict[str, float]]]]], path: Path
) -> list[Path]:
    """
    Reward, entropy, completion length and time per step over optimizer steps, a row of panels for each model.

    Args:
        models: For each model (`""` if there is only one) and method the log histories of its runs (`log_history` of
            `trainer_state.json`).

    Raises:
        `ValueError`: if no run logged any of the four quantities.
    """
    everything = [run for histories in models.values() for runs in histories.values() for run in runs]
    present = [(key, label) for key, label in TRAINING_PANELS if any(series(run, key) for run in everything)]
    if not present:
        raise ValueError(f"The training logs hold none of {', '.join(key for key, _ in TRAINING_PANELS)}.")
    with matplotlib.rc_context(STYLE):
        columns = len(present) if len(models) > 1 or len(present) == 3 else 2
        figure, panels = panels_of(len(models) * len(present), columns)
        shown = iter(panels)
        for model, histories in models.items():
            for key, label in present:
                panel = next(shown)
                for method, look in looks(histories).items():
                    draw_runs(panel, [series(run, key) for run in histories[method]], method, look)
                panel.set(
                    xlabel="optimizer step", ylabel=label, title=model, ylim=(min(0.0, panel.get_ylim()[0]), None)
                )
        figure.align_ylabels()
        legend_below(figure, panels, RUNS)
        return save_figure(figure, path)


def evaluation_figure(histories: Mapping[str, Sequence[Sequence[dict[str, float]]]], path: Path) -> list[Path]:
    """pass@k measured during training (figure 3 of the paper): the `eval_<benchmark>/pass@<k>` values of the logs."""
    keys = {key for runs in histories.values() for run in runs for log in run for key in log if "/pass@" in key}
    ordered = sorted(keys, key=lambda key: (key.split("/pass@")[0], int(key.rsplit("@", 1)[1])))
    with matplotlib.rc_context(STYLE):
        figure, panels = panels_of(len(ordered))
        for panel, key in zip(panels, ordered, strict=True):
            for method, look in looks(histories).items():
                points = [[(step, 100 * value) for step, value in series(run, key)] for run in histories[method]]
                draw_runs(panel, points, method, look, smooth=False)
            benchmark, k = key.removeprefix("eval_").rsplit("/", 1)
            panel.set(title=f"{benchmark}, {k}", xlabel="optimizer step")
            percent_axis(panel)
        legend_below(figure, panels, "thin lines: single runs; thick: their mean")
        return save_figure(figure, path)


def diversity_figure(diversity: Mapping[str, Any], path: Path) -> list[Path]:
    """Correct responses of one or two models in the plane of their first two principal components."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(COLUMN_WIDTH, COLUMN_WIDTH * 0.9), layout="constrained")
        axes = figure.subplots()
        look_of = looks(model["method"] for model in diversity["models"])
        for model in diversity["models"]:
            style = look_of[model["method"]] | {"linestyle": "", "alpha": 0.6, "markeredgewidth": 0}
            axes.plot(*zip(*model["points"]), label=f"{model['method']}: diversity {model['mean']:.4f}", **style)
        shares = diversity["explained"]
        axes.set(xlabel=f"first component ({100 * shares[0]:.0f} % of variance)")
        axes.set(ylabel=f"second component ({100 * shares[1]:.0f} %)")
        figure.legend(loc="outside upper center")  # one line each: names can be long
        return save_figure(figure, path)


def reliability_figure(
    scores: Sequence[float], labels: Sequence[float], path: Path, *, num_bins: int = 10
) -> list[Path]:
    """The implicit critic sigmoid(psi) against what happened: a calibrated one lies on the diagonal."""
    bins = reliability_bins(scores, labels, num_bins=num_bins)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(COLUMN_WIDTH, COLUMN_WIDTH), layout="constrained")
        axes, counts = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
        axes.plot([0, 1], [0, 1], color="#888888", linewidth=0.8, linestyle="--", label="calibrated")
        kept = bins["count"] > 0
        error = 1.96 * np.sqrt(bins["label"] * (1 - bins["label"]) / np.maximum(bins["count"], 1))
        points = bins["probability"][kept], bins["label"][kept]
        axes.errorbar(*points, yerr=error[kept], label="critic, 95 % intervals", elinewidth=0.8, **line_look(0))
        axes.set(ylabel="share of correct completions", xlim=(0, 1), ylim=(-0.02, 1.02))
        axes.legend(loc="upper left", title=f"calibration error {bins['calibration_error']:.3f}", title_fontsize=7)
        edges = np.linspace(0, 1, num_bins + 1)
        counts.bar(edges[:-1], bins["count"], width=np.diff(edges), align="edge", color=COLORS[0], alpha=0.5)
        counts.set(xlabel=r"$\sigma(\psi)$", ylabel="completions")
        counts.yaxis.set_major_locator(MaxNLocator(3, integer=True))
        return save_figure(figure, path)


def reliability_bins(scores: Sequence[float], labels: Sequence[float], *, num_bins: int = 10) -> dict[str, Any]:
    """
    Completions in equal bins of sigmoid(psi), for psi and a label in [0, 1] per completion.

    Returns:
        `dict` with arrays of shape `(num_bins,)`: `count`, mean `probability` and mean `label` (nan in empty bins),
        and the expected calibration error `sum_b count_b / N * |label_b - probability_b|`.

    Raises:
        `ValueError`: if the lengths differ or there is nothing to show.
    """
    scores, labels = np.asarray(scores, dtype=float), np.asarray(labels, dtype=float)
    if scores.shape != labels.shape or scores.size == 0:
        raise ValueError(f"A reliability diagram needs one label per score, got {scores.size} and {labels.size}.")
    probabilities = np.exp(-np.logaddexp(0.0, -scores))
    index = np.minimum((probabilities * num_bins).astype(int), num_bins - 1)
    count = np.bincount(index, minlength=num_bins)
    with np.errstate(invalid="ignore"):
        probability = np.bincount(index, weights=probabilities, minlength=num_bins) / count
        label = np.bincount(index, weights=labels, minlength=num_bins) / count
    gaps = np.abs(label - probability)[count > 0]
    error = float((count[count > 0] * gaps).sum() / scores.size)
    return {"count": count, "probability": probability, "label": label, "calibration_error": error}


def looks(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """`color`, `marker` and `linestyle` of each line of a figure: those of `METHODS` by name, and of `OTHERS` in
    order."""
    others = itertools.cycle(OTHERS)
    chosen = {name: METHODS.get(name) or next(others) for name in names}
    return {name: dict(zip(("color", "marker", "linestyle"), look, strict=True)) for name, look in chosen.items()}


def line_look(index: int) -> dict[str, Any]:
    """Of lines that are no methods."""
    index %= len(COLORS)
    return {"color": COLORS[index], "marker": MARKERS[index], "linestyle": DASHES[index]}


def panels_of(count: int, columns: int | None = None) -> tuple[Figure, list[Axes]]:
    columns = min(count, columns or (3 if count in (3, 5, 6, 9) else 4))
    rows = math.ceil(count / columns)
    width = COLUMN_WIDTH if columns == 1 else PAGE_WIDTH
    figure = Figure(figsize=(width, PANEL_HEIGHT * rows + 0.5), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in panels[count:]:
        unused.set_axis_off()
    return figure, panels[:count]


def label_rows(panels: Sequence[Axes], label: str) -> None:
    """The label of the vertical axis on the first panel of each row."""
    for panel in panels:
        if panel.get_subplotspec().is_first_col():
            panel.set_ylabel(label)


def series(run: Sequence[dict[str, float]], key: str) -> list[tuple[float, float]]:
    """(step, value) of one quantity of a log history, where it was logged."""
    return [(log["step"], log[key]) for log in run if log.get(key) is not None]


def draw_runs(
    panel: Axes,
    runs: Sequence[Sequence[tuple[float, float]]],
    label: str,
    look: dict[str, Any],
    *,
    smooth: bool = True,
) -> None:
    """Every run as a thin line, and over them their mean, smoothed."""
    points = [dict(run) for run in runs if run]
    if not points:
        return
    for run in points:
        panel.plot(run.keys(), run.values(), color=look["color"], linewidth=0.4, alpha=0.4)
    steps = sorted(set.intersection(*(set(run) for run in points)))
    mean = np.mean([[run[step] for step in steps] for run in points], axis=0)
    thick = look | {"marker": ""} if smooth else look
    panel.plot(steps, smoothed(mean) if smooth else mean, label=label, **thick)


def smoothed(values: np.ndarray) -> np.ndarray:
    """Running mean over a tenth of the values around each one, over fewer at the ends."""
    half = len(values) // 20
    return np.array([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])


def legend_below(figure: Figure, panels: Sequence[Axes], note: str) -> None:
    """The lines of all panels, and what bands and thin lines are."""
    handles: dict[str, Any] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    columns = min(6 if figure.get_figwidth() > COLUMN_WIDTH else 2, len(handles))
    looks = {"title": note, "title_fontsize": 7, "ncols": columns}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", **looks)


def save_figure(figure: Figure, path: Path) -> list[Path]:
    """PNG and SVG; the date is left out, so that the same data gives the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path.with_suffix(".png"), path.with_suffix(".svg")]
    figure.savefig(files[0], dpi=200)
    figure.savefig(files[1], metadata={"Date": None})
    return files
