"""The snapshot reference: a copy of the trained weights that replaces the policy while reference log-probs are
computed.

There is no second model. The snapshot holds only the parameters that are trained (for LoRA: the adapter) and only this
process's shard of them (for FSDP2 and ZeRO-3). Policy and snapshot trade places parameter by parameter, and back.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def _local_shard(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The part of a parameter that this process stores, as a tensor that shares its memory."""
    if isinstance(parameter, DTensor):
        return parameter.to_local().detach()
    if hasattr(parameter, "ds_tensor"):  # ZeRO-3 empties the parameter itself between uses
        return parameter.ds_tensor.detach()
    return parameter.detach()


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether processes hold different parts of the trained parameters."""
    return any(isinstance(module, FSDPModule) for module in model.modules()) or any(
        hasattr(p, "ds_tensor") for p in model.parameters() if p.requires_grad
    )


def _reshard(model: torch.nn.Module) -> None:
    """Make FSDP2 let go of the gathered parameters that it may keep after a forward pass."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class SnapshotReference:
    """
    A copy of a model's trained parameters that can take their place for a while.

    Args:
        model (`torch.nn.Module`): The model, wrapped for distributed training if it is going to be.
        offload (`bool`): Keep the copy in CPU memory. At most one parameter is then held twice on the device, and only
            while it is exchanged.
    """

    def __init__(self, model: torch.nn.Module, offload: bool = False):
        _reshard(model)  # else `parameters()` may list gathered copies that are freed later
        self._model = model
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._device = torch.device("cpu") if offload else None
        self._copies = [self._copy(p) for p in self._parameters]

    def _copy(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        shard = _local_shard(parameter)
        if self._device is None or shard.device == self._device:
            return shard.clone()
        return shard.to(self._device).pin_memory()

    @torch.no_grad()
    def _exchange(self) -> None:
        # ZeRO-3 keeps small parameters gathered, and they would stay what they are.
        gathered = [p for p in self._parameters if hasattr(p, "ds_tensor") and p.ds_status.name == "AVAILABLE"]
        if gathered:
            gathered[0].partition(gathered)
        for parameter, copy in zip(self._parameters, self._copies, strict=True):
            shard = _local_shard(parameter)
            policy = shard.clone()
            shard.copy_(copy)
            copy.copy_(policy)
        if gathered:
            gathered[0].all_gather(gathered)
        _reshard(self._model)  # FSDP2's gathered copies are stale now

    @contextmanager
    def in_place_of_policy(self) -> Iterator[None]:
        """Inside the context the model is the reference. Restores the policy bit by bit, also after an exception."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def renew(self) -> None:
        """Make the current policy the reference."""
        for parameter, copy in zip(self._parameters, self._copies, strict=True):
            copy.copy_(_local_shard(parameter))

    def state_dict(self) -> list[torch.Tensor]:
        """Return the copies, this process's shards, in the order of the model's trained parameters."""
        return self._copies

    def load_state_dict(self, copies: list[torch.Tensor]) -> None:
        """Load copies; raises a `ValueError` if their shapes are not those of the model's parameters on this
        process."""
        expected, found = ([tuple(c.shape) for c in cs] for cs in (self._copies, copies))
        if expected != found:
            raise ValueError(
                f"The reference snapshot of the checkpoint has {len(found)} parameters and does not fit the model, "
                f"which trains {len(expected)} (shapes compared on this process). Resume with the model, adapter and "
                "number of processes the checkpoint was written with."
            )
        for own, saved in zip(self._copies, copies, strict=True):
            own.copy_(saved)
