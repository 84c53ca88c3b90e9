"""Processes of tests, forked from a server that has imported what training needs: a new interpreter computes for eight
seconds until it has. The functions that they run are module-level ones, as multiprocessing wants them."""

import gc
import os
import sys
from collections.abc import Callable
from multiprocessing import forkserver, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest.mock import patch

from torch.distributed import TCPStore


CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["replay", "pacs_trl.train", "pacs_trl.baselines.ppo_trainer", "pacs_trl.miniature.warm_start"]
)


def _begin(function: Callable, arguments: tuple, output: Path, environment: dict[str, str]) -> None:
    gc.freeze()  # accelerate looks for garbage with each training
    os.environ.update(environment)
    with open(output, "w") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    function(*arguments)


def start(function: Callable, *arguments, output: Path, **environment: str) -> BaseProcess:
    """A process that runs `function(*arguments)`; what it prints goes to the file `output`."""
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # the server finds what this process finds
        forkserver.ensure_running()
    process = CONTEXT.Process(target=_begin, args=(function, arguments, output, environment))
    process.start()
    return process


def on_two(function: Callable, *arguments, outputs: Path, exit_code: int = 0, **environment: str) -> list[str]:
    """
    What two processes print that torchrun would have started, and that end with `exit_code`.

    As torchrun's, their store is in the process that starts them: no other one can take its port.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    environment.setdefault("ACCELERATE_USE_CPU", "true")
    files = [outputs / f"output.{rank}" for rank in range(2)]
    processes = [
        start(function, *arguments, output=file, RANK=str(rank), LOCAL_RANK=str(rank), **environment)
        for rank, file in enumerate(files)
    ]
    for process in processes:
        process.join(600)
        process.kill()
    printed = [file.read_text() for file in files]
    codes = [process.exitcode for process in processes]
    assert codes == [exit_code] * 2, f"exit codes {codes}" + "".join("\n" + text[-3000:] for text in printed)
    return printed
