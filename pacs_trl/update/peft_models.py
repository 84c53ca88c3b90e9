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
