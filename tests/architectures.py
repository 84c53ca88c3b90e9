"""Every causal language model of transformers, made small."""

from pathlib import Path
from typing import Any

import torch
import yaml
from seeds import shifted
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from trl.trainer.utils import disable_dropout_in_model

from pacs_trl.update.startup_check import disable_noise


WINDOW = 16  # longer than the sequences of the startup check, shorter than those of the test

# Sizes for the keys that a configuration has.
SIZES = {
    "vocab_size": 128,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "input_embedding_size"), 32),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers", "num_hidden_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("n_head", "n_heads", "num_heads", "num_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    "num_key_value_heads": 2,
    **dict.fromkeys(("head_dim", "attention_head_size", "v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("kv_lora_rank", "linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 4),
    "q_lora_rank": 16,
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner", "dim_ff", "dff"), 64
    ),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "mamba_num_heads"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "num_experts_per_tok": 2,
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 128),
}
# Where the default is not None.
WINDOWS = dict.fromkeys(
    (
        "sliding_window",
        "sliding_window_size",
        "attention_window_size",
        "attention_chunk_size",
        "local_attention",
        "index_topk",
    ),
    WINDOW,
) | {"window_size": WINDOW, "index_block_size": WINDOW // 2, "index_topk_blocks": 2}

SPECIAL: dict[str, dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parent / "data" / "architectures.yaml").read_text()
)
# Keys that are properties of the configuration.
FIXED = {
    "falcon": "head_dim",
    "xlstm": "v_head_dim",
    "prophetnet": "num_hidden_layers",
    "xlnet": "max_position_embeddings",
}
NOT_A_KEY = object()
LARGEST = 2_000_000  # weights


def default_of(config, key: str):
    try:
        return getattr(config, key)
    except Exception:  # also for keys that differ by layer
        return NOT_A_KEY


def build(model_type: str) -> torch.nn.Module:
    """A model of a type with weights that matter, in training mode without dropout."""
    default = CONFIG_MAPPING[model_type]()
    sizes = {key: size for key, size in SIZES.items() if default_of(default, key) is not NOT_A_KEY}
    sizes |= {key: size for key, size in WINDOWS.items() if default_of(default, key) not in (NOT_A_KEY, None, 0)}
    sizes.pop(FIXED.get(model_type), None)
    config = CONFIG_MAPPING[model_type](
        **(
            sizes
            | {"is_decoder": True, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
            | SPECIAL.get(model_type, {})
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
