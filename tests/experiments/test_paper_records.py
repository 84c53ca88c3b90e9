"""Records: what goes in comes out, two processes lose nothing of each other's, and a damaged file is named."""

import multiprocessing

import pytest
from support.finished_runs import results_of, text_of, write_text

from experiments.paper.records import Records, Run, record


COUNTS = {"terms": [3, 0, 4], "math": [1, 1, 2]}


def a_run(seed: int = 0, **changes) -> Run:
    logs = [
        {"step": 1, "reward": 0.5, "entropy": 1 / 3, "lr": 0.1},
        {"step": 2, "entropy": None},
        {"step": 3, "reward": 1.0},
    ]
    training = {"log_history": logs, "checkpoints": [{"step": 2, "eval_terms/pass@1": 0.5}]}
    return Run(seed, results_of(COUNTS), {"terms": {"0": 0.12345678, "2": -1e-16}}, training)._replace(**changes)


def test_a_run_comes_back_as_far_as_tables_need_it(tmp_path):
    run = a_run(seed=3)
    record(tmp_path, "m/pacs", run, {"training": {"beta": 1.0}})
    record(tmp_path, "m/base", a_run(training=None))
    (stored,) = Records(tmp_path).runs("m/pacs", "PACS")
    assert stored.seed == 3 and stored.results["method"] == "PACS"
    for key in ("n", "k", "protocol"):
        assert stored.results[key] == run.results[key]
    for name, entry in stored.results["benchmarks"].items():
        original, kept = run.results["benchmarks"][name], ("id", "n", "c", "ungraded")
        assert entry["problems"] == [{key: problem[key] for key in kept} for problem in original["problems"]]
        assert all(entry[key] == original[key] for key in ("title", "source", "pass_at_k"))
    assert stored.diversity == {"terms": {"0": 0.123457, "2": 0.0}}
    assert str(stored.diversity["terms"]["2"]) == "0.0"
    assert stored.training == {
        "log_history": [{"step": 1, "reward": 0.5, "entropy": 1 / 3}, {"step": 3, "reward": 1.0}],
        "checkpoints": [{"step": 2, "eval_terms/pass@1": 0.5}],
    }
    assert Records(tmp_path).runs("m/base", "Base")[0].training is None
    assert Records(tmp_path).settings("m/pacs") == {"training": {"beta": 1.0}}
    assert Records(tmp_path).settings("m/base") is None


def test_samples_that_were_not_graded_are_left_out_of_pass_at_k_as_in_a_results_file(tmp_path):
    """Problems with four samples each, of which all, or one, could not be graded."""
    for seed, counts, ungraded, share in (
        (0, [3, 0, 4], [0, 4, 0], (3 / 4 + 4 / 4) / 2),
        (1, [3, 1, 4], [0, 1, 0], (3 / 4 + 1 / 3 + 4 / 4) / 3),
    ):
        results = results_of(COUNTS | {"terms": counts})
        for problem, number in zip(results["benchmarks"]["terms"]["problems"], ungraded, strict=True):
            problem["ungraded"] = number
        record(tmp_path, "m/pacs", a_run(seed, results=results))
        terms = Records(tmp_path).runs("m/pacs", "PACS")[seed].results["benchmarks"]["terms"]
        assert [problem["ungraded"] for problem in terms["problems"]] == ungraded
        assert [problem["c"] for problem in terms["problems"]] == counts
        assert terms["pass_at_k"]["1"]["value"] == pytest.approx(share)


def test_runs_of_one_cell_have_one_kind_of_settings(tmp_path):
    record(tmp_path, "m/pacs", a_run(0), {"training": {"alpha": 0.5, "beta": 1.0}})
    before = text_of(tmp_path)
    record(tmp_path, "m/pacs", a_run(0), {"training": {"beta": 1.0, "alpha": 0.5}})
    assert text_of(tmp_path) == before
    with pytest.raises(ValueError, match="m/pacs.*training.beta: 1.0 != 2.0"):
        record(tmp_path, "m/pacs", a_run(1), {"training": {"alpha": 0.5, "beta": 2.0}})
    assert text_of(tmp_path) == before


def _record_many(directory, cell):
    for seed in range(8):
        record(directory, cell, a_run(seed), {"training": None})


def test_two_processes_lose_nothing_of_each_others(tmp_path):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_record_many, args=(tmp_path, f"m/{name}")) for name in "ab"]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [Records(tmp_path).seeds(f"m/{name}") for name in "ab"] == [list(range(8))] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [".records.jsonl.gz.lock", "records.jsonl.gz"]


def test_a_damaged_line_is_named(tmp_path):
    record(tmp_path, "m/pacs", a_run(), {"training": None})
    text = text_of(tmp_path)
    for damaged in ("<<<<<<< HEAD", '{"cell": "m/pacs"', "[]"):
        write_text(tmp_path, f"{text}{damaged}\n")
        with pytest.raises(ValueError, match="records.jsonl.gz, line 4"):
            Records(tmp_path)
