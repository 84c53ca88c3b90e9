"""The task with pictures, from the script to a run of its recipe."""

from pathlib import Path

import pytest
from support.scripted import run_recipe

from experiments import shapes


RECIPE = Path(__file__).parents[2] / "recipes" / "images" / "shapes.yaml"


def test_recipe_trains_on_what_the_script_writes(tmp_path, capsys):
    shapes.main(["--output_dir", str(tmp_path), "--num_pictures", "40", "--num_steps", "2"])
    assert "40 pictures and a model" in capsys.readouterr().out
    settings = {"recipe": RECIPE, "dataset_name": tmp_path / "train.jsonl", "eval_split_size": 8, "eval_steps": 1}
    trainer = run_recipe(tmp_path / "run", tmp_path / "model", **settings)
    assert trainer.state.global_step == 2
    assert trainer._reads_images and any("eval_reward" in entry for entry in trainer.state.log_history)


@pytest.mark.parametrize("seed", range(3))
def test_pictures_have_as_many_squares_as_they_say(seed):
    rng = shapes.np.random.default_rng(seed)
    for _ in range(20):
        image, number = shapes.picture(rng)
        bright = shapes.np.asarray(image).min(axis=2) >= 150
        assert bright.sum() == 25 * number and image.size == (28, 28)
