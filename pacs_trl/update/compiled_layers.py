"""Decoder layers compiled by `torch.compile` with dynamic shapes, for the passes of an update.

Compiled and eager layers differ by rounding, about 3e-3 nats a token in bfloat16, and so may two graphs of a layer.
Equal weights must give equal log-probs, whether they are computed with a gradient or without, in training or in an
evaluation, by the policy, its snapshot, or a reference. So all passes run the same graph of a layer:

- Gradients are enabled inside a layer. Where they are disabled around it, its output is detached, and what the layer
  has stored for a backward pass is freed.
- Its input has a gradient also where the embeddings are frozen.
- Its modules are in training mode, unless they have dropout.

Only the forward method of a layer is compiled, and only inside the context [`CompiledLayers.enabled`]. Generation,
copies, and checkpoints see the model as it is; hooks of FSDP2 and gradient checkpointing run outside of the graph.
accelerate's `use_regional_compilation` compiles the calls of a layer for good, and with them hooks and generation.
"""

import inspect
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..errors import UserError


BACKEND = "inductor"

# Graphs of a function before dynamo runs it eagerly, by default 8. Layers of several types share a function.
_RECOMPILE_LIMIT = 64


class NotTraced(RuntimeError):
    """Layers of which too many graphs are made."""


class CompiledLayers:
    """
    The decoder layers of a model, with a compiled forward method inside a context.

    Args:
        model ([`~transformers.PreTrainedModel`]): The model without PEFT, and not wrapped for distributed training.
    """

    def __init__(self, model: PreTrainedModel):
        self.layers = decoder_layers(model)
        self._modules = {layer: [vars(module) for module in layer.modules()] for layer in self.layers}
        self._has_noise = any(map(_has_noise, self.layers))
        self._most_graphs: int | None = None  # while layers are tried out

    @contextmanager
    def enabled(self) -> Iterator[None]:
        """Run compiled layers inside the context. The context must include the backward pass, because gradient
        checkpointing repeats the forward pass there. It may be nested."""
        is_enabled = any("forward" in vars(layer) for layer in self.layers)
        if is_enabled or torch.is_inference_mode_enabled():  # inference tensors can have no gradient
            yield
            return
        for layer in self.layers:
            layer.forward = partial(self._forward, layer)
        try:
            yield
        finally:
            for layer in self.layers:
                del layer.forward

    @contextmanager
    def tried_out(self, most_graphs: int) -> Iterator[None]:
        """Run the backward pass of each layer after its forward pass inside the context, so that it is compiled, too.
        No gradient is accumulated. A layer after which there are more than `most_graphs` new graphs raises a
        [`NotTraced`]."""
        self._most_graphs = num_graphs() + most_graphs
        try:
            yield
        finally:
            self._most_graphs = None

    def _forward(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        has_gradient = torch.is_grad_enabled()
        with torch.enable_grad(), self._in_training_mode(layer):
            states, *others = args if args else (kwargs.pop("hidden_states"),)
            if not states.requires_grad:
                states = states.detach().requires_grad_()
            outputs = _compiled(type(layer).forward, BACKEND)(layer, states, *others, **kwargs)
            if self._most_graphs is not None:
                _try_out(states, pytree.tree_leaves(outputs)[0], self._most_graphs)
        return outputs if has_gradient else pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, outputs)

    @contextmanager
    def _in_training_mode(self, layer: nn.Module) -> Iterator[None]:
        if layer.training or self._has_noise:
            yield
            return
        try:
            for module in self._modules[layer]:
                module["training"] = True
            yield
        finally:
            for module in self._modules[layer]:
                module["training"] = False


def _try_out(states: torch.Tensor, output: torch.Tensor, most_graphs: int) -> None:
    torch.autograd.grad(output, states, torch.zeros_like(output))
    if num_graphs() > most_graphs:
        raise NotTraced("they do not trace: a few passes make too many graphs")


@cache
def _compiled(forward: Callable, backend: str) -> Callable:
    """Return the compiled forward method of a class of layers."""
    limit: dict[str, Any] = {}
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        limit = {"recompile_limit": _RECOMPILE_LIMIT}
    else:
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _RECOMPILE_LIMIT)
    return torch.compile(forward, dynamic=True, backend=backend, **limit)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder layers of a model, without those that read images. Raises a `ValueError` if it has none of
    transformers' kind, or if their forward methods are replaced."""
    layers: list[nn.Module] = []
    for part in (model.get_decoder(), model):  # "decoder" may also be the name of a head
        layers = layers or [module for module in part.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UserError("its decoder layers are not of transformers' class GradientCheckpointingLayer")
    if any("forward" in vars(layer) for layer in layers):
        raise UserError("the forward methods of its decoder layers are replaced, as by a device_map of several GPUs")
    return layers


def _has_noise(layer: nn.Module) -> bool:
    return any(
        isinstance(value, float)
        and value != 0
        and (isinstance(module, nn.Dropout) or "drop" in name or "jitter" in name)
        for module in layer.modules()
        for name, value in vars(module).items()
    )


def num_graphs() -> int:
    """Return the number of graphs that dynamo has made in this process."""
    return counters["stats"]["unique_graphs"]


def missing_compiler(device: torch.device) -> str | None:
    """Return what Inductor needs to compile for a device and this machine does not have; `None` if nothing is
    missing."""
    if BACKEND != "inductor":
        return None
    if not torch._dynamo.is_dynamo_supported():
        return "a Python version that torch.compile supports"
    if device.type == "cpu":
        names = [os.environ.get("CXX", "g++"), "g++", "clang++"]
    else:
        if not torch.utils._triton.has_triton_package():
            return "Triton (pip install triton)"
        names = [os.environ.get("CC", "gcc"), "gcc", "clang"]
    return None if any(map(shutil.which, names)) else f"a C++ compiler ({names[1]})"
