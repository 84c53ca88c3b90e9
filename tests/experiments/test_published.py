"""The published numbers, checked against what must hold if they were copied right."""

import itertools

import pytest

from experiments.paper.published import (
    TABLE_1,
    TABLE_1_CITED,
    TABLE_1_GAINS,
    TABLES,
    pass_at_k_tables,
)


PROBLEMS = {"math_500": 500, "amc_23": 40, "aime_2024": 30, "aime_2025": 30, "beyond_aime": 100}


def lies_on_grid(percent, steps):
    """Whether a number printed with two decimals can be m / steps."""
    return abs(round(percent / 100 * steps) / steps * 100 - percent) <= 0.005 + 1e-9


def test_every_table_is_there():
    # v1: two models, four benchmarks; v2: two models, five benchmarks, and the score ablation of the 4B model.
    assert len(TABLES) == 2 * 4 + 2 * 5 + 5
    assert {len(row) for table in TABLES for row in table.values.values()} == {6}
    assert {table.source for table in TABLES if table.benchmark == "math_500"} == {
        f"arXiv 2509.02522{where}"
        for where in ("v1, Table 1", "v1, Table 2", "v2, Table 7", "v2, Table 8", "v2, Table 9")
    }


@pytest.mark.parametrize("table", TABLES, ids=lambda t: f"{t.protocol}-{t.model}-{t.benchmark}-{len(t.values)}")
def test_pass_at_k_rises_with_k_and_counts_samples(table):
    for row in table.values.values():
        assert list(row.values()) == sorted(row.values())
        assert all(0 <= value <= 100 for value in row.values())
        if table.protocol == "v2" and table.benchmark != "math_500":
            # A digit copied wrong is caught in about half of the cells: 1/(128 * 30) is 0.026 %.
            assert lies_on_grid(row[1], 128 * PROBLEMS[table.benchmark])
        if table.protocol == "v1" and table.benchmark == "math_500":
            assert lies_on_grid(row[32], 500)  # n = 32 there, so pass@32 of a problem is 0 or 1


def test_table_1_agrees_with_the_other_tables_and_itself():
    for row in TABLE_1.values():
        values = [value for name, value in row.items() if name != "average"]
        assert sum(values) / 5 == pytest.approx(row["average"], abs=0.0101)
    for size, benchmark in itertools.product(("4B", "8B"), PROBLEMS):
        values = pass_at_k_tables(f"Qwen3-{size}", benchmark)[0].values
        # The paper prints 91.01 in Table 1 and 91.00 in Table 7 for the same run.
        assert TABLE_1[f"PACS-{size}"][benchmark] == pytest.approx(values["PACS"][1], abs=0.0101)
        assert TABLE_1[f"Qwen3-{size}"][benchmark] == pytest.approx(values["Base"][1], abs=0.0101)
    assert {model: gains["average"] for model, gains in TABLE_1_GAINS.items()} == {"PACS-4B": 8.26, "PACS-8B": 9.57}
    for model, gains in TABLE_1_GAINS.items():
        base = TABLE_1[f"Qwen3-{model.removeprefix('PACS-')}"]
        assert gains.keys() == base.keys()
        for name, gain in gains.items():
            assert TABLE_1[model][name] - base[name] == pytest.approx(gain, abs=0.0101), (model, name)
    gemini = TABLE_1_CITED["Gemini 2.5 Pro"]
    assert sum(value for name, value in gemini.items() if name != "average") / 5 == pytest.approx(gemini["average"])
    assert TABLE_1_CITED["Claude Opus 4.1"] == {"amc_23": 87.5, "aime_2025": 78.0}
