"""Every causal language model of transformers, made small."""

from typing import Any

import torch
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

HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
MLA = {"num_key_value_heads": 4}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
WIDE_MAMBA = {**MAMBA, "mamba_expand": 2}
SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32"), MLA),
    **dict.fromkeys(("glm4_moe_lite", "glm_moe_dsa", "minicpm3", "youtu", "kimi_linear"), MLA),
    "bamba": {**WIDE_MAMBA, "attn_layer_indices": [1]},
    "bert": {"is_decoder": True},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
    },
    "codegen": {"rotary_dim": 8},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
    },
    "gemma4_text": {"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {**WIDE_MAMBA, "layer_types": ["mamba", "attention"]},
    "kimi_linear": {
        **MLA,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_heads": 4,
        "linear_head_dim": 8,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"num_layers": 1, "zero_expert_num": 2, "expert_ffn_hidden_size": 32, "num_key_value_heads": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 16},
    "reformer": {"axial_pos_shape": (8, 16), "axial_pos_embds_dim": (16, 16)},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "mamba_d_state": 8},
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), HYBRID),
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "roc_bert": {
        "pronunciation_vocab_size": 8,
        "shape_vocab_size": 8,
        "pronunciation_embed_dim": 8,
        "shape_embed_dim": 8,
    },
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
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
