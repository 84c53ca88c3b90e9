"""Tables from results files: averages, differences, formats, refusals."""

import numpy as np
import pytest
from support.results_world import make_results

from pacs_trl.evaluation import paired_interval, pass_at_k, pass_interval
from pacs_trl.report import tables


AIME = ["aime_2024"]


def counts(result, benchmark="aime_2024"):
    return np.array([p["c"] for p in result["benchmarks"][benchmark]["problems"]])


def test_runs_of_one_method_are_averaged_by_problem():
    runs = [make_results("PACS", 0.5, seed=seed) for seed in range(3)]
    cell = tables.pass_at_k_cells(runs, AIME, [8])[8]
    values = np.mean([pass_at_k(128, counts(run), 8) for run in runs], axis=0)
    assert cell[:3] == pytest.approx(100 * np.array(pass_interval(values)))
    by_run = [100 * pass_at_k(128, counts(run), 8).mean() for run in runs]
    assert cell.spread == pytest.approx(np.std(by_run, ddof=1))
    header, lines = tables.benchmark_table(runs, "aime_2024")
    assert lines[0][:3] == ["PACS", "128", "3"] and lines[0][header.index("k=8")] == tables.cell_text(cell)


def test_spread_over_runs_is_that_of_the_problems_that_all_have_graded():
    runs = [make_results("PACS", 0.5, seed=seed) for seed in range(3)]
    for number, run in enumerate(runs):
        run["benchmarks"]["aime_2024"]["problems"][number] |= {"ungraded": 128, "c": 0}
    by_run = [100 * pass_at_k(128, counts(run)[3:], 8).mean() for run in runs]
    cell = tables.pass_at_k_cells(runs, AIME, [8])[8]
    assert (cell.value, cell.spread) == pytest.approx((np.mean(by_run), np.std(by_run, ddof=1)))
    both = tables.pass_at_k_cells(runs, [*AIME, "aime_2025"], [8])[8]
    by_run = [
        (mean + 100 * pass_at_k(128, counts(run, "aime_2025"), 8).mean()) / 2
        for mean, run in zip(by_run, runs, strict=True)
    ]
    assert (both.value, both.spread) == pytest.approx((np.mean(by_run), np.std(by_run, ddof=1)))


def test_difference_to_a_baseline_has_the_paired_interval():
    base, tuned = make_results("GRPO", 0.4), make_results("PACS", 0.6, seed=1)
    cell = tables.paired_difference([tuned], [base], AIME, [4])[4]
    expected = paired_interval((pass_at_k(128, counts(base), 4), pass_at_k(128, counts(tuned), 4)))
    assert cell[:3] == pytest.approx(100 * np.array(expected))
    mirrored = tables.paired_difference([base], [tuned], AIME, [4])[4]
    assert mirrored[:3] == pytest.approx((-cell.value, -cell.upper, -cell.lower))
    _, lines = tables.benchmark_table([base, tuned], "aime_2024", "GRPO")
    assert lines[2][:5] == ["PACS - GRPO", "", "", lines[2][3], tables.cell_text(cell, signed=True)]


def test_problems_are_paired_by_their_ids():
    base, tuned = make_results("GRPO", 0.4), make_results("PACS", 0.4)
    assert np.array_equal(counts(base), counts(tuned))
    values = pass_at_k(128, counts(base), 4)
    tuned["benchmarks"]["aime_2024"]["problems"].reverse()
    cell = tables.paired_difference([tuned], [base], AIME, [4])[4]
    assert cell[:3] == pytest.approx(100 * np.array(paired_interval((values, values))))


def test_scores_that_are_all_zero_have_intervals():
    base, tuned = make_results("GRPO", 0.5), make_results("PACS", 0.5)
    for result in (base, tuned):
        for problem in result["benchmarks"]["aime_2024"]["problems"]:
            problem["c"] = 0
    cell = tables.pass_at_k_cells([tuned], AIME, [4])[4]
    assert cell.value == cell.lower == 0.0 < cell.upper
    difference = tables.paired_difference([tuned], [base], AIME, [4])[4]
    assert difference[:3] == pytest.approx((0.0, -cell.upper, cell.upper))


def test_a_problem_with_too_few_grades_for_the_largest_k_counts_for_smaller_ones():
    result, other = make_results("PACS", 0.5), make_results("GRPO", 0.4)
    result["benchmarks"]["aime_2024"]["problems"][0] |= {"ungraded": 1, "c": 7}
    values = [pass_at_k(127, 7, 1), *pass_at_k(128, counts(result)[1:], 1)]
    cells = tables.pass_at_k_cells([result], AIME, [1, 128])
    assert cells[1].value == pytest.approx(100 * np.mean(values))
    assert cells[128].value == pytest.approx(100 * pass_at_k(128, counts(result)[1:], 128).mean())
    difference = tables.paired_difference([result], [other], AIME, [1, 128])
    assert difference[1].value == pytest.approx(100 * np.mean(values - pass_at_k(128, counts(other), 1)))
    both = [pass_at_k(128, counts(run)[1:], 128).mean() for run in (result, other)]
    assert difference[128].value == pytest.approx(100 * (both[0] - both[1]))


def test_samples_that_could_not_be_graded_are_left_out():
    result = make_results("PACS", 0.5)
    problems = result["benchmarks"]["aime_2024"]["problems"]
    problems[0] |= {"ungraded": 128, "c": 0}
    problems[1] |= {"ungraded": 28, "c": 7}
    values = [pass_at_k(100, 7, 1), *pass_at_k(128, counts(result)[2:], 1)]
    assert tables.pass_at_k_cells([result], AIME, [1])[1].value == pytest.approx(100 * np.mean(values))
    values = pass_at_k(128, counts(result)[2:], 101)  # more than 100 grades
    assert tables.pass_at_k_cells([result], AIME, [101])[101].value == pytest.approx(100 * np.mean(values))


def test_different_k_and_unknown_baselines_are_refused():
    results = [make_results("PACS", 0.5), make_results("GRPO", 0.5, ks=(2, 3))]
    with pytest.raises(ValueError, match="k"):
        tables.benchmark_table(results, "aime_2024")
    with pytest.raises(ValueError, match="'PPO'.*PACS"):
        tables.benchmark_table(results[:1], "aime_2024", "PPO")


def test_cells_become_a_markdown_table():
    cells = [tables.Measured(50.0, 40.04, 60.06, 1.5), tables.Measured(75.0)]
    lines = [["a | b\nc & \\d_e~", *map(tables.cell_text, cells)]]
    lines.append(["gain", tables.cell_text(tables.Measured(2.0, -1.0, 5.0), signed=True), ""])
    assert tables.to_markdown(["method", "k=1", "k=8"], lines) == (
        "| method | k=1 | k=8 |\n"
        "| --- | ---: | ---: |\n"
        "| a \\| b c & \\d_e~ | 50.00 ± 1.50 [40.0, 60.1] | 75.00 |\n"
        "| gain | +2.00 [-1.0, 5.0] |  |\n"
    )
