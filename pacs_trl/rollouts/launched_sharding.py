"""Sharding of the training state by FSDP or DeepSpeed, as the configuration or the launcher asks for it.

These functions work before accelerate has set up the processes.
"""

import os
from typing import Any, Literal

import torch

from ..errors import UserError
from ..plan.sharding import (
    Sharding,
    fsdp_keys,
    fsdp_recomputes,
    fsdp_sharding,
    fsdp_version,
    zero_sharding_of_plugin,
)
from ..plan.workload import FSDP_RECOMPUTES
from .rollout_config import RolloutConfig


def uses_plugin(args: RolloutConfig, plugin: Literal["FSDP", "DEEPSPEED"]) -> bool:
    """Return whether the configuration, or `accelerate launch`, uses a plugin of accelerate."""
    is_configured = bool(args.fsdp if plugin == "FSDP" else args.deepspeed)
    is_launched = os.environ.get(f"ACCELERATE_USE_{plugin}", "false").lower() == "true"
    return is_configured or is_launched


def is_sharded_by_plugin(args: RolloutConfig) -> bool:
    """Return whether FSDP or DeepSpeed will hold the weights."""
    return uses_plugin(args, "FSDP") or uses_plugin(args, "DEEPSPEED")


def sharding_of_launch(args: RolloutConfig) -> Sharding:
    """Return how the processes of this launch divide the training state."""
    if uses_plugin(args, "DEEPSPEED"):
        return zero_sharding_of_plugin(args.deepspeed_plugin, args.world_size)
    if uses_plugin(args, "FSDP"):
        parallelism = args.launched_parallelism
        return fsdp_sharding(
            _keys_of_fsdp(args),
            args.world_size,
            processes_per_node=torch.cuda.device_count() or args.world_size,
            replicas=1 if parallelism is None else parallelism.dp_replicate_size,
        )
    return Sharding("ddp" if args.world_size > 1 else "none")


def version_of_fsdp(args: RolloutConfig) -> int:
    """Return the version of FSDP that a configuration with FSDP uses, 1 or 2."""
    return fsdp_version(_keys_of_fsdp(args))


def check_recomputation_of_fsdp(args: RolloutConfig) -> None:
    """Raise a `ValueError` if FSDP is to recompute activations, which `gradient_checkpointing: auto` decides."""
    if args.gradient_checkpointing != "auto" or not uses_plugin(args, "FSDP"):
        return
    if fsdp_recomputes(_keys_of_fsdp(args)):
        raise UserError(FSDP_RECOMPUTES)


def _keys_of_fsdp(args: RolloutConfig) -> dict[str, Any]:
    """Return how FSDP runs, in the keys of an accelerate file, which the launcher makes variables of."""
    variables = {name.lower(): value for name, value in os.environ.items() if name.startswith("FSDP_")}
    return fsdp_keys(args, variables)
