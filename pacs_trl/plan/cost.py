"""Cost model: GPU memory, FLOP, and seconds from the shape of a dense model and batch sizes.

Pure functions of numbers. Memory and seconds of an update are calibrated on optimizer steps of the shape of Qwen3-1.7B
on an H200 (tests/data/gpu_steps.yaml); on those of Qwen3-4B memory is within 15 % and time within 25 %. Generation is
accurate to perhaps a factor of 1.5.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from .sharding import Sharding, state_shares


GIB = 2**30


# What the backward pass computes again: nothing, everything but attention, or whole layers.
Recomputation = Literal["none", "selective", "full"]
RECOMPUTATIONS: tuple[Recomputation, ...] = ("none", "selective", "full")  # from most memory to least

# Calibration of an update, on the shape of Qwen3-1.7B. Kernels of matrix products and of attention reach these shares
# of the data sheet's FLOP/s. Elementwise kernels move the activations of an eager layer this often in a forward pass.
_PRODUCTS_SHARE = 0.75
_ATTENTION_SHARE = {"sdpa": 0.24, "fa4": 0.43}
_EAGER_TRAFFIC, _COMPILED_TRAFFIC = 7.5, 2.5
_BUSY_SHARE = 0.95  # of the time, in which kernels run
_ATTENTION_BACKWARD = 2.5  # FlashAttention computes the products of the forward pass again
# Each micro-batch launches kernels, casts weights, and adds gradients: seconds per layer, and bytes per weight, with
# and without gradient.
_LAUNCH_SECONDS, _LAUNCH_SECONDS_FORWARD = 1.1e-3, 0.3e-3
_WEIGHT_BYTES, _WEIGHT_BYTES_FORWARD = 20, 6
# Defaults of DeepSpeed, in weights: gradients that it reduces at once, and gathered weights that ZeRO-3 may keep.
ZERO_BUCKET = 500_000_000
_ZERO_3_LIVE_WEIGHTS = 1_000_000_000
_OPTIMIZER_BYTES = 28  # read and written per trained weight: weight, gradient, two moments


class Gpu(NamedTuple):
    """Data sheet of a GPU (bytes, dense bfloat16 FLOP/s, bytes/s), the share of `bandwidth` that decoding and the
    optimizer reach, and the major compute capability."""

    name: str
    memory_bytes: float
    flops: float
    bandwidth: float
    bandwidth_share: float = 0.6
    compute_capability: int = 9


class Execution(NamedTuple):
    """
    How an update computes.

    Attributes:
        precision (`str`): `"bfloat16"` (bfloat16 weights, also those that FSDP2 and DeepSpeed gather), `"autocast"`
            (float32 weights and residual stream, bfloat16 products, whose inputs are cast once per projection), or
            `"float32"`.
        recomputation (`str`): What the backward pass computes again, one of `RECOMPUTATIONS`.
        compiled (`bool`): Whether decoder layers are compiled.
        attention (`str`): `"sdpa"` for torch's kernels, `"fa4"` for FlashAttention 4.
    """

    precision: str = "bfloat16"
    recomputation: Recomputation = "none"
    compiled: bool = False
    attention: str = "sdpa"


class Passes(NamedTuple):
    """Passes over all completions of a generation batch: those with a gradient, and forward passes without."""

    gradient: float
    forward: float

    def in_forward_passes(self, recomputation: Recomputation) -> float:
        """Return the cost in forward passes; a gradient costs 3, or 4 with recomputation."""
        return self.gradient * gradient_passes(recomputation) + self.forward


@dataclass(frozen=True)
class ModelShape:
    """Shape of a dense decoder with grouped-query attention and a gated MLP (Llama, Qwen2, Qwen3), from `config.json`;
    `qkv_bias` is Qwen2's, `qk_norm` Qwen3's. `counted_parameters` is the number of weights of another architecture,
    for which the shape stands; a token may use fewer (a mixture of experts). `has_value_head` is of models with one
    output per token in place of logits."""

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
    counted_parameters: int | None = None
    has_value_head: bool = False

    def with_value_head(self) -> "ModelShape":
        """Return the shape of the same model with one output per token in place of logits, as PPO's critic has."""
        counted = self.counted_parameters
        if counted is not None:
            logits = 0 if self.tied else self.head_parameters
            counted += self.hidden + 1 - logits
        return replace(self, counted_parameters=counted, has_value_head=True)

    @property
    def attention_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def layer_parameters(self) -> int:
        qkv = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        matrices = self.hidden * (qkv + self.attention_width) + 3 * self.hidden * self.intermediate
        return matrices + 2 * self.hidden + 2 * self.head_dim * self.qk_norm + qkv * self.qkv_bias

    @property
    def head_parameters(self) -> int:
        """The weights of the output head, which are those of the embedding if it is tied."""
        return self.hidden + 1 if self.has_value_head else self.vocabulary * self.hidden

    @property
    def active_parameters(self) -> int:
        """The weights that a token uses."""
        head = 0 if self.tied and not self.has_value_head else self.head_parameters
        return self.num_layers * self.layer_parameters + self.vocabulary * self.hidden + head + self.hidden

    @property
    def parameters(self) -> int:
        return self.active_parameters if self.counted_parameters is None else self.counted_parameters

    @property
    def stored_layer_parameters(self) -> float:
        """The weights of a layer, with experts that a token does not use."""
        return self.layer_parameters + (self.parameters - self.active_parameters) / self.num_layers

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token in bfloat16."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * 2

    def forward_flops(self, tokens: float, mean_length: float) -> float:
        """Return 2 FLOP per weight and token (without the embedding), and 4 per layer, width, and attended position:
        `mean_length / 2` on average, where `mean_length` is the mean of squared lengths over the mean length."""
        weights = self.num_layers * self.layer_parameters + self.head_parameters
        attention = 2 * self.num_layers * self.attention_width * mean_length
        return tokens * (2 * weights + attention)

    def activation_bytes(self, tokens: float, execution: Execution) -> float:
        """
        Return the bytes that a micro-batch keeps for its backward pass: everything inside all layers, or with
        recomputation the input of each layer and everything inside one; and the last norm. Inside a layer are two
        norms (input, normalized copy, and result as the input of three and two projections), queries and keys before
        and after their norm, input and output of attention, and four times the inside of the MLP. A bfloat16 norm
        computes in float32 and keeps that copy too. Compiled layers keep no intermediate results of norms and of the
        MLP's activation. Selective recomputation also keeps the output of attention and its normalizer.
        """
        stream = 2 if execution.precision == "bfloat16" else 4
        products = 4 if execution.precision == "float32" else 2
        inside_layer = self._bytes_inside_layer(execution.precision, compiled=execution.compiled)
        layers = self.num_layers * inside_layer
        if execution.recomputation != "none":
            kept = stream * self.hidden
            if execution.recomputation == "selective":
                kept += products * self.attention_width + 4 * self.num_heads
            layers = self.num_layers * kept + inside_layer
        return tokens * (layers + _NORM_BYTES[execution.precision] / 2 * self.hidden)

    def _bytes_inside_layer(self, precision: str, *, compiled: bool = False) -> float:
        """Return the bytes of one token that a layer keeps for its backward pass."""
        keys = self.num_kv_heads * self.head_dim
        stream = 2 if precision == "bfloat16" else 4
        products = 4 if precision == "float32" else 2
        attention = products * 2 * (self.attention_width + keys) + 4 * self.num_heads  # q, k, v, out, and normalizer
        if compiled:
            norms = 2 * (stream + products) * self.hidden
            head_norms = products * (self.attention_width + keys) * self.qk_norm
            return norms + attention + head_norms + 3 * products * self.intermediate
        head_norms = (4 + products) * (self.attention_width + keys) * self.qk_norm
        return _NORM_BYTES[precision] * self.hidden + attention + head_norms + 4 * products * self.intermediate

    def cast_bytes(self, execution: Execution) -> float:
        """Return the bytes of the bfloat16 copies of float32 weights that autocast makes: of all weights, or with
        recomputation of one layer and the output head."""
        if execution.precision != "autocast":
            return 0.0
        weights = float(self.parameters)
        if execution.recomputation != "none":
            weights = self.stored_layer_parameters + self.head_parameters
        return 2.0 * weights


# Bytes per number of the residual stream that the two norms of a layer keep.
_NORM_BYTES = {
    "bfloat16": 2 * (4 + 2 + 2),
    "autocast": (4 + 4 + 3 * 2) + (4 + 4 + 2 * 2),
    "float32": 2 * (4 + 4 + 4),
}


_TABLES = yaml.safe_load(Path(__file__).with_name("hardware_and_models.yaml").read_text(encoding="utf-8"))
GPUS = {key: Gpu(**entry) for key, entry in _TABLES["gpus"].items()}
KNOWN_MODELS = {name: ModelShape(**entry) for name, entry in _TABLES["models"].items()}
H200 = GPUS["h200"]


def model_shape(name: str | None) -> ModelShape | None:
    """Return the shape of a known model or of a local `config.json`; `None` if that is not a dense decoder."""
    if name is None or name in KNOWN_MODELS:
        return KNOWN_MODELS.get(name or "")
    file = Path(name).expanduser() / "config.json"
    return shape_of(json.loads(file.read_text())) if file.is_file() else None


# Model types of transformers whose layers have the matrices of Llama; Qwen2's have biases, Qwen3's norms of heads.
_DENSE_DECODERS = ("llama", "qwen2", "qwen3", "mistral", "smollm3", "granite", "phi3")


def shape_of(config: Mapping[str, Any]) -> ModelShape | None:
    """Return the shape of a model with a configuration of transformers; `None` if it is not a dense decoder."""
    if config.get("model_type") not in _DENSE_DECODERS:
        return None
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    return ModelShape(
        num_layers=config["num_hidden_layers"],
        hidden=hidden,
        intermediate=config["intermediate_size"],
        num_heads=heads,
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


class TrainedBytes(NamedTuple):
    """Bytes of a trained weight, of its gradient, and of its moments; by default float32 and 32-bit Adam."""

    weight: float = 4
    gradient: float = 4
    moments: float = 8


FLOAT32_ADAM = TrainedBytes()


def training_state_bytes(
    trained: float,
    frozen: float,
    *,
    frozen_bytes: float,
    sharding: Sharding,
    trained_bytes: TrainedBytes = FLOAT32_ADAM,
    working_bytes: int = 2,
) -> float:
    """
    Return the bytes of weights, gradients, and Adam moments on one GPU, without DeepSpeed's buckets. With float32
    weights and 32-bit Adam a trained weight has 4 for the weight, 4 for its gradient, and 8 for the moments, of which
    a process keeps its [`~sharding.state_shares`]. Other dtypes and optimizers have other `trained_bytes`. DDP adds
    buckets of gradients, DeepSpeed copies of weights and gradients with `working_bytes`.
    """
    shares = state_shares(sharding)
    weight, gradient, moments = trained_bytes
    per_weight = weight * shares.weights + gradient * shares.gradients + moments * shares.moments
    per_weight += working_bytes * (shares.working_weights + shares.working_gradients)
    if sharding.framework == "ddp":
        per_weight += gradient
    return per_weight * trained + frozen_bytes * shares.frozen * frozen


def gathered_weights(shape: ModelShape, sharding: Sharding) -> float:
    """Return the most weights of a model that a process has gathered at a time: those of two layers and the largest
    other matrix, all that FSDP keeps until the backward pass, or as many as ZeRO-3 may keep for their next use."""
    if not sharding.gathers_weights:
        return 0.0
    if sharding.keeps_gathered:
        return float(shape.parameters)
    needed = 2 * shape.stored_layer_parameters + shape.vocabulary * shape.hidden
    if sharding.framework == "deepspeed":
        return max(needed, min(shape.parameters, _ZERO_3_LIVE_WEIGHTS))
    return needed


def gathered_weights_in_kl_pass(shape: ModelShape, sharding: Sharding) -> float:
    """Return the weights that a process has gathered while it computes log-probs under the model of the KL term, if
    that is one unit of FSDP 2; else 0. It has all weights of that model twice, as they are received and as they are
    copied from there, and of the policy those that wait for its backward pass: the output head, or all."""
    if not sharding.wraps_kl_model_whole:
        return 0.0
    waiting = shape.parameters if sharding.keeps_gathered else shape.vocabulary * shape.hidden
    return 2.0 * shape.parameters + waiting


def checkpoint_bytes(
    trained: float,
    *,
    weight_bytes: int = 4,
    snapshot: bool = False,
    followed_reference: float = 0,
    row_tokens: float = 0,
) -> float:
    """Return the bytes of a checkpoint on disk: trained weights, two Adam moments in the same precision, a copy of the
    trained weights for a snapshot reference, those of a KL reference that follows the policy (`followed_reference`),
    and 13 bytes (token, mask, two log-probs) for each of the `row_tokens` of pending minibatches."""
    return weight_bytes * trained * (3 + snapshot) + followed_reference + 13 * row_tokens


def exact_passes(
    *,
    updates: int,
    iterations: int = 1,
    reference: str | None = "rollout",
    split: bool = True,
    correction: bool = False,
    kl: bool = False,
) -> Passes:
    """
    Return the passes of all exact `updates` (over all `iterations`) on a generation.

    There is a gradient per iteration. Passes without gradient: log-probs of the minibatches after the first for the
    `reference` `"rollout"` or for the vLLM mismatch `correction`; of every minibatch for a `"snapshot"` (`None`: a
    proxy without reference) and for the KL reference. If groups are `split` over micro-batches, one more pass computes
    proxies, except on the first update after a rollout with the rollout reference, where they are 0.
    """
    share = iterations / updates  # of the batch in an optimizer step
    is_reused = iterations > 1
    passes = float(iterations * kl)
    if reference == "rollout" or correction:
        passes += 1 if is_reused else 1 - share
    if reference == "snapshot":
        passes += iterations
    if split:
        passes += iterations - share if reference == "rollout" else iterations
    return Passes(iterations, passes)


def actor_critic_passes(*, updates: int, iterations: int = 1, correction: bool = False, kl: bool = False) -> Passes:
    """Return the passes of the policy in all `updates` of an actor-critic method on a generation. Passes without
    gradient: log-probs of the batch once if there are several updates or for the vLLM mismatch `correction`, and once
    under the KL reference."""
    return Passes(iterations, int(updates > 1 or correction) + int(kl))


def critic_passes(iterations: int) -> Passes:
    """Return the passes of a critic that scores tokens (PPO): it is trained like the policy, and computes values once.
    The cost of a critic that answers questions (GenAC) is not included."""
    return Passes(iterations, 1)


def gradient_passes(recomputation: Recomputation) -> int:
    """Return the cost of a forward and backward pass in forward passes."""
    return 3 if recomputation == "none" else 4


def update_seconds(
    shape: ModelShape,
    gpu: Gpu,
    execution: Execution,
    passes: Passes,
    *,
    tokens: float,
    mean_length: float,
    micro_batches: float,
) -> float:
    """
    Return the seconds of `passes` over some completions on one GPU, without the optimizer.

    Matrix products and attention are bound by FLOP/s, elementwise kernels by bandwidth; each micro-batch has a
    constant cost. Communication is not included.

    Args:
        tokens (`float`): Tokens of one pass on this GPU.
        mean_length (`float`): Mean of squared lengths over the mean length, see [`ModelShape.forward_flops`].
        micro_batches (`float`): Micro-batches of one pass on this GPU.
    """
    rate = gpu.flops * _PRODUCTS_SHARE
    layers = 2 * shape.num_layers * shape.layer_parameters * tokens / rate
    head = 2 * shape.head_parameters * tokens / rate
    pairs = 2 * shape.num_layers * shape.attention_width * mean_length * tokens
    attention = pairs / (gpu.flops * _ATTENTION_SHARE[execution.attention])
    moved = shape.num_layers * shape._bytes_inside_layer(execution.precision) * tokens
    elementwise = moved * (_COMPILED_TRAFFIC if execution.compiled else _EAGER_TRAFFIC) / gpu.bandwidth

    recomputes, recomputes_attention = execution.recomputation != "none", execution.recomputation == "full"
    gradient = (3 + recomputes) * (layers + elementwise) + 3 * head
    gradient += (1 + _ATTENTION_BACKWARD + recomputes_attention) * attention
    kernels = passes.gradient * gradient + passes.forward * (layers + elementwise + head + attention)

    launch = shape.num_layers * _LAUNCH_SECONDS + _WEIGHT_BYTES * shape.parameters / gpu.bandwidth
    launch_forward = shape.num_layers * _LAUNCH_SECONDS_FORWARD
    launch_forward += _WEIGHT_BYTES_FORWARD * shape.parameters / gpu.bandwidth
    constant = micro_batches * (passes.gradient * launch + passes.forward * launch_forward)
    return kernels / _BUSY_SHARE + constant


def optimizer_seconds(trained: float, gpu: Gpu) -> float:
    """Return the seconds in which Adam updates `trained` weights of one GPU."""
    return _OPTIMIZER_BYTES * trained / (gpu.bandwidth * gpu.bandwidth_share)


def mean_square_length(mean: float, longest: float) -> float:
    """Return the mean of squared completion lengths: 1.7197 times the squared mean, as of an exponential distribution
    truncated at `longest` with a mean of 35 % of it, and less if most completions are nearly that long."""
    return min(1.7197 * mean**2, mean * longest)


def decoding_seconds(
    shape: ModelShape,
    rows: float,
    prompt: float,
    mean: float,
    longest: int,
    *,
    weight_bytes: float,
    kv_cache_bytes: float,
    gpu: Gpu,
) -> float:
    """Return the time to generate `rows` completions on one GPU, bound by memory bandwidth. Each decoding step moves
    `weight_bytes` once and the keys and values of all sequences; a completion of length l reads its prompt l times and
    itself l / 2 times. The sequences are generated in as many waves as the KV cache requires."""
    cache_needed = rows * (prompt + mean) * shape.kv_bytes_per_token
    waves = max(1.0, cache_needed / max(kv_cache_bytes, 1.0))
    weight_reads = waves * longest * weight_bytes
    attended = prompt * mean + mean_square_length(mean, longest) / 2
    cache_reads = rows * attended * shape.kv_bytes_per_token
    return (weight_reads + cache_reads) / (gpu.bandwidth * gpu.bandwidth_share)
