"""Figures of the paper at our scale: pass@k with differences, entropy, and pass@k against beta."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from experiments.bootstrap import bounds
from pacs_trl.report import plots, tables


# Styles of the lines of k; the colors are those of Okabe and Ito, distinct with color blindness.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", "-.", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), ":")


def pass_at_k_figure(
    results: Sequence[dict[str, Any]],
    benchmarks: Sequence[str],
    differences: Mapping[str, Mapping[int, Sequence[float]]],
    path: Path,
) -> None:
    """Plot mean pass@k over the benchmarks, and beside it the differences `"A - B"` -> k -> percent of each seed."""
    with matplotlib.rc_context(plots.STYLE):
        by_method = tables.methods(results)
        look_of = plots.looks(by_method)
        figure, panels = plots.panels_of(1 + bool(differences))
        ks = tables.common_ks(results)
        for method, runs in by_method.items():
            cells = tables.pass_at_k_cells(runs, benchmarks, ks)
            panels[0].plot(ks, [cells[k].value for k in ks], label=method, **look_of[method])
        plots.percent_against_k(panels[0], f"mean over {len(benchmarks)} benchmarks")
        panels[0].set_ylabel("pass@k")
        for panel in panels[1:]:
            shown = sorted({k for by_k in differences.values() for k in by_k})
            panel.axhline(0, color="#888888", linewidth=0.8)
            for i, (name, by_k) in enumerate(differences.items()):
                first, second = name.rsplit(" - ", 1)
                style = {"color": look_of[second]["color"], "linestyle": ""}
                shift = 0.8 * (i + 0.5) / len(differences) - 0.4
                for k, values in by_k.items():
                    place = shown.index(k) + shift
                    panel.plot([place] * len(values), values, marker=look_of[second]["marker"], alpha=0.6, **style)
                    panel.plot([place], [np.mean(values)], marker="_", markersize=9, markeredgewidth=2, **style)
            panel.set_xticks(range(len(shown)), [str(k) for k in shown])
            panel.set(title=f"{first} minus the method of this color", xlabel="k", ylabel="percentage points")
        plots.legend_below(figure, panels, "right: markers are seeds, bars their means" if differences else "")
        plots.save_figure(figure, path)


def entropy_figure(models: Mapping[str, Mapping[str, Sequence[Sequence[dict[str, float]]]]], path: Path) -> None:
    """Plot the entropy over optimizer steps, smoothed and averaged over seeds, in a panel for each model."""
    with matplotlib.rc_context(plots.STYLE):
        figure, panels = plots.panels_of(len(models))
        for panel, (model, histories) in zip(panels, models.items(), strict=True):
            for method, look in plots.looks(histories).items():
                runs = [dict(plots.series(run, "entropy")) for run in histories[method]]
                steps = sorted(set.intersection(*map(set, runs)))
                mean = np.mean([[run[step] for step in steps] for run in runs], axis=0)
                panel.plot(steps, plots.smoothed(mean), label=method, **look | {"marker": ""})
            panel.set(title=model, xlabel="optimizer step")
        panels[0].set_ylabel("entropy (nats per token)")
        plots.legend_below(figure, panels, "means over seeds, smoothed")
        plots.save_figure(figure, path)


def beta_figure(results: Mapping[float, Sequence[dict[str, Any]]], benchmarks: Mapping[str, str], path: Path) -> None:
    """Plot mean pass@k over the benchmarks against beta, one line per k; several results of a beta are seeds."""
    with matplotlib.rc_context(plots.STYLE):
        figure, (panel,) = plots.panels_of(1)
        values = sorted(results)
        ks = tables.common_ks([run for runs in results.values() for run in runs])
        rows = {v: tables.pass_at_k_cells(results[v], list(benchmarks), ks) for v in values}
        for i, k in enumerate(ks):
            look: dict[str, Any] = {"color": COLORS[i % 7], "marker": MARKERS[i % 7], "linestyle": DASHES[i % 7]}
            cells = [rows[v][k] for v in values]
            errors = [[c.value - bounds(c)[0] for c in cells], [bounds(c)[1] - c.value for c in cells]]
            points = values, [c.value for c in cells]
            panel.errorbar(*points, yerr=errors, label=f"k={k}", elinewidth=0.7, **look)
        panel.set_xscale("log")
        panel.set_xticks(values, [f"{v:g}" for v in values])
        panel.minorticks_off()
        panel.set(title=f"mean over {len(benchmarks)} benchmarks", xlabel="beta", ylabel="pass@k")
        plots.percent_axis(panel)
        plots.legend_below(figure, [panel], plots.INTERVALS)
        plots.save_figure(figure, path)
