"""Check that the engine process of late rollouts, which builds the model anew, builds the same one."""

import inspect
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel

from ..errors import UserError
from ..update.peft_models import without_peft


_MOST_NAMED = 3  # changes of a model that an error names


def check_copy_in_engine_process(model: PreTrainedModel | PeftModel) -> None:
    """Raise a `ValueError` if the engine process, which builds a model from its class and configuration and loads the
    weights, would build another one than `model`."""
    if changes := changes_in_place(model):
        raise UserError(
            "rollout_lag, or rollout_schedule: continuous: the engine process builds the model from its class and "
            "configuration, and would lack changes that were made to the given one: "
            f"{'; '.join(changes[:_MOST_NAMED])}. Undo them, or remove the key."
        )


def changes_in_place(model: PreTrainedModel | PeftModel) -> list[str]:
    """Return what differs between a model and one that is built from its class and configuration, except the values
    of weights. Attributes of modules are compared if they are numbers with a fraction."""
    base = without_peft(model)
    if type(base).__module__ == "__main__":
        return [f"its class {type(base).__name__} is defined in the main module"]
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        rebuilt: nn.Module = type(base)(base.config)
        if isinstance(model, PeftModel):
            if len(model.active_adapters) > 1:
                return [f"several active adapters ({', '.join(model.active_adapters)})"]
            rebuilt = _with_same_adapter(rebuilt, model)
    other_adapters = set(model.peft_config) - {model.active_adapter} if isinstance(model, PeftModel) else set()
    expected = dict(rebuilt.named_modules())
    changes = []
    for name, module in model.named_modules():
        if not other_adapters.isdisjoint(name.split(".")):
            continue
        label = name or type(module).__name__
        counterpart = expected.get(name)
        if counterpart is None or type(module) is not type(counterpart):
            changes.append(f"{label} is a {type(module).__name__}")
            continue
        changes += [f"{label}.{change}" for change in _changes_of_module(module, counterpart)]
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for name, parameter in rebuilt.named_parameters():
        if name not in shapes:
            changes.append(f"{name} is shared or absent")
        elif shapes[name] != tuple(parameter.shape):
            changes.append(f"{name} has the shape {shapes[name]}")
    return changes


def _with_same_adapter(base: nn.Module, model: PeftModel) -> PeftModel:
    """Return a rebuilt base model with the active adapter of `model`, not initialized."""
    settings = model.active_peft_config.to_dict()
    if isinstance(model.active_peft_config, LoraConfig):
        settings["init_lora_weights"] = False
    return get_peft_model(base, type(model.active_peft_config)(**settings), adapter_name=model.active_adapter)


def _changes_of_module(module: nn.Module, expected: nn.Module) -> list[str]:
    changes = []
    forward = vars(module).get("forward")
    if forward is not None and not is_wrapper_of_own_forward(module, forward):
        changes.append("forward is replaced")
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    # transformers adds this one to train adapters with gradient checkpointing.
    hooks = [hook for hook in hooks if getattr(hook, "__name__", "") != "make_inputs_require_grads"]
    if len(hooks) > len(expected._forward_hooks) + len(expected._forward_pre_hooks):
        changes.append("forward has a hook")
    if isinstance(module, BaseTunerLayer) and module.merged:
        changes.append("adapter is merged")
    if not isinstance(module, nn.Dropout):
        for key, value in vars(expected).items():
            if isinstance(value, float) and vars(module).get(key) != value:
                changes.append(f"{key} is {vars(module).get(key)}")
    return changes


def is_wrapper_of_own_forward(module: nn.Module, forward: Any) -> bool:
    """Return whether `forward` wraps the forward method of the module's class, as those that trainers and accelerate
    set on the models they train do."""
    return inspect.unwrap(forward) is inspect.unwrap(type(module).forward)
