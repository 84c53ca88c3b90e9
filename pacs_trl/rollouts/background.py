"""Calls in threads that do not keep the process from ending, as those of `ThreadPoolExecutor` do."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


def in_background(function: Callable, *arguments: Any) -> Future:
    """Call a function in a thread of its own. When the process ends before the call, the call ends with it."""
    future: Future = Future()

    def run():
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
