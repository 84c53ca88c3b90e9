"""FSDP2 and ZeRO-3 in tests: their settings, how accelerate runs them on a CPU, and unsharded copies of tensors."""

from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor


FSDP_SETTINGS: dict[str, Any] = {
    "fsdp": True,
    "fsdp_config": {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"],
        "cpu_ram_efficient_loading": False,
        "state_dict_type": "SHARDED_STATE_DICT",
    },
}


# Environment of a process that accelerate is to shard, with the layers that the model names.
FSDP2_ENVIRONMENT = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}


def zero3_settings(persistence_threshold: int) -> dict[str, Any]:
    return {
        "use_cpu": False,  # accelerate would not use DeepSpeed
        "deepspeed": {
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": persistence_threshold},
            "zero_allow_untested_optimizer": True,
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
        },
    }


def let_accelerate_shard_on_cpu() -> None:
    """Let accelerate shard on a CPU with gloo; only its own check of the device is in the way."""
    construct = AcceleratorState.__init__

    def with_fsdp(self, *args, fsdp_plugin=None, **kwargs):
        construct(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        self.__dict__.setdefault("fsdp_plugin", fsdp_plugin)
        if self.__dict__["fsdp_plugin"] is not None:
            self.distributed_type = DistributedType.FSDP
            if self._mixed_precision != "no":
                self.__dict__["fsdp_plugin"].set_mixed_precision(self._mixed_precision)

    AcceleratorState.__init__ = with_fsdp


def let_accelerate_run_deepspeed_on_cpu() -> None:
    """Let accelerate start DeepSpeed on a CPU with gloo."""
    import deepspeed.ops

    PartialState._prepare_backend = lambda self, *args, **kwargs: ("gloo", DistributedType.MULTI_CPU)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled for minutes


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a parameter or gradient, gathered from all processes."""
    if hasattr(tensor, "ds_id"):
        from deepspeed.utils import safe_get_full_fp32_param

        return safe_get_full_fp32_param(tensor).clone()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()
