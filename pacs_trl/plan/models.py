"""The model of a recipe, as far as a configuration on this machine tells. Nothing is downloaded, and no weights are
loaded."""

import re

import torch
from peft import get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from ..errors import UserError
from ..recipe import Recipe, adapter_config
from .cost import KNOWN_MODELS, ModelShape


def local_config(recipe: Recipe) -> PreTrainedConfig | None:
    """Return the configuration of the model of a recipe, or one of its architecture if it is a known model; `None` if
    it is not on this machine."""
    name, training = recipe.model_name, recipe.training
    init_kwargs = {"trust_remote_code": training.trust_remote_code, **(training.model_init_kwargs or {})}
    try:
        return AutoConfig.from_pretrained(name, local_files_only=True, **init_kwargs)
    except (OSError, ValueError):
        shape = KNOWN_MODELS.get(name)
    if shape is None:
        return None
    config_class = Qwen3Config if shape.qk_norm else Qwen2Config if shape.qkv_bias else LlamaConfig
    return config_class(num_hidden_layers=1)


def empty_model(config: PreTrainedConfig, trust_remote_code: bool = False) -> PreTrainedModel | None:
    """Return a model without weights (on the meta device), or `None` if its architecture is neither in transformers
    nor in code of the checkpoint that is trusted."""
    for auto_class in (AutoModelForCausalLM, AutoModelForImageTextToText):
        try:
            with torch.device("meta"):
                return auto_class.from_config(config, trust_remote_code=trust_remote_code)
        except (ValueError, ImportError, AttributeError, AssertionError):
            continue
    return None


def shape_of_model(model: PreTrainedModel) -> ModelShape | None:
    """
    Return the shape of a dense decoder that has as many weights as a model of any architecture, in all and for each
    token: of experts a token uses `num_experts_per_tok`. Its activations and seconds are an approximation of those of
    the model, whose layers are not those of Llama. Return `None` for a model without attention.
    """
    config = model.config.get_text_config()
    if not hasattr(config, "num_attention_heads"):
        return None
    experts_per_token = getattr(config, "num_experts_per_tok", None) or _setting(config, "top_k_experts", 1)
    total = active = 0.0
    for name, weight in model.named_parameters():
        total += weight.numel()
        is_of_experts = ".experts." in name and weight.ndim > 1  # the first dimension counts experts
        used = experts_per_token / weight.shape[0] if is_of_experts else 1.0
        active += used * weight.numel()
    hidden, heads = config.hidden_size, config.num_attention_heads
    kv_heads, head_dim = _setting(config, "num_key_value_heads", heads), _setting(config, "head_dim", hidden // heads)
    if rank := _setting(config, "kv_lora_rank", 0):  # latent attention caches one vector per token
        width = heads * config.v_head_dim
        kv_heads, head_dim = 1, (rank + config.qk_rope_head_dim) // 2
        heads = max(1, width // head_dim)
    vocabulary, tied = config.vocab_size, bool(_setting(config, "tie_word_embeddings", 0))
    embeddings = vocabulary * hidden * (1 if tied else 2)
    attention = 2 * hidden * (heads + kv_heads) * head_dim
    layer_weights = (active - embeddings) / config.num_hidden_layers
    return ModelShape(
        num_layers=config.num_hidden_layers,
        hidden=hidden,
        intermediate=max(1, round((layer_weights - attention) / (3 * hidden))),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=vocabulary,
        tied=tied,
        counted_parameters=int(total),
    )


def _setting(config: PreTrainedConfig, name: str, default: int) -> int:
    """Return a setting that only some architectures have; without layers that differ from the others in it."""
    return vars(config).get(name) or default


def adapter_error(recipe: Recipe, model: PreTrainedModel) -> str | None:
    """Return why the adapter of a recipe does not fit a model without weights, which is changed."""
    try:
        config = adapter_config(recipe.model)
        if config is None:
            return None
        get_peft_model(model, config)
    except (re.error, UserError):  # which are refused before
        return None
    except ValueError as error:
        if "arget modules" not in str(error):
            return f"The LoRA adapter does not fit the model: {error}. Correct the lora_* settings."
        linear = [name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)]
        names = {name.rpartition(".")[2] for name in linear}
        return (
            f"lora_target_modules={recipe.model.lora_target_modules}: {str(error).split('. ')[0]}. Choose among the "
            f"linear layers of the model ({', '.join(sorted(names))}), or all-linear."
        )
    return None
