"""Memory of a run on a GPU: what `gradient_checkpointing: auto` and `max_tokens_per_micro_batch: auto` become.

The choice is made before the model is loaded, from the free memory and the cost model that `pacs-trl plan` uses
(`plan/workload.py`). Checkpoints contain it, because other micro-batches round differently.
"""

import copy
import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import gather_object
from accelerate.utils.memory import clear_device_cache
from peft import LoraConfig, PeftConfig, PeftModel
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled

from ..errors import UserError
from ..plan import cost
from ..plan.cost import GIB, Execution, Gpu, ModelShape, Recomputation
from ..plan.occupied import WeightBytes, occupied_bytes, weight_bytes
from ..plan.sharding import Sharding, fsdp_sharding, is_true, zero_sharding
from ..plan.workload import (
    FSDP_RECOMPUTES,
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
from ..update.groups import Groups
from ..update.minibatch import Minibatch
from ..update.reference import local_shard
from ..update.rollout import Rollout
from ..update.step_sizes import BatchSizes
from .model_config import config_of, weights_dtype
from .random_numbers import random_states, restore_random_states
from .rollout_config import RolloutConfig


if TYPE_CHECKING:
    from .exact_trainer import ExactUpdateTrainer


logger = logging.getLogger(__name__)


class DeviceMemory(NamedTuple):
    """Bytes of a device that are free, and in all; and its name."""

    free: int
    total: int
    name: str


def device_memory(device: torch.device) -> DeviceMemory | None:
    """Return the memory of the device of this process, or `None` if it is no GPU."""
    if device.type != "cuda":
        return None
    return DeviceMemory(*torch.cuda.mem_get_info(device), torch.cuda.get_device_name(device))


@dataclass(frozen=True)
class MemoryPlan:
    """
    A choice, and what it was made from.

    Attributes:
        choice ([`MemoryChoice`]): Recomputation and size of micro-batches.
        workload ([`Workload`], *optional*): Work of an update; `None` on a CPU, and for models that the cost model
            does not know.
        room (`float`): Bytes for activations.
        recomputations (`tuple[str]`): What the settings leave open, from most memory to least.
    """

    choice: MemoryChoice
    workload: Workload | None = None
    room: float = math.inf
    recomputations: tuple[Recomputation, ...] = ()

    def fits(self, choice: MemoryChoice) -> bool:
        """Return whether another choice fits too. A size below the longest rollout is raised to it when one comes."""
        if self.workload is None:
            return True
        size = choice.max_tokens or self.workload.largest(self.workload.training.per_device_train_batch_size)
        return max(size, self.workload.longest) <= self.workload.tokens_that_fit(choice.recomputation, self.room)


def plan_memory(
    model: str | PreTrainedModel | PeftModel,
    args: RolloutConfig,
    peft_config: PeftConfig | None,
    longest: int | None,
    *,
    compiled: bool = False,
    quantization_config: Any = None,
) -> MemoryPlan:
    """
    Choose what the settings leave open for the device of this process, the same on all processes. Warn, and choose the
    least memory, if the longest completion does not fit by a count that is not certain.

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
    _check_fsdp(args)
    config = config_of(model, args).get_text_config()
    shape = cost.shape_of(config.to_dict())
    if shape is None:
        choice = choice_of_unknown_model(args, config.model_type)
        return MemoryPlan(choice, recomputations=(choice.recomputation,))
    execution = Execution(_precision(args, model), compiled=compiled)
    workload = _workload(args, memory, execution, shape, longest)
    has_adapter = _has_adapter(model, peft_config)
    weights = _bytes_per_weight(model, args, shape, quantization_config, has_adapter=has_adapter)
    room = min(gather_object([_room(model, args, peft_config, memory, config, shape, weights)]))
    recomputations = recomputations_of(args, has_adapter=has_adapter, is_zero3=is_deepspeed_zero3_enabled())
    chosen = choose(workload, room, recomputations)
    if chosen is None and weights.assumptions:
        if args.process_index == 0:
            logger.warning(
                f"A completion of {workload.longest:,} tokens may not fit on the {memory.name}. "
                + " ".join(weights.assumptions)
            )
        size = args.max_tokens_per_micro_batch
        max_tokens = workload.longest if isinstance(size, str) else size
        choice = MemoryChoice(recomputations[-1], max_tokens, "the memory that training needs is not known")
        return MemoryPlan(choice, recomputations=recomputations)
    if chosen is None:
        raise UserError(
            f"A completion of {workload.longest:,} tokens (prompt and max_completion_length) does not fit on the "
            f"{memory.name}, even if the backward pass computes everything again: {max(room, 0) / GIB:.1f} of "
            f"{memory.total / GIB:.1f} GiB are left, and its activations need "
            f"{workload.activation_bytes('full', workload.longest) / GIB:.1f}. Lower max_completion_length or "
            "vllm_gpu_memory_utilization, shard the training state (recipes/accelerate_configs/fsdp2.yaml), or train "
            "an adapter."
        )
    return MemoryPlan(chosen, workload, room, recomputations)


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


# Repeated and tried steps -----------------------------------------------------------------------------------------


class StartOfUpdate:
    """
    State of a trainer before the passes of an update, to which [`restore`] returns: random numbers, metrics of
    training, the work that its timer counts, and the attributes that checkpoints contain (a method may update running
    means in a pass), of which containers are copied, but not what they contain. Besides these, passes change only
    gradients.
    """

    def __init__(self, trainer: "ExactUpdateTrainer"):
        self._trainer = trainer
        self._random_states = random_states(trainer.accelerator.device)
        self._metrics = {name: list(values) for name, values in trainer._metrics["train"].items()}
        self._work = trainer.timer.work.copy()
        self._attributes = {name: copy.copy(getattr(trainer, name)) for name in trainer._saved_attributes}

    def restore(self) -> None:
        """Set the trainer to this state; it can be restored several times."""
        trainer = self._trainer
        restore_random_states(self._random_states, trainer.accelerator.device)
        metrics, work = trainer._metrics["train"], trainer.timer.work
        metrics.clear()
        metrics.update({name: list(values) for name, values in self._metrics.items()})
        work.clear()
        work.update(self._work)
        for name, value in self._attributes.items():
            setattr(trainer, name, copy.copy(value))
        clear_device_cache(garbage_collection=True)


def largest_micro_batch(num_tokens: int, prompt: int, completion: int) -> list[Rollout]:
    """Return rollouts of `num_tokens` tokens together: as many as possible with the largest lengths of `prompt` and
    `completion`, and the rest. Prompts differ, so that none is computed once for several rollouts."""
    number, rest = divmod(num_tokens, prompt + completion)
    lengths = [(prompt, completion)] * number + ([(1, rest - 1)] if rest > 1 else [])
    return [
        Rollout(
            prompt_ids=np.full(prompt_length, i, dtype=np.int32),
            completion_ids=np.zeros(length, dtype=np.int32),
            loss_mask=np.ones(length, dtype=bool),
            label=0.0,
        )
        for i, (prompt_length, length) in enumerate(lengths)
    ]


def trial_minibatch(rollouts: list[Rollout], num_processes: int) -> Minibatch:
    """Return a minibatch in which every process has all of the rollouts in two micro-batches, the second of which adds
    its gradient to that of the first."""
    indices = list(range(len(rollouts)))
    groups = Groups(torch.zeros(len(rollouts)), indices)
    return Minibatch(rollouts, groups, [[indices, indices] for _ in range(num_processes)], whole_groups=False)


@contextmanager
def moments_of_optimizer(model: torch.nn.Module, device: torch.device) -> Iterator[torch.Tensor]:
    """Occupy the memory of Adam's moments of this process's weights on a device, which are allocated after the first
    backward pass. FSDP may have the weights, and so the moments, in memory of the CPU."""
    shards = [local_shard(parameter) for parameter in model.parameters() if parameter.requires_grad]
    trained = sum(shard.numel() for shard in shards if shard.device.type == device.type)
    moments = torch.empty(2 * trained, device=device)
    try:
        yield moments
    finally:
        del moments


# The parts of the memory --------------------------------------------------------------------------------------------


def _workload(
    args: RolloutConfig,
    memory: DeviceMemory,
    execution: Execution,
    shape: ModelShape,
    longest: int | None,
) -> Workload:
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
    model: str | PreTrainedModel | PeftModel,
    args: RolloutConfig,
    peft_config: PeftConfig | None,
    memory: DeviceMemory,
    config: PreTrainedConfig,
    shape: ModelShape,
    weights: WeightBytes,
) -> float:
    """Return the bytes that are left for activations when the model, its optimizer, and the engine are loaded."""
    if isinstance(model, str):
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(config, trust_remote_code=args.trust_remote_code)
        parameters = list(empty.parameters())
    else:
        parameters = list(model.parameters())
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    frozen = sum(parameter.numel() for parameter in parameters) - trained
    if peft_config is not None:
        frozen, trained = frozen + trained, 0
        if isinstance(peft_config, LoraConfig):
            trained = cost.lora_parameters(shape, peft_config.r)
    if frozen and not isinstance(model, str):  # packed weights, where they are quantized
        packed = sum(p.nbytes for p in parameters if peft_config is not None or not p.requires_grad)
        weights = weights._replace(frozen=packed / frozen)
    occupied = occupied_bytes(
        args,
        shape,
        trained=trained,
        frozen=frozen,
        loaded_bytes=_loaded_bytes(model, args),
        weights=weights,
        has_adapter=_has_adapter(model, peft_config),
        sharding=_sharding(args),
        precision=_precision(args, model),
        memory_bytes=memory.total,
    )
    on_device = sum(p.nbytes for p in parameters if p.device.type == args.device.type != "cpu")
    return memory.free + on_device - (1 - USABLE_SHARE) * memory.total - occupied.in_update


def _gpu_of(memory: DeviceMemory) -> Gpu:
    """Return the data sheet of a GPU; an unknown one gets the rates of an H200."""
    known = [gpu for gpu in cost.GPUS.values() if gpu.name in memory.name]
    return (known[0] if known else cost.H200)._replace(name=memory.name, memory_bytes=memory.total)


def _bytes_per_weight(
    model: str | PreTrainedModel | PeftModel,
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
    return weight_bytes(
        args,
        shape,
        loaded_bytes=_loaded_bytes(model, args),
        has_adapter=has_adapter,
        has_float32_copies=is_mixed and (uses_plugin(args, "FSDP") or uses_plugin(args, "DEEPSPEED")),
        quantization=quantization_config or getattr(config_of(model, args), "quantization_config", None),
    )


def _loaded_bytes(model: str | PreTrainedModel | PeftModel, args: RolloutConfig) -> int:
    """Return the bytes of a weight in the dtype in which the model is loaded."""
    return 4 if weights_dtype(model, args) == "float32" else 2


def _has_adapter(model: str | PreTrainedModel | PeftModel, peft_config: PeftConfig | None) -> bool:
    return peft_config is not None or isinstance(model, PeftModel)


def _precision(args: RolloutConfig, model: str | PreTrainedModel | PeftModel) -> str:
    return activation_precision(
        loads_float32=weights_dtype(model, args) == "float32",
        is_mixed=args.bf16 or args.fp16,
        is_wrapped=uses_plugin(args, "FSDP") or uses_plugin(args, "DEEPSPEED"),
    )


def uses_plugin(args: RolloutConfig, plugin: str) -> bool:
    """Return whether the launch, or the configuration, uses `"FSDP"` or `"DEEPSPEED"`."""
    is_set = args.deepspeed if plugin == "DEEPSPEED" else args.fsdp
    return bool(is_set) or os.environ.get(f"ACCELERATE_USE_{plugin}", "false").lower() == "true"


def _sharding(args: RolloutConfig) -> Sharding:
    """Return how the processes of this launch divide the training state."""
    if uses_plugin(args, "DEEPSPEED"):
        plugin = args.deepspeed_plugin
        return zero_sharding(
            int(plugin.zero_stage),
            args.world_size,
            offload_param_device=plugin.offload_param_device,
            offload_optimizer_device=plugin.offload_optimizer_device,
        )
    if uses_plugin(args, "FSDP"):
        return _sharding_of_fsdp(args)
    return Sharding("ddp" if args.world_size > 1 else "none")


def _sharding_of_fsdp(args: RolloutConfig) -> Sharding:
    """Return how FSDP divides the training state: by the configuration, or else by variables of the launcher. Trainer
    does not pass a strategy, so that accelerate reads its variable in any case."""
    parallelism = args.launched_parallelism
    plugin_args: dict[str, Any] = {
        "fsdp_version": os.environ.get("FSDP_VERSION", 1),
        "reshard_after_forward": os.environ.get("FSDP_RESHARD_AFTER_FORWARD", True),
        "cpu_offload": os.environ.get("FSDP_OFFLOAD_PARAMS", False),
    }
    plugin_args |= args.fsdp_plugin_args or {}
    version = int(plugin_args["fsdp_version"])
    reshards = plugin_args["reshard_after_forward"]
    return fsdp_sharding(
        version,
        args.world_size,
        processes_per_node=torch.cuda.device_count() or args.world_size,
        strategy=os.environ.get("FSDP_SHARDING_STRATEGY", "FULL_SHARD"),
        reshards_after_forward=version == 1 or is_true("fsdp_reshard_after_forward", reshards),
        offloads=is_true("fsdp_offload_params", plugin_args["cpu_offload"]),
        replicas=1 if parallelism is None else parallelism.dp_replicate_size,
    )


def _check_fsdp(args: RolloutConfig) -> None:
    """Raise a `ValueError` if FSDP is to recompute activations too."""
    by_launch = is_true("fsdp_activation_checkpointing", os.environ.get("FSDP_ACTIVATION_CHECKPOINTING", "false"))
    if args.gradient_checkpointing == "auto" and uses_plugin(args, "FSDP") and by_launch:
        raise UserError(FSDP_RECOMPUTES)
