"""Memory of a GPU that is occupied besides activations: training state, gathered weights, collected gradient, engine.

Sizes are in bytes on one GPU.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from . import cost
from .cost import ModelShape, TrainedBytes
from .sharding import Sharding, state_shares


# Weights -------------------------------------------------------------------------------------------------------------


class WeightBytes(NamedTuple):
    """
    Bytes on a GPU per weight.

    Attributes:
        frozen (`float`): Of a frozen weight, on average.
        trained ([`~cost.TrainedBytes`]): Of a trained weight.
        assumptions (`tuple[str]`): What is not known and how it is counted, in sentences.
    """

    frozen: float
    trained: TrainedBytes = cost.FLOAT32_ADAM
    assumptions: tuple[str, ...] = ()


_ADAM = ("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused")
_ADAM_8BIT_BNB = ("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit")
_ADAM_8BIT = (*_ADAM_8BIT_BNB, "adamw_torch_8bit")
_COUNTED_OPTIMIZERS = (*_ADAM, *_ADAM_8BIT, "paged_adamw_32bit", "sgd")


def weight_bytes(
    training: Any,
    shape: ModelShape,
    *,
    kept_bytes: int,
    has_adapter: bool,
    has_float32_copies: bool,
    quantization: Any = None,
) -> WeightBytes:
    """
    Return the bytes per weight. A trained weight has, for the weight, its gradient, and two moments,

    - 4 + 4 + 8 in float32: loaded as that, copied by FSDP or DeepSpeed, or of an adapter;
    - 2 + 2 + 4 in half precision: loaded as that without copies, or of an adapter of a quantized model;
    - 2 for the moments of 8-bit Adam in their place (bitsandbytes keeps 8 for embeddings), none for those of SGD.

    A frozen weight has `kept_bytes`. bitsandbytes quantizes the linear layers of decoder layers to 1 byte, or to 0.5
    and a constant for each block of 64: 4 / 64, or with double quantization 1 / 64 + 4 / (64 * 256).

    Args:
        kept_bytes (`int`): Of a weight that is neither trained nor quantized, see [`kept_bytes_of`].
        has_float32_copies (`bool`): Whether FSDP or DeepSpeed train float32 copies of the weights.
        quantization: Configuration of quantization of the model, or its dictionary, if there is one.
    """
    settings, assumptions = _quantization_settings(quantization), []
    is_quantized = _quantized_bytes(settings) is not None  # by bitsandbytes; TRL rounds such adapters to bfloat16
    is_float32 = has_float32_copies or (not is_quantized if has_adapter else kept_bytes == 4)
    size = 4 if is_float32 else 2
    optimizer, moments = _optimizer_name(training), _moment_bytes(training, size)
    if optimizer in _ADAM_8BIT_BNB and not has_adapter:
        moments += 6 * shape.vocabulary * shape.hidden / shape.parameters
    if optimizer not in _COUNTED_OPTIMIZERS:
        assumptions.append(f"optim: {optimizer} is counted with two moments per weight, as Adam has.")
    if settings and not is_quantized:
        method = getattr(settings.get("quant_method"), "value", settings.get("quant_method"))
        assumptions.append(f"Weights that are quantized with {method} are counted with {kept_bytes} bytes.")
    elif is_quantized and shape.counted_parameters is not None:
        assumptions.append("Quantized layers of this architecture are counted as those of a dense decoder.")
    frozen = _loaded_bytes(shape, kept_bytes, quantization)
    return WeightBytes(frozen, TrainedBytes(size, size, moments), tuple(assumptions))


def kept_bytes_of(loaded_bytes: int, sharding: Sharding, precision: str) -> int:
    """
    Return the bytes of a weight that is neither trained nor quantized: those of the dtype in which it is loaded, or of
    the passes with DeepSpeed, which casts all weights of a model.

    Args:
        loaded_bytes (`int`): Bytes of a weight in the dtype in which the model is loaded.
        precision (`str`): Of activations, see [`activation_precision`].
    """
    return bytes_in_passes(precision) if sharding.framework == "deepspeed" else loaded_bytes


def _optimizer_name(training: Any) -> str:
    return str(getattr(training.optim, "value", training.optim))


def _moment_bytes(training: Any, size: int) -> float:
    """Return the bytes of the moments of a trained weight of `size` bytes."""
    optimizer = _optimizer_name(training)
    if optimizer in _ADAM_8BIT:
        return 2.0
    if optimizer == "paged_adamw_32bit":
        return 8.0
    if optimizer == "sgd":
        return size if "momentum" in str(training.optim_args) else 0.0
    return 2.0 * size


def _loaded_bytes(shape: ModelShape, loaded_bytes: int, quantization: Any) -> float:
    """Return the bytes of a loaded weight, on average."""
    quantized_bytes = _quantized_bytes(_quantization_settings(quantization))
    if quantized_bytes is None:
        return loaded_bytes
    quantized = shape.num_layers * shape.layer_parameters
    return (quantized_bytes * quantized + loaded_bytes * (shape.parameters - quantized)) / shape.parameters


def _quantized_bytes(settings: Mapping[str, Any]) -> float | None:
    """Return the bytes of a weight of a layer that bitsandbytes quantizes; `None` for other methods, and without."""
    if settings.get("load_in_4bit"):
        return 0.5 + (1 / 64 + 4 / (64 * 256) if settings.get("bnb_4bit_use_double_quant") else 4 / 64)
    return 1.0 if settings.get("load_in_8bit") else None


def _quantization_settings(quantization: Any) -> Mapping[str, Any]:
    """Return the settings of a configuration of quantization; none for MXFP4, which is dequantized."""
    if quantization is None:
        return {}
    settings = quantization if isinstance(quantization, Mapping) else quantization.to_dict()
    is_dequantized = settings.get("dequantize") or "mxfp4" in str(settings.get("quant_method")).lower()
    return {} if is_dequantized else settings


# Training ------------------------------------------------------------------------------------------------------------


class Occupied(NamedTuple):
    """
    Bytes of a GPU that an update cannot use for activations.

    Attributes:
        state (`float`): Weights, gradients, optimizer, copies of weights, and buckets of gradients.
        gathered (`float`): The most weights that FSDP and ZeRO-3 gather at a time.
        most_are_gathered_for_kl (`bool`): Whether that is while the model of the KL term computes.
        collected (`float`): Gradients of all weights that FSDP reduces after the last micro-batch.
        engine (`float`): A colocated vLLM.
        is_asleep (`bool`): Whether the engine frees its memory during updates.
    """

    state: float
    gathered: float
    most_are_gathered_for_kl: bool
    collected: float
    engine: float
    is_asleep: bool

    @property
    def in_update(self) -> float:
        """Their sum during an update."""
        return self.state + self.gathered + self.collected + (0 if self.is_asleep else self.engine)


def _may_have_several_micro_batches(training: Any) -> bool:
    """Return whether an optimizer step of a process may have several micro-batches: by accumulation, or because
    `max_tokens_per_micro_batch` splits its completions."""
    is_split = training.max_tokens_per_micro_batch is not None and training.per_device_train_batch_size > 1
    return training.gradient_accumulation_steps > 1 or is_split


def occupied_bytes(
    training: Any,
    shape: ModelShape,
    *,
    trained: float,
    frozen: float,
    kept_bytes: int,
    weights: WeightBytes,
    has_adapter: bool,
    sharding: Sharding,
    precision: str,
    memory_bytes: float,
    critic: ModelShape | None = None,
) -> Occupied:
    """
    Return the memory of a GPU that is occupied besides activations.

    Args:
        trained, frozen (`float`): Numbers of weights; those of an adapter are `trained`.
        kept_bytes (`int`): Bytes of a weight that is neither trained nor quantized, see [`kept_bytes_of`].
        weights ([`WeightBytes`]): Bytes per weight of the policy.
        sharding ([`~sharding.Sharding`]): How processes divide the training state.
        precision (`str`): Of activations, see [`activation_precision`].
        memory_bytes (`float`): Memory of the GPU, of which a colocated vLLM has a share.
        critic ([`~cost.ModelShape`], *optional*): Another model that is trained, in float32 and with an optimizer of
            the same kind; its embedding has the moments of other weights.
    """
    shares, working_bytes = state_shares(sharding), bytes_in_passes(precision)
    state = cost.training_state_bytes(
        trained,
        frozen,
        frozen_bytes=weights.frozen,
        sharding=sharding,
        trained_bytes=weights.trained,
        working_bytes=working_bytes,
    )
    critic_weights = critic.parameters if critic else 0
    state += cost.training_state_bytes(
        critic_weights,
        0,
        frozen_bytes=4,
        sharding=sharding,
        trained_bytes=TrainedBytes(moments=_moment_bytes(training, 4)),
        working_bytes=working_bytes,
    )
    if has_snapshot_on_gpu(training):
        in_copy = working_bytes if sharding.framework == "deepspeed" else weights.trained.weight
        state += in_copy * trained * shares.frozen
    if has_kl_model(training, has_adapter=has_adapter):
        state += kept_bytes * shape.parameters * shares.frozen
    if sharding.framework == "deepspeed":
        state += working_bytes * cost.ZERO_BUCKET

    # FSDP reduces after the last micro-batch; a process that has all weights adds gradients to those that it has.
    collects = sharding.framework == "fsdp" and shares.gradients < 1 and _may_have_several_micro_batches(training)
    collected = 4.0 * (trained + critic_weights) if collects else 0.0

    models = [shape, critic] if critic else [shape]
    gathered_in_update = working_bytes * max(cost.gathered_weights(model, sharding) for model in models)
    gathered_for_kl = 0.0
    if has_kl_model(training, has_adapter=has_adapter):
        gathered_for_kl = working_bytes * cost.gathered_weights_in_kl_pass(shape, sharding)
        if training.kl_pass_precedes_update:  # when there is no gradient yet
            gathered_for_kl -= collected

    has_engine = training.use_vllm and training.vllm_mode == "colocate"
    engine = training.vllm_gpu_memory_utilization * memory_bytes if has_engine else 0.0
    return Occupied(
        state=state,
        gathered=max(gathered_in_update, gathered_for_kl),
        most_are_gathered_for_kl=gathered_for_kl > gathered_in_update,
        collected=collected,
        engine=engine,
        is_asleep=engine > 0 and training.vllm_enable_sleep_mode,
    )


def has_snapshot_on_gpu(training: Any) -> bool:
    """Return whether a copy of the trained weights is kept on the GPU, as a reference or to repeat rollouts."""
    return (training.reference == "snapshot" and not training.reference_offload) or training.keeps_generating_policy


def has_kl_model(training: Any, *, has_adapter: bool) -> bool:
    """Return whether another model is loaded for the KL penalty. With LoRA it is the policy without its adapter."""
    return training.beta != 0 and not has_adapter


def bytes_in_passes(precision: str) -> int:
    """Return the bytes of a weight or gradient in the forward and backward passes of FSDP and DeepSpeed."""
    return 4 if precision == "float32" else 2


# Engine --------------------------------------------------------------------------------------------------------------


def engine_bytes(
    training: Any, shape: ModelShape, longest: int, tensor_parallel: int, *, quantization: Any = None
) -> float:
    """
    Return the bytes that a colocated vLLM needs at least on each GPU: its part of the weights, which vLLM loads in
    half precision or in 4 bits like the trainer, and of the keys and values of one sequence of `vllm_max_model_length`
    (if it is not set, `longest`) tokens. Each GPU has whole heads of keys and values.
    """
    length = training.vllm_max_model_length or longest
    cache = shape.kv_bytes_per_token * length / min(tensor_parallel, shape.num_kv_heads)
    return engine_weights(shape, quantization).stored / tensor_parallel + cache


class EngineWeights(NamedTuple):
    """Bytes of the weights of an engine on all its GPUs, and those that a decoding step moves."""

    stored: float
    moved: float


def engine_weights(shape: ModelShape, quantization: Any = None) -> EngineWeights:
    """Return the bytes of the weights of an engine in half precision, or quantized like those of the trainer. Products
    with quantized weights read them, and write and read a copy in half precision."""
    stored = _loaded_bytes(shape, 2, quantization) * shape.parameters
    is_quantized = _quantized_bytes(_quantization_settings(quantization)) is not None
    copies = 2 * 2 * shape.num_layers * shape.layer_parameters if is_quantized else 0
    return EngineWeights(stored, stored + copies)
