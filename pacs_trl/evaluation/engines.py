"""Engines that generate completions: transformers `generate`, vLLM, or an OpenAI-compatible server.

An engine takes requests and yields (request, completion) pairs in any order, as soon as they are finished, so that the
caller can store each one. A seed guarantees different things:

- transformers: a batch is a fixed set of requests (`batch_size` neighbors) and every request has its own random
  stream, so a resumed run gives the same text as an uninterrupted one, bit for bit, on the same machine.
- vLLM: every request carries its seed, but which requests share a forward pass depends on timing, and rounding can
  change a token: a resumed run generates equally valid samples, not always the same text.
- server: the seed is sent with each request.
"""

import gc
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from ..data import check_chat_template_kwargs
from ..errors import FailedRun
from ..redaction import without_secrets
from ..settings.names import check_whole_model, require_vllm
from . import provenance
from .arguments import EvaluationArguments
from .requests import Completion, Request, SamplingSettings, render_prompt


Answers = Iterator[tuple[Request, Completion]]


class TransformersEngine:
    """Batched `generate` of a causal language model, `batch_size` requests per call; the engine of CPU runs."""

    def __init__(self, model, tokenizer, *, batch_size: int = 64, chat_template_kwargs: dict | None = None):
        self.model, self.tokenizer = model, tokenizer
        self.batch_size = batch_size
        self.chat_template_kwargs = chat_template_kwargs

    @classmethod
    def load(cls, model: str, *, revision: str | None = None, dtype: str = "auto", **kwargs):
        """Load a checkpoint directory or a Hub id, on a GPU if there is one; `kwargs` as in the class."""
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model, revision=revision)
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(model, revision=revision, dtype=dtype)
        except RuntimeError as error:
            if "ignore_mismatched_sizes" not in str(error):
                raise
            raise ValueError(
                f"The weights in {model} do not have the shapes of the model that they are loaded into. Where it is "
                "an adapter, set base_model_name_or_path in its adapter_config.json to the model it was trained on."
            ) from error
        return cls(loaded.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer, **kwargs)

    def generate(self, requests: Sequence[Request], settings: SamplingSettings) -> Answers:
        from .sampling import generate_batch

        for start in range(0, len(requests), self.batch_size):
            batch = requests[start : start + self.batch_size]
            texts = [render_prompt(self.tokenizer, r.prompt, self.chat_template_kwargs) for r in batch]
            completions = generate_batch(self.model, self.tokenizer, texts, [r.seed for r in batch], settings)
            yield from zip(batch, completions, strict=True)

    def close(self) -> None:
        self.model = None


class VLLMEngine:
    """vLLM in this process, with prefix caching: the n samples of a problem share its prompt. `settings` are those of
    `vllm.LLM`, whose own `generate` would return when all requests are finished, and lose them in a crash."""

    def __init__(self, model: str, *, chat_template_kwargs: dict | None = None, **settings: Any):
        from vllm import LLM

        self.llm = LLM(model=model, enable_prefix_caching=True, use_tqdm_on_load=sys.stderr.isatty(), **settings)
        self.chat_template_kwargs = chat_template_kwargs

    def generate(self, requests: Sequence[Request], settings: SamplingSettings) -> Answers:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine, tokenizer = self.llm.llm_engine, self.llm.get_tokenizer()
        for i, request in enumerate(requests):
            text = render_prompt(tokenizer, request.prompt, self.chat_template_kwargs)
            token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            params = SamplingParams(
                temperature=settings.temperature,
                top_p=settings.top_p,
                top_k=settings.top_k,
                max_tokens=settings.max_new_tokens,
                seed=request.seed,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            engine.add_request(str(i), {"prompt_token_ids": token_ids}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    found = output.outputs[0]
                    completion = Completion(found.text, len(found.token_ids), found.finish_reason)
                    yield requests[int(output.request_id)], completion

    def close(self) -> None:
        """End vLLM's processes and free its memory, which happens with the last reference; some are cyclic."""
        self.llm = None
        gc.collect()


class ServerEngine:
    """
    An OpenAI-compatible server, for example `vllm serve MODEL`, asked through `/chat/completions`.

    The server applies its own chat template. Start it without a reasoning parser, or the verifier does not see the
    thoughts. A request that fails for a reason that can pass (connection, time-out, status 408, 429 or 5xx) is
    repeated up to `max_attempts` times, waiting `first_wait_seconds`, then twice as long, and so on. The API key is
    read from the environment variable `OPENAI_API_KEY`, if set.

    Args:
        base_url (`str`): For example `http://localhost:8000/v1`.
        model (`str`): Name under which the server offers the model.
        concurrency (`int`): Requests in flight.
        chat_template_kwargs (`dict`, *optional*): Sent along (an extension that vLLM understands).

    Raises:
        `ValueError`: if the server does not answer or does not offer the model.
    """

    timeout_seconds = 3600.0  # of one request; long completions take minutes
    max_attempts = 5
    first_wait_seconds = 1.0

    def __init__(self, base_url: str, model: str, *, concurrency: int = 64, chat_template_kwargs: dict | None = None):
        from huggingface_hub.utils import httpx

        self.model, self.concurrency = model, concurrency
        self.chat_template_kwargs = chat_template_kwargs
        key = os.environ.get("OPENAI_API_KEY")
        self._client = httpx.Client(
            base_url=base_url.rstrip("/") + "/",
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(self.timeout_seconds, connect=10.0),
            limits=httpx.Limits(max_connections=concurrency),
        )
        try:
            offered = [entry["id"] for entry in self._client.get("models").raise_for_status().json()["data"]]
        except httpx.HTTPError as error:
            raise ValueError(f"No OpenAI-compatible server answers at base_url {base_url}: {error}") from error
        if model not in offered:
            raise ValueError(f"The server at {base_url} does not offer {model!r}. Choose from {offered}.")

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
            "messages": prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}],
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "max_tokens": settings.max_new_tokens,
            "seed": request.seed,
        }
        if settings.top_k:
            body["top_k"] = settings.top_k
        if self.chat_template_kwargs:
            body["chat_template_kwargs"] = self.chat_template_kwargs
        answer = self._post(body)
        choice, num_tokens = answer["choices"][0], answer["usage"]["completion_tokens"]
        return Completion(choice["message"]["content"] or "", num_tokens, choice["finish_reason"])

    def _post(self, body: dict) -> dict:
        from huggingface_hub.utils import httpx

        for attempt in range(self.max_attempts):
            if attempt:
                time.sleep(self.first_wait_seconds * 2 ** (attempt - 1))
            try:
                response = self._client.post("chat/completions", json=body)
            except httpx.TransportError as error:
                reason = f"{type(error).__name__}: {error}"
                continue
            if response.is_success:
                return response.json()
            reason = f"status {response.status_code}"
            if response.status_code not in (408, 429) and response.status_code < 500:
                raise ValueError(f"The server refused a request ({response.status_code}): {response.text[:500]}")
        raise FailedRun(f"A request failed {self.max_attempts} times, last with {reason}; stored samples are kept.")


def identify_model(args: EvaluationArguments) -> dict[str, Any]:
    """
    Which weights will be sampled, as plain data.

    Raises:
        `ValueError`: if there is no such model, or the engine cannot load it.
    """
    if args.engine == "server":
        return without_secrets({"name": args.model, "server": args.base_url})  # results are published
    if args.engine == "vllm":
        check_whole_model(args.model, "the vllm engine", "use engine 'transformers'")
    return provenance.model_identity(args.model, args.revision)


def start_engine(args: EvaluationArguments) -> Any:
    """
    The engine that the arguments name, ready to `generate` and to be closed.

    Raises:
        `ValueError`: if vLLM is not installed, the chat template would ignore a key of `chat_template_kwargs`, or a
            server does not offer the model.
    """
    template = args.template_kwargs
    if args.engine == "server":
        return ServerEngine(args.base_url, args.model, concurrency=args.concurrency, chat_template_kwargs=template)
    if args.engine == "vllm":
        require_vllm("sample with `--engine transformers`")
    if template:  # before anything is loaded
        from transformers import AutoTokenizer

        check_chat_template_kwargs(AutoTokenizer.from_pretrained(args.model, revision=args.revision), template)
    common: dict[str, Any] = {"revision": args.revision, "dtype": args.dtype, "chat_template_kwargs": template}
    if args.engine == "transformers":
        return TransformersEngine.load(args.model, batch_size=args.batch_size, **common)
    own = ("tensor_parallel_size", "gpu_memory_utilization", "max_model_len", "enforce_eager")
    return VLLMEngine(args.model, **{name: getattr(args, name) for name in own}, **common)


def engine_facts(args: EvaluationArguments) -> dict[str, Any]:
    """The engine's entry in the results."""
    own = {"transformers": ("batch_size",), "vllm": ("tensor_parallel_size",)}.get(args.engine, ())
    return {"name": args.engine, "dtype": args.dtype} | {name: getattr(args, name) for name in own}
