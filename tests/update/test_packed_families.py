"""Families with windows, attention sinks, soft caps, wide heads, convolutions, linear attention, and state-space
layers are packed exactly, and the comparison notices each of these mechanisms."""

import pytest
import torch
from support.architectures import build
from support.seeds import shifted
from torch.overrides import TorchFunctionMode

from pacs_trl.update import packed_states, packing
from pacs_trl.update.forward_pass import ForwardPass, fused_head
from pacs_trl.update.packed_states import RecurrenceBatches, Segments


# Model types, with the attention that they are loaded with. All have layers with a window of 16 tokens, most beside
# layers with full attention, whose heads have a width of 512 in Gemma 4.
FAMILIES = [
    *(("sdpa", name) for name in ("cohere2", "exaone4", "gemma2", "gemma3_text", "gemma4_text", "gemma3n_text")),
    *(("sdpa", name) for name in ("ministral", "mistral", "olmo3")),
    *(("eager", name) for name in ("gemma2", "gpt_oss")),
]
# Model types with convolutions of 3 or 4 tokens, and with a recurrence of each kind.
RECURRENT = ["granitemoehybrid", "kimi_linear", "qwen3_5_text"]
CONVOLUTIONAL = ["lfm2", *RECURRENT]
MORE_CONVOLUTIONAL = ["bamba", "falcon_h1", "lfm2_moe", "mamba2", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text"]
MORE_CONVOLUTIONAL += ["qwen3_next", "zamba2"]
LENGTHS = [(20, 30), (20, 5), (20, 19), (7, 40)]  # of prompts, the first of which is the same three times


class Micro:
    """Rollouts that are longer than the windows, and random weights of their tokens."""

    def __init__(self):
        generator = torch.Generator().manual_seed(shifted(1))
        shared, other, *self.completions = (
            torch.randint(5, 100, (n,), generator=generator).tolist() for n in (20, 7, *(n for _, n in LENGTHS))
        )
        self.prompts = [shared, shared, shared, other]
        self.weights = [torch.randn(n, generator=generator) for _, n in LENGTHS]

    def packed(self, model, *micro_batches: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-probs of micro-batches and the gradient of their weighted sum."""
        forward_pass, logps = ForwardPass(model, torch.device("cpu")), {}
        assert forward_pass.packing == "sdpa"
        model.zero_grad()
        for indices in micro_batches:
            rollouts = ([ids[i] for i in indices] for ids in (self.prompts, self.completions))
            with fused_head(model), forward_pass.attention():
                logps |= dict(zip(indices, forward_pass.compute_logps(model, *rollouts).logps, strict=True))
                sum(torch.dot(logps[i], self.weights[i].to(logps[i].dtype)) for i in indices).backward()
        return torch.cat([logps[i].detach() for i in sorted(logps)]), gradient(model)

    def alone(self, model) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the same from the model's logits for one sequence at a time."""
        model.zero_grad()
        logps = []
        for prompt, completion, weight in zip(self.prompts, self.completions, self.weights, strict=True):
            logits = model(input_ids=torch.tensor([prompt + completion]), use_cache=False).logits[0]
            values = logits[len(prompt) - 1 : -1].log_softmax(dim=-1)
            logps.append(values.gather(1, torch.tensor(completion)[:, None])[:, 0])
            torch.dot(logps[-1], weight.to(logits.dtype)).backward()
        return torch.cat(logps).detach(), gradient(model)


def gradient(model) -> torch.Tensor:
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])


def build_family(implementation: str, model_type: str) -> torch.nn.Module:
    model = build(model_type)
    if implementation == "sdpa" and not model._supports_sdpa:
        pytest.skip("this version of transformers has no SDPA for this model")
    model.set_attn_implementation(implementation)
    if model_type == "gemma2":
        for layer in model.model.layers:
            layer.self_attn.attn_logit_softcapping = 1.5  # of logits of about 1, instead of 50
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data -= parameter.data.mean() + 3  # states are kept longer than prompts
    return model


def error(computed: torch.Tensor, expected: torch.Tensor) -> float:
    return ((computed - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize(
    "implementation, model_type",
    [
        *FAMILIES,
        *(("sdpa", name) for name in CONVOLUTIONAL),
        *(pytest.param("sdpa", name, marks=pytest.mark.slow) for name in MORE_CONVOLUTIONAL),
    ],
)
def test_families_are_packed_exactly(implementation, model_type):
    model, micro = build_family(implementation, model_type), Micro()
    logps, packed_gradient = micro.packed(model, [0, 1, 2, 3])
    expected_logps, expected_gradient = micro.alone(model)
    torch.testing.assert_close(logps, expected_logps, rtol=0, atol=1e-4)
    assert error(packed_gradient, expected_gradient) < 1e-4


class Float64(TorchFunctionMode):
    """Computes in float64 what modeling files cast to float32: recurrences, norms, and the softmax of attention."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = {key: self._dtype(value) for key, value in (kwargs or {}).items()}
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        return function(*map(self._dtype, args), **kwargs)

    def _dtype(self, argument):
        return torch.float64 if argument is torch.float32 else argument


@pytest.mark.parametrize("model_type", ["gemma2", "gemma4_text", "gpt_oss", "mistral", *CONVOLUTIONAL, "zamba2"])
def test_any_split_into_micro_batches_has_the_same_gradient(model_type):
    implementation = "eager" if model_type in ("gemma2", "gpt_oss") else "sdpa"
    model, micro = build_family(implementation, model_type).double(), Micro()
    model.config._experts_implementation = "eager"  # grouped products of experts exist in float32 only
    with Float64():
        _, together = micro.packed(model, [0, 1, 2, 3])
        for split in ([[0], [1], [2], [3]], [[0, 3], [1, 2]], [[2, 0], [3, 1]]):
            # 5e-8 were measured: the fused head computes in float32
            assert error(micro.packed(model, *split)[1], together) < 1e-6


MUTATIONS = {
    "window one longer": lambda logits, sinks: (logits._replace(window=logits.window and logits.window + 1), sinks),
    "window one shorter": lambda logits, sinks: (logits._replace(window=logits.window and logits.window - 1), sinks),
    "soft cap": lambda logits, sinks: (logits._replace(softcap=2.0), sinks),
    "no soft cap": lambda logits, sinks: (logits._replace(softcap=None), sinks),
    "other sinks": lambda logits, sinks: (logits, sinks + 0.1),
    "no sinks": lambda logits, sinks: (logits, None),
}


@pytest.mark.parametrize(
    "implementation, model_type, mutation",
    [
        *((*family, f"window one {change}") for family in FAMILIES for change in ("longer", "shorter")),
        ("eager", "gemma2", "soft cap"),
        ("eager", "gemma2", "no soft cap"),
        ("eager", "gpt_oss", "other sinks"),
        ("eager", "gpt_oss", "no sinks"),
    ],
)
def test_the_comparison_notices_a_wrong_mechanism(monkeypatch, implementation, model_type, mutation):
    model, micro, attend = build_family(implementation, model_type), Micro(), packing.attend_packed

    def mutated(query, key, value, bounds, logits, sinks=None):
        return attend(query, key, value, bounds, *MUTATIONS[mutation](logits, sinks))

    expected_logps, expected_gradient = micro.alone(model)
    monkeypatch.setattr(packing, "attend_packed", mutated)
    logps, packed_gradient = micro.packed(model, [0, 1, 2, 3])
    assert (logps - expected_logps).abs().max() > 1e-3 and error(packed_gradient, expected_gradient) > 1e-3


def without_bounds(segments, num_previous):
    tokens = torch.arange(segments.num_tokens)
    return tokens, tokens < 0, tokens


def with_zeros(segments, num_previous):
    inputs, is_zero, outputs = WITH_PREVIOUS(segments, num_previous)
    return inputs, torch.ones(len(inputs), dtype=torch.bool).index_fill(0, outputs, False), outputs


def changed(**changes):
    """Return what changes the batches of completions."""

    def batches(segments, chunk):
        prompts, completions, outputs = BATCHES(segments, chunk)
        completions = [
            batch._replace(**{name: change(getattr(batch, name)) for name, change in changes.items()})
            for batch in completions
        ]
        return RecurrenceBatches(prompts, completions, outputs)

    return batches


def with_tokens_as_padding(segments, chunk):
    prompts, *others = BATCHES(segments, chunk)
    prompts = [batch._replace(is_padding=torch.zeros_like(batch.is_padding)) for batch in prompts]
    return RecurrenceBatches(prompts, *others)


def as_one_sequence(segments, chunk):
    everything = Segments([(segments.num_tokens, [])], segments.device)
    return BATCHES(everything, chunk)


WITH_PREVIOUS, BATCHES = Segments.with_previous, Segments.batches
OTHER_STATES = {
    "convolution that leaks": ("with_previous", without_bounds),
    "convolution without the prompt": ("with_previous", with_zeros),
    "state that leaks": ("batches", as_one_sequence),
    "state of another prompt": ("batches", changed(first_states=lambda numbers: 1 - numbers)),
    "padding that is read": ("batches", with_tokens_as_padding),
}


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_has_the_same_gradient(use_reentrant):
    model, micro = build_family("sdpa", "qwen3_5_text"), Micro()
    expected_logps, expected_gradient = micro.packed(model, [0, 1, 2, 3])
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    calls, recur = [], packed_states._recur
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(packed_states, "_recur", lambda *args: calls.append(args) or recur(*args))
        logps, recomputed_gradient = micro.packed(model, [0, 1, 2, 3])
    assert len(calls) == 2  # of one layer
    assert torch.equal(logps, expected_logps) and error(recomputed_gradient, expected_gradient) < 1e-6


@pytest.mark.parametrize(
    "model_type, mutation",
    [
        (model_type, mutation)
        for model_type in CONVOLUTIONAL
        for mutation, (name, _) in OTHER_STATES.items()
        if name == "with_previous" or model_type in RECURRENT
    ],
)
def test_the_comparison_notices_a_wrong_state(monkeypatch, model_type, mutation):
    name, mutated = OTHER_STATES[mutation]
    model, micro = build_family("sdpa", model_type), Micro()
    expected_logps, expected_gradient = micro.alone(model)
    monkeypatch.setattr(Segments, name, mutated)
    logps, packed_gradient = micro.packed(model, [0, 1, 2, 3])
    assert (logps - expected_logps).abs().max() > 1e-3 and error(packed_gradient, expected_gradient) > 1e-3


@pytest.mark.parametrize("model_type", RECURRENT)
def test_the_comparison_notices_an_empty_initial_state(monkeypatch, model_type):
    recur = packed_states._recur
    forgetful = lambda function, *args: recur(lambda tokens, state: function(tokens, None), *args)  # noqa: E731
    model, micro = build_family("sdpa", model_type), Micro()
    expected_logps, expected_gradient = micro.alone(model)
    monkeypatch.setattr(packed_states, "_recur", forgetful)
    logps, packed_gradient = micro.packed(model, [0, 1, 2, 3])
    assert (logps - expected_logps).abs().max() > 1e-3 and error(packed_gradient, expected_gradient) > 1e-3


def test_sinks_are_trained():
    model, micro = build_family("eager", "gpt_oss"), Micro()
    micro.packed(model, [0, 1, 2, 3])
    assert all(layer.self_attn.sinks.grad.abs().min() > 0 for layer in model.model.layers)


def test_a_soft_cap_that_sdpa_ignores_warns_once(caplog):
    packing.warn_of_soft_cap.cache_clear()
    model = build_family("sdpa", "gemma2")
    for _ in range(2):
        ForwardPass(model, torch.device("cpu"))
    (record,) = caplog.records
    assert "attn_logit_softcapping=50" in record.getMessage() and "eager" in record.getMessage()
    ForwardPass(build_family("eager", "gemma2"), torch.device("cpu"))
    ForwardPass(build_family("sdpa", "gemma3_text"), torch.device("cpu"))
    assert len(caplog.records) == 1
