"""Two processes end with the weights of one on datasets with images, of which one process may see none in a pass."""

import pytest
import torch
from support import image_runs
from support.processes import on_two, run_and_save
from support.trls_update import difference


pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.mark.parametrize(
    ("method", "model_type"),
    [("GRPO", "qwen2_5_vl"), ("PACS", "gemma3")],
)
def test_two_processes_end_with_the_weights_of_one(tmp_path, method, model_type):
    arguments = tmp_path, method, model_type
    on_two(run_and_save, image_runs.trained_in_processes, (*arguments, 2), tmp_path, outputs=tmp_path)
    one = image_runs.trained_in_processes(tmp_path / "one", method, model_type, 1)
    for rank in range(2):
        two = torch.load(tmp_path / f"result.{rank}")
        two["after"] = {name.removeprefix("module."): weights for name, weights in two["after"].items()}
        assert difference(two["after"], one["after"], one["before"]) < 3e-5
