"""Cells of the comparison on a pretrained model."""

import pytest

from experiments.paper.cells import RECIPES, Options, run_cell
from experiments.pretrained import ARMS, SIZES, START, cell_of
from pacs_trl.evaluation.arguments import read_evaluation
from pacs_trl.recipe import read_recipe


@pytest.mark.parametrize("arm", [arm for arm in ARMS if arm != START])
def test_arms_differ_only_in_their_objective(arm):
    """Same model, prompts, sampling, batch, and schedule; the settings of the given run win over the recipe's."""
    shared = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations", "max_completion_length")
    shared += ("temperature", "learning_rate", "lr_scheduler_type", "max_grad_norm", "max_steps", "num_iterations")
    found = []
    for each in ("PACS", arm):
        cell = cell_of(each, 3e-5, 7)
        recipe = read_recipe(["--config", str(RECIPES / f"{cell.recipe}.yaml"), *cell.words])
        found.append((recipe.data, recipe.model, [getattr(recipe.training, name) for name in shared]))
    assert found[0] == found[1]


def test_model_before_training_is_graded_as_in_training(monkeypatch, tmp_path):
    """By the command of the evaluation recipe, and as a cell that no training has prepared."""
    words = ["--config", str(RECIPES / "evaluation/smollm2_sums.yaml"), "--model", "m", "--output_dir", "o"]
    configured = [read_evaluation(words)[1]]

    def evaluate(arguments, verifier, progress):
        raise InterruptedError(arguments.benchmarks)

    monkeypatch.setattr("pacs_trl.rewards.configure_verification", configured.append)
    monkeypatch.setattr("pacs_trl.rewards.shared_verifier", lambda: None)
    monkeypatch.setattr("pacs_trl.evaluation.run.evaluate", evaluate)
    options = Options(results_dir=tmp_path / "results", work_dir=tmp_path / "work", **SIZES)
    with pytest.raises(InterruptedError, match="miniature/questions"):
        run_cell(cell_of(START, 0, 1), 0, options)
    assert [arguments.verification_protocol for arguments in configured] == ["number", "number"]
