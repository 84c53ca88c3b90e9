"""`pacs-trl report` end to end: files written, errors, no torch, deterministic figures."""

import json
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import yaml
from support.optional_packages import matplotlib  # noqa: F401 (skips without it)
from support.results_world import make_results

from pacs_trl.cli import run
from pacs_trl.evaluation.results import write_results
from pacs_trl.report import plots
from pacs_trl.report.report import build_report, training_histories


main = partial(run, "report")


@pytest.fixture
def results_factory(tmp_path):
    """Writes a document of `make_results` and returns its directory."""

    def write(method, skill, **changes):
        directory = tmp_path / f"{method}-{changes.get('seed', 0)}"
        directory.mkdir(parents=True, exist_ok=True)
        write_results(directory / "results.json", make_results(method, skill, **changes))
        return directory

    return write


def test_a_report_has_tables_curves_and_training_figures(results_factory, tmp_path, capsys):
    directories = [results_factory("Base", 0.4), results_factory("PACS", 0.5), results_factory("PACS", 0.5, seed=1)]
    runs = [f"{name}={tmp_path / f'run-{i}'}" for i, name in enumerate(("PACS", "PACS", "GRPO"))]
    constant = {"loss": 0.69, "entropy": 0.4, "completions/mean_length": 800.0, "step_time": 40.0}
    for i in range(3):
        logs = [constant | {"step": step, "reward": 0.003 * step + 0.1 * i} for step in range(5, 101, 5)]
        for step, log in ((20, []), (100, logs)):  # the last checkpoint is read
            (tmp_path / f"run-{i}/checkpoint-{step}").mkdir(parents=True)
            state = tmp_path / f"run-{i}/checkpoint-{step}/trainer_state.json"
            state.write_text(json.dumps({"log_history": log}))
    assert training_histories(runs)["PACS"][1][-1]["step"] == 100
    argv = [*map(str, directories), "--output_dir", str(tmp_path / "out")]
    assert main([*argv, "--baseline", "Base", "--training", *runs]) == 0
    written = {path.name for path in (tmp_path / "out").iterdir()}
    figures = {f"{name}.{kind}" for name in ("pass_at_k", "training") for kind in ("png", "svg")}
    assert written == {"tables.md"} | figures
    assert set(capsys.readouterr().out.split()) == {str(tmp_path / "out" / name) for name in written}
    text = (tmp_path / "out" / "tables.md").read_text()
    assert "<summary>AIME 2024</summary>" in text and "PACS - Base" in text and "temperature 0.6" in text
    assert text.count("| PACS | 128 | 2 |") == 3 and "012345678" in text


def test_one_evaluation_is_no_two_runs(results_factory, tmp_path):
    """Twice the same completions would have a standard deviation of 0 over runs."""
    directory = results_factory("PACS", 0.5)
    paths = [directory, results_factory("Base", 0.4), directory / "results.json"]
    with pytest.raises(ValueError, match=f"{directory} and {paths[2]} are one evaluation. Name it once"):
        build_report(paths, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("newest", "last_step"), [(40, 60), (60, 60), (80, 80)])
def test_an_extended_run_has_the_history_of_its_newest_checkpoint(tmp_path, newest, last_step):
    for folder, step in ((".", 60), ("checkpoint-20", 20), (f"checkpoint-{newest}", newest)):
        (tmp_path / folder).mkdir(exist_ok=True)
        state = {"global_step": step, "log_history": [{"step": step, "folder": folder}]}
        (tmp_path / folder / "trainer_state.json").write_text(json.dumps(state))
    log = training_histories([f"PACS={tmp_path}"])["PACS"][0][-1]
    assert log == {"step": last_step, "folder": "." if last_step == 60 else "checkpoint-80"}


def test_a_report_begins_with_before_and_after(results_factory, tmp_path):
    """Before is the baseline, or else the method of the first file; the mean stands above the benchmarks, and tables
    are folded."""
    files = [results_factory("mine", 0.2), results_factory("trained", 0.8)]
    for baseline in (None, "mine", "trained"):
        build_report(files, tmp_path / "out", baseline=baseline)
        text = (tmp_path / "out" / "tables.md").read_text()
        assert text.startswith(f"# Before and after\n\nBefore: {baseline or 'mine'}.")
        table = [line.split(" | ") for line in text.split("\n\n")[2].splitlines()[2:]]
        assert [row[0] for row in table[::2]] == ["| mean of 3 benchmarks", "| AIME 2024", "| AIME 2025", "| MATH 500"]
        assert [row[1] for row in table[:2]] == ["pass@1", "pass@64"]
        assert {row[2] for row in table} == ({"trained"} if baseline != "trained" else {"mine"})
        assert all(("+" in row[5]) == (baseline != "trained") for row in table[::2])
        assert text.index("![pass@k]") < text.index("<details><summary>AIME 2024</summary>")
    build_report(files[:1], tmp_path / "one")
    assert (tmp_path / "one" / "tables.md").read_text().startswith("![pass@k](pass_at_k.png)")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--training"),
        (["--training", "PACS"], "'PACS' has no method. Write METHOD=DIR"),
        (["--training", "PACS=nowhere"], "trainer_state.json"),
        *((["--training", f"PACS={name}"], f"{name}/trainer_state.json") for name in ("empty", "stepless", "broken")),
    ],
)
def test_arguments_without_results_are_refused(argv, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, log in (("empty", "{}"), ("stepless", '{"log_history": [{"reward": 0.5}]}'), ("broken", "{")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trainer_state.json").write_text(log)
    assert main([*argv, "--output_dir", "out"]) == 2
    (*_, line) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize(
    "path",
    ["method", "commit", "engine/name", "benchmarks/math_500/problems/3/ungraded", "benchmarks/math_500/mean_tokens"]
    + ["benchmarks: {}", "k: []"],
)
def test_damaged_results_are_named(results_factory, tmp_path, path, capsys):
    file = results_factory("PACS", 0.5) / "results.json"
    inner = document = json.loads(file.read_text())
    *keys, last = path.split("/")
    for key in keys:
        inner = inner[int(key) if key.isdigit() else key]
    if ":" in path:  # nothing is graded
        document |= yaml.safe_load(path)
    else:
        del inner[last]
    file.write_text(json.dumps(document))
    assert main([str(file), "--output_dir", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(file) in line and (":" in path or f"`{last}`" in line) and not (tmp_path / "out").exists()


def test_needs_neither_torch_nor_vllm_and_is_repeatable(results_factory, tmp_path):
    directory = results_factory("PACS", 0.5)
    code = (
        "import sys; from pacs_trl.report.report import main;"
        f"status = main([{str(directory)!r}, '--output_dir', {str(tmp_path / 'out')!r}]);"
        "print(status, [m for m in ('torch', 'vllm', 'transformers', 'trl', 'datasets') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert out.splitlines()[-1] == "0 []"
    again = build_report([directory], tmp_path / "again")
    assert [(tmp_path / "out" / file.name).read_bytes() for file in again] == [file.read_bytes() for file in again]


def test_a_method_looks_the_same_whichever_others_a_figure_has():
    alone, together = plots.looks(["PACS"]), plots.looks(["mine", "GRPO", "other", "warm start", "PACS"])
    assert together["PACS"] == alone["PACS"]
    assert len({str(look) for look in together.values()}) == 5
    assert plots.looks(["Base"])["Base"] == together["warm start"]


def test_axes_of_training_have_whole_steps_units_and_the_range_of_the_data(monkeypatch, tmp_path):
    figures = []
    monkeypatch.setattr(plots, "save_figure", lambda figure, path: figures.append(figure) or [path])
    logs = [{"step": i, "reward": 0.5, "completions/mean_length": 400.0 + i, "step_time": 2.0} for i in range(1, 5)]
    plots.training_figure({"PACS": [logs]}, tmp_path)
    reward, length, _ = figures[0].axes
    assert (length.get_ylabel(), length.get_xlabel()) == ("completion length (tokens)", "optimizer step")
    assert length.get_ylim()[0] > 400  # not from 0
    assert all(float(tick).is_integer() for tick in length.get_xticks())
    assert len(reward.get_lines()) == 1 and figures[0].legends[0].get_title().get_text() == ""


def test_the_legend_says_what_is_drawn():
    """Of one run there is no mean over runs; a run of up to 19 steps is not smoothed."""
    short, long = [(1, 0.5)] * 19, [(1, 0.5)] * 20
    assert plots.note_on_lines([[short], [short]]) == ""
    assert plots.note_on_lines([[short], [long]]) == plots.ONE_RUN and "runs" not in plots.ONE_RUN
    assert plots.note_on_lines([[short, short], [short]]) == plots.RUNS and "smoothed" not in plots.RUNS
    assert plots.note_on_lines([[long, long]]) == plots.RUNS + plots.SMOOTHED


def test_the_report_has_the_instruction_of_each_benchmark(results_factory, tmp_path):
    file = results_factory("PACS", 0.5) / "results.json"
    build_report([file], tmp_path / "out")
    assert "Prompts: the problem, then 'Box it.'; system turn" in (tmp_path / "out" / "tables.md").read_text()
    document = json.loads(file.read_text())
    document["benchmarks"]["aime_2024"]["instruction"] = None
    document["benchmarks"]["aime_2025"]["instruction"] = ""
    file.write_text(json.dumps(document))
    build_report([file], tmp_path / "out")
    prompts = (
        "AIME 2024: those of the data; AIME 2025: the problem; MATH 500: the problem, then 'Box it.'; system turn"
    )
    assert f"Prompts: {prompts}" in (tmp_path / "out" / "tables.md").read_text()


def test_a_step_without_a_value_leaves_no_gap_in_a_smoothed_curve():
    values = np.arange(200.0)
    expected = plots.smoothed(values)
    values[100] = np.nan
    curve = plots.smoothed(values)
    assert curve[100] == pytest.approx(100) and not np.isnan(curve).any()
    assert curve[:90] == pytest.approx(expected[:90]) and curve[111:] == pytest.approx(expected[111:])
    assert np.isnan(plots.smoothed(np.array([1.0, np.nan, 3.0]))).tolist() == [False, True, False]
