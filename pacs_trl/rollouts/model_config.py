"""Configuration and name of the model that a trainer receives, which may not be loaded yet."""

from peft import PeftModel
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from trl.trainer.utils import get_config_model_id

from .rollout_config import RolloutConfig


# A model, or its name or folder, as trainers take it.
Model = str | PreTrainedModel | PeftModel


def config_of(model: Model, args: RolloutConfig) -> PreTrainedConfig:
    """Return the config of a model, which may be the name of one that is not loaded yet."""
    kwargs = {"trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}
    return AutoConfig.from_pretrained(model, **kwargs) if isinstance(model, str) else model.config


def weights_dtype(model: Model, args: RolloutConfig) -> str:
    """Return the name of the dtype of a model's weights; TRL loads float32 by default, and `auto` is the dtype of the
    checkpoint."""
    if not isinstance(model, str):
        return str(model.dtype).removeprefix("torch.")
    loading = dict(args.model_init_kwargs or {})
    dtype = loading.pop("dtype", None)
    if dtype == "auto":
        dtype = AutoConfig.from_pretrained(model, trust_remote_code=args.trust_remote_code, **loading).dtype
    return str(dtype or "float32").removeprefix("torch.")


def name_of(model: str | PreTrainedModel) -> str:
    """Return the name or path of a model."""
    return model if isinstance(model, str) else get_config_model_id(model.config)
