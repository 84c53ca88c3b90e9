"""Processes of tests, forked from a server that has imported what training needs: a new interpreter computes for eight
seconds until it has. The functions that they run are module-level ones, as multiprocessing wants them."""

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import forkserver, get_context, parent_process
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest.mock import patch

import torch
from torch.distributed import TCPStore


CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "support.patient_forkserver",
        "support.runs",
        "pacs_trl.train",
        "pacs_trl.baselines.ppo_trainer",
        "experiments.miniature.warm_start",
    ]
)


def _begin(function: Callable, arguments: tuple, output: Path, environment: dict[str, str]) -> None:
    gc.freeze()  # accelerate looks for garbage with each training
    if forkserver._forkserver._forkserver_address:  # this process is of a server, and would start one of its own
        forkserver._forkserver.ensure_running = lambda: None
    os.environ.update(environment)
    with open(output, "w") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    function(*arguments)


def run_and_save(function: Callable, arguments: tuple, directory: Path) -> None:
    """Save what `function` returns as `result.RANK`, from a process group of its own that ends with the parent."""
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.save(function(*arguments), directory / f"result.{os.environ.get('RANK', 0)}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # DeepSpeed's groups would wait for each other at exit


def _end_with_parent() -> None:
    """The parent may be killed; then its children must not keep a GPU."""
    wait([parent_process().sentinel])
    os.killpg(0, signal.SIGKILL)


def ensure_server() -> None:
    """Start the fork server, unless it runs; it finds the modules that this process finds."""
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        forkserver._forkserver.ensure_running()  # not its alias, which `_begin` does not replace


def start(function: Callable, *arguments, output: Path, **environment: str) -> BaseProcess:
    """A process that runs `function(*arguments)`; what it prints goes to the file `output`."""
    if CONTEXT.get_start_method() == "forkserver":
        ensure_server()
    process = CONTEXT.Process(target=_begin, args=(function, arguments, output, environment))
    with patch.dict(os.environ, environment):  # a new interpreter imports libraries before it runs `_begin`
        process.start()
    return process


def wait_for(processes: list[BaseProcess], outputs: list[Path], *, exit_code: int = 0, seconds: float = 600):
    """Return what processes print that end with `exit_code`; kill them all if one ends otherwise, or not in time."""
    deadline = time.monotonic() + seconds
    try:
        while running := [process.sentinel for process in processes if process.exitcode is None]:
            if not wait(running, deadline - time.monotonic()):
                break
            if any(process.exitcode not in (None, exit_code) for process in processes):
                wait(running, 1.0)  # the others would wait for it
                break
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)  # of a group of its own, with the processes it started
            except ProcessLookupError:
                process.kill()
            process.join()
    printed = [file.read_text() if file.exists() else "" for file in outputs]
    said = "".join("\n" + text[-3000:] for text in printed)
    assert codes == [exit_code] * len(codes), f"exit codes {codes} (None: did not end in {seconds:.0f} s){said}"
    return printed


def on_two(function: Callable, *arguments, **how) -> list[str]:
    """What two processes print, see [`on_several`]."""
    return on_several(2, function, *arguments, **how)


def on_several(
    number: int,
    function: Callable,
    *arguments,
    outputs: Path,
    exit_code: int = 0,
    seconds: float = 600,
    **environment: str,
) -> list[str]:
    """
    What `number` processes print that torchrun would have started, and that end with `exit_code`.

    As torchrun's, their store is in the process that starts them: no other one can take its port.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment |= {"WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number), "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    environment.setdefault("ACCELERATE_USE_CPU", "true")
    files = [outputs / f"output.{rank}" for rank in range(number)]
    processes = [
        start(function, *arguments, output=file, RANK=str(rank), LOCAL_RANK=str(rank), **environment)
        for rank, file in enumerate(files)
    ]
    return wait_for(processes, files, exit_code=exit_code, seconds=seconds)
