"""Checks of LoRA adapters: their target modules, and whether vLLM can get them."""

from typing import Any

from peft import LoraConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper, TrainableTokensWrapper
from torch import nn
from transformers import PreTrainedModel

from ..errors import UserError
from ..update.peft_models import without_peft
from .rollout_config import RolloutConfig


def max_lora_rank(args: RolloutConfig, model: Any, peft_config: Any) -> int | None:
    """Return the `max_lora_rank` of vLLM that `vllm_sync_adapter` needs, or `None` without it. Raises a `ValueError`
    if there is no plain LoRA adapter to send. Adapters that vLLM cannot serve fail at the first weight transfer."""
    if not args.vllm_sync_adapter:
        return None
    config = peft_config or getattr(model, "active_peft_config", None)
    if type(config) is not LoraConfig or args.vllm_enable_sleep_mode:
        what = "all weights" if config is None else type(config).__name__
        raise UserError(
            f"vllm_sync_adapter: true needs an engine that keeps the base model, and plain LoRA; this run has "
            f"vllm_enable_sleep_mode: {str(args.vllm_enable_sleep_mode).lower()} and trains {what}. Use LoRA without "
            "sleep mode, or remove the key to send all weights."
        )
    return max(8, 1 << (config.r - 1).bit_length())  # the values of vLLM's setting


def check_lora_targets(model: Any) -> None:
    """Raise a `ValueError` if a target module of a loaded model's adapter matches no module. peft raises an error only
    if none of them matches."""
    for config in getattr(model, "peft_config", {}).values():
        targets = vars(config).get("target_modules")  # prompt tuning has none
        targets = targets if isinstance(targets, set | list) else ()
        names = getattr(model.base_model, "targeted_module_names", [])
        if names and (missing := [t for t in targets if not any(f".{name}".endswith(f".{t}") for name in names)]):
            where = "model" if model.config.get_text_config() is model.config else "trained part of the model"
            raise UserError(
                f"LoRA's target_modules (in a recipe: lora_target_modules) has {', '.join(sorted(missing))}, and the "
                f"{where} has no such module. Correct the name, or use all-linear."
            )


def check_adapter_of_tied_weights(model: PreTrainedModel | PeftModel) -> None:
    """Raise a `ValueError` if an adapter changes only the embeddings or only the head of a model in which they share
    their weights: vLLM gets one merged weight for both."""
    if not isinstance(model, PeftModel):
        return
    base = without_peft(model)
    embeddings, head = base.get_input_embeddings(), base.get_output_embeddings()
    if head is None or _original(embeddings).weight is not _original(head).weight:
        return
    adapted = [layer for layer in (embeddings, head) if isinstance(layer, BaseTunerLayer)]
    saved = [layer for layer in (embeddings, head) if isinstance(layer, ModulesToSaveWrapper)]
    if adapted or (saved and embeddings.weight is not head.weight):
        raise UserError(
            "The adapter has its own weights for the embeddings or the head, which share theirs "
            "(tie_word_embeddings), and vLLM would use one merged weight for both. Remove embed_tokens and lm_head "
            "from target_modules and modules_to_save, or set vllm_sync_adapter: true."
        )


def _original(layer: nn.Module) -> nn.Module:
    """Return the layer without adapters."""
    if isinstance(layer, BaseTunerLayer):
        return layer.get_base_layer()
    if isinstance(layer, TrainableTokensWrapper):
        return layer.token_adapter.get_base_layer()
    return layer.original_module if isinstance(layer, AuxiliaryTrainingWrapper) else layer
