"""Figures of results files and training logs, as PNG and SVG.

Colors are those of Okabe and Ito, which are distinct with color blindness; each line also has its own marker and dash.
A method has the same style in every figure (`looks`). Functions take plain data and change no global state.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from ..errors import UserError
from .tables import Measured, common_ks, methods, pass_at_k_cells, with_benchmark, with_mean


# Color, marker, and dash of these methods in every figure.
START = ("#777777", "P", (0, (1, 1)))
METHODS = {
    "PACS": ("#0072B2", "o", "-"),
    "GRPO": ("#D55E00", "s", "--"),
    "PPO": ("#009E73", "^", "-."),
    "PACS without weights": ("#56B4E9", "D", (0, (5, 1))),
    **dict.fromkeys(("Base", "warm start", "start", "before"), START),
}
# Styles of other names, in order of appearance.
OTHERS = (
    ("#CC79A7", "v", (0, (3, 1, 1, 1))),
    ("#E69F00", "X", (0, (5, 1, 1, 1))),
    ("#000000", "*", ":"),
    ("#8C6D31", "<", (0, (2, 1))),
    ("#7570B3", ">", (0, (7, 2))),
)

# Inches: one panel has the width of a column, several have that of a page.
COLUMN_WIDTH, PAGE_WIDTH, PANEL_HEIGHT = 3.4, 7.0, 2.3

_STYLE_FILE = Path(__file__).parents[1] / "templates" / "figures.mplstyle"
STYLE = matplotlib.rc_params_from_file(_STYLE_FILE, use_default_template=False)

# Titles of legends.
INTERVALS = "95 % intervals over problems"
RUNS = "thin lines: runs; thick lines: mean over runs"
SMOOTHED = ", smoothed over a tenth of the steps"
ONE_RUN = "thin lines: logged steps; thick lines: mean over a tenth of the steps"

# Panels of the training figure: key in the trainer's log, label of the axis.
TRAINING_PANELS = (
    ("reward", "mean reward"),
    ("entropy", "entropy (nats per token)"),
    ("completions/mean_length", "completion length (tokens)"),
    ("step_time", "time per step (s)"),
)


def pass_at_k_figure(results: Sequence[dict[str, Any]], benchmarks: Mapping[str, str], path: Path) -> list[Path]:
    """Plot pass@k of results files of one protocol against k: the mean over the benchmarks (titles by name), then a
    panel for each."""
    with matplotlib.rc_context(STYLE):
        parts, look_of = with_mean(results, benchmarks), looks(methods(results))
        figure, panels = panels_of(len(parts))
        for panel, (title, averaged) in zip(panels, parts.items(), strict=True):
            runs_of = with_benchmark(results, *averaged)
            ks = common_ks([run for runs in runs_of.values() for run in runs])
            for method, runs in runs_of.items():
                draw_pass_at_k(panel, pass_at_k_cells(runs, averaged, ks), method, look_of[method])
            percent_against_k(panel, title)
            place = panel.get_subplotspec()
            if place is not None and place.is_first_col():
                panel.set_ylabel("pass@k (% of problems)")
        legend_below(figure, panels, INTERVALS)
        return save_figure(figure, path)


def draw_pass_at_k(panel: Axes, cells: Mapping[int, Measured], label: str, look: dict[str, Any]) -> None:
    """Draw one line of pass@k in percent with a band for its 95 % intervals."""
    ks = sorted(cells)
    panel.plot(ks, [cells[k].value for k in ks], label=label, **look)
    lower = [cells[k].value if (end := cells[k].lower) is None else end for k in ks]
    upper = [cells[k].value if (end := cells[k].upper) is None else end for k in ks]
    panel.fill_between(ks, lower, upper, color=look["color"], alpha=0.15, linewidth=0)


def percent_against_k(panel: Axes, title: str) -> None:
    """Set up the axes of a panel with lines of pass@k."""
    panel.set_xscale("log", base=2)
    ticks = sorted({round(k) for line in panel.get_lines() for k in np.asarray(line.get_xdata()).tolist()})
    panel.set_xticks(ticks, [str(k) for k in ticks])
    panel.set(title=title, xlabel="k (samples per problem)")
    percent_axis(panel)


def percent_axis(panel: Axes) -> None:
    """Set the vertical axis to 0 to 100 %, with room for markers at the ends."""
    panel.set_ylim(-2, 102)
    panel.yaxis.set_major_formatter(PercentFormatter(decimals=0))


def training_figure(histories: Mapping[str, Sequence[Sequence[dict[str, float]]]], path: Path) -> list[Path]:
    """Plot reward, entropy, completion length, and time per step over optimizer steps, from the log histories of each
    method's runs. Raises a `ValueError` if no run logged any of the four quantities."""
    runs = [run for runs_of_method in histories.values() for run in runs_of_method]
    present = [(key, label) for key, label in TRAINING_PANELS if any(series(run, key) for run in runs)]
    if not present:
        raise UserError(f"The logs have none of {', '.join(key for key, _ in TRAINING_PANELS)}. Name other runs.")
    with matplotlib.rc_context(STYLE):
        figure, panels = panels_of(len(present), 3 if len(present) == 3 else 2)
        drawn = []
        for panel, (key, label) in zip(panels, present, strict=True):
            for method, look in looks(histories).items():
                lines = [series(run, key) for run in histories[method]]
                draw_runs(panel, lines, method, look)
                drawn.append(lines)
            panel.set(xlabel="optimizer step", ylabel=label)
            whole_steps(panel)
        figure.align_ylabels()
        legend_below(figure, panels, note_on_lines(drawn))
        return save_figure(figure, path)


def whole_steps(panel: Axes) -> None:
    """Number the horizontal axis with whole steps, and the vertical one without an offset."""
    panel.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    panel.ticklabel_format(axis="y", useOffset=False)


def note_on_lines(drawn: Sequence[Sequence[Sized]]) -> str:
    """Return what the thin and thick lines of [`draw_runs`] are, from the runs of each of its calls; empty if each has
    drawn one line."""
    is_smoothed = any(len(smoothing_window(run)) > 1 for runs in drawn for run in runs)
    if any(len(runs) > 1 for runs in drawn):
        return RUNS + SMOOTHED if is_smoothed else RUNS
    return ONE_RUN if is_smoothed else ""


def looks(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return `color`, `marker`, and `linestyle` of each name: those in `METHODS`, else the next of `OTHERS`."""
    others = itertools.cycle(OTHERS)
    chosen = {name: METHODS.get(name) or next(others) for name in names}
    return {name: dict(zip(("color", "marker", "linestyle"), look, strict=True)) for name, look in chosen.items()}


def panels_of(count: int, columns: int | None = None) -> tuple[Figure, list[Axes]]:
    """Create a figure with this number of panels."""
    columns = min(count, columns or (3 if count in (3, 5, 6, 9) else 4))
    rows = math.ceil(count / columns)
    width = COLUMN_WIDTH if columns == 1 else PAGE_WIDTH
    figure = Figure(figsize=(width, PANEL_HEIGHT * rows + 0.5), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in panels[count:]:
        unused.set_axis_off()
    return figure, panels[:count]


def series(run: Sequence[dict[str, float]], key: str) -> list[tuple[float, float]]:
    """Return (step, value) of one quantity of a log history, where it was logged."""
    return [(log["step"], log[key]) for log in run if log.get(key) is not None]


def draw_runs(panel: Axes, runs: Sequence[Sequence[tuple[float, float]]], label: str, look: dict[str, Any]) -> None:
    """Draw each run as a thin line, and their smoothed mean as a thick one, which is the only line of a run that is
    too short to smooth."""
    points = [dict(run) for run in runs if run]
    if not points:
        return
    is_same_line = len(points) == 1 and len(smoothing_window(points[0])) == 1
    for run in () if is_same_line else points:
        panel.plot(list(run), list(run.values()), color=look["color"], linewidth=0.4, alpha=0.4)
    steps = sorted(set.intersection(*(set(run) for run in points)))
    mean = np.mean([[run[step] for step in steps] for run in points], axis=0)
    panel.plot(steps, smoothed(mean), label=label, **look | ({"marker": ""} if len(steps) > 1 else {}))


def smoothed(values: np.ndarray) -> np.ndarray:
    """Return the centered running mean over a tenth of the values, over fewer at the ends and beside NaN, which is
    skipped; NaN where all values of a window are."""
    half = len(smoothing_window(values)) // 2
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    known = [window[~np.isnan(window)] for window in windows]
    return np.array([window.mean() if len(window) else np.nan for window in known])


def smoothing_window(values: Sized) -> range:
    """Return the positions, relative to a value, whose mean is drawn for it: about a tenth of the values."""
    half = len(values) // 20
    return range(-half, half + 1)


def legend_below(figure: Figure, panels: Sequence[Axes], note: str) -> None:
    """Add a legend of the lines of all panels, titled `note`; empty for no title."""
    handles: dict[str, Any] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    columns = min(6 if figure.get_figwidth() > COLUMN_WIDTH else 2, len(handles))
    looks = {"title": note or None, "title_fontsize": 7, "ncols": columns}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", **looks)


def save_figure(figure: Figure, path: Path) -> list[Path]:
    """Write PNG and SVG without a date, so that equal data gives equal bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path.with_suffix(".png"), path.with_suffix(".svg")]
    figure.savefig(files[0], dpi=200)
    figure.savefig(files[1], metadata={"Date": None})
    return files
