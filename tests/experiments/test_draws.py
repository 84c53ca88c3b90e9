"""Experiments with later draws, and with weights and labels: their arms are legal runs at the cost that they say."""

import math
from types import SimpleNamespace

import pytest
from optional_packages import needs

from experiments import draws, guided, weights
from pacs_trl.plan.check import check_recipe


@pytest.mark.parametrize("task", draws.TASKS)
@pytest.mark.parametrize("arm", draws.ARMS)
def test_arms_cost_the_same(arm, task):
    cell = draws.cell_of(arm, task)
    recipe, conflicts = check_recipe(f"recipes/{cell.recipe}.yaml", cell.words, 1)
    assert conflicts == []
    step = recipe.step
    drawn = step.completions_per_generation
    if getattr(recipe.training, "adaptive_rollouts", None):
        drawn += recipe.training.adaptive_rollouts_budget or 768  # 32 prompts x 24
    generations = step.rollouts(recipe.training.max_steps)
    assert generations * drawn == {"refill": 15_360, "DARS, equal treatment, no budget": 34 * 1024}.get(
        arm.partition(",")[0] if "refill" in arm else arm, 23_040
    )


def test_completions_and_the_way_to_a_target():
    history = [
        {"step": 4 * i + 1, "reward": 0.1 * i, "adaptive/additional": 128, "refill/prompts": 1} for i in range(8)
    ]
    points = draws.curve([*history, {"step": 40, "train_loss": 1.0}], 256)
    assert points[0] == (1, 256 + 128 + 8, 0.0) and points[-1][1] == 8 * (256 + 128 + 8)
    # 0.2, ..., 0.6 is the first five with a mean of 0.4
    assert draws.reached(points, 0.4) == "25 / 2,744" and draws.reached(points, 0.9) == "not reached"


@pytest.mark.parametrize("arm", guided.ARMS)
def test_guided_arms(arm):
    words = ["--dataset_name", "train.jsonl", *guided.SAVED, *guided.ARMS[arm]]
    recipe, conflicts = check_recipe(str(guided.RECIPE), words, 1)
    assert conflicts == [] and recipe.run.method == ("pacs" if arm == "plain" else "guidance")


def test_backward_sums():
    """A hint is the sum itself; a warm start never sees the two belong together, nor a backward sum that reads as its
    own answer."""
    assert guided.backwards("53+79") == "97#35"
    rows = guided.sums(seed=0)
    assert {row["hint"] for row in rows[: guided.NUM_TRAINED]} == {None} and len(rows) == 2 * guided.NUM_TRAINED
    for row in rows[guided.NUM_TRAINED :]:
        first, second = row["problem"].split("#")
        assert (
            guided.backwards(row["hint"]) == row["problem"]
            and abs(int(first) + int(second) - int(row["answer"])) > guided.FAR
        )
        helped = guided.asked(row, helped=True)[-1]["content"]
        assert helped.startswith(row["problem"]) and helped.endswith(row["hint"])
    lessons = [row["prompt"][-1]["content"] for row in guided.taught(seed=0) if "#" in row["prompt"][-1]["content"]]
    assert len(lessons) == guided.NUM_TAUGHT
    together = sum(guided.backwards(text.split()[-1]) == text.split()[0] for text in lessons)
    assert together < 5  # by chance
    held = guided.held_out()
    assert len(held["forward"]) == len(held["backward"]) == guided.NUM_HELD_OUT
    assert not {row["problem"] for row in held["backward"]} & {row["problem"] for row in rows}


def test_table_of_guided_attempts():
    """Four samples: pass@1 of counts 0 and 2 is a quarter, pass@4 a half; the one that was never solved before is
    solved in 2 of 4."""
    counts = {
        "0": {guided.START: {"forward": [4, 0], "backward": [1, 0]}, "plain": {"forward": [4, 4], "backward": [0, 2]}}
    }
    *_, start, plain = guided.report(counts, 4)
    assert start == "| 0 | warm start | 50.0 | 12.5 | 50.0 | 0.0 | 0.0 |"
    assert plain == "| 0 | plain | 100.0 | 25.0 | 50.0 | 50.0 | 100.0 |"


@pytest.mark.parametrize("arm", [arm for arm in weights.ARMS if arm != "warm start"])
def test_arms_of_weights_and_labels(arm):
    method, settings = weights.ARMS[arm]
    cell = weights.cell_of(arm, method, settings, 1e-4)
    recipe, conflicts = check_recipe(f"recipes/{cell.recipe}.yaml", cell.words, 1)
    assert conflicts == []
    assert recipe.step.updates_per_generation == 4 and recipe.step.rollouts(recipe.training.max_steps) == 40
    assert len(weights.ARMS) * 3 - 3 + len(weights.METHODS) * len(weights.RATES) <= 40


@needs("matplotlib")
def test_table_of_weights_and_labels(tmp_path):
    values = {
        "PACS": {0: [20.0, 50.0, 80.0, 0.5], 1: [22.0, 52.0, 82.0, 0.7]},
        "STEER": {0: [21.0, 50.0, 80.0, 0.6], 1: [22.0, 50.0, 80.0, 0.8], 2: [23.0, 50.0, 80.0, 0.8]},
        "GRPO, 20 % flipped": {0: [10.0, 50.0, math.nan, 0.6]},
        "PACS, 20 % flipped": {0: [12.5, 50.0, 80.0, 0.6]},
    }
    found = {arm: {} for arm in weights.ARMS} | {
        arm: {seed: weights.Measured(of_seed, [of_seed[0] - 1, of_seed[0] + 1]) for seed, of_seed in runs.items()}
        for arm, runs in values.items()
    }
    lines = weights.report(found)
    # 1 and 0: mean 0.5, standard deviation 0.707, 12.71 * 0.7071 / sqrt(2) = 6.355
    assert lines[-1].endswith(
        "22.00 (21.00, 22.00, 23.00) | 50.00 (50.00, 50.00, 50.00) | 80.00 (80.00, 80.00, 80.00) | "
        "0.73 (0.60, 0.80, 0.80) | PACS: +0.50 ± 6.36 |"
    )
    assert any(
        line.startswith("| GRPO") and "PACS, 20 % flipped: -2.50 (-2.50 to -2.50, problems)" in line for line in lines
    )
    assert len(lines) == 6
    weights.draw(found, tmp_path / "weights.png")
    assert (tmp_path / "weights.png").stat().st_size > 5000


def test_flipped_verdicts():
    """The same ones for the same step, and about as many as is said."""
    state, texts = SimpleNamespace(global_step=3), [rf"\boxed{{{i % 2}}}" for i in range(400)]
    first, again = (
        weights.flipped_20(completions=texts, prompts=["q"] * 400, trainer_state=state, solution=["1"] * 400)
        for _ in range(2)
    )
    wrong = sum(label != i % 2 for i, label in enumerate(first))
    assert first == again and 50 < wrong < 110
