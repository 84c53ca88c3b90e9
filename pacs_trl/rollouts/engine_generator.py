"""Generation of the engine process: a copy of the policy on the CPU, with transformers or vLLM."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from peft import PeftConfig, get_peft_model
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from trl.trainer.utils import pad

from ..update.forward_pass import ForwardPass, fused_head
from ..update.generation import faster_generation
from .random_numbers import seeded_random_numbers
from .request_seeds import request_seed
from .stepped_engine import GroupInProgress, decode


@dataclass(frozen=True)
class GeneratorSettings:
    """
    Everything that a [`Generator`] needs of the trainer.

    Attributes:
        args (`SimpleNamespace`): Fields of the configuration of the run.
        model_class (`type`), config (`PreTrainedConfig`): Class and configuration of the base model.
        dtype (`torch.dtype`): Data type of its layers; that of the head may be another one.
        adapter (`tuple[str, PeftConfig]`, *optional*): Name and configuration of the trained adapter.
        parameter_names (`list[str]`): Names of the trainer's parameters.
        frozen_file (`str`): Path of the file with the weights and buffers that are not trained.
        copy_files (`list[str]`): Path of the file of each copy of the trained weights.
        model_generation_config, generation_config (`GenerationConfig`): Of the base model, and of the trainer.
        pad_token_id (`int`), eos_token_ids (`list[int]`): Special tokens.
        packing (`str`, *optional*), fused (`bool`): As in the trainer's [`ForwardPass`].
        autocast (`torch.dtype`, *optional*): Data type of automatic mixed precision.
        num_threads (`int`): Threads of torch.
    """

    args: SimpleNamespace
    model_class: type[PreTrainedModel]
    config: PreTrainedConfig
    dtype: torch.dtype
    adapter: tuple[str, PeftConfig] | None
    parameter_names: list[str]
    frozen_file: str
    copy_files: list[str]
    model_generation_config: GenerationConfig | None
    generation_config: GenerationConfig
    pad_token_id: int
    eos_token_ids: list[int]
    packing: str | None
    fused: bool
    autocast: torch.dtype | None
    num_threads: int


class Generator:
    """A copy of the policy, with weights in files in memory."""

    def __init__(self, settings: GeneratorSettings):
        self.settings = settings
        self.args = settings.args
        self.base: Any = settings.model_class(settings.config).eval()
        self.base.generation_config = settings.model_generation_config
        self.model: Any = self.base
        if settings.adapter is not None:
            adapter_name, adapter_config = settings.adapter
            self.model = get_peft_model(self.base, adapter_config, adapter_name=adapter_name).eval()
        if untie_weights(self.model, settings.parameter_names):
            self.base.config.tie_word_embeddings = False  # for vLLM
        self.tensors = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        self._use_weights(settings.frozen_file)
        if self.args.cast_lm_head_to_fp32:
            compute_logits_in_float32(self.base, settings.dtype)
        self.forward_pass = ForwardPass(
            self.base, torch.device("cpu"), pad_token_id=settings.pad_token_id, temperature=self.args.temperature
        )
        self.forward_pass.packing = settings.packing
        self.forward_pass.fused = settings.fused
        self.vllm: VLLMOnCPU | None = None
        if self.args.rollout_engine == "vllm":
            self.vllm = VLLMOnCPU(self.args, self.model, self.base, settings.eos_token_ids)

    def _use_weights(self, file: str) -> None:
        for name, tensor in torch.load(file, mmap=True).items():
            if name in self.tensors:  # not those of another adapter, the KL reference
                self.tensors[name].data = tensor

    def generate(self, weight_copy: int, prompt_ids: list[list[int]], seed: int) -> dict[str, list[list]]:
        """Return `completion_ids` without padding, and their `logprobs` in nats under the weights of the copy."""
        self._use_weights(self.settings.copy_files[weight_copy])
        dtype = self.settings.autocast
        precision = nullcontext() if dtype is None else torch.autocast("cpu", dtype)
        with torch.no_grad(), precision, seeded_random_numbers(seed, torch.device("cpu")):
            if self.vllm is None:
                completions, logps = self.sample(prompt_ids)
            else:
                completions, logps = self.vllm.sample(prompt_ids, seed)
            if self.args.stale_logps != "engine":
                logps = self.recompute(prompt_ids, completions)
        return {"completion_ids": completions, "logprobs": logps}

    def decode(
        self, weight_copy: int, groups: list[GroupInProgress], num_groups: int, version: int, stream: str
    ) -> tuple[list[GroupInProgress], list[GroupInProgress]]:
        """Decode groups with vLLM and the weights of the copy until `num_groups` are finished, as
        [`~stepped_engine.decode`] does. Returns these, and the others."""
        assert self.vllm is not None
        self._use_weights(self.settings.copy_files[weight_copy])
        with torch.no_grad():
            finished = self.vllm.decode(groups, num_groups, version, stream)
        return finished, [group for group in groups if group not in finished]

    def sample(self, prompt_ids: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
        """Return completions without padding, sampled by transformers with the global random numbers, and their
        log-probs as they were sampled; none if they will be recomputed."""
        args = self.args
        tokens = [torch.tensor(ids) for ids in prompt_ids]
        layout: dict[str, Any] = {"padding_side": "left", "pad_to_multiple_of": args.pad_to_multiple_of}
        ids = pad(tokens, padding_value=self.settings.pad_token_id, **layout)
        mask = pad([torch.ones_like(t) for t in tokens], padding_value=0, **layout)
        dtype = getattr(torch, args.generation_dtype) if args.generation_dtype else None
        with (
            self._noting_logps() as noted_logps,
            faster_generation(self.model, fast=args.fast_generation, dtype=dtype),
        ):
            config = self.settings.generation_config
            sequences = self.model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
        generated = sequences[:, ids.shape[1] :]
        is_eos = torch.isin(generated, torch.tensor(self.settings.eos_token_ids))
        lengths = torch.where(is_eos.any(1), is_eos.int().argmax(1) + 1, generated.shape[1])
        completions = [row[:length].tolist() for row, length in zip(generated, lengths, strict=True)]
        if not noted_logps:
            return completions, []
        noted_logps[-1] = noted_logps[-1].gather(1, generated[:, -1:])
        logps = torch.cat(noted_logps, dim=1)  # as `generated`
        return completions, [row[:length].tolist() for row, length in zip(logps, lengths, strict=True)]

    @contextmanager
    def _noting_logps(self) -> Iterator[list[torch.Tensor]]:
        """Note the log-probs of the tokens that transformers samples inside the context, unless they will be
        recomputed: `(B, 1)` for each token, and for the last one `(B, V)`, because it is in no later input."""
        noted: list[torch.Tensor] = []
        if self.args.stale_logps != "engine":
            yield noted
            return

        def note(_module: Any, _args: tuple, inputs: dict[str, Any], output: Any) -> None:
            if noted:
                last_tokens = inputs["input_ids"][:, -1:]
                noted[-1] = noted[-1].gather(1, last_tokens)
            noted.append((output.logits[:, -1].float() / self.args.temperature).log_softmax(-1))

        with self.base.register_forward_hook(note, with_kwargs=True):
            yield noted

    def recompute(self, prompt_ids: list[list[int]], completions: list[list[int]]) -> list[list[float]]:
        """Return log-probs by the forward pass of training."""
        head: AbstractContextManager[None] = nullcontext()
        if self.forward_pass.fused:
            head = fused_head(self.base, self.args.temperature, self.args.cast_lm_head_to_fp32)
        size = self.args.per_device_train_batch_size
        logps: list[list[float]] = []
        with head:
            for start in range(0, len(prompt_ids), size):
                batch = prompt_ids[start : start + size], completions[start : start + size]
                result = self.forward_pass.compute_logps(self.model, *batch)
                logps += [values.tolist() for values in result.logps]
        return logps


class VLLMOnCPU:
    """
    vLLM's engine in this process. It gets the weights of `model` with each request.

    Args:
        args (`SimpleNamespace`): Fields of the configuration of the run.
        model (`nn.Module`): The policy.
        base (`PreTrainedModel`): Its base model, which the engine is built for.
        eos_token_ids (`list[int]`): Tokens that end a completion.
    """

    def __init__(self, args: SimpleNamespace, model: nn.Module, base: PreTrainedModel, eos_token_ids: list[int]):
        self.args = args
        self.model = model
        self.eos_token_ids = eos_token_ids
        self.llm: Any = self._start(base)

    def _start(self, base: PreTrainedModel) -> Any:
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        from vllm import LLM
        from vllm.model_executor.layers import utils
        from vllm.utils.cpu_resource_utils import get_memory_node_info, get_visible_memory_node

        # vLLM's CPU backend would repack the weights of linear layers, and ignore those that it gets later.
        def use_plain_linear(layer: nn.Module, remove_weight: bool) -> None:
            vars(layer)["cpu_linear"] = torch.nn.functional.linear

        utils.dispatch_cpu_unquantized_gemm = use_plain_linear
        # vLLM would subtract what this process has taken so far, which differs from run to run, and with it how many
        # completions share a step of the engine.
        memory = get_memory_node_info(get_visible_memory_node()[0]).total_memory
        with tempfile.TemporaryDirectory() as directory:
            base.config.architectures = [type(base).__name__]
            base.config.save_pretrained(directory)
            return LLM(
                directory,
                load_format="dummy",
                skip_tokenizer_init=True,
                enforce_eager=True,
                dtype="float32",
                logprobs_mode="processed_logprobs",  # at the temperature
                max_model_len=self.args.vllm_max_model_length,
                kv_cache_memory_bytes=int(memory * self.args.vllm_gpu_memory_utilization),
                enable_prefix_caching=False,
                enable_chunked_prefill=False,  # a seeded request whose prefill is split would end a CPU engine
            )

    def sample(self, prompt_ids: list[list[int]], seed: int) -> tuple[list[list[int]], list[list[float]]]:
        """Return completions, and their log-probs as they were sampled."""
        self._load_weights()
        prompts = [{"prompt_token_ids": ids} for ids in prompt_ids]
        params = [self._sampling_params(request_seed(str(seed), i)) for i in range(len(prompt_ids))]
        outputs = [output.outputs[0] for output in self.llm.generate(prompts, params, use_tqdm=False)]
        completions = [list(output.token_ids) for output in outputs]
        logps = []
        for completion, output in zip(completions, outputs, strict=True):
            # vLLM returns, for each token, a dict of candidates by their ids.
            tokens_and_candidates = zip(completion, output.logprobs, strict=True)
            logps.append([candidates[token].logprob for token, candidates in tokens_and_candidates])
        return completions, logps

    def decode(
        self, groups: list[GroupInProgress], num_groups: int, version: int, stream: str
    ) -> list[GroupInProgress]:
        """Decode groups as [`~stepped_engine.decode`] does."""
        self._load_weights()
        return decode(self.llm.llm_engine, groups, num_groups, version, stream, self._continuation_params)

    def _load_weights(self) -> None:
        worker = self.llm.llm_engine.model_executor.driver_worker
        worker.model_runner.model.load_weights(self.model.named_parameters())

    def _sampling_params(self, seed: int, **settings: Any) -> Any:
        from vllm import SamplingParams

        args = self.args
        sampling = {
            "temperature": args.temperature,
            "top_p": args.top_p,
            "top_k": args.top_k,
            "repetition_penalty": args.repetition_penalty,
            "min_p": args.min_p or 0.0,
            "max_tokens": args.max_completion_length,
            "logprobs": 0,
            "stop_token_ids": self.eos_token_ids,
        }
        sampling |= args.generation_kwargs or {}
        return SamplingParams(seed=seed, detokenize=False, **(sampling | settings))

    def _continuation_params(self, seed: int, num_tokens: int) -> Any:
        """Return the parameters of a request that continues a completion of `num_tokens` tokens."""
        from vllm.sampling_params import RequestOutputKind

        num_left = self.args.max_completion_length - num_tokens
        return self._sampling_params(seed, max_tokens=num_left, output_kind=RequestOutputKind.DELTA)


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
