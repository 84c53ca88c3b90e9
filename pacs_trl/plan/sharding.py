"""Division of the training state over the processes of a launch, and the shares that each keeps on its GPU.

From the sources of torch 2.13 (`torch.distributed.fsdp`), accelerate 1.15, TRL 1.16, and DeepSpeed 0.19.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ..errors import UserError


# Values of `fsdp_sharding_strategy`, which accelerate also takes as numbers from 1.
_FSDP_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
# Keys of an accelerate file, by the arguments of accelerate's plugin that Trainer makes from `fsdp_config`.
_KEYS_OF_PLUGIN = {
    "fsdp_version": "fsdp_version",
    "reshard_after_forward": "fsdp_reshard_after_forward",
    "cpu_offload": "fsdp_offload_params",
    "activation_checkpointing": "fsdp_activation_checkpointing",
}

NEEDS_PROCESSES = "fsdp shards over processes, and this is one. Start it with `accelerate launch`, or remove the key."


@dataclass(frozen=True)
class Sharding:
    """
    How processes divide the training state: weights, gradients, and moments of the optimizer.

    Attributes:
        framework (`str`): What divides it: `"none"` (one process), `"ddp"` (each process has all of it), `"fsdp"`, or
            `"deepspeed"`.
        processes (`int`): Number of processes that divide one copy of it.
        zero_stage (`int`): Stage of DeepSpeed's ZeRO, of 0 to 3.
        keeps_gathered (`bool`): Whether FSDP keeps weights that it gathers for the forward pass until the backward
            pass.
        wraps_kl_model_whole (`bool`): Whether the model of the KL term gathers all of its weights at once: for FSDP 2
            TRL wraps it as one unit, for FSDP 1 by layer.
        offloads_weights, offloads_optimizer (`bool`): Whether weights, and what the optimizer reads and writes, are
            in memory of the CPU. FSDP offloads both.
    """

    framework: Literal["none", "ddp", "fsdp", "deepspeed"] = "none"
    processes: int = 1
    zero_stage: int = 0
    keeps_gathered: bool = False
    wraps_kl_model_whole: bool = False
    offloads_weights: bool = False
    offloads_optimizer: bool = False

    @property
    def gathers_weights(self) -> bool:
        """Whether layers gather their weights before they compute."""
        return self.framework == "fsdp" or self.zero_stage == 3

    @property
    def divides_weights(self) -> bool:
        """Whether weights are divided, too, which no layout exceeds."""
        return self.gathers_weights and self.processes > 1


class StateShares(NamedTuple):
    """
    What a process keeps of the training state on its GPU: 1 for a whole copy, `1 / n` of a copy that `n` processes
    divide, and 0 for what is in memory of the CPU.

    Attributes:
        weights, gradients, moments (`float`): Trained weights as the optimizer updates them, and what it reads.
        frozen (`float`): Weights that are not trained.
        working_weights, working_gradients (`float`): Copies of trained weights and of gradients that DeepSpeed has
            besides, in the precision of the forward and backward passes.
    """

    weights: float
    gradients: float
    moments: float
    frozen: float
    working_weights: float = 0.0
    working_gradients: float = 0.0

    def __str__(self) -> str:
        parts_of_share: dict[float, list[str]] = defaultdict(list)
        for name, share in self._asdict().items():
            if name != "frozen" and (share > 0 or not name.startswith("working_")):
                parts_of_share[share].append(name.replace("working_", "copied "))
        return "; ".join(_amount(share, ", ".join(parts)) for share, parts in parts_of_share.items())


def _amount(share: float, parts: str) -> str:
    """Return in words how much of some parts is on the GPU of a process."""
    if share == 0:
        return f"{parts} in memory of the CPU"
    return f"all {parts}" if share == 1 else f"1/{round(1 / share)} of {parts}"


def state_shares(sharding: Sharding) -> StateShares:
    """Return what a process keeps of the training state on its GPU."""
    divided = 1 / sharding.processes
    if sharding.framework != "deepspeed":
        share = 0.0 if sharding.offloads_weights else divided
        return StateShares(weights=share, gradients=share, moments=share, frozen=share)
    stage = sharding.zero_stage
    optimizer = divided if stage >= 1 else 1.0
    working_gradients = divided if stage >= 2 else 1.0
    working_weights = divided if stage >= 3 else 1.0
    if sharding.offloads_optimizer:
        optimizer = 0.0
        working_gradients = 0.0 if stage >= 2 else 1.0  # stage 1 divides and offloads them after the last micro-batch
    if sharding.offloads_weights:
        working_weights = 0.0
    return StateShares(optimizer, optimizer, optimizer, working_weights, working_weights, working_gradients)


def fsdp_keys(training: Any, launched: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of an accelerate file that say how FSDP runs: those that are `launched`, and above these what
    Trainer passes from `fsdp` and `fsdp_config` of a configuration."""
    passed = training.fsdp_plugin_args or {}
    return {**launched, **{key: passed[name] for name, key in _KEYS_OF_PLUGIN.items() if name in passed}}


def fsdp_version(keys: Mapping[str, Any]) -> int:
    """Return the version of FSDP, 1 or 2."""
    return int(keys.get("fsdp_version", 1))


def fsdp_recomputes(keys: Mapping[str, Any]) -> bool:
    """Return whether FSDP computes the activations of layers again in the backward pass."""
    return _is_set(keys, "fsdp_activation_checkpointing")


def fsdp_sharding(keys: Mapping[str, Any], processes: int, *, processes_per_node: int, replicas: int = 1) -> Sharding:
    """
    Return the sharding of FSDP.

    Args:
        keys (`Mapping`): Keys of an accelerate file. Version 1 reads `fsdp_sharding_strategy`, a name or its number
            from 1, version 2 `fsdp_reshard_after_forward`. `fsdp_offload_params` also offloads gradients and moments.
        replicas (`int`): Number of copies of the training state, `dp_replicate_size`.
    """
    version, group = fsdp_version(keys), processes // replicas
    if version == 1:
        strategy = _fsdp_strategy(str(keys.get("fsdp_sharding_strategy", "FULL_SHARD")))
        if strategy == "NO_SHARD":
            group = 1
        elif strategy.startswith("HYBRID"):  # copies on each node
            group = processes_per_node
        keeps_gathered = strategy in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
    else:
        keeps_gathered = not _is_set(keys, "fsdp_reshard_after_forward", default=True)
    offloads = _is_set(keys, "fsdp_offload_params")
    return Sharding(
        "fsdp",
        group,
        keeps_gathered=keeps_gathered,
        wraps_kl_model_whole=version == 2,
        offloads_weights=offloads,
        offloads_optimizer=offloads,
    )


def _fsdp_strategy(name_or_number: str) -> str:
    """Return the name of a sharding strategy of FSDP 1."""
    if name_or_number.isdigit():
        name = dict(enumerate(_FSDP_STRATEGIES, start=1)).get(int(name_or_number))
    else:
        name = name_or_number.upper().removeprefix("_")
    if name not in _FSDP_STRATEGIES:
        raise UserError(
            f"fsdp_sharding_strategy is {name_or_number!r}. Set it to one of {', '.join(_FSDP_STRATEGIES)}."
        )
    return name


def zero_sharding(
    stage: int, processes: int, *, offload_param_device: str | None, offload_optimizer_device: str | None
) -> Sharding:
    """Return the sharding of DeepSpeed's ZeRO. It offloads weights in stage 3, and the optimizer from stage 1, to
    `"cpu"` or `"nvme"`."""
    is_offloaded = [device not in (None, "none") for device in (offload_param_device, offload_optimizer_device)]
    return Sharding(
        "deepspeed",
        processes,
        zero_stage=stage,
        offloads_weights=is_offloaded[0] and stage == 3,
        offloads_optimizer=is_offloaded[1] and stage >= 1,
    )


def zero_sharding_of_plugin(plugin: Any, processes: int) -> Sharding:
    """Return the sharding of accelerate's `DeepSpeedPlugin`, as Trainer makes it from `deepspeed` or the launch."""
    return zero_sharding(
        int(plugin.zero_stage),
        processes,
        offload_param_device=plugin.offload_param_device,
        offload_optimizer_device=plugin.offload_optimizer_device,
    )


def _is_set(keys: Mapping[str, Any], key: str, *, default: bool = False) -> bool:
    """Return whether a key of an accelerate file, a boolean or its text, is true."""
    from accelerate.utils import str_to_bool  # imports torch

    value = str(keys.get(key, default))
    try:
        return bool(str_to_bool(value))
    except ValueError as error:
        raise UserError(f"{key} is {value!r}. Set it to true or false.") from error
