"""The weights that vLLM gets, one layer at a time, and a check that an engine computes with them."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from peft import PeftModel, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME

from ..errors import FailedRun
from ..update.forward_pass import ForwardPass
from ..update.generation import undisturbed
from ..update.startup_check import HALF_PRECISION_TOLERANCE, model_head_outputs, tolerance_of


FIXED_TEXT = "The sum of 12 and 30 is 42. Their product is 360, so the difference of the two results is 318."
MAX_FIXED_TOKENS = 32


def merged_parameters(
    base: nn.Module, device: torch.device, gather: Callable[[list[nn.Parameter]], AbstractContextManager]
) -> Iterator[tuple[str, torch.Tensor]]:
    """
    Iterate over the weights of a model with its active adapter merged into them. Each is whole and valid until the
    next one; tied weights come once. The weights of the model do not change: adapters are merged into copies, because
    adding and subtracting an adapter in half precision leaves other weights behind. All processes must iterate.

    Args:
        base: The model without its PEFT wrapper ([`~peft.PeftModel.get_base_model`]), whose layers have adapters.
        device (`torch.device`): Device on which FSDP2 gathers shards.
        gather (`Callable`): Returns a context in which parameters are whole that ZeRO-3 has sharded.
    """
    sent: set[int] = set()
    for prefix, module in _layers(base):
        has_adapter = isinstance(module, BaseTunerLayer)
        names = [name for name, p in module.named_parameters(recurse=has_adapter) if id(p) not in sent]
        sent.update(id(p) for p in module.parameters(recurse=has_adapter))
        with _whole_and_merged(module, device, gather):
            for name in names:
                parameter = module.get_parameter(name)
                if not has_adapter:
                    yield prefix + name, parameter.data
                elif name.startswith("base_layer."):
                    yield prefix + name.replace("base_layer.", ""), parameter.data


def _layers(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Return the modules with parameters of their own under the names that they have in a model without adapter; a
    module with an adapter is one layer. Of weights that PEFT trains in a copy, return the copy."""
    yield prefix, module
    if isinstance(module, BaseTunerLayer):
        return
    for name, child in module.named_children():
        if isinstance(child, ModulesToSaveWrapper):
            copies = [child.modules_to_save[adapter] for adapter in child.active_adapters]
            child = copies[0] if copies else child.original_module
        elif isinstance(child, TrainableTokensWrapper):
            child = child.token_adapter
        yield from _layers(child, f"{prefix}{name}.")


@contextmanager
def _whole_and_merged(module: nn.Module, device: torch.device, gather: Callable) -> Iterator[None]:
    """Replace the parameters of a layer by whole ones inside the context, with its adapter merged into a copy."""
    owners = list(module.modules()) if isinstance(module, BaseTunerLayer) else [module]
    layers = [owner for owner in owners if isinstance(owner, BaseTunerLayer)]
    parameters = [(owner, name, p) for owner in owners for name, p in owner._parameters.items() if p is not None]
    with gather([parameter for _, _, parameter in parameters]):
        try:
            for owner, name, parameter in parameters:
                owner._parameters[name] = nn.Parameter(_whole(parameter, device), requires_grad=False)
            for layer in layers:
                layer.merge(safe_merge=True)
            yield
        finally:
            for layer in layers:
                layer.merged_adapters.clear()
            for owner, name, parameter in parameters:
                owner._parameters[name] = parameter


def whole_adapter(
    model: PeftModel,
    device: torch.device,
    gather: Callable[[list[nn.Parameter]], AbstractContextManager] = lambda parameters: nullcontext(),
) -> dict[str, torch.Tensor]:
    """Return copies of the weights of the active adapter, by the names in its file. `device` and `gather` are those of
    [`merged_parameters`]; with sharded weights all processes must call this."""
    parameters = [parameter for name, parameter in model.named_parameters() if model.prefix in name]
    with gather(parameters):
        weights = get_peft_model_state_dict(model, adapter_name=model.active_adapter, save_embedding_layers=False)
        return {name: _whole(weight, device).clone() for name, weight in weights.items()}


def save_adapter(weights: dict[str, torch.Tensor], model: PeftModel, folder: Path) -> None:
    """Write the adapter of a model, whose weights are those of [`whole_adapter`], as vLLM reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / ADAPTER_SAFE_WEIGHTS_NAME)
    model.active_peft_config.save_pretrained(str(folder))


def _whole(parameter: torch.Tensor, device: torch.device) -> torch.Tensor:
    data = parameter.detach()
    if not isinstance(data, DTensor):
        return data
    on_device = data.to(device)
    assert isinstance(on_device, DTensor)
    return on_device.full_tensor()


class SharedIterator(Iterator[tuple[str, torch.Tensor]]):
    """An iterator that threads share. TRL's transfer by NCCL reads weights in a thread, which it abandons after an
    error; the main thread then reads the rest, because gathering each of them is an operation of all processes."""

    def __init__(self, weights: Iterator[tuple[str, torch.Tensor]]):
        self._weights, self._lock = weights, threading.Lock()

    def __next__(self) -> tuple[str, torch.Tensor]:
        with self._lock:
            return next(self._weights)


class WrongWeights(FailedRun):
    """An engine did not get the trained weights, or does not generate with them. Raised on all processes in the middle
    of an optimizer step; [`~engine_failures.stop_without_engine`] saves the state after the last one."""


class LogpComparison:
    """
    Comparison of the log-probs that an engine and the trainer give to a fixed text, at temperature 1.

    Args:
        forward_pass ([`ForwardPass`]): Of the trainer's model, at temperature 1.
        prompt_ids (sequence of `int`): The text.

    Attributes:
        seen (`list[tuple[torch.Tensor, torch.Tensor]]`): Earlier log-probs of engine and trainer, float32 `(P - 1,)`:
            those from which rounding is measured, and those when the engine's last changed.
    """

    def __init__(self, forward_pass: ForwardPass, prompt_ids: Sequence[int]):
        self.forward_pass, self.prompt_ids = forward_pass, list(prompt_ids)
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def trainer_logps(self, model: nn.Module) -> torch.Tensor:
        ids = self.prompt_ids
        with undisturbed(model, self.forward_pass.device):
            model.eval()
            return model_head_outputs(self.forward_pass, model, ids[:1], ids[1:], values=False).cpu()

    def difference(
        self, model: nn.Module, engine_logps: torch.Tensor, trainer_logps: torch.Tensor, tolerance: float = 0.0
    ) -> tuple[float, float] | None:
        """Return `None` if the engine may have the weights of `model`, whose log-probs are `trainer_logps`. Otherwise
        return the mean absolute difference per token in nats, now and in the first of `seen`. An engine with lost or
        outdated weights repeats earlier log-probs bit by bit, or is off by more than rounding and `tolerance`."""
        (engine_first, trainer_first), (engine_last, _) = self.seen
        mismatch = distance(engine_first, trainer_first)
        effect = distance(trainer_logps, trainer_first)  # of what was learned
        off = distance(engine_logps, trainer_logps)
        noise = max(4 * mismatch, tolerance_of(self.forward_pass, model) / 4)
        repeats = any(
            torch.equal(engine_logps, engine_before) and distance(trainer_logps, trainer_before) > noise
            for engine_before, trainer_before in self.seen
        )
        if not torch.equal(engine_logps, engine_last):
            self.seen[1] = engine_logps, trainer_logps
        agrees = mismatch <= HALF_PRECISION_TOLERANCE and off <= max(noise * (1 + effect), tolerance) and not repeats
        return None if agrees else (off, mismatch)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().mean().item()


class WakeCheck(LogpComparison):
    """Check that a colocated engine that has woken up computes with the weights it was sent."""

    def run(self, llm: Any, model: nn.Module) -> None:
        """Compare the log-probs of `llm`, a [`SeededLLM`] that is awake, with those of `model`. Raises a
        [`WrongWeights`] on all processes, which must call this together, if one engine has others."""
        logps = llm.prompt_logps(self.prompt_ids), self.trainer_logps(model)
        self.seen = self.seen or [logps, logps]
        # Rounding may grow while a model learns, and a run that is right must not stop; lost weights are off by more.
        difference = self.difference(model, *logps, tolerance=HALF_PRECISION_TOLERANCE)
        differences = [pair for pair in gather_object([difference]) if pair is not None]
        if differences:
            off, mismatch = differences[0]
            raise WrongWeights(
                "vLLM does not generate with the trained weights after sleep mode: its log-probs of a fixed text "
                f"differ from the trainer's by {off:.2g} nats per token, and after the first start by {mismatch:.2g}. "
                "Set vllm_enable_sleep_mode: false and a smaller vllm_gpu_memory_utilization, and continue with "
                "`--resume_from_checkpoint last` (startup_check: false trains without this comparison)."
            )
