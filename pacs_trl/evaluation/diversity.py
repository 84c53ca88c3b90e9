"""Diversity of correct responses (appendix E of the paper).

The score of a problem is one minus the mean cosine similarity over all pairs of its correct responses; the score of a
model is the mean over problems. The paper does not say what a problem with fewer than two correct responses counts:
here it is left out. Two models are compared on the problems that remain for both, otherwise the better model would be
judged on harder problems.

Embeddings come from a sentence-transformers model; `experiments/compare_diversity.py` compares two models.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from .store import read_graded


# The paper says "Qwen3-0.6B embedding model"; this is the one published under that description.
DEFAULT_EMBEDDER = "Qwen/Qwen3-Embedding-0.6B"

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


def sentence_embedder(name: str, *, batch_size: int = 16) -> Embedder:
    """
    An embedder from a sentence-transformers model: a Hub id or a directory.

    Raises:
        `ValueError`: if sentence-transformers is not installed.
    """
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
