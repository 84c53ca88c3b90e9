"""Snapshot reference: a copy of the trained weights, swapped into the policy to compute reference log-probs.

No second model is created. The snapshot holds only the trainable parameters (with LoRA: the adapter), and only this
process's shard of them (with FSDP2 and ZeRO-3). Weights are swapped in and out one parameter at a time.
[`StoredWeights`] is its form in checkpoints, and that of the reference of the KL term, which is a second model.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Protocol, TypeGuard

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..errors import UserError


class ZeroParameter(Protocol):
    """What ZeRO-3 adds to a parameter, which it empties between uses."""

    ds_tensor: torch.Tensor  # the shard of this process
    ds_status: Enum  # AVAILABLE while the whole parameter is gathered

    def partition(self, parameters: Sequence["ZeroParameter"]) -> None:
        """Free the gathered parameters."""

    def all_gather(self, parameters: Sequence["ZeroParameter"]) -> None:
        """Gather the parameters from the shards of all processes."""


def is_zero_3(parameter: object) -> TypeGuard[ZeroParameter]:
    """Return whether ZeRO-3 shards a parameter."""
    return hasattr(parameter, "ds_tensor")


def local_shard(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return this process's shard of a parameter as a detached tensor that shares its memory."""
    if isinstance(parameter, DTensor):
        return parameter.to_local().detach()
    if is_zero_3(parameter):
        return parameter.ds_tensor.detach()
    return parameter.detach()


def is_sharded(model: torch.nn.Module) -> bool:
    """Return whether the trainable parameters are sharded over processes (FSDP2 or ZeRO-3)."""
    return any(isinstance(module, FSDPModule) for module in model.modules()) or any(
        is_zero_3(p) for p in model.parameters() if p.requires_grad
    )


def reshard(model: torch.nn.Module) -> None:
    """Free the gathered parameters that FSDP2 may keep after a forward pass."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def only_shards(parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """Free the parameters that ZeRO-3 keeps gathered inside the context, in which shards may change, and gather them
    again on exit."""
    gathered = [p for p in parameters if is_zero_3(p) and p.ds_status.name == "AVAILABLE"]
    if gathered:
        gathered[0].partition(gathered)
    yield
    if gathered:
        gathered[0].all_gather(gathered)


class StoredWeights:
    """
    Weights that checkpoints contain besides those of the policy.

    Args:
        parameters (sequence of `torch.nn.Parameter`): Parameters that are sharded as the weights are.
        shards (sequence of `torch.Tensor`): This process's shards of the weights, one per parameter.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], shards: Sequence[torch.Tensor]):
        self._parameters, self._shards = list(parameters), list(shards)

    def state_dict(self) -> list[torch.Tensor]:
        """Return this process's shards of the weights, in the order of the parameters."""
        return self._shards

    def sharded_state(self) -> dict[str, DTensor] | None:
        """Return the weights as distributed tensors that share their memory, by index, for
        `torch.distributed.checkpoint`; `None` unless FSDP2 shards the parameters."""
        parameters = [parameter for parameter in self._parameters if isinstance(parameter, DTensor)]
        if not parameters:
            return None
        return {
            str(i): DTensor.from_local(
                shard,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
            for i, (parameter, shard) in enumerate(zip(parameters, self._shards, strict=True))
        }

    def load_state_dict(self, saved: list[torch.Tensor]) -> None:
        """Load the shards of [`state_dict`] into those in memory. Raises a `ValueError` if their shapes differ."""
        if [shard.shape for shard in saved] != [shard.shape for shard in self._shards]:  # `copy_` would broadcast
            raise UserError(
                f"The {len(saved)} weights of the reference in the checkpoint do not fit the {len(self._shards)} of "
                "this run. Resume with the model, adapter, and number of processes the checkpoint was written with."
            )
        for shard, saved_shard in zip(self._shards, saved, strict=True):
            shard.copy_(saved_shard)


@contextmanager
def weights_of(model: torch.nn.Module) -> Iterator[StoredWeights]:
    """Yield all weights of a model that is not trained; those that are loaded inside the context become its own."""
    reshard(model)
    parameters = list(model.parameters())
    with only_shards(parameters):
        yield StoredWeights(parameters, [local_shard(parameter) for parameter in parameters])


class SnapshotReference(StoredWeights):
    """
    A copy of a model's trainable parameters that can be swapped in temporarily.

    Args:
        model (`torch.nn.Module`): The model, after it is wrapped for distributed training.
        offload (`bool`): Whether to keep the copy in CPU memory. The device then holds at most one parameter twice,
            during the swap.
    """

    def __init__(self, model: torch.nn.Module, offload: bool = False):
        reshard(model)  # otherwise `parameters()` may list gathered copies that are freed later
        self._model = model
        self._device = torch.device("cpu") if offload else None
        parameters = [p for p in model.parameters() if p.requires_grad]
        super().__init__(parameters, [self._copy(p) for p in parameters])

    def _copy(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        shard = local_shard(parameter)
        if self._device is None or shard.device == self._device:
            return shard.clone()
        return shard.to(self._device).pin_memory()

    @torch.no_grad()
    def _exchange(self) -> None:
        # ZeRO-3 keeps small parameters gathered; partition them first, or the gathered copies would not change.
        with only_shards(self._parameters):
            for parameter, copy in zip(self._parameters, self._shards, strict=True):
                shard = local_shard(parameter)
                policy = shard.clone()
                shard.copy_(copy)
                copy.copy_(policy)
        reshard(self._model)  # FSDP2's gathered copies are stale now

    @contextmanager
    def in_place_of_policy(self) -> Iterator[None]:
        """Swap the snapshot into the model inside the context; restore the policy bitwise, also after an exception."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def renew(self) -> None:
        """Copy the current policy into the snapshot."""
        for parameter, copy in zip(self._parameters, self._shards, strict=True):
            copy.copy_(local_shard(parameter))
