"""The startup check: which passes it chooses, that it changes nothing else, and which models it refuses."""

import logging

import pytest
import torch
import torch.nn.functional as F
import transformers
from support.architectures import build
from support.models import TOKENIZER, tiny_model
from support.rollouts import Replay
from support.runs import build_trainer
from trl.trainer.utils import add_fused_lm_head, disable_dropout_in_model

from pacs_trl.errors import UserError
from pacs_trl.update.forward_pass import ForwardPass
from pacs_trl.update.packed_states import Segments
from pacs_trl.update.startup_check import choose_forward_pass, disable_noise


CPU = torch.device("cpu")
PROMPTS, COMPLETIONS = [[45, 46, 47], [45, 46, 47], [50]], [[60, 61, 62, 63], [60, 70], [64, 65, 66]]


def scorer_of(model, temperature=1.0, **settings):
    add_fused_lm_head(model, temperature, outputs=("log_probs", "entropy"))
    return ForwardPass(model, CPU, temperature=temperature, **settings)


def chosen(model, **settings):
    forward_pass = scorer_of(model, **settings)
    choose_forward_pass(forward_pass, model)
    return forward_pass


def assert_exact(forward_pass, model, temperature=1.0):
    with torch.no_grad():
        scores = forward_pass.compute_logps(model, PROMPTS, COMPLETIONS)
        for logps, entropies, prompt, completion in zip(*scores, PROMPTS, COMPLETIONS, strict=True):
            logits = model(input_ids=torch.tensor([prompt + completion]), use_cache=False).logits
            log_probs = (logits[0, len(prompt) - 1 : -1] / temperature).log_softmax(dim=-1)
            expected = log_probs.gather(1, torch.tensor(completion)[:, None])[:, 0]
            torch.testing.assert_close(logps, expected, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(entropies, -(log_probs.exp() * log_probs).sum(dim=-1), rtol=1e-4, atol=1e-5)


def test_a_model_that_packs_is_left_alone(caplog):
    model = tiny_model()
    model.model.layers[0].eval()  # modes of modules are restored one by one
    forward_pass = scorer_of(model)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    modes, state = [module.training for module in model.modules()], torch.get_rng_state()
    choose_forward_pass(forward_pass, model)
    assert (forward_pass.packing, forward_pass.fused) == ("sdpa", True) and not caplog.records
    assert [module.training for module in model.modules()] == modes and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("packing", ["sdpa", "flash"])
def test_layers_that_do_not_pass_the_inputs_of_packing_on(monkeypatch, caplog, packing):
    """Nemotron's attention is called without them."""
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "flash_attention_2", without_borders)
    model = build("nemotron")
    if packing == "flash":
        model.config._attn_implementation = "flash_attention_2"
    forward_pass = scorer_of(model)
    assert forward_pass.packing == packing
    choose_forward_pass(forward_pass, model)
    assert (forward_pass.packing, forward_pass.fused) == (None, True)
    assert_exact(forward_pass, model)
    (record,) = caplog.records
    assert "'nemotron'" in record.getMessage() and "TypeError" in record.getMessage()


def without_borders(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """FlashAttention where nobody says where sequences begin, or where rows are padded on the right."""
    assert "cu_seq_lens_q" not in kwargs
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None


@pytest.mark.parametrize(
    "model_type, packing",
    [("modernbert-decoder", "sdpa"), ("inkling_text", None), ("llama4_text", None), ("recurrent_gemma", None)],
)
def test_models_with_modules_between_backbone_and_head_are_exact(caplog, model_type, packing):
    model = build(model_type)
    forward_pass = chosen(model, temperature=0.7)
    assert (forward_pass.packing, forward_pass.fused) == (packing, False) and model_type in caplog.text
    assert_exact(forward_pass, model, temperature=0.7)


@pytest.mark.parametrize("longest, packing, num_sequences", [(16, "sdpa", 3), (17, None, 5), (None, None, 5)])
def test_windows_that_sequences_exceed_are_seen(monkeypatch, caplog, longest, packing, num_sequences):
    """Of 16 tokens, in a model whose packed attention has no window."""
    model = build("mistral").eval()
    mapping = transformers.AttentionInterface._global_mapping
    attend = mapping["pacs_packed_sdpa"]
    without_window = lambda *args, sliding_window, **kwargs: attend(*args, **kwargs)  # noqa: E731
    monkeypatch.setitem(mapping, "pacs_packed_sdpa", without_window)
    lengths = []
    model.register_forward_pre_hook(
        lambda _, positional, inputs: lengths.append(inputs["input_ids"].shape), with_kwargs=True
    )
    forward_pass = scorer_of(model)
    choose_forward_pass(forward_pass, model, longest=longest)
    assert forward_pass.packing == packing and ("packed" in caplog.text) == (packing is None)
    assert lengths[num_sequences - 1][0] == 1 and lengths[num_sequences][1] > 11  # own passes, then packed ones
    assert max(length for batch, length in lengths[:num_sequences]) == (48 if num_sequences == 5 else 11)


@pytest.mark.parametrize("reach", [15, 17])
def test_a_window_that_is_off_by_one_is_seen(monkeypatch, caplog, reach):
    model = build("mistral").eval()
    mapping = transformers.AttentionInterface._global_mapping
    attend = mapping["pacs_packed_sdpa"]
    other_window = lambda *args, sliding_window, **kwargs: attend(*args, sliding_window=reach, **kwargs)  # noqa: E731
    monkeypatch.setitem(mapping, "pacs_packed_sdpa", other_window)
    assert chosen(model).packing is None and " nats" in caplog.text


def leaking_convolution(segments, num_previous):
    tokens = torch.arange(segments.num_tokens)
    return tokens, tokens < 0, tokens


def leaking_recurrence(segments, chunk, batches=Segments.batches):
    return batches(Segments([(segments.num_tokens, [])], segments.device), chunk)


@pytest.mark.parametrize(
    "model_type, dtype",
    [
        ("granitemoehybrid", torch.float32),
        *((name, dtype) for name in ("lfm2", "qwen3_5_text") for dtype in (torch.float32, torch.bfloat16)),
    ],
)
def test_models_whose_states_leak_are_padded(monkeypatch, caplog, model_type, dtype):
    """Also in half precision, where a leak changes log-probs by less than rounding may."""
    model = build(model_type).to(dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data.fill_(-3)  # states are kept for about 20 tokens
    warnings = lambda: [record.getMessage() for record in caplog.records if record.name.startswith("pacs_trl")]  # noqa: E731
    assert chosen(model).packing == "sdpa" and not warnings()
    if model_type == "lfm2":
        monkeypatch.setattr(Segments, "with_previous", leaking_convolution)
    else:
        monkeypatch.setattr(Segments, "batches", leaking_recurrence)
    assert chosen(model).packing is None
    (warning,) = warnings()
    assert "by other sequences beside it" in warning


class ReadsEarlierTokens(torch.nn.Module):
    """A layer with an adapter that starts at zero, and reads the layer's inputs at all earlier tokens of a row."""

    def __init__(self, layer: torch.nn.Linear):
        super().__init__()
        self.layer = layer
        self.adapter = torch.nn.Linear(layer.in_features, layer.out_features, bias=False)
        torch.nn.init.zeros_(self.adapter.weight)

    def forward(self, inputs):
        return self.layer(inputs) + self.adapter(inputs.cumsum(dim=1))


def test_what_an_adapter_reads_is_seen_before_it_has_an_effect(caplog):
    model = tiny_model()
    projection = ReadsEarlierTokens(model.model.layers[0].mlp.up_proj)
    model.model.layers[0].mlp.up_proj = projection
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    forward_pass = chosen(model)
    assert (forward_pass.packing, forward_pass.fused) == (None, True) and "by other sequences" in caplog.text
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    torch.nn.init.normal_(projection.adapter.weight)  # as training may
    assert_exact(forward_pass, model)


def test_sequences_of_the_check_are_longer_than_chunks():
    model, lengths = build("qwen3_5_text"), []
    model.config.max_position_embeddings = 1000
    model.register_forward_pre_hook(
        lambda _, args, inputs: lengths.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    choose_forward_pass(scorer_of(model), model)
    assert max(lengths[:5]) == 288  # the model's own passes; chunks have up to 256 tokens


def test_logits_of_a_long_sequence_are_those_of_its_end_only():
    model, sizes = build("mistral").eval(), []
    model.lm_head.register_forward_hook(lambda head, inputs, output: sizes.append(output.shape[1]))
    choose_forward_pass(scorer_of(model), model)
    assert sizes and max(sizes) == 9


def test_half_precision_is_told_from_errors(caplog):
    assert chosen(tiny_model().bfloat16()).packing == "sdpa" and not caplog.records
    autocast = lambda: torch.autocast("cpu", dtype=torch.bfloat16)  # noqa: E731
    assert chosen(tiny_model(), autocast=autocast).packing == "sdpa" and not caplog.records
    forward_pass = chosen(build("modernbert-decoder"), autocast=autocast)
    assert not forward_pass.fused


def test_models_that_are_refused():
    with pytest.raises(ValueError, match="'cpmant' model is not causal"):
        chosen(build("cpmant"))
    noisy = tiny_model()
    noisy.model.layers[0].mlp.register_forward_hook(lambda mlp, inputs, out: F.dropout(out, 0.5, mlp.training))
    with pytest.raises(ValueError, match="'qwen3'.*differences"):
        chosen(noisy)


def test_attention_dropout_with_a_window_is_padded(caplog):
    """Packed attention has no such dropout, and the log-probs are compared without dropout."""
    for window, packing in ((None, "sdpa"), (8, None)):
        layers = {} if window is None else {"layer_types": ["sliding_attention"] * 2}
        model = tiny_model(attention_dropout=0.5, use_sliding_window=True, sliding_window=window, **layers)
        forward_pass = scorer_of(model)
        state = torch.get_rng_state()
        choose_forward_pass(forward_pass, model.train(), training=False, has_dropout=True)
        assert forward_pass.packing == packing and torch.equal(torch.get_rng_state(), state)
        assert ("dropout" in caplog.text) == (packing is None)
        with forward_pass.attention():
            logps = torch.cat(forward_pass.compute_logps(model, PROMPTS, COMPLETIONS).logps)
        assert logps.isfinite().all()
    forward_pass.packing = "sdpa"  # as without the check
    with forward_pass.attention(), pytest.raises(UserError, match="disable_dropout"):
        forward_pass.compute_logps(model, PROMPTS, COMPLETIONS)
    choose_forward_pass(forward_pass, model, training=False)  # of a model that is not trained
    assert forward_pass.packing == "sdpa"


def test_values_of_a_critic_are_exact(caplog):
    config = build("nemotron").config
    config.num_labels = 1
    critic = transformers.AutoModelForTokenClassification.from_config(config)
    disable_dropout_in_model(critic)
    forward_pass = ForwardPass(critic, CPU)
    choose_forward_pass(forward_pass, critic, values=True)
    assert forward_pass.packing is None and "nemotron" in caplog.text
    with torch.no_grad():
        for row_values, prompt, completion in zip(
            forward_pass.values(critic, PROMPTS, COMPLETIONS), PROMPTS, COMPLETIONS, strict=True
        ):
            expected = critic(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1, 0]
            torch.testing.assert_close(row_values, expected, rtol=1e-4, atol=1e-5)


def test_noise_that_layers_keep_as_numbers():
    """PhiMoE's router and OPT's dropout are no modules of dropout."""
    for model_type, names in {"opt": ("dropout",), "phimoe": ("router_jitter_noise",)}.items():
        model = transformers.AutoModelForCausalLM.from_config(build(model_type).config)
        rates = [vars(m)[name] for m in model.modules() for name in names if name in vars(m)]
        disable_noise(model, None)
        assert any(rates)
        assert not any(vars(m)[name] for m in model.modules() for name in names if name in vars(m))


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "factor": 4.0,
    "original_max_position_embeddings": 12,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


def test_what_is_refused_would_be_wrong():
    """Log-probs of a short sequence beside a long one."""
    forward_pass = scorer_of(model := tiny_model(rope_parameters=LONGROPE))
    forward_pass.max_length = None
    with torch.no_grad():
        beside, alone = (
            forward_pass.compute_logps(model, [[5, 6, 7], [8] * n], [[20, 21], [30]]).logps[0] for n in (13, 1)
        )
    assert (beside - alone).abs().max() > 0.01


@pytest.mark.parametrize("rope", [LONGROPE, DYNAMIC], ids=["longrope", "dynamic"])
@pytest.mark.parametrize("packing", ["auto", "never"])
def test_positions_that_depend_on_the_longest_sequence(rope, packing):
    model = tiny_model(rope_parameters=rope, max_position_embeddings=12)
    forward_pass = scorer_of(model, packing=packing)
    assert forward_pass.max_length == 12
    prompts, completions = [[5, 6, 7], [8]], [[*range(20, 29)], [30]]
    with torch.no_grad():
        logps = forward_pass.compute_logps(model, prompts, completions).logps
        alone = forward_pass.compute_logps(model, prompts[1:], completions[1:]).logps
        torch.testing.assert_close(logps[1], alone[0], rtol=1e-5, atol=2e-6)
        with pytest.raises(ValueError, match="13 tokens.*max_completion_length"):
            forward_pass.compute_logps(model, [[5, 6, 7, 8], [8]], completions)


def test_a_run_whose_prompts_and_completions_are_too_long(tmp_path):
    model = tiny_model(rope_parameters=LONGROPE | {"original_max_position_embeddings": 16})
    with pytest.raises(ValueError, match="original_max_position_embeddings=16. Lower max_completion_length"):
        build_trainer(tmp_path, model=model)


@pytest.fixture
def path(tmp_path) -> str:
    """A model whose layers do not pass the inputs of packing on."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    ids = {"pad_token_id": TOKENIZER.pad_token_id, "eos_token_id": TOKENIZER.eos_token_id, "bos_token_id": None}
    config = transformers.NemotronConfig(vocab_size=len(TOKENIZER), intermediate_size=64, **sizes, **ids)
    transformers.NemotronForCausalLM(config).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_the_choice_is_made_before_training(tmp_path, path, caplog):
    trainer = build_trainer(tmp_path, model=path, replay=Replay(), beta=0.1)
    assert trainer.forward_pass.packing == trainer.ref_pass.packing == "sdpa"
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert trainer.forward_pass.packing is trainer.ref_pass.packing is None and "nemotron" in caplog.text
    assert trainer.update.driver.limits.padded
    with pytest.raises(TypeError):
        build_trainer(tmp_path, model=path, replay=Replay(), startup_check=False).train()


def test_evaluation_without_training_is_checked(tmp_path, path):
    trainer = build_trainer(tmp_path, model=path, replay=Replay())
    trainer.evaluate(trainer.train_dataset.select(range(2)))
    assert trainer.forward_pass.packing is None
