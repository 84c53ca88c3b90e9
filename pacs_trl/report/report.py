"""`pacs-trl report`: tables and figures from results files.

Writes `tables.md`, `tables.csv` and the figures that the given inputs allow into one directory. Reads JSON only and
needs neither torch nor vLLM.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..evaluation.results import require_same_protocol
from ..settings import Parser
from ..settings.names import require_matplotlib
from . import paper, tables
from .inputs import read_described, read_json, read_log_history


def build_report(
    paths: Sequence[Path],
    output_dir: Path,
    *,
    published: str | None = None,
    baseline: str | None = None,
    figures: bool = True,
) -> list[Path]:
    """
    Tables and the pass@k figure of a set of results files.

    Args:
        paths (sequence of `Path`): Results files or the directories that hold them.
        output_dir (`Path`): Where everything is written.
        published (`str`, *optional*): Base model whose published numbers stand beside ours, for example "Qwen3-8B".
        baseline (`str`, *optional*): Method that the others are compared with in every table; the first table compares
            with it, or else with the method of the first file.
        figures (`bool`): Whether to draw the pass@k figure.

    Returns:
        `list[Path]`: The files written.

    Raises:
        `ValueError`: if a file cannot be read or the files were measured under different protocols.
    """
    results = [read_described(path) for path in paths]
    require_same_protocol(results, [str(path) for path in paths])
    names = tables.benchmarks(results)
    by_method = tables.methods(results)
    before = baseline or next(iter(by_method))
    beside = {name: paper.published(published, name) if published else [] for name in names}
    rows = {name: tables.pass_at_k_rows(results, name, published=beside[name], baseline=baseline) for name in names}

    markdown = []
    if changes := tables.before_and_after(results, names, before):
        changes = tables.to_markdown(tables.BEFORE_AND_AFTER_HEADER, changes)
        markdown.append(
            f"# Before and after\n\nBefore is {tables.one_line(before)}; percent, 95 % intervals over "
            f"problems.\n\n{changes}"
        )
    if figures:
        markdown.append("![pass@k](pass_at_k.png)\n")
    for name, title in names.items():
        header, lines = tables.table_cells(rows[name])
        parts = [tables.to_markdown(header, lines), _sources(rows[name])]
        if baseline is not None and (support := tables.support_rows(results, name, baseline)):
            parts.append(tables.to_markdown(tables.SUPPORT_HEADER, support))
        markdown.append(tables.details(tables.one_line(title), "\n".join(filter(None, parts))))
    markdown.append(f"## Settings\n\n{tables.to_markdown(tables.SETTINGS_HEADER, tables.settings_rows(results))}")
    markdown.append(_protocol_text(results[0]["protocol"]))

    output_dir.mkdir(parents=True, exist_ok=True)
    contents = {"tables.md": "\n".join(markdown), "tables.csv": tables.to_csv(rows)}
    for name, content in contents.items():
        (output_dir / name).write_text(content, encoding="utf-8")
    files = [output_dir / name for name in contents]
    if figures:
        from . import plots

        files += plots.pass_at_k_figure(results, names, output_dir / "pass_at_k", beside)
    return files


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = Parser("report", "Tables and figures from results files.")
    parser.add_argument("results", nargs="*", type=Path, help="results.json files or the directories that hold them")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--published", default=None, help="base model of the paper, for example Qwen3-8B")
    parser.add_argument("--baseline", default=None, help="method that the others are compared with")
    parser.add_argument("--training", nargs="+", default=[], metavar="METHOD=DIR", help="runs with trainer_state.json")
    parser.add_argument("--diversity", type=Path, default=None, help="file of experiments/diversity.py")
    parser.add_argument("--reliability", type=Path, default=None, help="JSONL with `score` and `label` per completion")
    args = parser.parse_args(argv)
    require_matplotlib("A report")
    if not (args.results or args.training or args.diversity or args.reliability):
        raise ValueError("Nothing to report. Give results files, --training, --diversity or --reliability.")
    from . import plots

    files = []
    if args.results:
        files += build_report(args.results, args.output_dir, published=args.published, baseline=args.baseline)
    if args.training:
        histories = training_histories(args.training)
        files += plots.training_figure({"": histories}, args.output_dir / "training")
        if any("/pass@" in key for runs in histories.values() for run in runs for log in run for key in log):
            files += plots.evaluation_figure(histories, args.output_dir / "evaluation")
    if args.diversity:
        files += plots.diversity_figure(read_json(args.diversity), args.output_dir / "diversity")
    if args.reliability:
        files += plots.reliability_figure(*scores_and_labels(args.reliability), args.output_dir / "reliability")
    print("\n".join(map(str, files)))
    return 0


def scores_and_labels(path: Path) -> tuple[list[float], list[float]]:
    """
    psi and label of every completion with a label, from JSON lines.

    Raises:
        `ValueError`: if a line has not both.
    """
    scores, labels = [], []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            record = json.loads(line)
            score, label = record["score"], record["label"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"Line {number} of {path} lacks `score` (psi) or `label`: {line[:80]!r}.") from None
        if label is not None:  # None: the completion could not be graded
            scores.append(score)
            labels.append(label)
    return scores, labels


def training_histories(pairs: Sequence[str]) -> dict[str, list[list[dict[str, Any]]]]:
    """
    `METHOD=DIR` to log histories by method; a method given several times has several runs.

    Raises:
        `ValueError`: if a directory (or its last checkpoint) has no trainer_state.json.
    """
    histories: dict[str, list[list[dict[str, Any]]]] = {}
    for pair in pairs:
        method, separator, directory = pair.partition("=")
        found = [Path(directory) / "trainer_state.json"]
        checkpoints = Path(directory).glob("checkpoint-*/trainer_state.json")
        found += sorted(checkpoints, key=lambda path: int(path.parent.name.rsplit("-", 1)[1]), reverse=True)
        state = next((path for path in found if path.is_file()), None)
        if state is None or not separator:
            raise ValueError(f"--training takes METHOD=DIR with a trainer_state.json in DIR, got {pair!r}.")
        histories.setdefault(method, []).append(read_log_history(state))
    return histories


def _sources(rows: Sequence[tables.Row]) -> str:
    published = sorted({row.source for row in rows if row.kind == "published"})
    lines = [f"- published: {source}, percent as printed, no spread given" for source in published]
    if any("v1" in source for source in published):
        lines.append(f"- {paper.MISLABEL}")
    return "\n".join(lines) + "\n" if lines else ""


def _protocol_text(protocol: dict[str, Any]) -> str:
    sampling, prompt, verifier = protocol["sampling"], protocol["prompt"], protocol["verifier"]
    return (
        f"Sampling: temperature {sampling['temperature']}, top-p {sampling['top_p']}, top-k {sampling['top_k']}, at "
        f"most {sampling['max_new_tokens']} tokens. Prompt: the problem, then {prompt['instruction']!r}; system turn: "
        f"{prompt['system_prompt']!r}. Verifier: {verifier['name']} {verifier['version']}.\n"
    )
