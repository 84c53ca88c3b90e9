"""Sharding of the training state by FSDP or DeepSpeed, as the configuration or the launcher asks for it.

These functions work before accelerate has set up the processes.
"""

import os
from typing import Any, Literal

import torch

from ..errors import UserError
from ..plan.sharding import Sharding, fsdp_sharding, is_true, zero_sharding
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


def _fsdp_settings(args: RolloutConfig) -> dict[str, Any]:
    """Return the arguments of accelerate's FSDP plugin: of the configuration, or else of variables of the launcher."""
    launched = {
        "fsdp_version": os.environ.get("FSDP_VERSION", 1),
        "reshard_after_forward": os.environ.get("FSDP_RESHARD_AFTER_FORWARD", True),
        "cpu_offload": os.environ.get("FSDP_OFFLOAD_PARAMS", False),
        "activation_checkpointing": os.environ.get("FSDP_ACTIVATION_CHECKPOINTING", False),
    }
    return launched | (args.fsdp_plugin_args or {})


def fsdp_version(args: RolloutConfig) -> int:
    """Return the version of FSDP that a configuration with FSDP uses, 1 or 2."""
    return int(_fsdp_settings(args)["fsdp_version"])


def _sharding_of_fsdp(args: RolloutConfig) -> Sharding:
    """Return how FSDP divides the training state. Trainer does not pass a strategy, so that accelerate reads its
    variable in any case."""
    settings = _fsdp_settings(args)
    version = fsdp_version(args)
    parallelism = args.launched_parallelism
    return fsdp_sharding(
        version,
        args.world_size,
        processes_per_node=torch.cuda.device_count() or args.world_size,
        strategy=os.environ.get("FSDP_SHARDING_STRATEGY", "FULL_SHARD"),
        reshards_after_forward=(
            version == 1 or is_true("fsdp_reshard_after_forward", settings["reshard_after_forward"])
        ),
        offloads=is_true("fsdp_offload_params", settings["cpu_offload"]),
        replicas=1 if parallelism is None else parallelism.dp_replicate_size,
    )


def check_recomputation_of_fsdp(args: RolloutConfig) -> None:
    """Raise a `ValueError` if FSDP is to recompute activations, which `gradient_checkpointing: auto` decides."""
    if args.gradient_checkpointing != "auto" or not uses_plugin(args, "FSDP"):
        return
    if is_true("fsdp_activation_checkpointing", _fsdp_settings(args)["activation_checkpointing"]):
        raise UserError(FSDP_RECOMPUTES)
