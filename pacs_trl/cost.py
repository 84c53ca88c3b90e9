"""What a run needs: GPU memory, floating-point operations and hours, from the shape of the model and the sizes of a step.

Estimates for planning, accurate to perhaps a factor of 1.5, from formulas that are stated where they are used. Pure
functions of numbers; nothing is loaded. Mixture-of-experts models are left out.
"""

import json
from dataclasses import dataclass
from pathlib import Path


GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """Data sheet of a GPU, and the shares of it that training and generation reach in practice."""

    memory_bytes: float = 141e9
    flops: float = 989e12  # bfloat16, dense
    bandwidth: float = 4.8e12  # bytes per second
    training_share: float = 0.35  # of `flops`
    decoding_share: float = 0.6  # of `bandwidth`


H200 = Gpu()


@dataclass(frozen=True)
class ModelShape:
    """
    A dense decoder with grouped-query attention and a gated MLP (Llama, Qwen2, Qwen3).

    Args:
        num_layers, hidden, intermediate, num_heads, num_kv_heads, head_dim, vocabulary (`int`):
            As in the model's `config.json`.
        tied (`bool`):
            Whether input embedding and output head are one matrix.
        qkv_bias (`bool`):
            Whether query, key and value projections have a bias (Qwen2).
        qk_norm (`bool`):
            Whether queries and keys are normalized per head (Qwen3).
    """

    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    qkv_bias: bool = False
    qk_norm: bool = False

    @property
    def attention_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def layer_parameters(self) -> int:
        matrices = self.hidden * (self.qkv_width + self.attention_width) + 3 * self.hidden * self.intermediate
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        return matrices + norms + (self.qkv_width if self.qkv_bias else 0)

    @property
    def parameters(self) -> int:
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.num_layers * self.layer_parameters + embeddings + self.hidden

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in bfloat16."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * 2

    def forward_flops(self, tokens: float, mean_length: float) -> float:
        """2 per weight and token (the embedding only looks up), and 4 per layer, width and attended position, of which
        causal attention has `mean_length / 2` on average."""
        weights = self.num_layers * self.layer_parameters + self.vocabulary * self.hidden
        attention = 2 * self.num_layers * self.attention_width * mean_length
        return tokens * (2 * weights + attention)

    def activation_bytes(self, tokens: int, *, checkpointing: bool) -> float:
        """bfloat16 activations of a micro-batch: with gradient checkpointing the input of each layer, and everything
        inside one; without it, everything inside all of them."""
        inside_layer = 2 * tokens * (4 * self.hidden + self.qkv_width + self.attention_width + 4 * self.intermediate)
        if not checkpointing:
            return self.num_layers * inside_layer
        return 2 * tokens * self.hidden * self.num_layers + inside_layer


# layers, hidden, intermediate, heads, key-value heads, head size, vocabulary
KNOWN_MODELS = {
    "Qwen/Qwen3-0.6B": ModelShape(28, 1024, 3072, 16, 8, 128, 151936, tied=True, qk_norm=True),
    "Qwen/Qwen3-1.7B": ModelShape(28, 2048, 6144, 16, 8, 128, 151936, tied=True, qk_norm=True),
    "Qwen/Qwen3-4B": ModelShape(36, 2560, 9728, 32, 8, 128, 151936, tied=True, qk_norm=True),
    "Qwen/Qwen3-8B": ModelShape(36, 4096, 12288, 32, 8, 128, 151936, tied=False, qk_norm=True),
    "Qwen/Qwen2.5-3B": ModelShape(36, 2048, 11008, 16, 2, 128, 151936, tied=True, qkv_bias=True),
    "Qwen/Qwen2.5-7B": ModelShape(28, 3584, 18944, 28, 4, 128, 152064, tied=False, qkv_bias=True),
}


def model_shape(name: str) -> ModelShape | None:
    """
    Shape of a model by its Hub id, or from the `config.json` of a local directory.

    Returns:
        [`ModelShape`], or `None` if the model is not in `KNOWN_MODELS` and not a local dense decoder.
    """
    if name in KNOWN_MODELS:
        return KNOWN_MODELS[name]
    file = Path(name).expanduser() / "config.json"
    if not file.is_file():
        return None
    config = json.loads(file.read_text())
    if config.get("model_type") not in ("qwen2", "qwen3", "llama"):
        return None
    return ModelShape(
        num_layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config.get("num_key_value_heads", config["num_attention_heads"]),
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        vocabulary=config["vocab_size"],
        tied=config.get("tie_word_embeddings", False),
        qkv_bias=config["model_type"] == "qwen2",
        qk_norm=config["model_type"] == "qwen3",
    )


def lora_parameters(shape: ModelShape, rank: int, targets: list[str]) -> int:
    """Parameters of LoRA adapters of one rank on the named projections of every layer."""
    widths = {
        "q_proj": shape.hidden + shape.attention_width,
        "k_proj": shape.hidden + shape.num_kv_heads * shape.head_dim,
        "v_proj": shape.hidden + shape.num_kv_heads * shape.head_dim,
        "o_proj": shape.attention_width + shape.hidden,
        "gate_proj": shape.hidden + shape.intermediate,
        "up_proj": shape.hidden + shape.intermediate,
        "down_proj": shape.intermediate + shape.hidden,
    }
    names = widths if targets == ["all-linear"] else targets
    return shape.num_layers * rank * sum(widths.get(name, 0) for name in names)


def training_state_bytes(trained: float, frozen: float, *, frozen_bytes: int, sharding: str, processes: int) -> float:
    """
    Weights, gradients and Adam moments on one GPU.

    A trained weight takes 16 bytes: float32 weight, gradient and two moments. Sharded (`"full"`: FSDP, ZeRO-3) each GPU
    holds `1 / processes` of it. ZeRO-2 (`"gradients"`) keeps a bfloat16 copy of all weights and shards the rest.
    Unsharded training adds the bfloat16 copy that autocast keeps.

    Args:
        trained, frozen (`float`):
            Number of parameters.
        frozen_bytes (`int`):
            Bytes per frozen parameter.
        sharding (`str`):
            `"none"`, `"gradients"` or `"full"`.
        processes (`int`):
            Processes that share the state.
    """
    if sharding == "full":
        return (16 * trained + frozen_bytes * frozen) / processes
    if sharding == "gradients":
        return 2 * trained + frozen_bytes * frozen + 16 * trained / processes
    return 18 * trained + frozen_bytes * frozen


def training_forward_equivalents(
    method: str,
    *,
    checkpointing: bool,
    updates: int,
    iterations: int = 1,
    reference: str = "rollout",
    split: bool = True,
    correction: bool = False,
    kl: bool = False,
) -> float:
    """
    Cost of learning from a generation batch, in forward passes over it with a model of the policy's size.

    An iteration takes 3 (forward, and twice that backward), 4 with gradient checkpointing. On top come passes without
    gradient:

    - GRPO and PPO score the batch once if the policy has moved on before its last update, or for `correction`; once more
      under the KL reference. PPO lets the critic do what the policy does, and judge the batch once.
    - PACS scores the rows of all updates but the first under the rollout policy, once, if that is the reference or for
      `correction`; the rows of every update under a snapshot; and the rows of every update under the KL reference. With
      `split`, a pass finds the proxies of each update first, unless they are known to be 0: on the first update after a
      rollout, if the rollout policy is the reference.

    Args:
        method (`str`):
            `"pacs"`, `"grpo"` or `"ppo"`.
        checkpointing (`bool`):
            Whether activations are computed again in the backward pass.
        updates (`int`):
            Optimizer steps per generation batch, over all iterations.
        iterations (`int`, *optional*, defaults to 1):
            How often each row is learnt from.
        reference (`str`, *optional*, defaults to `"rollout"`):
            `"rollout"`, `"snapshot"`, or `"none"` for a proxy without reference. Of PACS only.
        split (`bool`, *optional*, defaults to `True`):
            Whether groups are divided over micro-batches. Of PACS only.
        correction (`bool`, *optional*, defaults to `False`):
            Whether the mismatch between the engine and the trainer is corrected for.
        kl (`bool`, *optional*, defaults to `False`):
            Whether there is a KL term.
    """
    gradient = iterations * (4 if checkpointing else 3)
    if method != "pacs":
        scoring = int(updates > 1 or correction) + int(kl)
        return gradient + scoring if method == "grpo" else 2 * gradient + scoring + 1
    share = iterations / updates  # of the batch that an optimizer step learns from
    later_rows = 1 - share if iterations == 1 else 1
    passes = float(gradient + iterations * kl)
    if reference == "rollout" or correction:
        passes += later_rows
    if reference == "snapshot":
        passes += iterations
    if split:
        passes += iterations - share if reference == "rollout" else iterations
    return passes


def decoding_seconds(
    shape: ModelShape, rows: float, mean_length: float, longest: int, *, kv_cache_bytes: float, gpu: Gpu = H200
) -> float:
    """
    Time of generating `rows` completions on one GPU, bound by memory bandwidth.

    Each decoding step reads the bfloat16 weights once and the keys and values of all sequences so far:
    `waves * longest * weight bytes + rows * mean_length^2 / 2 * KV bytes per token`, over the bandwidth reached. There are
    as many waves as the cache needs to hold all sequences.
    """
    cache_needed = rows * mean_length * shape.kv_bytes_per_token
    waves = max(1.0, cache_needed / max(kv_cache_bytes, 1.0))
    weight_reads = waves * longest * 2 * shape.parameters
    cache_reads = rows * mean_length**2 / 2 * shape.kv_bytes_per_token
    return (weight_reads + cache_reads) / (gpu.bandwidth * gpu.decoding_share)
