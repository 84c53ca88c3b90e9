"""The vLLM server of a run: its address, and the shell command that starts it."""

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from .model_config import weights_dtype
from .rollout_config import RolloutConfig


# Of the workers of a vLLM server that shares memory with the trainer.
EXTENSION = "pacs_trl.rollouts.vllm_extension.SharedWeights"
DEFAULT_PORT = 8000  # of vLLM
_CPU_CACHE_GIB = 2  # of keys and values; by default vLLM for CPUs takes 92 % of the memory, which the trainer needs


def server_url(args: RolloutConfig) -> str:
    """Return the server URL of a run in server mode, without a trailing slash."""
    return (args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}").rstrip("/")


def serve_command(
    model: str,
    lora_rank: int | None = None,
    args: RolloutConfig | None = None,
    dtype: str | None = None,
    longest: int | None = None,
) -> str:
    """Return the shell command that starts a vLLM server to which TRL can send weights, or LoRA adapters; with `args`
    of a run with `rollout_schedule: continuous` one that shares memory with the trainer, and computes in `dtype`, with
    a context of the `longest` sequence."""
    if args is not None and args.rollout_schedule == "continuous":
        dtype, on_cpu = dtype or training_dtype(args, model), args.device.type == "cpu"
        return continuous_server_command(args, model, dtype, lora_rank, on_cpu=on_cpu, longest=longest)
    loading = f'vllm serve {model} --weight-transfer-config \'{{"backend": "nccl"}}\''
    if lora_rank is not None:
        loading = f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve {model} --enable-lora --max-lora-rank {lora_rank}"
    return f"VLLM_SERVER_DEV_MODE=1 {loading} --logprobs-mode processed_logprobs --max-logprobs -1"


def num_adapters(args: RolloutConfig) -> int:
    """Return how many LoRA adapters the server of a run with `rollout_schedule: continuous` generates with at the same
    time: those of the versions that may be trained, and the next one, which is loaded before the first is unloaded."""
    return args.max_staleness + 2


def continuous_server_command(
    args: RolloutConfig,
    model: str,
    dtype: str,
    lora_rank: int | None = None,
    *,
    on_cpu: bool,
    longest: int | None = None,
    gpus: Sequence[int] = (),
) -> str:
    """
    Return the shell command that starts the vLLM server of a run with `rollout_schedule: continuous` on the machine of
    the trainer.

    Args:
        dtype (`str`): Precision of the server.
        lora_rank (`int`, *optional*): Largest rank of adapters, if they are sent instead of all weights.
        on_cpu (`bool`): Whether it is vLLM for CPUs. There the batch of a step must hold all completions as a whole,
            and the server would take nearly all memory for its cache.
        longest (`int`, *optional*): Tokens of the longest prompt and a completion of it, if they are known.
        gpus (`Sequence[int]`): Those that share the model, if the server is not on a CPU; without them vLLM takes the
            first one.
    """
    context = args.vllm_max_model_length or longest
    environment, server = "VLLM_SERVER_DEV_MODE=1", f"vllm serve {model}"
    if on_cpu:
        slots = (args.max_staleness + 1) * args.generation_batch_size
        environment += f" VLLM_CPU_KVCACHE_SPACE={_CPU_CACHE_GIB}"
        server = f"python -m vllm.entrypoints.openai.api_server --model {model} --enforce-eager --max-num-seqs {slots}"
        if context is not None:
            server += f" --max-num-batched-tokens {slots * context}"
    elif gpus:
        environment = f"CUDA_VISIBLE_DEVICES={','.join(map(str, gpus))} {environment}"
        server += f" --tensor-parallel-size {len(gpus)}"
    if context is not None:
        server += f" --max-model-len {context}"
    if (port := urlsplit(server_url(args)).port) not in (None, DEFAULT_PORT):
        server += f" --port {port}"
    weights = f"--worker-extension-cls {EXTENSION}"
    if lora_rank is not None:
        environment += " VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
        weights = f"--enable-lora --max-lora-rank {lora_rank} --max-loras {num_adapters(args)}"
    return f"{environment} {server} --dtype {dtype} {weights} --logprobs-mode processed_logprobs --max-logprobs -1"


def training_dtype(args: RolloutConfig, model: Any) -> str:
    """Return the precision in which a run computes."""
    if args.bf16 or args.fp16:
        return "bfloat16" if args.bf16 else "float16"
    return weights_dtype(model, args)
