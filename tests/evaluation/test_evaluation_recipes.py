"""Every shipped evaluation recipe loads, says what the paper says, and counts its completions right."""

import re
from pathlib import Path

import pytest

from pacs_trl.evaluation.arguments import read_evaluation
from pacs_trl.evaluation.benchmarks import BENCHMARKS
from pacs_trl.report.paper import OUT_OF_DOMAIN, TABLES


RECIPES = Path(__file__).parents[2] / "recipes" / "evaluation"
NUM_PROBLEMS = {"math_500": 500, "amc_23": 40, "aime_2024": 30, "aime_2025": 30, "beyond_aime": 100, "gsm8k": 1319}


def load(name):
    argv = ["--config", str(RECIPES / f"{name}.yaml"), "--model", "m", "--output_dir", "o"]
    return read_evaluation(argv)[0]


def test_all_recipes_are_tested():
    assert {path.stem for path in RECIPES.glob("*.yaml")} == {
        *("v1", "v1_math_500", "v2", "miniature", "gpqa_diamond", "livecodebench")
    }


@pytest.mark.parametrize(
    ("name", "protocol", "max_new_tokens"), [("v1", "v1", 4096), ("v1_math_500", "v1", 4096), ("v2", "v2", 8192)]
)
def test_the_papers_protocols(name, protocol, max_new_tokens):
    arguments = load(name)
    assert (arguments.temperature, arguments.top_p, arguments.top_k) == (0.6, 0.95, 0)
    assert arguments.max_new_tokens == max_new_tokens
    names = arguments.benchmarks.split(",")
    assert set(names) <= set(BENCHMARKS)
    for table in TABLES:
        if table.protocol == protocol and table.benchmark in names:
            assert arguments.ks == sorted(next(iter(table.values.values())))
    text = (RECIPES / f"{name}.yaml").read_text()
    completions = sum(NUM_PROBLEMS[benchmark] for benchmark in names) * arguments.n
    assert f"{completions:,} completions" in text


@pytest.mark.parametrize(
    ("name", "figure", "n", "size"), [("gpqa_diamond", "gpqa", 8, 198), ("livecodebench", "livecodebench", 2, 322)]
)
def test_figure_6(name, figure, n, size):
    arguments, text = load(name), (RECIPES / f"{name}.yaml").read_text()
    assert arguments.benchmarks == name and arguments.n == n and f"{size} problems" in text
    assert f"x {n} samples = {size * n:,} completions" in " ".join(text.replace("#", " ").split())
    for scores in OUT_OF_DOMAIN.values():
        assert f" {scores[figure]:.2f}" in text


@pytest.mark.parametrize(("name", "model"), [("v1", "Qwen2.5-7B"), ("v1_math_500", "Qwen2.5-7B"), ("v2", "Qwen3-8B")])
def test_expected_numbers_are_the_published_ones(name, model):
    arguments = load(name)
    text = " ".join((RECIPES / f"{name}.yaml").read_text().replace("#", " ").split())
    for table in TABLES:
        if table.model == model and table.benchmark in arguments.benchmarks.split(",") and "PACS" in table.values:
            values = list(table.values["PACS"].values())
            title = BENCHMARKS[table.benchmark].title
            pair = f"{values[0]:.2f} / {values[-1]:.2f}"
            assert f"{pair} on {title}" in text or (name == "v1_math_500" and re.search(rf"of {pair}", text))


def test_the_two_halves_of_v1_cover_its_tables():
    covered = set(load("v1").benchmarks.split(",")) | set(load("v1_math_500").benchmarks.split(","))
    assert covered == {table.benchmark for table in TABLES if table.protocol == "v1"}
