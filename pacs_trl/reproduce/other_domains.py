"""Scores of figure 6, LiveCodeBench and GPQA: by this package's own benchmarks, and by another toolkit, from `other_domains.json`.

The paper measured them with the toolkit of GLM-4.5, which is not part of this package. The file lies in the results directory of
the full scale and is written by hand:

    {
     "toolkit": "what measured, its version, its settings",
     "scores": {
      "Base": [{"seed": 0, "livecodebench": 31.1, "gpqa": 48.0}],
      "PACS": [{"seed": 0, "livecodebench": 46.0, "gpqa": 52.5}, {"seed": 1, "gpqa": 52.1}]
     }
    }

Methods are the rows of the figure, scores are percent, and a benchmark that was not measured is left out.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..evaluation.results import read_results
from ..report import paper, tables
from ..report.inputs import read_json


FILE_NAME = "other_domains.json"
BENCHMARKS = {"livecodebench": "LiveCodeBench", "gpqa": "GPQA"}
OWN_NAMES = {"livecodebench": "livecodebench", "gpqa": "gpqa_diamond"}  # of this package's benchmarks


def measured_elsewhere(results_dir: Path, methods: Sequence[str]) -> str:
    """
    The table of figure 6: mean and standard deviation over the seeds of each method, beside the published scores.

    Args:
        results_dir (`Path`): Where `other_domains.json` lies, if anything is measured yet.
        methods (sequence of `str`): The rows.

    Returns:
        `str`: Markdown.

    Raises:
        `ValueError`: if the file does not have the form above.
    """
    measured, own = read_other_domains(results_dir, methods), measured_here(results_dir, methods)
    parts = ("", ", seeds", *([", by this package"] if any(own.values()) else []), ", published")
    header = ["", *(f"{title}{part}" for title in BENCHMARKS.values() for part in parts)]
    rows = []
    for method in methods:
        row = [method]
        for name in BENCHMARKS:
            values = [scores[name] for scores in measured.scores.get(method, {}).values() if name in scores]
            row += [mean_and_spread(values, 2), str(len(values))]
            row += [mean_and_spread(own[method].get(name, []), 2)] if any(own.values()) else []
            row.append(f"{paper.OUT_OF_DOMAIN[method][name]:.2f}")
        rows.append(row)
    said = f"Measured with {measured.toolkit}." if measured.scores else "Nothing is measured yet."
    note = (
        f"{said} Our scores are those of {results_dir / FILE_NAME}, whose form is in recipes/README.md; the published ones "
        f"are from {paper.OUT_OF_DOMAIN_SOURCE}, whose figure has 38.04 for GRPO on LiveCodeBench.\n"
    )
    return f"{tables.to_markdown(header, rows)}\n{note}"


def measured_here(results_dir: Path, methods: Sequence[str]) -> dict[str, dict[str, list[float]]]:
    """
    pass@1 in percent by method and benchmark, one for each seed, of `RESULTS_DIR/other_domains/METHOD/seed-*/results.json`, which
    `pacs-trl evaluate --config recipes/evaluation/other_domains.yaml` writes.
    """
    found: dict[str, dict[str, list[float]]] = {method: {} for method in methods}
    for method in methods:
        for path in sorted((results_dir / "other_domains" / method).glob("seed-*/results.json")):
            benchmarks = read_results(path)["benchmarks"]
            for name, own_name in OWN_NAMES.items():
                if own_name in benchmarks:
                    found[method].setdefault(name, []).append(100 * benchmarks[own_name]["pass_at_k"]["1"]["value"])
    return found


def mean_and_spread(values: Sequence[float], digits: int) -> str:
    """`MEAN ± STANDARD DEVIATION`, as far as there is one."""
    if not values:
        return "-"
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


class OtherDomains(NamedTuple):
    """`scores[method][seed][benchmark]` in percent, and what measured them."""

    toolkit: str
    scores: dict[str, dict[int, dict[str, float]]]


def read_other_domains(results_dir: Path, methods: Sequence[str]) -> OtherDomains:
    """
    The scores of a results directory; none if it has no file.

    Args:
        results_dir (`Path`): Where `other_domains.json` lies.
        methods (sequence of `str`): The rows of the figure.

    Raises:
        `ValueError`: naming the file, the place in it and the rule, if it does not have the form above.
    """
    path = results_dir / FILE_NAME
    if not path.is_file():
        return OtherDomains("", {})
    content = read_json(path, object)
    if not isinstance(content, dict) or content.keys() != {"toolkit", "scores"}:
        raise ValueError(f'{path} must hold "toolkit" and "scores" and nothing else. {_FORM}')
    toolkit, scores = content["toolkit"], content["scores"]
    if not isinstance(toolkit, str) or not toolkit.strip():
        raise ValueError(f'{path}: "toolkit" must say what measured the scores, got {toolkit!r}. {_FORM}')
    if not isinstance(scores, dict) or not all(isinstance(entries, list) for entries in scores.values()):
        raise ValueError(f'{path}: "scores" must map a method to a list of entries, one for each seed. {_FORM}')
    unknown = scores.keys() - set(methods)
    if unknown:
        raise ValueError(f"{path}: there are no methods {', '.join(sorted(unknown))} here, but {', '.join(methods)}.")
    return OtherDomains(toolkit, {method: _by_seed(path, method, entries) for method, entries in scores.items()})


_FORM = 'The form is {"toolkit": "NAME, VERSION, SETTINGS", "scores": {"PACS": [{"seed": 0, "livecodebench": 46.0, "gpqa": 52.5}]}}.'


def _by_seed(path: Path, method: str, entries: Sequence[Any]) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for number, entry in enumerate(entries):
        where = f"{path}: entry {number} of {method}"
        if not isinstance(entry, dict) or type(entry.get("seed")) is not int:
            raise ValueError(f'{where} must be an object with a whole number "seed", got {entry!r}. {_FORM}')
        scores = {key: value for key, value in entry.items() if key != "seed"}
        if not scores or scores.keys() - BENCHMARKS:
            raise ValueError(f"{where} must hold scores of {' or '.join(BENCHMARKS)}, got {sorted(scores)}. {_FORM}")
        for name, value in scores.items():
            if type(value) not in (int, float) or not 0 <= value <= 100:
                raise ValueError(f"{where}: {name} must be a number from 0 to 100, got {value!r}. Scores are percent.")
            if 0 < value <= 1:
                raise ValueError(
                    f"{where}: {name} is {value}, which looks like a share. Scores are percent: write {100 * value:g}."
                )
        if entry["seed"] in found:
            raise ValueError(f"{where} has seed {entry['seed']} again. Every seed of a method has one entry.")
        found[entry["seed"]] = {name: float(value) for name, value in scores.items()}
    return found
