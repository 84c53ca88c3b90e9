"""Qwen3 models that train on two CPU cores, built from a seed.

They have the architecture of the paper's 4B and 8B models, so that trainer, LoRA, checkpoints, evaluation, and vLLM
take the same code path. `warm_start` teaches them the tasks.
"""

import torch
from transformers import PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM


# Layers, hidden size, and inner size of the MLP; attention heads are 32 wide, and two share a key-value head.
MODEL_SIZES = {"tiny": (2, 64, 128), "small": (4, 128, 512)}  # 0.1 and 1 million parameters
HEAD_DIM = 32


def check_size(size: str) -> None:
    if size not in MODEL_SIZES:
        raise ValueError(f"There is no model size {size!r}. Choose one of {', '.join(MODEL_SIZES)}.")


def build_model(tokenizer: PreTrainedTokenizerBase, size: str = "small", seed: int = 0) -> Qwen3ForCausalLM:
    """Return a miniature model of a size in `MODEL_SIZES`, float32 on the CPU with tied embeddings, whose weights
    depend on `seed` alone; the global random state is not changed."""
    check_size(size)
    num_layers, hidden_size, intermediate_size = MODEL_SIZES[size]
    num_heads = hidden_size // HEAD_DIM
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads // 2 if num_heads % 2 == 0 else num_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)
