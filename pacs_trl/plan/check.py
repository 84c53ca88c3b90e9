"""`pacs-trl plan`: conflicts in a recipe and estimates of its cost.

Nothing is downloaded and no weights are loaded; modules of reward functions are imported. Conflicts (exit status 1)
would stop the run or change its meaning; notes do not. Prompts are measured if data and tokenizer are on this machine.
"""

import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoConfig
from trl import get_quantization_config

from ..data import TRAINING_SETS, gym, load_training_data
from ..data.environments import environment_of_user
from ..data.images import dataset_prompt_lengths, has_images
from ..data.sets import hub_ids, is_data_file, is_function
from ..errors import UserError
from ..recipe import (
    WORDS_FOR_LAST_CHECKPOINT,
    WORDS_FOR_NO_CHECKPOINT,
    Recipe,
    adapter_config,
    load_tokenizer,
    reward_function,
    settings_without_effect,
)
from ..rewards import needs_solution, tool_function
from ..rollouts.adapter_checks import max_lora_rank
from ..rollouts.attention_checks import (
    flash_attention_4_error,
    missing_attention,
    unknown_attention,
    unsupported_attention,
)
from ..rollouts.checkpoint_files import check_output_dir, last_resumable_checkpoint
from ..rollouts.dataset_checks import OPTIONAL_PARAMETERS, check_dataset
from ..rollouts.half_precision import rounded_updates
from ..rollouts.image_checkpoints import processor_of
from ..rollouts.layer_compilation import refusal_of_compilation
from ..rollouts.model_checks import check_model_type
from ..rollouts.mxfp4 import check_mxfp4
from ..rollouts.optimizer_checks import missing_optimizer
from ..rollouts.process_count import check_batch, check_processes, read_saved_run
from ..rollouts.prompt_lengths import check_prompt_lengths
from ..rollouts.router_checks import check_router_loss
from ..rollouts.server_command import continuous_server_command
from ..settings import read_settings
from ..settings.names import check_model_path, function_of_user, hub_suggestion
from ..update.context_length import context_lengths
from . import read_plan_arguments
from .cost import GPUS
from .estimates import UNKNOWN, Estimate, Prompts
from .launch import Launch, gpus_of_server, launch_commands, read_launch
from .models import adapter_error
from .sharding import NEEDS_PROCESSES
from .workload import FSDP_RECOMPUTES, mean_completion


def main(argv: Sequence[str]) -> int:
    """Print the plan of a recipe; return 0, or 1 if it has conflicts."""
    options = read_plan_arguments(argv)
    notes: list[str] = []
    launch, conflicts = read_launch(options.accelerate_config, options.num_processes)
    if launch is not None:
        recipe, errors = check_recipe(options.config, _overrides(options), launch.num_processes)
        conflicts += errors
        if recipe is not None:
            launch = launch.with_settings_of(recipe.training)
            more_conflicts, notes = print_plan(options, recipe, launch, measures_prompts=not conflicts)
            conflicts += more_conflicts
    for title, messages in (("Notes", notes), ("Conflicts", conflicts)):
        if messages:
            print(f"\n{title}\n" + "\n".join(f"  - {message}" for message in messages))
    print(f"\n{len(conflicts)} conflict(s): fix them before launching." if conflicts else "\nNo conflicts.")
    return 1 if conflicts else 0


def _overrides(options: Namespace) -> list[str]:
    """Return the words of the command line that override keys of the recipe."""
    resume = [] if options.resume is None else ["--resume_from_checkpoint", options.resume]
    return [*options.overrides, *resume]


def print_plan(
    options: Namespace, recipe: Recipe, launch: Launch, *, measures_prompts: bool
) -> tuple[list[str], list[str]]:
    """Print what a recipe does on a launch, its memory, and its time, and return conflicts and notes. Prompts are
    measured if `measures_prompts`, and nothing prevents the run from resuming."""
    conflicts: list[str] = []
    prompts = UNKNOWN
    if options.resume is not None:
        conflicts += print_sizes_to_resume(options.resume, recipe, launch)
    if measures_prompts and not conflicts:
        prompts, conflicts = measure(recipe)
    data = recipe.data.dataset_name
    print(f"{options.config}: {recipe.run.method}, {recipe.model_name}, {data}")
    print(f"Launched as {launch.description}.")
    estimate = Estimate(recipe, launch, GPUS[options.gpu], prompts)
    if options.nodes is not None:
        conflicts += print_commands(options.config, estimate, options.nodes, _overrides(options))
    if recipe.training.rollout_schedule == "continuous" and recipe.training.use_vllm:
        is_known = prompts.lengths or recipe.data.max_prompt_length
        conflicts += print_continuous_server(estimate, estimate.longest if is_known else None)
    conflicts += find_conflicts(estimate) + _output_errors(recipe.training)
    notes = find_notes(estimate)
    if is_data_file(data) and not Path(data).is_file():
        notes.append(f"The data file {data!r} does not exist here (relative to {Path.cwd()}).")
    elif not ("/" in data or data in (*TRAINING_SETS, "reasoning_gym") or is_function(data) or Path(data).exists()):
        near = hub_suggestion("datasets", data, hub_ids())
        notes.append(f"dataset_name: {data!r} is no named set and no file here; on the Hub it is OWNER/NAME.{near}")
    notes += settings_without_effect(recipe) + _batch_notes(options.config, recipe)

    longest = recipe.training.max_completion_length
    if longest is not None:
        mean_length = mean_completion(longest) if options.mean_length is None else options.mean_length
        if 1 <= mean_length <= longest:
            print(estimate.text(mean_length))
        else:
            conflicts.append(f"--mean_length is {mean_length}. Choose 1 to max_completion_length={longest}.")
    return conflicts, notes


def print_sizes_to_resume(checkpoint: str, recipe: Recipe, launch: Launch) -> list[str]:
    """Print the batch-size settings with which a launch continues a checkpoint; return what prevents it."""
    if checkpoint in WORDS_FOR_NO_CHECKPOINT:
        return []
    if checkpoint in WORDS_FOR_LAST_CHECKPOINT:
        last = last_resumable_checkpoint(recipe.training.output_dir)
        if last is None:
            print(f"{recipe.training.output_dir} contains no checkpoint, so training starts from the beginning.")
            return []
        checkpoint = last
    sharding = {"FSDP": "FSDP", "DEEPSPEED": "DeepSpeed"}.get(launch.kind, "none")
    needs_same_number = recipe.training.needs_same_number_of_processes
    try:
        saved = read_saved_run(checkpoint)
        check_processes(saved, checkpoint, launch.num_processes, sharding, needs_same_number=needs_same_number)
        sizes = saved.batch_sizes.for_processes(launch.num_processes).settings
    except UserError as error:
        return [str(error)]
    print(
        f"{checkpoint} was written by {saved.num_processes} processes, with "
        f"{saved.batch_sizes.completions_per_update} completions per optimizer step. "
        f"{launch.num_processes} continue it with keep_global_batch: true, or with"
    )
    for name, value in sizes.items():
        if value is not None and name not in ("num_generations", "num_iterations"):
            print(f"  {name}: {value}")
    try:
        check_batch(saved, checkpoint, recipe.step, keeps_batch=recipe.run.keep_global_batch)
    except UserError as error:
        return [str(error)]
    return []


def print_commands(path: str, estimate: Estimate, nodes: int, overrides: Sequence[str]) -> list[str]:
    """Print the commands that launch an estimated recipe with its `overrides` on some nodes; return what prevents
    it."""
    recipe, launch, server_gpus = estimate.recipe, estimate.launch, estimate.server_gpus
    try:
        commands = launch_commands(path, recipe, launch, nodes, overrides, server_gpus=server_gpus)
    except UserError as error:
        return [str(error)]
    for heading, lines in commands.items():
        print(heading)
        for line in lines:
            print(f"  {line}")
    return []


def print_continuous_server(estimate: Estimate, longest: int | None) -> list[str]:
    """Print the command that starts the vLLM server of a run with continuous rollouts, on GPUs of the trainer's node
    that do not train; `longest` are the tokens of the longest prompt and a completion of it, if they are known. Return
    what prevents it."""
    recipe = estimate.recipe
    training, on_cpu = recipe.training, not recipe.training.needs_gpu
    dtype = recipe.model.dtype or "float32"
    if training.bf16 or training.fp16:
        dtype = "bfloat16" if training.bf16 else "float16"
    try:
        rank = max_lora_rank(training, None, adapter_config(recipe.model))
    except UserError as error:
        return [str(error)]
    command = continuous_server_command(
        training,
        recipe.model_name,
        dtype,
        rank,
        on_cpu=on_cpu,
        longest=longest,
        gpus=gpus_of_server(estimate.num_gpus, estimate.num_heads),
    )
    print("This starts the server, on the machine of the trainer, with this package in its environment:")
    print(f"  {command}")
    return []


def check_recipe(path: str, overrides: Sequence[str], num_processes: int) -> tuple[Recipe | None, list[str]]:
    """
    Read a recipe file with `--key value` overrides, and check its names of directories, tasks, functions, and LoRA
    targets. Return the recipe (`None` if it cannot be read) and its errors.
    """
    try:
        recipe = Recipe.from_settings(read_settings(["--config", path, *overrides]), num_processes)
    except UserError as error:
        return None, [str(error)]
    run, training = recipe.run, recipe.training
    checks: list[Callable[[], Any]] = [partial(reward_function, name) for name in run.reward_funcs]
    checks += [partial(tool_function, name) for name in run.tools or []]
    if run.environment:
        checks.append(partial(environment_of_user, run.environment))
    if run.rollout_func:
        checks.append(partial(function_of_user, run.rollout_func, "rollout_func"))
    checks.append(partial(check_model_path, recipe.model_name, "training"))
    if training.has_critic and training.critic_model_name_or_path:
        checks.append(partial(check_model_path, training.critic_model_name_or_path))
    checks.append(partial(_check_lora_targets, recipe.model.lora_target_modules))
    checks.append(partial(adapter_config, recipe.model))
    errors = []
    for check in checks:
        try:
            check()
        except UserError as error:
            errors.append(str(error))
    return recipe, list(dict.fromkeys(errors))


def _check_lora_targets(targets: list[str] | str | None) -> None:
    """Raise a `ValueError` if `lora_target_modules` is text, but no regular expression."""
    try:
        re.compile(targets if isinstance(targets, str) else "")
    except re.error as error:
        raise UserError(
            f"lora_target_modules={targets!r} is no regular expression ({error}). Write a list of names."
        ) from error


def find_conflicts(estimate: Estimate) -> list[str]:
    """Return what would stop a run, in combinations of settings with each other, the model, and the launch."""
    return [
        *_data_conflicts(estimate),
        *_attention_conflicts(estimate),
        *_fsdp_conflicts(estimate),
        *_model_errors(estimate),
        *_update_conflicts(estimate),
        *_memory_conflicts(estimate),
        *_engine_conflicts(estimate),
    ]


def find_notes(estimate: Estimate) -> list[str]:
    """Return what a user should know about combinations of settings that do not stop a run."""
    training, uses_lora, costs = estimate.training, estimate.recipe.model.use_peft, estimate.costs
    obstacle = estimate.compile_obstacle
    notes = [] if uses_lora else [_note_on_rounded_updates(estimate)]
    notes.append(missing_attention(_loading_arguments(estimate)["attn_implementation"]))
    notes.append(missing_optimizer(training))
    if training.is_exact and training.compile_layers == "auto" and training.needs_gpu and obstacle:
        notes.append(f"Decoder layers are not compiled, so updates are slower: {obstacle.reason}.")
    if costs is not None and training.needs_gpu:
        notes += costs.notes_on_state()
    return [note for note in notes if note]


def _note_on_rounded_updates(estimate: Estimate) -> str | None:
    rate, copies = estimate.training.learning_rate, estimate.has_float32_copies
    return rounded_updates(estimate.dtype, rate, has_float32_copies=copies)


def _loading_arguments(estimate: Estimate) -> dict[str, Any]:
    """Return the dtype, attention, and other arguments with which the model is loaded."""
    arguments = {"attn_implementation": estimate.recipe.model.attn_implementation, "dtype": estimate.dtype}
    return arguments | (estimate.training.model_init_kwargs or {})


def _data_conflicts(estimate: Estimate) -> Iterator[str]:
    data, number, needed = estimate.recipe.data, estimate.num_problems, estimate.step.prompts_per_generation
    if number is not None and number < needed:
        yield (
            f"A generation needs {needed:.0f} different prompts, but the training set has {number} "
            f"(max_train_samples={data.max_train_samples}, eval_split_size={data.eval_split_size}). Use more "
            "problems, or lower steps_per_generation."
        )


def _attention_conflicts(estimate: Estimate) -> Iterator[str]:
    arguments, gpu = _loading_arguments(estimate), estimate.gpu
    implementation = arguments["attn_implementation"]
    if error := unknown_attention(implementation):
        yield error
    if estimate.config and (error := unsupported_attention(implementation, estimate.config)):
        yield error
    if error := flash_attention_4_error(estimate.training, arguments, gpu.compute_capability, gpu.name):
        yield error


def _fsdp_conflicts(estimate: Estimate) -> Iterator[str]:
    training, launch = estimate.training, estimate.launch
    if training.fsdp and launch.is_one_process:
        yield NEEDS_PROCESSES
    if training.gradient_checkpointing and launch.fsdp_recomputes:  # Trainer refuses both when the model is loaded
        yield FSDP_RECOMPUTES


def _update_conflicts(estimate: Estimate) -> Iterator[str]:
    training, launch = estimate.training, estimate.launch
    if estimate.critic_name and (launch.kind == "DEEPSPEED" or launch.fsdp_version == 1):
        yield (
            f"method: {estimate.recipe.run.method} trains two models, which DeepSpeed and FSDP 1 do not support. Use "
            "ddp.yaml or fsdp2.yaml."
        )
    if training.is_exact and training.compile_layers is True and estimate.compile_obstacle is not None:
        yield refusal_of_compilation(estimate.compile_obstacle)


def _memory_conflicts(estimate: Estimate) -> Iterator[str]:
    if estimate.training.max_completion_length is None:
        yield "max_completion_length is not set, so completions are unbounded. The paper uses 8192 (v2)."
    elif estimate.costs is not None and (does_not_fit := estimate.costs.memory_conflict()):
        yield does_not_fit


def _engine_conflicts(estimate: Estimate) -> Iterator[str]:
    training, processes = estimate.training, estimate.launch.num_processes
    is_colocated = training.use_vllm and training.vllm_mode == "colocate"
    if is_colocated and processes % training.vllm_tensor_parallel_size:
        yield (
            f"vllm_tensor_parallel_size={training.vllm_tensor_parallel_size} must divide the number of processes "
            f"({processes})."
        )


def _model_errors(estimate: Estimate) -> list[str]:
    """Return why the model on this machine cannot be trained as the recipe says."""
    recipe, config, errors = estimate.recipe, estimate.config, []
    if config is not None:
        try:
            arguments = {"quantization_config": get_quantization_config(recipe.model)}
            check_mxfp4(recipe.model_name, config, recipe.training, arguments)
            check_model_type(config)
            check_router_loss(config, recipe.training)
        except (ValueError, ImportError) as error:
            errors.append(str(error))
    if estimate.model is not None and (does_not_fit := adapter_error(recipe, estimate.model)):
        errors.append(does_not_fit)
    return errors


def _batch_notes(path: str, recipe: Recipe) -> list[str]:
    """Return how batch sizes differ from those with the recipe's `expected_processes`."""
    expected, now = recipe.run.expected_processes, recipe.step
    written = None if expected in (None, now.num_processes) else check_recipe(path, [], expected)[0]
    if written is None:
        return []
    names = {"A generation": "prompts_per_generation", "An optimizer step": "prompts_per_update"}
    sizes = [(what, getattr(now, name), getattr(written.step, name)) for what, name in names.items()]
    return [
        f"{what} has {size:,g} prompts instead of {meant:,g}, because the recipe is for {expected} processes and this "
        f"launch has {now.num_processes}. Adapt gradient_accumulation_steps and steps_per_generation."
        for what, size, meant in sizes
        if size != meant
    ]


def _has_local_data(recipe: Recipe) -> bool:
    """Whether the training data are on this machine, or made by a function."""
    name = recipe.data.dataset_name
    if name == gym.NAME:
        return True
    path = recipe.data.dataset_path if name in TRAINING_SETS else name
    if path is not None and Path(path).exists():
        return True
    if is_function(name):
        return not recipe.run.environment  # `environment` replaces `dataset_name`, and is not a function
    return False


def measure(recipe: Recipe) -> tuple[Prompts, list[str]]:
    """Load and measure the training prompts of a recipe, if they are on this machine; return them, and the error that
    a run would raise for model or data."""
    data, training, prompts = recipe.data, recipe.training, UNKNOWN
    is_local = _has_local_data(recipe)
    try:
        tokenizer, contexts = _local_model(recipe)
        functions = [reward_function(name) for name in recipe.run.reward_funcs]
        load_data = partial(load_training_data, needs_solution=needs_solution(functions))
        if tokenizer is None or not is_local:
            if is_local:
                prompts = Prompts(len(load_data(replace(data, max_prompt_length=None), None)[0]))
            return prompts, _length_errors(recipe, contexts)
        load_processor = partial(processor_of, recipe.model_name, training, local_files_only=True)
        dataset, evaluation = load_data(data, tokenizer, training.chat_template_kwargs, load_processor)
        if has_images(dataset):
            tokenizer = load_processor()
        tools = [tool_function(name) for name in recipe.run.tools or []] or None
        lengths = dataset_prompt_lengths("the training set", dataset, tokenizer, training.chat_template_kwargs, tools)
        prompts = Prompts(len(dataset), lengths)
        datasets = {"train_dataset": dataset, "eval_dataset": evaluation}
        check_prompt_lengths(datasets, training, tokenizer, tools, contexts)
        check_dataset("the training set", dataset, functions, OPTIONAL_PARAMETERS)
    except ValueError as error:  # also of libraries that read the model and the data
        return prompts, [str(error)]
    return prompts, []


def _length_errors(recipe: Recipe, contexts: dict[str, int | None]) -> list[str]:
    """Return the limits that a completion exceeds with the longest prompt that the recipe allows, or with a prompt of
    one token if it allows any."""
    data, training = recipe.data, recipe.training
    prompt, completion = data.max_prompt_length or 1, training.max_completion_length or 0
    limits: dict[str, int | None] = dict(contexts)
    uses_vllm = training.use_vllm or training.rollout_engine == "vllm"
    limits["vllm_max_model_length"] = training.vllm_max_model_length if uses_vllm else None
    if isinstance(training.max_tokens_per_micro_batch, int):
        limits["max_tokens_per_micro_batch"] = training.max_tokens_per_micro_batch
    errors = []
    for name, limit in limits.items():
        if limit and prompt + completion > limit:
            remedy = f"Raise it to {prompt + completion}"
            if name in contexts:
                name = f"the context of the model, {name}"
                remedy = f"Lower max_completion_length to {max(limit - prompt, 0)}"
            if data.max_prompt_length is None:
                errors.append(
                    f"max_completion_length={completion} leaves no room for a prompt in {name}={limit}. Lower "
                    "max_completion_length below it."
                )
                continue
            errors.append(
                f"A prompt of {prompt} tokens (max_prompt_length={data.max_prompt_length}) with max_completion_length="
                f"{completion} does not fit into {name}={limit}. {remedy}, or lower max_prompt_length."
            )
    return errors


def _output_errors(training: Any) -> list[str]:
    """Return why a run would not start because of what is in its `output_dir`."""
    resume = str(training.resume_from_checkpoint)
    checkpoint = None if resume in WORDS_FOR_NO_CHECKPOINT else resume
    if Path(training.output_dir).is_file():
        return [f"output_dir={training.output_dir!r} is a file. Name another directory."]
    if resume in WORDS_FOR_LAST_CHECKPOINT:
        checkpoint = last_resumable_checkpoint(training.output_dir)
        if (Path(training.output_dir) / "trainer_state.json").is_file():  # a finished run, which training continues
            return []
    try:
        check_output_dir(training.output_dir, checkpoint, resumes=resume not in WORDS_FOR_NO_CHECKPOINT)
    except ValueError as error:
        return [str(error)]
    return []


def _local_model(recipe: Recipe) -> tuple[Any, dict[str, int | None]]:
    """Return the tokenizer, or `None`, and the context lengths of a model on this machine."""
    name, training, tokenizer = recipe.model_name, recipe.training, None
    init_kwargs = {"trust_remote_code": training.trust_remote_code, **(training.model_init_kwargs or {})}
    try:
        tokenizer = load_tokenizer(recipe, local_files_only=True)
        return tokenizer, context_lengths(AutoConfig.from_pretrained(name, local_files_only=True, **init_kwargs))
    except OSError as error:
        if tokenizer is None and Path(name).is_dir():
            reason = " ".join(str(error).split())
            raise UserError(f"The tokenizer of the model cannot be loaded ({reason}). Add its files.") from error
        return tokenizer, {}
