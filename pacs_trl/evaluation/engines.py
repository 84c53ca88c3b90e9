"""Engines that generate completions: transformers `generate`, vLLM, or an OpenAI-compatible server.

An engine takes requests and yields (request, completion) pairs in any order, as soon as they are finished, so that the
caller can store each one. Reproducibility differs:

- transformers: `batch_size` consecutive requests form a fixed batch, and every request has its own random stream, so a
  resumed run is bit-identical to an uninterrupted one on the same machine.
- vLLM and server: every request has its own seed, but rounding depends on which requests share a forward pass and can
  change a token. A resumed run generates equally valid samples, not always the same text.
"""

import gc
import json
import math
import sys
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from ..data.images import image_blocks, prompt_with_images
from ..redaction import without_secrets
from ..settings.names import check_model_path
from ..update.context_length import context_lengths
from . import provenance
from .arguments import EvaluationArguments
from .image_requests import has_images, load_processor
from .requests import Completion, FinishedRequests, Request, SamplingSettings, tokenize_prompt
from .server_engine import ServerEngine


class TransformersEngine:
    """
    Batched `generate` of a causal language model.

    Args:
        model, tokenizer: Of transformers.
        batch_size (`int`): Requests per call of `generate`.
        chat_template_kwargs (`dict`, *optional*): Arguments of the chat template, for conversations.
        load_processor (`Callable`, *optional*): Loads the processor of images, when the first image is generated for.
    """

    def __init__(
        self,
        model,
        tokenizer,
        *,
        batch_size: int = 64,
        chat_template_kwargs: dict | None = None,
        load_processor: Callable[[], Any] | None = None,
    ):
        self.model = model
        self.tokenizer = tokenizer
        self._load_processor = load_processor  # which many models lack
        self.batch_size = batch_size
        self.chat_template_kwargs = chat_template_kwargs
        self.context_length = context_lengths(model.config)["max_position_embeddings"] or math.inf

    @classmethod
    def load(
        cls,
        model: str,
        *,
        revision: str | None = None,
        trust_remote_code: bool = False,
        dtype: str = "auto",
        **kwargs,
    ):
        """Load a checkpoint directory or a Hub id, on a GPU if there is one; `kwargs` go to the constructor."""
        import torch

        from ..data.text_tokenizer import load_text_tokenizer

        loading: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
        tokenizer = load_text_tokenizer(model, **loading)
        loaded: Any = _architecture(model, **loading).from_pretrained(model, dtype=dtype, **loading)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        kwargs["load_processor"] = partial(load_processor, model, **loading)
        return cls(loaded.to(device).eval(), tokenizer, **kwargs)

    def generate(self, requests: Sequence[Request], settings: SamplingSettings) -> FinishedRequests:
        """Yield each request with its completion, in order, a batch at a time."""
        from .sampling import generate_tokens, stop_token_ids

        tokenizer = self.tokenizer
        stop_ids = stop_token_ids(self.model, tokenizer)
        pad_token_id = tokenizer.pad_token_id
        if pad_token_id is None:
            pad_token_id = tokenizer.eos_token_id
        for start in range(0, len(requests), self.batch_size):
            batch = requests[start : start + self.batch_size]
            prompts, image_inputs = self._tokenized(batch)
            generated, _ = generate_tokens(
                self.model,
                prompts,
                [request.seed for request in batch],
                settings,
                pad_token_id=pad_token_id,
                stop_ids=stop_ids,
                share_prompts=True,
                **image_inputs,
            )
            for request, padded_ids in zip(batch, generated, strict=True):
                ids, finish_reason = padded_ids, "length"
                for position, token in enumerate(padded_ids):
                    if token in stop_ids:
                        ids, finish_reason = padded_ids[: position + 1], "stop"
                        break
                text = tokenizer.decode(ids, skip_special_tokens=True)
                yield request, Completion(text, len(ids), finish_reason, ids)

    def _tokenized(self, batch: Sequence[Request]) -> tuple[list[list[int]], dict[str, Any]]:
        """Return the token ids of prompts, and the inputs of the model for their images."""
        if not any(has_images(request) for request in batch):
            ids = [tokenize_prompt(self.tokenizer, request.prompt, self.chat_template_kwargs) for request in batch]
            return ids, {}
        from ..update.prompt_images import left_padded_image_inputs, process_prompt

        processed: dict[str, tuple[list[int], Any]] = {}  # by problem, of which a batch has several samples
        for request in batch:
            if request.problem_id not in processed:
                prompt = prompt_with_images({"prompt": request.prompt})
                processed[request.problem_id] = process_prompt(
                    self._processor, prompt, chat_template_kwargs=self.chat_template_kwargs
                )
        prompts, images = zip(*(processed[request.problem_id] for request in batch), strict=True)
        inputs = left_padded_image_inputs(images, [len(prompt) for prompt in prompts])
        return list(prompts), {name: tensor.to(self.model.device) for name, tensor in inputs.items()}

    @cached_property
    def _processor(self) -> Any:
        assert self._load_processor is not None
        return self._load_processor()

    def close(self) -> None:
        """Drop the model, so that its memory is free."""
        self.model = None


class VLLMEngine:
    """vLLM in this process, with prefix caching for the n samples of a problem. `settings` go to `vllm.LLM`."""

    def __init__(self, model: str, *, chat_template_kwargs: dict | None = None, **settings: Any):
        from vllm import LLM

        self._model = model
        self._loading = {key: settings[key] for key in ("revision", "trust_remote_code") if key in settings}
        self.llm = LLM(model=model, enable_prefix_caching=True, use_tqdm_on_load=sys.stderr.isatty(), **settings)
        self.chat_template_kwargs = chat_template_kwargs
        self.context_length = self.llm.llm_engine.model_config.max_model_len

    def generate(self, requests: Sequence[Request], settings: SamplingSettings) -> FinishedRequests:
        """Yield each request with its completion when it is finished. `LLM.generate` returns only when all requests
        are finished, and would lose them in a crash."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        from ..data.text_tokenizer import accepting_text

        engine = self.llm.llm_engine
        tokenizer = accepting_text(self.llm.get_tokenizer())
        for i, request in enumerate(requests):
            prompt: dict[str, Any]
            if has_images(request):
                prompt = self._prompt_with_images(request)
            else:
                prompt = {"prompt_token_ids": tokenize_prompt(tokenizer, request.prompt, self.chat_template_kwargs)}
            params = SamplingParams(
                temperature=settings.temperature,
                top_p=settings.top_p,
                top_k=settings.top_k,
                max_tokens=settings.max_new_tokens,
                seed=request.seed,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            engine.add_request(str(i), prompt, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    sample = output.outputs[0]
                    num_tokens = len(sample.token_ids)
                    completion = Completion(sample.text, num_tokens, sample.finish_reason, sample.token_ids)
                    yield requests[int(output.request_id)], completion

    def _prompt_with_images(self, request: Request) -> dict[str, Any]:
        from ..update.prompt_images import ids_without_expansion

        messages = prompt_with_images({"prompt": request.prompt})
        ids = ids_without_expansion(self._processor, messages, chat_template_kwargs=self.chat_template_kwargs)
        images = [block["image"] for block in image_blocks(messages)]
        return {"prompt_token_ids": ids, "multi_modal_data": {"image": images}}

    @cached_property
    def _processor(self) -> Any:
        return load_processor(self._model, **self._loading)

    def close(self) -> None:
        """Drop the last reference, which ends vLLM's processes."""
        self.llm = None
        gc.collect()  # some references are cyclic


def _architecture(model: str, revision: str | None, trust_remote_code: bool) -> Any:
    """Return the class of transformers that loads a checkpoint or an adapter of one."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils.peft_utils import find_adapter_config_file

    base, base_revision = model, revision
    adapter_file = find_adapter_config_file(model, revision=revision)
    if adapter_file is not None:
        adapter = json.loads(Path(adapter_file).read_text(encoding="utf-8"))
        base, base_revision = adapter["base_model_name_or_path"], None
    config = AutoConfig.from_pretrained(base, revision=base_revision, trust_remote_code=trust_remote_code)
    if type(config) in AutoModelForImageTextToText._model_mapping:
        return AutoModelForImageTextToText
    classes_with_own_code = getattr(config, "auto_map", None) or {}
    if AutoModelForImageTextToText.__name__ in classes_with_own_code:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def identify_model(args: EvaluationArguments) -> dict[str, Any]:
    """Return the identity of the model's weights as plain data; raises a `ValueError` if the engine cannot load it."""
    if args.engine == "server":
        return without_secrets({"name": args.model, "server": args.base_url})  # results are published
    if args.engine == "vllm":
        check_model_path(args.model, "the engine vllm", "Sample with `--engine transformers`, or ")
    return provenance.model_identity(args.model, **args.loading)


def start_engine(args: EvaluationArguments) -> Any:
    """Start the engine that the arguments name. Raises a `ValueError` if the server does not serve the model."""
    if args.engine == "server":
        return ServerEngine(
            args.base_url,
            args.model,
            concurrency=args.concurrency,
            chat_template_kwargs=args.chat_template_kwargs,
        )
    common: dict[str, Any] = {
        **args.loading,
        "dtype": args.dtype,
        "chat_template_kwargs": args.chat_template_kwargs,
    }
    if args.engine == "transformers":
        return TransformersEngine.load(args.model, batch_size=args.batch_size, **common)
    return VLLMEngine(
        args.model,
        tensor_parallel_size=args.tensor_parallel_size,
        gpu_memory_utilization=args.gpu_memory_utilization,
        max_model_len=args.max_model_len,
        enforce_eager=args.enforce_eager,
        **common,
    )
