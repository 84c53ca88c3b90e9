"""Full-size cells: the printed lines run in a shell, and what they leave becomes records, tables and figures.

Training and evaluation are stand-ins that write what the real ones write.
"""

import json
import shlex
from pathlib import Path

import pytest
from support.finished_runs import results_of, rows_of
from support.optional_packages import matplotlib  # noqa: F401 (skips without it)

from experiments import diversity
from experiments.paper import command as paper_command
from experiments.paper.command import main
from experiments.paper.published import TABLE_1_BENCHMARKS
from experiments.paper.records import Records
from pacs_trl.evaluation.arguments import read_evaluation
from pacs_trl.evaluation.requests import Completion, Request
from pacs_trl.evaluation.store import SampleStore
from pacs_trl.plan.check import check_recipe


def printed(capsys) -> list[str]:
    return [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


class TestLines:
    @pytest.mark.parametrize("table", ["table_1", "figure_3", "v1_table_2"])
    def test_are_understood_by_the_commands_they_start(self, table, tmp_path, monkeypatch, capsys):
        main([table, "--scale", "full", "--seeds", "7", "--results_dir", str(tmp_path)])
        monkeypatch.chdir(Path(__file__).parents[2])
        for words in map(shlex.split, printed(capsys)):
            if words[0] == "accelerate":
                start = words.index("--config")
                recipe, conflicts = check_recipe(words[start + 1], words[start + 2 :], 64)
                assert conflicts == [] and recipe.training.seed == 7
                assert recipe.training.output_dir == option(words, "--output_dir")
            else:
                read, _ = read_evaluation(words[2:])
                assert read.output_dir == option(words, "--output_dir")
                if "--n" in words:
                    assert (read.n, read.ks, read.max_new_tokens) == (8, [1], 8192)


def run_stand_in(line: str) -> None:
    """Leaves what training or an evaluation with two samples and two problems per benchmark leaves."""
    words = shlex.split(line)
    output = Path(option(words, "--output_dir"))
    output.mkdir(parents=True)
    if words[0] == "accelerate":
        logs = [{"step": step, "reward": 0.5, "entropy": 1.0, "lr": 1e-6} for step in range(1, 11)]
        (output / "trainer_state.json").write_text(
            json.dumps({"log_history": [*logs, {"step": 10, "train_runtime": 5.0}]})
        )
        return
    names = {
        "recipes/evaluation/v1.yaml": ("amc_23", "aime_2024", "aime_2025"),
        "recipes/evaluation/v1_math_500.yaml": ("math_500",),
    }.get(option(words, "--config"), TABLE_1_BENCHMARKS)
    (output / "grades").mkdir()
    for name in names:
        (output / "grades" / f"{name}.json").write_text(json.dumps({"0": "11", "1": "10"}))
        with SampleStore(output / "samples" / f"{name}.jsonl", {}) as store:
            for problem in "01":
                for sample in (0, 1):
                    completion = Completion(f"{name} {problem} {sample}", 5, "stop")
                    store.append(Request(problem, sample, 0, ""), completion)
    ks = (1,) if "--k" in words else (1, 2)
    facts = ("created", "model", "prompt_digest", "engine", "hardware", "versions", "commit")
    results = results_of(dict.fromkeys(names, [2, 1]), n=2, ks=ks) | dict.fromkeys(facts, {})
    (output / "results.json").write_text(json.dumps(results))


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """The lines that were run."""
    lines = []

    def run_line(line):
        lines.append(line)
        run_stand_in(line)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(paper_command, "run_line", run_line)
    monkeypatch.setattr(diversity, "sentence_embedder", lambda name: diversity.hashing_embedder)
    return lines


class TestRecords:
    where = ("--scale", "full", "--results_dir", "results", "--work_dir", "work")

    def test_printed_commands_leave_what_tables_and_figures_need(self, stand_ins, capsys):
        arguments = ["table_3", "figure_3", "figure_5", "--cells", "qwen3-8b/pacs", "--seeds", "4", *self.where]
        main([*arguments, "--run"])
        text = capsys.readouterr().out
        (run,) = Records(Path("results")).runs("qwen3-8b/pacs", "PACS")
        assert run.seed == 4
        training = run.training
        # 320 rollout steps of four updates, saved every 20
        assert [checkpoint["step"] for checkpoint in training["checkpoints"]] == list(range(80, 1281, 80))
        assert training["checkpoints"][0]["eval_aime_2024/pass@1"] == 0.75
        assert training["log_history"][0] == {"step": 1, "reward": 0.5, "entropy": 1.0}
        assert len(training["log_history"]) == 10
        # only problem 0 has two correct completions
        assert {name: list(problems) for name, problems in run.diversity.items()} == {
            "aime_2024": ["0"],
            "aime_2025": ["0"],
        }
        assert "Seeds: Qwen3-4B GRPO 0, Qwen3-4B PACS 0, Qwen3-8B GRPO 0, Qwen3-8B PACS 1." in text
        assert Path("results/figure_5.png").is_file()
        assert rows_of(Path("results/table_3.md"))[-2]["aime_2024"] != "-"
        # one training, one evaluation, one evaluation with eight samples for each checkpoint
        smaller = [line for line in stand_ins if "--n 8 --k 1 " in line]
        assert len(stand_ins) == 18 and len(smaller) == 16
        assert "--model work/qwen3-8b/pacs/seed-4/checkpoint-80 " in smaller[0]

        main(arguments)
        assert printed(capsys) == []

    def test_the_two_evaluations_of_version_1_are_one_record(self, stand_ins, capsys):
        main(["v1_table_1", "--cells", "PACS", "--seeds", "0", *self.where, "--run"])
        (run,) = Records(Path("results")).runs("qwen2.5-3b/pacs", "PACS")
        assert sorted(run.results["benchmarks"]) == ["aime_2024", "aime_2025", "amc_23", "math_500"]
        rows = rows_of(Path("results/v1_table_1.md"))
        assert rows["math_500"][9]["k=1"].startswith("75.0 ") and "beyond_aime" not in rows
        # an unfinished evaluation is no record
        Path("results/records.jsonl.gz").unlink()
        Path("results/qwen2.5-3b/pacs/seed-0/v1/results.json").unlink()
        capsys.readouterr()
        main(["v1_table_1", "--cells", "PACS", "--seeds", "0", *self.where])
        (line,) = printed(capsys)
        assert "recipes/evaluation/v1.yaml" in line
        assert not Path("results/records.jsonl.gz").exists()
