"""Training from a recipe: `accelerate launch -m pacs_trl.train --config RECIPE.yaml [--key value ...]`.

The same entry point trains a miniature model on two CPU cores and an 8B model on several nodes, with PACS or with a
baseline. What is trained on what is the recipe's business (`recipe.py`), how is the trainer's.
"""

import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml
from accelerate import PartialState
from transformers import AutoTokenizer
from transformers.trainer_utils import get_last_checkpoint
from trl import get_peft_config, get_quantization_config

from . import rewards
from .data import load_training_data
from .hub import push_trained, record_training
from .lora import check_lora_targets
from .recipe import Recipe, read_recipe
from .tracking import tracked_run
from .verification import configure_verification
from .vllm_checks import check_vllm


logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None):
    """
    Train as the recipe says, save model, model card and the resolved recipe to `output_dir`, and push if asked to.

    Args:
        argv (`Sequence[str]`, *optional*):
            Command-line arguments, by default those of the process.

    Returns:
        The trainer, after training.
    """
    recipe = read_recipe(sys.argv[1:] if argv is None else argv)
    training = recipe.training
    checkpoint = _checkpoint_to_resume(training.output_dir, training.resume_from_checkpoint)
    recipe.model.model_name_or_path = _resolve_model(recipe.model.model_name_or_path)
    if training.use_vllm:
        check_vllm(training, recipe.model.model_name_or_path)
    peft_config = get_peft_config(recipe.model)
    if peft_config is not None:
        check_lora_targets(
            peft_config,
            recipe.model.model_name_or_path,
            revision=recipe.model.model_revision,
            trust_remote_code=training.trust_remote_code,
        )
    configure_verification(recipe.verification)
    reward_funcs = [reward_function(name) for name in recipe.run.reward_funcs]
    tokenizer = AutoTokenizer.from_pretrained(
        recipe.model.model_name_or_path,
        revision=recipe.model.model_revision,
        trust_remote_code=training.trust_remote_code,
        padding_side="left",
    )
    train_dataset, eval_dataset = load_training_data(recipe.data, tokenizer, training.chat_template_kwargs)

    with tracked_run(training, recipe.settings, resuming=checkpoint is not None) as tracking:
        trainer = _trainer_class(recipe.run.method)(
            model=recipe.model.model_name_or_path,
            reward_funcs=reward_funcs,
            args=_with_model_arguments(recipe),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            quantization_config=get_quantization_config(recipe.model),
            peft_config=peft_config,
            callbacks=[tracking],
        )
        trainer.accelerator.print(describe_step(training, trainer.accelerator.num_processes, len(train_dataset)))
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model(training.output_dir, _internal_call=True)  # no push yet: it comes once, with everything
        trainer.create_model_card(model_name=Path(training.output_dir).name, dataset_name=recipe.data.dataset_name)
    if trainer.accelerator.is_main_process:
        (Path(training.output_dir) / "recipe.yaml").write_text(yaml.safe_dump(recipe.settings))
        record_training(trainer)
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.print(f"Saved model, model card and recipe to {training.output_dir}.")
    if training.push_to_hub:
        push_trained(trainer)
    return trainer


def _trainer_class(method: str) -> type:
    if method == "grpo":
        from trl import GRPOTrainer

        return GRPOTrainer
    if method == "ppo":
        from .baselines.ppo_trainer import PPOTrainer

        return PPOTrainer
    from .pacs_trainer import PACSTrainer

    return PACSTrainer


def _with_model_arguments(recipe: Recipe):
    """The training configuration with TRL's model arguments in `model_init_kwargs`, where its trainers look for them."""
    recipe.training.model_init_kwargs = {
        "revision": recipe.model.model_revision,
        "attn_implementation": recipe.model.attn_implementation,
        "dtype": recipe.model.dtype,
        **(recipe.training.model_init_kwargs or {}),
    }
    return recipe.training


def _resolve_model(name: str) -> str:
    if name.startswith("miniature/"):
        from .miniature.warm_start import warm_start

        with PartialState().main_process_first():
            return str(warm_start(name.removeprefix("miniature/")))
    if name.startswith((".", "/", "~")) and not Path(name).expanduser().is_dir():
        raise ValueError(f"The model directory {name!r} does not exist (seen from {Path.cwd()}).")
    return name


def reward_function(name: str) -> Callable:
    """A function of `pacs_trl.rewards` by its name, any other by its dotted path, also from the working directory."""
    if "." not in name:
        function = getattr(rewards, name, None)
        if callable(function) and name.endswith("_reward"):
            return function
        own = sorted(n for n in vars(rewards) if n.endswith("_reward") and not n.startswith("_"))
        raise ValueError(
            f"There is no reward function {name!r} in pacs_trl.rewards, which has {', '.join(own)}. Write functions of "
            "your own as package.module.function."
        )
    module_name, function_name = name.rsplit(".", 1)
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    module = importlib.import_module(module_name)
    if not callable(getattr(module, function_name, None)):
        raise ValueError(f"The module {module_name!r} has no function {function_name!r} (reward_funcs: {name}).")
    return getattr(module, function_name)


def _checkpoint_to_resume(output_dir: str, resume: str | bool | None) -> str | None:
    """The checkpoint to continue from; refuses to start over on top of an unfinished run."""
    last = get_last_checkpoint(output_dir) if Path(output_dir).is_dir() else None
    if resume is None or str(resume).lower() in ("false", "none"):
        if last is not None:
            raise ValueError(
                f"{output_dir} already holds {Path(last).name} of an earlier run. Continue it with "
                "`--resume_from_checkpoint last`, or choose another output_dir."
            )
        return None
    if str(resume).lower() in ("true", "last"):
        if last is None:
            logger.warning("There is no checkpoint in %s yet: starting from the beginning.", output_dir)
        return last
    if not Path(resume).is_dir():
        raise ValueError(f"resume_from_checkpoint: the directory {resume!r} does not exist (seen from {Path.cwd()}).")
    return str(resume)


def describe_step(training, num_processes: int, num_prompts: int) -> str:
    """What a generation and an optimizer step consist of, in one line, since four settings multiply into it."""
    slot = training.per_device_train_batch_size * num_processes
    per_step = slot * training.gradient_accumulation_steps // training.num_generations
    updates = max(1, training.steps_per_generation // training.gradient_accumulation_steps) * training.num_iterations
    return (
        f"Generation: {training.generation_batch_size // training.num_generations} of {num_prompts} prompts x "
        f"{training.num_generations} completions. Optimizer step: {per_step} prompts x {training.num_generations}. "
        f"Optimizer steps per generation: {updates}. Processes: {num_processes}."
    )


if __name__ == "__main__":
    main()
