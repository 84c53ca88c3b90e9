"""The launch that an accelerate file describes, read without accelerate's machine: how many processes, what they shard.

What accelerate would refuse is refused here, because `pacs-trl plan` is run where nothing is launched.
"""

import difflib
import json
from dataclasses import dataclass, fields
from pathlib import Path

from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser

from ..settings import read_mapping


_SHARDING = {"NO": "none", "MULTI_GPU": "none", "MULTI_CPU": "none", "FSDP": "full"}
_ZERO_SHARDING = {0: "none", 1: "gradients", 2: "gradients", 3: "full"}

# What accelerate takes besides the fields of its class, and what it refuses next to a DeepSpeed file.
_OLD_ACCELERATE_KEYS = {"fp16", "dynamo_backend"}
_SAID_BY_DEEPSPEED_FILE = {
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_param_nvme_path",
    "offload_optimizer_nvme_path",
    "zero3_save_16bit_model",
}


@dataclass(frozen=True)
class Launch:
    """
    How a run is started.

    Attributes:
        num_processes (`int`):
            Number of GPUs.
        sharding (`str`):
            How processes share the training state: `"none"`, `"gradients"` or `"full"`.
        description (`str`):
            The same in words.
        kind (`str`):
            `distributed_type` of the accelerate file.
        fsdp_version (`int`, *optional*):
            1 or 2 where `kind` is `"FSDP"`.
        mixed_precision (`str`):
            That of the accelerate file, which counts where the recipe asks for neither `bf16` nor `fp16`.
    """

    num_processes: int
    sharding: str
    description: str
    kind: str = "NO"
    fsdp_version: int | None = None
    mixed_precision: str = "no"


def read_launch(accelerate_config: str | None, num_processes: int | None) -> Launch:
    """
    The launch that an accelerate file describes; without one, a single process or plain data parallelism.

    Raises:
        `ValueError`: if the file does not exist, accelerate would refuse it, or it describes something this package is
            not run with.
    """
    if num_processes is not None and num_processes < 1:
        raise ValueError(f"--num-processes must be at least 1, got {num_processes}.")
    if accelerate_config is None:
        count = num_processes or 1
        kind = "NO" if count == 1 else "MULTI_GPU"
        return Launch(count, "none", "one process" if count == 1 else f"{count} processes, DDP", kind)
    path = accelerate_config
    config = read_mapping(path, "accelerate file")
    _refuse_lists(config, path)
    known = {field.name for field in fields(ClusterConfig)} | _OLD_ACCELERATE_KEYS
    if unknown := sorted(config.keys() - known):
        raise ValueError(
            f"{path}: accelerate refuses keys it does not know. {' '.join(_hint(k, known) for k in unknown)}"
        )
    kind = config.get("distributed_type")
    if kind != "DEEPSPEED" and kind not in _SHARDING:
        quoted = " (YAML reads an unquoted NO as false: write 'NO')" if kind is False else ""
        raise ValueError(
            f"{path}: distributed_type {kind!r} is not planned for{quoted}; choose one of "
            f"{', '.join([*_SHARDING, 'DEEPSPEED'])}."
        )
    count = num_processes or config.get("num_processes", 1 if kind == "NO" else None)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(
            f"{path}: num_processes must be at least 1, got {count!r}. Set it there or with --num-processes."
        )
    if kind == "NO" and count > 1:
        raise ValueError(
            f"{path} starts one process (distributed_type NO), but num_processes is {count}. Use ddp.yaml or "
            "fsdp2.yaml, or set --num-processes 1."
        )
    processes = f"{count} process{'es' * (count > 1)}"
    precision = _mixed_precision(config, path)
    if kind == "DEEPSPEED":
        stage, of_file = _zero_stage(config, path)
        name = f"{processes}, DeepSpeed ZeRO-{stage} ({path})"
        return Launch(count, _ZERO_SHARDING[stage], name, kind, mixed_precision=of_file or precision)
    version = _fsdp_version(config, path) if kind == "FSDP" else None
    return Launch(count, _SHARDING[kind], f"{processes}, {kind} ({path})", kind, version, precision)


def _hint(key: str, known: set[str]) -> str:
    nearest = difflib.get_close_matches(key, known, n=1)
    return f"Rename `{key}` to `{nearest[0]}`, or remove it." if nearest else f"Remove `{key}`."


def _refuse_lists(config: dict, path: str) -> None:
    """Values are single words and numbers; only sections are mappings, of such values again."""
    for key, value in config.items():
        section = isinstance(value, dict) and (key.endswith("_config") or key == "dynamo_config")
        for name, inner in value.items() if section else ((key, value),):
            if isinstance(inner, list | dict):
                where = f"{key}.{name}" if section else key
                raise ValueError(f"{path}: {where} must be one word or number, got {inner!r}.")


def _refuse_ignored(section: dict, name: str, path: str) -> None:
    """accelerate copies every key of a section over the option of that name, and says nothing where there is none."""
    known = {action.dest for action in launch_command_parser()._actions}
    options = section.keys()
    if name == "fsdp_config":
        known = {option for option in known if option.startswith("fsdp_")}
        options = {key if key.startswith("fsdp") else f"fsdp_{key}" for key in options}
    if unknown := sorted(options - known):
        raise ValueError(
            f"{path}: accelerate ignores keys of {name} that it does not know, and would shard by its defaults. "
            + " ".join(_hint(key, known) for key in unknown)
        )


def _fsdp_version(config: dict, path: str) -> int:
    section = _section(config, "fsdp_config")
    _refuse_ignored(section, "fsdp_config", path)
    version = section.get("fsdp_version", section.get("version", 1))
    if str(version) not in ("1", "2"):
        raise ValueError(f"{path}: fsdp_version must be 1 or 2, got {version!r}.")
    return int(version)


def _mixed_precision(config: dict, path: str) -> str:
    precision = config.get("mixed_precision")
    if precision is None:
        return "fp16" if config.get("fp16") else "no"
    if str(precision).lower() not in ("no", "fp16", "bf16", "fp8"):
        quoted = " (YAML reads an unquoted no as false: write 'no')" if precision is False else ""
        raise ValueError(f"{path}: mixed_precision must be 'no', fp16, bf16 or fp8, got {precision!r}{quoted}.")
    return str(precision).lower()


def _zero_stage(config: dict, path: str) -> tuple[int, str | None]:
    """The ZeRO stage, and the mixed precision of a DeepSpeed file where there is one that says it."""
    deepspeed = _section(config, "deepspeed_config")
    _refuse_ignored(deepspeed, "deepspeed_config", path)
    file, precision = deepspeed.get("deepspeed_config_file"), None
    stage = deepspeed.get("zero_stage", 2)  # accelerate's default
    if file is not None:
        twice = sorted(_SAID_BY_DEEPSPEED_FILE & deepspeed.keys())
        twice += ["mixed_precision"] if config.get("mixed_precision") is not None else []
        if twice:
            raise ValueError(
                f"{path}: accelerate refuses {', '.join(twice)} next to deepspeed_config_file. Say it in {file} only."
            )
        if not Path(str(file)).is_file():
            raise ValueError(
                f"{path}: deepspeed_config_file {file!r} does not exist (seen from {Path.cwd()}), so the ZeRO stage is "
                "not known. Correct the path, or set zero_stage in its place."
            )
        try:
            content = json.loads(Path(file).read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: deepspeed_config_file {file!r} is not JSON: {error}.") from error
        stage = _section(content, "zero_optimization").get("stage")
        path = file
        for name in ("bf16", "fp16"):
            if _section(content, name).get("enabled") is True:
                precision = name
    if not isinstance(stage, int) or stage not in _ZERO_SHARDING:
        key = "zero_stage" if file is None else "stage of zero_optimization"
        raise ValueError(f"{path}: the {key} must be 0, 1, 2 or 3, got {stage!r}.")
    return stage, precision


def _section(content: object, name: str) -> dict:
    section = content.get(name) if isinstance(content, dict) else None
    return section if isinstance(section, dict) else {}
