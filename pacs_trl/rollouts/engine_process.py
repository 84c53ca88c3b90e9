"""Engine process: a copy of the policy that generates with transformers on the CPU while the trainer learns.

Weights are exchanged through shared memory: one copy of those that are frozen, and `num_slots` copies of the trained
ones, so that the trainer can write the weights for a later batch while the process generates with those of an earlier
one. What a request returns depends on its slot, prompts, and seed only. The process ends with its parent.
"""

import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model
from trl.trainer.utils import pad

from ..update.forward_pass import ForwardPass, fused_head
from ..update.generation import faster_generation
from .checkpoint import own_random_numbers


Layout = list[tuple[str, torch.dtype, torch.Size]]  # name, dtype, and shape of tensors


class SharedTensors:
    """Tensors in memory that two processes share: anonymous, so that a small /dev/shm does not limit it. `path` is
    that of an instance in another process."""

    def __init__(self, layout: Layout, path: str | None = None):
        sizes = [-(-dtype.itemsize * math.prod(shape) // 64) * 64 for _, dtype, shape in layout]
        self.fd = os.memfd_create("pacs_trl") if path is None else None
        self.path = path or f"/proc/{os.getpid()}/fd/{self.fd}"
        memory = torch.from_file(self.path, shared=True, size=max(sum(sizes), 64), dtype=torch.uint8)
        self.tensors = {
            name: part[: dtype.itemsize * math.prod(shape)].view(dtype).view(shape)
            for (name, dtype, shape), part in zip(layout, memory[: sum(sizes)].split(sizes), strict=True)
        }


class Generator:
    """A copy of the policy with its weights in shared memory; `settings` are those of [`EngineProcess`]."""

    def __init__(self, settings: dict[str, Any]):
        self.settings = settings
        base = settings["model_class"](settings["config"]).eval()
        base.generation_config = settings["model_generation_config"]
        self.model: Any = base
        if (adapter := settings["adapter"]) is not None:
            self.model = get_peft_model(base, adapter[1], adapter_name=adapter[0]).eval()
        self.tensors = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        self._use(SharedTensors(settings["frozen"], settings["frozen_path"]))
        self.slots = [SharedTensors(settings["trained"], path) for path in settings["slot_paths"]]
        self.forward_pass = ForwardPass(
            base, torch.device("cpu"), pad_token_id=settings["pad_token_id"], temperature=settings["temperature"]
        )
        self.forward_pass.packing, self.forward_pass.fused = settings["packing"], settings["fused"]
        self.base = base

    def _use(self, weights: SharedTensors) -> None:
        for name, tensor in weights.tensors.items():
            if name in self.tensors:  # not those of another adapter, the KL reference
                self.tensors[name].data = tensor

    def generate(self, slot: int, prompt_ids: list[list[int]], seed: int) -> dict[str, list[list]]:
        """Return `completion_ids` without padding, and their `logprobs` in nats under the weights of the slot."""
        given = self.settings
        self._use(self.slots[slot])
        tokens = [torch.tensor(ids) for ids in prompt_ids]
        layout: dict[str, Any] = {"padding_side": "left", "pad_to_multiple_of": given["pad_to_multiple_of"]}
        ids = pad(tokens, padding_value=given["pad_token_id"], **layout)
        mask = pad([torch.ones_like(t) for t in tokens], padding_value=0, **layout)
        precision = nullcontext() if given["autocast"] is None else torch.autocast("cpu", given["autocast"])
        faster = faster_generation(self.model, fast=given["fast"], dtype=given["dtype"])
        with torch.no_grad(), precision, own_random_numbers(seed, torch.device("cpu")):
            with faster:
                config = given["generation_config"]
                found = self.model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
            found = found[:, ids.shape[1] :]
            is_eos = torch.isin(found, torch.tensor(given["eos_token_ids"]))
            lengths = torch.where(is_eos.any(1), is_eos.int().argmax(1) + 1, found.shape[1])
            completions = [row[:length].tolist() for row, length in zip(found, lengths, strict=True)]
            size, logps = given["batch_size"], []
            with fused_head(self.base, given["temperature"]) if self.forward_pass.fused else nullcontext():
                for start in range(0, len(prompt_ids), size):
                    batch = prompt_ids[start : start + size], completions[start : start + size]
                    logps += self.forward_pass.compute_logps(self.model, *batch).logps
        return {"completion_ids": completions, "logprobs": [values.tolist() for values in logps]}


class EngineProcess:
    """
    Start and use an engine process.

    Args:
        trainer ([`ExactUpdateTrainer`]): Its model, tokenizer, and generation settings are those of the process.
        num_slots (`int`): Number of copies of the trained weights.
    """

    def __init__(self, trainer: Any, num_slots: int):
        model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
        base = model.get_base_model() if isinstance(model, PeftModel) else model
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad} | dict(model.named_buffers())
        layouts = [[(n, t.dtype, t.shape) for n, t in part.items()] for part in (frozen, self._trained)]
        self._memory = [SharedTensors(layouts[0])] + [SharedTensors(layouts[1]) for _ in range(num_slots)]
        self._write(self._memory[0], frozen)
        args = trainer.args
        settings = {
            "model_class": type(base),
            "config": base.config,
            "adapter": (model.active_adapter, model.active_peft_config) if isinstance(model, PeftModel) else None,
            "frozen": layouts[0],
            "trained": layouts[1],
            "frozen_path": self._memory[0].path,
            "slot_paths": [memory.path for memory in self._memory[1:]],
            "model_generation_config": base.generation_config,
            "generation_config": trainer.generation_config,
            "pad_token_id": trainer._tokenizer.pad_token_id,
            "eos_token_ids": list(trainer.eos_token_ids),
            "pad_to_multiple_of": trainer.pad_to_multiple_of,
            "temperature": trainer.temperature,
            "packing": trainer.forward_pass.packing,
            "fused": trainer.forward_pass.fused,
            "autocast": torch.bfloat16 if trainer.accelerator.mixed_precision == "bf16" else None,
            "fast": args.fast_generation,
            "dtype": getattr(torch, args.generation_dtype) if args.generation_dtype else None,
            "batch_size": args.per_device_train_batch_size,
            "num_threads": torch.get_num_threads(),
        }
        self._lock = threading.Lock()  # one request at a time
        ours, theirs = socket.socketpair()
        self.process = start_process(theirs)
        theirs.close()
        self._connection = Connection(ours.detach())
        self._connection.send(settings)

    @torch.no_grad()
    def _write(self, memory: SharedTensors, tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            memory.tensors[name].copy_(tensor)

    def write_weights(self, slot: int, weights: dict[str, torch.Tensor] | None) -> None:
        """Copy `weights`, by default the current ones, to a slot, which the process must not be using."""
        self._write(self._memory[1 + slot], self._trained if weights is None else weights)

    def weights_of(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the weights that a request generates with, as copies."""
        return {"weights": {name: t.clone() for name, t in self._memory[1 + request["slot"]].tensors.items()}}

    def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the result of [`Generator.generate`] for the arguments `request`. Raises an `EOFError` or `OSError`
        if the process has ended."""
        with self._lock:
            self._connection.send(request)
            return self._connection.recv()

    def own_part(self, request: dict[str, Any], output: dict[str, Any]) -> dict[str, Any]:
        return output

    def close(self) -> None:
        """End the process at once."""
        self.process.kill()
        self.process.wait()
        with self._lock:  # a request that waits for the process has failed by now
            self._connection.close()
        for memory in self._memory:
            os.close(memory.fd)


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
    try:
        settings = connection.recv()
        torch.set_num_threads(settings["num_threads"])
        generator = Generator(settings)
        while True:
            connection.send(generator.generate(**connection.recv()))
    except (EOFError, ConnectionError):
        pass


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
