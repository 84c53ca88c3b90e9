"""Command line: run or resume the experiments of a table of the paper, `python -m experiments.paper TABLE`.

A table is a file in `experiments/paper/tables/`: its cells, with recipe and settings at miniature and at full scale. A
cell is trained and evaluated with each seed, unless it is in the records of the results directory (`records.py`).
Miniature cells run in this process (`cells.py`); full-size commands and their cost are printed, and run with `--run`
(`full_size.py`). `render.py` writes tables and figures.
"""

import argparse
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pacs_trl.settings import Parser, read_mapping
from pacs_trl.settings.names import require_matplotlib

from .cells import Options, run_cell
from .full_size import collect, full_commands, run_line
from .records import Cell
from .render import Table, write_tables


TABLES = Path(__file__).parent / "tables"
PROGRAM = "python -m experiments.paper"
SCALES = ("miniature", "full")

# Options that change the size of a miniature run.
SIZES = ("max_steps", "warm_start_steps", "num_samples", "max_problems")


def read_table(name: str, scale: str) -> Table:
    """Read a table with the cells of a scale ("miniature" or "full"): a file in `experiments/paper/tables/` without
    `.yaml`, or a table that a file lists as `also`.

    Raises:
        `ValueError`: if there is no such table, or not at that scale.
    """
    contents = _contents(TABLES)
    files = {shown: file for file, content in contents.items() for shown in (file, *content.get("also", ()))}
    if name not in files:
        raise ValueError(f"There is no table {name!r}; choose from {', '.join(files)}, or 'all'.")
    content = {key: value for key, value in contents[files[name]].items() if key != "also"}
    evaluations = content.pop("evaluation", ["evaluation/v2"])
    entries = content.pop("cells").items()
    cells = [_cell(label, entry, scale, evaluations) for label, entry in entries if scale in entry]
    if not cells:
        raise ValueError(f"{name} exists at full scale only: its cells have no miniature twins. Add `--scale full`.")
    labels = {cell.label for cell in cells}
    compare = [pair for pair in content.pop("compare", ()) if labels.issuperset(pair)]
    return Table(name=files[name], cells=cells, compare=compare, **content)


def _cell(label: str, entry: dict[str, Any], scale: str, evaluations: Sequence[str]) -> Cell:
    """Build the cell of a row: the name of a recipe, or `{run: NAME, recipe: NAME, set: SETTINGS}`."""
    made = {"recipe": entry[scale]} if isinstance(entry[scale], str) else entry[scale]
    if made["recipe"].startswith("evaluation/"):  # the evaluation itself
        evaluations = [made["recipe"]]
    trained = entry.get("trained", True)
    return Cell(label, made["recipe"], trained, evaluations, made.get("set", {}), made.get("run"))


def table_names(scale: str | None = None) -> list[str]:
    """Return the names of all tables, or of those at a scale, in the order of the paper."""
    return [
        name
        for name, content in _contents(TABLES).items()
        if scale is None or any(scale in entry for entry in content["cells"].values())
    ]


@cache
def _contents(tables: Path) -> dict[str, dict[str, Any]]:
    names = [path.stem for path in tables.glob("*.yaml")]
    names.sort(key=lambda name: (name.startswith("v1"), "figure" in name, int(name.rsplit("_")[-1])))
    return {name: read_mapping(tables / f"{name}.yaml", "table") for name in names}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    _refuse_ignored(arguments)
    full = arguments.scale == "full"
    prints = full and not (arguments.run or arguments.report_only)
    if not prints:
        require_matplotlib(PROGRAM)
    names = table_names(arguments.scale) if arguments.tables == ["all"] else arguments.tables
    tables = list({table.name: table for table in (read_table(name, arguments.scale) for name in names)}.values())
    options = Options(
        tuple(arguments.seeds),
        results_dir=arguments.results_dir or Path("outputs/tables/full/results" if full else "docs/results/miniature"),
        work_dir=arguments.work_dir or Path("outputs/tables") / arguments.scale,
        **{name: getattr(arguments, name) for name in SIZES},
    )
    if not full:
        for directory in (options.results_dir, options.work_dir):
            Path(directory).mkdir(parents=True, exist_ok=True)
    cells = _chosen(tables, arguments.cells)
    lines = []
    for seed in () if arguments.report_only else options.seeds:
        for cell in cells:
            print(f"# seed {seed}: {cell.run}", flush=True)
            if not full:
                run_cell(cell, seed, options)
                continue
            for line in full_commands(cell, seed, options, checkpoints=_shown(tables, "curves", cell)):
                print(f"# {_hours(line.gpu_hours)}\n  {line.text}", flush=True)
                lines.append(line)
                if arguments.run:
                    run_line(line.text)
    if prints:
        total, unknown = sum(line.gpu_hours or 0 for line in lines), sum(line.gpu_hours is None for line in lines)
        without = f", {unknown} of them without an estimate" if unknown else ""
        print(
            f"# {len(lines)} commands, {_hours(total)} in all{without}. Nothing was run or written; --run runs them."
        )
        return 0
    if full:
        for cell in _chosen(tables, None):
            collect(cell, options, diversity=_shown(tables, "diversity", cell))
    print(write_tables(tables, options.results_dir, twins=not full))
    return 0


def _hours(gpu_hours: float | None) -> str:
    if gpu_hours is None:
        return "no estimate"
    return f"about {gpu_hours:,.{0 if gpu_hours >= 10 else 1}f} GPU hours (H200)"


def _parser() -> Parser:
    parser = Parser("paper", "Run or resume the experiments behind a table of the paper.", prog=PROGRAM)
    parser.add_argument("tables", nargs="+", metavar="TABLE", help=f"{', '.join(table_names())}, or all")
    parser.add_argument("--scale", choices=SCALES, default="miniature")
    parser.add_argument("--cells", help="labels or names of cells, separated by commas (default: every cell)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one run of every cell for each")
    parser.add_argument("--max_steps", type=int, help="miniature: optimizer steps, instead of the recipe's")
    parser.add_argument("--warm_start_steps", type=int, help="miniature: length of the warm start, to try things out")
    parser.add_argument("--num_samples", type=int, help="miniature: completions per problem")
    parser.add_argument("--max_problems", type=int, help="miniature: problems per benchmark")
    parser.add_argument(
        "--results_dir", type=Path, help="default: docs/results/miniature, outputs/tables/full/results"
    )
    parser.add_argument("--work_dir", type=Path, help="default: outputs/tables/SCALE")
    parser.add_argument("--run", action="store_true", help="full scale: run the commands that are printed")
    parser.add_argument("--report_only", action="store_true", help="run nothing: tables of what is finished")
    return parser


def _refuse_ignored(arguments: argparse.Namespace) -> None:
    full = arguments.scale == "full"
    ignored = [f"--{name}" for name in SIZES if full and getattr(arguments, name) is not None]
    if arguments.run and (arguments.report_only or not full):
        ignored.append("--run")
    if ignored:
        raise ValueError(f"{', '.join(ignored)} would be ignored with this --scale or --report_only. Leave it out.")


def _shown(tables: Sequence[Table], shows: str, cell: Cell) -> bool:
    """Return whether a table of this kind has the run of a cell."""
    return any(cell.run == other.run for table in tables if table.shows == shows for other in table.cells)


def _chosen(tables: Sequence[Table], names: str | None) -> list[Cell]:
    """Return the cells of some tables that have one of the names or labels, each run once."""
    by_run = {cell.run: cell for table in tables for cell in table.cells}
    if names is None:
        return list(by_run.values())
    wanted = {name.strip() for name in names.split(",")}
    labels = {run: {run, *(c.label for table in tables for c in table.cells if c.run == run)} for run in by_run}
    known = set().union(*labels.values())
    if unknown := wanted - known:
        raise ValueError(f"There are no cells {', '.join(sorted(unknown))} here, but {', '.join(sorted(known))}.")
    return [cell for cell in by_run.values() if labels[cell.run] & wanted]
