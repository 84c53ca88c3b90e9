"""Reference policy of the KL term: the model that a trainer receives, with the weights that it has in memory.

TRL loads the reference from the path that the model was once loaded from. The weights there are others if the model
was changed since: by training, a merged adapter, or new tokens.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peft import PeftConfig, PeftModel
from transformers import PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled
from trl.trainer import grpo_trainer

from ..errors import UserError
from .engine_copies import is_wrapper_of_own_forward
from .rollout_config import RolloutConfig


# Initializations of LoRA that subtract the adapter from the weights of the base model.
_CHANGE_BASE_WEIGHTS = ("pissa", "olora", "corda", "loftq", "lora_ga")


def check_reference(
    model: str | PreTrainedModel | PeftModel, args: RolloutConfig, peft_config: PeftConfig | None
) -> None:
    """Raise a `ValueError` if there is a KL term, and the model that the trainer receives cannot become its
    reference."""
    if args.beta == 0:
        return
    if peft_config is None and isinstance(model, PeftModel):
        peft_config = model.active_peft_config
    if peft_config is not None:
        initialization = str(getattr(peft_config, "init_lora_weights", None)).lower()
        if initialization.startswith(_CHANGE_BASE_WEIGHTS):
            raise UserError(
                f"init_lora_weights={initialization!r} changes the weights of the base model, which is the reference "
                f"of the KL term (beta={args.beta:g}). Use another initialization, or set beta to 0."
            )
        return
    if isinstance(model, str):
        return
    if is_deepspeed_zero3_enabled():
        raise UserError(
            f"beta={args.beta:g}: a model in memory whose weights ZeRO-3 has sharded cannot be copied as the "
            "reference of the KL term. Save it and pass the directory as `model`, or set beta to 0."
        )
    for name, module in model.named_modules():
        forward = vars(module).get("forward")
        function = getattr(forward, "__func__", forward)
        if getattr(function, "__closure__", None) and not is_wrapper_of_own_forward(module, forward):
            raise UserError(
                f"beta={args.beta:g}: {name or 'the model'} has a forward method of its own that a copy would share, "
                "so the copy could not be the reference of the KL term. Undo that change, or set beta to 0."
            )


@contextmanager
def reference_from_memory(
    model: str | PreTrainedModel | PeftModel, args: RolloutConfig, peft_config: PeftConfig | None
) -> Iterator[None]:
    """Give the trainer that TRL constructs inside a copy of `model` as reference, if it is a model in memory."""
    if args.beta == 0 or peft_config is not None or isinstance(model, str | PeftModel):
        yield
        return
    load = grpo_trainer.create_model_from_path
    grpo_trainer.create_model_from_path = lambda *args, **kwargs: copied_model(model)
    try:
        yield
    finally:
        grpo_trainer.create_model_from_path = load


def copied_model(model: PreTrainedModel) -> Any:
    """Return a copy of a model in evaluation mode. It has the forward method of its class if a trainer that has
    trained the model before wrapped it: the wrapper would call the model itself."""
    copied = copy.deepcopy(model)
    forward = vars(copied).get("forward")
    if forward is not None and is_wrapper_of_own_forward(copied, forward):
        del copied.forward
    return copied.eval()
