"""Checks of the model that a trainer receives, before it is loaded: its kind, and what of it is trained."""

from typing import Any

from peft import PeftConfig, PeftModel
from transformers import PreTrainedConfig, PreTrainedModel

from ..errors import UserError
from .attention_checks import check_attention
from .engine_copies import check_copy_in_engine_process
from .half_precision import warn_of_rounded_updates
from .optimizer_checks import check_optimizers, missing_optimizer
from .quantization_checks import check_quantization
from .rollout_config import RolloutConfig


def check_model_type(config: PreTrainedConfig) -> None:
    """Raise a `ValueError` for an encoder-decoder."""
    if config.is_encoder_decoder:
        raise UserError(f"{config.model_type!r} models are encoder-decoders. Use a causal language model.")


def check_model(model: str | PreTrainedModel | PeftModel, args: RolloutConfig, arguments: dict[str, Any]) -> None:
    """Raise a `ValueError` if nothing would be trained, `optimizers` does not fit the trained weights, or the model is
    split over processes or could not be copied, rounded, or computed as the settings require. `arguments` are the
    trainer's others."""
    check_whole(model)
    check_trainable(model, arguments["peft_config"])
    check_optimizers(model, arguments["peft_config"], arguments["optimizers"])
    if arguments["optimizers"][0] is None and (missing := missing_optimizer(args)):
        raise UserError(missing)
    check_quantization(model, args, arguments["quantization_config"])
    warn_of_rounded_updates(model, args, arguments["peft_config"])
    if isinstance(model, str):
        check_attention(model, args)
    if args.has_engine_process and not isinstance(model, str):
        check_copy_in_engine_process(model)


def check_whole(model: str | PreTrainedModel | PeftModel) -> None:
    """Raise a `ValueError` if a loaded model is split over several processes."""
    if not isinstance(model, str) and model.tp_size not in (None, 1):
        raise UserError(
            f"The model is split over {model.tp_size} processes (tp_plan), each of which must generate and train "
            "completions of its own. Load it without tp_plan; FSDP2 and DeepSpeed shard weights."
        )


def check_trainable(model: str | PreTrainedModel | PeftModel, peft_config: PeftConfig | None) -> None:
    """Raise a `ValueError` if no weight is trained."""
    if peft_config is not None:
        if peft_config.inference_mode:
            raise UserError(
                "peft_config has inference_mode=True, which freezes the adapter, so nothing would be trained. Set it "
                "to False."
            )
        return
    if isinstance(model, str):
        return
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(
            "All weights of the model are frozen (requires_grad=False), so nothing would be trained. Load an adapter "
            "with `PeftModel.from_pretrained(..., is_trainable=True)`, enable one with `enable_adapter_layers()`, "
            "call `requires_grad_()` after merging one, or pass a peft_config."
        )
