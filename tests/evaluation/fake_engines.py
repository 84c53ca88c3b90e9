"""Engines without a model, for the processes of replicated ones: importing them does not import torch."""

import multiprocessing
import os
import time

from pacs_trl.evaluation.requests import Completion


class FakeEngine:
    def close(self):
        """Nothing to end."""


class EchoEngine(FakeEngine):
    """Repeats the seed, says which process and which devices it is."""

    def generate(self, requests, settings):
        for request in requests:
            text = f"{request.seed} {os.environ['CUDA_VISIBLE_DEVICES']} {os.getpid()}"
            yield request, Completion(text, settings.max_new_tokens, "stop")


class FailingEngine(FakeEngine):
    """Fails on the third request."""

    def generate(self, requests, settings):
        yield from EchoEngine().generate(requests[:2], settings)
        raise ArithmeticError("out of luck")


class DyingEngine(FakeEngine):
    """Its process ends without a word, as when the kernel kills it for memory."""

    def generate(self, requests, settings):
        yield from EchoEngine().generate(requests[:2], settings)
        os._exit(1)


class SleepingEngine(FakeEngine):
    """Computes for a minute, and has a process of its own, as vLLM has; says the ids of both."""

    def generate(self, requests, settings):
        child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,), daemon=True)
        child.start()
        yield requests[0], Completion(f"{os.getpid()} {child.pid}", 1, "stop")
        time.sleep(60)


def broken_engine():
    """An engine that cannot be built."""
    raise OSError("no such checkpoint")
