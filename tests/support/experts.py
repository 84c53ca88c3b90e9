"""A mixture of experts for tests."""

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from support.models import tiny_model
from support.seeds import shifted


def tiny_experts() -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(
        **{**tiny_model().config.to_dict(), "model_type": "qwen3_moe"},
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        decoder_sparse_step=1,
        output_router_logits=True,
    )
    torch.manual_seed(shifted(0))
    return Qwen3MoeForCausalLM(config)
