"""The pieces of `pacs-trl gpu-check` on the GPUs of this machine, each in a process of its own as the command runs them."""

import pytest
import torch

from pacs_trl.gpu_check import command, results
from pacs_trl.gpu_check.machine import lacking, machine
from pacs_trl.gpu_check.pieces import pieces_of


pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module")
def environment():
    return machine("cuda")


@pytest.mark.parametrize("piece", [p for p in pieces_of("cuda") if p.part != "soak"], ids=lambda piece: piece.name)
def test_piece(tmp_path, environment, piece):
    if why := lacking(piece.needs, environment):
        pytest.skip(why)
    assert command.run_piece(piece, tmp_path, environment, seconds=600)
    entry = results.read(tmp_path)[piece.name]
    if entry["status"] == "not possible":
        pytest.skip(entry["reason"])
    assert entry["status"] == "passed", entry["reason"]
