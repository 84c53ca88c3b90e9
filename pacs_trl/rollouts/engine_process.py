"""Engine process: a copy of the policy that generates on the CPU, with transformers or vLLM, while the trainer learns.

Weights are exchanged through files in memory: one of those that are frozen, and `num_weight_copies` of the trained
ones, so that the trainer can write the weights for a later batch while the process generates with those of an earlier
one. What a request returns depends on its weight copy, prompts, and seed only. The process ends with its parent.

[`EngineProcess`] is the trainer's side, [`serve`] that of the process, where a [`Generator`] (`engine_generator.py`)
answers requests.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import fields
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import init_hf_modules

from ..update.peft_models import without_peft
from .engine_generator import Generator, GeneratorSettings
from .protocols import EngineProcessTrainer
from .stepped_engine import GroupInProgress


class EngineProcess:
    """
    Start and use an engine process.

    Args:
        trainer ([`EngineProcessTrainer`]): Its model, tokenizer, and generation settings are those of the process.
        num_weight_copies (`int`): Number of copies of the trained weights.
    """

    def __init__(self, trainer: EngineProcessTrainer, num_weight_copies: int):
        model: PreTrainedModel | PeftModel = trainer.accelerator.unwrap_model(trainer.model_wrapped)
        num_files = 1 + num_weight_copies
        self._files = [open(os.memfd_create("pacs_trl"), "wb") for _ in range(num_files)]  # /dev/shm may be small
        frozen_file, *self._copy_files = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in self._files]
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        torch.save({name: t.detach() for name, t in tensors.items() if name not in self._trained}, frozen_file)
        settings = _generator_settings(trainer, model, frozen_file, self._copy_files)
        self._lock = threading.Lock()  # one request at a time
        ours, theirs = socket.socketpair()
        self.process = start_process(theirs)
        theirs.close()
        self._connection = Connection(ours.detach())
        self._connection.send(settings)

    def write_weights(self, weight_copy: int, weights: Mapping[str, torch.Tensor] | None) -> None:
        """Write `weights`, by default the current ones, into a weight copy, which the process must not be using."""
        tensors = self._trained if weights is None else weights
        torch.save({name: tensor.detach() for name, tensor in tensors.items()}, self._copy_files[weight_copy])

    def weights_of(self, weight_copy: int) -> dict[str, torch.Tensor]:
        """Return the weights in a weight copy."""
        return torch.load(self._copy_files[weight_copy])

    def generate(self, *request: Any) -> dict[str, list[list]]:
        """Return the result of [`Generator.generate`]. Raises an `EOFError` or `OSError` if the process has ended."""
        return self._request("generate", *request)

    def decode(self, *request: Any) -> tuple[list[GroupInProgress], list[GroupInProgress]]:
        """Return the result of [`Generator.decode`], and raise what `generate` raises."""
        return self._request("decode", *request)

    def _request(self, *request: Any) -> Any:
        with self._lock:
            self._connection.send(request)
            return self._connection.recv()

    def close(self) -> None:
        """End the process at once."""
        self.process.kill()
        self.process.wait()
        with self._lock:  # a request that waits for the process has failed by now
            self._connection.close()
        for file in self._files:
            file.close()


def _generator_settings(
    trainer: EngineProcessTrainer, model: PreTrainedModel | PeftModel, frozen_file: str, copy_files: list[str]
) -> GeneratorSettings:
    base = without_peft(model)
    head = base.get_output_embeddings()
    adapter = None
    if isinstance(model, PeftModel):
        adapter = (model.active_adapter, model.active_peft_config)
    return GeneratorSettings(
        args=SimpleNamespace(**{field.name: getattr(trainer.args, field.name) for field in fields(trainer.args)}),
        model_class=type(base),
        config=base.config,
        dtype=next(parameter.dtype for parameter in base.parameters() if parameter is not head.weight),
        adapter=adapter,
        parameter_names=[name for name, _ in model.named_parameters()],
        frozen_file=frozen_file,
        copy_files=copy_files,
        model_generation_config=base.generation_config,
        generation_config=trainer.generation_config,
        pad_token_id=trainer._tokenizer.pad_token_id,
        eos_token_ids=list(trainer.eos_token_ids),
        packing=trainer.forward_pass.packing,
        fused=trainer.forward_pass.fused,
        autocast=torch.bfloat16 if trainer.accelerator.mixed_precision == "bf16" else None,
        num_threads=torch.get_num_threads(),
    )


def start_process(connection: socket.socket) -> subprocess.Popen:
    """Start a process that runs [`serve`] on the connection. It neither imports the main module nor gets Ctrl-C."""
    package_root = str(Path(__file__).resolve().parents[2])
    start = f"import sys; sys.path.append({package_root!r}); from {__name__} import serve; serve({os.getpid()})"
    return subprocess.Popen([sys.executable, "-P", "-c", start], stdin=connection.fileno(), start_new_session=True)


def serve(parent: int, fd: int = 0) -> None:
    """Answer the requests that arrive on the socket `fd`, until it is closed or the process `parent` ends."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # schedulers send it to all processes of a job
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    connection = Connection(fd)
    init_hf_modules()  # finds the classes of models that were loaded with trust_remote_code
    try:
        settings: GeneratorSettings = connection.recv()
        torch.set_num_threads(settings.num_threads)
        generator = Generator(settings)
        while True:
            method, *arguments = connection.recv()
            connection.send(getattr(generator, method)(*arguments))
    except (EOFError, ConnectionError):
        pass


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
