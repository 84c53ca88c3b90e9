"""Watch of the vLLM server of a run with continuous rollouts: it answers, and has the weights of this run."""

import logging
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from huggingface_hub.utils import httpx


logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_CHECKS = 2.0
_SECONDS_OF_A_CHECK = 7.0
_MOST_SECONDS_OF_SILENCE = 180.0  # of a server that is connected: it may be busy


class Failure(NamedTuple):
    """Arguments of an [`~engine_failures.ServerFailure`]: what completes the sentence "The vLLM server ...", and the
    cause."""

    state: str
    cause: str


class ServerWatch:
    """
    Checks that the server answers and has the weights that this run has sent, every few seconds from [`start`] on.

    Attributes:
        client (`httpx.Client`): Client of the server.
        version (`str`): Name of the weights that the server has, unique to this run; empty if it is not known.
        checked_at (`float`): Time of the last check that succeeded, in seconds since the epoch.
        failure ([`Failure`], *optional*): That of the first check that failed.
    """

    def __init__(self, url: str):
        self.url, self.version, self.checked_at = url, "", 0.0
        self.client = http_client(url)
        self.failure: Failure | None = None
        self._replaced_at = 0.0
        self._run = secrets.token_hex(4)
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def start(self) -> None:
        """Begin to check in a thread of its own, until [`close`]."""
        threading.Thread(target=self._check_often, daemon=True).start()

    @contextmanager
    def replacing(self, version: int) -> Iterator[str]:
        """Check nothing inside the context, in which the server gets the weights with this version and their name,
        and nothing afterwards if that fails: which weights the server has is not known then."""
        with self._lock:
            self.version = ""
            name = f"{self._run}/{version}"
            yield name
            self.version, self._replaced_at = name, time.time()

    def check(self) -> Failure | None:
        """Check now, and return the first failure. A server that is only busy fails after minutes."""
        with self._lock:
            if self.failure is None and self.version:
                started = time.time()
                self.failure = self._ask()
                if self.failure is not None and time.time() - started < 1:  # not after a long wait
                    self.failure = self._ask()
                if self.failure is not None and not self._closed.is_set():
                    logger.error("The vLLM server at %s %s (%s).", self.url, *self.failure)
        return self.failure

    def close(self) -> None:
        self._closed.set()

    def _check_often(self) -> None:
        while not self._closed.wait(_SECONDS_BETWEEN_CHECKS):
            self.check()

    def _ask(self) -> Failure | None:
        started = time.time()
        try:
            response = self.client.get("/weight_info", timeout=_SECONDS_OF_A_CHECK)
            response.raise_for_status()
            version = response.json()["weight_version"]
        except httpx.ReadTimeout:
            silence = time.time() - max(self.checked_at, self._replaced_at)
            return None if silence < _MOST_SECONDS_OF_SILENCE else Failure("stopped answering", f"for {silence:.0f} s")
        except (httpx.HTTPError, ValueError, KeyError) as error:
            return Failure("stopped answering", in_one_line(error))
        if version != self.version:
            cause = f"its weights are {version!r} instead of {self.version!r}"
            return Failure("was restarted or got weights of another run", cause)
        self.checked_at = started
        return None


def http_client(url: str) -> httpx.Client:
    """Return a client that opens a connection for each call, because a server closes those that are idle. `httpx.get`
    takes ten times as long: it reads the certificates of the machine."""
    return httpx.Client(base_url=url, limits=httpx.Limits(max_keepalive_connections=0))


def failure_of(state: str, error: Exception) -> Failure:
    """Return the failure of a call to the server that has raised an exception. It is logged with its traceback unless
    it is what a server that is down, or rejects a request, raises: TRL's client raises bare exceptions."""
    if not isinstance(error, httpx.HTTPError | OSError) and type(error) is not Exception:
        logger.error("The vLLM server %s.", state, exc_info=error)
    return Failure(state, in_one_line(error))


def in_one_line(error: Exception) -> str:
    """Return an error's type and message, without the address of a manual that httpx appends."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]
