"""One process of 64 (benchmarks/one_rank.py), at a tiny shape on the CPU."""

from pathlib import Path

import pytest
import torch
from support.processes import run_and_save, start, wait_for
from support.sharding import let_accelerate_shard_on_cpu

from benchmarks.one_rank import measure
from benchmarks.recorded import build_model, shape_of


ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes/qwen3-4b/pacs.yaml"
NODES = ROOT / "recipes/accelerate_configs/fsdp2_8x8.yaml"


def first_of_64(directory: Path) -> dict:
    let_accelerate_shard_on_cpu()
    tiny = {"model_name_or_path": "tiny", "max_completion_length": 24, "bf16": False}
    return measure("cpu", RECIPE, NODES, directory, repeats=1, **tiny)


@pytest.mark.slow
def test_one_process_has_a_64th_of_the_weights_and_of_the_completions(tmp_path):
    output = tmp_path / "output"
    process = start(run_and_save, first_of_64, (tmp_path,), tmp_path, output=output)
    wait_for([process], [output])
    row = torch.load(tmp_path / "result.0", weights_only=False)
    assert row["processes"] == 64 and row["completions"] == 64 * 8 * 4
    assert row["micro-batches"] == 4 and row["of this process"] == 32
    weights = 4 * sum(p.numel() for p in build_model(shape_of("tiny"), "cpu").parameters())
    assert weights / 64 <= row["weights, GiB"] * 2**30 < 1.1 * weights / 64  # shards are padded
    assert row["s / step"] > 0 and row["peak, GiB"] > row["weights, GiB"]
