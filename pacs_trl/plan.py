"""`pacs-trl plan`: what a recipe will do, and what is wrong with it, before any GPU is touched.

Reads the recipe and the accelerate file, computes, prints. Nothing is downloaded, no weights are loaded, and a machine
without GPU will do; modules of reward functions are imported. Conflicts (exit status 1) are settings that would stop the run or make it another one than written;
notes are worth knowing. Whether the data exist is left to the run.
"""

import argparse
import difflib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from unittest import mock

import torch
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from transformers import TrainingArguments
from trl import ModelConfig

from .data import DataArguments
from .estimates import Launch, Step, describe, engine_conflict, estimate, num_problems, weights_dtype
from .pacs_config import batch_arithmetic_errors
from .recipe import METHODS, Recipe, RunArguments, read_recipe
from .train import _reward_function
from .verification import VerificationArguments


# bfloat16 keeps 8 significant bits: adding less than 2^-9 of a weight changes nothing. Adam moves a weight by about the
# learning rate, and weights of these models are about 0.02.
_SMALLEST_BF16_LEARNING_RATE = 2**-9 * 0.02

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

# Settings that count something: the least of it, and what.
_COUNTS = {
    "per_device_train_batch_size": (1, "rows of a micro-batch"),
    "gradient_accumulation_steps": (1, "micro-batches of an optimizer step"),
    "steps_per_generation": (1, "micro-batches of a generation"),
    "generation_batch_size": (1, "completions of a generation"),
    "num_iterations": (1, "updates from a completion"),
    "num_generations": (2, "completions of a prompt, which are compared with each other"),
    "max_completion_length": (1, "tokens of a completion"),
}


def main(argv: Sequence[str]) -> int:
    """
    Print the plan of a recipe.

    Args:
        argv (`Sequence[str]`):
            `--config RECIPE.yaml [--accelerate-config FILE] [--num-processes N] [--mean-length TOKENS] [--key value ...]`.

    Returns:
        `int`: 0, or 1 if there is a conflict.
    """
    parser = argparse.ArgumentParser(prog="pacs-trl plan", description="What a recipe will do. Needs no GPU.")
    parser.add_argument("--config", required=True, help="Recipe; any of its keys may follow as --key value.")
    parser.add_argument("--accelerate-config", help="The file that `accelerate launch --config_file` gets.")
    parser.add_argument("--num-processes", type=int, help="Number of GPUs; by default that of the accelerate file.")
    parser.add_argument(
        "--mean-length", type=int, help="Expected tokens per completion; by default 35 %% of the most."
    )
    own, overrides = parser.parse_known_args(argv)

    launch, recipe, step = None, None, None
    conflicts: list[str] = []
    notes: list[str] = []
    try:
        launch = read_launch(own.accelerate_config, own.num_processes)
    except ValueError as error:
        conflicts.append(str(error))
    try:
        recipe, step, errors = check_recipe(own.config, overrides, launch.num_processes if launch else None)
        conflicts += errors
    except ValueError as error:
        conflicts.append(str(error))
    if recipe is not None and launch is not None:
        print(f"{own.config}: {recipe.run.method}, {recipe.model.model_name_or_path}, {recipe.data.dataset_name}")
        print(f"Launched as {launch.description}.")
        more_conflicts, notes = judge(recipe, step, launch)
        conflicts += more_conflicts
        longest = recipe.training.max_completion_length
        if step is not None and longest is not None:
            mean_length = max(1, round(0.35 * longest)) if own.mean_length is None else own.mean_length
            if 1 <= mean_length <= longest:
                print("\n".join(describe(recipe, step, mean_length) + estimate(recipe, step, launch, mean_length)))
            else:
                conflicts.append(
                    f"--mean-length must lie between 1 and max_completion_length={longest}, got {mean_length}: "
                    f"completions do. Nearest legal value: {min(max(1, mean_length), longest)}."
                )
    for title, messages in (("Notes", notes), ("Conflicts", conflicts)):
        if messages:
            print(f"\n{title}")
            print("\n".join(f"  - {message}" for message in messages))
    print("\nNo conflicts." if not conflicts else f"\n{len(conflicts)} conflict(s): fix before launching.")
    return 1 if conflicts else 0


def _read_mapping(path: str, what: str) -> dict:
    if not Path(path).is_file():
        raise ValueError(f"The {what} {path!r} does not exist (seen from {Path.cwd()}).")
    try:
        content = yaml.safe_load(Path(path).read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"The {what} {path!r} is not YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(content, dict):
        found = "nothing" if content is None else type(content).__name__
        raise ValueError(f"The {what} {path!r} must be a YAML mapping of settings, got {found}.")
    return {str(key): value for key, value in content.items()}  # `on:` and `no:` are no strings to YAML


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
    config = _read_mapping(path, "accelerate file")
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
    if not isinstance(count, int) or count < 1:
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
    version = _section(config, "fsdp_config").get("fsdp_version", 1) if kind == "FSDP" else None
    return Launch(count, _SHARDING[kind], f"{processes}, {kind} ({path})", kind, version, precision)


def _hint(key: str, known: set[str]) -> str:
    nearest = difflib.get_close_matches(key, known, n=1)
    return f"Rename `{key}` to `{nearest[0]}`, or remove it." if nearest else f"Remove `{key}`."


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
    file, precision = deepspeed.get("deepspeed_config_file"), None
    stage = deepspeed.get("zero_stage", 2)  # accelerate's default
    if file is not None:
        twice = sorted(_SAID_BY_DEEPSPEED_FILE & deepspeed.keys())
        twice += ["mixed_precision"] if config.get("mixed_precision") is not None else []
        if twice:
            raise ValueError(
                f"{path}: accelerate refuses {', '.join(twice)} next to deepspeed_config_file. Say it in {file} only."
            )
        if not Path(file).is_file():
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
    if stage not in _ZERO_SHARDING:
        key = "zero_stage" if file is None else "stage of zero_optimization"
        raise ValueError(f"{path}: the {key} must be 0, 1, 2 or 3, got {stage!r}.")
    return stage, precision


def _section(content: object, name: str) -> dict:
    section = content.get(name) if isinstance(content, dict) else None
    return section if isinstance(section, dict) else {}


@contextmanager
def as_if_launched(num_processes: int) -> Iterator[None]:
    """Lets configuration classes compute with `num_processes`, although there is only this process and perhaps no GPU."""

    def refuse(parser, message: str):  # instead of printing the usage of all settings
        if not message.startswith("argument --"):
            raise ValueError(f"The settings cannot be read: {message}.")
        names, _, reason = message.removeprefix("argument --").partition(": ")
        raise ValueError(f"`{names.split('/')[0]}` is refused: {reason}.")

    def setup(arguments) -> torch.device:
        arguments.distributed_state = None
        arguments._n_gpu = 0
        return torch.device("cpu")

    with (
        mock.patch.object(TrainingArguments, "_setup_devices", property(setup)),
        mock.patch.object(TrainingArguments, "world_size", property(lambda arguments: num_processes)),
        mock.patch.dict(os.environ, {"WORLD_SIZE": str(num_processes)}),
        mock.patch.object(argparse.ArgumentParser, "error", refuse),
    ):
        yield


def check_recipe(
    path: str, overrides: Sequence[str], num_processes: int | None
) -> tuple[Recipe | None, Step | None, list[str]]:
    """
    Read a recipe as the run would, but do not stop at the first mistake.

    Args:
        path (`str`):
            The recipe.
        overrides (`Sequence[str]`):
            `--key value` pairs that win over the file.
        num_processes (`int`, *optional*):
            Number of processes of the run; `None` if that is not known, so that batch sizes cannot be judged.

    Returns:
        The recipe as dataclasses, without keys that are unknown or have no legal value and, if the batch sizes are
        illegal, with others (`None` if something else is wrong with it); the sizes of a step (`None` if they are illegal
        or not known); and one message per mistake.

    Raises:
        `ValueError`: if the recipe does not exist or is no mapping.
    """
    settings = _read_mapping(path, "recipe")
    types = _types(settings)
    for key, value in _pairs(overrides).items():  # as on the command line of the run, where one word may be a list
        is_list = types.get(key, "").removeprefix("typing.Optional[").startswith("list[")
        settings[key] = [value] if is_list and not isinstance(value, list) and value is not None else value
    nulls = _illegal_nulls(settings, types)
    settings = {key: value for key, value in settings.items() if key not in nulls}
    illegal = _illegal_counts(settings)
    conflicts = [*nulls.values(), *illegal.values()]
    step = None
    if num_processes is not None and not illegal:
        step, errors = step_sizes(settings, num_processes)
        conflicts += errors
    if step is None:  # so that the other settings can be looked at
        batch = ("steps_per_generation", "generation_batch_size", "gradient_accumulation_steps")
        settings = {key: value for key, value in settings.items() if key not in illegal and key not in batch}
        settings["per_device_train_batch_size"] = max(2, int(settings.get("num_generations", 8)))
    recipe, errors = _read_what_is_legal(settings, num_processes or 1)
    conflicts += errors
    if recipe is not None:
        conflicts += _reward_conflicts(recipe.run.reward_funcs)
    return recipe, step, conflicts


def _reward_conflicts(names: list[str] | str) -> list[str]:
    if isinstance(names, str):  # the run would take it letter by letter
        return [f"reward_funcs must be a list, got {names!r}. Write [{names}]."]
    conflicts = []
    for name in names:
        try:
            _reward_function(name)
        except ValueError as error:
            conflicts.append(f"reward_funcs: {error}")
        except Exception as error:  # the module is the user's, and its import can raise anything
            conflicts.append(
                f"reward_funcs: the module of {name!r} cannot be imported here ({type(error).__name__}: {error}). It must "
                "be importable from the working directory of the run."
            )
    return conflicts


def _types(settings: dict) -> dict[str, str]:
    """Type of each setting, as its dataclass writes it."""
    parts = (RunArguments, DataArguments, ModelConfig, _config_class(settings), VerificationArguments)
    return {field.name: str(field.type) for part in parts for field in fields(part)}


def _illegal_nulls(settings: dict, types: dict[str, str]) -> dict[str, str]:
    """What is wrong with `null` as the value of a setting that needs one."""
    return {
        key: f"{key} must have a value, got null. Remove it for its default."
        for key, value in settings.items()
        if value is None and key in types and key not in _COUNTS and not re.search("None|Optional", types[key])
    }


def _illegal_counts(settings: dict) -> dict[str, str]:
    """What is wrong with the settings that count something, each on its own."""
    defaults = _defaults(settings)
    messages = {}
    for name, (least, what) in _COUNTS.items():
        value = settings.get(name, defaults[name])
        if value is None and (defaults[name] is None or name == "max_completion_length"):
            continue
        number = int(value) if isinstance(value, str) and value.isdigit() else value
        if isinstance(number, int) and not isinstance(number, bool) and number >= least:
            continue
        known = isinstance(number, int | float) and not isinstance(number, bool)
        nearest = max(least, round(number)) if known else (defaults[name] or least)
        messages[name] = (
            f"{name} must be a whole number of at least {least}, got {value!r}: it counts the {what}. "
            f"{'Nearest legal value' if known else 'Its default is'}{': ' if known else ' '}{nearest}."
        )
    return messages


def _defaults(settings: dict) -> dict:
    return {field.name: field.default for field in fields(_config_class(settings))}


def _config_class(settings: dict) -> type:
    return METHODS.get(str(settings.get("method", "pacs")), METHODS["pacs"])


def _pairs(overrides: Sequence[str]) -> dict:
    pairs: dict = {}
    words = [part for word in overrides for part in (word.split("=", 1) if word.startswith("--") else [word])]
    key = None
    for word in words:
        if word.startswith("--"):
            key = word[2:].replace("-", "_")
            pairs[key] = True
        elif key is None:
            raise ValueError(f"Cannot make sense of {word!r}: settings are given as --key value.")
        else:
            try:
                value = yaml.safe_load(word)
            except yaml.YAMLError:  # a text with braces or colons
                value = word
            pairs[key] = (
                value if pairs[key] is True else [*(old if isinstance(old := pairs[key], list) else [old]), value]
            )
    return pairs


def _read(settings: dict, num_processes: int) -> Recipe:
    with tempfile.TemporaryDirectory() as directory, as_if_launched(num_processes):
        file = Path(directory) / "recipe.yaml"
        # `use_cpu` silences the question whether this machine's GPU can do what the recipe asks of another one's
        file.write_text(yaml.safe_dump(settings | {"use_cpu": True}))
        return read_recipe(["--config", str(file)])


def _read_what_is_legal(settings: dict, num_processes: int) -> tuple[Recipe | None, list[str]]:
    """The recipe without the keys that `read_recipe` refuses by name, if that makes one, and what it says about them."""
    messages: list[str] = []
    while True:
        try:
            return _read(settings, num_processes), messages
        except ValueError as error:
            message = str(error)
        messages.append(message)
        refused = {
            key
            for key in settings
            if any(f"`{key}` is {end}" in message for end in ("not a setting", "a setting of", "refused"))
        }
        if not refused:
            return None, messages
        settings = {key: value for key, value in settings.items() if key not in refused}


def step_sizes(settings: dict, num_processes: int) -> tuple[Step | None, list[str]]:
    """
    Sizes of a generation and of an optimizer step.

    Args:
        settings (`dict`):
            Keys of a recipe.
        num_processes (`int`):
            Number of processes.

    Returns:
        [`Step`] and no messages, or `None` and what is wrong, with the nearest legal values.
    """
    if illegal := _illegal_counts(settings):
        return None, list(illegal.values())
    given = _defaults(settings) | settings
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations", "num_iterations")
    sizes = {name: int(given[name]) for name in names}
    slot = sizes["per_device_train_batch_size"] * num_processes
    accumulation = sizes["gradient_accumulation_steps"]
    steps_per_generation = accumulation
    if given["steps_per_generation"] is not None:
        steps_per_generation = int(given["steps_per_generation"])
    if given["generation_batch_size"] is not None:
        if given["steps_per_generation"] is not None:
            return None, ["generation_batch_size and steps_per_generation say the same thing: give only one of them."]
        rows = int(given["generation_batch_size"])
        if rows % slot:
            return None, [
                f"generation_batch_size={rows} must be a multiple of per_device_train_batch_size x processes = {slot}. "
                f"Nearest legal values: {max(rows // slot, 1) * slot} or {(rows // slot + 1) * slot}."
            ]
        steps_per_generation = rows // slot
    errors = batch_arithmetic_errors(num_processes=num_processes, steps_per_generation=steps_per_generation, **sizes)
    if errors:
        return None, errors
    return Step(
        num_processes=num_processes,
        num_generations=sizes["num_generations"],
        rows_per_generation=slot * steps_per_generation,
        rows_per_update=slot * accumulation,
        updates_per_generation=max(1, steps_per_generation // accumulation) * sizes["num_iterations"],
        micro_batches_per_update=accumulation,
        generations_per_update=max(1, accumulation // steps_per_generation),
    ), []


def judge(recipe: Recipe, step: Step | None, launch: Launch) -> tuple[list[str], list[str]]:
    """Conflicts and notes about settings that are legal each on its own."""
    method, training = recipe.run.method, recipe.training
    conflicts, notes = [], []
    if training.max_completion_length is None:
        conflicts.append(
            "max_completion_length is not set, so that completions have no bound. The paper uses 8192 (v2)."
        )
    if step is not None and training.save_strategy == "steps" and training.save_steps % step.updates_per_generation:
        below = training.save_steps // step.updates_per_generation * step.updates_per_generation
        nearest = [n for n in (below, below + step.updates_per_generation) if n]
        boundary = (
            f"save_steps={training.save_steps} is not a multiple of the {step.updates_per_generation} updates per "
            f"generation (nearest: {' or '.join(map(str, nearest))})"
        )
        if method == "grpo":
            conflicts.append(f"{boundary}: GRPO forgets the rollouts of a generation that a checkpoint interrupts.")
        else:
            notes.append(f"{boundary}; checkpoints then hold rollouts too, and resuming stays exact.")
    problems = num_problems(recipe)
    if step is not None and problems is not None and problems * step.num_generations < step.rows_per_generation:
        conflicts.append(
            f"A generation needs {step.rows_per_generation // step.num_generations} different prompts, but {problems} "
            f"problems are trained on (max_train_samples={recipe.data.max_train_samples}, eval_split_size="
            f"{recipe.data.eval_split_size}). Use more of them, or lower steps_per_generation."
        )
    if lost := _lost_updates(recipe):
        if _has_float32_copies(recipe, launch):
            notes.append(f"{lost} FSDP and DeepSpeed make float32 copies; dtype: float32 says so in the recipe.")
        else:
            conflicts.append(f"{lost} Set dtype: float32 and bf16: true (float32 weights, bfloat16 arithmetic).")
    if method == "ppo" and launch.kind == "DEEPSPEED":
        conflicts.append(
            "PPO trains two models, which DeepSpeed does not do in one process. Use fsdp2.yaml or ddp.yaml."
        )
    if method == "ppo" and launch.kind == "FSDP" and launch.fsdp_version != 2:
        conflicts.append(
            f"PPO supports FSDP2 only, and the accelerate file asks for fsdp_version {launch.fsdp_version}. Set "
            "fsdp_version: 2 in its fsdp_config, as fsdp2.yaml does."
        )
    if training.use_vllm and training.vllm_mode == "colocate":
        conflicts += _engine_conflicts(recipe, launch)
    if training.max_steps > 0 and step is not None and training.max_steps % step.updates_per_generation:
        notes.append(
            f"max_steps={training.max_steps} counts optimizer steps and ends in the middle of a generation of "
            f"{step.updates_per_generation} updates."
        )
    return conflicts, notes


def _lost_updates(recipe: Recipe) -> str | None:
    dtype, learning_rate = weights_dtype(recipe), recipe.training.learning_rate
    if dtype == "float32" or recipe.model.use_peft or learning_rate >= _SMALLEST_BF16_LEARNING_RATE:
        return None
    return (
        f"dtype={dtype} with learning_rate={learning_rate:g}: bfloat16 weights cannot take steps below about "
        f"{_SMALLEST_BF16_LEARNING_RATE:.0e}, so most of the update would be lost."
    )


def _has_float32_copies(recipe: Recipe, launch: Launch) -> bool:
    """FSDP and DeepSpeed train float32 copies of half-precision weights, but only under mixed precision. What the recipe
    asks for wins over the accelerate file."""
    mixed_precision = recipe.training.bf16 or recipe.training.fp16 or launch.mixed_precision != "no"
    return launch.kind in ("FSDP", "DEEPSPEED") and mixed_precision


def _engine_conflicts(recipe: Recipe, launch: Launch) -> list[str]:
    """What is wrong with an engine on the GPUs that train."""
    training, conflicts = recipe.training, []
    if launch.num_processes % training.vllm_tensor_parallel_size:
        conflicts.append(
            f"vllm_tensor_parallel_size={training.vllm_tensor_parallel_size} must divide the number of processes "
            f"({launch.num_processes})."
        )
    if training.max_completion_length is None:
        return conflicts
    if no_room := engine_conflict(recipe, launch):
        conflicts.append(no_room)
    longest = (recipe.data.max_prompt_length or 0) + training.max_completion_length
    if training.vllm_max_model_length is not None and training.vllm_max_model_length < longest:
        conflicts.append(
            f"vllm_max_model_length={training.vllm_max_model_length} cannot hold max_prompt_length="
            f"{recipe.data.max_prompt_length} plus max_completion_length={training.max_completion_length}. Set it to "
            f"at least {longest}."
        )
    return conflicts
