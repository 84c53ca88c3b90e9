"""Packed completions against padded ones, forward and backward, in three precisions and with each attention kernel."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from support.seeds import shifted

from benchmarks.recorded import Size, build_model, kernels_of, recorded_rollouts, shape_of
from pacs_trl.update import compiled_layers, packed_attention
from pacs_trl.update.compiled_layers import CompiledLayers
from pacs_trl.update.forward_pass import ForwardPass, fused_head
from pacs_trl.update.packed_attention import (
    Bounds,
    ExplicitTiles,
    FlashAttention4,
    LogitRule,
    VarlenKernel,
    attend_packed,
)
from pacs_trl.update.packing import PackedRollouts


# Float32 leaves the order of sums: of a log-prob over a vocabulary and some layers, of a gradient over all tokens.
MAX_LOGP_ERROR, MAX_GRADIENT_ERROR = 1e-3, 1e-4


def compare_layouts(
    device: str,
    model: str,
    attention: str,
    completion_max: int,
    layouts: tuple[str, ...] = ("padded", "packed"),
    model_type: str = "qwen3",
) -> list[dict]:
    """Compute log-probs, entropies, and gradients, padded, packed, and packed in compiled layers; `attention` is that
    of packed completions."""
    if device == "cpu":
        compiled_layers.BACKEND = "aot_eager"
    size = Size(shape_of(model), completion_max, 4, 2, bf16=False)
    rollouts = recorded_rollouts(size, 2, num_generations=4)
    settings = {"initializer_range": 0.05, "attn_implementation": "sdpa", "model_type": model_type}
    policy = build_model(size.shape, device, **settings).eval()
    rows, reference = [], None
    for precision in ("float32", "autocast", "bfloat16"):
        if precision == "bfloat16":
            policy.to(torch.bfloat16)
        for layout in layouts:
            if attention != "sdpa" and layout != "padded" and precision == "float32":
                continue  # these kernels know half precisions only
            policy.set_attn_implementation("sdpa" if layout == "padded" else attention)
            with kernels_of(attention):
                passes = compute(policy, rollouts, device, layout, autocast=precision == "autocast")
            reference = reference or passes
            named = {"precision": precision, "layout": layout, "attention": policy.config._attn_implementation}
            rows.append(named | differences(passes, reference))
    return rows


def compute(policy, rollouts: list[dict], device: str, layout: str, *, autocast: bool) -> dict[str, torch.Tensor]:
    """Return log-probs and entropies of all tokens, and the gradient, where the weights are. One group per forward
    pass; the loss is the mean log-prob of every other completion, minus the others."""
    forward_pass = ForwardPass(
        policy,
        torch.device(device),
        packing="never" if layout == "padded" else "auto",
        autocast=lambda: torch.autocast(device, dtype=torch.bfloat16, enabled=autocast),
    )
    if layout == "compiled":
        forward_pass.compiled_layers = CompiledLayers(policy)
    results: dict[str, list[torch.Tensor]] = {"logps": [], "entropies": []}
    policy.zero_grad()
    with fused_head(policy):
        for start in range(0, len(rollouts), 4):
            prompts, completions = (
                [np.asarray(r[name], np.int32) for r in rollouts[start : start + 4]]
                for name in ("prompt_ids", "completion_ids")
            )
            with forward_pass.attention():
                scores = forward_pass.compute_logps(policy, prompts, completions)
                sum((1 - 2 * (i % 2)) * logps.mean() for i, logps in enumerate(scores.logps)).backward()
            for name in results:
                results[name] += [values.detach().float() for values in getattr(scores, name)]
    results["gradient"] = [weight.grad.float().flatten() for weight in policy.parameters()]
    return {name: torch.cat(parts) for name, parts in results.items()}


def differences(passes: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return absolute differences in nats, and the norm of the gradient's difference relative to the gradient."""
    apart = {name: (values - reference[name]).abs() for name, values in passes.items()}
    errors = {"gradient": (apart.pop("gradient").norm() / reference["gradient"].norm()).item()}
    for name, values in apart.items():
        errors |= {f"{name}, mean": values.mean().item(), f"{name}, max": values.max().item()}
    return errors


KERNELS = [
    "sdpa",
    pytest.param(
        "flash_attention_2", marks=pytest.mark.needs(cuda=True, package="flash_attn.flash_attn_interface"), id="flash2"
    ),
    pytest.param("flash_attention_3", marks=pytest.mark.needs(cuda=True, package="flash_attn_interface"), id="flash3"),
    pytest.param("flash_attention_4", marks=pytest.mark.needs(cuda=True, package="flash_attn.cute"), id="flash4"),
]
MODELS = [
    "small",
    pytest.param("Qwen3-1.7B", marks=pytest.mark.needs(cuda=True, gib=60)),
]


@pytest.mark.parametrize("attention", KERNELS)
@pytest.mark.parametrize("model", MODELS)
def test_packed_equals_padded(alone, device, record_property, model, attention):
    """Float32 agrees up to the order of sums; in half precision, packing loses at most twice what padding loses."""
    longest = {"small": 512, "Qwen3-1.7B": 1024}[model]
    sizes = (model, attention, longest) if device == "cuda" else ("tiny", attention, 24)
    rows = alone(compare_layouts, device, *sizes)
    record_property("rows", rows)
    check(rows, "packed", attention)


@pytest.mark.skipif(find_spec("fla") is not None, reason="flash-linear-attention takes no float32")
@pytest.mark.parametrize("model_type", ["granitemoehybrid", "lfm2", "qwen3_5_text"])
def test_states_of_packed_completions_equal_padded_ones(alone, device, record_property, model_type):
    """The same of convolutions and recurrences, in float32 and in half precision."""
    model, longest = ("small", 512) if device == "cuda" else ("tiny", 24)
    rows = alone(compare_layouts, device, model, "sdpa", longest, ("padded", "packed"), model_type)
    record_property("rows", rows)
    check(rows, "packed", "sdpa")


@pytest.mark.slow
@pytest.mark.parametrize("attention", KERNELS)
@pytest.mark.parametrize("model", MODELS)
def test_compiled_equals_padded(alone, device, record_property, model, attention):
    """The same of packed completions in compiled layers."""
    longest = {"small": 512, "Qwen3-1.7B": 1024}[model]
    sizes = (model, attention, longest) if device == "cuda" else ("tiny", attention, 24)
    rows = alone(compare_layouts, device, *sizes, ("padded", "compiled"))
    record_property("rows", rows)
    check(rows, "compiled", attention)


def check(rows: list[dict], layout: str, attention: str) -> None:
    errors = {(row["precision"], row["layout"]): row for row in rows}
    assert errors["float32", "padded"]["gradient"] == 0.0
    if attention == "sdpa":
        assert errors["float32", layout]["logps, max"] < MAX_LOGP_ERROR
        assert 0.0 < errors["float32", layout]["gradient"] < MAX_GRADIENT_ERROR
    for precision in ("autocast", "bfloat16"):
        packed, padded = errors[precision, layout], errors[precision, "padded"]
        assert packed["gradient"] > MAX_GRADIENT_ERROR  # float32 is far from it
        for name in ("logps, mean", "entropies, mean", "gradient"):
            assert packed[name] <= 2 * padded[name] + 1e-6, (precision, name)


def test_the_comparison_notices_a_wrong_layout(monkeypatch):
    """Positions that continue from completion to completion are far from padded ones."""
    packed_inputs = ForwardPass._packed_inputs

    def shifted(self, *rows):
        model_inputs = packed_inputs(self, *rows)
        inputs = model_inputs.inputs
        return model_inputs._replace(inputs={**inputs, "position_ids": inputs["position_ids"].sort().values})

    monkeypatch.setattr(ForwardPass, "_packed_inputs", shifted)
    rows = compare_layouts("cpu", "tiny", "sdpa", 24)
    assert rows[1]["layout"] == "packed" and rows[1]["gradient"] > MAX_GRADIENT_ERROR


@pytest.mark.parametrize(
    "kernel, head, window, softcap",
    [
        *((VarlenKernel, 64, window, None) for window in (None, 32)),
        *(
            pytest.param(FlashAttention4, *settings, marks=pytest.mark.needs(cuda=True, package="flash_attn.cute"))
            for settings in ((64, None, None), (128, 32, None), (256, None, None), (128, 32, 5.0))
        ),
        (ExplicitTiles, 512, 32, None),
        (ExplicitTiles, 64, None, 5.0),
    ],
)
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.needs(cuda=True)
def test_kernels_see_prompt_and_branch(monkeypatch, kernel, head, window, softcap, with_sinks):
    """Kernels in bfloat16, forward and backward, against explicit matrix products in float32."""
    rollouts = PackedRollouts([np.arange(41)] * 3 + [np.arange(7)], [np.zeros(n, dtype=int) for n in (5, 0, 90, 30)])
    shapes = [(1, heads, len(rollouts.ids), head) for heads in (4, 2, 2)]
    bounds = Bounds(**{k: v.cuda() if torch.is_tensor(v) else v for k, v in rollouts.kernel_inputs().items()})
    rule, results = LogitRule(head**-0.5, window, softcap), []
    for dtype, chosen in ((torch.float32, ExplicitTiles), (torch.bfloat16, kernel)):
        generator = torch.Generator().manual_seed(shifted(0))
        inputs = [torch.randn(s, generator=generator).to("cuda", dtype).requires_grad_() for s in shapes]
        sinks = torch.linspace(-1.0, 2.0, 4).to("cuda", dtype).requires_grad_() if with_sinks else None
        monkeypatch.setattr(packed_attention, "kernel_of", lambda *args, chosen=chosen: chosen)
        out = attend_packed(*inputs, bounds, rule, sinks)
        inputs += [sinks] if with_sinks else []
        results.append([out, *torch.autograd.grad(out.float().square().sum(), inputs)])
    for expected, value in zip(*results, strict=True):
        assert (value.float() - expected).norm() < 0.02 * expected.norm()


@pytest.mark.needs(cuda=True)
@pytest.mark.parametrize("head, dtype, kernel", [(64, torch.bfloat16, "fast"), (512, torch.bfloat16, "explicit")])
def test_the_kernel_of_a_gpu(head, dtype, kernel):
    states = [torch.zeros(1, heads, 10, head, device="cuda", dtype=dtype) for heads in (4, 2, 2)]
    fast = packed_attention.kernel_of(*states, LogitRule(1.0)) in (VarlenKernel, FlashAttention4)
    assert fast == (kernel == "fast")
