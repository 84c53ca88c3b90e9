"""Prompts of a recipe, measured as training will see them, where the data and the tokenizer are on this machine.

Nothing is downloaded: a dataset of the Hub, or a model that is in no directory and no cache, is not measured.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoConfig

from ..data import TRAINING_SETS, load_training_data
from ..data.prompts import check_chat_template, context_lengths, prompt_lengths
from ..data.sets import MINIATURE
from ..recipe import Recipe
from ..rollouts.trainer_checks import OWN_PARAMETERS, check_dataset, check_prompt_lengths
from ..train import load_tokenizer, reward_function, tool_function
from .cost import CONTEXTS


class Prompts(NamedTuple):
    """Training prompts: their number and lengths in tokens; `None` where they are not known."""

    number: int | None = None
    lengths: list[int] | None = None

    @property
    def line(self) -> str:
        if not self.lengths:
            return f"{self.number:,}"
        mean = sum(self.lengths) / len(self.lengths)
        return f"{self.number:,} of {mean:.0f} tokens on average, {max(self.lengths)} at most (measured)"


UNKNOWN = Prompts()


def measure(recipe: Recipe) -> tuple[Prompts, list[str]]:
    """
    Load and measure the training prompts of a recipe without errors, if they are on this machine.

    Returns:
        [`Prompts`], and what a run would reject about model and data.
    """
    data, training, prompts = recipe.data, recipe.training, UNKNOWN
    try:
        tokenizer = _local_tokenizer(recipe)
        if tokenizer is None or not _is_local(data):
            if tokenizer is not None and data.dataset_name in TRAINING_SETS:
                check_chat_template(tokenizer)
            if _is_local(data):
                prompts = Prompts(len(load_training_data(replace(data, max_prompt_length=None), None)[0]))
            _check_assumed_lengths(recipe)
            return prompts, []
        dataset, evaluation = load_training_data(data, tokenizer, training.chat_template_kwargs)
        tools = [tool_function(name) for name in recipe.run.tools or []] or None
        lengths = prompt_lengths(dataset["prompt"][:], tokenizer, training.chat_template_kwargs, tools)
        prompts = Prompts(len(dataset), lengths)
        datasets = {"train_dataset": dataset, "eval_dataset": evaluation}
        check_prompt_lengths(datasets, training, lambda: tokenizer, tools, _contexts(recipe))
        functions = [reward_function(name) for name in recipe.run.reward_funcs]
        check_dataset("the training set", dataset, functions, OWN_PARAMETERS)
    except ValueError as error:
        return prompts, [str(error)]
    return prompts, []


def _is_local(data: Any) -> bool:
    path = data.dataset_path if data.dataset_name in TRAINING_SETS else data.dataset_name
    return data.dataset_name.startswith(MINIATURE) or path is not None and Path(path).exists()


def _local_tokenizer(recipe: Recipe):
    name = recipe.model.model_name_or_path
    try:
        return load_tokenizer(recipe, local_files_only=True)
    except OSError as error:
        if Path(name).is_dir():
            raise ValueError(f"The tokenizer of {name!r} cannot be loaded: {' '.join(str(error).split())}") from error
        return None


def _contexts(recipe: Recipe) -> dict[str, int | None]:
    name = recipe.model.model_name_or_path
    if name in CONTEXTS or name.startswith(MINIATURE):
        return {"max_position_embeddings": CONTEXTS.get(name)}
    given = {"trust_remote_code": recipe.training.trust_remote_code, **(recipe.training.model_init_kwargs or {})}
    try:
        return context_lengths(AutoConfig.from_pretrained(name, local_files_only=True, **given))
    except OSError:
        return {}


def _check_assumed_lengths(recipe: Recipe) -> None:
    """
    Raises:
        `ValueError`: if the longest prompt that the recipe allows and a completion exceed the context of the model.
    """
    prompt, completion = recipe.data.max_prompt_length, recipe.training.max_completion_length or 0
    for name, context in _contexts(recipe).items():
        if context is not None and (prompt or 1) + completion > context:
            words = "a prompt" if prompt is None else f"max_prompt_length={prompt}"
            raise ValueError(
                f"{words} plus max_completion_length={completion} exceeds the context of the model, "
                f"{name}={context}. Lower them, or use a model with a longer context."
            )
