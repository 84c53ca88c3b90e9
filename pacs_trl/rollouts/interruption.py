"""Interruption of a user's code, so that a reward function that hangs does not keep a run from stopping.

After a signal the current optimizer step is finished and saved. If the main thread waits for a user's code longer than
`PATIENCE`, [`~stop_on_signal.StopOnSignal`] raises [`Interrupted`] in it, and the state after the last optimizer step
is saved instead.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from accelerate.utils import gather_object
from trl.trainer.utils import is_async_callable


PATIENCE = 2.0  # seconds that a run that is to stop waits for a user's code, and for batches in flight


class Interrupted(BaseException):
    """Raised in a user's code after a signal. It is no `Exception`, because such code often catches all of these."""


class Stopped(Exception):
    """The run stops on all processes, and the state after the last optimizer step is to be saved."""


_started: dict[object, float] = {}  # when each call that the main thread waits for has started


@contextmanager
def interruptible() -> Iterator[None]:
    """Allow [`Interrupted`] in the main thread until the context is left. Coroutines for which the main thread waits
    enter it in their own thread."""
    call = object()
    _started[call] = time.monotonic()
    try:
        yield
    finally:
        _started.pop(call, None)


def interruptible_function(function: Callable) -> Callable:
    """Return a function, plain or asynchronous, whose calls are [`interruptible`]."""
    if is_async_callable(function):

        @wraps(function)
        async def call(*args, **kwargs):
            with interruptible():
                return await function(*args, **kwargs)
    else:

        @wraps(function)
        def call(*args, **kwargs):
            with interruptible():
                return function(*args, **kwargs)

    return call


def is_overdue(signaled: float) -> bool:
    """Whether a user's code still runs `PATIENCE` seconds after it started, and after the time of the signal."""
    started = list(_started.values())
    return bool(started) and time.monotonic() >= max(signaled, min(started)) + PATIENCE


def seconds_in_user_code() -> float | None:
    """Return since how many seconds the main thread has waited for a user's code; `None` if it does not."""
    started = list(_started.values())
    return time.monotonic() - min(started) if started else None


def call_or_stop(function: Callable, *args: Any) -> Any:
    """Call a function that calls a user's code. All processes must call this; it raises [`Stopped`] on all of them if
    that code was interrupted on one. The function must not make other processes wait."""
    is_interrupted, result = False, None
    try:
        result = function(*args)
    except Interrupted:
        is_interrupted = True
    stop_if_interrupted(is_interrupted)
    return result


def stop_if_interrupted(is_interrupted: bool) -> None:
    """Raise [`Stopped`] on all processes, which must all call this, if a user's code was interrupted on one."""
    if is_interrupted:
        _started.clear()  # coroutines may still run
    if any(gather_object([is_interrupted])):
        raise Stopped
