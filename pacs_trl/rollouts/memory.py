"""Memory of a run on a GPU: what `gradient_checkpointing: auto` and `max_tokens_per_micro_batch: auto` become.

The choice is made before the model is loaded, from the free memory and the cost model that `pacs-trl plan` uses
(`plan/workload.py`). Checkpoints contain it, because other micro-batches round differently. `step_memory.py` lowers it
when a step runs out of memory.
"""

import copy
import logging
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from peft import LoraConfig, PeftConfig, PeftModel
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.integrations import is_deepspeed_zero3_enabled

from ..errors import UserError
from ..plan import cost
from ..plan.cost import GIB, Execution, Gpu, ModelShape, Recomputation
from ..plan.occupied import WeightBytes, kept_bytes_of, occupied_bytes, weight_bytes
from ..plan.workload import (
    UNKNOWN_LONGEST_PROMPT,
    UNKNOWN_MEAN_PROMPT,
    USABLE_SHARE,
    MemoryChoice,
    Workload,
    activation_precision,
    choice_of_unknown_model,
    choice_on_cpu,
    choose,
    chooses,
    completions_of_a_prompt,
    mean_completion,
    recomputations_of,
)
from ..update.step_sizes import BatchSizes
from .launched_sharding import check_recomputation_of_fsdp, is_sharded_by_plugin, sharding_of_launch, uses_plugin
from .model_config import Model, config_of, weights_dtype
from .rollout_config import RolloutConfig


logger = logging.getLogger(__name__)


class DeviceMemory(NamedTuple):
    """
    Memory of a device.

    Attributes:
        free, total (`int`): Bytes that no process occupies, and bytes of the device.
        name (`str`): Name of the device, as torch reports it.
    """

    free: int
    total: int
    name: str


def device_memory(device: torch.device) -> DeviceMemory | None:
    """Return the memory of the device of this process, or `None` if it is no GPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(free, total, torch.cuda.get_device_name(device))


@dataclass(frozen=True)
class MemoryPlan:
    """
    A choice, and what it was made from.

    Attributes:
        choice ([`MemoryChoice`]): Recomputation and size of micro-batches.
        workload ([`Workload`], *optional*): Work of an update; `None` on a CPU, and for models that the cost model
            does not know.
        room (`float`): Bytes for activations, the smallest number of all processes.
        recomputations (`tuple[str]`): What the settings leave open, from most memory to least.
    """

    choice: MemoryChoice
    workload: Workload | None = None
    room: float = math.inf
    recomputations: tuple[Recomputation, ...] = ()

    def fits(self, choice: MemoryChoice) -> bool:
        """Return whether another choice fits too; `True` without a workload."""
        workload = self.workload
        if workload is None:
            return True
        size = choice.max_tokens or workload.largest(workload.training.per_device_train_batch_size)
        largest_size = max(size, workload.longest)  # a smaller size is raised to the longest rollout when one comes
        return largest_size <= workload.tokens_that_fit(choice.recomputation, self.room)


def plan_memory(
    model: Model,
    args: RolloutConfig,
    peft_config: PeftConfig | None,
    longest: int | None,
    *,
    compiled: bool = False,
    quantization_config: Any = None,
) -> MemoryPlan:
    """
    Choose what the settings leave open for the device of this process, the same on all processes, which must all call
    this. Warn, and choose the least memory, if the longest completion does not fit by a count that is not certain.

    Args:
        model: The model or its name, as trainers take it.
        longest (`int`, *optional*): Tokens of the longest prompt with a completion, if they are known.
        compiled (`bool`): Whether decoder layers are compiled.
        quantization_config (*optional*): How the model is quantized when it is loaded by its name, as trainers take
            it.

    Raises:
        `ValueError`: if a completion of the largest length does not fit with the most recomputation.
    """
    memory = device_memory(args.device)
    if memory is None or not chooses(args):
        choice = choice_on_cpu(args)
        return MemoryPlan(choice, recomputations=(choice.recomputation,))
    check_recomputation_of_fsdp(args)
    config = config_of(model, args).get_text_config()
    shape = cost.shape_of(config.to_dict())
    if shape is None:
        choice = choice_of_unknown_model(args, config.model_type)
        return MemoryPlan(choice, recomputations=(choice.recomputation,))

    execution = Execution(_precision(args, model), compiled=compiled)
    workload = _workload(args, memory, execution, shape, longest)
    has_adapter = _has_adapter(model, peft_config)
    weights = _bytes_per_weight(model, args, shape, quantization_config, has_adapter=has_adapter)
    room_of_process = _room(model, args, peft_config, memory, config, shape, weights)
    room = min(gather_object([room_of_process]))
    recomputations = recomputations_of(args, has_adapter=has_adapter, is_zero3=is_deepspeed_zero3_enabled())

    fitting_choice = choose(workload, room, recomputations)
    if fitting_choice is not None:
        return MemoryPlan(fitting_choice, workload, room, recomputations)
    if not weights.assumptions:
        least_bytes = workload.activation_bytes("full", workload.longest)
        raise UserError(
            f"A completion of {workload.longest:,} tokens (prompt and max_completion_length) does not fit on the "
            f"{memory.name}, even if the backward pass computes everything again: {max(room, 0) / GIB:.1f} of "
            f"{memory.total / GIB:.1f} GiB are left, and its activations need {least_bytes / GIB:.1f}. Lower "
            "max_completion_length or vllm_gpu_memory_utilization, shard the training state "
            "(recipes/accelerate_configs/fsdp2.yaml), or train an adapter."
        )
    if args.process_index == 0:
        logger.warning(
            f"A completion of {workload.longest:,} tokens may not fit on the {memory.name}. "
            + " ".join(weights.assumptions)
        )
    max_tokens = args.max_tokens_per_micro_batch
    if isinstance(max_tokens, str):  # "auto"
        max_tokens = workload.longest
    least_choice = MemoryChoice(recomputations[-1], max_tokens, "the memory that training needs is not known")
    return MemoryPlan(least_choice, recomputations=recomputations)


def with_choice(args: RolloutConfig, choice: MemoryChoice) -> RolloutConfig:
    """Return a copy of the configuration with a choice in place of `"auto"`, as TRL and Trainer read it."""
    if not chooses(args):
        return args
    args = copy.copy(args)
    set_checkpointing(args, choice)
    args.max_tokens_per_micro_batch = choice.max_tokens
    return args


def set_checkpointing(args: RolloutConfig, choice: MemoryChoice) -> None:
    """Set whether Trainer turns gradient checkpointing on, under both of its names."""
    for name in ("gradient_checkpointing", "activation_checkpointing"):
        if name in args.__dataclass_fields__:
            setattr(args, name, choice.recomputation != "none")


# Parts of the memory ------------------------------------------------------------------------------------------------


def _workload(
    args: RolloutConfig,
    memory: DeviceMemory,
    execution: Execution,
    shape: ModelShape,
    longest: int | None,
) -> Workload:
    """Return the work of an update; `longest` is that of [`plan_memory`]."""
    completion = args.max_completion_length or 1
    longest_prompt = UNKNOWN_LONGEST_PROMPT if longest is None else max(longest - completion, 1)
    step = BatchSizes.of(args, args.world_size)
    return Workload(
        args,
        step,
        shape,
        _gpu_of(memory),
        execution,
        longest_prompt=longest_prompt,
        mean_prompt=min(UNKNOWN_MEAN_PROMPT, longest_prompt),
        mean_completion=mean_completion(completion),
        sharing=1 if args.packing == "never" else completions_of_a_prompt(step, args),
    )


def _room(
    model: Model,
    args: RolloutConfig,
    peft_config: PeftConfig | None,
    memory: DeviceMemory,
    config: PreTrainedConfig,
    shape: ModelShape,
    weights: WeightBytes,
) -> float:
    """Return the bytes that are left for activations when the model, its optimizer, and the engine are loaded."""
    kept_bytes = _kept_bytes(model, args)
    if isinstance(model, str):
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(config, trust_remote_code=args.trust_remote_code)
        parameters = list(empty.parameters())
    else:
        parameters = list(model.parameters())
    trained_parameters = [parameter for parameter in parameters if parameter.requires_grad]
    frozen_parameters = [parameter for parameter in parameters if not parameter.requires_grad]
    num_new = 0  # weights of the adapter that peft will add
    if peft_config is not None:
        trained_parameters, frozen_parameters = [], parameters
        if isinstance(peft_config, LoraConfig):
            num_new = cost.lora_parameters(shape, peft_config.r)
    num_trained = _num_weights(trained_parameters) + num_new
    num_frozen = _num_weights(frozen_parameters)
    if num_frozen > 0 and not isinstance(model, str):
        frozen_bytes = _kept_bytes_of_loaded(frozen_parameters, kept_bytes, is_cast=uses_plugin(args, "DEEPSPEED"))
        weights = weights._replace(frozen=frozen_bytes / num_frozen)

    occupied = occupied_bytes(
        args,
        shape,
        trained=num_trained,
        frozen=num_frozen,
        kept_bytes=kept_bytes,
        weights=weights,
        has_adapter=_has_adapter(model, peft_config),
        sharding=sharding_of_launch(args),
        precision=_precision(args, model),
        memory_bytes=memory.total,
    )
    # Weights that are loaded already are in `occupied`, too.
    loaded_on_device = [parameter for parameter in parameters if parameter.device.type == args.device.type != "cpu"]
    unoccupied = memory.free + _num_bytes(loaded_on_device)
    reserve = (1 - USABLE_SHARE) * memory.total
    return unoccupied - reserve - occupied.in_update


def _num_weights(parameters: list[torch.nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _num_bytes(parameters: list[torch.nn.Parameter]) -> int:
    return sum(parameter.nbytes for parameter in parameters)


def _kept_bytes_of_loaded(parameters: list[torch.nn.Parameter], kept_bytes: int, *, is_cast: bool) -> int:
    """Return the bytes of frozen weights of a loaded model, which are packed where they are quantized; with `is_cast`,
    the plugin casts all others to `kept_bytes` each."""
    if not is_cast:
        return _num_bytes(parameters)
    cast_parameters = [parameter for parameter in parameters if parameter.is_floating_point()]
    packed_parameters = [parameter for parameter in parameters if not parameter.is_floating_point()]
    return kept_bytes * _num_weights(cast_parameters) + _num_bytes(packed_parameters)


def _gpu_of(memory: DeviceMemory) -> Gpu:
    """Return the data sheet of a GPU; an unknown one gets the rates of an H200."""
    sheet = cost.H200
    for gpu in cost.GPUS.values():
        if gpu.name in memory.name:
            sheet = gpu
            break
    return sheet._replace(name=memory.name, memory_bytes=memory.total)


def _bytes_per_weight(
    model: Model,
    args: RolloutConfig,
    shape: ModelShape,
    quantization_config: Any,
    *,
    has_adapter: bool,
) -> WeightBytes:
    """Return the bytes per weight of a model, which may be quantized by its checkpoint or when it is loaded."""
    if isinstance(model, str):
        quantization_config = quantization_config or (args.model_init_kwargs or {}).get("quantization_config")
    else:
        quantization_config = None
    is_mixed = args.bf16 or args.fp16
    quantization_of_checkpoint = getattr(config_of(model, args), "quantization_config", None)
    return weight_bytes(
        args,
        shape,
        kept_bytes=_kept_bytes(model, args),
        has_adapter=has_adapter,
        has_float32_copies=is_mixed and is_sharded_by_plugin(args),
        quantization=quantization_config or quantization_of_checkpoint,
    )


def _kept_bytes(model: Model, args: RolloutConfig) -> int:
    """Return the bytes of a weight that is neither trained nor quantized."""
    loaded_bytes = 4 if weights_dtype(model, args) == "float32" else 2
    return kept_bytes_of(loaded_bytes, sharding_of_launch(args), _precision(args, model))


def _has_adapter(model: Model, peft_config: PeftConfig | None) -> bool:
    return peft_config is not None or isinstance(model, PeftModel)


def _precision(args: RolloutConfig, model: Model) -> str:
    """Return the precision of activations, see [`activation_precision`]."""
    return activation_precision(
        loads_float32=weights_dtype(model, args) == "float32",
        is_mixed=args.bf16 or args.fp16,
        is_wrapped=is_sharded_by_plugin(args),
    )
