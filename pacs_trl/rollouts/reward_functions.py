"""Calls of reward functions: private arguments, and checks of what functions and reward models return."""

import asyncio
import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import numpy as np
import torch
from torch import nn
from trl.trainer.utils import is_async_callable

from ..errors import FailedRun, UserError, without_exit
from ..update.rollout import MAX_REWARD


_PLAIN = {int, float, str, bool, type(None)}


def independent_copy(value: Any) -> Any:
    """Copy lists, tuples, dicts, tensors, and arrays, also nested ones. Other objects, such as environments, are
    returned as they are."""
    if type(value) is list:
        if _PLAIN.issuperset(map(type, value)):
            return value.copy()
        return [independent_copy(entry) for entry in value]
    if type(value) is tuple:
        return tuple(independent_copy(entry) for entry in value)
    if type(value) is dict:
        return {key: independent_copy(entry) for key, entry in value.items()}
    if torch.is_tensor(value):
        return value.clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def bind_arguments(function: Callable, name: str, arguments: dict[str, Any]) -> Callable:
    """Bind those of the trainer's `arguments` that a reward function has parameters for. Raises a `ValueError` if it
    is asynchronous and has one."""
    parameters = inspect.signature(function).parameters
    bound = {key: value for key, value in arguments.items() if key in parameters}
    if not bound:
        return function
    if is_async_callable(function):
        raise UserError(
            f"The reward function {name!r} is asynchronous and asks for `{next(iter(bound))}`, whose forward passes "
            "all processes make together, in one order. Write it as a plain function."
        )
    return wraps(function)(partial(function, **bound))


def with_truncated(function: Callable, arguments: dict[str, Any], truncated: Any) -> dict[str, Any]:
    """Return the arguments of a reward function with `truncated` if it has a parameter of this name. `**kwargs` are
    not enough: a function that passes them on, written for TRL, may call one that has no such parameter, or another
    one. A column of this name is kept, but for functions of this package, whose argument it is."""
    has_parameter = "truncated" in inspect.signature(function).parameters
    is_column = "truncated" in arguments and not _is_of_package(function)
    if not has_parameter or is_column:
        return arguments
    return {**arguments, "truncated": truncated}


def _is_of_package(function: Callable) -> bool:
    """Whether a reward function is one of this package, also behind wrappers and `functools.partial`."""
    function = inspect.unwrap(function)
    while isinstance(function, partial):
        function = inspect.unwrap(function.func)
    return (function.__module__ or "").startswith("pacs_trl.")


def with_result(
    function: Callable, convert: Callable[[Any, dict], Any], adjust: Callable[[dict], dict] = dict
) -> Callable:
    """Wrap a reward function, plain or asynchronous, to be called with `adjust(keyword arguments)`, and to return
    `convert(result, keyword arguments)`. The function gets copies of its arguments: the lists of a batch are those
    that are trained, and others read them too."""
    if is_async_callable(function):

        @wraps(function)
        async def call(**kwargs):
            return convert(await function(**independent_copy(adjust(kwargs))), kwargs)
    else:

        @wraps(function)
        def call(**kwargs):
            return convert(function(**independent_copy(adjust(kwargs))), kwargs)

    return call


def never_exiting(function: Callable, what: str) -> Callable:
    """Wrap a user's function, plain or asynchronous, to raise a [`FailedRun`] where it would end the process. `what`
    names it. In the thread of asynchronous functions such an exception would end the thread, and the run would wait
    for it forever."""
    if is_async_callable(function):

        @wraps(function)
        async def call(*args, **kwargs):
            with without_exit(what):
                try:
                    return await function(*args, **kwargs)
                except (KeyboardInterrupt, asyncio.CancelledError) as error:
                    raise FailedRun(f"{what} raised {type(error).__name__}. Catch it where it comes from.") from error
    else:

        @wraps(function)
        def call(*args, **kwargs):
            with without_exit(what):
                return function(*args, **kwargs)

    return call


def check_scores_of(model: nn.Module, name: str) -> None:
    """Let a reward model raise a `ValueError` in each call whose result is not one finite number per text."""
    model.register_forward_hook(partial(_check_scores, name))


def _check_scores(name: str, model: nn.Module, inputs: tuple, output: Any) -> None:
    logits = output.logits
    if logits.ndim != 2 or logits.shape[1] != 1:
        raise UserError(
            f"The reward model {name!r} returned logits of shape {tuple(logits.shape)}. It must return one number per "
            "text; load it with AutoModelForSequenceClassification.from_pretrained(..., num_labels=1)."
        )
    wrong = ~(logits.abs() <= MAX_REWARD)  # also NaN
    if wrong.any():
        raise UserError(
            f"The reward model {name!r} returned {logits[wrong][0].item():g}. Rewards must be finite and at most "
            f"{MAX_REWARD:g} in magnitude; load the model in float32 or bfloat16, and check its weights."
        )
