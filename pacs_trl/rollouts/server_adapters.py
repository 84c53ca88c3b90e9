"""LoRA adapters on the vLLM server of a run with continuous rollouts: one for each version of the weights.

A request names the adapter of its version, with which its completion ends, so the server is not paused when the next
one is loaded. An adapter is unloaded when no request names it anymore.
"""

import contextlib
import secrets
import shutil
import tempfile
from pathlib import Path

from trl.experimental.async_grpo.vllm_client import VLLMClient


class ServerAdapters:
    """
    Args:
        client (`VLLMClient`): Client of the server.
        parent (`str`): Folder of this run that the server can read, for the files of adapters. Those of a run that was
            killed are removed.

    Attributes:
        name (`str`): The adapter of version 3 is `NAME-v3`, as in TRL; no other run has the same name.
    """

    def __init__(self, client: VLLMClient, parent: str):
        self.name = f"pacs_trl-{secrets.token_hex(4)}"
        self._client = client
        for leftover in Path(parent).glob("vllm_adapters_*"):
            shutil.rmtree(leftover, ignore_errors=True)
        self._folder = tempfile.TemporaryDirectory(prefix="vllm_adapters_", dir=parent)
        self._loaded: list[int] = []  # versions, in ascending order
        self._unloaded: list[int] = []  # whose files are left

    def name_of(self, version: int) -> str:
        return f"{self.name}-v{version}"

    def folder_of(self, version: int) -> Path:
        """Return the folder for the files of a version."""
        return Path(self._folder.name).resolve() / self.name_of(version)

    def load(self, version: int) -> None:
        """Let the server load the files of a version."""
        self._client.load_lora_adapter(self.name_of(version), str(self.folder_of(version)))
        self._loaded.append(version)

    def unload_before(self, version: int) -> None:
        """Unload the adapters before a version, which no request names. Their files are deleted with the next call: an
        engine that still has a request which was aborted may read them."""
        for old in self._unloaded:
            shutil.rmtree(self.folder_of(old), ignore_errors=True)
        self._unloaded = [old for old in self._loaded if old < version]
        self._loaded = [kept for kept in self._loaded if kept >= version]
        for old in self._unloaded:
            self._client.unload_lora_adapter(self.name_of(old))

    def close(self) -> None:
        """Unload all adapters but the last one, with which evaluations go on to generate."""
        with contextlib.suppress(Exception):  # the server may have failed
            self.unload_before(self._loaded[-1])
