"""The tables of the paper as runs: every cell has its recipe at both scales, a run resumes, and the report says what
was run.

What a table shows is checked on runs made up by hand; that training and evaluation fit together, on a run of two
steps.
"""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from support.finished_runs import record, rows_of, text_of, write_text
from support.optional_packages import matplotlib  # noqa: F401 (skips without it)

from experiments.paper import cells as paper_cells
from experiments.paper import paper_figures, published
from experiments.paper.command import Options, main, read_table, run_cell, table_names
from experiments.paper.records import Cell, Records
from experiments.paper.render import TWINS, Table, write_tables


REPOSITORY = Path(__file__).parents[2]
RECIPES = REPOSITORY / "recipes"
RESULTS = REPOSITORY / "docs/results/miniature"
# Of docs/results/miniature; `make tables` goes on with the third.
RECORDED_SEEDS = (0, 1, 2)
SHORT = ["--max_steps", "2", "--warm_start_steps", "2", "--num_samples", "2", "--max_problems", "2"]

# The objective: what a twin has in common with its full-size recipe. Learning rates, sizes and lengths are its own.
OBJECTIVE = (
    *("method", "num_generations", "temperature", "beta", "weight_decay", "reward_funcs"),
    *("pacs_beta", "score_estimator", "class_weighting", "reference", "reset_optimizer_on_reference_reset"),
    *("loss_type", "epsilon", "delta", "scale_rewards", "gamma", "gae_lambda", "whiten_advantages"),
    "value_clip_range",
)


def draw_nothing(monkeypatch):
    for figure in ("pass_at_k_figure", "entropy_figure", "beta_figure"):
        monkeypatch.setattr(paper_figures, figure, lambda *args: None)


def settings_of(cell: Cell) -> dict:
    return yaml.safe_load((RECIPES / f"{cell.recipe}.yaml").read_text()) | cell.settings


class TestRecipes:
    def test_tables_figures_and_their_names(self):
        expected = [*(f"table_{n}" for n in (1, 2, 3, 6, 9)), *(f"figure_{n}" for n in (3, 4, 5, 6))]
        assert table_names("miniature") == expected
        assert table_names() == table_names("full") == [*expected, "v1_table_1", "v1_table_2"]
        others = {"table_7": "table_6", "table_8": "table_2"} | {f"table_{n}": "table_9" for n in (10, 11, 12, 13)}
        for name, file in others.items():
            assert read_table(name, "miniature") == read_table(file, "miniature")
        for argv, message in (
            (["v1_table_1"], "--scale full"),  # has no twins
            (["table_4"], "'table_4'.*table_1, table_2"),
            (["table_2", "--cells", "DPO"], "DPO.*GRPO, PACS"),
        ):
            with pytest.raises(ValueError, match=message):
                main(argv)

    @pytest.mark.parametrize(
        "run", sorted({c.run for name in table_names("miniature") for c in read_table(name, "miniature").cells})
    )
    def test_the_committed_records_were_made_with_the_present_recipes(self, run, tmp_path, monkeypatch):
        monkeypatch.setattr("experiments.miniature.warm_start.warm_start", lambda *_, **__: pytest.fail("no record"))
        monkeypatch.chdir(tmp_path)  # a missing record would begin a work directory here
        (cell, *_) = (c for n in table_names("miniature") for c in read_table(n, "miniature").cells if c.run == run)
        assert set(RECORDED_SEEDS) <= set(Records(RESULTS).seeds(run))
        for seed in RECORDED_SEEDS:
            run_cell(cell, seed, Options(results_dir=RESULTS))

    def test_the_committed_pages_are_made_of_the_committed_records(self, tmp_path, monkeypatch):
        draw_nothing(monkeypatch)
        shutil.copy(RESULTS / "records.jsonl.gz", tmp_path)
        assert main(["all", "--report_only", "--results_dir", str(tmp_path)]) == 0
        for name in table_names("miniature"):
            assert (tmp_path / f"{name}.md").read_text() == (RESULTS / f"{name}.md").read_text()

    @pytest.mark.parametrize("name", table_names("miniature"))
    def test_a_twin_has_the_objective_of_its_full_size_recipe(self, name):
        full = {cell.label: cell for cell in read_table(name, "full").cells}
        for cell in read_table(name, "miniature").cells:
            settings = [settings_of(twin) for twin in (cell, full[cell.label])]
            if not full[cell.label].recipe.startswith("evaluation/"):
                assert {k: settings[0].get(k) for k in OBJECTIVE} == {k: settings[1].get(k) for k in OBJECTIVE}, cell
                # The baselines of the miniature clip at 1.0; the authors' micro-batch, which decides the bound, has no
                # twin.
                full_norm = 1.0 if settings[1]["max_grad_norm"] == 0.125 else settings[1]["max_grad_norm"]
                assert settings[0]["max_grad_norm"] == full_norm, cell

    def test_labels_are_the_published_ones(self):
        for name in table_names():
            table = read_table(name, "full")
            if table.shows == "pass_at_k":
                blocks = [b for name in TWINS for b in published.pass_at_k_tables(table.published, name)]
                known = {method for block in blocks for method in block.values}
                # with a snapshot it is an experiment of ours, whatever the paper's row was
                assert {cell.label for cell in table.cells} - {"PACS (score grpo, snapshot)"} <= known
            assert {label for pair in table.compare for label in pair} <= {cell.label for cell in table.cells}
        assert {cell.label for cell in read_table("table_1", "full").cells} == set(published.TABLE_1)


class TestReport:
    good, bad = Cell("PACS", "miniature/m/pacs"), Cell("GRPO", "miniature/m/grpo")

    def table(self, shows, **settings):
        return Table("t", "A table", [self.good, self.bad], shows, **settings)

    def test_published_numbers_are_said_to_lie_inside_or_outside_the_interval(self, tmp_path, monkeypatch):
        draw_nothing(monkeypatch)
        # Six problems at 37.5 % on average and six at 100 %; BeyondAIME was published as 27.16 for PACS, 24.39 for
        # GRPO
        for cell, counts in ((self.good, [1, 2] * 3), (self.bad, [4] * 6)):
            record(tmp_path, cell, 0, {name: counts for name in TWINS})
        write_tables([self.table("pass_at_k", published="Qwen3-4B")], tmp_path, twins=False)
        verdicts = {row[""]: row["k=1"] for row in rows_of(tmp_path / "t.md")["beyond_aime"]}
        assert verdicts["PACS, published"] == "27.16" and verdicts["PACS, published lies"] == "inside"
        assert verdicts["GRPO, published lies"] == "outside"
        means = {row[""]: row["k=1"] for row in rows_of(tmp_path / "t.md")["Mean"]}
        assert means["PACS, published"] == "62.63"  # as in table 1

    def test_table_1_averages_benchmarks_of_any_size(self, tmp_path):
        # pass@1: 100 % on the three problems of MATH 500, 25 % on the one of each of the other four; the average is
        # (100 + 4 x 25) / 5 = 40, where the mean over the seven problems would be 57
        counts = {name: [4, 4, 4] if name == "math_500" else [1] for name in published.TABLE_1_BENCHMARKS}
        record(tmp_path, self.good, 0, counts)
        write_tables([self.table("pass_at_1")], tmp_path, twins=False)
        row = rows_of(tmp_path / "t.md")[0]
        assert row["math_500"].startswith("100.0 ") and row["average"].startswith("40.0 ")

    def test_table_1_shows_gains_over_the_seeds_of_both_and_the_models_that_the_paper_cites(self, tmp_path):
        before, after = Cell("Qwen3-8B", "m/base"), Cell("PACS-8B", "m/pacs")
        for seed, right in ((0, 3), (1, 4)):
            record(tmp_path, after, seed, {name: [right, right] for name in published.TABLE_1_BENCHMARKS})
        for seed, right in ((1, 2), (2, 0)):
            record(tmp_path, before, seed, {name: [right, right] for name in published.TABLE_1_BENCHMARKS})
        table = Table("t", "A table", [before, after], "pass_at_1", compare=[("PACS-8B", "Qwen3-8B")])
        write_tables([table], tmp_path, twins=False)
        rows = {row[""]: row for row in rows_of(tmp_path / "t.md")}
        # seed 1 is the only one that both have: 4 of 4 against 2 of 4
        assert rows["PACS-8B - Qwen3-8B"]["average"] == "50.0 [8.3, 70.1]"
        assert rows["PACS-8B - Qwen3-8B, published"]["aime_2025"] == "12.55"
        assert rows["Claude Opus 4.1, cited by the paper"]["math_500"] == "-"
        assert rows["Gemini 2.5 Pro, cited by the paper"]["average"] == "86.18"
        write_tables([table], tmp_path / "empty", twins=False)
        assert rows_of(tmp_path / "empty" / "t.md")[-5]["average"] == "-"


class TestMiniatureRuns:
    @pytest.mark.slow
    def test_the_short_form_of_all_tables_then_nothing_left_to_do(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        where = ["--results_dir", "results", "--work_dir", "work"]
        cells = "sums-0.1m/base,sums-0.1m/pacs,sums-0.1m/ppo"
        arguments = ["all", "--cells", cells, "--seeds", "0", *SHORT, *where]
        assert main(arguments) == 0
        first = capsys.readouterr().out.partition("# Table 1")[2]
        assert "Seeds: Base 1, PPO 1, GRPO 0, PACS 1, PACS without weights 0." in first
        records = Records(Path("results"))
        for run in cells.split(","):
            (recorded,) = records.runs(run, "label")
            assert recorded.seed == 0 and recorded.results["n"] == 2 and recorded.results["k"] == [1]
            assert (recorded.training is None) == (records.settings(run)["training"] is None) == run.endswith("base")
            assert (
                recorded.diversity.keys()
                == recorded.results["benchmarks"].keys()
                == {*TWINS.values(), "miniature/grouped"}
            )
        (pacs,) = records.runs("sums-0.1m/pacs", "PACS")
        assert [log["step"] for log in pacs.training["log_history"]] == [1, 2]
        assert pacs.training["checkpoints"] == [] and not list(Path("work").rglob("checkpoint-*"))
        assert records.settings("sums-0.1m/pacs")["training"]["max_steps"] == 2
        base = json.loads(Path("work/sums-0.1m/base/seed-0/evaluation/results.json").read_text())
        counts = {name: [p["c"] for p in entry["problems"]] for name, entry in base["benchmarks"].items()}
        (kept,) = records.runs("sums-0.1m/base", "Base")
        assert {name: [p["c"] for p in e["problems"]] for name, e in kept.results["benchmarks"].items()} == counts

        draw_nothing(monkeypatch)
        monkeypatch.setattr(paper_cells, "_evaluate", None)
        assert main(arguments) == 0
        assert capsys.readouterr().out.partition("# Table 1")[2] == first

        # killed between training and the end of the evaluation: neither is done again
        lines = text_of(Path("results")).splitlines(keepends=True)
        others = [line for line in lines if '"cell":"sums-0.1m/pacs"' not in line]
        assert len(others) == len(lines) - 2
        write_text(Path("results"), "".join(others))
        monkeypatch.undo()
        monkeypatch.chdir(tmp_path)
        draw_nothing(monkeypatch)
        monkeypatch.setattr("pacs_trl.train.main", None)
        before = Path("work/sums-0.1m/pacs/seed-0/evaluation/samples/miniature_terms_3.jsonl").read_text()
        assert main(arguments) == 0
        assert Path("work/sums-0.1m/pacs/seed-0/evaluation/samples/miniature_terms_3.jsonl").read_text() == before
        assert text_of(Path("results")) == "".join(lines)

    def test_a_work_directory_belongs_to_the_settings_it_was_begun_with(self, tmp_path, monkeypatch):
        def interrupted(*arguments):
            (Path("work/sums-0.1m/pacs/seed-0/model/checkpoint-1")).mkdir(parents=True, exist_ok=True)
            raise RuntimeError("killed")

        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("pacs_trl.train.main", interrupted)
        monkeypatch.setattr("experiments.miniature.warm_start.warm_start", lambda *_, **__: Path("start"))
        cell = Cell("PACS", "miniature/sums-0.1m/pacs")
        options = Options((0,), 2, 2, 2, 2, Path("results"), Path("work"))
        for _ in range(2):  # the second finds what the first has begun
            with pytest.raises(RuntimeError, match="killed"):
                run_cell(cell, 0, options)
        with pytest.raises(ValueError, match="seed-0.*training.max_steps: 2 != 3"):
            run_cell(cell, 0, options._replace(max_steps=3))
