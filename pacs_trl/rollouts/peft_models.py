"""Models under the adapters of peft."""

from peft import PeftModel
from transformers import PreTrainedModel


def base_model(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """Return a model without its PEFT wrapper; its layers keep their adapters."""
    if not isinstance(model, PeftModel):
        return model
    base = model.get_base_model()
    assert isinstance(base, PreTrainedModel)
    return base
