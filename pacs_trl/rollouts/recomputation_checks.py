"""Checks of reentrant recomputation, which loses gradients of what a layer passes on beside its output."""

from transformers import PreTrainedConfig

from ..errors import UserError
from .rollout_config import RolloutConfig


def is_reentrant(args: RolloutConfig) -> bool:
    """Return whether all layers are recomputed by reentrant passes."""
    kwargs = args.gradient_checkpointing_kwargs or {}
    return args.gradient_checkpointing is True and bool(kwargs.get("use_reentrant"))


def check_recomputation_of_routers(args: RolloutConfig) -> None:
    """Raise a `ValueError` if recomputation would cut the gradient of the loss of the routers."""
    if is_reentrant(args):
        raise UserError(
            "The loss of the routers in a mixture of experts has no gradient with use_reentrant: true in "
            "gradient_checkpointing_kwargs. Set use_reentrant: false, or router_aux_loss_coef: 0.0."
        )


def check_recomputation_of_shared_keys(config: PreTrainedConfig, args: RolloutConfig) -> None:
    """Raise a `ValueError` if recomputation would cut the gradient of keys and values that later layers read too, as
    in Gemma 3n and Gemma 4."""
    num_sharing_layers = getattr(config.get_text_config(), "num_kv_shared_layers", 0)
    if is_reentrant(args) and num_sharing_layers:
        raise UserError(
            f"In this {config.model_type!r} model {num_sharing_layers} layers read the keys and values of others, "
            "whose gradient is lost with use_reentrant: true in gradient_checkpointing_kwargs (TRL sets it for "
            "adapters with ZeRO-3). Set use_reentrant: false, or gradient_checkpointing: false."
        )
