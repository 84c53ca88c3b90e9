"""The tiny model of tests, its tokenizer, and comparisons of weights."""

import torch
from peft import LoraConfig
from transformers import Qwen3Config, Qwen3ForCausalLM

from experiments.miniature.tokenizer import build_tokenizer
from support.seeds import shifted
from support.sharding import full
from support.tolerances import rounding_atol


TOKENIZER = build_tokenizer()
LORA = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)

# What rounding explains between a step in float32 and the long way in float64, relative to the norm. From the input to
# a weight's gradient there are about 1,000 additions: 290 in each of two layers, 300 in head and softmax, 128 tokens.
# Seen: up to 7e-6, by the instruction set.
RELATIVE = rounding_atol(1000, 1.0)


def tiny_model(seed: int = 0, **overrides) -> Qwen3ForCausalLM:
    """2 layers x 32 wide, grouped-query attention; weights large enough that log-probabilities are far from
    uniform."""
    settings = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }
    settings |= overrides
    config = Qwen3Config(
        vocab_size=len(TOKENIZER),
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=TOKENIZER.eos_token_id,
        pad_token_id=TOKENIZER.pad_token_id,
        **settings,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(shifted(seed))
        return Qwen3ForCausalLM(config)


def trainable_weights(model) -> dict[str, torch.Tensor]:
    return {name.removeprefix("module."): full(p).detach() for name, p in model.named_parameters() if p.requires_grad}


def load_weights(model, weights: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in weights:
                p.copy_(weights[name])


def assert_same_models(first, second) -> None:
    """Policy, critic if there is one, and KL reference if both have one, of two trainers, bit by bit."""
    names = [name for name in ("model", "critic") if getattr(first, name, None) is not None]
    if None not in (getattr(first, "ref_model", None), getattr(second, "ref_model", None)):
        names.append("ref_model")
    for name in names:
        expected, weights = (trainable_weights(getattr(trainer, name)) for trainer in (first, second))
        assert all(torch.equal(weight, weights[key]) for key, weight in expected.items()), name


def relative_error(actual: dict[str, torch.Tensor | None], expected: dict[str, torch.Tensor]) -> float:
    """Norm of the difference over norm of the expected, all parameters together. What should be 0 must be exactly
    0."""
    assert actual.keys() >= expected.keys()
    difference = sum(
        ((0 if actual[name] is None else actual[name].double()) - value).square().sum().item()
        for name, value in expected.items()
    )
    size = sum(value.double().square().sum().item() for value in expected.values())
    return 0.0 if difference == 0 else (difference / size) ** 0.5 if size > 0 else float("inf")


def logps_and_entropies(model, row) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the completion tokens of one row, by a forward pass of that row alone."""
    ids = torch.tensor([row.prompt_ids + row.completion_ids])
    logps = model(input_ids=ids).logits[0, len(row.prompt_ids) - 1 : -1].log_softmax(dim=-1)
    chosen = logps.gather(1, torch.tensor(row.completion_ids)[:, None])[:, 0]
    return chosen, -(logps.exp() * logps).sum(dim=-1)
