"""Tables of finished runs beside the published ones: what `pacs-trl reproduce` prints and writes.

Reads the records of a results directory and nothing else, so that tables can be made again without a model. A cell is the mean over its seeds, with the standard deviation over seeds behind "±" and the
95 % interval over problems in brackets; "-" where there is none. How many seeds are behind a cell stands in its row.
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ..evaluation.pass_at_k import bootstrap_interval, pass_interval
from ..evaluation.results import require_same_protocol
from ..report import paper, tables
from .other_domains import mean_and_spread, measured_elsewhere
from .records import Records, Run


# The miniature benchmark that stands in place of each benchmark of the paper, and the one in place of other domains.
TWINS = {name: f"miniature/terms_{3 + i}" for i, name in enumerate(paper.TABLE_1_BENCHMARKS)}
OTHER_DOMAIN_TWIN = "miniature/grouped"

COMPARED_KS = (1, 8, 64)


class Cell(NamedTuple):
    """
    One row of a table.

    Args:
        label (`str`): Its name there.
        recipe (`str`): What makes it, without `recipes/` and `.yaml`.
        trained (`bool`): False where the model is meant that the recipe starts from.
        evaluations (sequence of `str`): At full scale, what measures it.
        settings (mapping): Where it differs from its recipe.
        name (`str`, *optional*): Of its run, if that is not the recipe's.
    """

    label: str
    recipe: str
    trained: bool = True
    evaluations: Sequence[str] = ("evaluation/v2",)
    settings: Mapping[str, Any] = MappingProxyType({})
    name: str | None = None

    @property
    def run(self) -> str:
        """Name of the run, the same in every table: the recipe's, or `base` next to a training recipe."""
        if self.name is not None:
            return self.name
        path = self.recipe.removeprefix("miniature/")
        return path if self.trained or path.startswith("evaluation/") else f"{path.rsplit('/', 1)[0]}/base"

    @property
    def words(self) -> list[str]:
        """The settings as words of a command line."""
        values = {key: v if isinstance(v, str) else json.dumps(v) for key, v in self.settings.items()}
        return [word for key, value in values.items() for word in (f"--{key}", value)]

    def directory(self, base: Path, seed: int) -> Path:
        return base / self.run / f"seed-{seed}"


class Table(NamedTuple):
    """
    A table or figure of the paper.

    Args:
        name, title (`str`): File name and heading.
        cells (list of [`Cell`]): Its rows.
        shows (`str`): Key of `_SECTIONS`.
        published (`str`, *optional*): Base model of the paper's tables of pass@k.
        compare (list of pairs of `str`): Labels of which the first minus the second is shown.
        own_prompts (`bool`): Whether the rows are different models, each asked in its own chat format.
    """

    name: str
    title: str
    cells: list[Cell]
    shows: str
    published: str | None = None
    compare: Sequence[tuple[str, str]] = ()
    own_prompts: bool = False


def write_tables(selected: Sequence[Table], results_dir: Path, *, twins: bool) -> str:
    """
    Each table as Markdown and, where it has one, its figure: `NAME.md`, `.png` and `.svg`.

    Args:
        selected (sequence of [`Table`]): In this order.
        results_dir (`Path`): Has the records and gets the files.
        twins (`bool`): Whether benchmarks and models are the miniature ones.

    Returns:
        `str`: the text of all tables.
    """
    sections = []
    results_dir.mkdir(parents=True, exist_ok=True)
    records = Records(results_dir)
    for table in selected:
        runs = {cell.label: records.runs(cell.run, cell.label) for cell in table.cells}
        _require_one_protocol(table, runs, results_dir)
        body = _SECTIONS[table.shows](table, runs, results_dir / table.name, twins)
        note = "Miniature twins of the models and benchmarks that are named.\n\n" if twins else ""
        if twins or table.shows != "other_domain":  # measured elsewhere, and with other seeds
            note += f"Seeds: {', '.join(f'{cell.label} {len(runs[cell.label])}' for cell in table.cells)}.\n\n"
        text = f"# {table.title}\n\n{note}{body}"
        (results_dir / f"{table.name}.md").write_text(text)
        sections.append(text)
    return "\n".join(sections)


Runs = dict[str, list[Run]]


def _require_one_protocol(table: Table, runs: Runs, results_dir: Path) -> None:
    """Different models may differ in their chat format, which is theirs, and in nothing else; not in the question."""
    results = _all_results(runs)
    if table.own_prompts:
        results = [r | {"protocol": r["protocol"] | {"prompt": _question(r["protocol"])}} for r in results]
    require_same_protocol(results, [f"{result['method']} in {results_dir}" for result in results])


def _question(protocol: dict[str, Any]) -> dict[str, Any]:
    chat_format = ("system_prompt", "chat_template_kwargs")
    return {key: value for key, value in protocol["prompt"].items() if key not in chat_format}


def _names(twins: bool, model: str | None = None) -> dict[str, str]:
    """The paper's name of each benchmark -> ours; of a base model, those that the paper measured it on."""
    names = TWINS if twins else {name: name for name in paper.TABLE_1_BENCHMARKS}
    return {paper_name: name for paper_name, name in names.items() if not model or paper.published(model, paper_name)}


def _seed_cell(runs: Sequence[Run], benchmarks: Sequence[str], k: int) -> tables.Measured | None:
    """Mean over seeds and over some benchmarks, percent; None without runs."""
    if not runs:
        return None
    by_benchmark = [np.stack([_pass_values(run, name, k) for run in runs]) for name in benchmarks]  # (runs, problems)
    cell = tables.percent(pass_interval(*(values.mean(axis=0) for values in by_benchmark)))
    by_run = 100 * np.mean([values.mean(axis=1) for values in by_benchmark], axis=0)
    return cell._replace(spread=_spread(by_run))


def _pass_values(run: Run, benchmark: str, k: int) -> np.ndarray:
    """pass@k in [0, 1] of every problem of a benchmark."""
    return tables.problem_values([run.results], benchmark, [k])[1][:, 0]


def _values(run: Run, benchmarks: Sequence[str], k: int) -> np.ndarray:
    """pass@k in percent of every problem of some benchmarks, weighted so that their mean is the mean over benchmarks: the
    paper's average, in which 30 problems of AIME count as much as the 500 of MATH 500."""
    values = [100 * _pass_values(run, name, k) for name in benchmarks]
    total = sum(map(len, values))
    return np.concatenate([part * (total / (len(values) * len(part))) for part in values])


def _text(cell: tables.Measured | None, digits: int = 1) -> str:
    if cell is None:
        return "-"
    text = f"{cell.value:.{digits}f}"
    if cell.spread is not None:
        text += f" ± {cell.spread:.{digits}f}"
    return text if cell.lower is None else f"{text} [{cell.lower:.{digits}f}, {cell.upper:.{digits}f}]"


def _verdict(cell: tables.Measured | None, published: float | None) -> str:
    """Whether the published number lies in our interval."""
    if cell is None or published is None:
        return "-"
    return "inside" if cell.lower <= published <= cell.upper else "outside"


def _rows(label: str, ours: Sequence[tables.Measured | None], published: Sequence[float | None], digits: int = 1):
    """Ours, published, and where the published numbers lie; the last two only if there are any."""
    rows = [[label, *(_text(cell, digits) for cell in ours)]]
    if any(number is not None for number in published):
        shown = ["-" if number is None else f"{number:.{max(digits, 2)}f}" for number in published]
        rows.append([f"{label}, published", *shown])
        verdicts = [_verdict(cell, number) for cell, number in zip(ours, published, strict=True)]
        rows.append([f"{label}, published lies", *verdicts])
    return rows


def _header(names: dict[str, str], twins: bool) -> list[str]:
    return ["", *(f"{name} ({paper_name})" if twins else paper_name for paper_name, name in names.items())]


def _all_results(runs: Runs) -> list[dict[str, Any]]:
    return [run.results for group in runs.values() for run in group]


def _ks(runs: Runs) -> list[int]:
    results = _all_results(runs)
    return tables.common_ks(results) if results else []


def _benchmark_ks(runs: Runs, name: str, published: dict[str, dict[int, float]]) -> list[int]:
    """Values of k that every run has on a benchmark; without a run, those of the paper."""
    measured = [set(results["benchmarks"][name]["pass_at_k"]) for results in _all_results(runs)]
    return sorted(map(int, set.intersection(*measured) if measured else {k for v in published.values() for k in v}))


def _published(table: Table, paper_name: str) -> dict[str, dict[int, float]]:
    """label -> k -> percent."""
    blocks = paper.published(table.published, paper_name) if table.published else []
    return {label: values for block in blocks for label, values in block.values.items()}


def _pass_at_k(table: Table, runs: Runs, path: Path, twins: bool) -> str:
    names = _names(twins, table.published)
    parts, every_ks = [], []
    for paper_name, name in names.items():
        published = _published(table, paper_name)
        ks = _benchmark_ks(runs, name, published)
        every_ks.append(set(ks))
        header = ["", *(f"k={k}" for k in ks)]
        rows = []
        for label, group in runs.items():
            ours = [_seed_cell(group, [name], k) for k in ks]
            rows += _rows(label, ours, [published.get(label, {}).get(k) for k in ks])
        title = f"{name} in place of {paper_name}" if twins else paper_name
        parts.append(f"## {title}\n\n{tables.to_markdown(header, rows)}")
    if table.compare:
        header, rows = _comparisons(table, runs, set.intersection(*every_ks), names)
        title = f"Mean over the {'five' if len(names) == 5 else 'four'} benchmarks"
        parts.append(f"## {title}\n\n{tables.to_markdown(header, rows)}")
    if results := _all_results(runs):
        from ..report import plots

        plots.pass_at_k_figure(results, {name: name for name in names.values()}, path)
        parts.append(f"![pass@k]({path.name}.png)\n")
    return "\n".join(parts)


def _comparisons(table: Table, runs: Runs, ks: set[int], names: dict[str, str]) -> tuple[list[str], list[list[str]]]:
    """Differences of pairs, over the problems of all benchmarks and the seeds that both have, and whether their sign is the
    paper's: only said where the interval leaves out 0 and every seed has the same sign."""
    published = {paper_name: _published(table, paper_name) for paper_name in names}
    header = ["difference", "k", "ours", "seeds above 0", "published", "same direction"]
    rows = []
    for first, second in table.compare:
        pairs = _pairs(runs, first, second)
        for k in [k for k in COMPARED_KS if k in ks]:
            theirs = [
                values[first][k] - values[second][k]
                for values in published.values()
                if first in values and second in values and k in values[first]
            ]
            paper_difference = statistics.mean(theirs) if theirs else None
            shown = "-" if paper_difference is None else f"{paper_difference:+.1f}"
            if not pairs:
                rows.append([f"{first} - {second}", str(k), "-", "-", shown, "-"])
                continue
            cell, means = _difference(pairs, list(names.values()), k)
            above = f"{int((means > 0).sum())} of {len(means)}"
            rows.append(
                [f"{first} - {second}", str(k), _text(cell), above, shown, _direction(cell, means, paper_difference)]
            )
    return header, rows


def _pairs(runs: Runs, first: str, second: str) -> list[tuple[Run, Run]]:
    """The runs of two cells that have the same seed."""
    return [(a, b) for a in runs[first] for b in runs[second] if a.seed == b.seed]


def _difference(
    pairs: Sequence[tuple[Run, Run]], benchmarks: Sequence[str], k: int
) -> tuple[tables.Measured, np.ndarray]:
    """The first minus the second, percent, over some benchmarks and over the seeds; and that of every seed."""
    by_seed = np.stack([_values(a, benchmarks, k) - _values(b, benchmarks, k) for a, b in pairs])
    means = by_seed.mean(axis=1)
    return tables.Measured(*bootstrap_interval(by_seed.mean(axis=0)), _spread(means)), means


def _direction(cell: tables.Measured, by_seed: np.ndarray, published: float | None) -> str:
    if cell.lower <= 0 <= cell.upper or not (np.all(by_seed > 0) or np.all(by_seed < 0)):
        return "not resolved"
    if published is None:
        return "-"
    verdict = "yes" if (cell.value > 0) == (published > 0) else "no"
    # The interval is over problems: it knows nothing of how another seed would have come out.
    return f"{verdict}, one seed" if len(by_seed) == 1 else verdict


def _pass_at_1(table: Table, runs: Runs, path: Path, twins: bool) -> str:
    names = _names(twins)
    columns = [[name] for name in names.values()] + [list(names.values())]
    header = [*_header(names, twins), "average"]
    rows = []
    for label, group in runs.items():
        published = paper.TABLE_1.get(label, {})
        ours = [_seed_cell(group, column, 1) for column in columns]
        rows += _rows(label, ours, [published.get(name) for name in (*names, "average")])
    for first, second in table.compare:
        gains, pairs = paper.TABLE_1_GAINS[first], _pairs(runs, first, second)
        ours = [_difference(pairs, column, 1)[0] if pairs else None for column in columns]
        rows += _rows(f"{first} - {second}", ours, [gains[name] for name in (*names, "average")])
    for label, cited in () if twins else paper.TABLE_1_CITED.items():
        shown = ["-" if name not in cited else f"{cited[name]:.2f}" for name in (*names, "average")]
        rows.append([f"{label}, cited by the paper", *shown])
    return tables.to_markdown(header, rows)


def _diversity(table: Table, runs: Runs, path: Path, twins: bool) -> str:
    """Over the problems with two correct completions in every run of the table, the same problems for every cell."""
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
        published = paper.TABLE_3_DIVERSITY.get((model, method), {})
        rows += _rows(label, ours, [published.get(name) for name in names], digits=4)
    rows.append(["problems", *(str(len(common[name])) for name in names.values())])
    return tables.to_markdown(_header(names, twins), rows)


def _diversity_cell(runs: Sequence[Run], name: str, problems: Sequence[str]) -> tables.Measured | None:
    if not runs or not problems:
        return None
    by_run = np.array([[run.diversity[name][problem] for problem in problems] for run in runs])
    return tables.Measured(*bootstrap_interval(by_run.mean(axis=0)), _spread(by_run.mean(axis=1)))


def _spread(by_run: np.ndarray) -> float | None:
    """Standard deviation over runs, if there are several."""
    return statistics.stdev(by_run.tolist()) if len(by_run) > 1 else None


def _curves(table: Table, runs: Runs, path: Path, twins: bool) -> str:
    """pass@1 over optimizer steps, mean over the benchmarks: checkpoints on the way, then the finished model."""
    names = list(_names(twins).values())
    histories = {}
    for label, group in runs.items():
        measured = [run.training["checkpoints"] for run in group if run.training and run.training["checkpoints"]]
        if measured:
            histories[label] = [[_average(checkpoint, names) for checkpoint in run] for run in measured]
    if not histories:
        return "No run of this figure is finished.\n"
    from ..report import plots

    plots.evaluation_figure(histories, path)
    return f"![pass@1 during training]({path.name}.png)\n"


def _average(checkpoint: dict[str, float], names: Sequence[str]) -> dict[str, float]:
    mean = statistics.mean(checkpoint[f"eval_{name}/pass@1"] for name in names)
    return {"step": checkpoint["step"], "eval_average/pass@1": mean}


def _ablation(table: Table, runs: Runs, path: Path, twins: bool) -> str:
    """pass@k over the five benchmarks against the setting whose values are the labels."""
    ks, names = _ks(runs), list(_names(twins).values())
    rows = [[label, *(_text(_seed_cell(group, names, k)) for k in ks)] for label, group in runs.items()]
    finished = {float(label): [run.results for run in group] for label, group in runs.items() if group}
    text = tables.to_markdown(["", *(f"k={k}" for k in ks)], rows)
    if finished:
        from ..report import plots

        plots.ablation_figure(finished, {name: name for name in names}, "beta", path)
        text += f"\n![pass@k against beta]({path.name}.png)\n"
    return text


def _training(table: Table, runs: Runs, path: Path, twins: bool) -> str:
    """The training logs, and the entropy at the start and at the end."""
    logs_of = {label: [run.training["log_history"] for run in group if run.training] for label, group in runs.items()}
    histories = {label: logs for label, logs in logs_of.items() if logs}
    if not histories:
        return "No run of this figure is finished.\n"
    from ..report import plots

    plots.training_figure(histories, path)
    header = ["entropy, nats per token", "first tenth of the steps", "last tenth", "share kept"]
    rows = []
    for label, logs in histories.items():
        # A step without a forward pass (no group had anything to learn from) has no entropy.
        entropies = [[log["entropy"] for log in run if log.get("entropy") is not None] for run in logs]
        ends = [_ends(values) for values in entropies if values]
        columns = ([first for first, _ in ends], [last for _, last in ends], [last / first for first, last in ends])
        rows.append([label, *(mean_and_spread(values, 3) for values in columns)])
    return f"{tables.to_markdown(header, rows)}\n![training]({path.name}.png)\n"


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """Mean of the first and of the last tenth."""
    tenth = max(1, len(values) // 10)
    return statistics.mean(values[:tenth]), statistics.mean(values[-tenth:])


def _other_domain(table: Table, runs: Runs, path: Path, twins: bool) -> str:
    if not twins:
        return measured_elsewhere(path.parent, list(runs))
    ks = _ks(runs)
    header = ["", *(f"k={k}" for k in ks), "LiveCodeBench, published", "GPQA, published"]
    rows = []
    for label, group in runs.items():
        published = paper.OUT_OF_DOMAIN.get(label, {})
        ours = [_text(_seed_cell(group, [OTHER_DOMAIN_TWIN], k)) for k in ks]
        rows.append([label, *ours, *(f"{published[n]:.2f}" for n in ("livecodebench", "gpqa") if n in published)])
    return tables.to_markdown(header, rows)


_SECTIONS: dict[str, Callable[[Table, Runs, Path, bool], str]] = {
    "pass_at_k": _pass_at_k,
    "pass_at_1": _pass_at_1,
    "diversity": _diversity,
    "curves": _curves,
    "ablation": _ablation,
    "training": _training,
    "other_domain": _other_domain,
}
