"""Checks of the optimizer and the scheduler that a trainer receives."""

import logging
from typing import Any

from peft import PeftConfig, PeftModel
from torch import nn
from transformers import PreTrainedModel, TrainingArguments
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

from ..errors import UserError


logger = logging.getLogger(__name__)
_MOST_NAMED = 3  # weights that a warning names


def missing_optimizer(args: TrainingArguments) -> str | None:
    """Return that the optimizer of the settings needs a package that is not installed, and what to do; `None` if it
    needs none."""
    name = getattr(args.optim, "value", args.optim)
    if name in ("adamw_torch", "adamw_torch_fused"):
        return None
    from transformers import Trainer  # takes a second, which `plan` does not need otherwise

    try:
        Trainer.get_optimizer_cls_and_kwargs(args)
    except ImportError as error:
        return f"optim: {name} needs a package that is not installed here ({error}). Install it, or set another optim."
    except ValueError:  # of those that need the model
        return None
    return None


def check_optimizers(
    model: str | PreTrainedModel | PeftModel, peft_config: PeftConfig | None, optimizers: tuple[Any, Any]
) -> None:
    """Raise a `ValueError` if the optimizer has none of the trained weights or steps inside the backward pass, or if
    the scheduler belongs to another optimizer. Log a warning if the optimizer lacks some of them."""
    optimizer, scheduler = optimizers
    if not isinstance(model, str):
        check_backward_hooks(model)
    if scheduler is not None and getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise UserError(
            "optimizers: the scheduler belongs to another optimizer than the one that trains, so the learning rate "
            "would not change. Pass both, as `optimizers=(optimizer, scheduler)`."
        )
    groups = getattr(optimizer, "param_groups", None)  # DeepSpeed's placeholder has none
    if groups is None:
        return
    if isinstance(optimizer, LayerWiseDummyOptimizer) or type(optimizer).__module__.startswith("lomo_optim"):
        raise UserError(f"optimizers: {_steps_in_backward(type(optimizer).__name__)}")
    if isinstance(model, str) or peft_config is not None:
        added_by = "peft_config adds" if peft_config is not None else "the trainer loads"
        raise UserError(
            f"optimizers: {added_by} the weights that are trained later, so the optimizer cannot have them. Pass the "
            "model with its adapter, and an optimizer of its weights; or remove optimizers."
        )
    held = {id(parameter) for group in groups for parameter in group["params"]}
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    missing = [name for name, parameter in trained.items() if id(parameter) not in held]
    if len(missing) == len(trained):
        raise UserError(
            "optimizers: the optimizer has none of the weights that the model trains, perhaps those of another copy. "
            "Create it from `model.parameters()` of the model that is passed."
        )
    if missing:
        logger.warning(
            f"optimizers: {len(missing)} of {len(trained)} trained weights are not in the optimizer, so they stay as "
            f"they are: {', '.join(missing[:_MOST_NAMED])}, ..."
        )


def check_backward_hooks(model: nn.Module) -> None:
    """Raise a `ValueError` if gradients are used inside the backward pass."""
    for name, parameter in model.named_parameters():
        if parameter._post_accumulate_grad_hooks:
            hook = next(iter(parameter._post_accumulate_grad_hooks.values()))
            hook_name = getattr(hook, "__qualname__", type(hook).__name__)
            raise UserError(f"The weight {name} has a hook. {_steps_in_backward(hook_name)}")


def _steps_in_backward(name: str) -> str:
    return (
        f"{name} uses gradients inside the backward pass, before those of all micro-batches of an optimizer step are "
        "added. Use an optimizer that steps afterwards."
    )
