"""Markdown tables and figures of finished runs, with published numbers.

Needs only the records of a results directory. A cell is the mean over seeds ± the standard deviation over seeds, with
the 95 % interval over problems in brackets, and "-" without runs. For miniature models (`twins` of the paper's) only
published differences are shown, because models and problems differ.
"""

import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.bootstrap import bootstrap_interval, bounds
from experiments.figures import shrink
from pacs_trl.evaluation.results import read_results, require_same_protocol
from pacs_trl.report import tables

from . import published as numbers
from .records import Cell, Records, Run


# The miniature benchmark that stands in place of each benchmark of the paper, and the one in place of other domains.
TWINS = {name: f"miniature/terms_{3 + i}" for i, name in enumerate(numbers.TABLE_1_BENCHMARKS)}
OTHER_DOMAIN_TWIN = "miniature/grouped"
OTHER_DOMAINS = {"livecodebench": "livecodebench", "gpqa": "gpqa_diamond"}  # as in the paper's figure 6: ours

# What stands in place of the models that the paper names.
TWIN_MODELS = {"Qwen3-4B": "0.1M model", "Qwen3-8B": "1M model"}

COMPARED_KS = (1, 8, 64)


class Table(NamedTuple):
    """A table or figure of the paper."""

    name: str  # of its files
    title: str
    cells: list[Cell]
    shows: str  # key of `_SECTIONS`
    published: str | None = None  # base model of the paper's tables of pass@k
    compare: Sequence[tuple[str, str]] = ()  # labels of which the first minus the second is shown
    message: str = ""  # of the figure of the miniature runs
    model_prompts: bool = False  # whether the rows are different models, each asked in its chat format


def write_tables(selected: Sequence[Table], results_dir: Path, *, twins: bool) -> str:
    """
    Write each table as `NAME.md` and its figure, if it has one, as `NAME.png` beside the records. Return the text of
    all tables.

    Args:
        twins (`bool`): Whether benchmarks and models are the miniature ones.
    """
    sections = []
    results_dir.mkdir(parents=True, exist_ok=True)
    records = Records(results_dir)
    for table in map(_twin_of, selected) if twins else selected:
        runs = {cell.label: records.runs(cell.run, cell.label) for cell in table.cells}
        _require_one_protocol(table, runs, results_dir)
        body = _SECTIONS[table.shows](table, runs, results_dir / table.name, twins)
        counts = {label: len(group) for label, group in runs.items()}
        seeds = ", ".join(f"{label} {count}" for label, count in counts.items())
        if len(set(counts.values())) == 1:
            seeds = f"{min(counts.values())} of each"
        text = f"# {table.title}\n\nSeeds: {seeds}.\n\n{body}"
        (results_dir / f"{table.name}.md").write_text(text)
        if (figure := results_dir / f"{table.name}.png").is_file():
            shrink(figure)
            figure.with_suffix(".svg").unlink(missing_ok=True)
        sections.append(text)
    return "\n".join(sections)


def _twin_of(table: Table) -> Table:
    """Rename the models of a table to the miniature ones."""
    title = re.sub(r"Qwen3-\dB", lambda model: f"{TWIN_MODELS[model[0]]}, in place of {model[0]}", table.title)
    cells = [cell._replace(label=_twin(cell.label)) for cell in table.cells]
    return table._replace(
        title=title, cells=cells, compare=[(_twin(first), _twin(second)) for first, second in table.compare]
    )


def _twin(label: str) -> str:
    """`Qwen3-4B` is `0.1M model`; `Qwen3-4B PACS` and `PACS-4B` are `0.1M model: PACS`."""
    model, _, method = re.sub(r"^PACS-(\dB)$", r"Qwen3-\1 PACS", label).partition(" ")
    return label if model not in TWIN_MODELS else f"{TWIN_MODELS[model]}{': ' if method else ''}{method}"


Runs = dict[str, list[Run]]


def _require_one_protocol(table: Table, runs: Runs, results_dir: Path) -> None:
    """Check that all runs have the same protocol, except for the chat format of different models."""
    results = _all_results(runs)
    if table.model_prompts:
        questions = [{"instruction": result["protocol"]["prompt"]["instruction"]} for result in results]
        results = [r | {"protocol": r["protocol"] | {"prompt": q}} for r, q in zip(results, questions, strict=True)]
    require_same_protocol(results, [f"{result['method']} in {results_dir}" for result in results])


def _names(twins: bool, model: str | None = None) -> dict[str, str]:
    """Map the benchmarks of the paper, or those of a base model, to ours."""
    names = TWINS if twins else {name: name for name in numbers.TABLE_1_BENCHMARKS}
    return {theirs: ours for theirs, ours in names.items() if not model or numbers.pass_at_k_tables(model, theirs)}


def _cells(runs: Sequence[Run], benchmarks: Sequence[str], ks: Sequence[int]) -> list[tables.Measured | None]:
    """Return for each k the mean over seeds and benchmarks in percent; `None` without runs."""
    cells = tables.pass_at_k_cells([run.results for run in runs], benchmarks, ks) if runs else {}
    return [cells.get(k) for k in ks]


def _text(cell: tables.Measured | None, digits: int = 1) -> str:
    return tables.cell_text(cell, digits=digits) or "-"


def _figure(title: str, path: Path, table: Table, twins: bool) -> str:
    caption = f"\n*{table.message}*\n" if twins and table.message else ""
    return f"![{title}]({path.name}.png)\n{caption}"


def _rows(
    label: str,
    ours: Sequence[tables.Measured | None],
    published: Sequence[float | None] = (),
    *,
    of: str | None = None,
    digits: int = 1,
) -> list[list[str]]:
    """Return our row, and if there is a published one, that and whether it lies in our interval (not for twins)."""
    rows = [[label, *(_text(cell, digits) for cell in ours)]]
    if any(number is not None for number in published):
        shown = ["-" if number is None else f"{number:.{max(digits, 2)}f}" for number in published]
        rows.append([f"{of or label}, published", *shown])
        if of is None:
            rows.append([f"{label}, published lies", *map(_where_it_lies, ours, published)])
    return rows


def _where_it_lies(cell: tables.Measured | None, published: float | None) -> str:
    if cell is None or published is None:
        return "-"
    lower, upper = bounds(cell)
    return "inside" if lower <= published <= upper else "outside"


def _header(names: dict[str, str], twins: bool) -> list[str]:
    return ["", *(f"{name} ({paper_name})" if twins else paper_name for paper_name, name in names.items())]


def _all_results(runs: Runs) -> list[dict[str, Any]]:
    return [run.results for group in runs.values() for run in group]


def _mean_of_all(values: Sequence[float | None]) -> float | None:
    """Return the mean of values, `None` if one of them is missing."""
    known = [value for value in values if value is not None]
    return statistics.mean(known) if len(known) == len(values) else None


def _pass_at_k(table: Table, runs: Runs, path: Path, twins: bool) -> str:
    """Return the mean over the benchmarks, the differences, the figure, and collapsed tables of the benchmarks."""
    names = _names(twins, table.published)
    theirs: dict[str, dict[str, dict[int, float]]] = {}  # benchmark -> label -> k -> percent
    for paper_name, name in names.items():
        blocks = numbers.pass_at_k_tables(table.published, paper_name) if table.published else []
        theirs[name] = {label: values for block in blocks for label, values in block.values.items()}
    ks_of = {}  # that every run has; without runs those of the paper
    for name in names.values():
        measured = [set(results["benchmarks"][name]["pass_at_k"]) for results in _all_results(runs)]
        ks_of[name] = sorted(
            map(int, set.intersection(*measured) if measured else set().union(*theirs[name].values()))
        )
    shared = [k for k in next(iter(ks_of.values())) if all(k in ks for ks in ks_of.values())]

    def table_of(benchmarks: list[str], ks: list[int]) -> str:
        rows = []
        for label, group in runs.items():
            published = [
                None if twins else _mean_of_all([theirs[n].get(label, {}).get(k) for n in benchmarks]) for k in ks
            ]
            rows += _rows(label, _cells(group, benchmarks, ks), published)
        return tables.to_markdown(["", *(f"k={k}" for k in ks)], rows)

    parts = [f"## Mean over the {len(names)} benchmarks\n\n{table_of(list(names.values()), shared)}"]
    by_seed: dict[str, dict[int, list[float]]] = {}
    if table.compare:
        rows, by_seed = _comparisons(table, runs, [k for k in COMPARED_KS if k in shared], theirs)
        header = ["difference", "k", "ours", "seeds above 0", "published", "same direction"]
        parts.append(f"## Differences of the means\n\n{tables.to_markdown(header, rows)}")
    if results := _all_results(runs):
        from .paper_figures import pass_at_k_figure

        pass_at_k_figure(results, list(names.values()), by_seed, path)
        parts.append(_figure("pass@k", path, table, twins))
    for paper_name, name in names.items():
        title = f"{name} in place of {paper_name}" if twins else paper_name
        folded = table_of([name], ks_of[name])
        parts.append(f"<details><summary>{title}</summary>\n\n{folded}\n</details>\n")
    return "\n".join(parts)


def _comparisons(
    table: Table, runs: Runs, ks: list[int], theirs: dict[str, dict[str, dict[int, float]]]
) -> tuple[list[list[str]], dict[str, dict[int, list[float]]]]:
    """Return rows of paired differences over common seeds, and the differences by seed. The sign is compared with the
    paper's only if the interval excludes 0 and every seed has the same sign."""
    rows: list[list[str]] = []
    by_seed: dict[str, dict[int, list[float]]] = {}
    for first, second in table.compare:
        pairs, name = _pairs(runs, first, second), f"{first} - {second}"
        for k in ks:
            published = [
                values[first][k] - values[second][k]
                for values in theirs.values()
                if first in values and second in values and k in values[first]
            ]
            mean = statistics.mean(published) if published else None
            shown = "-" if mean is None else f"{mean:+.1f}"
            if not pairs:
                rows.append([name, str(k), "-", "-", shown, "-"])
                continue
            cell, seeds = _difference(pairs, list(theirs), k)
            by_seed.setdefault(name, {})[k] = seeds
            above = f"{sum(value > 0 for value in seeds)} of {len(seeds)}"
            rows.append([name, str(k), _text(cell), above, shown, _direction(cell, seeds, mean)])
    return rows, by_seed


def _pairs(runs: Runs, first: str, second: str) -> list[tuple[Run, Run]]:
    """Return the runs of two cells with the same seed."""
    return [(a, b) for a in runs[first] for b in runs[second] if a.seed == b.seed]


def _difference(
    pairs: Sequence[tuple[Run, Run]], benchmarks: Sequence[str], k: int
) -> tuple[tables.Measured, list[float]]:
    """Return the first minus the second in percent, over benchmarks and seeds, and by seed."""
    first, second = ([run.results for run in group] for group in zip(*pairs, strict=True))
    by_seed = [
        a[k].value - b[k].value
        for a, b in ([tables.pass_at_k_cells([run.results], benchmarks, [k]) for run in pair] for pair in pairs)
    ]
    return tables.paired_difference(first, second, benchmarks, [k])[k]._replace(spread=_spread(by_seed)), by_seed


def _direction(cell: tables.Measured, by_seed: Sequence[float], published: float | None) -> str:
    lower, upper = bounds(cell)
    if lower <= 0 <= upper or not (min(by_seed) > 0 or max(by_seed) < 0):
        return "not resolved"
    if published is None:
        return "-"
    verdict = "yes" if (cell.value > 0) == (published > 0) else "no"
    # The interval is over problems: it knows nothing of how another seed would have come out.
    return f"{verdict}, one seed" if len(by_seed) == 1 else verdict


def _pass_at_1(table: Table, runs: Runs, path: Path, twins: bool) -> str:
    names = _names(twins)
    columns = [list(names.values())] + [[name] for name in names.values()]
    keys = ("average", *names)
    rows = []
    for label, group in runs.items():
        published = {} if twins else numbers.TABLE_1.get(label, {})
        ours = [_cells(group, column, [1])[0] for column in columns]
        rows += _rows(label, ours, [published.get(key) for key in keys])
    gains_of = {_twin(name) if twins else name: name for name in numbers.TABLE_1_GAINS}
    for first, second in table.compare:
        gains, pairs = numbers.TABLE_1_GAINS[gains_of[first]], _pairs(runs, first, second)
        ours = [_difference(pairs, column, 1)[0] if pairs else None for column in columns]
        of = f"gain of {gains_of[first]}" if twins else None
        rows += _rows(f"{first} - {second}", ours, [gains[key] for key in keys], of=of)
    for label, cited in () if twins else numbers.TABLE_1_CITED.items():
        shown = ["-" if key not in cited else f"{cited[key]:.2f}" for key in keys]
        rows.append([f"{label}, cited by the paper", *shown])
    return tables.to_markdown(["", "average", *_header(names, twins)[1:]], rows)


def _diversity(table: Table, runs: Runs, path: Path, twins: bool) -> str:
    """Return diversities over the problems with two correct completions in every run of the table."""
    names = _names(twins)
    everything = [run for group in runs.values() for run in group]
    common = {
        name: sorted(set.intersection(*(set(run.diversity.get(name, {})) for run in everything)) if everything else ())
        for name in names.values()
    }
    rows = []
    for label, group in runs.items():
        ours = [_diversity_cell(group, name, common[name]) for name in names.values()]
        model, _, method = label.partition(" ")
        published = numbers.TABLE_3_DIVERSITY.get((model, method), {})  # of no twin
        rows += _rows(label, ours, [published.get(name) for name in names], digits=4)
    rows.append(["problems", *(str(len(common[name])) for name in names.values())])
    return tables.to_markdown(_header(names, twins), rows)


def _diversity_cell(runs: Sequence[Run], name: str, problems: Sequence[str]) -> tables.Measured | None:
    if not runs or not problems:
        return None
    by_run = np.array([[run.diversity[name][problem] for problem in problems] for run in runs])
    mean, lower, upper = map(float, bootstrap_interval(by_run.mean(axis=0)))
    return tables.Measured(mean, lower, upper, _spread(by_run.mean(axis=1).tolist()))


def _spread(by_run: Sequence[float]) -> float | None:
    """Return the standard deviation over runs, if there are several."""
    return statistics.stdev(by_run) if len(by_run) > 1 else None


def mean_and_spread(values: Sequence[float], digits: int) -> str:
    """Format `MEAN ± STANDARD DEVIATION`, without what is not known."""
    return _text(tables.Measured(statistics.mean(values), spread=_spread(values)) if values else None, digits)


def _curves(table: Table, runs: Runs, path: Path, twins: bool) -> str:
    """Return pass@1 of every checkpoint, averaged over benchmarks and seeds, and by seed for the last one."""
    names = list(_names(twins).values())
    seeds = sorted({run.seed for group in runs.values() for run in group})
    curves: dict[str, dict[int, dict[int, float]]] = {}  # label -> seed -> step -> percent
    for label, group in runs.items():
        curves[label] = {
            run.seed: {
                point["step"]: 100 * statistics.mean(point[f"eval_{name}/pass@1"] for name in names)
                for point in run.training["checkpoints"]
            }
            for run in group
            if run.training and run.training["checkpoints"]
        }
    steps = sorted({step for by_seed in curves.values() for points in by_seed.values() for step in points})
    if not steps:
        return "No run of this figure is finished.\n"
    rows = []
    for label, by_seed in curves.items():
        at = [[points[step] for points in by_seed.values() if step in points] for step in steps]
        last = [f"{by_seed[seed][max(by_seed[seed])]:.1f}" if seed in by_seed else "-" for seed in seeds]
        rows.append([label, *(mean_and_spread(values, 1) for values in at), *last])
    header = [f"step {step}" for step in steps] + [f"last, seed {seed}" for seed in seeds]
    return tables.to_markdown(["pass@1, %", *header], rows)


def _ablation(table: Table, runs: Runs, path: Path, twins: bool) -> str:
    """Return mean pass@k over the benchmarks against the setting in the labels."""
    names, results = list(_names(twins).values()), _all_results(runs)
    if not results:
        return "No run of this figure is finished.\n"
    from .paper_figures import beta_figure

    ks, titles = tables.common_ks(results), tables.benchmarks(results)
    finished = {float(label): [run.results for run in group] for label, group in runs.items() if group}
    beta_figure(finished, {name: titles[name] for name in names}, path)
    rows = [[label, *map(_text, _cells(group, names, ks))] for label, group in runs.items()]
    header = ["mean over the benchmarks", *(f"k={k}" for k in ks)]
    return f"{_figure('pass@k against beta', path, table, twins)}\n{tables.to_markdown(header, rows)}"


def _training(table: Table, runs: Runs, path: Path, twins: bool) -> str:
    """Return the figure of the entropy, and its values at the start and the end."""
    rows: list[list[str]] = []
    kept: dict[str, dict[int, float]] = {}
    models: dict[str, dict[str, list]] = {}
    for label, group in runs.items():
        logs = {run.seed: run.training["log_history"] for run in group if run.training}
        if not logs:
            continue
        model, _, method = label.rpartition(" ")
        models.setdefault(model.removesuffix(":"), {})[method] = list(logs.values())
        ends = {}
        for seed, run in logs.items():
            if values := [log["entropy"] for log in run if log.get("entropy") is not None]:
                tenth = max(1, len(values) // 10)
                ends[seed] = statistics.mean(values[:tenth]), statistics.mean(values[-tenth:])
        kept[label] = {seed: last / first for seed, (first, last) in ends.items()}
        columns = (*zip(*ends.values(), strict=True), list(kept[label].values()))
        rows.append([label, *(mean_and_spread(values, 3) for values in columns)])
    if not models:
        return "No run of this figure is finished.\n"
    from .paper_figures import entropy_figure

    entropy_figure(models, path)
    for first, second in table.compare:
        seeds = sorted(kept.get(first, {}).keys() & kept.get(second, {}).keys())
        differences = ", ".join(f"{kept[first][seed] - kept[second][seed]:+.3f}" for seed in seeds)
        rows.append([f"{first} - {second}, each seed", "", "", differences or "-"])
    header = ["entropy, nats per token", "first tenth of the steps", "last tenth", "share kept"]
    return f"{_figure('entropy', path, table, twins)}\n{tables.to_markdown(header, rows)}"


def _other_domain(table: Table, runs: Runs, path: Path, twins: bool) -> str:
    """Return pass@k in the other domain; at full scale pass@1 of `RESULTS_DIR/other_domains/METHOD/seed-N/BENCHMARK`
    with the published scores."""
    results = _all_results(runs)
    if twins:
        ks = tables.common_ks(results) if results else []
        rows = [[label, *map(_text, _cells(group, [OTHER_DOMAIN_TWIN], ks))] for label, group in runs.items()]
        return tables.to_markdown(["", *(f"k={k}" for k in ks)], rows)
    rows = []
    for label in runs:
        files = sorted((path.parent / "other_domains" / label).glob("seed-*/**/results.json"))
        measured, row = [read_results(file)["benchmarks"] for file in files], [label]
        for name, ours in OTHER_DOMAINS.items():
            values = [100 * entries[ours]["pass_at_k"]["1"]["value"] for entries in measured if ours in entries]
            text = numbers.OUT_OF_DOMAIN_IN_TEXT.get((label, name))
            published = f"{numbers.OUT_OF_DOMAIN[label][name]:.2f}" + (f" (text: {text:.2f})" if text else "")
            row += [mean_and_spread(values, 2), str(len(values)), published]
        rows.append(row)
    header = [f"{name}{part}" for name in OTHER_DOMAINS for part in ("", ", seeds", ", published")]
    source = f"Published: {numbers.OUT_OF_DOMAIN_SOURCE}, with the prompts of another toolkit."
    return f"{tables.to_markdown(['', *header], rows)}\n{source}\n"


_SECTIONS: dict[str, Callable[[Table, Runs, Path, bool], str]] = {
    "pass_at_k": _pass_at_k,
    "pass_at_1": _pass_at_1,
    "diversity": _diversity,
    "curves": _curves,
    "ablation": _ablation,
    "training": _training,
    "other_domain": _other_domain,
}
