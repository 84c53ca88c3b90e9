"""The tables of the paper as runs: every cell has its recipe at both scales, a run resumes, and the report says what was run.

What a table shows is checked on runs made up by hand; that training and evaluation fit together, on a run of two steps.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from pacs_trl import reproduce
from pacs_trl.recipe import read_recipe
from pacs_trl.report import paper
from pacs_trl.report.reproduction import TWINS, Cell, Table, write_tables
from pacs_trl.reproduce import Options, full_commands, main, read_table, run_cell, table_names


REPOSITORY = Path(__file__).parents[1]
RECIPES = REPOSITORY / "recipes"
SHORT = ["--max_steps", "2", "--warm_start_steps", "2", "--num_samples", "2", "--max_problems", "2"]

# The objective: what a twin has in common with its full-size recipe. Learning rates, sizes and lengths are its own.
OBJECTIVE = (
    *("method", "num_generations", "temperature", "beta", "weight_decay", "max_grad_norm", "reward_funcs"),
    *("pacs_beta", "score_estimator", "class_weighting", "reference", "reset_optimizer_on_reference_reset"),
    *(
        "loss_type",
        "epsilon",
        "delta",
        "scale_rewards",
        "gamma",
        "gae_lambda",
        "whiten_advantages",
        "value_clip_range",
    ),
)


class TestRecipes:
    def test_the_tables_and_figures_of_the_paper(self):
        expected = ["table_1", "table_2", "table_3", "table_6", "table_9"]
        assert table_names() == [*expected, "figure_3", "figure_4", "figure_5", "figure_6"]

    @pytest.mark.parametrize("name", table_names())
    def test_every_cell_has_a_recipe_at_its_scale(self, name):
        for scale in ("miniature", "full"):
            table = read_table(name, scale)
            assert table.cells
            for cell in table.cells:
                assert (RECIPES / f"{cell.recipe}.yaml").is_file(), cell
                assert cell.recipe.startswith("miniature/") == (scale == "miniature")

    @pytest.mark.parametrize("name", table_names())
    def test_a_twin_has_the_objective_of_its_full_size_recipe(self, name):
        full = {cell.label: cell.recipe for cell in read_table(name, "full").cells}
        for cell in read_table(name, "miniature").cells:
            settings = [
                yaml.safe_load((RECIPES / f"{recipe}.yaml").read_text()) for recipe in (cell.recipe, full[cell.label])
            ]
            if not full[cell.label].startswith("evaluation/"):
                assert {k: settings[0].get(k) for k in OBJECTIVE} == {k: settings[1].get(k) for k in OBJECTIVE}, cell

    @pytest.mark.parametrize("path", sorted((RECIPES / "miniature").glob("twin-*/*.yaml")), ids=lambda p: p.stem)
    def test_the_batch_is_four_updates_per_generation(self, path):
        recipe = read_recipe(["--config", str(path)])
        training = recipe.training
        rows = re.findall(r"# +(?:generation|update): +(\d+) rows x 1 process x (\d) = (\d+)", path.read_text())
        size = training.per_device_train_batch_size
        assert [tuple(map(int, row)) for row in rows] == [
            (size, training.steps_per_generation, training.generation_batch_size),
            (size, training.gradient_accumulation_steps, size),
        ]
        assert training.steps_per_generation == 4 and training.gradient_accumulation_steps == 1
        assert training.max_steps % 4 == 0 and training.save_steps % 4 == 0
        assert training.output_dir == f"outputs/miniature/{path.parent.name}/{path.stem}"
        assert f"--config recipes/miniature/{path.parent.name}/{path.stem}.yaml" in path.read_text()
        assert recipe.data.dataset_name == "miniature/terms"

    def test_labels_are_the_published_ones(self):
        for name in table_names():
            table = read_table(name, "full")
            if table.shows == "pass_at_k":
                known = {
                    m for benchmark in TWINS for b in paper.published(table.published, benchmark) for m in b.values
                }
                assert {cell.label for cell in table.cells} <= known
            assert {label for pair in table.compare for label in pair} <= {cell.label for cell in table.cells}
        assert {cell.label for cell in read_table("table_1", "full").cells} == set(paper.TABLE_1)


def record(results_dir: Path, cell: Cell, seed: int, counts: dict[str, list[int]], n: int = 4, ks=(1, 2)):
    """A finished run with the given number of right completions for each problem."""
    from pacs_trl.evaluation.results import RESULTS_SCHEMA, GradedSample, summarize, write_results

    entries = {}
    for name, right in counts.items():
        samples = [
            GradedSample(str(problem), float(i < c), 5, "stop", "1")
            for problem, c in enumerate(right)
            for i in range(n)
        ]
        source = {"version": 1, "digest": "d", "num_problems": len(right)}
        summary = summarize([str(p) for p in range(len(right))], samples, ks)
        entries[name] = {"title": name, "source": source, **summary}
    results = {"schema_version": RESULTS_SCHEMA, "method": "x", "n": n, "k": list(ks), "benchmarks": entries}
    directory = cell.directory(results_dir, seed)
    directory.mkdir(parents=True)
    diversity = {name: {"0": 0.1 + 0.1 * seed, "1": 0.3} for name in counts}
    (directory / "diversity.json").write_text(json.dumps(diversity))
    logs = [{"step": step, "reward": 0.5, "entropy": 1.0 - 0.05 * step * (1 + seed)} for step in range(1, 11)]
    checkpoints = [{"step": 2, **{f"eval_{name}/pass@1": 0.5 for name in counts}}]
    training = {"log_history": logs, "checkpoints": checkpoints}
    if cell.trained:
        (directory / "training.json").write_text(json.dumps(training))
    write_results(directory / "results.json", results | {"protocol": {}})


def numbers(results_dir: Path, name: str):
    return json.loads((results_dir / f"{name}.json").read_text())


class TestReport:
    good, bad = Cell("PACS", "miniature/m/pacs"), Cell("GRPO", "miniature/m/grpo")

    def table(self, shows, **settings):
        return Table("t", "A table", [self.good, self.bad], shows, **settings)

    def fill(self, tmp_path, seeds=(0, 1)):
        for seed in seeds:
            # pass@1 of PACS is 3/4 and 1/4 + seed/2; of GRPO 1/4 and 1/4
            record(tmp_path, self.good, seed, {name: [3, 1 + 2 * seed] for name in TWINS.values()})
            record(tmp_path, self.bad, seed, {name: [1, 1] for name in TWINS.values()})

    def test_mean_and_spread_over_seeds_and_the_interval_over_problems(self, tmp_path):
        self.fill(tmp_path)
        text = write_tables([self.table("pass_at_k", published="Qwen3-4B")], tmp_path, twins=True)
        rows = numbers(tmp_path, "t")["miniature/terms_3"]
        # seeds: (3/4 + 1/4) / 2 = 50 and (3/4 + 3/4) / 2 = 75; mean 62.5, standard deviation 25 / sqrt 2 = 17.68;
        # problems, averaged over seeds: 75 and 50
        assert rows[0] == {"": "PACS", "k=1": "62.5 ± 17.7 [50.0, 75.0]", "k=2": rows[0]["k=2"]}
        assert rows[1] == {"": "PACS, published", "k=1": "94.80", "k=2": "-"}
        assert rows[2] == {"": "PACS, published lies", "k=1": "outside", "k=2": "-"}
        assert "Seeds: PACS 2, GRPO 2." in text
        assert (tmp_path / "t.png").stat().st_size > 10_000

    def test_a_published_number_inside_the_interval(self, tmp_path):
        # 25.0 and 50.0: the interval is [25, 50]; BeyondAIME was published as 27.16 for PACS, 24.39 for GRPO
        for cell in (self.good, self.bad):
            record(tmp_path, cell, 0, {name: [1, 2] for name in TWINS.values()})
        write_tables([self.table("pass_at_k", published="Qwen3-4B")], tmp_path, twins=True)
        verdicts = {row[""]: row["k=1"] for row in numbers(tmp_path, "t")["miniature/terms_7"]}
        assert verdicts["PACS, published lies"] == "inside"
        assert verdicts["GRPO, published lies"] == "outside"

    def test_differences_pair_seeds_and_say_the_direction(self, tmp_path):
        self.fill(tmp_path)
        record(tmp_path, self.good, 2, {name: [0, 0] for name in TWINS.values()})  # no partner: left out
        pairs = [("PACS", "GRPO"), ("GRPO", "PACS")]
        write_tables([self.table("pass_at_k", published="Qwen3-4B", compare=pairs)], tmp_path, twins=True)
        first, second = (r for r in numbers(tmp_path, "t")["comparisons"] if r["k"] == "1")
        # by seed 50 - 25 and 75 - 25; published: mean over the benchmarks of PACS - GRPO at k = 1
        published = np.mean([0.89, 3.50, 2.26, 5.45, 2.77])
        assert first["ours"].startswith("37.5 ± 17.7 [") and first["seeds above 0"] == "2 of 2"
        assert first["published"] == f"{published:+.1f}" and first["same direction"] == "yes"
        assert second["ours"].startswith("-37.5") and second["seeds above 0"] == "0 of 2"
        assert second["same direction"] == "yes"

    def test_seeds_that_disagree_resolve_nothing(self, tmp_path):
        for seed, (a, b) in enumerate([(4, 0), (1, 2)]):
            record(tmp_path, self.good, seed, {name: [a, a] for name in TWINS.values()})
            record(tmp_path, self.bad, seed, {name: [b, b] for name in TWINS.values()})
        write_tables([self.table("pass_at_k", published="Qwen3-4B", compare=[("PACS", "GRPO")])], tmp_path, twins=True)
        row = numbers(tmp_path, "t")["comparisons"][0]
        assert row["seeds above 0"] == "1 of 2" and row["same direction"] == "not resolved"

    def test_one_seed_is_called_one_seed(self, tmp_path):
        record(tmp_path, self.good, 5, {name: [4, 4] for name in TWINS.values()})
        record(tmp_path, self.bad, 5, {name: [1, 2] for name in TWINS.values()})
        write_tables([self.table("pass_at_k", published="Qwen3-4B", compare=[("PACS", "GRPO")])], tmp_path, twins=True)
        row = numbers(tmp_path, "t")["comparisons"][0]
        assert row["seeds above 0"] == "1 of 1" and row["same direction"] == "yes, one seed"

    def test_a_cell_without_runs_is_a_dash(self, tmp_path):
        record(tmp_path, self.good, 0, {name: [3, 2] for name in TWINS.values()})
        table = self.table("pass_at_k", published="Qwen3-4B", compare=[("PACS", "GRPO")])
        text = write_tables([table], tmp_path, twins=True)
        assert "Seeds: PACS 1, GRPO 0." in text
        rows = {row[""]: row["k=1"] for row in numbers(tmp_path, "t")["miniature/terms_3"]}
        assert rows["GRPO"] == "-" and rows["GRPO, published lies"] == "-"
        assert "±" not in rows["PACS"]
        assert numbers(tmp_path, "t")["comparisons"][0]["ours"] == "-"

    def test_diversity_entropy_and_curves(self, tmp_path):
        self.fill(tmp_path)
        tables = [self.table(shows)._replace(name=shows) for shows in ("diversity", "training", "curves", "pass_at_1")]
        write_tables(tables, tmp_path, twins=True)
        # problems 0.1 and 0.3 for seed 0, 0.2 and 0.3 for seed 1: 0.2 and 0.25
        assert numbers(tmp_path, "diversity")[0]["miniature/terms_3 (math_500)"].startswith("0.2250 ± 0.0354")
        # entropy 1 - 0.05 t for seed 0: 0.95 at the start, 0.5 at the end; 1 - 0.1 t for seed 1: 0.9 and 0
        row = numbers(tmp_path, "training")[0]
        assert row["first tenth of the steps"] == "0.925 ± 0.035" and row["last tenth"] == "0.250 ± 0.354"
        assert numbers(tmp_path, "pass_at_1")[0]["average"].startswith("62.5 ± 17.7")
        assert numbers(tmp_path, "curves")["PACS"] == [[{"step": 2, "eval_average/pass@1": 0.5}]] * 2


class TestMiniatureRuns:
    def test_the_short_form_of_all_tables_then_nothing_left_to_do(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        where = ["--results_dir", "results", "--work_dir", "work"]
        cells = "twin-4b/base,twin-4b/pacs,twin-4b/grpo,twin-4b/ppo"
        arguments = ["all", "--cells", cells, "--seeds", "0", *SHORT, *where]
        assert main(arguments) == 0
        first = capsys.readouterr().out.partition("# Table 1")[2]
        assert "Seeds: Base 1, PPO 1, GRPO 1, PACS 1, PACS without weights 0." in first
        for run in cells.split(","):
            assert sorted(p.name for p in Path("results", run, "seed-0").iterdir()) == (
                ["diversity.json", "results.json", "settings.json"] + ["training.json"] * (not run.endswith("base"))
            )
        training = json.loads(Path("results/twin-4b/pacs/seed-0/training.json").read_text())
        assert [log["step"] for log in training["log_history"]] == [1, 2]
        settings = json.loads(Path("results/twin-4b/pacs/seed-0/settings.json").read_text())
        assert settings["training"]["seed"] == 0 and settings["training"]["max_steps"] == 2
        assert [c["step"] for c in training["checkpoints"]] == [2]
        assert not list(Path("work").rglob("checkpoint-*"))
        base = json.loads(Path("results/twin-4b/base/seed-0/results.json").read_text())
        assert base["model"]["name"].startswith("arithmetic-tiny-0-") and base["n"] == 2 and base["k"] == [1]

        monkeypatch.setattr(reproduce, "_evaluate", None)
        assert main(arguments) == 0
        assert capsys.readouterr().out.partition("# Table 1")[2] == first

        for option, cell, changed in (
            ("--max_steps", "pacs", "training.max_steps"),
            ("--warm_start_steps", "base", "warm_start_steps"),
            ("--num_samples", "base", "evaluation.n"),
            ("--max_problems", "base", "evaluation.max_problems"),
        ):
            expected = f"twin-4b/{cell}/seed-0 was made with other settings than .* has now \\({changed} differ"
            with pytest.raises(ValueError, match=expected):
                main([*arguments, "--cells", f"twin-4b/{cell}", option, "3"])

        # killed between training and the end of the evaluation: neither is done again
        Path("results/twin-4b/pacs/seed-0/results.json").unlink()
        monkeypatch.undo()
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("pacs_trl.train.main", None)
        before = Path("work/twin-4b/pacs/seed-0/evaluation/samples/miniature_terms_3.jsonl").read_text()
        assert main(arguments) == 0
        assert Path("work/twin-4b/pacs/seed-0/evaluation/samples/miniature_terms_3.jsonl").read_text() == before

    def test_the_same_seed_gives_the_same_run(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        cell = Cell("PACS", "miniature/twin-4b/pacs")
        samples = []
        for name in ("first", "second"):
            options = Options((5,), 2, 2, 2, 2, Path(name, "results"), Path(name, "work"))
            run_cell(cell, 5, options)
            samples.append(
                Path(name, "work/twin-4b/pacs/seed-5/evaluation/samples/miniature_terms_5.jsonl").read_text()
            )
        assert samples[0] == samples[1]


class TestFullScale:
    def test_prints_the_commands_of_the_recipe_headers(self, tmp_path, capsys):
        arguments = [
            "table_6",
            "--scale",
            "full",
            "--cells",
            "PACS,Base",
            "--seeds",
            "7",
            "--results_dir",
            str(tmp_path),
        ]
        assert main(arguments) == 0
        lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
        assert lines[0].startswith("pacs-trl evaluate --config recipes/evaluation/v2.yaml --model Qwen/Qwen3-4B ")
        assert lines[1].startswith("accelerate launch --config_file recipes/accelerate_configs/fsdp2_8x8.yaml ")
        assert (
            "--config recipes/qwen3-4b/pacs.yaml --seed 7 --output_dir outputs/tables/full/qwen3-4b/pacs/seed-7"
            in lines[1]
        )
        assert "--model outputs/tables/full/qwen3-4b/pacs/seed-7 " in lines[2]

    def test_open_models_are_evaluated_with_their_own_recipe(self):
        cell = next(cell for cell in read_table("table_1", "full").cells if cell.label == "LIMO")
        (command,) = full_commands(cell, 0, Options())
        assert command[:4] == ["pacs-trl", "evaluate", "--config", "recipes/evaluation/table1/limo.yaml"]


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="There is no table 'table_7'; choose from table_1, table_2"):
        main(["table_7"])
    with pytest.raises(ValueError, match="There are no cells DPO here, but Base, GRPO, PACS, "):
        main(["table_2", "--cells", "DPO"])


def test_an_installation_without_recipes(tmp_path, monkeypatch):
    monkeypatch.setattr(reproduce, "TABLES", tmp_path / "recipes")
    with pytest.raises(ValueError, match="installed without them. Clone the repository.*pip install --editable"):
        main(["all"])
