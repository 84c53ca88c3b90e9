"""Packed rows give the log-probabilities, entropies and gradients of rows that stand alone."""

import pytest
import torch
import transformers
from replay import TOKENIZER, tiny_model
from transformers import AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from pacs_trl.update.packing import PACKED_SDPA, packed_attention, packed_logps_and_entropies, packing_backend


# float32 noise of sums in another order
TIGHT = {"rtol": 1e-5, "atol": 2e-6}

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
COMPLETIONS = [[20, 21], [30, 31, 32, 33], [40]]


def padded_batch(prompts=PROMPTS, completions=COMPLETIONS, pad=0):
    """Prompts padded on the left, completions on the right."""
    width, length = max(map(len, prompts)), max(map(len, completions))
    rows, masks = [], []
    for prompt, completion in zip(prompts, completions, strict=True):
        left, right = width - len(prompt), length - len(completion)
        rows.append([pad] * left + prompt + completion + [pad] * right)
        masks.append([0] * left + [1] * (len(prompt) + len(completion)) + [0] * right)
    return torch.tensor(rows), torch.tensor(masks), length


def alone(model, prompt, completion):
    """Log-probabilities and entropies of one row's completion from plain logits."""
    logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].float()
    logps = logits.log_softmax(dim=-1)
    return logps.gather(1, torch.tensor(completion)[:, None])[:, 0], -(logps.exp() * logps).sum(dim=-1)


def packed(model, ids, mask, length, **kwargs):
    backend = packing_backend(model)
    assert backend == "sdpa"
    with packed_attention(model.config, backend):
        return packed_logps_and_entropies(model, ids, mask, length, backend=backend, compute_entropy=True, **kwargs)


def with_fused_head(model):
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model


def test_rows_equal_rows_alone():
    model = with_fused_head(tiny_model())
    ids, mask, length = padded_batch()
    with torch.no_grad():
        logps, entropies = packed(model, ids, mask, length)
        for i, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
            expected_logps, expected_entropies = alone(model, prompt, completion)
            torch.testing.assert_close(logps[i, : len(completion)], expected_logps, **TIGHT)
            torch.testing.assert_close(entropies[i, : len(completion)], expected_entropies, **TIGHT)
            assert (logps[i, len(completion) :] == 0).all() and (entropies[i, len(completion) :] == 0).all()
    assert logps.dtype == entropies.dtype == torch.float32


def test_a_row_does_not_see_the_others():
    model = with_fused_head(tiny_model())
    with torch.no_grad():
        first, _ = packed(model, *padded_batch())
        other, _ = packed(model, *padded_batch([PROMPTS[0], [99], [98] * 5], [COMPLETIONS[0], [97] * 4, [96]]))
    assert torch.equal(first[0], other[0])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradient_equals_that_of_rows_alone(checkpointing):
    model = with_fused_head(tiny_model())
    factors = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    ids, mask, length = padded_batch()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    with packed_attention(model.config, "sdpa"):
        logps, _ = packed_logps_and_entropies(model, ids, mask, length, backend="sdpa")
        (logps * factors).sum().backward()  # inside: checkpointing runs the forward again
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for i, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        (alone(model, prompt, completion)[0] * factors[i, : len(completion)]).sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_attention_dropout_is_that_of_padded_rows():
    """One row, so that the same random numbers fall on the same weights; without dropout another result."""
    model = with_fused_head(tiny_model(attention_dropout=0.5)).train()
    ids, mask, length = padded_batch(PROMPTS[2:], COMPLETIONS[1:2])
    with torch.no_grad():
        torch.manual_seed(0)
        found, _ = packed(model, ids, mask, length)
        torch.manual_seed(0)
        expected, _ = alone(model, PROMPTS[2], COMPLETIONS[1])
        without, _ = packed(model.eval(), ids, mask, length)
    torch.testing.assert_close(found[0], expected, **TIGHT)
    assert (found - without).abs().max() > 0.01


def test_entropies_only_when_asked_for():
    model = with_fused_head(tiny_model())
    ids, mask, length = padded_batch()
    with packed_attention(model.config, "sdpa"):
        assert packed_logps_and_entropies(model, ids, mask, length, backend="sdpa")[1] is None


def test_attention_is_restored():
    config = tiny_model().config
    with pytest.raises(KeyError), packed_attention(config, "sdpa"):
        assert config._attn_implementation == PACKED_SDPA
        with packed_attention(config, "sdpa"):
            pass
        assert config._attn_implementation == PACKED_SDPA
        raise KeyError
    assert config._attn_implementation == "sdpa"
    with packed_attention(config, "flash"):
        assert config._attn_implementation == "sdpa"


SMALL = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT = {"vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def build(name, **settings):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(SMALL | settings))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(0, 0.2)
    return model


PACKABLE = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 8},
    "Qwen3Moe": {**EXPERTS, "head_dim": 8},
    "Gemma": {"head_dim": 8},
    "Phi3": {},
    "Olmo2": {},
    "SmolLM3": {},
    "Granite": {},
    "Cohere": {},
    "GPTNeoX": {},
    "GPT2": GPT,
    "OPT": {"ffn_dim": 64, "word_embed_proj_dim": 32},
}


@pytest.mark.parametrize(("name", "settings"), PACKABLE.items(), ids=PACKABLE)
def test_architectures_that_pack(name, settings):
    model = with_fused_head(build(name, **settings))
    with torch.no_grad():
        logps, _ = packed(model, *padded_batch())
        for i, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
            ids = torch.tensor([prompt + completion])
            expected = model(ids, labels=ids, fused_lm_head=True).log_probs[0, -len(completion) :]
            torch.testing.assert_close(logps[i, : len(completion)], expected, rtol=1e-4, atol=1e-4)


WINDOW = {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True, "sliding_window": 4}
PADDED = {
    "sliding windows": ("Mistral", {"sliding_window": 4}),
    "some layers with windows": ("Qwen3", {"head_dim": 8, **WINDOW}),
    "soft-capped attention": ("Gemma2", {"head_dim": 8, "layer_types": ["full_attention"] * 2}),
    "convolutions": ("Lfm2", {"layer_types": ["conv", "full_attention"]}),
    "masks made by the layers": ("Doge", {}),
}


@pytest.mark.parametrize(("name", "settings"), PADDED.values(), ids=PADDED)
def test_architectures_that_are_padded(name, settings):
    assert packing_backend(build(name, **settings)) is None


def test_backend_follows_the_attention_implementation():
    model = tiny_model()
    for implementation, backend in {
        "sdpa": "sdpa",
        "eager": None,
        "flex_attention": None,
        "flash_attention_2": "flash",
        "flash_attention_3": "flash",
    }.items():
        model.config._attn_implementation = implementation
        assert packing_backend(model) == backend


def test_flash_kernels_get_row_boundaries_and_lengths():
    """Without them, every layer would ask the device where the rows end."""
    seen = {}

    class Model:
        def __call__(self, **kwargs):
            seen.update(kwargs)
            number = kwargs["input_ids"].shape[1] - 1
            return type("Output", (), {"log_probs": torch.arange(number).float()[None], "entropy": None})()

    ids, mask, length = padded_batch()
    logps, _ = packed_logps_and_entropies(Model(), ids, mask, length, backend="flash")
    assert seen["cu_seq_lens_q"].tolist() == seen["cu_seq_lens_k"].tolist() == [0, 5, 10, 16]
    assert seen["cu_seq_lens_q"].dtype == torch.int32 and seen["max_length_q"] == seen["max_length_k"] == 6
    assert seen["attention_mask"] is None
    assert seen["position_ids"].tolist() == [[0, 1, 2, 3, 4] * 2 + [0, 1, 2, 3, 4, 5]]
    # rows are 5 6 7|20 21, 8|30..33, 9..13|40; only completions are labels, never the first token of a row
    assert seen["labels"].tolist() == [[-100] * 3 + [20, 21] + [-100] + [30, 31, 32, 33] + [-100] * 5 + [40]]
    # the value for token j stands at j - 1: tokens 3, 4 of row one, 6..9 of row two, 15 of row three
    assert logps.tolist() == [[2, 3, 0, 0], [5, 6, 7, 8], [14, 0, 0, 0]]


def test_tokenizer_pads_with_a_token_that_rows_may_contain():
    """Padding is found by the mask, never by the token."""
    model = with_fused_head(tiny_model())
    completions = [[TOKENIZER.pad_token_id, 21], *COMPLETIONS[1:]]
    with torch.no_grad():
        logps, _ = packed(model, *padded_batch(completions=completions, pad=TOKENIZER.pad_token_id))
        torch.testing.assert_close(logps[0, :2], alone(model, PROMPTS[0], completions[0])[0], **TIGHT)
