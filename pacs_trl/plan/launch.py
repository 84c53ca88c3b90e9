"""Number of processes and sharding of an accelerate file, and the commands that start such a launch."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser

from ..errors import UserError
from ..recipe import Recipe, adapter_config
from ..rollouts.adapter_checks import max_lora_rank
from ..rollouts.rollout_config import RolloutConfig
from ..rollouts.server_command import DEFAULT_PORT, serve_command, server_url
from ..settings.trl_settings import SPLITTING_SIZES
from .sharding import (
    Sharding,
    fsdp_keys,
    fsdp_recomputes,
    fsdp_sharding,
    fsdp_version,
    zero_sharding,
    zero_sharding_of_plugin,
)


_GPUS_PER_NODE = 8
_KINDS = ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED")
_ZERO_STAGES = (0, 1, 2, 3)
# What recipes/launch/torchrun.sh sets for FSDP, apart from what is false.
_FSDP_OF_TORCHRUN = {
    "fsdp_version": 2,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_reshard_after_forward": True,
    "fsdp_state_dict_type": "FULL_STATE_DICT",
    "fsdp_cpu_ram_efficient_loading": True,
}


@dataclass(frozen=True)
class Launch:
    """
    Processes and sharding of a run: those of an accelerate file ([`read_launch`]), or [`with_settings_of`] its recipe.

    Attributes:
        num_processes (`int`): Number of GPUs.
        sharding ([`~sharding.Sharding`]): Of the training state.
        description (`str`): For people.
        kind (`str`): `distributed_type`.
        fsdp_version (`int`, *optional*): 1 or 2.
        mixed_precision (`str`): Applies if the recipe sets neither `bf16` nor `fp16`.
        fsdp_recomputes (`bool`): Whether `fsdp_activation_checkpointing` is set.
        accelerate_config (`str`, *optional*): Path of the file.
        torchrun (`str`, *optional*): Variables with which `recipes/launch/torchrun.sh` starts the same processes;
            `None` if it cannot.
        fsdp_keys (`Mapping`): Keys of the file for FSDP.
        num_machines, replicas (`int`): Nodes, and copies of the training state (`dp_replicate_size`).
    """

    num_processes: int
    sharding: Sharding
    description: str
    kind: str = "NO"
    fsdp_version: int | None = None
    mixed_precision: str = "no"
    fsdp_recomputes: bool = False
    accelerate_config: str | None = None
    torchrun: str | None = None
    fsdp_keys: Mapping[str, Any] = field(default_factory=dict)
    num_machines: int = 1
    replicas: int = 1

    def with_settings_of(self, training: Any) -> "Launch":
        """Return this launch with the sharding that a configuration sets with `deepspeed`, or with `fsdp` and
        `fsdp_config`; Trainer prefers it to that of the launch."""
        if training.deepspeed:
            plugin = training.deepspeed_plugin
            return replace(
                self,
                kind="DEEPSPEED",
                sharding=zero_sharding_of_plugin(plugin, self.num_processes),
                description=f"{_processes(self.num_processes)}, DeepSpeed ZeRO-{plugin.zero_stage} of the recipe",
                fsdp_version=None,
                fsdp_recomputes=False,
            )
        if training.fsdp and not self.is_one_process:
            keys = fsdp_keys(training, self.fsdp_keys)
            version = fsdp_version(keys)
            return replace(
                self,
                kind="FSDP",
                sharding=_fsdp_sharding(keys, self.num_processes, self.num_machines, self.replicas),
                description=f"{_processes(self.num_processes)}, FSDP {version} of the recipe",
                fsdp_version=version,
                fsdp_recomputes=fsdp_recomputes(keys),
            )
        return self

    @property
    def is_one_process(self) -> bool:
        """Whether the run starts as a single process, in which FSDP is not possible."""
        return self.kind == "NO" and self.num_processes == 1

    @property
    def is_zero3(self) -> bool:
        """Whether DeepSpeed gathers weights inside the layers."""
        return self.sharding.zero_stage == 3


def read_launch(accelerate_config: str | None, num_processes: int | None) -> tuple[Launch | None, list[str]]:
    """
    Read an accelerate file; without one the launch is a single process or DDP. `num_processes` overrides the file.
    Return `None` and the error if accelerate rejects the file or would ignore one of its keys.
    """
    if accelerate_config is None:
        count = 1 if num_processes is None else num_processes
        description = "one process" if count == 1 else f"{count} processes, DDP"
        launch = Launch(count, _without_sharding(count), description, torchrun="SHARDING=ddp")
        return (launch, []) if count >= 1 else (None, [f"--num_processes must be at least 1, got {count}."])
    try:
        return _launch_of_file(accelerate_config, num_processes), []
    except UserError as error:
        return None, [f"{accelerate_config}: {error}"]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError) as error:
        reason = "The file does not exist" if isinstance(error, FileNotFoundError) else str(error).rstrip(".")
        return None, [
            f"{accelerate_config}: {reason}. Name a file of `accelerate config` or recipes/accelerate_configs."
        ]


def _launch_of_file(path: str, num_processes: int | None) -> Launch:
    """Return the launch of an accelerate file. Raise a `UserError` where accelerate would refuse it later or ignore a
    key, and the errors of accelerate and YAML."""
    config = load_config_from_file(path)
    kind = getattr(config.distributed_type, "value", config.distributed_type)
    processes = config.num_processes if num_processes is None else num_processes
    if kind not in _KINDS:
        raise UserError(f"distributed_type is {kind!r}. Set it to one of {', '.join(_KINDS)}, in quotes.")
    if processes < 1 or (kind == "NO" and processes > 1):
        raise UserError(f"num_processes is {processes} with distributed_type {kind}. Set it with --num_processes.")

    section: dict[str, Any] = {}  # of the file, with the keys of FSDP or DeepSpeed
    if kind == "FSDP":
        section = {f"fsdp_{key.removeprefix('fsdp_')}": value for key, value in config.fsdp_config.items()}
    elif kind == "DEEPSPEED":
        section = config.deepspeed_config
    _check_keys(section, config.parallelism_config)

    precision = str(config.mixed_precision or "no").lower()
    has_more = config.use_cpu or config.dynamo_config or config.parallelism_config
    launch = Launch(
        num_processes=processes,
        sharding=_without_sharding(processes),
        description=f"{_processes(processes)}, {kind} ({path})",
        kind=kind,
        mixed_precision=precision,
        accelerate_config=path,
        torchrun=None if has_more else _variables_of_torchrun(kind, section, precision),
        num_machines=config.num_machines,
    )
    if kind == "FSDP":
        replicas = _replicas(config.parallelism_config, processes)
        return replace(
            launch,
            sharding=_fsdp_sharding(section, processes, config.num_machines, replicas),
            fsdp_version=fsdp_version(section),
            fsdp_recomputes=fsdp_recomputes(section),
            fsdp_keys=section,
            replicas=replicas,
        )
    if kind == "DEEPSPEED":
        stage = section.get("zero_stage", 2)  # accelerate's default
        if stage not in _ZERO_STAGES:
            raise UserError(f"zero_stage is {stage!r}. Set it to one of {', '.join(map(str, _ZERO_STAGES))}.")
        sharding = zero_sharding(
            stage,
            processes,
            offload_param_device=section.get("offload_param_device"),
            offload_optimizer_device=section.get("offload_optimizer_device"),
        )
        description = f"{_processes(processes)}, DeepSpeed ZeRO-{stage} ({path})"
        return replace(launch, sharding=sharding, description=description)
    return launch


def _replicas(parallelism: dict[str, Any], processes: int) -> int:
    """Return the number of copies of the training state under FSDP 2. Raise a `UserError` if accelerate would refuse
    the sizes, which it does after the model is loaded."""
    replicas = int(parallelism.get("parallelism_config_dp_replicate_size", 1))
    shards = int(parallelism.get("parallelism_config_dp_shard_size", 1))
    is_legal = replicas * shards == processes and (shards > 1 or processes == 1)
    if parallelism and not is_legal:
        raise UserError(
            f"parallelism_config_dp_replicate_size={replicas} times parallelism_config_dp_shard_size={shards} must be "
            f"the {processes} processes, with a shard size above 1. Correct both, or remove parallelism_config."
        )
    return replicas


def _processes(number: int) -> str:
    return "1 process" if number == 1 else f"{number} processes"


def _fsdp_sharding(keys: Mapping[str, Any], processes: int, num_machines: int, replicas: int) -> Sharding:
    return fsdp_sharding(keys, processes, processes_per_node=max(1, processes // num_machines), replicas=replicas)


def _without_sharding(num_processes: int) -> Sharding:
    return Sharding("none" if num_processes == 1 else "ddp")


def _check_keys(section: dict[str, Any], parallelism: dict[str, Any]) -> None:
    """Raise a `UserError` if keys of an accelerate file for FSDP or DeepSpeed (`section`), or in its
    `parallelism_config`, are illegal."""
    if "deepspeed_config_file" in section:
        raise UserError("plan does not read deepspeed_config_file. Set zero_stage in its place.")
    known = {action.dest for action in launch_command_parser()._actions}
    if ignored := (section.keys() | parallelism.keys()) - known:
        raise UserError(f"accelerate ignores {', '.join(sorted(ignored))}. Correct or remove it.")
    splitting = [f"parallelism_config_{size}" for size in SPLITTING_SIZES]
    if split := [f"{key}={parallelism[key]}" for key in splitting if int(parallelism.get(key, 1)) > 1]:
        raise UserError(
            f"{' and '.join(split)} splits the model or its sequences over processes, each of which must generate and "
            "train completions of its own. Remove it; FSDP2 shards weights."
        )


def _variables_of_torchrun(kind: str, section: dict[str, Any], precision: str) -> str | None:
    """Return the shell variables with which `recipes/launch/torchrun.sh` starts what an accelerate file describes, or
    `None` if it cannot. `section` has the keys of FSDP or DeepSpeed."""
    if kind in ("NO", "MULTI_GPU"):
        variables, default_precision = ["SHARDING=ddp"], "no"
    elif kind == "FSDP" and {key: value for key, value in section.items() if value is not False} == _FSDP_OF_TORCHRUN:
        variables, default_precision = [], "bf16"
    else:
        return None
    if precision != default_precision:
        variables.append(f"ACCELERATE_MIXED_PRECISION={precision}")
    return " ".join(variables)


def gpus_of_server(num_processes: int, num_heads: int | None) -> list[int]:
    """Return the GPUs of a node over which a vLLM server splits a model: as many as divide the heads of attention
    (`None` if they are not known), of those that the trainer leaves free on its last node, or of one node more."""
    first = num_processes % _GPUS_PER_NODE
    sizes = [n for n in (1, 2, 4, 8) if first + n <= _GPUS_PER_NODE and (num_heads is None or num_heads % n == 0)]
    return list(range(first, first + max(sizes)))


def launch_commands(
    path: str, recipe: Recipe, launch: Launch, nodes: int, overrides: Sequence[str] = (), *, server_gpus: int
) -> dict[str, list[str]]:
    """
    Return the commands of `recipes/launch` that start a recipe as it was planned, in the shell of this repository, by
    headings that say what they start and where.

    Args:
        path (`str`): File of the recipe.
        recipe ([`~recipe.Recipe`]): Its settings, with those of the command line.
        launch ([`Launch`]): Processes and sharding.
        nodes (`int`): Number of nodes, which must divide the processes.
        overrides (`Sequence[str]`): Words of the command line that override keys of the recipe.
        server_gpus (`int`): GPUs of the vLLM server of a run that has one.
    """
    if nodes < 1 or launch.num_processes % nodes:
        raise UserError(
            f"--nodes is {nodes}, which does not divide {launch.num_processes} processes. Choose a number that does, "
            "or set --num_processes."
        )
    training = recipe.training
    gpus = launch.num_processes // nodes
    place = f"NNODES={nodes} NODE_RANK=$NODE_RANK HEAD=$HEAD GPUS={gpus}" if nodes > 1 else f"GPUS={gpus}"
    settings = shlex.join([path, *overrides])
    server_command, node = _server_command(recipe, server_gpus), _node_of_server(training)
    server = "" if server_command is None or node is not None else ' --vllm_server_host "$SERVER"'

    # Scripts of schedulers keep the completions of an optimizer step, which a plan may not do.
    keeps_batch = recipe.run.keep_global_batch or recipe.run.expected_processes == launch.num_processes
    batch = "" if keeps_batch else " --keep_global_batch false"

    commands = {}
    if server_command is not None:
        shares = ", which shares output_dir" if training.vllm_sync_adapter else ""
        commands[f"This starts the server, on the node {node or '$SERVER'}{shares}:"] = [server_command]

    file = _accelerate_file(recipe, launch)
    variable = f"ACCELERATE_FILE={shlex.quote(file)} " if file is not None else ""
    of_each_node = []
    if file is not None:
        of_each_node.append(f"{variable}{place} recipes/launch/accelerate.sh {settings}{server}")
    if launch.torchrun is not None:
        variables = [launch.torchrun] if launch.torchrun else []
        if not training.needs_gpu:
            variables.append("ACCELERATE_USE_CPU=true")
        of_each_node.append(" ".join([*variables, place, f"recipes/launch/torchrun.sh {settings}{server}"]))
    what = "This starts the run" if len(of_each_node) == 1 else "One of these starts the run"
    where = "this node" if nodes == 1 else "each node, whose number is $NODE_RANK; $HEAD is the address of node 0"
    commands[f"{what}, on {where}:"] = of_each_node

    if file is not None:
        slurm = f"sbatch --nodes {nodes} --gpus-per-node {gpus} recipes/launch/slurm.sh"
        commands["Or this, once, as a job of Slurm:"] = [f"{variable}{slurm} {settings}{batch}{server}"]
    starts_server = server and not training.vllm_sync_adapter and training.vllm_server_port == DEFAULT_PORT
    if starts_server and file is not None and nodes == 1 and gpus == server_gpus == 4:
        words = shlex.join([path, recipe.model_name, *overrides])
        command = f"{variable}recipes/launch/four_plus_four.sh {words}{batch}"
        commands["Or this, which starts both the server and the run on one node:"] = [command]
    return commands


def _node_of_server(training: RolloutConfig) -> str | None:
    """Return the node of the vLLM server that the settings name, `None` if they leave TRL's default."""
    if training.vllm_server_base_url:
        return urlsplit(training.vllm_server_base_url).hostname
    default = RolloutConfig.__dataclass_fields__["vllm_server_host"].default
    return training.vllm_server_host if training.vllm_server_host != default else None


def _server_command(recipe: Recipe, num_gpus: int) -> str | None:
    """Return the command that starts the vLLM server of a run on some GPUs of a node of its own, or `None` if there
    is none; `plan` prints another one for the server of continuous rollouts, which runs beside the trainer."""
    training = recipe.training
    if not (training.use_vllm and training.vllm_mode == "server") or training.rollout_schedule == "continuous":
        return None
    port = urlsplit(server_url(training)).port or DEFAULT_PORT
    rank = max_lora_rank(training, None, adapter_config(recipe.model))
    if rank is not None:  # adapters are sent instead of weights
        option = f" --port {port}" if port != DEFAULT_PORT else ""
        return f"{serve_command(recipe.model_name, rank)} --tensor-parallel-size {num_gpus}{option}"
    variables = f"GPUS={num_gpus} " + (f"PORT={port} " if port != DEFAULT_PORT else "")
    return f"{variables}recipes/launch/server.sh {shlex.quote(recipe.model_name)}"


def _accelerate_file(recipe: Recipe, launch: Launch) -> str | None:
    """Return the accelerate file that starts a launch; without one that of one process or of DDP, or `None` if that
    would change the precision of the run."""
    if launch.accelerate_config is not None:
        return launch.accelerate_config
    if not (recipe.training.bf16 or recipe.training.fp16):
        return None  # both files have `mixed_precision: bf16`
    name = "single_gpu.yaml" if launch.num_processes == 1 else "ddp.yaml"
    return f"recipes/accelerate_configs/{name}"
