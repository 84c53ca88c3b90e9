"""`pacs-trl plan`: what a recipe will do, and what is wrong with it, before any GPU is touched.

Nothing is downloaded, no weights are loaded; modules of reward functions are imported. Conflicts (exit status 1) are
settings that would stop the run or make it another one than written; notes are worth knowing. Whether data of the Hub
exist is left to the run.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from trl import ModelConfig

from ..data.sets import FILE_FORMATS
from ..data.tasks import TASKS
from ..recipe import METHODS, Recipe, RunArguments, read_arguments, settings_of_method
from ..rollouts.trainer_settings import precision_error
from ..settings.optional import check_model_path, check_whole_model
from ..train import reward_function, tool_function
from .arguments import read_plan_arguments
from .cost import GPUS, H200, Gpu
from .estimates import Estimate
from .launch import Launch, read_launch
from .prompts import UNKNOWN, Prompts, measure


# bfloat16 keeps 8 significant bits: adding less than 2^-9 of a weight changes nothing. Adam moves a weight by about
# the learning rate, and weights of these models are about 0.02.
_SMALLEST_BF16_LEARNING_RATE = 2**-9 * 0.02


def main(argv: Sequence[str]) -> int:
    """Print the plan of a recipe; `argv` is what the command line gives. Returns 0, or 1 if there is a conflict."""
    own = read_plan_arguments(argv, {key for method in METHODS for key in settings_of_method(method)})
    launch, conflicts = read_launch(own.accelerate_config, own.num_processes)
    recipe, notes, prompts = None, [], UNKNOWN
    try:
        recipe, errors = check_recipe(own.config, own.overrides, launch.num_processes if launch else None)
        if recipe is not None and not errors:
            prompts, errors = measure(recipe)
        conflicts += errors
    except ValueError as error:
        conflicts.append(str(error))
    if recipe is not None and launch is not None:
        print(f"{own.config}: {recipe.run.method}, {recipe.model.model_name_or_path}, {recipe.data.dataset_name}")
        print(f"Launched as {launch.description}.")
        gpu = GPUS[own.gpu]
        more_conflicts, notes = judge(recipe, launch, gpu, prompts)
        conflicts += more_conflicts
        if refused := precision_error(recipe.training):
            notes.append(f"{refused} The estimates are for an {gpu.name}.")
        notes += batch_notes(own.config, recipe) + data_notes(recipe.data.dataset_name)
        longest = recipe.training.max_completion_length
        if recipe.step is not None and longest is not None:
            mean_length = max(1, round(0.35 * longest)) if own.mean_length is None else own.mean_length
            if 1 <= mean_length <= longest:
                print("\n".join(Estimate(recipe, launch, gpu, prompts).lines(mean_length)))
            else:
                bounds = f"between 1 and max_completion_length={longest}"
                conflicts.append(f"--mean-length must lie {bounds}, got {mean_length}: completions do.")
    for title, messages in (("Notes", notes), ("Conflicts", conflicts)):
        if messages:
            print(f"\n{title}\n" + "\n".join(f"  - {message}" for message in messages))
    print("\nNo conflicts." if not conflicts else f"\n{len(conflicts)} conflict(s): fix before launching.")
    return 1 if conflicts else 0


def check_recipe(path: str, overrides: Sequence[str], num_processes: int | None) -> tuple[Recipe | None, list[str]]:
    """
    [`~recipe.Recipe.from_settings`] of a file and the `--key value` pairs that win over it, also with what is wrong
    with names: of the model's directory, of reward functions. Raises a `ValueError` if there is no such file, or no
    mapping in it.
    """
    recipe, errors = Recipe.from_settings(read_arguments(["--config", path, *overrides]), num_processes)
    if recipe is not None:
        critic = vars(recipe.training).get("critic_model_name_or_path")
        errors += _model_conflicts(recipe.model, critic or "") + _function_conflicts(recipe.run)
    return recipe, errors


def _model_conflicts(model: ModelConfig, critic: str) -> list[str]:
    """The local directory (also of the critic) or miniature task that is not there (nothing is made or downloaded),
    and LoRA's targets."""
    conflicts, name, targets = [], model.model_name_or_path or "", model.lora_target_modules
    task = name.removeprefix("miniature/").partition("/")[0]
    if name.startswith("miniature/") and task not in TASKS:
        conflicts.append(f"There is no miniature task {task!r} ({name}). The tasks are: {', '.join(TASKS)}.")
    try:
        check_model_path(name)
        check_whole_model(name, "training", "name the base model")
        check_model_path(critic or name)
        re.compile(targets if isinstance(targets, str) else "")
    except ValueError as error:
        conflicts.append(str(error))
    except re.error as error:
        conflicts.append(
            f"lora_target_modules: {targets!r} alone is a regular expression, and this is none ({error})."
        )
    return conflicts


def _function_conflicts(run: RunArguments) -> list[str]:
    conflicts = []
    named = [(reward_function, "reward_funcs", name) for name in run.reward_funcs]
    named += [(tool_function, "tools", name) for name in run.tools or []]
    for load, key, name in named:
        try:
            load(name)
        except ValueError as error:
            conflicts.append(f"{key}: {error}")
    return conflicts


def data_notes(name: str | None) -> list[str]:
    is_missing = name is not None and Path(name).suffix in FILE_FORMATS and not Path(name).is_file()
    return [f"The data file {name!r} does not exist here (seen from {Path.cwd()})."] if is_missing else []


def batch_notes(path: str, recipe: Recipe) -> list[str]:
    """What a launch and a command line make of the batch that the file is written for, if it says
    `expected_processes`."""
    expected, now = recipe.run.expected_processes, recipe.step
    written, _ = Recipe.from_settings(read_arguments(["--config", path]), expected)
    if expected is None or now is None or written is None or written.step is None:
        return []
    then = written.step
    sizes = {"A generation": "prompts_per_generation", "An optimizer step": "prompts_per_update"}
    pairs = [(what, getattr(now, name), getattr(then, name)) for what, name in sizes.items()]
    return [
        f"{what} has {size:,g} prompts instead of {meant:,g}. The recipe is written for {expected} processes, this "
        f"launch has {now.num_processes}; gradient_accumulation_steps and steps_per_generation make up for it."
        for what, size, meant in pairs
        if size != meant
    ]


def judge(recipe: Recipe, launch: Launch, gpu: Gpu = H200, prompts: Prompts = UNKNOWN) -> tuple[list[str], list[str]]:
    """Conflicts and notes about settings that are legal each on its own: with each other, and with the launch."""
    estimate = Estimate(recipe, launch, gpu, prompts)
    method = {"ppo": "PPO", "genac": "GenAC"}.get(recipe.run.method)
    conflicts, notes = _batch_findings(recipe, estimate.num_problems)
    dtype, learning_rate = estimate.dtype, recipe.training.learning_rate
    if dtype != "float32" and not recipe.model.use_peft and learning_rate < _SMALLEST_BF16_LEARNING_RATE:
        lost = (
            f"dtype={dtype} with learning_rate={learning_rate:g}: bfloat16 weights cannot take steps below about "
            f"{_SMALLEST_BF16_LEARNING_RATE:.0e}, so most of the update would be lost."
        )
        if estimate.has_float32_copies:
            notes.append(f"{lost} FSDP and DeepSpeed make float32 copies; dtype: float32 says so in the recipe.")
        else:
            conflicts.append(f"{lost} Set dtype: float32 and bf16: true (float32 weights, bfloat16 arithmetic).")
    if method and launch.kind == "DEEPSPEED":
        conflicts.append(f"{method} trains two models, which DeepSpeed does not do. Use fsdp2.yaml or ddp.yaml.")
    if method and launch.kind == "FSDP" and launch.fsdp_version != 2:
        conflicts.append(
            f"{method} supports FSDP2 only, and the accelerate file asks for fsdp_version {launch.fsdp_version}. Set "
            "fsdp_version: 2 in its fsdp_config, as fsdp2.yaml does."
        )
    if recipe.training.max_completion_length is None:
        conflicts.append("max_completion_length is not set, so completions have no bound. The paper uses 8192 (v2).")
    elif too_large := estimate.memory_conflict():
        return [*conflicts, too_large], notes
    return conflicts + _engine_conflicts(recipe, launch, estimate), notes


def _batch_findings(recipe: Recipe, problems: int | None) -> tuple[list[str], list[str]]:
    """Conflicts and notes about where generations end."""
    training, step, conflicts, notes = recipe.training, recipe.step, [], []
    if step is None:
        return [], []
    updates = step.updates_per_generation
    if training.save_strategy == "steps" and training.save_steps % updates:
        below = training.save_steps // updates * updates
        nearest = " or ".join(f"{n:g}" for n in (below, below + updates) if n)
        notes.append(
            f"save_steps={training.save_steps} is not a multiple of the {updates} updates per generation (nearest: "
            f"{nearest}); checkpoints then hold rollouts too, and resuming stays exact."
        )
    if problems is not None and problems < step.prompts_per_generation:
        conflicts.append(
            f"A generation needs {step.prompts_per_generation:.0f} different prompts, but {problems} problems are "
            "trained on "
            f"(max_train_samples={recipe.data.max_train_samples}, eval_split_size={recipe.data.eval_split_size}). Use "
            "more of them, or lower steps_per_generation."
        )
    if training.max_steps > 0 and training.max_steps % updates:
        notes.append(
            f"max_steps={training.max_steps} counts optimizer steps and ends in the middle of a generation of "
            f"{updates} updates."
        )
    return conflicts, notes


def _engine_conflicts(recipe: Recipe, launch: Launch, estimate: Estimate) -> list[str]:
    """What is wrong with an engine for two models, and with one on the GPUs that train."""
    training, conflicts, most = recipe.training, [], recipe.training.max_completion_length
    is_alone = recipe.run.method == "genac" and training.use_vllm and training.critic_vllm_server_base_url is None
    if is_alone and not estimate.unknown and estimate.shape != estimate.critic_shape:
        conflicts.append(
            f"The critic {training.critic_model_name_or_path!r} has another shape than the policy, and one vLLM "
            "engine serves both in "
            "turn. Use a critic of the policy's shape, or vllm_mode: server with critic_vllm_server_base_url."
        )
    if not (training.use_vllm and training.vllm_mode == "colocate"):
        return conflicts
    if launch.num_processes % training.vllm_tensor_parallel_size:
        conflicts.append(
            f"vllm_tensor_parallel_size={training.vllm_tensor_parallel_size} must divide the number of processes "
            f"({launch.num_processes})."
        )
    if no_room := most is not None and estimate.engine_conflict():
        conflicts.append(no_room)
    longest, room = (recipe.data.max_prompt_length or 0) + (most or 0), training.vllm_max_model_length
    critic = ""
    if recipe.run.method == "genac":
        longest += training.critic_max_new_tokens
        critic = (
            f", which the critic reads, plus critic_max_new_tokens={training.critic_max_new_tokens} and its template"
        )
    if most is not None and room is not None and room < longest:
        conflicts.append(
            f"vllm_max_model_length={room} cannot hold max_prompt_length={recipe.data.max_prompt_length} plus "
            f"max_completion_length={most}{critic}. Set it to at least {longest}."
        )
    return conflicts
