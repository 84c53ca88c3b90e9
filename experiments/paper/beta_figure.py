"""Figure 4 of the paper: pass@k against beta."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

from pacs_trl.report import plots, tables


def ablation_figure(
    results: Mapping[float, Sequence[dict[str, Any]]], benchmarks: Mapping[str, str], path: Path
) -> list[Path]:
    """Draw one line per k against beta on a log scale: the mean over the benchmarks, then a panel for each. Several
    results of one beta are runs with different seeds."""
    with matplotlib.rc_context(plots.STYLE):
        parts = {title: [benchmark] for benchmark, title in benchmarks.items()}
        if len(parts) > 1:
            parts = {f"mean over {len(parts)} benchmarks": list(benchmarks)} | parts
        figure, panels = plots.panels_of(len(parts))
        values = sorted(results)
        ks = tables.common_ks([run for runs in results.values() for run in runs])
        for panel, (title, averaged) in zip(panels, parts.items(), strict=True):
            rows = {v: tables.pass_at_k_cells(results[v], averaged, ks) for v in values}
            for i, k in enumerate(ks):
                cells = [rows[v][k] for v in values]
                errors = [[c.value - c.lower for c in cells], [c.upper - c.value for c in cells]]
                shift = 1.03 ** (i - (len(ks) - 1) / 2)  # so that bars do not cover one another
                points = [v * shift for v in values], [c.value for c in cells]
                panel.errorbar(*points, yerr=errors, label=f"k={k}", elinewidth=0.7, **plots.line_look(i))
            panel.set_xscale("log")
            panel.set_xticks(values, [f"{v:g}" for v in values])
            panel.minorticks_off()
            panel.set(title=title, xlabel="beta")
            plots.percent_axis(panel)
        plots.label_rows(panels, "pass@k")
        plots.legend_below(figure, panels, plots.INTERVALS)
        return plots.save_figure(figure, path)
