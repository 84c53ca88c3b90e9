"""Cost model: GPU memory, FLOP, and hours from the shape of a dense model and batch sizes.

Pure functions of numbers, accurate to perhaps a factor of 1.5.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import yaml


GIB = 2**30


class Gpu(NamedTuple):
    """Data sheet of a GPU (bytes, dense bfloat16 FLOP/s, bytes/s), and the shares that training and decoding reach."""

    name: str
    memory_bytes: float
    flops: float
    bandwidth: float
    training_share: float = 0.35  # of `flops`
    decoding_share: float = 0.6  # of `bandwidth`


@dataclass(frozen=True)
class ModelShape:
    """Shape of a dense decoder with grouped-query attention and a gated MLP (Llama, Qwen2, Qwen3), from `config.json`;
    `qkv_bias` is Qwen2's, `qk_norm` Qwen3's."""

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
    def layer_parameters(self) -> int:
        qkv = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        matrices = self.hidden * (qkv + self.attention_width) + 3 * self.hidden * self.intermediate
        return matrices + 2 * self.hidden + 2 * self.head_dim * self.qk_norm + qkv * self.qkv_bias

    @property
    def parameters(self) -> int:
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.num_layers * self.layer_parameters + embeddings + self.hidden

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token in bfloat16."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * 2

    def forward_flops(self, tokens: float, mean_length: float) -> float:
        """Return 2 FLOP per weight and token (without the embedding), and 4 per layer, width, and attended position:
        `mean_length / 2` on average, where `mean_length` is the mean of squared lengths over the mean length."""
        weights = self.num_layers * self.layer_parameters + self.vocabulary * self.hidden
        attention = 2 * self.num_layers * self.attention_width * mean_length
        return tokens * (2 * weights + attention)

    def activation_bytes(self, tokens: int, *, checkpointing: bool, precision: str = "bfloat16") -> float:
        """
        Return the bytes that a micro-batch keeps for its backward pass: everything inside all layers, or with gradient
        checkpointing the input of each layer and everything inside one; and the last norm. Inside a layer are two
        norms (input, normalized copy, and result as the input of three and two projections), queries and keys before
        and after their norm, input and output of attention, and four times the inside of the MLP. A bfloat16 norm
        computes in float32 and keeps that copy too. `precision` is `"bfloat16"` (bfloat16 weights, also those that
        FSDP2 and DeepSpeed gather), `"autocast"` (float32 weights and residual stream, bfloat16 products, whose inputs
        are cast once per projection), or `"float32"`.
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
        inside_layer += head_norms * (self.attention_width + keys) * self.qk_norm
        layers = self.num_layers * inside_layer
        if checkpointing:
            layers = self.num_layers * stream * self.hidden + inside_layer
        return tokens * (layers + norms / 2 * self.hidden)  # and the last norm


_TABLES = yaml.safe_load(Path(__file__).with_name("hardware_and_models.yaml").read_text(encoding="utf-8"))
GPUS = {key: Gpu(**entry) for key, entry in _TABLES["gpus"].items()}
KNOWN_MODELS = {name: ModelShape(**entry) for name, entry in _TABLES["models"].items()}
H200 = GPUS["h200"]


def model_shape(name: str | None) -> ModelShape | None:
    """Return the shape of a known model or of a local `config.json`; `None` if that is not a dense decoder."""
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


def lora_parameters(shape: ModelShape, rank: int) -> int:
    """Return the number of LoRA parameters if all linear layers have an adapter; with fewer targets it is smaller."""
    hidden, attention, keys = shape.hidden, shape.attention_width, shape.num_kv_heads * shape.head_dim
    widths = 2 * (hidden + attention) + 2 * (hidden + keys) + 3 * (hidden + shape.intermediate)
    return rank * shape.num_layers * widths


def training_state_bytes(trained: float, frozen: float, *, frozen_bytes: int, sharding: str, processes: int) -> float:
    """Return the bytes of weights, gradients, and Adam moments on one GPU: 16 per trained weight (float32 weight,
    gradient, two moments). `"full"` sharding (FSDP, ZeRO-3) divides it by `processes`; `"gradients"` (ZeRO-2) adds a
    bfloat16 copy of the weights and shards the rest; `"none"` adds the bfloat16 copy of autocast."""
    if sharding == "full":
        return (16 * trained + frozen_bytes * frozen) / processes
    if sharding == "gradients":
        return 2 * trained + frozen_bytes * frozen + 16 * trained / processes
    return 18 * trained + frozen_bytes * frozen


def checkpoint_bytes(trained: float, *, weight_bytes: int = 4, snapshot: bool = False, row_tokens: float = 0) -> float:
    """Return the bytes of a checkpoint on disk: trained weights, two Adam moments in the same precision, a copy of the
    trained weights for a snapshot reference, and 13 bytes (token, mask, two log-probs) for each of the `row_tokens`
    of pending minibatches."""
    return weight_bytes * trained * (3 + snapshot) + 13 * row_tokens


def exact_forward_equivalents(
    *,
    checkpointing: bool,
    updates: int,
    iterations: int = 1,
    reference: str | None = "rollout",
    split: bool = True,
    correction: bool = False,
    kl: bool = False,
) -> float:
    """
    Return the cost of all exact `updates` (over all `iterations`) on a generation, in forward passes over it.

    A gradient costs 3 per iteration, 4 with gradient checkpointing. Passes without gradient: log-probs of the
    minibatches after the first for the `reference` `"rollout"` or for the vLLM mismatch `correction`; of every
    minibatch for a `"snapshot"` (`None`: a proxy without reference) and for the KL reference. If groups are `split`
    over micro-batches, one more pass computes proxies, except on the first update after a rollout with the rollout
    reference, where they are 0.
    """
    share = iterations / updates  # of the batch in an optimizer step
    is_reused = iterations > 1
    passes = iterations * _gradient_passes(checkpointing) + float(iterations * kl)
    if reference == "rollout" or correction:
        passes += 1 if is_reused else 1 - share
    if reference == "snapshot":
        passes += iterations
    if split:
        passes += iterations - share if reference == "rollout" else iterations
    return passes


def actor_critic_forward_equivalents(
    *,
    checkpointing: bool,
    updates: int,
    iterations: int = 1,
    critic_scores_tokens: bool = True,
    correction: bool = False,
    kl: bool = False,
) -> float:
    """
    Return the cost of all `updates` of an actor-critic method on a generation, in forward passes over it.

    Passes without gradient: log-probs of the batch once if there are several updates or for the vLLM mismatch
    `correction`, and once under the KL reference. A critic that scores tokens (PPO) doubles the gradient and computes
    values once; the cost of a critic that answers questions (GenAC) is not included.
    """
    passes = iterations * _gradient_passes(checkpointing)
    if critic_scores_tokens:
        passes = 2 * passes + 1
    return passes + int(updates > 1 or correction) + int(kl)


def _gradient_passes(checkpointing: bool) -> int:
    """Return the cost of a forward and backward pass in forward passes."""
    return 4 if checkpointing else 3


def mean_square_length(mean: float, longest: float) -> float:
    """Return the mean of squared completion lengths: 1.7197 times the squared mean, as of an exponential distribution
    truncated at `longest` with a mean of 35 % of it, and less if most completions are nearly that long."""
    return min(1.7197 * mean**2, mean * longest)


def decoding_seconds(
    shape: ModelShape, rows: float, prompt: float, mean: float, longest: int, *, kv_cache_bytes: float, gpu: Gpu
) -> float:
    """Return the time to generate `rows` completions on one GPU, bound by memory bandwidth. Each decoding step reads
    the bfloat16 weights once and the keys and values of all sequences; a completion of length l reads its prompt l
    times and itself l / 2 times. The sequences are generated in as many waves as the KV cache requires."""
    cache_needed = rows * (prompt + mean) * shape.kv_bytes_per_token
    waves = max(1.0, cache_needed / max(kv_cache_bytes, 1.0))
    weight_reads = waves * longest * 2 * shape.parameters
    attended = prompt * mean + mean_square_length(mean, longest) / 2
    cache_reads = rows * attended * shape.kv_bytes_per_token
    return (weight_reads + cache_reads) / (gpu.bandwidth * gpu.decoding_share)
