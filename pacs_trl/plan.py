"""`pacs-trl plan`: what a recipe will do, and what is wrong with it, before any GPU is touched.

Reads the recipe and the accelerate file, computes, prints. Nothing is downloaded, no weights are loaded, and a machine
without GPU will do. Conflicts (exit status 1) are settings that would stop the run or make it another one than written;
notes are worth knowing. Whether the data exist is left to the run.
"""

import argparse
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from unittest import mock

import torch
import yaml
from transformers import TrainingArguments

from .estimates import Launch, Step, describe, engine_conflict, estimate
from .pacs_config import batch_arithmetic_errors
from .recipe import METHODS, Recipe, read_recipe


# bfloat16 keeps 8 significant bits: adding less than 2^-9 of a weight changes nothing. Adam moves a weight by about the
# learning rate, and weights of these models are about 0.02.
_SMALLEST_BF16_LEARNING_RATE = 2**-9 * 0.02

_SHARDING = {"NO": "none", "MULTI_GPU": "none", "MULTI_CPU": "none", "FSDP": "full"}


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

    launch = read_launch(own.accelerate_config, own.num_processes)
    recipe, step, conflicts = check_recipe(own.config, overrides, launch.num_processes)
    notes: list[str] = []
    if recipe is not None:
        print(f"{own.config}: {recipe.run.method}, {recipe.model.model_name_or_path}, {recipe.data.dataset_name}")
        print(f"Launched as {launch.description}.")
        more_conflicts, notes = judge(recipe, step, launch)
        conflicts += more_conflicts
    if recipe is not None and step is not None and recipe.training.max_completion_length is not None:
        mean_length = own.mean_length or round(0.35 * recipe.training.max_completion_length)
        print("\n".join(describe(recipe, step, mean_length) + estimate(recipe, step, launch, mean_length)))
    for title, messages in (("Notes", notes), ("Conflicts", conflicts)):
        if messages:
            print(f"\n{title}")
            print("\n".join(f"  - {message}" for message in messages))
    print("\nNo conflicts." if not conflicts else f"\n{len(conflicts)} conflict(s): fix before launching.")
    return 1 if conflicts else 0


def read_launch(accelerate_config: str | None, num_processes: int | None) -> Launch:
    """
    The launch that an accelerate file describes; without one, a single process or plain data parallelism.

    Raises:
        `ValueError`: if the file does not exist or describes something this package is not run with.
    """
    if accelerate_config is None:
        count = num_processes or 1
        return Launch(count, "none", "one process" if count == 1 else f"{count} processes, DDP")
    if not Path(accelerate_config).is_file():
        raise ValueError(f"The accelerate file {accelerate_config!r} does not exist (seen from {Path.cwd()}).")
    config = yaml.safe_load(Path(accelerate_config).read_text())
    kind = config.get("distributed_type", "NO")
    count = num_processes or config.get("num_processes", 1)
    if kind == "DEEPSPEED":
        stage = config["deepspeed_config"]["zero_stage"]
        sharding = {0: "none", 1: "gradients", 2: "gradients", 3: "full"}[stage]
        return Launch(count, sharding, f"{count} processes, DeepSpeed ZeRO-{stage} ({accelerate_config})")
    if kind not in _SHARDING:
        raise ValueError(
            f"{accelerate_config}: distributed_type {kind!r} is not planned for; choose one of "
            f"{', '.join([*_SHARDING, 'DEEPSPEED'])}."
        )
    if kind == "NO" and count > 1:
        raise ValueError(
            f"{accelerate_config} starts one process (distributed_type NO), but num_processes is {count}. Use ddp.yaml or "
            "fsdp2.yaml, or set --num-processes 1."
        )
    return Launch(count, _SHARDING[kind], f"{count} process{'es' * (count > 1)}, {kind} ({accelerate_config})")


@contextmanager
def as_if_launched(num_processes: int) -> Iterator[None]:
    """Lets configuration classes compute with `num_processes`, although there is only this process and perhaps no GPU."""

    def setup(arguments) -> torch.device:
        arguments.distributed_state = None
        arguments._n_gpu = 0
        return torch.device("cpu")

    with (
        mock.patch.object(TrainingArguments, "_setup_devices", property(setup)),
        mock.patch.object(TrainingArguments, "world_size", property(lambda arguments: num_processes)),
        mock.patch.dict(os.environ, {"WORLD_SIZE": str(num_processes)}),
    ):
        yield


def check_recipe(
    path: str, overrides: Sequence[str], num_processes: int
) -> tuple[Recipe | None, Step | None, list[str]]:
    """
    Read a recipe as the run would, but do not stop at the first mistake.

    Args:
        path (`str`):
            The recipe.
        overrides (`Sequence[str]`):
            `--key value` pairs that win over the file.
        num_processes (`int`):
            Number of processes of the run.

    Returns:
        The recipe as dataclasses, without unknown keys and, if the batch sizes are illegal, with others (`None` if
        something else is wrong with it); the sizes of a step (`None` if they are illegal); and one message per mistake.
    """
    if not Path(path).is_file():
        raise ValueError(f"The recipe {path!r} does not exist (seen from {Path.cwd()}).")
    settings = yaml.safe_load(Path(path).read_text())
    if not isinstance(settings, dict):
        raise ValueError(f"The recipe {path!r} must be a YAML mapping of settings, got {type(settings).__name__}.")
    settings |= _pairs(overrides)
    conflicts = []
    settings, unknown = _without_unknown_keys(settings)
    if unknown:
        conflicts.append(unknown)
    step, errors = step_sizes(settings, num_processes)
    conflicts += errors
    if step is None:  # so that the other settings can be looked at
        for name in ("steps_per_generation", "generation_batch_size", "gradient_accumulation_steps"):
            settings.pop(name, None)
        settings["per_device_train_batch_size"] = max(2, int(settings.get("num_generations", 8)))
    try:
        return _read(settings, num_processes), step, conflicts
    except ValueError as error:
        return None, step, [*conflicts, str(error)]


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
            value = yaml.safe_load(word)
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


def _without_unknown_keys(settings: dict) -> tuple[dict, str | None]:
    """The settings that exist, and what `read_recipe` says about the others."""
    try:
        _read(settings, 1)
    except ValueError as error:
        message = str(error)
        unknown = {k for k in settings if f"`{k}` is not a setting" in message or f"`{k}` is a setting of" in message}
        if unknown:
            return {key: value for key, value in settings.items() if key not in unknown}, message
    return settings, None


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
    config = METHODS.get(settings.get("method", "pacs"), METHODS["pacs"])
    defaults = {f.name: f.default for f in fields(config)}
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations", "num_iterations")
    sizes = {name: int(settings.get(name, defaults[name])) for name in names}
    slot = sizes["per_device_train_batch_size"] * num_processes
    steps_per_generation = settings.get("steps_per_generation") or sizes["gradient_accumulation_steps"]
    rows = settings.get("generation_batch_size")
    if rows is not None:
        if settings.get("steps_per_generation") is not None:
            return None, ["generation_batch_size and steps_per_generation say the same thing: give only one of them."]
        if rows % slot:
            return None, [
                f"generation_batch_size={rows} must be a multiple of per_device_train_batch_size x processes = {slot}. "
                f"Nearest legal values: {max(rows // slot, 1) * slot} or {(rows // slot + 1) * slot}."
            ]
        steps_per_generation = rows // slot
    errors = batch_arithmetic_errors(
        num_processes=num_processes, steps_per_generation=int(steps_per_generation), **sizes
    )
    if errors:
        return None, errors
    accumulation = sizes["gradient_accumulation_steps"]
    return Step(
        num_processes=num_processes,
        num_generations=sizes["num_generations"],
        rows_per_generation=slot * int(steps_per_generation),
        rows_per_update=slot * accumulation,
        updates_per_generation=max(1, int(steps_per_generation) // accumulation) * sizes["num_iterations"],
        micro_batches_per_update=accumulation,
    ), []


def judge(recipe: Recipe, step: Step | None, launch: Launch) -> tuple[list[str], list[str]]:
    """Conflicts and notes about settings that are legal each on its own."""
    method, training, model = recipe.run.method, recipe.training, recipe.model
    conflicts, notes = [], []
    if training.max_completion_length is None:
        return ["max_completion_length is not set, so that completions have no bound. The paper uses 8192 (v2)."], []
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
    trained_in = (training.model_init_kwargs or {}).get("dtype", model.dtype) or "float32"
    if trained_in != "float32" and not model.use_peft and training.learning_rate < _SMALLEST_BF16_LEARNING_RATE:
        message = (
            f"dtype={trained_in} with learning_rate={training.learning_rate:g}: bfloat16 weights cannot take steps below "
            f"about {_SMALLEST_BF16_LEARNING_RATE:.0e}, so most of the update would be lost."
        )
        if launch.sharding == "none":
            conflicts.append(f"{message} Set dtype: float32 and bf16: true (float32 weights, bfloat16 arithmetic).")
        else:
            notes.append(f"{message} FSDP2 and DeepSpeed make float32 copies; dtype: float32 says so in the recipe.")
    if method == "ppo" and "DeepSpeed" in launch.description:
        conflicts.append(
            "PPO trains two models, which DeepSpeed does not do in one process. Use fsdp2.yaml or ddp.yaml."
        )
    if training.use_vllm and training.vllm_mode == "colocate":
        if launch.num_processes % training.vllm_tensor_parallel_size:
            conflicts.append(
                f"vllm_tensor_parallel_size={training.vllm_tensor_parallel_size} must divide the number of processes "
                f"({launch.num_processes})."
            )
        if no_room := engine_conflict(recipe, launch):
            conflicts.append(no_room)
        longest = (recipe.data.max_prompt_length or 0) + training.max_completion_length
        if training.vllm_max_model_length is not None and training.vllm_max_model_length < longest:
            conflicts.append(
                f"vllm_max_model_length={training.vllm_max_model_length} cannot hold max_prompt_length="
                f"{recipe.data.max_prompt_length} plus max_completion_length={training.max_completion_length}. Set it to "
                f"at least {longest}."
            )
    if training.max_steps > 0 and step is not None and training.max_steps % step.updates_per_generation:
        notes.append(
            f"max_steps={training.max_steps} counts optimizer steps and ends in the middle of a generation of "
            f"{step.updates_per_generation} updates."
        )
    return conflicts, notes
