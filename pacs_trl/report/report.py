"""`pacs-trl report`: tables and figures of results files and training logs; needs neither torch nor vLLM."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..evaluation.results import (
    prompts_of,
    read_json,
    read_results,
    require_chosen_labels,
    require_different_evaluations,
    require_same_protocol,
)
from ..settings import Parser, render
from ..settings.names import make_directory, require_matplotlib
from . import tables


def build_report(paths: Sequence[Path], output_dir: Path, *, baseline: str | None = None) -> list[Path]:
    """
    Write `tables.md` and the pass@k figure of results files or their directories, and return the files written.

    All tables compare with the method `baseline`; without it the first one does, with the method of the first file.
    Raises a `ValueError` if a file cannot be read, two files are one evaluation, files were measured with different
    protocols, or models share a label that no one chose.
    """
    results = [read_results(path) for path in paths]
    file_names = [str(path) for path in paths]
    require_different_evaluations(results, file_names)
    require_same_protocol(results, file_names)
    require_chosen_labels(results, file_names)
    names = tables.benchmarks(results)
    before = baseline or results[0]["method"]
    pass_at_k = {name: tables.benchmark_table(results, name, baseline) for name in names}

    changes = tables.before_and_after(results, names, before)
    text = render(
        "report.md",
        before=tables.one_line(before),
        changes=changes and tables.to_markdown(tables.BEFORE_AND_AFTER_HEADER, changes),
        benchmarks=[(tables.one_line(names[name]), tables.to_markdown(*pass_at_k[name])) for name in names],
        results=results,
        in_cell=tables.in_cell,
        one_line=tables.one_line,
        prompts=prompts_of(results),
        **results[0]["protocol"],
    )

    from . import plots  # needs matplotlib

    make_directory(output_dir, "--output_dir")
    file = output_dir / "tables.md"
    file.write_text(text + "\n", encoding="utf-8")
    return [file, *plots.pass_at_k_figure(results, names, output_dir / "pass_at_k")]


def main(argv: Sequence[str] | None = None) -> int:
    """Run `pacs-trl report`; return the exit status."""
    parser = Parser("report", "Write tables and figures of evaluations and training runs.")
    parser.add_argument("results", nargs="*", type=Path, help="results.json files or their directories")
    parser.add_argument("--output_dir", type=Path, required=True, help="directory of tables and figures")
    parser.add_argument("--baseline", default=None, help="method that the others are compared with")
    parser.add_argument("--training", nargs="+", default=[], metavar="METHOD=DIR", help="runs with trainer_state.json")
    args = parser.parse_args(argv)
    require_matplotlib("A report")
    if not (args.results or args.training):
        raise UserError("There is nothing to report. Name results files, or runs with --training METHOD=DIR.")
    from . import plots

    files = []
    if args.results:
        files += build_report(args.results, args.output_dir, baseline=args.baseline)
    if args.training:
        histories = training_histories(args.training)
        make_directory(args.output_dir, "--output_dir")
        files += plots.training_figure(histories, args.output_dir / "training")
    print("\n".join(map(str, files)))
    return 0


def read_log_history(path: Path) -> list[dict[str, Any]]:
    """Read the log history of a `trainer_state.json`; a `ValueError` names what it lacks."""
    history = read_json(path)["log_history"]
    for log in history:
        log["step"]
    return history


def training_histories(pairs: Sequence[str]) -> dict[str, list[list[dict[str, Any]]]]:
    """Read the log histories of `METHOD=DIR` pairs by method; a method that is named several times has several runs.
    Raises a `ValueError` if neither a directory nor a checkpoint in it has a trainer_state.json."""
    histories: dict[str, list[list[dict[str, Any]]]] = {}
    for pair in pairs:
        method, separator, directory = pair.partition("=")
        if not separator:
            raise UserError(f"--training {pair!r} has no method. Write METHOD=DIR, DIR that of a run.")
        run = Path(directory)
        states = [*run.glob("trainer_state.json"), *run.glob("checkpoint-*/trainer_state.json")]
        if not states:
            raise UserError(f"--training {pair!r} has no trainer_state.json. Write METHOD=DIR, DIR that of a run.")
        # The state of the run is older than its newest checkpoint if the run goes on with more steps.
        newest = max(map(read_log_history, states), key=lambda history: history[-1]["step"] if history else 0)
        histories.setdefault(method, []).append(newest)
    return histories
