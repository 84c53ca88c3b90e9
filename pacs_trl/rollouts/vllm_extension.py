"""vLLM worker extension that loads weights from memory which it shares with a trainer on the same machine.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --worker-extension-cls pacs_trl.rollouts.vllm_extension.SharedWeights

The module is imported in the processes of the server, so it imports nothing of the training stack. On CPUs it keeps
vLLM from repacking the weights of linear layers: a repacked layer would keep old weights without an error.
"""

import json
from importlib.util import find_spec
from typing import Any

import torch


class SharedWeights:
    """Methods of every worker of the server, which `/collective_rpc` calls."""

    def load_shared_weights(self: Any, path: str, table: str) -> dict[str, Any]:
        """
        Load weights into the model of this worker.

        Args:
            path (`str`): File that holds the weights, such as `/proc/PID/fd/N` of the trainer.
            table (`str`): JSON list with name, dtype, shape, and first byte of each weight in the file.

        Returns:
            `dict`: The number of weights of the model that were loaded (vLLM joins some of them), as `loaded`.
        """
        entries = json.loads(table)
        dtypes = [getattr(torch, dtype) for _, dtype, _, _ in entries]
        sizes = [torch.Size(shape).numel() * dtype.itemsize for (_, _, shape, _), dtype in zip(entries, dtypes)]
        num_bytes = entries[-1][3] + sizes[-1]
        memory = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
        weights = (
            (name, memory[start : start + size].view(dtype).view(shape))
            for (name, _, shape, start), dtype, size in zip(entries, dtypes, sizes)
        )
        loaded = self.model_runner.get_model().load_weights(weights)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # copies from shared memory, which the trainer may overwrite
        return {"loaded": len(loaded or ())}


def _keep_plain_products() -> None:
    """Let layers of a CPU engine multiply with the weights that are loaded later, too."""
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    if current_platform.is_cpu():

        def multiply_plainly(layer: torch.nn.Module, remove_weight: bool) -> None:
            layer.__dict__["cpu_linear"] = torch.nn.functional.linear

        utils.dispatch_cpu_unquantized_gemm = multiply_plainly


if find_spec("vllm") is not None:  # tests load weights without it
    _keep_plain_products()
