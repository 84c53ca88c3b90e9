"""The launch that an accelerate file describes: the number of processes and what they shard."""

from dataclasses import dataclass

import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser


_SHARDING = {"NO": "none", "MULTI_GPU": "none", "MULTI_CPU": "none", "FSDP": "full", "DEEPSPEED": ""}
_ZERO_SHARDING = {0: "none", 1: "gradients", 2: "gradients", 3: "full"}


@dataclass(frozen=True)
class Launch:
    """
    How a run is started: on how many GPUs, how they share the training state (`"none"`, `"gradients"`, or `"full"`),
    the same in words; `distributed_type` of the accelerate file, its FSDP version (1 or 2), and its mixed precision,
    which counts where the recipe sets neither `bf16` nor `fp16`.
    """

    num_processes: int
    sharding: str
    description: str
    kind: str = "NO"
    fsdp_version: int | None = None
    mixed_precision: str = "no"


def read_launch(accelerate_config: str | None, num_processes: int | None) -> tuple[Launch | None, list[str]]:
    """
    Read the launch that an accelerate file describes, by default one process or plain data parallelism;
    `num_processes` wins over the file. Returns `None` with what is wrong if accelerate refuses the file, would ignore
    a key of it, or this package is not run with it.
    """
    if accelerate_config is None:
        count = 1 if num_processes is None else num_processes
        launch = Launch(count, "none", "one process" if count == 1 else f"{count} processes, DDP")
        return (launch, []) if count >= 1 else (None, [f"--num-processes must be at least 1, got {count}."])
    try:
        config = load_config_from_file(accelerate_config)
        kind = getattr(config.distributed_type, "value", config.distributed_type)
        if kind not in _SHARDING:
            raise ValueError(f"distributed_type is {kind!r}. Set it to one of {', '.join(_SHARDING)}, in quotes.")
        count = config.num_processes if num_processes is None else num_processes
        if count < 1 or (kind == "NO" and count > 1):
            raise ValueError(f"num_processes is {count} with distributed_type {kind}. Set it with --num-processes.")
        section, version, precision = {}, None, config.mixed_precision
        sharding, words = _SHARDING[kind], kind
        if kind == "FSDP":
            section = {f"fsdp_{key.removeprefix('fsdp_')}": value for key, value in config.fsdp_config.items()}
            version = int(section.get("fsdp_version", 1))
        elif kind == "DEEPSPEED":
            section = config.deepspeed_config
            if "deepspeed_config_file" in section:
                raise ValueError("plan does not read deepspeed_config_file. Set zero_stage in its place.")
            stage = section.get("zero_stage", 2)  # accelerate's default
            sharding, words = _ZERO_SHARDING[stage], f"DeepSpeed ZeRO-{stage}"
        if ignored := section.keys() - {action.dest for action in launch_command_parser()._actions}:
            raise ValueError(f"accelerate ignores {', '.join(sorted(ignored))}. Correct or remove it.")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError) as error:
        return None, [f"{accelerate_config}: {type(error).__name__}: {error}"]
    description = f"{count} process{'es' * (count != 1)}, {words} ({accelerate_config})"
    return Launch(count, sharding, description, kind, version, str(precision or "no").lower()), []
