"""`pacs-trl plan`: what a recipe will do, and what is wrong with it, before any GPU is touched.

Reads the recipe and the accelerate file, computes, prints. Nothing is downloaded, no weights are loaded, and a machine
without GPU will do; modules of reward functions are imported. Conflicts (exit status 1) are settings that would stop the run or
make it another one than written; notes are worth knowing. Whether the data exist is left to the run.
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from unittest import mock

import torch
from transformers import TrainingArguments

from ..data.tasks import TASKS
from ..pacs_config import batch_arithmetic_errors
from ..recipe import METHODS, Recipe, build_recipe, read_settings, setting_errors
from ..train import check_model_directory, reward_function
from .estimates import (
    Step,
    describe,
    engine_conflict,
    estimate,
    has_float32_copies,
    memory_conflict,
    num_problems,
    weights_dtype,
)
from .launch import Launch, read_launch


# bfloat16 keeps 8 significant bits: adding less than 2^-9 of a weight changes nothing. Adam moves a weight by about the
# learning rate, and weights of these models are about 0.02.
_SMALLEST_BF16_LEARNING_RATE = 2**-9 * 0.02

# Without these the sizes of a step are not known.
_SIZES = {
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "generation_batch_size",
    "num_iterations",
    "num_generations",
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
        notes += batch_notes(own.config, step)
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
        illegal, with others (`None` if settings contradict each other); the sizes of a step (`None` if they are illegal or
        not known); and one message per mistake.

    Raises:
        `ValueError`: if the recipe does not exist or is no mapping.
    """
    settings = read_settings(["--config", path, *overrides])
    illegal = setting_errors(settings)
    if "method" in illegal:
        return None, None, list(illegal.values())
    settings = {key: value for key, value in settings.items() if key not in illegal}
    conflicts, step = list(illegal.values()), None
    if num_processes is not None and not illegal.keys() & _SIZES:
        step, errors = step_sizes(settings, num_processes)
        conflicts += errors
    if step is None:  # so that the other settings can be looked at
        batch = ("steps_per_generation", "generation_batch_size", "gradient_accumulation_steps")
        settings = {key: value for key, value in settings.items() if key not in batch}
        settings["per_device_train_batch_size"] = max(2, int(settings.get("num_generations", 8)))
    with as_if_launched(num_processes or 1):
        # `use_cpu` silences the question whether this machine's GPU can do what the recipe asks of another one's
        recipe, contradictions = build_recipe(settings | {"use_cpu": True})
    conflicts += contradictions.values()
    model = settings.get("model_name_or_path")
    conflicts += [] if model is None else _missing_model(model)
    conflicts += _reward_conflicts(settings.get("reward_funcs", []))
    return recipe, step, conflicts


def _missing_model(name: str) -> list[str]:
    """The local directory or miniature task that is not there; nothing is made or downloaded."""
    task = name.removeprefix("miniature/").partition("/")[0]
    if name.startswith("miniature/") and task not in TASKS:
        return [f"There is no miniature task {task!r} ({name}). The tasks are: {', '.join(TASKS)}."]
    try:
        check_model_directory(name)
    except ValueError as error:
        return [str(error)]
    return []


def _reward_conflicts(names: list[str]) -> list[str]:
    conflicts = []
    for name in names:
        try:
            reward_function(name)
        except ValueError as error:
            conflicts.append(f"reward_funcs: {error}")
        except Exception as error:  # the module is the user's, and its import can raise anything
            conflicts.append(
                f"reward_funcs: the module of {name!r} cannot be imported here ({type(error).__name__}: {error}). It must "
                "be importable from the working directory of the run."
            )
    return conflicts


def step_sizes(settings: dict, num_processes: int) -> tuple[Step | None, list[str]]:
    """
    Sizes of a generation and of an optimizer step.

    Args:
        settings (`dict`):
            Keys of a recipe, each with a legal value.
        num_processes (`int`):
            Number of processes.

    Returns:
        [`Step`] and no messages, or `None` and what is wrong, with the nearest legal values.
    """
    given = {f.name: f.default for f in fields(METHODS[settings.get("method", "pacs")])} | settings
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


def batch_notes(path: str, step: Step | None) -> list[str]:
    """
    What a launch and a command line make of the batch that a recipe is written for.

    Args:
        path (`str`):
            The recipe. If it says `expected_processes`, its own sizes on so many processes are the batch meant.
        step ([`Step`], *optional*):
            The sizes of this run.

    Returns:
        `list[str]`: a sentence if they differ.
    """
    settings = read_settings(["--config", path])
    if step is None or setting_errors(settings) or settings.get("expected_processes") is None:
        return []
    meant, _ = step_sizes(settings, int(settings["expected_processes"]))
    if meant is None:
        return []
    notes = []
    for what, now, then in (
        (
            "generation",
            step.rows_per_generation / step.num_generations,
            meant.rows_per_generation / meant.num_generations,
        ),
        ("optimizer step", step.rows_per_update / step.num_generations, meant.rows_per_update / meant.num_generations),
    ):
        if now != then:
            notes.append(
                f"A{'n' * (what[0] == 'o')} {what} has {_share(now / then)} the recipe's batch: {now:,g} prompts instead of "
                f"{then:,g}. The recipe is written for {meant.num_processes} processes, this launch has "
                f"{step.num_processes}; gradient_accumulation_steps and steps_per_generation make up for it."
            )
    return notes


def _share(ratio: float) -> str:
    whole = round(1 / ratio) if ratio < 1 else round(ratio)
    if abs((1 / ratio if ratio < 1 else ratio) - whole) > 1e-9:
        return f"{ratio:.2g} times"
    if ratio > 1:
        return "twice" if whole == 2 else f"{whole} times"
    names = {2: "half of", 3: "one third of", 4: "one quarter of", 8: "one eighth of"}
    return names.get(whole, f"1/{whole} of")


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
        if has_float32_copies(recipe, launch):
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
    if training.max_completion_length is not None and (too_large := memory_conflict(recipe, launch)):
        conflicts.append(too_large)
    elif training.use_vllm and training.vllm_mode == "colocate":
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
