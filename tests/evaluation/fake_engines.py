"""Engines without a model, for the processes of replicated ones: importing them does not import torch."""

import os
import time

from pacs_trl.evaluation.requests import Completion


class EchoEngine:
    """Repeats the seed, says which process and which devices it is."""

    def generate(self, requests, settings):
        for request in requests:
            text = f"{request.seed} {os.environ['CUDA_VISIBLE_DEVICES']} {os.getpid()}"
            yield request, Completion(text, settings.max_new_tokens, "stop")


class FailingEngine:
    """Fails on the third request."""

    def generate(self, requests, settings):
        yield from EchoEngine().generate(requests[:2], settings)
        raise ArithmeticError("out of luck")


class DyingEngine:
    """Its process ends without a word, as when the kernel kills it for memory."""

    def generate(self, requests, settings):
        yield from EchoEngine().generate(requests[:2], settings)
        os._exit(1)


class SleepingEngine:
    """Computes for a minute."""

    def generate(self, requests, settings):
        yield from EchoEngine().generate(requests[:1], settings)
        time.sleep(60)


def broken_engine():
    """An engine that cannot be built."""
    raise OSError("no such checkpoint")
