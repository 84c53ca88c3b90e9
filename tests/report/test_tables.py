"""Tables from results files: averages, differences, formats, refusals."""

import csv
import io

import numpy as np
import pytest
from results_world import make_results

from pacs_trl.evaluation import paired_interval, pass_at_k, pass_interval
from pacs_trl.report import tables
from pacs_trl.report.paper import published


def counts(result, benchmark="aime_2024"):
    return np.array([p["c"] for p in result["benchmarks"][benchmark]["problems"]])


def cells_of(rows, method, kind="ours"):
    (row,) = [row for row in rows if row.method == method and row.kind == kind]
    return row


def test_runs_of_one_method_are_averaged_by_problem():
    runs = [make_results("PACS", 0.5, seed=seed) for seed in range(3)]
    row = cells_of(tables.pass_at_k_rows(runs, "aime_2024"), "PACS")
    values = np.mean([pass_at_k(128, counts(run), 8) for run in runs], axis=0)
    interval = 100 * np.array(pass_interval(values))
    assert row.runs == 3 and row.cells[8].value == pytest.approx(interval[0])
    assert (row.cells[8].lower, row.cells[8].upper) == pytest.approx(interval[1:])
    by_run = [100 * pass_at_k(128, counts(run), 8).mean() for run in runs]
    assert row.cells[8].spread == pytest.approx(np.std(by_run, ddof=1))


def test_difference_to_the_published_number():
    result = make_results("PACS", 0.5)
    rows = tables.pass_at_k_rows([result], "aime_2024", published=published("Qwen3-8B", "aime_2024"))
    ours, theirs = cells_of(rows, "PACS"), cells_of(rows, "PACS", "published")
    difference = cells_of(rows, "PACS, ours - published", "difference")
    assert theirs.cells[64].value == 85.00 and theirs.source == "arXiv 2509.02522v2, Table 2"
    assert difference.cells[64].value == pytest.approx(ours.cells[64].value - 85.0)
    assert difference.cells[64].lower == pytest.approx(ours.cells[64].lower - 85.0)
    assert [row.method for row in rows if row.kind == "published"] == [
        "Base",
        "PPO",
        "GRPO",
        "PACS",
        "PACS without weights",
    ]


def test_paired_difference_to_a_baseline():
    base, tuned = make_results("GRPO", 0.4), make_results("PACS", 0.6, seed=1)
    rows = tables.pass_at_k_rows([base, tuned], "aime_2024", baseline="GRPO")
    row = cells_of(rows, "PACS - GRPO", "difference")
    expected = paired_interval((pass_at_k(128, counts(base), 4), pass_at_k(128, counts(tuned), 4)))
    assert row.cells[4][:3] == pytest.approx(tuple(100 * np.array(expected)))
    # The other way round is the mirror image.
    mirrored = cells_of(
        tables.pass_at_k_rows([base, tuned], "aime_2024", baseline="PACS"), "GRPO - PACS", "difference"
    )
    assert mirrored.cells[4].value == pytest.approx(-row.cells[4].value)


def test_problems_are_paired_by_their_ids():
    base, tuned = make_results("GRPO", 0.4), make_results("PACS", 0.4)
    assert np.array_equal(counts(base), counts(tuned))
    tuned["benchmarks"]["aime_2024"]["problems"].reverse()
    cell = tables.pass_at_k_rows([base, tuned], "aime_2024", baseline="GRPO")[-1].cells[4]
    values = pass_at_k(128, counts(base), 4)
    assert cell[:3] == pytest.approx(tuple(100 * np.array(paired_interval((values, values)))))


def test_scores_that_are_all_zero_have_intervals():
    base, tuned = make_results("GRPO", 0.5), make_results("PACS", 0.5)
    for result in (base, tuned):
        for problem in result["benchmarks"]["aime_2024"]["problems"]:
            problem["c"] = 0
    rows = tables.pass_at_k_rows([base, tuned], "aime_2024", baseline="GRPO")
    (own, difference) = (row.cells[4] for row in rows[1:])
    assert own.value == own.lower == 0.0 < own.upper
    assert difference[:3] == pytest.approx((0.0, -own.upper, own.upper))


def test_problems_that_could_not_be_graded_are_left_out():
    result = make_results("PACS", 0.5)
    result["benchmarks"]["aime_2024"]["problems"][0]["ungraded"] = 3
    row = cells_of(tables.pass_at_k_rows([result], "aime_2024"), "PACS")
    assert row.cells[1].value == pytest.approx(100 * pass_at_k(128, counts(result)[1:], 1).mean())


def test_support_of_every_run_against_the_baseline():
    base = make_results("Base", 0.5, seed=5)
    runs = [make_results("PACS", 0.5, seed=seed) for seed in (1, 2)]
    for result, solved in ((base, [1, 1, 0, 0]), (runs[0], [1, 0, 1, 0]), (runs[1], [1, 1, 1, 1])):
        result["benchmarks"]["aime_2024"]["problems"] = [
            {"id": str(i), "n": 128, "c": c, "ungraded": 0} for i, c in enumerate(solved)
        ]
    lines = tables.support_rows([base, *runs], "aime_2024", "Base")
    assert [line[:5] for line in lines] == [
        ["PACS over Base, run 1", "1", "1", "1", "1"],
        ["PACS over Base, run 2", "2", "2", "0", "0"],
    ]
    runs[0]["benchmarks"]["aime_2024"]["problems"][0]["n"] = 64
    assert len(tables.support_rows([base, *runs], "aime_2024", "Base")) == 1


def test_refusals():
    results = [make_results("PACS", 0.5), make_results("GRPO", 0.5, ks=(2, 3))]
    with pytest.raises(ValueError, match="k"):
        tables.pass_at_k_rows(results, "aime_2024")
    with pytest.raises(ValueError, match="'PPO'.*PACS"):
        tables.pass_at_k_rows(results[:1], "aime_2024", baseline="PPO")


def test_markdown():
    cells = {1: tables.Measured(50.0, 40.04, 60.06, 1.5), 8: tables.Measured(75.0)}
    rows = [tables.Row("PACS_a & b", "ours", "", "128", 2, cells)]
    rows += [tables.Row("gain", "difference", "", "", 0, {1: tables.Measured(2.0, -1.0, 5.0)})]
    header, lines = tables.table_cells(rows)
    assert tables.to_markdown(header, lines) == (
        "| method | n | runs | k=1 | k=8 |\n"
        "| --- | ---: | ---: | ---: | ---: |\n"
        "| PACS_a & b | 128 | 2 | 50.00 ± 1.50 [40.0, 60.1] | 75.00 |\n"
        "| gain |  |  | +2.00 [-1.0, 5.0] |  |\n"
    )


def test_csv_holds_every_number():
    rows = tables.pass_at_k_rows(
        [make_results("PACS", 0.5)], "aime_2024", published=published("Qwen3-8B", "aime_2024")
    )
    read = list(csv.DictReader(io.StringIO(tables.to_csv({"aime_2024": rows}))))
    assert len(read) == sum(len(row.cells) for row in rows) == 7 * 6
    assert {line["kind"] for line in read} == {"ours", "published", "difference"}
    assert [line["percent"] for line in read if (line["method"], line["kind"]) == ("PACS", "published")][
        0
    ] == "57.5800"
