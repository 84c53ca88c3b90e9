"""The vLLM server of a run: its address, and the shell command that starts it."""

from typing import Any

from .rollout_config import RolloutConfig


# Of the workers of a vLLM server that shares memory with the trainer.
EXTENSION = "pacs_trl.rollouts.vllm_extension.SharedWeights"


def server_url(args: RolloutConfig) -> str:
    """Return the server URL of a run in server mode, without a trailing slash."""
    return (args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}").rstrip("/")


def serve_command(
    model: str, lora_rank: int | None = None, args: RolloutConfig | None = None, dtype: str | None = None
) -> str:
    """Return the shell command that starts a vLLM server to which TRL can send weights, or LoRA adapters; with `args`
    of a run with `rollout_schedule: continuous` one that shares memory with the trainer, and computes in `dtype`."""
    if args is not None and args.rollout_schedule == "continuous":
        return continuous_server_command(args, model, dtype or training_dtype(args, model), lora_rank)
    loading = f'vllm serve {model} --weight-transfer-config \'{{"backend": "nccl"}}\''
    if lora_rank is not None:
        loading = f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve {model} --enable-lora --max-lora-rank {lora_rank}"
    return f"VLLM_SERVER_DEV_MODE=1 {loading} --logprobs-mode processed_logprobs --max-logprobs -1"


def num_adapters(args: RolloutConfig) -> int:
    """Return how many LoRA adapters the server of a run with `rollout_schedule: continuous` generates with at the same
    time: those of the versions that may be trained, and the next one, which is loaded before the first is unloaded."""
    return args.max_staleness + 2


def continuous_server_command(args: RolloutConfig, model: str, dtype: str, lora_rank: int | None = None) -> str:
    """Return the shell command that starts the vLLM server of a run with `rollout_schedule: continuous` on the machine
    of the trainer, with the precision `dtype`, and for adapters of up to `lora_rank` instead of all weights. On CPUs
    the batch of a step must hold all completions as a whole."""
    server = f"vllm serve {model}"
    if args.use_cpu:
        slots = (args.max_staleness + 1) * args.generation_batch_size
        server = f"python -m vllm.entrypoints.openai.api_server --model {model} --max-num-seqs {slots}"
        if args.vllm_max_model_length is not None:
            tokens = slots * args.vllm_max_model_length
            server += f" --max-num-batched-tokens {tokens}"
    if args.vllm_max_model_length is not None:
        server += f" --max-model-len {args.vllm_max_model_length}"
    environment, weights = "VLLM_SERVER_DEV_MODE=1", f"--worker-extension-cls {EXTENSION}"
    if lora_rank is not None:
        environment += " VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
        weights = f"--enable-lora --max-lora-rank {lora_rank} --max-loras {num_adapters(args)}"
    return f"{environment} {server} --dtype {dtype} {weights} --logprobs-mode processed_logprobs --max-logprobs -1"


def training_dtype(args: RolloutConfig, model: Any) -> str:
    """Return the precision in which a run computes."""
    if args.bf16 or args.fp16:
        return "bfloat16" if args.bf16 else "float16"
    if isinstance(model, str):
        return str((args.model_init_kwargs or {}).get("dtype", "float32")).removeprefix("torch.")
    return str(model.dtype).removeprefix("torch.")
