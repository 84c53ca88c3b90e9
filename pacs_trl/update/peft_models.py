"""Models under the adapters of peft."""

from peft import PeftModel
from transformers import PreTrainedModel


def without_peft(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """Return the model inside a PEFT wrapper, whose layers keep their adapters, or the model itself."""
    if not isinstance(model, PeftModel):
        return model
    base = model.get_base_model()
    assert isinstance(base, PreTrainedModel)
    return base


def reads_whole_rows(model: PreTrainedModel | PeftModel) -> bool:
    """Return whether an adapter reads more than the hidden states of a token, so that each row must hold one sequence:
    prompt learning puts virtual tokens in front of a row, activated LoRA starts at the last invocation tokens of a
    row, and Shadow runs a second model on it."""
    if not isinstance(model, PeftModel):
        return False
    return any(
        config.is_prompt_learning
        or getattr(config, "alora_invocation_tokens", None) is not None
        or config.peft_type == "SHADOW"
        for config in model.peft_config.values()
    )
