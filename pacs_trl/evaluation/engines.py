"""Engines that generate completions: transformers `generate`, vLLM, or an OpenAI-compatible server.

An engine takes requests and yields (request, completion) pairs in any order, as soon as they are finished, so that the
caller can store each one. Reproducibility differs:

- transformers: `batch_size` consecutive requests form a fixed batch, and every request has its own random stream, so a
  resumed run is bit-identical to an uninterrupted one on the same machine.
- vLLM and server: every request has its own seed, but rounding depends on which requests share a forward pass and can
  change a token. A resumed run generates equally valid samples, not always the same text.
"""

import base64
import gc
import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cached_property, partial
from io import BytesIO
from pathlib import Path
from typing import Any

from ..data.images import image_blocks, prompt_with_images
from ..errors import FailedRun, UserError
from ..redaction import without_secrets
from ..settings.names import check_model_path
from ..update.context_length import context_lengths
from . import provenance
from .arguments import EvaluationArguments
from .requests import Completion, Request, SamplingSettings, tokenize_prompt


logger = logging.getLogger(__name__)

# Settings of vLLM and SGLang that OpenAI's API does not have, at values without effect.
NEUTRAL_SETTINGS = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}

Answers = Iterator[tuple[Request, Completion]]


class TransformersEngine:
    """Batched `generate` of a causal language model, `batch_size` requests per call."""

    def __init__(
        self,
        model,
        tokenizer,
        *,
        batch_size: int = 64,
        chat_template_kwargs: dict | None = None,
        load_processor: Callable[[], Any] | None = None,
    ):
        self.model, self.tokenizer = model, tokenizer
        self._load_processor = load_processor  # of images, which many models lack
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
        kwargs["load_processor"] = partial(load_processor, model, **loading)
        return cls(loaded.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer, **kwargs)

    def generate(self, requests: Sequence[Request], settings: SamplingSettings) -> Answers:
        from .sampling import generate_tokens, stop_token_ids

        tokenizer, stop_ids = self.tokenizer, stop_token_ids(self.model, self.tokenizer)
        pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        end = {"pad_token_id": pad_token_id, "stop_ids": stop_ids}
        for start in range(0, len(requests), self.batch_size):
            batch = requests[start : start + self.batch_size]
            prompts, images = self._tokenized(batch)
            seeds = [request.seed for request in batch]
            generated, _ = generate_tokens(self.model, prompts, seeds, settings, **end, share_prompts=True, **images)
            for request, ids in zip(batch, generated, strict=True):
                length = next((i + 1 for i, token in enumerate(ids) if token in stop_ids), None)
                text = tokenizer.decode(ids[:length], skip_special_tokens=True)
                reason = "stop" if length else "length"
                yield request, Completion(text, length or len(ids), reason, ids[:length])

    def _tokenized(self, batch: Sequence[Request]) -> tuple[list[list[int]], dict[str, Any]]:
        """Return the token ids of prompts, and the inputs of the model for their images."""
        if not any(has_images(request) for request in batch):
            return [tokenize_prompt(self.tokenizer, r.prompt, self.chat_template_kwargs) for r in batch], {}
        from ..update.prompt_images import left_padded_image_inputs, process_prompt

        processed: dict[str, tuple[list[int], Any]] = {}  # by problem, of which a batch has several samples
        for request in batch:
            if request.problem_id not in processed:
                prompt = prompt_with_images({"prompt": request.prompt})
                processed[request.problem_id] = process_prompt(
                    self._processor, prompt, chat_template_kwargs=self.chat_template_kwargs
                )
        prompts, images = zip(*(processed[request.problem_id] for request in batch), strict=True)
        inputs = left_padded_image_inputs(images, list(map(len, prompts)))
        return list(prompts), {name: tensor.to(self.model.device) for name, tensor in inputs.items()}

    @cached_property
    def _processor(self) -> Any:
        assert self._load_processor is not None
        return self._load_processor()

    def close(self) -> None:
        self.model = None


class VLLMEngine:
    """vLLM in this process, with prefix caching for the n samples of a problem. `settings` go to `vllm.LLM`, whose own
    `generate` returns only when all requests are finished, and would lose them in a crash."""

    def __init__(self, model: str, *, chat_template_kwargs: dict | None = None, **settings: Any):
        from vllm import LLM

        self._model = model
        self._loading = {key: settings[key] for key in ("revision", "trust_remote_code") if key in settings}
        self.llm = LLM(model=model, enable_prefix_caching=True, use_tqdm_on_load=sys.stderr.isatty(), **settings)
        self.chat_template_kwargs = chat_template_kwargs
        self.context_length = self.llm.llm_engine.model_config.max_model_len

    def generate(self, requests: Sequence[Request], settings: SamplingSettings) -> Answers:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        from ..data.text_tokenizer import accepting_text

        engine, tokenizer = self.llm.llm_engine, accepting_text(self.llm.get_tokenizer())
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
                    ids = sample.token_ids
                    completion = Completion(sample.text, len(ids), sample.finish_reason, ids)
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
        """Drop the last reference, which ends vLLM's processes; some references are cyclic."""
        self.llm = None
        gc.collect()


class _RejectedRequest(UserError):
    """A request that a server rejected with an HTTP `status`."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


class ServerEngine:
    """
    Client of an OpenAI-compatible server, for example `vllm serve MODEL`.

    Conversations go to the endpoint `/chat/completions`, where the server applies its own chat template, and prompts
    that are text to `/completions`, where it adds the tokenizer's special tokens alone, as in training. Start it
    without a reasoning parser, which would remove reasoning from the text that is graded: an answer that has reasoning
    alone is an error. Connection errors, timeouts,
    and status 408, 429, or 5xx are retried after `waits_seconds`. The API key is read from the environment variable
    `OPENAI_API_KEY`; `chat_template_kwargs` are sent with each conversation (an extension of vLLM). Raises a
    `ValueError` if the server does not respond or does not serve the model.
    """

    timeout_seconds = 3600.0  # per request; long completions take minutes
    waits_seconds = (1.0, 2.0, 4.0, 8.0)  # between attempts

    def __init__(self, base_url: str, model: str, *, concurrency: int = 64, chat_template_kwargs: dict | None = None):
        from huggingface_hub.utils import httpx

        self.model, self.concurrency = model, concurrency
        self.chat_template_kwargs = chat_template_kwargs
        self._takes_neutral_settings, self._lock = True, threading.Lock()
        key = os.environ.get("OPENAI_API_KEY")
        self._client = httpx.Client(
            base_url=base_url.rstrip("/") + "/",
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(self.timeout_seconds, connect=10.0),
            limits=httpx.Limits(max_connections=concurrency),
        )
        try:
            served = [entry["id"] for entry in self._client.get("models").raise_for_status().json()["data"]]
        except httpx.HTTPError as error:
            served = [str(error)]
        if model not in served:
            raise UserError(
                f"No OpenAI-compatible server at base_url={base_url} serves {model!r} ({', '.join(served)}). Start "
                "one, or correct base_url or model."
            )

    def generate(self, requests: Sequence[Request], settings: SamplingSettings) -> Answers:
        with ThreadPoolExecutor(self.concurrency) as pool:
            futures = {pool.submit(self._complete, request, settings): request for request in requests}
            try:
                for future in as_completed(futures):
                    yield futures[future], future.result()
            finally:
                for future in futures:
                    future.cancel()

    def close(self) -> None:
        self._client.close()

    def _complete(self, request: Request, settings: SamplingSettings) -> Completion:
        prompt = request.prompt
        body: dict[str, Any] = {
            "model": self.model,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "max_tokens": settings.max_new_tokens,
            "seed": request.seed,
        }
        if settings.top_k:
            body["top_k"] = settings.top_k
        if isinstance(prompt, str):
            endpoint = "completions"
            body["prompt"] = prompt
        else:
            endpoint = "chat/completions"
            body["messages"] = openai_messages(prompt) if has_images(request) else prompt
            if self.chat_template_kwargs:
                body["chat_template_kwargs"] = self.chat_template_kwargs
        answer, settings_not_sent = self._post_with_neutral_settings(endpoint, body)
        choice, num_tokens = answer["choices"][0], answer["usage"]["completion_tokens"]
        text = choice["text"] or "" if isinstance(prompt, str) else _content(choice["message"])
        more = {"settings_not_sent": settings_not_sent} if settings_not_sent else {}
        return Completion(text, num_tokens, choice["finish_reason"], more=more)

    def _post_with_neutral_settings(self, endpoint: str, body: dict) -> tuple[dict, list[str]]:
        """Send a request with the settings that it does not name at values without effect: `vllm serve` takes missing
        ones from the generation settings of the checkpoint. A server that rejects these keys gets none of them. Return
        the answer, and the settings that were not sent."""
        neutral = {key: value for key, value in NEUTRAL_SETTINGS.items() if key not in body}
        if not self._takes_neutral_settings:
            return self._post(endpoint, body), list(neutral)
        try:
            return self._post(endpoint, body | neutral), []
        except _RejectedRequest as error:
            if error.status not in (400, 422):
                raise
        answer = self._post(endpoint, body)  # raises an error if another part of the request is rejected
        with self._lock:
            if self._takes_neutral_settings:
                self._takes_neutral_settings = False
                logger.warning(
                    f"The server rejects {', '.join(neutral)}, which are sent at values without effect. Make sure "
                    "that it has no default values of its own for them."
                )
        return answer, list(neutral)

    def _post(self, endpoint: str, body: dict) -> dict:
        from huggingface_hub.utils import httpx

        for wait in (0.0, *self.waits_seconds):
            time.sleep(wait)
            try:
                return self._client.post(endpoint, json=body).raise_for_status().json()
            except httpx.HTTPStatusError as error:
                status, reason = error.response.status_code, str(error)
                if status not in (408, 429) and status < 500:
                    raise _RejectedRequest(
                        f"The server rejected a request ({status}): {error.response.text[:500]}. Correct the "
                        "settings, and run the same command again.",
                        status,
                    ) from error
            except httpx.TransportError as error:
                reason = repr(error)
        raise FailedRun(
            f"A request failed {len(self.waits_seconds) + 1} times, last with {reason}. Fix the server and run the "
            "same command again; stored samples are kept."
        )


def _content(message: dict[str, Any]) -> str:
    """Return the text of a message, empty if there is none. Raises a `ValueError` if a reasoning parser took all of it
    out of the text."""
    text = message.get("content") or ""
    if not text and (message.get("reasoning_content") or message.get("reasoning")):
        raise UserError(
            "The server's reasoning parser returned reasoning and no text, which would be graded as wrong. Start it "
            "without a reasoning parser (vllm serve without --reasoning-parser), and run the same command again."
        )
    return text


def has_images(request: Request) -> bool:
    """Return whether the prompt of a request has images."""
    return next(image_blocks(request.prompt), None) is not None


def openai_messages(prompt: Any) -> list[dict[str, Any]]:
    """Return messages with images in the form of OpenAI's API: their content is in the request."""
    messages = prompt_with_images({"prompt": prompt})
    for block in image_blocks(messages):
        content = BytesIO()
        block.pop("image").save(content, format="PNG")
        url = f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"
        block.update({"type": "image_url", "image_url": {"url": url}})
    return messages


def load_processor(model: str, **loading: Any) -> Any:
    """Load the processor of a checkpoint; `loading` goes to `from_pretrained`. Raises a `ValueError` if it reads no
    images, or a package is missing."""
    from transformers import AutoProcessor, ProcessorMixin

    try:
        processor = AutoProcessor.from_pretrained(model, **loading)
    except (ImportError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"A benchmark has images, and the processor of {model} cannot be loaded ({reason:.200}). Install the "
            "missing package, usually torchvision, or evaluate a checkpoint that reads images."
        ) from error
    if not isinstance(processor, ProcessorMixin):
        raise UserError(
            f"A benchmark has images, and {model} reads text alone. Evaluate a checkpoint that reads images, or "
            "remove the images."
        )
    processor.chat_template = processor.chat_template or processor.tokenizer.chat_template
    return processor


def _architecture(model: str, revision: str | None, trust_remote_code: bool) -> Any:
    """Return the class of transformers that loads a checkpoint or an adapter of one."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils.peft_utils import find_adapter_config_file

    base = model
    if (adapter := find_adapter_config_file(model, revision=revision)) is not None:
        base, revision = json.loads(Path(adapter).read_text(encoding="utf-8"))["base_model_name_or_path"], None
    config = AutoConfig.from_pretrained(base, revision=revision, trust_remote_code=trust_remote_code)
    classes_of_checkpoint = getattr(config, "auto_map", None) or {}  # of a model with its own code
    reads_images = type(config) in AutoModelForImageTextToText._model_mapping
    reads_images = reads_images or AutoModelForImageTextToText.__name__ in classes_of_checkpoint
    return AutoModelForImageTextToText if reads_images else AutoModelForCausalLM


def identify_model(args: EvaluationArguments) -> dict[str, Any]:
    """Return the identity of the model's weights as plain data; raises a `ValueError` if the engine cannot load it."""
    if args.engine == "server":
        return without_secrets({"name": args.model, "server": args.base_url})  # results are published
    if args.engine == "vllm":
        check_model_path(args.model, "the engine vllm", "Sample with `--engine transformers`, or ")
    return provenance.model_identity(args.model, **args.loading)


def start_engine(args: EvaluationArguments) -> Any:
    """Start the engine that the arguments name. Raises a `ValueError` if the server does not serve the model."""
    template = args.chat_template_kwargs
    if args.engine == "server":
        return ServerEngine(args.base_url, args.model, concurrency=args.concurrency, chat_template_kwargs=template)
    common: dict[str, Any] = {**args.loading, "dtype": args.dtype, "chat_template_kwargs": template}
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
