"""Every shipped evaluation recipe loads and has the settings of the paper."""

from pathlib import Path

import pytest

from pacs_trl.evaluation.arguments import read_evaluation
from pacs_trl.evaluation.benchmarks import BENCHMARKS
from pacs_trl.report.paper import TABLES


RECIPES = Path(__file__).parents[2] / "recipes" / "evaluation"


def load(name):
    argv = ["--config", str(RECIPES / f"{name}.yaml"), "--model", "m", "--output_dir", "o"]
    return read_evaluation(argv)[0]


def test_all_recipes_are_tested():
    names = ("v1", "v1_math_500", "v2", "miniature", "gpqa_diamond", "livecodebench")
    assert {path.stem for path in RECIPES.glob("*.yaml")} == set(names)
    assert load("miniature").benchmarks.startswith("miniature/")


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
