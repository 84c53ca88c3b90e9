"""The watch of a vLLM server knows which weights it has."""

import pytest
from support.vllm_server import LoopbackVLLM

from pacs_trl.rollouts.server_watch import ServerWatch


def test_weights_that_did_not_arrive_are_not_taken_for_those_of_another_run():
    with LoopbackVLLM("model") as server:
        watch = ServerWatch(server.url)
        with watch.replacing(0) as name:
            server.version = name
        assert watch.check() is None
        with pytest.raises(OSError, match="no space"), watch.replacing(1):
            raise OSError("no space")
        assert watch.check() is None
        with watch.replacing(2) as name:
            server.version = "default"  # it was restarted
        assert watch.check().state == "was restarted or got weights of another run"
