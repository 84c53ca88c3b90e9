"""Diversity of the correct responses of one or two models, and the two-dimensional view of figure 5b.

    python -m experiments.compare_diversity DIR_A DIR_B --benchmark aime_2024 --output diversity.json

Writes one JSON file that `pacs-trl report --diversity` draws from. What diversity is:
`pacs_trl/evaluation/diversity.py`.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pacs_trl.evaluation.diversity import (
    DEFAULT_EMBEDDER,
    Embedder,
    correct_responses,
    hashing_embedder,
    problem_diversities,
    sentence_embedder,
)
from pacs_trl.evaluation.pass_at_k import Interval, bootstrap_interval, paired_bootstrap
from pacs_trl.evaluation.results import read_results, require_same_protocol
from pacs_trl.settings.command_line import Parser, exit_code


class Projection(NamedTuple):
    """Centred principal components: `points` (N, 2) and the share of the variance along each, in [0, 1]."""

    points: np.ndarray
    explained: np.ndarray


def principal_components(embeddings: np.ndarray) -> Projection:
    """
    Project centred embeddings on their first two principal components.

    The sign of a component is arbitrary; the entry of largest magnitude is made positive, so that figures are
    repeatable.

    Raises:
        `ValueError`: if there are fewer than three embeddings.
    """
    embeddings = np.asarray(embeddings, dtype=np.float64)
    if len(embeddings) < 3:
        raise ValueError(f"A plane needs at least three points, got {len(embeddings)}.")
    _, singular, directions = np.linalg.svd(embeddings - embeddings.mean(axis=0), full_matrices=False)
    directions = directions[:2]
    largest = np.abs(directions).argmax(axis=1)
    directions = directions * np.sign(directions[np.arange(len(directions)), largest])[:, None]
    variance = singular**2
    centred = embeddings - embeddings.mean(axis=0)
    return Projection(centred @ directions.T, variance[:2] / max(variance.sum(), np.finfo(np.float64).tiny))


def compare(
    responses: Sequence[Mapping[str, Sequence[str]]], embed: Embedder
) -> tuple[list[dict[str, float]], list[Interval], Interval | None]:
    """
    Diversity of one or two models.

    Returns:
        Per model: diversities by problem and the mean with its interval, over the problems that remain for every
        model; and, for two models, the interval of the difference (second minus first).

    Raises:
        `ValueError`: if no problem has two correct responses from every model.
    """
    diversities = [problem_diversities(model, embed) for model in responses]
    common = [problem for problem in diversities[0] if all(problem in other for other in diversities)]
    if not common:
        raise ValueError("No problem has at least two correct responses from every model; draw more samples.")
    values = [np.array([model[problem] for problem in common]) for model in diversities]
    difference = paired_bootstrap(values[0], values[1]) if len(values) == 2 else None
    kept = [{problem: model[problem] for problem in common} for model in diversities]
    return kept, [bootstrap_interval(v) for v in values], difference


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: one or two result directories in, one JSON file for the report out."""
    parser = Parser("compare_diversity", __doc__.split("\n")[0], prog="python -m experiments.compare_diversity")
    parser.add_argument("results", nargs="+", type=Path, help="one or two output directories of `pacs-trl evaluate`")
    parser.add_argument("--benchmark", required=True, help="one that every directory has")
    parser.add_argument("--embedder", default=DEFAULT_EMBEDDER, help="Hub id, directory, or 'hashing'")
    parser.add_argument("--max_responses", type=int, default=None, help="correct responses per problem")
    parser.add_argument("--problem", default=None, help="problem of the scatter (default: all problems together)")
    parser.add_argument("--output", type=Path, required=True, help="file for `pacs-trl report --diversity`")
    args = parser.parse_args(argv)
    report = _diversity_file(args)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for model in report["models"]:
        print(f"{model['method']}: {model['mean']:.4f} [{model['lower']:.4f}, {model['upper']:.4f}]")
    print(f"over {report['num_problems']} problems with two correct responses each; written to {args.output}")
    return 0


def _diversity_file(args: argparse.Namespace) -> dict:
    if len(args.results) > 2:
        raise ValueError(f"Diversity compares at most two models, got {len(args.results)} directories.")
    results = [read_results(directory) for directory in args.results]
    require_same_protocol(results, [str(directory) for directory in args.results])
    for directory, result in zip(args.results, results, strict=True):
        if args.benchmark not in result["benchmarks"]:
            raise ValueError(f"{directory} has no benchmark {args.benchmark!r}, only {list(result['benchmarks'])}.")
    embed = hashing_embedder if args.embedder == "hashing" else sentence_embedder(args.embedder)
    responses = [correct_responses(directory, args.benchmark, limit=args.max_responses) for directory in args.results]
    diversities, intervals, difference = compare(responses, embed)
    if args.problem is not None and args.problem not in diversities[0]:
        raise ValueError(
            f"Problem {args.problem!r} cannot be drawn: it is not in {args.benchmark}, or a model has fewer than two "
            f"correct responses to it. Those that can: {', '.join(list(diversities[0])[:20])}."
        )
    shown = [args.problem] if args.problem is not None else list(diversities[0])
    texts = [[text for problem in shown for text in model.get(problem, [])] for model in responses]
    projection = principal_components(embed([text for model in texts for text in model]))
    parts = np.split(projection.points, np.cumsum([len(model) for model in texts])[:-1])
    return {
        "benchmark": args.benchmark,
        "embedder": args.embedder,
        "num_problems": len(diversities[0]),
        "explained": projection.explained.tolist(),
        "models": [
            {"method": result["method"], **interval._asdict(), "problems": by_problem, "points": points.tolist()}
            for result, interval, by_problem, points in zip(results, intervals, diversities, parts, strict=True)
        ],
        "difference": difference._asdict() if difference else None,
    }


if __name__ == "__main__":
    sys.exit(exit_code("python -m experiments.compare_diversity", main, sys.argv[1:]))
