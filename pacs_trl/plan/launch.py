"""The launch that an accelerate file describes, read without accelerate's machine: how many processes, what they
shard.

What accelerate would refuse is refused here, because `pacs-trl plan` is run where nothing is launched.
"""

import difflib
import json
from collections.abc import Iterable, Set
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
    *("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "zero3_save_16bit_model"),
    *("offload_optimizer_device", "offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path"),
}

# It copies every key of a section over the option of that name, and says nothing where there is none.
_IGNORED = "accelerate ignores keys of {} that it does not know, and would shard by its defaults."


@dataclass(frozen=True)
class Launch:
    """
    How a run is started: on how many GPUs, how they share the training state (`"none"`, `"gradients"` or `"full"`),
    the same in words; `distributed_type` of the accelerate file, its FSDP version (1 or 2), and its mixed precision,
    which counts where the recipe asks for neither `bf16` nor `fp16`.
    """

    num_processes: int
    sharding: str
    description: str
    kind: str = "NO"
    fsdp_version: int | None = None
    mixed_precision: str = "no"


def read_launch(accelerate_config: str | None, num_processes: int | None) -> tuple[Launch | None, list[str]]:
    """
    The launch that an accelerate file describes, or without one a single process or plain data parallelism; on
    `num_processes` where the command line says so. `None` with what accelerate would refuse or ignore, or what this
    package is not run with.
    """
    if num_processes is not None and num_processes < 1:
        return None, [f"--num-processes must be at least 1, got {num_processes}."]
    if accelerate_config is None and (num_processes or 1) == 1:
        return Launch(1, "none", "one process"), []
    if accelerate_config is None:
        return Launch(num_processes, "none", f"{num_processes} processes, DDP", "MULTI_GPU"), []
    try:
        config = read_mapping(accelerate_config, "accelerate file")
    except ValueError as error:
        return None, [str(error)]
    if "dataset_name" in config:
        return None, [f"{accelerate_config} is a recipe (it has the key `dataset_name`), and no file of accelerate."]
    launch, errors = None, _malformed(config)
    if not errors:
        launch, errors = _launch(config, num_processes, accelerate_config)
    return (None if errors else launch), [f"{accelerate_config}: {error}" for error in errors]


def _malformed(config: dict) -> list[str]:
    """Values are single words and numbers; only sections are mappings, of such values again. Keys are accelerate's."""
    values = {}
    for key, value in config.items():
        section = isinstance(value, dict) and (key.endswith("_config") or key == "dynamo_config")
        values |= {f"{key}.{name}": inner for name, inner in value.items()} if section else {key: value}
    lists = {name: value for name, value in values.items() if isinstance(value, list | dict)}
    errors = [f"{name} must be one word or number, got {value!r}." for name, value in lists.items()]
    known = {field.name for field in fields(ClusterConfig)} | _OLD_ACCELERATE_KEYS
    return errors + _unknown(config, known, "accelerate refuses keys it does not know.")


def _unknown(keys: Iterable[str], known: Set[str], consequence: str) -> list[str]:
    hints = []
    for key in sorted(set(keys) - known):
        nearest = difflib.get_close_matches(key, known, n=1)
        hints.append(f"Rename `{key}` to `{nearest[0]}`, or remove it." if nearest else f"Remove `{key}`.")
    return [f"{consequence} {' '.join(hints)}"] if hints else []


def _launch(config: dict, num_processes: int | None, path: str) -> tuple[Launch, list[str]]:
    kind, errors = config.get("distributed_type"), []
    if kind not in (*_SHARDING, "DEEPSPEED"):
        quoted = " (YAML reads an unquoted NO as false: write 'NO')" if kind is False else ""
        kinds = ", ".join([*_SHARDING, "DEEPSPEED"])
        errors.append(f"distributed_type {kind!r} is not planned for{quoted}; choose one of {kinds}.")
    count = num_processes or config.get("num_processes", 1 if kind == "NO" else None)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        errors.append(f"num_processes must be at least 1, got {count!r}. Set it there or with --num-processes.")
    elif kind == "NO" and count > 1:
        errors.append(
            f"distributed_type NO starts one process, but num_processes is {count}. Use ddp.yaml or fsdp2.yaml, or "
            "set --num-processes 1."
        )
    precision = config.get("mixed_precision")
    if precision is None:
        precision = "fp16" if config.get("fp16") else "no"
    if str(precision).lower() not in ("no", "fp16", "bf16", "fp8"):
        quoted = " (YAML reads an unquoted no as false: write 'no')" if precision is False else ""
        errors.append(f"mixed_precision must be 'no', fp16, bf16 or fp8, got {precision!r}{quoted}.")
    sharding, version, words = _SHARDING.get(kind, "none"), None, kind
    options = {action.dest for action in launch_command_parser()._actions}
    if kind == "FSDP":
        section, options = _section(config, "fsdp_config"), {name for name in options if name.startswith("fsdp_")}
        section = {key if key.startswith("fsdp") else f"fsdp_{key}": value for key, value in section.items()}
        errors += _unknown(section, options, _IGNORED.format("fsdp_config"))
        version = {"1": 1, "2": 2}.get(str(section.get("fsdp_version", 1)))
        if version is None:
            errors.append(f"fsdp_version must be 1 or 2, got {section['fsdp_version']!r}.")
    if kind == "DEEPSPEED":
        section = _section(config, "deepspeed_config")
        errors += _unknown(section, options, _IGNORED.format("deepspeed_config"))
        stage, of_file, wrong = _zero_stage(section, config.get("mixed_precision"))
        errors += wrong
        precision, sharding, words = of_file or precision, _ZERO_SHARDING.get(stage, ""), f"DeepSpeed ZeRO-{stage}"
    description = f"{count} process{'es' * (count != 1)}, {words} ({path})"
    return Launch(count, sharding, description, kind, version, str(precision).lower()), errors


def _zero_stage(section: dict, mixed_precision: object) -> tuple[int | None, str | None, list[str]]:
    """The ZeRO stage, the mixed precision of a DeepSpeed file where there is one that says it, and what is wrong."""
    file, errors = section.get("deepspeed_config_file"), []
    name = "zero_stage" if file is None else "stage of zero_optimization"
    content = {"zero_optimization": {"stage": section.get("zero_stage", 2)}}  # accelerate's default
    if file is not None:
        twice = sorted(_SAID_BY_DEEPSPEED_FILE & section.keys())
        if twice := twice + ["mixed_precision"] * (mixed_precision is not None):
            errors.append(
                f"accelerate refuses {', '.join(twice)} next to deepspeed_config_file. Say it in {file} only."
            )
        if not Path(str(file)).is_file():
            errors.append(
                f"deepspeed_config_file {file!r} does not exist (seen from {Path.cwd()}), so the ZeRO stage is not "
                "known. Correct the path, or set zero_stage in its place."
            )
            return None, None, errors
        try:
            content = json.loads(Path(file).read_text())
        except ValueError as error:
            return None, None, [*errors, f"deepspeed_config_file {file!r} is not JSON: {error}."]
    stage = _section(content, "zero_optimization").get("stage")
    if not isinstance(stage, int) or stage not in _ZERO_SHARDING:
        errors.append(f"the {name} must be 0, 1, 2 or 3, got {stage!r}{'' if file is None else f' in {file}'}.")
        stage = None
    precisions = [name for name in ("bf16", "fp16") if _section(content, name).get("enabled") is True]
    return stage, precisions[-1] if precisions else None, errors


def _section(content: object, name: str) -> dict:
    section = content.get(name) if isinstance(content, dict) else None
    return section if isinstance(section, dict) else {}
