"""The numbers the paper published, as data with their source, so that ours can stand beside them.

Percent, as printed. v1 is arXiv 2509.02522v1 (September 2025, Qwen2.5, 4,096 tokens), read from the table pictures of the
authors' repository (github.com/ritzz-ai/PACS, commit bbe1dc6); v2 is arXiv 2509.02522v2 (February 2026, Qwen3, 8,192
tokens). The papers give no spread and no number of training seeds, so a published number is treated as exact.

Mislabel in v1: its abstract calls 59.78 % PACS's pass@256 on AIME 2025, but in the authors' own Table 2 that number is in the
AIME 2024 block (+13.32 over PPO, +14.36 over GRPO, as the abstract says). PACS's pass@256 on AIME 2025 is 58.22 %.
"""

from collections.abc import Iterable
from typing import NamedTuple


class PublishedTable(NamedTuple):
    """One table block: `values[method][k]` in percent."""

    source: str
    protocol: str
    model: str
    benchmark: str
    values: dict[str, dict[int, float]]


MISLABEL = (
    "v1 names 59.78 % as pass@256 on AIME 2025; its Table 2 has it under AIME 2024, and 58.22 % under AIME 2025."
)

_V1_3B = """
math_500  | 1 2 4 8 16 32
Base      | 56.66 67.64 75.75 81.91 86.87 90.60
PPO       | 65.48 71.94 77.51 82.14 86.02 89.20
GRPO      | 66.92 73.34 78.60 83.01 86.60 89.00
PACS      | 67.31 74.75 80.60 85.03 88.22 90.40
amc_23    | 1 8 32 64 128 256
Base      | 30.20 66.16 83.88 90.42 94.85 97.10
PPO       | 38.57 66.07 80.19 86.81 92.09 95.53
GRPO      | 37.01 68.71 82.61 87.72 92.39 96.44
PACS      | 39.63 68.23 82.45 88.23 92.70 96.18
aime_2024 | 1 8 32 64 128 256
Base      | 4.92 15.66 27.21 33.45 40.95 49.68
PPO       | 7.55 19.70 30.27 35.69 42.08 50.81
GRPO      | 8.14 19.13 26.06 31.65 37.75 42.76
PACS      | 7.98 21.49 30.10 35.87 42.25 48.32
aime_2025 | 1 8 32 64 128 256
Base      | 1.73 10.62 23.45 30.69 39.09 47.38
PPO       | 1.40 8.99 21.11 28.07 35.52 42.51
GRPO      | 2.62 7.07 14.07 20.18 28.37 36.58
PACS      | 2.94 11.32 22.91 30.50 39.07 47.18
"""

_V1_7B = """
math_500  | 1 2 4 8 16 32
Base      | 61.55 73.90 82.09 87.48 90.93 92.80
PPO       | 76.56 80.74 84.15 86.70 88.60 90.20
GRPO      | 78.29 82.08 84.70 86.60 88.26 90.00
PACS      | 78.97 84.39 88.18 90.68 92.33 93.60
PACS without weights | 77.84 83.74 87.68 90.30 92.06 93.20
amc_23    | 1 8 32 64 128 256
Base      | 35.72 70.21 85.53 91.19 95.89 99.18
PPO       | 51.22 72.80 81.92 85.71 88.67 90.92
GRPO      | 57.22 72.20 80.72 86.14 90.69 93.34
PACS      | 57.83 78.17 88.22 91.95 95.51 98.51
PACS without weights | 54.51 75.15 83.77 86.89 88.97 90.62
aime_2024 | 1 8 32 64 128 256
Base      | 7.26 23.46 36.41 43.77 52.66 62.55
PPO       | 15.56 28.50 38.71 41.50 43.85 46.46
GRPO      | 14.10 25.37 34.78 38.50 41.66 45.42
PACS      | 15.80 29.75 43.90 51.21 56.54 59.78
PACS without weights | 15.72 24.57 32.58 38.77 46.16 53.42
aime_2025 | 1 8 32 64 128 256
Base      | 3.35 16.04 28.56 34.99 42.07 50.11
PPO       | 9.61 24.89 32.32 34.94 38.27 42.91
GRPO      | 8.36 21.63 33.26 38.12 42.33 46.45
PACS      | 13.33 29.65 42.88 49.45 54.48 58.22
PACS without weights | 10.44 22.86 31.03 36.59 42.39 47.67
"""

_V2_8B = """
math_500    | 1 4 8 16 32 64
Base        | 89.94 95.20 96.54 97.54 98.27 98.75
PPO         | 93.78 97.16 97.88 98.38 98.90 99.40
GRPO        | 95.15 98.08 98.67 99.13 99.50 99.69
PACS        | 95.09 98.09 98.71 99.16 99.50 99.72
PACS without weights | 95.32 98.06 98.66 99.13 99.46 99.65
amc_23      | 1 4 8 16 32 64
Base        | 81.74 90.53 92.31 94.00 95.65 96.86
PPO         | 86.27 92.36 93.91 95.46 96.70 98.13
GRPO        | 87.83 93.17 94.71 95.92 97.91 99.69
PACS        | 88.69 94.28 95.36 96.03 96.72 97.35
PACS without weights | 89.63 94.80 95.53 96.02 96.50 97.32
aime_2024   | 1 4 8 16 32 64
Base        | 46.98 59.78 65.10 69.28 72.12 74.99
PPO         | 54.61 71.46 75.86 79.11 81.75 83.12
GRPO        | 54.56 74.52 80.08 82.42 83.21 83.33
PACS        | 57.58 76.24 81.21 83.30 84.14 85.00
PACS without weights | 58.93 76.64 81.13 83.21 83.59 84.73
aime_2025   | 1 4 8 16 32 64
Base        | 33.83 45.86 51.19 56.12 60.54 65.74
PPO         | 42.42 55.67 61.70 68.25 73.99 77.43
GRPO        | 45.29 58.80 64.04 69.12 73.84 77.39
PACS        | 46.38 61.93 67.78 72.20 75.71 79.12
PACS without weights | 46.15 60.07 66.29 71.98 76.10 78.23
beyond_aime | 1 4 8 16 32 64
Base        | 16.28 23.00 26.75 31.36 36.65 41.74
PPO         | 23.38 33.60 38.83 44.10 49.11 53.80
GRPO        | 25.79 37.61 43.08 48.40 53.32 57.64
PACS        | 28.86 43.15 49.58 55.39 60.19 64.02
PACS without weights | 28.52 40.43 45.55 50.10 54.35 58.97
"""

_V2_4B = """
math_500    | 1 4 8 16 32 64
Base        | 91.00 95.75 96.86 97.68 98.21 98.50
PPO         | 93.25 97.06 97.86 98.40 98.80 99.13
GRPO        | 93.91 97.48 98.20 98.74 99.17 99.43
PACS        | 94.80 97.87 98.47 98.93 99.30 99.49
PACS without weights | 94.35 97.70 98.41 98.92 99.23 99.35
amc_23      | 1 4 8 16 32 64
Base        | 82.30 91.15 93.33 95.34 97.38 99.20
PPO         | 86.33 93.93 95.48 96.37 97.07 97.47
GRPO        | 86.95 94.69 95.98 97.08 98.44 99.70
PACS        | 90.45 96.01 96.96 97.40 97.50 97.50
PACS without weights | 89.18 94.91 95.80 96.54 97.18 97.48
aime_2024   | 1 4 8 16 32 64
Base        | 46.48 61.00 66.15 70.21 73.77 77.21
PPO         | 52.21 70.64 77.03 81.12 82.94 83.32
GRPO        | 52.84 70.71 76.31 79.97 82.05 83.13
PACS        | 55.10 72.91 77.93 80.74 82.25 83.13
PACS without weights | 54.56 72.60 78.32 81.68 83.13 83.33
aime_2025   | 1 4 8 16 32 64
Base        | 34.71 49.27 54.57 58.40 62.41 66.81
PPO         | 40.34 54.87 60.52 66.36 71.58 75.24
GRPO        | 40.18 54.87 61.23 67.69 73.48 77.34
PACS        | 45.63 61.00 66.18 70.14 72.91 74.80
PACS without weights | 44.90 59.10 64.08 68.11 71.37 73.09
beyond_aime | 1 4 8 16 32 64
Base        | 17.33 24.92 29.31 34.37 39.91 45.29
PPO         | 21.82 32.97 39.06 45.46 51.28 56.01
GRPO        | 24.39 37.90 44.31 49.52 53.79 57.58
PACS        | 27.16 41.66 47.96 53.41 57.91 62.10
PACS without weights | 25.89 39.11 45.28 51.18 56.53 61.12
"""

# The score ablation; RLOO is PACS as published above.
_V2_4B_SCORES = """
math_500    | 1 4 8 16 32 64
PACS (score grpo)    | 94.58 97.78 98.49 99.00 99.27 99.38
PACS (score dr_grpo) | 94.82 97.86 98.48 98.93 99.27 99.47
amc_23      | 1 4 8 16 32 64
PACS (score grpo)    | 89.55 93.72 95.60 96.79 97.59 98.11
PACS (score dr_grpo) | 90.04 95.50 96.49 97.15 97.47 97.50
aime_2024   | 1 4 8 16 32 64
PACS (score grpo)    | 56.02 67.74 77.01 81.32 83.02 83.33
PACS (score dr_grpo) | 55.78 71.54 76.28 81.27 82.89 83.32
aime_2025   | 1 4 8 16 32 64
PACS (score grpo)    | 44.01 59.66 65.92 70.94 75.04 78.96
PACS (score dr_grpo) | 44.95 60.17 65.90 70.85 75.06 79.03
beyond_aime | 1 4 8 16 32 64
PACS (score grpo)    | 26.41 39.95 45.73 50.54 54.03 56.30
PACS (score dr_grpo) | 26.67 40.70 46.87 52.33 56.73 60.36
"""

# Table 1 of v2: pass@1 of open models; columns in the order of the benchmarks, then the printed average.
TABLE_1_BENCHMARKS = ("math_500", "amc_23", "aime_2024", "aime_2025", "beyond_aime")
_TABLE_1 = """
Qwen3-4B         | 91.01 82.30 46.48 34.71 17.33 54.37
Qwen3-8B         | 89.94 81.74 46.98 33.83 16.28 53.75
Qwen3-14B        | 92.07 84.88 49.06 36.22 18.59 56.16
Deepthought-8B   | 45.07 16.58 1.82 0.44 0.76 12.93
Eurus-2-7B-PRIME | 82.07 63.65 18.39 13.88 6.67 36.93
LIMO             | 91.00 80.61 40.86 31.82 15.98 52.05
Marco-o1         | 70.48 45.12 9.22 6.95 2.77 26.91
OpenThinker3-7B  | 88.90 72.44 36.95 26.98 12.33 47.52
Sky-T1-7B        | 85.38 69.59 20.86 20.47 8.54 40.97
PACS-4B          | 94.80 90.45 55.10 45.63 27.16 62.63
PACS-8B          | 95.09 88.69 57.58 46.38 28.86 63.32
"""


def _table_1_row(numbers: Iterable[float]) -> dict[str, float]:
    return dict(zip((*TABLE_1_BENCHMARKS, "average"), numbers, strict=True))


# The rows above them that the paper cites from others, and below each PACS model its gain over the model it started from.
TABLE_1_CITED = {
    "Claude Opus 4.1": {"amc_23": 87.5, "aime_2025": 78.0},
    "Gemini 2.5 Pro": _table_1_row((96.7, 100.0, 88.7, 86.7, 58.8, 86.18)),
}
TABLE_1_GAINS = {
    "PACS-4B": _table_1_row((3.79, 8.15, 8.62, 10.92, 9.83, 8.26)),
    "PACS-8B": _table_1_row((5.15, 6.95, 10.6, 12.55, 12.58, 9.57)),
}

# Table 3 of v2: mean pairwise cosine distance of correct responses, (model, method) -> benchmark -> score.
TABLE_3_DIVERSITY = {
    ("Qwen3-4B", "PACS"): {"aime_2024": 0.0278, "aime_2025": 0.0300},
    ("Qwen3-4B", "GRPO"): {"aime_2024": 0.0260, "aime_2025": 0.0266},
    ("Qwen3-8B", "PACS"): {"aime_2024": 0.0272, "aime_2025": 0.0392},
    ("Qwen3-8B", "GRPO"): {"aime_2024": 0.0217, "aime_2025": 0.0249},
}

# Figure 6 of v2, Qwen3-8B, accuracy in percent: multiples of 1/644 (322 problems twice) and of 1/1584 (198 problems eight times). The
# text of section 6.1 has 38.01 for GRPO on LiveCodeBench, which is no such multiple.
OUT_OF_DOMAIN_SOURCE = "arXiv 2509.02522v2, figure 6"
OUT_OF_DOMAIN_IN_TEXT = {("GRPO", "livecodebench"): 38.01}
OUT_OF_DOMAIN = {
    "Base": {"livecodebench": 31.06, "gpqa": 48.04},
    "PPO": {"livecodebench": 35.87, "gpqa": 48.48},
    "GRPO": {"livecodebench": 38.04, "gpqa": 48.55},
    "PACS": {"livecodebench": 45.96, "gpqa": 52.46},
}


def _blocks(text: str) -> dict[str, dict[str, dict[int, float]]]:
    """benchmark -> method -> k -> percent; a line whose cells are all whole numbers starts a block."""
    blocks: dict[str, dict[str, dict[int, float]]] = {}
    for line in text.strip().splitlines():
        name, cells = (part.strip() for part in line.split("|"))
        if "." not in cells:
            ks = [int(cell) for cell in cells.split()]
            block = blocks.setdefault(name, {})
        else:
            block[name] = dict(zip(ks, map(float, cells.split()), strict=True))
    return blocks


def _tables(text: str, protocol: str, model: str, sources: dict[str, str]) -> list[PublishedTable]:
    return [
        PublishedTable(f"arXiv 2509.02522{protocol}, {sources.get(name, sources['*'])}", protocol, model, name, values)
        for name, values in _blocks(text).items()
    ]


_SCORE_SOURCES = dict(zip(TABLE_1_BENCHMARKS, (f"Table {number}" for number in range(9, 14)), strict=True))

TABLES: list[PublishedTable] = [
    *_tables(_V1_3B, "v1", "Qwen2.5-3B", {"*": "Table 1"}),
    *_tables(_V1_7B, "v1", "Qwen2.5-7B", {"*": "Table 2"}),
    *_tables(_V2_8B, "v2", "Qwen3-8B", {"*": "Table 2", "math_500": "Table 8"}),
    *_tables(_V2_4B, "v2", "Qwen3-4B", {"*": "Table 6", "math_500": "Table 7"}),
    *_tables(_V2_4B_SCORES, "v2", "Qwen3-4B", {"*": "", **_SCORE_SOURCES}),
]

TABLE_1: dict[str, dict[str, float]] = {
    name.strip(): _table_1_row(map(float, cells.split()))
    for name, cells in (line.split("|") for line in _TABLE_1.strip().splitlines())
}


def published(model: str, benchmark: str) -> list[PublishedTable]:
    """
    The published blocks of one base model and benchmark.

    Raises:
        `ValueError`: if the paper has no table for that base model.
    """
    models = sorted({table.model for table in TABLES})
    if model not in models:
        raise ValueError(f"The paper has no pass@k table for {model!r}; choose from {', '.join(models)}.")
    return [table for table in TABLES if table.model == model and table.benchmark == benchmark]
