"""Data parallel sampling: one process per copy of the model, each with its own GPUs, requests dealt out in whole groups.

The groups are the ones a single engine would form, so a transformers run gives the same text with any number of copies.
The copies are plain processes started here; spreading one evaluation over several machines is left out (run one
evaluation per benchmark on each machine instead, the results files are read together by the report).
"""

import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, cast

from ..settings.command_line import FailedRun
from .requests import Completion, Request, SamplingSettings


class ReplicatedEngine:
    """
    Several copies of an engine that work through one list of requests.

    Args:
        make_engine (callable without arguments): Builds one engine inside its process; must be picklable.
        visible_devices (list of `str`): One entry per copy: the value of `CUDA_VISIBLE_DEVICES` it sees ("" on a CPU).
        group_size (`int`): Group size of the engine.

    Raises:
        `RuntimeError`: from `generate`, with the traceback of the copy, if a copy fails or dies.
    """

    def __init__(self, make_engine: Callable, visible_devices: Sequence[str], group_size: int):
        self.group_size = group_size
        context = multiprocessing.get_context("spawn")
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        for devices in visible_devices:
            pipe, child_pipe = context.Pipe()
            # Not a daemon: Python forbids those to have children, and vLLM runs its engine in one.
            process = context.Process(target=_serve, args=(make_engine, child_pipe))
            _start_with_devices(process, devices)
            child_pipe.close()  # so that the death of the child reads as end of file here
            self._processes.append(process)
            self._pipes.append(pipe)

    def generate(
        self, requests: Sequence[Request], settings: SamplingSettings
    ) -> Iterator[tuple[Request, Completion]]:
        groups = [requests[i : i + self.group_size] for i in range(0, len(requests), self.group_size)]
        for copy, pipe in enumerate(self._pipes):
            pipe.send(([r for group in groups[copy :: len(self._pipes)] for r in group], settings))
        busy = dict(zip(self._pipes, range(len(self._pipes)), strict=True))
        while busy:
            for ready in wait(list(busy)):
                pipe = cast(Connection, ready)
                try:
                    kind, content = pipe.recv()
                except EOFError:
                    raise FailedRun(f"Engine copy {busy[pipe]} died; stored samples are kept.") from None
                if kind == "failed":
                    raise FailedRun(f"Engine copy {busy[pipe]} failed; stored samples are kept.\n{content}")
                if kind == "finished":
                    del busy[pipe]
                else:
                    yield content

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=60)  # vLLM stops its own processes first
            if process.is_alive():
                process.kill()
                process.join()


def _start_with_devices(process, devices: str) -> None:
    """A child inherits the environment, and CUDA reads it once: it must be right before the child's first import."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = devices
    try:
        process.start()
    finally:
        if before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def _serve(make_engine: Callable, pipe: Connection) -> None:
    """Body of one copy: build the engine, answer lists of requests until the parent closes the pipe."""
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    engine = None
    try:
        engine = make_engine()
        while True:
            requests, settings = pipe.recv()
            for answer in engine.generate(requests, settings):
                pipe.send(("completion", answer))
            pipe.send(("finished", None))
    except (EOFError, BrokenPipeError):
        pass  # the parent closed the pipe
    except Exception:
        pipe.send(("failed", traceback.format_exc()))
    finally:
        if engine is not None:
            engine.close()


def _leave_with_parent() -> None:
    """A parent killed with SIGKILL cannot end its children; a copy that computes would hold its GPU for hours, and so would
    the processes that it has started itself."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a copy is always a child"
    parent.join()
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(1)
