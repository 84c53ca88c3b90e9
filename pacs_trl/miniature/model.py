"""Qwen3 models that train on two CPU cores, built from a seed.

They have the architecture of the paper's 4B and 8B models, so that trainer, LoRA, checkpoints, evaluation, and vLLM
take the same code path. `warm_start` teaches them the tasks.
"""

from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM


class ModelSize(NamedTuple):
    """Layers and widths of a size; attention heads are 32 wide, and two share a key-value head."""

    num_layers: int
    hidden_size: int
    intermediate_size: int


HEAD_DIM = 32

MODEL_SIZES: dict[str, ModelSize] = {
    "tiny": ModelSize(num_layers=2, hidden_size=64, intermediate_size=128),  # 0.1M parameters
    "small": ModelSize(num_layers=4, hidden_size=128, intermediate_size=512),  # 1M
}


def check_size(size: str) -> None:
    if size not in MODEL_SIZES:
        raise ValueError(f"There is no model size {size!r}. Choose one of {', '.join(MODEL_SIZES)}.")


def build_model(tokenizer: PreTrainedTokenizerBase, size: str = "small", seed: int = 0) -> Qwen3ForCausalLM:
    """
    Build a randomly initialized miniature model.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Provides vocabulary size, padding token, and end token.
        size (`str`): Key of `MODEL_SIZES`.
        seed (`int`): Seed of the weights; the global random state is not changed.

    Returns:
        [`~transformers.Qwen3ForCausalLM`]: A float32 model on the CPU with tied embeddings.

    Raises:
        `ValueError`: if `size` is unknown.
    """
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
