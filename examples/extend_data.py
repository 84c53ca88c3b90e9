"""A data source of your own: a function that returns the rows to train on.

pacs-trl train --config recipes/qwen3-0.6b/pacs.yaml --dataset_name examples.extend_data:sums
"""

import random


def sums(num_problems: int = 1000) -> list[dict]:
    """Return rows with a problem, its answer, and any other columns, which reward functions get. `problem_column` and
    `solution_column` name other columns; a `datasets.Dataset` is as good as a list."""
    rng = random.Random(0)
    rows = []
    for _ in range(num_problems):
        terms = [rng.randint(1, 99) for _ in range(rng.randint(2, 4))]
        rows.append(
            {"problem": f"What is {' + '.join(map(str, terms))}?", "answer": str(sum(terms)), "level": len(terms)}
        )
    return rows
