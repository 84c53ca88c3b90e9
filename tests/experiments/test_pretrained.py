"""Cells of the comparison on a pretrained model."""

import pytest

from experiments.paper.cells import RECIPES
from experiments.pretrained import ARMS, START, TASKS, cell_of, kind_of
from pacs_trl.recipe import read_recipe


@pytest.mark.parametrize("arm", [arm for arm in ARMS if arm != START])
@pytest.mark.parametrize("task", TASKS)
def test_arms_differ_only_in_their_objective(arm, task):
    """Same model, prompts, sampling, batch, and schedule; the settings of the given run win over the recipe's."""
    shared = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations", "max_completion_length")
    shared += ("temperature", "learning_rate", "lr_scheduler_type", "max_grad_norm", "max_steps", "num_iterations")
    found = []
    for each in ("PACS, LoRA" if arm.endswith("LoRA") else "PACS", arm):
        cell = cell_of(task, each, 3e-5, 7)
        recipe = read_recipe(["--config", str(RECIPES / f"{cell.recipe}.yaml"), *cell.words])
        found.append((recipe.data, recipe.model, [getattr(recipe.training, name) for name in shared]))
    assert found[0] == found[1]


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
def test_kind_of(question, answer, kind):
    assert kind_of({"question": question, "answer": answer}) == kind
