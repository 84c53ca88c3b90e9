"""Number of processes and sharding of an accelerate file."""

from dataclasses import dataclass
from typing import Any

import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser

from ..errors import UserError


_SHARDING = {"NO": "none", "MULTI_GPU": "none", "MULTI_CPU": "none", "FSDP": "full", "DEEPSPEED": ""}
_ZERO_SHARDING = {0: "none", 1: "gradients", 2: "gradients", 3: "full"}


@dataclass(frozen=True)
class Launch:
    """
    Number of GPUs; sharding of the training state (`"none"`, `"gradients"`, or `"full"`); a description; and of the
    accelerate file `distributed_type`, FSDP version (1 or 2), mixed precision, which applies if the recipe sets
    neither `bf16` nor `fp16`, and whether it sets `fsdp_activation_checkpointing`.
    """

    num_processes: int
    sharding: str
    description: str
    kind: str = "NO"
    fsdp_version: int | None = None
    mixed_precision: str = "no"
    fsdp_recomputes: bool = False

    @property
    def is_zero3(self) -> bool:
        """Whether DeepSpeed gathers weights inside the layers."""
        return self.kind == "DEEPSPEED" and self.sharding == "full"


def read_launch(accelerate_config: str | None, num_processes: int | None) -> tuple[Launch | None, list[str]]:
    """
    Read an accelerate file; without one the launch is a single process or DDP. `num_processes` overrides the file.
    Return `None` and the error if accelerate rejects the file or would ignore one of its keys.
    """
    if accelerate_config is None:
        count = 1 if num_processes is None else num_processes
        launch = Launch(count, "none", "one process" if count == 1 else f"{count} processes, DDP")
        return (launch, []) if count >= 1 else (None, [f"--num_processes must be at least 1, got {count}."])
    try:
        config = load_config_from_file(accelerate_config)
        kind = getattr(config.distributed_type, "value", config.distributed_type)
        count = config.num_processes if num_processes is None else num_processes
        section: dict[str, Any] = {}  # of the file, with the keys of FSDP or DeepSpeed
        version, problem = None, ""
        sharding, words = _SHARDING.get(kind, ""), kind
        if kind not in _SHARDING:
            problem = f"distributed_type is {kind!r}. Set it to one of {', '.join(_SHARDING)}, in quotes."
        elif count < 1 or (kind == "NO" and count > 1):
            problem = f"num_processes is {count} with distributed_type {kind}. Set it with --num_processes."
        elif kind == "FSDP":
            section = {f"fsdp_{key.removeprefix('fsdp_')}": value for key, value in config.fsdp_config.items()}
            version = int(section.get("fsdp_version", 1))
        elif kind == "DEEPSPEED":
            section = config.deepspeed_config
            stage = section.get("zero_stage", 2)  # accelerate's default
            sharding, words = _ZERO_SHARDING[stage], f"DeepSpeed ZeRO-{stage}"
        if "deepspeed_config_file" in section:
            problem = "plan does not read deepspeed_config_file. Set zero_stage in its place."
        elif ignored := section.keys() - {action.dest for action in launch_command_parser()._actions}:
            problem = f"accelerate ignores {', '.join(sorted(ignored))}. Correct or remove it."
        if problem:
            return None, [f"{accelerate_config}: {problem}"]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError) as error:
        reason = "The file does not exist" if isinstance(error, FileNotFoundError) else str(error).rstrip(".")
        return None, [
            f"{accelerate_config}: {reason}. Name a file of `accelerate config` or recipes/accelerate_configs."
        ]
    processes = "1 process" if count == 1 else f"{count} processes"
    description = f"{processes}, {words} ({accelerate_config})"
    precision = str(config.mixed_precision or "no").lower()
    recomputes = str(section.get("fsdp_activation_checkpointing", False)).lower() == "true"
    return Launch(count, sharding, description, kind, version, precision, recomputes), []


def launch_commands(recipe: str, num_processes: int, nodes: int, *, served_model: str | None = None) -> list[str]:
    """Return the commands of `recipes/launch` that start a recipe on some nodes, in the shell of this repository.
    `served_model` is the model of a run with a vLLM server. Raises a `ValueError` if nodes would differ in size."""
    if nodes < 1 or num_processes % nodes:
        raise UserError(
            f"--nodes is {nodes}, which does not divide {num_processes} processes. Choose a number that does, or set "
            "--num_processes."
        )
    gpus = num_processes // nodes
    place = f"NNODES={nodes} NODE_RANK=$NODE_RANK HEAD=$HEAD GPUS={gpus}" if nodes > 1 else f"GPUS={gpus}"
    server = ' --vllm_server_host "$SERVER"' if served_model else ""
    commands = [
        f"{place} recipes/launch/accelerate.sh {recipe}{server}",
        f"{place} recipes/launch/torchrun.sh {recipe}{server}",
        f"sbatch --nodes {nodes} --gpus-per-node {gpus} recipes/launch/slurm.sh {recipe}{server}",
    ]
    if served_model:
        commands.insert(0, f"recipes/launch/server.sh {served_model}    # on the node $SERVER")
    if served_model and nodes == 1:
        commands.append(f"recipes/launch/four_plus_four.sh {recipe} {served_model}    # both on one node")
    return commands
