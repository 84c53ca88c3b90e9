"""Tables of results files: one per benchmark, rows are methods, columns are k.

Numbers have 95 % intervals over problems. Several files with one method label are runs with different seeds: they are
averaged per problem, and their standard deviation is shown as well.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import UserError
from ..evaluation.pass_at_k import Interval, paired_interval, pass_at_k, pass_interval
from ..evaluation.results import graded_counts


class Measured(NamedTuple):
    """A percentage, or a difference of two, with its interval; `spread` is the standard deviation over runs."""

    value: float
    lower: float | None = None
    upper: float | None = None
    spread: float | None = None


def methods(results: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Group results by method label, in order of first appearance."""
    grouped: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        grouped.setdefault(result["method"], []).append(result)
    return grouped


def benchmarks(results: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the titles of all benchmarks by name."""
    return {name: entry["title"] for result in results for name, entry in result["benchmarks"].items()}


def with_benchmark(results: Sequence[dict[str, Any]], *names: str) -> dict[str, list[dict[str, Any]]]:
    """Group the results that have these benchmarks by method."""
    return methods([result for result in results if result["benchmarks"].keys() >= set(names)])


def with_mean(results: Sequence[dict[str, Any]], names: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the benchmarks that are averaged under each title: first all, if every file has them, then each alone."""
    parts = {title: [name] for name, title in names.items()}
    is_whole = len(names) > 1 and all(names.keys() <= result["benchmarks"].keys() for result in results)
    return ({f"mean of {len(names)} benchmarks": list(names)} if is_whole else {}) | parts


def benchmark_table(
    results: Sequence[dict[str, Any]], benchmark: str, baseline: str | None = None
) -> tuple[list[str], list[list[str]]]:
    """
    Return header and rows of one benchmark: a row for each method, and with a `baseline` the paired difference of each
    other method.

    Raises:
        `ValueError`: if the baseline has no results on this benchmark, or the files share no k.
    """
    runs = with_benchmark(results, benchmark)
    if baseline is not None and baseline not in runs:
        raise UserError(f"The baseline {baseline!r} has no results on {benchmark}. Choose from {', '.join(runs)}.")
    ks = common_ks([run for group in runs.values() for run in group])
    lines = []
    for method, group in runs.items():
        counts = sorted({p["n"] for run in group for p in run["benchmarks"][benchmark]["problems"]})
        n = str(counts[0]) if len(counts) == 1 else f"{counts[0]}-{counts[-1]}"
        cells = pass_at_k_cells(group, [benchmark], ks)
        lines.append([method, n, str(len(group)), *(cell_text(cells[k]) for k in ks)])
    for method, group in runs.items():
        if baseline is not None and method != baseline:
            cells = paired_difference(group, runs[baseline], [benchmark], ks)
            lines.append([f"{method} - {baseline}", "", "", *(cell_text(cells[k], signed=True) for k in ks)])
    return ["method", "n", "runs", *(f"k={k}" for k in ks)], lines


def common_ks(results: Sequence[dict[str, Any]]) -> list[int]:
    """Return the values of k that all files have; raise a `ValueError` if there are none."""
    ks = sorted(set.intersection(*(set(result["k"]) for result in results)))
    if not ks:
        values = ", ".join(str(result["k"]) for result in results)
        raise UserError(f"The results files share no value of k ({values}). Evaluate again with a common k.")
    return ks


def problem_values(group: Sequence[dict[str, Any]], benchmark: str, k: int) -> tuple[list[str], np.ndarray]:
    """Return ids and pass@k `(P,)`, averaged over runs, of the problems with k graded samples in every run."""
    ids, values = _values_by_run(group, benchmark, k)
    return ids, values.mean(axis=0)


def _values_by_run(group: Sequence[dict[str, Any]], benchmark: str, k: int) -> tuple[list[str], np.ndarray]:
    """Return ids and pass@k `(runs, P)` of the problems with k graded samples in every run."""
    counts = [graded_counts(run["benchmarks"][benchmark]["problems"], k) for run in group]
    ids = [problem for problem in counts[0] if all(problem in other for other in counts)]
    if not ids:
        names = " and ".join(methods(group))
        raise UserError(
            f"The runs of {names} share no graded problem of {benchmark} for k={k}. Evaluate the same problems."
        )
    n, c = np.array([[run[problem] for problem in ids] for run in counts]).transpose(2, 0, 1)  # (runs, P) each
    return ids, pass_at_k(n, c, k)


def _interval_cell(interval: Interval) -> Measured:
    """Convert an interval of floats to percentages."""
    return Measured(*(100 * float(number) for number in interval))


def pass_at_k_cells(
    group: Sequence[dict[str, Any]], benchmarks: Sequence[str], ks: Sequence[int]
) -> dict[int, Measured]:
    """Return pass@k of one method over equally weighted benchmarks: mean over its runs, interval over problems, spread
    over runs."""
    cells = {}
    for k in ks:
        values = [_values_by_run(group, name, k)[1] for name in benchmarks]
        cell = _interval_cell(pass_interval(*(by_run.mean(axis=0) for by_run in values)))
        if len(group) > 1:
            means = 100 * np.mean([by_run.mean(axis=1) for by_run in values], axis=0)  # (runs,)
            cell = cell._replace(spread=float(means.std(ddof=1)))
        cells[k] = cell
    return cells


def paired_difference(
    runs: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]], benchmarks: Sequence[str], ks: Sequence[int]
) -> dict[int, Measured]:
    """
    Return pass@k of some runs minus that of others, in percent, over the problems that both have. Benchmarks are
    weighted equally, as in the paper's average.

    Raises:
        `ValueError`: if they share no problem of a benchmark.
    """
    cells = {}
    for k in ks:
        pairs = []
        for name in benchmarks:
            shared, _ = problem_values([*runs, *base], name, k)
            base_values = dict(zip(*problem_values(base, name, k), strict=True))
            values = dict(zip(*problem_values(runs, name, k), strict=True))
            pairs.append([np.array([by_id[problem] for problem in shared]) for by_id in (base_values, values)])
        cells[k] = _interval_cell(paired_interval(*pairs))
    return cells


BEFORE_AND_AFTER_HEADER = ["", "", "method", "before", "after", "difference"]


def before_and_after(results: Sequence[dict[str, Any]], names: Mapping[str, str], before: str) -> list[list[str]]:
    """Return rows with pass@k at the smallest and largest k before and after, and the paired difference: first the
    mean over all benchmarks, if every file has them all."""
    lines = []
    for title, averaged in with_mean(results, names).items():
        runs = with_benchmark(results, *averaged)
        base = runs.pop(before, [])
        for method, group in runs.items() if base else ():
            every_k = common_ks([*group, *base])
            ks = sorted({every_k[0], every_k[-1]})
            columns = [pass_at_k_cells(which, averaged, ks) for which in (base, group)]
            columns.append(paired_difference(group, base, averaged, ks))
            for k in ks:
                cells = [cell_text(column[k], i == 2) for i, column in enumerate(columns)]
                lines.append([title, f"pass@{k}", method, *cells])
    return lines


def to_markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a GitHub table."""
    rule = ["---"] + ["---:"] * (len(header) - 1)
    rows = [[in_cell(cell) for cell in cells] for cells in [header, *lines]]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [rows[0], rule, *rows[1:]]) + "\n"


def in_cell(text: str) -> str:
    """Escape bars and line breaks of a table cell."""
    return one_line(text).replace("|", "\\|")


def one_line(text: str) -> str:
    """Replace line breaks and other control characters by spaces."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def cell_text(cell: Measured | None, signed: bool = False, *, digits: int = 2) -> str:
    """Format `MEAN ± SPREAD [LOWER, UPPER]`, without what is not known."""
    if cell is None:
        return ""
    text = f"{cell.value:{'+' if signed else ''}.{digits}f}"
    if cell.spread is not None:
        text += f" ± {cell.spread:.{digits}f}"
    ends = min(digits, 1) if digits < 3 else digits
    return text if cell.lower is None else f"{text} [{cell.lower:.{ends}f}, {cell.upper:.{ends}f}]"
