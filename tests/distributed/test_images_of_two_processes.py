"""Two processes end with the weights of one on datasets with images, of which one process may see none in a pass."""

import pytest
import torch
from support import image_runs
from support.processes import on_two, run_and_save
from support.sharding import FSDP2_ENVIRONMENT
from support.trls_update import difference


pytestmark = [pytest.mark.distributed, pytest.mark.slow]


# transformers names a class of layers that the model does not have.
GEMMA = FSDP2_ENVIRONMENT | {"FSDP_TRANSFORMER_CLS_TO_WRAP": "Gemma3DecoderLayer,SiglipEncoderLayer"}


@pytest.mark.parametrize(
    ("method", "model_type", "mode"),
    [
        ("GRPO", "qwen2_5_vl", {}),
        ("PACS", "gemma3", {}),
        ("GRPO", "qwen2_5_vl", FSDP2_ENVIRONMENT),
        ("PACS", "gemma3", GEMMA),
    ],
    ids=["GRPO, qwen2_5_vl", "PACS, gemma3", "GRPO, qwen2_5_vl, FSDP2", "PACS, gemma3, FSDP2"],
)
def test_two_processes_end_with_the_weights_of_one(tmp_path, method, model_type, mode):
    arguments = tmp_path, method, model_type
    on_two(run_and_save, image_runs.trained_in_processes, (*arguments, 2), tmp_path, outputs=tmp_path, **mode)
    one = image_runs.trained_in_processes(tmp_path / "one", method, model_type, 1)
    for rank in range(2):
        two = torch.load(tmp_path / f"result.{rank}")
        two["after"] = {name.removeprefix("module."): weights for name, weights in two["after"].items()}
        assert difference(two["after"], one["after"], one["before"]) < 3e-5


def test_sharded_processes_generate_together(tmp_path):
    """Also where one of them has prompts without images."""
    arguments = tmp_path, "GRPO", "qwen2_5_vl", 2, False
    on_two(run_and_save, image_runs.trained_in_processes, arguments, tmp_path, outputs=tmp_path, **FSDP2_ENVIRONMENT)
    ends = [torch.load(tmp_path / f"result.{rank}") for rank in range(2)]
    for name, weights in ends[0]["after"].items():
        assert torch.equal(weights, ends[1]["after"][name]) and weights.isfinite().all()
