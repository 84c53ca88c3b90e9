"""Stored completions of an evaluation with their grades."""

import json
from pathlib import Path
from typing import Any

from pacs_trl.evaluation.store import evaluation_file, read_samples


def read_graded(
    output_dir: str | Path, benchmark: str
) -> tuple[dict[str, str], dict[tuple[str, int], dict[str, Any]]]:
    """Return the grades of each problem, one character per sample (1 correct, 0 wrong, - not gradable), and the graded
    records by (problem id, sample number).

    Raises:
        `ValueError`: if there are no grades, or a graded sample is missing.
    """
    path = evaluation_file(output_dir, "grades", benchmark)
    if not path.is_file():
        raise ValueError(f"There is no {path}. Give the whole output directory of `pacs-trl evaluate`.")
    grades = json.loads(path.read_text(encoding="utf-8"))
    samples = evaluation_file(output_dir, "samples", benchmark)
    records = {(record["problem"], record["sample"]): record for record in read_samples(samples)}
    graded = [(problem, sample) for problem, outcomes in grades.items() for sample in range(len(outcomes))]
    if missing := [key for key in graded if key not in records]:
        raise ValueError(f"{samples} lacks sample {missing[0]}, which {path} grades. Evaluate again.")
    return grades, {key: records[key] for key in graded}
