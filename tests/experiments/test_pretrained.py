"""Cells of the comparison on a pretrained model."""

from dataclasses import fields
from pathlib import Path

import pytest
from trl import GRPOConfig

from experiments.paper.cells import RECIPES, Options
from experiments.paper.records import Run
from experiments.pretrained import ARMS, START, TASKS, cell_of, kind_of, report, sizes_of, support
from pacs_trl.recipe import read_recipe


RESULTS = Path(__file__).parents[2] / "docs/results/pretrained"


# Fields of TRL's configuration that may differ: what an arm is named after, what is for vLLM or for the loss alone.
OF_OBJECTIVES = {"delta", "loss_type", "vllm_importance_sampling_correction"}


@pytest.mark.parametrize("arm", [arm for arm in ARMS if arm != START])
@pytest.mark.parametrize("task", TASKS)
def test_arms_differ_only_in_their_objective(arm, task):
    """Same model, prompts, sampling, batch, schedule, and KL penalty; the settings of the given run win over the
    recipe's. The model has no dropout, LoRA has."""
    differing = OF_OBJECTIVES | ({"beta"} if "KL" in arm else set())
    differing |= {"disable_dropout"} if "LoRA" not in arm or "dropout" in arm else set()
    settings = []
    for each in ("PACS, LoRA" if "LoRA" in arm else "PACS", arm):
        cell = cell_of(task, each, 3e-5, 7)
        recipe = read_recipe(["--config", str(RECIPES / f"{cell.recipe}.yaml"), *cell.words])
        names = {field.name for field in fields(GRPOConfig)} - differing - {"output_dir"}
        settings.append((recipe.data, recipe.model, {name: getattr(recipe.training, name, None) for name in names}))
    assert settings[0] == settings[1]


@pytest.mark.parametrize(
    ("question", "answer", "kind"),
    [
        ("the (LCM) of these numbers: 8, 4", "8", "the larger number"),
        ("the (LCM) of these numbers: 10, 6", "30", "another number"),
        ("problem: 3 - 5 =", "-2", "negative"),
        ("problem: 5 - 3 =", "2", "difference"),
        ("problem: 5 + 3 =", "8", "sum"),
    ],
)
def test_each_problem_has_its_kind(question, answer, kind):
    assert kind_of({"question": question, "answer": answer}) == kind


def test_problems_gained_and_lost_equal_those_worked_by_hand():
    """Of four problems, the first two are solved before; a run solves the first and the last."""

    def run(counts, diversity):
        problems = [{"c": count} for count in counts]
        return Run(0, {"benchmarks": {"sums": {"problems": problems}}}, {"sums": diversity}, None)

    before = run([1, 2, 0, 0], {"1": 0.5})
    table = support(
        {"PACS": {0: run([8, 0, 0, 1], {"0": 0.25}), 1: run([8, 8, 8, 8], {})}, "GRPO": {0: before}}, before
    )
    assert table[-2:] == ["| PACS | 1.5 | 1.5 | 0.5 | 0.25 |", "| GRPO | 2.0 | 0.0 | 0.0 | 0.50 |"]


def test_the_page_has_the_numbers_of_the_records():
    task, checked = "", 0
    for line in (RESULTS / "README.md").read_text().partition("## Tasks of reasoning-gym")[2].splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) != 11 or not cells[3][:1].isdigit():  # rows of a trained arm
            task = cells[1].replace(" ", "_") if len(cells) == 11 and cells[1] else task
            continue
        seeds = tuple(map(int, cells[4].split(", ")))
        options = Options(seeds, None, results_dir=RESULTS, **sizes_of(task))
        row = report(options, task, {cells[2]: float(cells[3])}, 20)[-1].split(" | ")
        expected = [cell.partition(" (")[0] if len(seeds) == 1 else cell for cell in row[3:6]]
        assert (row[2], *expected, row[7]) == (cells[4], *cells[5:8], cells[9]), line
        checked += 1
    assert checked >= 15
