"""What a trainer checks of its data, its reward functions and its evaluation, whatever is learnt from the rollouts.

TRL finds these mistakes where it trips over them, after the model has been loaded and completions have been drawn.
"""

import inspect
import math
from collections.abc import Callable, Collection, Iterable
from functools import wraps
from typing import Any

from datasets import Dataset, IterableDataset
from torch import nn
from transformers import GenerationConfig
from trl import GRPOConfig
from trl.trainer.utils import get_callable_name, is_async_callable

from .. import rewards
from ..data.prompts import prompt_lengths
from ..data.sets import report_unreadable_golds
from ..verification.shared import shared_verifier


def check_dataset(name: str, dataset: Any, reward_funcs: Any = (), passed: Collection[str] = ()) -> None:
    """
    Check the columns of a dataset that knows them; the rows of others are checked when they come.

    Args:
        name (`str`):
            What errors call the dataset.
        dataset:
            A dataset, a mapping of several, or `None`.
        reward_funcs:
            A reward function or a list of them.
        passed (`Collection[str]`):
            What this trainer passes to reward functions besides the columns and what TRL always passes.

    Raises:
        `ValueError`: if there is no column `prompt`, or a reward function requires a column that is absent.
    """
    if isinstance(dataset, dict):
        for key, part in dataset.items():
            check_dataset(f"{name}[{key!r}]", part, reward_funcs, passed)
    elif isinstance(dataset, Dataset | IterableDataset) and dataset.column_names is not None:
        check_columns(name, dataset.column_names)
        for function in reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]:
            if callable(function) and not isinstance(function, nn.Module):
                _check_required_columns(function, name, dataset.column_names, passed)


def _check_required_columns(function: Callable, name: str, columns: list[str], passed: Collection[str]) -> None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a function without a signature
        return
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    given = {*_ALWAYS_GIVEN, *passed, *columns} - {"prompt", "completion"}  # TRL passes these in the plural only
    if missing := [parameter for parameter in required if parameter not in given]:
        raise ValueError(
            f"The reward function {get_callable_name(function)!r} requires {', '.join(missing)}, but {name} has no "
            f"such column, only {', '.join(columns)}. Rename a column, or give the parameter a default value."
        )


def check_prompts(name: str, dataset: Any) -> None:
    """
    Raises:
        `ValueError`: if a prompt is neither text nor messages; of a data set that is no stream.
    """
    for i, prompt in enumerate(dataset["prompt"] if isinstance(dataset, Dataset) else ()):
        messages = prompt if isinstance(prompt, list) else []
        if not (prompt and isinstance(prompt, str) or messages and all(message.get("role") for message in messages)):
            raise ValueError(
                f"Row {i} of {name} has the prompt {prompt!r:.100}. It must be text, or a list of messages that each "
                "have a role: the model is asked what stands there. Leave such rows out, or make them with "
                "`pacs_trl.data.build_prompt`."
            )


def check_golds(dataset: Any) -> None:
    """Report gold answers of a training set that the shared verifier cannot read, unless it was asked before; not of a
    stream."""
    if isinstance(dataset, Dataset) and "solution" in dataset.column_names:
        report_unreadable_golds("the training set", dataset["solution"][:], shared_verifier())


def check_prompt_lengths(
    datasets: dict[str, Any],
    args: GRPOConfig,
    load_tokenizer: Callable[[], Any],
    tools: list[Callable] | None,
    contexts: dict[str, int | None],
) -> None:
    """
    Look for prompts that leave no room for a completion, where the tokens of a sequence are bounded; not in streams.

    Args:
        datasets (`dict`): The training set as `train_dataset`, and others.
        load_tokenizer (`Callable`): Returns the tokenizer that prompts are generated with.
        contexts (`dict`): See [`context_lengths`].

    Raises:
        `ValueError`: if a prompt and `max_completion_length` tokens exceed the context, `max_tokens_per_micro_batch`
        (in
            training) or, with vLLM, `vllm_max_model_length`; or messages cannot be tokenized.
    """
    of_engine = {"vllm_max_model_length": args.vllm_max_model_length if args.use_vllm else None}
    of_engine |= contexts
    of_training = {"max_tokens_per_micro_batch": vars(args).get("max_tokens_per_micro_batch")}
    completion = args.max_completion_length or 1
    for name, dataset in datasets.items():
        limits = of_engine | (of_training if name == "train_dataset" else {})
        limit, room = min(((key, n) for key, n in limits.items() if n), key=lambda each: each[1], default=("", None))
        if not isinstance(dataset, Dataset):
            continue
        prompts = dataset["prompt"][: len(dataset) if room else 1]  # one shows whether there is a chat template
        lengths = prompt_lengths(prompts, load_tokenizer(), args.chat_template_kwargs, tools)
        overlong = [i for i, length in enumerate(lengths) if room is not None and length + completion > room]
        if room is not None and overlong:
            remedy = f"Raise it to {max(lengths) + completion}"
            if limit in contexts:
                limit = f"the context of the model, {limit}"
                remedy = f"Lower max_completion_length to {max(room - max(lengths), 0)}"
            raise ValueError(
                f"Row {overlong[0]} of {name} has a prompt of {lengths[overlong[0]]} tokens. With "
                f"max_completion_length={completion}, "
                f"{len(overlong)} of {len(lengths)} prompts do not fit into {limit}={room}. {remedy}, or "
                f"leave out prompts of more than {max(room - completion, 0)} tokens (in a recipe: max_prompt_length)."
            )


def check_columns(name: str, columns: Iterable[str]) -> None:
    """
    Raises:
        `ValueError`: if there is no `prompt` among the columns; names those there are.
    """
    columns = list(columns)
    if "prompt" not in columns:
        raise ValueError(
            f"{name} has no column `prompt`, only {', '.join(columns) or 'none'}. The model is asked what stands "
            "there: "
            "text, or a list of messages. Rename the column of problems, or make it with `pacs_trl.data.build_prompt`."
        )


def check_number_of_prompts(num_prompts: int, args: GRPOConfig) -> None:
    """
    Raises:
        `ValueError`: if a generation batch needs more different prompts than the training set has.
    """
    needed = args.generation_batch_size // args.num_generations
    if num_prompts < needed:
        raise ValueError(
            f"The training set has {num_prompts} prompts, but a generation batch needs {needed} different ones "
            f"(generation_batch_size={args.generation_batch_size} / num_generations={args.num_generations}). Use more "
            "prompts, or lower steps_per_generation, gradient_accumulation_steps or per_device_train_batch_size."
        )


def check_evaluation_batch(per_device_eval_batch_size: int, num_processes: int, num_generations: int) -> None:
    """
    Raises:
        `ValueError`: if a batch of an evaluation would not hold whole groups; names the nearest sizes that would.
    """
    size = per_device_eval_batch_size * num_processes
    if size % num_generations == 0:
        return
    unit = num_generations // math.gcd(num_generations, num_processes)
    below = per_device_eval_batch_size // unit * unit
    legal = " or ".join(str(n) for n in (below, below + unit) if n > 0)
    raise ValueError(
        f"A batch of an evaluation must hold whole groups of num_generations_eval={num_generations} completions, but "
        "it "
        f"has per_device_eval_batch_size={per_device_eval_batch_size} x {num_processes} processes = {size}. Nearest "
        "legal "
        f"values: per_device_eval_batch_size={legal}, or another num_generations_eval (by default num_generations)."
    )


# What the log-probabilities of completions are computed with, and the sizes of a draw.
_HAVE_SETTINGS = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
_HAVE_SETTINGS |= dict.fromkeys(("max_new_tokens", "max_tokens", "max_length"), "max_completion_length")
_HAVE_SETTINGS |= dict.fromkeys(("n", "num_return_sequences"), "num_generations")


def check_generation_kwargs(args: GRPOConfig) -> None:
    """
    Raises:
        `ValueError`: if `generation_kwargs` say what a setting of its own says, so that completions would be drawn in
        another way
            than they are scored, or what generation ignores.
    """
    given = args.generation_kwargs or {}
    if "seed" in given and args.use_vllm:
        raise ValueError(
            f"generation_kwargs={{'seed': {given['seed']}}} would draw the same completion for every row of a group. "
            "Remove it: a seed for each request follows from `seed`."
        )
    if double := sorted(given.keys() & _HAVE_SETTINGS):
        settings = ", ".join(dict.fromkeys(_HAVE_SETTINGS[key] for key in double))
        raise ValueError(
            f"generation_kwargs must not have {', '.join(double)}: completions would be drawn with another value than "
            f"the run is planned and scored with. Set {settings} instead."
        )
    if not args.use_vllm and (unknown := sorted(given.keys() - vars(GenerationConfig()))):  # vLLM refuses them itself
        raise ValueError(
            f"generation_kwargs have {', '.join(unknown)}, which transformers does not know and would ignore. Correct "
            "or remove it; the keys are those of transformers.GenerationConfig."
        )


# What every reward function is called with, besides the columns of the data set.
_ALWAYS_GIVEN = ("prompts", "completions", "completion_ids", "truncated", "trainer_state", "log_extra", "log_metric")

# What the trainers of this package pass besides.
OWN_PARAMETERS = ("score",)


def check_reward_functions(functions: Any) -> None:
    """
    Raises:
        `ValueError`: if what is given for reward functions is something else, or cannot be called as TRL calls them.
    """
    for function in functions if isinstance(functions, list) else [functions]:
        if function is None or isinstance(function, nn.Module):
            continue
        if not callable(function) and (not isinstance(function, str) or function in vars(rewards)):
            raise ValueError(
                f"reward_funcs: {function!r:.100} is no function. Give a function or a list of functions, such as "
                "`from pacs_trl.rewards import math_reward`; text is the name of a reward model."
            )
        if callable(function):
            check_reward_function(function, get_callable_name(function))


def check_reward_function(function: Callable, name: str) -> None:
    """
    Raises:
        `ValueError`: if a reward function cannot be called as TRL calls it.
    """
    try:
        inspect.signature(function).bind_partial(**dict.fromkeys(_ALWAYS_GIVEN))
    except TypeError as error:
        raise ValueError(
            f"The reward function {name!r} cannot be called with prompts, completions and further columns ({error}). "
            f"Write it as `def {name}(completions, **kwargs)`."
        ) from error
    except ValueError:  # one that says nothing of its parameters
        pass


def with_result(function: Callable, convert: Callable[[Any, dict], Any]) -> Callable:
    """Return a reward function, synchronous or not, whose result becomes `convert(result, keyword arguments)`."""
    if is_async_callable(function):

        @wraps(function)
        async def call(*args, **kwargs):
            return convert(await function(*args, **kwargs), kwargs)
    else:

        @wraps(function)
        def call(*args, **kwargs):
            return convert(function(*args, **kwargs), kwargs)

    return call


def with_checked_result(function: Callable, name: str) -> Callable:
    """Return a reward function that raises a `ValueError`, which names it, on anything but an iterable of numbers and
    `None`."""
    return with_result(function, lambda rewards, given: _as_numbers(rewards, name, given))


def _as_numbers(rewards: Any, name: str, given: dict) -> list[float | None]:
    expected = "It must return one entry per completion: a number in [0, 1], or None for no verdict."
    if isinstance(rewards, str | bytes | dict):
        raise ValueError(
            f"The reward function {name!r} returned a {type(rewards).__name__}, {rewards!r:.100}. {expected}"
        )
    try:
        rewards = list(rewards)
    except TypeError:  # None, or a single number
        raise ValueError(f"The reward function {name!r} returned {rewards!r:.100}. {expected}") from None
    if len(rewards) != len(given.get("completions", rewards)):
        raise ValueError(
            f"The reward function {name!r} returned {len(rewards)} entries for {len(given['completions'])} "
            f"completions. {expected}"
        )
    for i, reward in enumerate(rewards):
        try:
            if isinstance(reward, str | bytes):
                raise TypeError
            rewards[i] = None if reward is None else float(reward)
        except (TypeError, ValueError, RuntimeError):  # the last by tensors of several numbers
            raise ValueError(
                f"The reward function {name!r} returned {reward!r:.100} for completion {i}. {expected}"
            ) from None
    if nans := [i for i, reward in enumerate(rewards) if reward is not None and math.isnan(reward)]:
        raise ValueError(
            f"The reward function {name!r} returned NaN for {len(nans)} of {len(rewards)} completions, the first is "
            f"completion {nans[0]}. Fix the computation, or return None where a completion has no verdict."
        )
    return rewards
