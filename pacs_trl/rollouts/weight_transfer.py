"""Transfer of weights to a vLLM server on the same machine through shared memory, without NCCL."""

import json
import os
from collections.abc import Iterator
from typing import Any

import torch
from huggingface_hub.utils import httpx
from trl.experimental.async_grpo.vllm_client import VLLMClient

from .server_watch import http_client


_ALIGNMENT = 64  # bytes
_TIMEOUT = 1800  # seconds of a transfer


class SharedMemoryTransfer:
    """
    TRL's `WeightTransferProtocol` for a server with the worker extension of `vllm_extension.py`: weights are written
    to a file in memory of this process, which every worker of the server reads.

    Args:
        client (`VLLMClient`): Client of the server.
    """

    def __init__(self, client: VLLMClient):
        self.client, self._http = client, http_client(client.server_url)
        self._fd: int | None = None
        self._table: list[tuple[str, str, list[int], int]] = []

    def init_weight_transfer(self) -> None:
        self._fd = os.memfd_create("pacs_trl")

    def pause(self) -> None:
        self.client.pause()

    def stage(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Write weights to the shared memory, while the server may go on to generate with earlier ones."""
        assert self._fd is not None
        self._table, end = [], 0
        for name, weight in weights:
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            data = weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            written = 0
            while written < len(data):
                written += os.pwrite(self._fd, data[written:], start + written)
            self._table.append((name, str(weight.dtype).removeprefix("torch."), list(weight.shape), start))
            end = start + len(data)

    def load(self) -> None:
        """Let all workers of the server, which is paused, load the weights that were written last."""
        arguments = [f"/proc/{os.getpid()}/fd/{self._fd}", json.dumps(self._table)]
        self._call({"method": "load_shared_weights", "args": arguments})

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.stage(iterator)
        self.load()

    def resume(self) -> None:
        self.client.resume()

    def destroy(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _call(self, body: dict[str, Any]) -> None:
        response = self._http.post("/collective_rpc", json=body, timeout=_TIMEOUT)
        if response.status_code != 200:
            message = f"POST /collective_rpc has status {response.status_code}: {response.text:.300}"
            raise httpx.HTTPStatusError(message, request=response.request, response=response)
