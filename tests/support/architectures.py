"""Every causal language model of transformers, made small."""

from pathlib import Path

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from trl.trainer.utils import disable_dropout_in_model

from pacs_trl.update.startup_check import disable_noise
from support.seeds import shifted


DATA = yaml.safe_load((Path(__file__).parents[1] / "data" / "architectures.yaml").read_text())
SIZES, WINDOWS, FIXED, SPECIAL = (DATA[name] for name in ("sizes", "windows", "fixed", "special"))
NOT_A_KEY = object()
LARGEST = 2_000_000  # weights


def default_of(config, key: str):
    try:
        return getattr(config, key)
    except Exception:  # also for keys that differ by layer
        return NOT_A_KEY


def build(model_type: str, **settings) -> torch.nn.Module:
    """A model of a type with weights that matter, in training mode without dropout; `settings` are of its
    configuration."""
    default = CONFIG_MAPPING[model_type]()
    sizes = {key: size for key, size in SIZES.items() if default_of(default, key) is not NOT_A_KEY}
    sizes |= {key: size for key, size in WINDOWS.items() if default_of(default, key) not in (NOT_A_KEY, None, 0)}
    sizes.pop(FIXED.get(model_type), None)
    config = CONFIG_MAPPING[model_type](
        **(
            sizes
            | {"is_decoder": True, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
            | SPECIAL.get(model_type, {})
            | settings
        )
    )
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size} weights")
    torch.manual_seed(shifted(0))
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.2) if p.ndim > 1 else p.add_(0.2 * torch.randn_like(p))
    disable_dropout_in_model(model)
    disable_noise(model)
    return model


IMAGE_CHECKPOINTS = {
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 16, "layer_types": ["sliding_attention"] * 2},
    "mistral3": {"model_type": "mistral", "sliding_window": 16},
    "llava": {"model_type": "llama"},
}


def build_image_checkpoint(model_type: str) -> torch.nn.Module:
    """A model that reads images and text; its layers for text are those of `IMAGE_CHECKPOINTS`."""
    sizes = {"vocab_size": 160, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model(
        model_type,
        text_config=sizes | ids | IMAGE_CHECKPOINTS[model_type],
        vision_config=vision | {"image_size": 28, "patch_size": 14},
        image_token_index=150,
    )
    torch.manual_seed(shifted(0))
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa").float().eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(0, 0.25)
    return model
