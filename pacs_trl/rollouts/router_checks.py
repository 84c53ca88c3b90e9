"""Checks of the loss of the routers in a mixture of experts: whether there is one, and whether it can be computed."""

import warnings

from peft import PeftModel
from transformers import MODEL_MAPPING, PreTrainedConfig, PreTrainedModel

from ..errors import UserError
from ..update.peft_models import without_peft
from .rollout_config import RolloutConfig


def check_router_loss(config: PreTrainedConfig, args: RolloutConfig) -> None:
    """Raise a `ValueError` for an explicit loss of the routers that the method lacks; warn if it would be the default
    of a mixture of experts."""
    config, weight = config.get_text_config(), args.router_aux_loss_coef
    weight = getattr(config, "router_aux_loss_coef", 0.0) if weight is None else weight
    if args.is_exact or not hasattr(config, "output_router_logits") or weight == 0:
        return
    without = (
        f"{type(args).__name__} trains a mixture of experts ({config.model_type!r}) without the loss of its routers"
    )
    if args.router_aux_loss_coef is not None:
        raise UserError(
            f"{without}, but has router_aux_loss_coef={weight}. Remove the key, or train with method grpo."
        )
    warnings.warn(f"{without}, whose coefficient in its configuration is {weight}.", stacklevel=2)


def trains_routers(config: PreTrainedConfig, args: RolloutConfig) -> bool:
    """Return whether the loss has that of the routers of a mixture of experts with this configuration, as TRL decides
    it when the model is loaded. Architectures that are not in transformers count as having none."""
    text_config, coefficient = config.get_text_config(), args.router_aux_loss_coef
    if coefficient is None:
        coefficient = getattr(text_config, "router_aux_loss_coef", 0.0)
    if not args.is_exact or coefficient == 0 or not hasattr(text_config, "output_router_logits"):
        return False
    backbone = MODEL_MAPPING.get(type(config), None)
    return "router_logits" in (getattr(backbone, "_can_record_outputs", None) or {})


def returns_router_logits(model: PreTrainedModel | PeftModel, args: RolloutConfig) -> bool:
    """Return whether a mixture of experts returns the logits of its routers, which their loss needs. If not, raise a
    `ValueError` for an explicit coefficient, and warn if that of the model is left out."""
    base = without_peft(model)
    if "router_logits" in (getattr(base.base_model, "_can_record_outputs", None) or {}):
        return True
    without = f"{type(base).__name__} does not return the logits of its routers, so there is no loss to weight"
    if args.router_aux_loss_coef is not None:
        raise UserError(f"{without} with router_aux_loss_coef={args.router_aux_loss_coef}. Remove the key.")
    warnings.warn(
        f"{without}, although its configuration has a coefficient. It is trained without; router_aux_loss_coef: 0.0 "
        "hides this warning.",
        stacklevel=2,
    )
    return False
