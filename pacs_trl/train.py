"""Training from a recipe: `accelerate launch -m pacs_trl.train --config RECIPE.yaml [--key value ...]`."""

import sys


if __name__ == "__main__":  # before the slow imports below, so that help, errors, and Ctrl-C are fast
    from .cli import run

    sys.exit(run("train", sys.argv[1:]))

import signal
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from accelerate import PartialState
from datasets import Dataset
from transformers import TrainerState
from transformers.integrations import CodeCarbonCallback, get_reporting_integration_callbacks
from transformers.training_args import ParallelMode
from trl import GRPOConfig, get_quantization_config

from . import rewards
from .data import TRAINING_SETS, load_training_data, shuffled_and_split
from .data.environments import environment_of_user, examples_of, reward_functions_of
from .data.images import has_images
from .errors import UserError, during_run, without_exit
from .plan.models import adapter_error, empty_model, local_config
from .plan.sharding import NEEDS_PROCESSES
from .recipe import (
    WORDS_FOR_LAST_CHECKPOINT,
    WORDS_FOR_NO_CHECKPOINT,
    Recipe,
    RunArguments,
    adapter_config,
    load_tokenizer,
    read_recipe,
    reward_function,
    trainer_of_method,
)
from .rewards import configure_verification, needs_solution, run_python, shared_code_verifier, tool_function
from .rollouts.checkpoint_files import check_complete, check_output_dir, last_resumable_checkpoint
from .rollouts.compared_settings import check_same_adapter
from .rollouts.dataset_checks import OPTIONAL_PARAMETERS, check_dataset, check_number_of_prompts
from .rollouts.image_checkpoints import processor_of
from .rollouts.launched_sharding import uses_plugin
from .rollouts.process_count import check_batch, check_processes, read_saved_run
from .rollouts.stop_on_signal import SIGNAL_NAMES, StopOnSignal
from .rollouts.trackers import tracked_run
from .settings.names import check_model_path, function_of_user, looks_like_path, make_directory, unloadable_model
from .update.step_sizes import BatchSizes


if TYPE_CHECKING:
    from .rollouts.rollout_trainer import RolloutTrainer


def main(
    argv: Sequence[str] | None = None, trainer_class: "type[RolloutTrainer] | None" = None
) -> "RolloutTrainer | None":
    """
    Train from a recipe, save model, model card, and resolved recipe to `output_dir`, and push with `push_to_hub`.

    Args:
        argv (`Sequence[str]`, *optional*): Command-line arguments, by default `sys.argv`.
        trainer_class (`type`, *optional*): Subclass to use instead of the method's trainer.

    Returns:
        The trainer after training; `None` if the run to resume is finished.

    Raises:
        `SystemExit`: with code 143 or 130, after SIGTERM or Ctrl-C and a checkpoint.
    """
    recipe = read_recipe(sys.argv[1:] if argv is None else argv)
    training = recipe.training
    trainer_class = trainer_class or trainer_of_method(recipe.run.method)

    # Where the run starts
    resume_from = str(training.resume_from_checkpoint)  # a word, or the path of a checkpoint
    if resume_from in WORDS_FOR_LAST_CHECKPOINT and _is_finished(training):
        PartialState().print(
            f"The run in {training.output_dir} is finished and its model is saved. Raise max_steps or "
            "num_train_epochs to train longer."
        )
        return None
    checkpoint = _checkpoint_to_resume(training.output_dir, resume_from)
    if checkpoint is not None:
        _check_processes(recipe, checkpoint)
    check_output_dir(training.output_dir, checkpoint, resumes=resume_from not in WORDS_FOR_NO_CHECKPOINT)
    make_directory(training.output_dir, "output_dir")
    _check_trackers(training.report_to)
    if training.fsdp and training.parallel_mode != ParallelMode.DISTRIBUTED:
        raise UserError(NEEDS_PROCESSES)

    # Rewards, model, and data, so that errors come before weights are loaded
    configure_verification(recipe.verification)
    environment, environment_factory = None, None
    with without_exit("The environment"):
        if recipe.run.environment:
            environment = environment_of_user(recipe.run.environment)
            environment_factory = environment.environment_factory
        reward_funcs, tools, rollout_func = _functions_of_user(recipe.run, environment)
    _complete_configuration(recipe)
    tokenizer = _load_tokenizer(recipe)
    _check_adapter(recipe)
    peft_config = adapter_config(recipe.model)
    if checkpoint is not None:
        check_same_adapter(checkpoint, peft_config, is_in_model=False)
    with without_exit("The environment"):
        train_dataset, eval_dataset = _datasets(recipe, tokenizer, reward_funcs, environment)
    processing_class = tokenizer
    if has_images(train_dataset):
        processing_class = processor_of(recipe.model_name, training)

    # Training
    with (
        tracked_run(training, recipe.settings, resuming=checkpoint is not None) as tracking,
        closing(StopOnSignal()) as stopping,
    ):
        trainer = trainer_class(
            model=recipe.model_name,
            reward_funcs=list(reward_funcs),  # TRL replaces entries
            args=training,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            quantization_config=get_quantization_config(recipe.model),
            peft_config=peft_config,
            callbacks=[tracking, stopping],
            tools=tools,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
        )
        trainer.recipe = _settings_that_repeat(recipe.settings)
        trainer.accelerator.print(_batch_sizes(recipe.step, len(train_dataset)))
        with during_run():
            trainer.train(resume_from_checkpoint=checkpoint)
        if stopping.stopped is not None:
            _exit_after_signal(trainer, Path(training.output_dir), stopping.stopped)
        trainer.save_model(_internal_call=True)  # no push yet

    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.print(
        f"Saved in {training.output_dir}: the model, its card (README.md), recipe.yaml, and trainer_state.json with "
        "all logged metrics."
    )
    if training.push_to_hub:
        trainer.upload(Path(training.output_dir), "End of training")
    return trainer


def _check_trackers(report_to: list[str]) -> None:
    """Raise a `ValueError` for trackers that transformers does not know, or whose package is not installed."""
    try:
        for callback in get_reporting_integration_callbacks(report_to):
            if callback is not CodeCarbonCallback:  # which begins to measure
                callback()
    except (ValueError, RuntimeError, ImportError) as error:
        reason = str(error).rstrip(".")
        raise UserError(f"report_to: {reason}. Correct the name, install the package, or remove the key.") from error


def _batch_sizes(step: BatchSizes, num_prompts: int) -> str:
    """Return the line that says what a generation and an optimizer step consist of."""
    return (
        f"Generation: {step.prompts_per_generation:.0f} of {num_prompts} prompts x {step.num_generations} "
        f"completions. Optimizer step: {step.prompts_per_update:g} prompts x {step.num_generations}. Optimizer "
        f"steps per generation: {step.updates_per_generation}. Processes: {step.num_processes}."
    )


def _exit_after_signal(trainer: "RolloutTrainer", output_dir: Path, signum: signal.Signals) -> NoReturn:
    """Exit after a signal, with a line that says how to continue."""
    trainer.accelerator.wait_for_everyone()  # a launcher ends the other processes when the first one exits
    state = trainer.state
    exit_code = 128 + signum
    outcome = "; nothing was saved."
    if state.global_step:
        checkpoint = output_dir / f"checkpoint-{state.global_step}"
        outcome = f", saved in {checkpoint}. Continue with `--resume_from_checkpoint last`."
    trainer.accelerator.print(
        f"Stopped by {SIGNAL_NAMES[signum]} after optimizer step {state.global_step} of {state.max_steps}{outcome} "
        f"Exit code {exit_code}."
    )
    raise SystemExit(exit_code)


def _settings_that_repeat(settings: dict) -> dict:
    """Return settings that repeat the run from any folder: absolute paths, and no checkpoint to resume from."""
    repeatable = {key: value for key, value in settings.items() if key != "resume_from_checkpoint"}
    keys_of_paths = ["model_name_or_path", "critic_model_name_or_path", "dataset_path"]
    if settings.get("dataset_name") not in TRAINING_SETS:
        keys_of_paths.append("dataset_name")
    for key in keys_of_paths:
        name = settings.get(key)
        if name and Path(name).exists():
            repeatable[key] = str(Path(name).resolve())
    return repeatable


def _complete_configuration(recipe: Recipe) -> None:
    """Put the settings of model and data that the trainer reads into its configuration."""
    model, training = recipe.model, recipe.training
    loading = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
    }
    training.model_init_kwargs = loading | (training.model_init_kwargs or {})
    training.eval_data = recipe.data  # from which prompts of benchmarks are made


def _load_tokenizer(recipe: Recipe) -> Any:
    """Load the tokenizer. Raises a `ValueError` if the model, or that of the critic, does not exist."""
    training, name = recipe.training, recipe.model_name
    check_model_path(name, "training")
    if training.has_critic and training.critic_model_name_or_path:
        check_model_path(training.critic_model_name_or_path)
    try:
        return load_tokenizer(recipe)
    except OSError as error:
        if Path(name).exists() or looks_like_path(name):
            raise
        raise unloadable_model(name, error) from error


def _check_adapter(recipe: Recipe) -> None:
    """Raise a `ValueError` if the LoRA settings do not fit a local model, without loading its weights."""
    if not recipe.model.use_peft:
        return
    config = local_config(recipe)
    if config is None:
        return
    model_without_weights = empty_model(config, recipe.training.trust_remote_code)
    if model_without_weights is None:
        return
    error = adapter_error(recipe, model_without_weights)
    if error:
        raise UserError(error)


def _datasets(
    recipe: Recipe, tokenizer: Any, reward_funcs: list[Callable], environment: Any
) -> tuple[Dataset, Dataset | None]:
    """Return the training and evaluation examples, of the environment or of the named data."""
    training, data = recipe.training, recipe.data
    if environment is not None:
        num_batches = recipe.step.num_generation_batches(training.max_steps)
        num_examples = int(num_batches * recipe.step.prompts_per_generation)  # of an environment without a dataset
        examples = examples_of(environment, num_examples, data.eval_split_size)
        train_dataset, eval_dataset = shuffled_and_split(examples, data)
    else:
        load_processor = partial(processor_of, recipe.model_name, training)
        train_dataset, eval_dataset = load_training_data(
            data,
            tokenizer,
            training.chat_template_kwargs,
            load_processor,
            needs_solution=needs_solution(reward_funcs),
        )
    check_number_of_prompts(len(train_dataset), training)
    if environment is None and recipe.run.rollout_func is None:  # these pass more columns to reward functions
        check_dataset("the training set", train_dataset, reward_funcs, OPTIONAL_PARAMETERS)
    return train_dataset, eval_dataset


def _functions_of_user(
    run: RunArguments, environment: Any
) -> tuple[list[Callable], list[Callable] | None, Callable | None]:
    """Return the reward functions (of the environment, if the recipe names none), tools, and rollout function of a
    recipe, and start the sandbox, so that errors come before training."""
    reward_funcs = [reward_function(name) for name in run.reward_funcs]
    if not reward_funcs:
        reward_funcs = reward_functions_of(environment)
    tools = None
    if run.tools:
        tools = [tool_function(name) for name in run.tools]
    rollout_func = None
    if run.rollout_func:
        rollout_func = function_of_user(run.rollout_func, "rollout_func")
    if rewards.code_reward in reward_funcs or run_python in (tools or []):
        verifier = shared_code_verifier()
        verifier.start()
        PartialState().print(f"Programs run with {verifier.level}.")
    return reward_funcs, tools, rollout_func


def _checkpoint_to_resume(output_dir: str, resume_from: str) -> str | None:
    """Return the checkpoint to continue from; `None` to start from the beginning."""
    if resume_from in WORDS_FOR_NO_CHECKPOINT:
        return None
    if resume_from in WORDS_FOR_LAST_CHECKPOINT:
        last = last_resumable_checkpoint(output_dir)
        if last is None:
            PartialState().print(f"{output_dir} contains no checkpoint, so training starts from the beginning.")
        return last
    check_complete(resume_from)
    return resume_from


def _check_processes(recipe: Recipe, checkpoint: str) -> None:
    """Raise a `ValueError` if the processes of this launch cannot continue from a checkpoint."""
    training = recipe.training
    saved_run = read_saved_run(checkpoint)
    sharding = "none"
    if uses_plugin(training, "FSDP"):
        sharding = "FSDP"
    if uses_plugin(training, "DEEPSPEED"):
        sharding = "DeepSpeed"
    check_processes(
        saved_run,
        checkpoint,
        training.world_size,
        sharding,
        needs_same_number=training.needs_same_number_of_processes,
    )
    check_batch(saved_run, checkpoint, recipe.step, keeps_batch=recipe.run.keep_global_batch)


def _is_finished(training: GRPOConfig) -> bool:
    """Whether the run in `output_dir` has finished all steps and saved its model, after which it writes its state."""
    assert training.output_dir is not None  # transformers sets a default
    try:
        state = TrainerState.load_from_json(str(Path(training.output_dir, "trainer_state.json")))
    except (OSError, ValueError):  # absent or truncated
        return False
    if training.max_steps > 0:
        return state.global_step >= training.max_steps
    return (state.epoch or 0.0) >= training.num_train_epochs
