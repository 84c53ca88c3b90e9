"""Client of an OpenAI-compatible server as an engine of evaluations."""

import logging
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from ..errors import FailedRun, UserError
from .image_requests import has_images, openai_messages
from .requests import Completion, FinishedRequests, Request, SamplingSettings


logger = logging.getLogger(__name__)

# Settings of vLLM and SGLang that OpenAI's API does not have, at values without effect.
NEUTRAL_SETTINGS = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


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
    alone is an error. Connection errors, timeouts, and status 408, 429, or 5xx are retried after `waits_seconds`. The
    API key is read from the environment variable `OPENAI_API_KEY`.

    Args:
        base_url (`str`): Address of the API, such as `http://localhost:8000/v1`.
        model (`str`): Name of the model on the server.
        concurrency (`int`): Requests at a time.
        chat_template_kwargs (`dict`, *optional*): Sent with each conversation (an extension of vLLM).

    Raises:
        `ValueError`: if the server does not respond or does not serve the model; in `generate`, if it rejects a
            request.
        [`FailedRun`]: in `generate`, if a request failed after all attempts.
    """

    timeout_seconds = 3600.0  # per request; long completions take minutes
    waits_seconds = (1.0, 2.0, 4.0, 8.0)  # between attempts

    def __init__(self, base_url: str, model: str, *, concurrency: int = 64, chat_template_kwargs: dict | None = None):
        from huggingface_hub.utils import httpx

        self.model = model
        self.concurrency = concurrency
        self.chat_template_kwargs = chat_template_kwargs
        self._accepts_neutral_settings = True  # until it rejects them
        self._lock = threading.Lock()  # of `_accepts_neutral_settings`, which all requests read
        headers = {}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        self._client = httpx.Client(
            base_url=base_url.rstrip("/") + "/",
            headers=headers,
            timeout=httpx.Timeout(self.timeout_seconds, connect=10.0),
            limits=httpx.Limits(max_connections=concurrency),
        )
        try:
            response = self._client.get("models").raise_for_status()
            served = [entry["id"] for entry in response.json()["data"]]
        except httpx.HTTPError as error:
            served = [str(error)]
        if model not in served:
            raise UserError(
                f"No OpenAI-compatible server at base_url={base_url} serves {model!r} ({', '.join(served)}). Start "
                "one, or correct base_url or model."
            )

    def generate(self, requests: Sequence[Request], settings: SamplingSettings) -> FinishedRequests:
        """Yield each request with its completion, in the order in which the server finishes them."""
        with ThreadPoolExecutor(self.concurrency) as pool:
            futures = {pool.submit(self._complete, request, settings): request for request in requests}
            try:
                for future in as_completed(futures):
                    yield futures[future], future.result()
            finally:  # after an error, or if the caller stops reading
                for future in futures:
                    future.cancel()

    def close(self) -> None:
        self._client.close()

    def _complete(self, request: Request, settings: SamplingSettings) -> Completion:
        """Request one completion."""
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
        is_text = isinstance(prompt, str)
        if is_text:
            endpoint = "completions"
            body["prompt"] = prompt
        else:
            endpoint = "chat/completions"
            body["messages"] = openai_messages(prompt) if has_images(request) else prompt
            if self.chat_template_kwargs:
                body["chat_template_kwargs"] = self.chat_template_kwargs
        answer, settings_not_sent = self._post_with_neutral_settings(endpoint, body)
        choice = answer["choices"][0]
        if is_text:
            text = choice["text"] or ""
        else:
            text = _content(choice["message"])
        more = {}
        if settings_not_sent:
            more["settings_not_sent"] = settings_not_sent
        return Completion(text, answer["usage"]["completion_tokens"], choice["finish_reason"], more=more)

    def _post_with_neutral_settings(self, endpoint: str, body: dict) -> tuple[dict, list[str]]:
        """Send a request with `NEUTRAL_SETTINGS` that `body` does not name: `vllm serve` takes missing ones from the
        generation settings of the checkpoint. A server that rejects these keys gets none of them. Return the answer,
        and the names of the settings that were not sent."""
        neutral = {key: value for key, value in NEUTRAL_SETTINGS.items() if key not in body}
        if not self._accepts_neutral_settings:
            return self._post(endpoint, body), list(neutral)
        try:
            return self._post(endpoint, body | neutral), []
        except _RejectedRequest as error:
            if error.status not in (400, 422):
                raise
        answer = self._post(endpoint, body)  # raises an error if another part of the request is rejected
        with self._lock:  # one warning, although many requests are rejected at a time
            if self._accepts_neutral_settings:
                self._accepts_neutral_settings = False
                logger.warning(
                    f"The server rejects {', '.join(neutral)}, which are sent at values without effect. Make sure "
                    "that it has no default values of its own for them."
                )
        return answer, list(neutral)

    def _post(self, endpoint: str, body: dict) -> dict:
        """Send a request, again after errors that may pass, and return the answer."""
        from huggingface_hub.utils import httpx

        for wait_seconds in (0.0, *self.waits_seconds):
            time.sleep(wait_seconds)
            try:
                return self._client.post(endpoint, json=body).raise_for_status().json()
            except httpx.HTTPStatusError as error:
                reason = str(error)
                status = error.response.status_code
                may_pass = status in (408, 429) or status >= 500
                if not may_pass:
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
    has_reasoning = bool(message.get("reasoning_content") or message.get("reasoning"))
    if not text and has_reasoning:
        raise UserError(
            "The server's reasoning parser returned reasoning and no text, which would be graded as wrong. Start it "
            "without a reasoning parser (vllm serve without --reasoning-parser), and run the same command again."
        )
    return text
