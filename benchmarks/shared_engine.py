"""Shared vLLM engine for all trainers of a process, because starting one takes longer than a short training run."""

from collections.abc import Callable
from typing import Any

import torch
from trl.generation import vllm_generation


def share_engine(device: str, dtype: str, **settings: Any) -> None:
    """Let all trainers of this process share one engine of this dtype, with further `settings` of vLLM's `LLM`. Each
    trainer sends its weights before it generates."""
    engine_class = vllm_generation.LLM
    started: list[Any] = []
    settings |= {"dtype": dtype} | ({"enforce_eager": True} if device == "cpu" else {})

    def engine(**kwargs):
        if not started:
            started.append(engine_class(**(kwargs | settings)))
        return started[0]

    vllm_generation.LLM = engine
    if device == "cpu":
        keep_plain_products(setattr)


def keep_plain_products(patch: Callable) -> None:
    """
    Make a CPU engine use the weights that trainers send.

    vLLM's CPU backend repacks the weights of linear layers when it loads them, so it would ignore weights sent later.
    CUDA is not affected. `patch(owner, name, value)` is `setattr`, or `setattr` of pytest's monkeypatch.
    """
    from vllm.model_executor.layers import utils

    keep = {"cpu_linear": torch.nn.functional.linear}
    patch(utils, "dispatch_cpu_unquantized_gemm", lambda layer, remove_weight: layer.__dict__.update(keep))
