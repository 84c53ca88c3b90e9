"""Rows that share a forward pass, packed or padded, give the log-probabilities, entropies and gradients of rows that
stand alone; which models are packed; what models are left like; and that no tensor of the size of the logits is ever
made."""

import numpy as np
import pytest
import torch
import transformers
import trl
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from support.architectures import build, build_image_checkpoint
from support.largest_tensor import LargestTensor
from support.models import logps_and_entropies, tiny_model
from support.rollouts import Row
from support.seeds import shifted
from trl.trainer.utils import add_fused_lm_head

from experiments.logps import compute_logps
from pacs_trl.update import packing
from pacs_trl.update.context_length import attention_windows
from pacs_trl.update.forward_pass import ForwardPass, fused_head
from pacs_trl.update.packing import PackedRollouts, packing_backend


# float32 noise of sums in another order
TIGHT = {"rtol": 1e-5, "atol": 2e-6}

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
COMPLETIONS = [[20, 21], [30, 31, 32, 33], [40]]
# Three rows of one prompt, two of a prompt that is one token, one alone, in an order that packing changes.
SHARED = (
    [[5, 6, 7], [8], [5, 6, 7], [9, 10, 11, 12, 13], [8], [5, 6, 7]],
    [[20, 21], [30, 31, 32, 33], [22], [40], [], [23, 24, 25]],
)


CPU = torch.device("cpu")


def packed(model, prompts=PROMPTS, completions=COMPLETIONS):
    forward_pass = ForwardPass(model, CPU)
    assert forward_pass.packing == "sdpa"
    return forward_pass.compute_logps(model, prompts, completions)


def with_fused_head(model):
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model


@pytest.mark.parametrize("rows", [(PROMPTS, COMPLETIONS), SHARED], ids=["all differ", "shared"])
@pytest.mark.parametrize("packing", ["auto", "never"])
def test_rows_equal_rows_alone(packing, rows):
    model = with_fused_head(tiny_model())
    with torch.no_grad():
        scores = ForwardPass(model, CPU, packing=packing).compute_logps(model, *rows)
        for logps, entropies, prompt, completion in zip(*scores, *rows, strict=True):
            expected_logps, expected_entropies = logps_and_entropies(model, Row(prompt, completion))
            torch.testing.assert_close(logps, expected_logps, **TIGHT)
            torch.testing.assert_close(entropies, expected_entropies, **TIGHT)
            assert logps.dtype == entropies.dtype == torch.float32
    for rows, padded in zip(scores, scores.padded(), strict=True):
        assert padded.shape == (len(rows), 4) and padded.dtype == torch.float32
        for i, row in enumerate(rows):
            assert torch.equal(padded[i, : len(row)], row) and (padded[i, len(row) :] == 0).all()


def test_virtual_tokens_before_the_prompt_are_skipped():
    """Of prompt tuning: the model gives more values than it is given tokens."""
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = get_peft_model(with_fused_head(tiny_model()), config).eval()
    forward_pass = ForwardPass(model, CPU)
    assert forward_pass.packing is None
    with torch.no_grad():
        logps, _ = forward_pass.compute_logps(model, PROMPTS, COMPLETIONS)
        for row_logps, prompt, completion in zip(logps, PROMPTS, COMPLETIONS, strict=True):
            logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, -len(completion) - 1 : -1]
            expected = logits.log_softmax(dim=-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
            torch.testing.assert_close(row_logps, expected, **TIGHT)


def test_activated_lora_starts_at_the_invocation_tokens_of_each_prompt():
    """It looks for the last ones of a row, which packed rollouts share."""
    config = LoraConfig(r=4, target_modules=["q_proj"], alora_invocation_tokens=[8, 9], init_lora_weights=False)
    model = get_peft_model(with_fused_head(tiny_model()), config).eval()
    prompts, completions = [[5, 8, 9, 6], [5, 8, 9, 6], [7, 8, 9]], [[20, 21, 22], [23, 24], [30, 31, 32, 33]]
    forward_pass = ForwardPass(model, CPU)
    with torch.no_grad(), forward_pass.attention():
        logps, _ = forward_pass.compute_logps(model, prompts, completions)
        for row_logps, prompt, completion in zip(logps, prompts, completions, strict=True):
            logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, -len(completion) - 1 : -1]
            expected = logits.log_softmax(dim=-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
            torch.testing.assert_close(row_logps, expected, **TIGHT)


@pytest.mark.parametrize("rows", [(PROMPTS, COMPLETIONS), SHARED], ids=["all differ", "shared"])
@pytest.mark.parametrize("packing", ["auto", "never"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradient_equals_that_of_rows_alone(checkpointing, packing, rows):
    model = with_fused_head(tiny_model())
    factors = torch.randn(len(rows[0]), 4, generator=torch.Generator().manual_seed(shifted(0)))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    forward_pass = ForwardPass(model, CPU, packing=packing)
    with forward_pass.attention():
        logps, _ = forward_pass.compute_logps(model, *rows).padded()
        (logps * factors).sum().backward()  # inside: checkpointing runs the forward again
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for i, (prompt, completion) in enumerate(zip(*rows, strict=True)):
        (logps_and_entropies(model, Row(prompt, completion))[0] * factors[i, : len(completion)]).sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_a_packed_row_is_laid_out_as_worked_by_hand():
    prompts, completions = ([np.array(ids, dtype=np.int64) for ids in part] for part in SHARED)
    rows = PackedRollouts(prompts, completions)
    assert rows.ids.tolist() == [5, 6, 7] + [20] + [] + [23, 24] + [8] + [30, 31, 32] + [9, 10, 11, 12, 13]
    assert rows.positions.tolist() == [0, 1, 2] + [3] + [] + [3, 4] + [0] + [1, 2, 3] + [0, 1, 2, 3, 4]
    assert rows.blocks == [[3, 1, 2], [1, 3], [5]]  # prompts and their branches, of which empty ones are left out
    # 20, 22, and 23 are predicted at 2, the end of their prompt, 21 at 3, and so on, in the order of the rows
    assert rows.flat_indices.tolist() == [2, 3] + [6, 7, 8, 9] + [2] + [14] + [] + [2, 4, 5]
    inputs = rows.kernel_inputs()
    assert inputs["cu_seq_lens_q"].tolist() == [0, 3, 4, 6, 7, 10, 15]
    assert inputs["cu_seq_lens_k"].tolist() == [0, 3, 7, 12, 13, 17, 22]
    keys = [0, 1, 2] + [0, 1, 2, 3] + [0, 1, 2, 4, 5] + [6] + [6, 7, 8, 9]
    assert inputs["key_indices"].tolist() == keys + list(range(10, 15))
    nothing_shared = PackedRollouts(prompts[3:5], completions[3:5])
    assert nothing_shared.kernel_inputs()["key_indices"].tolist() == list(range(6))


def test_a_shared_prompt_is_computed_once():
    """Rows of one prompt of 60 tokens: 60 + 4 * (3 - 1) tokens instead of 4 * 63; with `compute_logps` too."""
    model, seen = with_fused_head(tiny_model()), []

    def count(module, args, kwargs):
        seen.append((*args, *kwargs.values())[0].shape[:-1].numel())

    with model.model.layers[0].register_forward_pre_hook(count, with_kwargs=True):
        packed(model, [list(range(20, 80))] * 4, [[20, 21, 22]] * 4)
        with torch.no_grad():
            list(compute_logps(model, [list(range(20, 80))] * 4, [[20, 21, 22]] * 4))
    # the startup check: three sequences alone, packed, and packed with other neighbors
    check = [11, 11, 6, *[5 + 2 * 5 + 5] * 3]
    assert seen == [60 + 4 * 2, *check, 60 + 4 * 2]


@pytest.mark.parametrize("packing", ["auto", "never"])
def test_only_completion_tokens_go_through_the_head(monkeypatch, packing):
    seen, original = [], trl.trainer.utils._ChunkedLogProbFunction.apply
    spy = lambda hidden, *args: seen.append(hidden.shape[0]) or original(hidden, *args)  # noqa: E731
    monkeypatch.setattr(trl.trainer.utils._ChunkedLogProbFunction, "apply", spy)
    model = with_fused_head(tiny_model())
    ForwardPass(model, CPU, packing=packing).compute_logps(model, *SHARED)
    assert seen == [11] and not model.model._forward_hooks


def test_attention_dropout_is_that_of_padded_rows():
    """One row, so that the same random numbers fall on the same weights; without dropout another result."""
    model = with_fused_head(tiny_model(attention_dropout=0.5)).train()
    row = PROMPTS[2:], [COMPLETIONS[1] + [1]]  # the last token predicts nothing, so it is left out
    with torch.no_grad():
        torch.manual_seed(shifted(0))
        logps, _ = packed(model, *row)
        torch.manual_seed(shifted(0))
        expected, _ = logps_and_entropies(model, Row(PROMPTS[2], COMPLETIONS[1]))
        without, _ = packed(model.eval(), *row)
    torch.testing.assert_close(logps[0][:-1], expected, **TIGHT)
    assert (logps[0] - without[0]).abs().max() > 0.01


def test_entropies_only_where_the_head_gives_them():
    model = tiny_model()
    add_fused_lm_head(model)  # as TRL does to the reference of the KL term
    assert packed(model).entropies == []


def test_backend_follows_the_attention_implementation():
    model = tiny_model()
    backends = dict.fromkeys(("sdpa", "eager", "flash_attention_4"), "sdpa") | {"flex_attention": None}
    hub = ("kernels-community/flash-attn2", "kernels-community/vllm-flash-attn3@v1")
    for implementation, backend in (backends | dict.fromkeys(("flash_attention_2", *hub), "flash")).items():
        model.config._attn_implementation = implementation
        assert packing_backend(model) == backend


def test_padding_because_of_the_attention_implementation_warns_once(caplog):
    packing.warn_of_padding.cache_clear()
    model = tiny_model()
    model.config._attn_implementation = "flex_attention"
    assert [ForwardPass(model, CPU).packing for _ in range(2)] == [None, None]
    assert [record.getMessage() for record in caplog.records] == [
        "Completions are padded, although the layers of this model can be packed, which is faster. Set "
        "attn_implementation to sdpa, not flex_attention."
    ]
    ForwardPass(model, CPU, packing="never")
    ForwardPass(build("falcon"), CPU)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("model_type", ["gemma3", "mistral3", "llava"])
def test_text_layers_of_image_checkpoints_are_packed(model_type):
    """The first two have a window of 16 tokens in the configuration of their text layers."""
    model = with_fused_head(build_image_checkpoint(model_type))
    generator = torch.Generator().manual_seed(shifted(2))
    prompts, completions = (
        [torch.randint(3, 140, (n,), generator=generator).tolist() for n in lengths] for lengths in ((7, 20), (30, 9))
    )
    forward_pass = ForwardPass(model, CPU)
    assert forward_pass.packing == "sdpa"
    with torch.no_grad(), forward_pass.attention():
        assert model.config.vision_config._attn_implementation == "sdpa"
    with torch.no_grad():
        computed = forward_pass.compute_logps(model, prompts, completions).logps
        for logps, prompt, completion in zip(computed, prompts, completions, strict=True):
            torch.testing.assert_close(
                logps, logps_and_entropies(model, Row(prompt, completion))[0], rtol=0, atol=1e-4
            )


def test_layers_whose_windows_differ_are_padded():
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 64}
    config = transformers.MistralConfig(
        **sizes,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=None,
        per_layer_config={"1": {"sliding_window": 16}},
    )
    assert packing_backend(transformers.MistralForCausalLM(config)) is None
    assert attention_windows(config) == [16]


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_adapter_of_the_head_counts(target):
    """TRL's fused head multiplies by the weight without the adapter."""
    model = get_peft_model(tiny_model(tie_word_embeddings=False), LoraConfig(r=4, target_modules=[target])).eval()
    with_fused_head(model.get_base_model())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.normal_(0, 0.3, generator=torch.Generator().manual_seed(shifted(3)))
    forward_pass = ForwardPass(model, CPU)
    logps = forward_pass.compute_logps(model, PROMPTS, COMPLETIONS).logps
    for computed, prompt, completion in zip(logps, PROMPTS, COMPLETIONS, strict=True):
        torch.testing.assert_close(computed, logps_and_entropies(model, Row(prompt, completion))[0], **TIGHT)
    sum(map(torch.sum, logps)).backward()
    assert all(p.grad.abs().sum() > 0 for p in model.parameters() if p.requires_grad)


NUM_ROWS, NUM_TOKENS, NUM_WORDS = 8, 40, 3_000


@pytest.fixture
def wide_model(monkeypatch):
    """A model with more words than anything else, and tiles of the fused head in proportion."""
    monkeypatch.setattr("trl.kernels.chunked_logprob.TOKEN_CHUNK_SIZE", 32)
    monkeypatch.setattr("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", 512)
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "head_dim"), 8)
    sizes |= dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 1)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(vocab_size=NUM_WORDS, **sizes)).eval()


ROWS = torch.randint(
    0, NUM_WORDS, (NUM_ROWS, NUM_TOKENS), generator=torch.Generator().manual_seed(shifted(0))
).tolist()
HEADS, TAILS = [row[:1] for row in ROWS], [row[1:] for row in ROWS]


def test_no_tensor_has_the_size_of_the_logits(wide_model):
    logits = NUM_ROWS * (NUM_TOKENS - 1) * NUM_WORDS
    with LargestTensor() as largest, torch.no_grad():
        wide_model(torch.tensor(ROWS))
    assert largest.elements >= logits  # the counter sees them
    with LargestTensor() as largest, torch.no_grad():
        list(compute_logps(wide_model, HEADS, TAILS))
    # the weights of the head are the largest tensor of all but for the concatenated gradients of all weights
    assert 0 < largest.elements < 0.1 * logits


def test_the_former_name_of_packing_warns_and_works():
    with pytest.warns(FutureWarning, match="Set packing='never'"):
        assert ForwardPass(tiny_model(), CPU, padding_free="never").packing is None


def test_the_gradient_of_entropies_has_no_tensor_of_the_size_of_the_logits(wide_model):
    with fused_head(wide_model), LargestTensor() as largest:
        torch.cat(ForwardPass(wide_model, CPU).compute_logps(wide_model, HEADS, TAILS).entropies).sum().backward()
    assert 0 < largest.elements < 0.1 * NUM_ROWS * (NUM_TOKENS - 1) * NUM_WORDS


def test_the_model_is_left_as_it_was():
    model = tiny_model().eval()
    logits = model(torch.tensor([[5, 6, 7]])).logits
    model.forward = patched = model.forward  # as a trainer has patched it
    with pytest.raises(KeyError), fused_head(model, temperature=0.5):
        scores = ForwardPass(model, CPU).compute_logps(model, [[5]], [[6, 7]])
        expected = (logits[0, :-1] / 0.5).log_softmax(-1)
        torch.testing.assert_close(scores.logps[0], expected[[0, 1], [6, 7]], **TIGHT)
        torch.testing.assert_close(scores.entropies[0], -(expected.exp() * expected).sum(-1), **TIGHT)
        assert vars(model)["forward"] is not patched
        raise KeyError
    assert vars(model).pop("forward") is patched
    list(compute_logps(model, [[5]], [[6, 7]]))
    assert "forward" not in vars(model) and torch.equal(model(torch.tensor([[5, 6, 7]])).logits, logits)
