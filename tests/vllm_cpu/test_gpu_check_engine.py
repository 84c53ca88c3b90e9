"""The pieces of the part `vllm` of `pacs-trl gpu-check`, with a real engine on the CPU."""

import pytest

from pacs_trl.gpu_check import engine
from pacs_trl.gpu_check.pieces import pieces_of
from pacs_trl.verification import Verifier


PIECES = {piece.name: piece for piece in pieces_of("cpu")}


@pytest.mark.parametrize("name", ["vllm-weights", "vllm-resume", "vllm-mismatch-float32"])
def test_piece(tmp_path, colocated, monkeypatch, name):
    monkeypatch.setattr(Verifier, "_request", Verifier._request)  # put back afterwards what the piece watches
    monkeypatch.setattr(engine, "one_engine", lambda device, dtype: None)  # that of the session is shared already
    piece = PIECES[name]
    function = getattr(engine, piece.function.partition(":")[2])
    found = function(device="cpu", directory=tmp_path, **piece.settings)
    assert all(found.bars.values()), found
