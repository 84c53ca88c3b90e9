"""Snapshot reference: a copy of the trained weights, swapped into the policy to compute reference log-probs.

No second model is created. The snapshot holds only the trainable parameters (with LoRA: the adapter), and only this
process's shard of them (with FSDP2 and ZeRO-3). Weights are swapped in and out one parameter at a time.
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


class SnapshotReference:
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
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._device = torch.device("cpu") if offload else None
        self._copies = [self._copy(p) for p in self._parameters]

    def _copy(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        shard = local_shard(parameter)
        if self._device is None or shard.device == self._device:
            return shard.clone()
        return shard.to(self._device).pin_memory()

    @torch.no_grad()
    def _exchange(self) -> None:
        # ZeRO-3 keeps small parameters gathered; partition them first, or the gathered copies would not change.
        gathered = [p for p in self._parameters if is_zero_3(p) and p.ds_status.name == "AVAILABLE"]
        if gathered:
            gathered[0].partition(gathered)
        for parameter, copy in zip(self._parameters, self._copies, strict=True):
            shard = local_shard(parameter)
            policy = shard.clone()
            shard.copy_(copy)
            copy.copy_(policy)
        if gathered:
            gathered[0].all_gather(gathered)
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
        for parameter, copy in zip(self._parameters, self._copies, strict=True):
            copy.copy_(local_shard(parameter))

    def state_dict(self) -> list[torch.Tensor]:
        """Return this process's shards of the copies, in the order of the model's trainable parameters."""
        return self._copies

    def sharded_state(self) -> dict[str, DTensor] | None:
        """Return the copies as distributed tensors that share their memory, by index, for
        `torch.distributed.checkpoint`; `None` unless FSDP2 shards the parameters."""
        parameters = [parameter for parameter in self._parameters if isinstance(parameter, DTensor)]
        if not parameters:
            return None
        return {
            str(i): DTensor.from_local(
                copy,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
            for i, (parameter, copy) in enumerate(zip(parameters, self._copies, strict=True))
        }

    def load_state_dict(self, copies: list[torch.Tensor]) -> None:
        """Load the copies of [`state_dict`]. Raises a `ValueError` if their shapes do not match the model's trainable
        parameters on this process."""
        if [copy.shape for copy in copies] != [copy.shape for copy in self._copies]:  # `copy_` would broadcast
            raise UserError(
                f"The {len(copies)} weights in the snapshot of the checkpoint do not fit the {len(self._copies)} that "
                "are trained. Resume with the model, adapter, and number of processes the checkpoint was written with."
            )
        for copy, saved in zip(self._copies, copies, strict=True):
            copy.copy_(saved)
