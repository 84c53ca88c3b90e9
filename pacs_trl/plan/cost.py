"""What a run needs: GPU memory, floating-point operations and hours, from the shape of the model and the sizes of a step.

Estimates for planning, accurate to perhaps a factor of 1.5, from formulas that are stated where they are used. Pure
functions of numbers; nothing is loaded. Mixture-of-experts models are left out.
"""

import json
import math
import re
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
    A dense decoder with grouped-query attention and a gated MLP (Llama, Qwen2, Qwen3), with the numbers of its `config.json`.

    `tied`: input embedding and output head are one matrix. `qkv_bias`: query, key and value projections have a bias (Qwen2).
    `qk_norm`: queries and keys are normalized per head (Qwen3).
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
        causal attention has `mean_length / 2` on average over tokens: of rows of unequal length, the mean of their squares
        over their mean."""
        weights = self.num_layers * self.layer_parameters + self.vocabulary * self.hidden
        attention = 2 * self.num_layers * self.attention_width * mean_length
        return tokens * (2 * weights + attention)

    def activation_bytes(self, tokens: int, *, checkpointing: bool, precision: str = "bfloat16") -> float:
        """
        What a micro-batch keeps for its backward pass: with gradient checkpointing the input of each layer, and everything
        inside one; without it, everything inside all of them; and the last norm.

        Of a layer that is the two norms (input, its normalized copy, and the result as the input of three and of two
        projections), queries and keys before and after their norm, what attention reads and returns, and four times the
        inside of the MLP. A norm of bfloat16 numbers computes in float32 and keeps that copy as well.

        `precision` is `"bfloat16"` (weights in bfloat16, also those that FSDP2 and DeepSpeed gather), `"autocast"` (float32
        weights and stream, bfloat16 products, whose inputs are cast once for each projection) or `"float32"`.
        """
        # bytes per number: of the stream between layers, around norms of the stream, of q/k norms, of matrix products
        stream, norms, head_norms, products = {
            "bfloat16": (2, 2 * (4 + 2 + 2), 4 + 2, 2),
            "autocast": (4, (4 + 4 + 3 * 2) + (4 + 4 + 2 * 2), 4 + 2, 2),
            "float32": (4, 2 * (4 + 4 + 4), 4 + 4, 4),
        }[precision]
        keys = self.num_kv_heads * self.head_dim
        inside_layer = (
            norms * self.hidden
            + products * (2 * self.attention_width + 2 * keys + 4 * self.intermediate)  # q, k, v, attended; MLP
            + 4 * self.num_heads  # the normalizer of attention
        )
        if self.qk_norm:
            inside_layer += head_norms * (self.attention_width + keys)
        last_norm = norms / 2 * self.hidden
        layers = self.num_layers * inside_layer
        if checkpointing:
            layers = self.num_layers * stream * self.hidden + inside_layer
        return tokens * (layers + last_norm)


# layers, hidden, intermediate, heads, key-value heads, head size, vocabulary
KNOWN_MODELS = {
    "Qwen/Qwen3-0.6B": ModelShape(28, 1024, 3072, 16, 8, 128, 151936, tied=True, qk_norm=True),
    "Qwen/Qwen3-1.7B": ModelShape(28, 2048, 6144, 16, 8, 128, 151936, tied=True, qk_norm=True),
    "Qwen/Qwen3-4B": ModelShape(36, 2560, 9728, 32, 8, 128, 151936, tied=True, qk_norm=True),
    "Qwen/Qwen3-8B": ModelShape(36, 4096, 12288, 32, 8, 128, 151936, tied=False, qk_norm=True),
    "Qwen/Qwen2.5-3B": ModelShape(36, 2048, 11008, 16, 2, 128, 151936, tied=True, qkv_bias=True),
    "Qwen/Qwen2.5-7B": ModelShape(28, 3584, 18944, 28, 4, 128, 152064, tied=False, qkv_bias=True),
}


def model_shape(name: str | None) -> ModelShape | None:
    """Shape of a known model, or from the `config.json` of a local directory; `None` if that is no dense decoder."""
    if name is None or name in KNOWN_MODELS:
        return KNOWN_MODELS.get(name or "")
    file = Path(name).expanduser() / "config.json"
    config = json.loads(file.read_text()) if file.is_file() else {}
    if config.get("model_type") not in ("qwen2", "qwen3", "llama"):
        return None
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    return ModelShape(
        *(config["num_hidden_layers"], hidden, config["intermediate_size"], heads),
        num_kv_heads=config.get("num_key_value_heads", heads),
        head_dim=config.get("head_dim") or hidden // heads,
        vocabulary=config["vocab_size"],
        tied=config.get("tie_word_embeddings", False),
        qkv_bias=config["model_type"] == "qwen2",
        qk_norm=config["model_type"] == "qwen3",
    )


def lora_parameters(shape: ModelShape, rank: int, targets: str | list[str] | None) -> int:
    """Of adapters on projections of every layer, named as for peft: by a list of names, or by one text, which is
    `"all-linear"` (here also `None`), a name, or a regular expression for the full name of a module."""
    hidden, attention, mlp = shape.hidden, shape.attention_width, shape.hidden + shape.intermediate
    keys = hidden + shape.num_kv_heads * shape.head_dim
    widths = {f"mlp.{name}_proj": mlp for name in ("gate", "up", "down")}
    widths |= {f"self_attn.{name}_proj": hidden + attention for name in ("q", "o")}
    widths |= {f"self_attn.{name}_proj": keys for name in ("k", "v")}
    if targets in (None, "all-linear", ["all-linear"]):
        return shape.num_layers * rank * sum(widths.values())
    modules = {f"model.layers.{i}.{name}": width for i in range(shape.num_layers) for name, width in widths.items()}
    if not isinstance(targets, str) or targets.isidentifier():
        names = [targets] if isinstance(targets, str) else targets or []
        targets = rf".*\.({'|'.join(map(re.escape, names))})"
    try:
        return rank * sum(width for name, width in modules.items() if re.fullmatch(targets, name))
    except re.error:  # said as a conflict
        return 0


def training_state_bytes(trained: float, frozen: float, *, frozen_bytes: int, sharding: str, processes: int) -> float:
    """
    Bytes of weights, gradients and Adam moments on one GPU, for so many trained and frozen parameters.

    A trained weight takes 16 bytes: float32 weight, gradient and two moments. Sharded (`"full"`: FSDP, ZeRO-3) each GPU
    holds `1 / processes` of it. ZeRO-2 (`"gradients"`) keeps a bfloat16 copy of all weights and shards the rest.
    Unsharded training (`"none"`) adds the bfloat16 copy that autocast keeps.
    """
    if sharding == "full":
        return (16 * trained + frozen_bytes * frozen) / processes
    if sharding == "gradients":
        return 2 * trained + frozen_bytes * frozen + 16 * trained / processes
    return 18 * trained + frozen_bytes * frozen


def checkpoint_bytes(
    trained: float, frozen: float = 0, *, weight_bytes: int = 4, snapshot: bool = False, row_tokens: float = 0
) -> float:
    """
    Bytes of a checkpoint on disk, without what is small (tokenizer, states of schedules and generators).

    Weights, two moments of Adam in the same precision, another copy of what is trained for a snapshot reference, and the
    tokens of completions that have been drawn and not learned from (`row_tokens`): token, mask and two log-probabilities
    take 13 bytes. Frozen weights count if they are written; those of LoRA are not.
    """
    return weight_bytes * (trained * (3 + snapshot) + frozen) + 13 * row_tokens


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
    Cost of learning from a generation batch, in forward passes over it with a model of the policy's size, for `updates`
    optimizer steps over all `iterations`.

    An iteration takes 3 (forward, and twice that backward), 4 with gradient checkpointing. On top come passes without
    gradient:

    - GRPO and PPO score the batch once if the policy has moved on before its last update, or to correct for the mismatch
      of engine and trainer (`correction`); once more under the KL reference. PPO lets the critic do what the policy does,
      and judge the batch once.
    - PACS scores the rows of all updates but the first under the rollout policy, once, for the `reference` `"rollout"` or
      for `correction`; the rows of every update under a `"snapshot"` (`"none"`: a proxy without reference) and under the KL
      reference. If groups are `split` over micro-batches, a pass finds the proxies of each update first, unless they are
      known to be 0: on the first update after a rollout, if the rollout policy is the reference.
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


def mean_square_length(mean: float, longest: float) -> float:
    """Mean of squared completion lengths, for lengths that fall off exponentially and are cut off at `longest`: 1.7 times the
    square of a mean of 35 % of the longest, and the square itself if all are cut off."""
    if mean >= longest:
        return float(longest) ** 2
    low, high = 0.0, 1e6 * longest  # the exponential's own mean, of which cutting off takes some
    for _ in range(100):
        scale = (low + high) / 2
        low, high = (scale, high) if -scale * math.expm1(-longest / scale) < mean else (low, scale)
    ratio = longest / scale
    return 2 * scale**2 * (1 - math.exp(-ratio) * (1 + ratio))


def decoding_seconds(
    shape: ModelShape, rows: float, prompt: float, mean: float, longest: int, *, kv_cache_bytes: float, gpu: Gpu = H200
) -> float:
    """
    Time of generating `rows` completions on one GPU, bound by memory bandwidth.

    Each decoding step reads the bfloat16 weights once and the keys and values of all sequences so far. A completion of
    length l reads its prompt l times and itself l / 2 times, so squared lengths count: `waves * longest * weight bytes +
    rows * (prompt * mean length + mean squared length / 2) * KV bytes per token`, over the bandwidth reached. There are as
    many waves as the cache needs to hold all sequences.
    """
    cache_needed = rows * (prompt + mean) * shape.kv_bytes_per_token
    waves = max(1.0, cache_needed / max(kv_cache_bytes, 1.0))
    weight_reads = waves * longest * 2 * shape.parameters
    attended = prompt * mean + mean_square_length(mean, longest) / 2
    cache_reads = rows * attended * shape.kv_bytes_per_token
    return (weight_reads + cache_reads) / (gpu.bandwidth * gpu.decoding_share)
