"""The attention of packed rollouts: every kernel equals a dense formula in values and gradients, and compiled layers
contain it without a graph break."""

import inspect
import itertools
import math
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from support.largest_tensor import LargestTensor
from support.models import tiny_model
from support.seeds import shifted
from torch._dynamo.utils import counters

from pacs_trl.update import packed_attention, packing
from pacs_trl.update.forward_pass import ForwardPass, fused_head
from pacs_trl.update.minibatch import FILLER
from pacs_trl.update.packed_attention import (
    Bounds,
    ExplicitTiles,
    FlashAttention4,
    FlashTiles,
    LogitRule,
    Tile,
    VarlenKernel,
    attend_packed,
    tiles_of,
)
from pacs_trl.update.packing import PackedRollouts


LENGTHS = [[5, 1, 4, 7], [3], [2, 9, 1]]  # of segments; texts of one segment share nothing
LONG = [[30, 70, 5], [80], [100, 20, 140]]  # several blocks of every tiled kernel


def attention_inputs(texts, dtype=torch.float64, head=8, value_head=None):
    """Packed rollouts of such segments, and random queries, keys and values of 4 heads on 2."""
    prompts, completions = [], []
    for number, (first, *branches) in enumerate(texts):
        prompts += [np.full(first, number)] * (len(branches) or 1)
        completions += [np.zeros(n + 1, dtype=int) for n in branches] or [np.zeros(0, dtype=int)]
    rollouts = PackedRollouts(prompts, completions)
    assert rollouts.blocks == texts
    generator = torch.Generator().manual_seed(shifted(0))
    shapes = [(1, heads, len(rollouts.ids), width) for heads, width in ((4, head), (2, head), (2, value_head or head))]
    return rollouts, [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def bounds_of(rollouts: PackedRollouts) -> Bounds:
    return Bounds(**rollouts.kernel_inputs())


def with_gradients(out: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [out, *torch.autograd.grad(out.square().sum(), inputs)]


def visible(rollouts: PackedRollouts, window: int | None) -> torch.Tensor:
    """Return the mask over all pairs of tokens."""
    text = torch.repeat_interleave(torch.tensor([sum(text) for text in rollouts.blocks]))
    segment = torch.repeat_interleave(torch.tensor([n for text in rollouts.blocks for n in text]))
    in_prompt = torch.cat([torch.arange(sum(text)) < (text[0] if len(text) > 1 else 0) for text in rollouts.blocks])
    position = torch.from_numpy(rollouts.positions)
    steps = position[:, None] - position
    near = (steps >= 0) & (steps < (window or len(position)))
    return near & (text[:, None] == text) & (in_prompt | (segment[:, None] == segment))


def by_masks(rollouts, query, key, value, rule: LogitRule, sinks=None) -> torch.Tensor:
    """Dense attention; a sink is one more key without a value."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = query @ key.mT * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    scores = scores.masked_fill(~visible(rollouts, rule.window), -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2)


KERNELS = {"flash tiles": FlashTiles, "explicit tiles": ExplicitTiles, "variable length": VarlenKernel}
WINDOWS = [None, 1, 2, 5, 8, 16]


@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kernel", [*KERNELS, "heads of torch 2.11"])
def test_every_kernel_equals_a_dense_mask(monkeypatch, kernel, window, with_sinks):
    rollouts, inputs = attention_inputs(LENGTHS)
    use_kernel(monkeypatch, kernel)
    rule = LogitRule(0.7, window)
    sinks = torch.linspace(-1.0, 2.0, 4, dtype=torch.float64).requires_grad_() if with_sinks else None
    inputs += [sinks] if with_sinks else []
    out = attend_packed(*inputs[:3], bounds_of(rollouts), rule, sinks)
    expected = by_masks(rollouts, *inputs[:3], rule, sinks)
    for one, other in zip(with_gradients(out, inputs), with_gradients(expected, inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def use_kernel(monkeypatch, name: str) -> None:
    monkeypatch.setattr(packed_attention, "_VARLEN_IS_GROUPED", name != "heads of torch 2.11")
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", varlen_forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", varlen_backward)
    monkeypatch.setattr(packed_attention, "kernel_of", lambda *args: KERNELS.get(name, VarlenKernel))


@pytest.mark.parametrize("window", [None, 3, 64, 65, 90, 129, 150, 300])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_tiles_of_long_segments_equal_a_dense_mask(window, softcap):
    """The CPU's kernels; those with a soft cap are explicit."""
    rollouts, inputs = attention_inputs(LONG)
    rule = LogitRule(0.4, window, softcap)
    computed = with_gradients(attend_packed(*inputs, bounds_of(rollouts), rule), inputs)
    expected = with_gradients(by_masks(rollouts, *inputs, rule), inputs)
    for one, other in zip(computed, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window, softcap, head", [(None, None, 8), (20, None, 8), (20, 2.0, 8), (None, None, 512)])
def test_lower_precisions_are_near_float64(dtype, window, softcap, head):
    rollouts, inputs = attention_inputs(LONG, head=head)
    rule = LogitRule(head**-0.5, window, softcap)
    expected = with_gradients(by_masks(rollouts, *inputs, rule), inputs)
    inputs = [x.detach().to(dtype).requires_grad_() for x in inputs]
    computed = with_gradients(attend_packed(*inputs, bounds_of(rollouts), rule), inputs)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    for value, other in zip(computed, expected, strict=True):
        assert value.dtype == dtype
        assert (value.double() - other).norm() < tolerance * other.norm()


@pytest.fixture
def flash_4(monkeypatch):
    """Modules in place of FlashAttention 4 that compute what it does, by loops, for tensors on the CPU."""
    modules = {name: ModuleType(name) for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface")}
    modules["flash_attn.cute.interface"].flash_attn_varlen_func = flash_4_forward
    modules["flash_attn.cute.interface"]._flash_attn_bwd = flash_4_backward
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(packed_attention, "is_flash_attn_4_available", lambda: True)
    monkeypatch.setattr(packed_attention, "kernel_of", lambda *args: FlashAttention4)
    packed_attention.flash_attention_4.cache_clear()
    yield
    packed_attention.flash_attention_4.cache_clear()


def flash_4_forward(query, key, value, *, window_size, return_lse, **settings):
    assert return_lse and not torch.is_grad_enabled()
    bounds, scale, windows = flash_4_settings(settings, *window_size)
    return (*varlen_forward(query, key, value, *bounds, 0.0, not window_size[0], False, scale=scale, **windows)[:2],)


def flash_4_backward(query, key, value, out, gradient, log_sum, *, window_size_left, window_size_right, **settings):
    bounds, scale, windows = flash_4_settings(settings, window_size_left, window_size_right)
    states = gradient, query, key, value, out, log_sum
    return varlen_backward(*states, *bounds, 0.0, window_size_left is None, None, None, scale=scale, **windows)


def flash_4_settings(settings: dict, left: int | None, right: int | None):
    assert settings.pop("causal") and settings.pop("softcap") == 0.0 and (left is None) == (right is None)
    scale = settings.pop("softmax_scale")
    windows = {"window_size_left": -1 if left is None else left, "window_size_right": 0}
    names = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    assert list(settings) == names
    return settings.values(), scale, windows


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
def test_flash_attention_4_is_called_with_prompt_and_branch(flash_4, window, with_sinks):
    """A stand-in; the package is not tested on GPU."""
    rollouts, inputs = attention_inputs(LENGTHS)
    rule, sinks = LogitRule(0.7, window), None
    if with_sinks:
        sinks = torch.linspace(-1.0, 2.0, 4, dtype=torch.float64).requires_grad_()
    tensors = inputs if sinks is None else [*inputs, sinks]
    computed = with_gradients(attend_packed(*inputs, bounds_of(rollouts), rule, sinks), tensors)
    expected = with_gradients(by_masks(rollouts, *inputs, rule, sinks), tensors)
    for one, other in zip(computed, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    "capability, dtype, heads, softcap, expected",
    [
        (9, torch.bfloat16, (128, 128), None, True),
        (9, torch.float16, (256, 256), 30.0, True),
        (9, torch.bfloat16, (512, 512), None, False),
        (9, torch.bfloat16, (100, 100), None, False),
        (9, torch.float32, (128, 128), None, False),
        (10, torch.bfloat16, (128, 128), 30.0, True),
        (10, torch.bfloat16, (192, 128), None, False),
        (10, torch.bfloat16, (256, 256), None, True),
        (10, torch.bfloat16, (256, 256), 30.0, False),
        (8, torch.bfloat16, (128, 128), None, False),
        (12, torch.bfloat16, (128, 128), None, False),
    ],
)
def test_where_flash_attention_4_is_used(capability, dtype, heads, softcap, expected):
    assert packed_attention.has_flash_attention_4(capability, dtype, *heads, LogitRule(1.0, None, softcap)) is expected


def test_kernels_are_chosen_by_head_size_and_installed_packages(monkeypatch):
    """By the properties of tensors that are on a GPU, without one."""

    def states(dtype: torch.dtype, head: int) -> list:
        return [SimpleNamespace(is_cuda=True, device="cuda", dtype=dtype, shape=(1, 4, 10, head)) for _ in range(3)]

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(packed_attention, "takes_varlen", lambda query, *states: query.shape[-1] <= 256)
    for module, kernel in ((ModuleType("interface"), FlashAttention4), (None, VarlenKernel)):
        monkeypatch.setattr(packed_attention, "flash_attention_4", lambda module=module: module)
        assert packed_attention.kernel_of(*states(torch.bfloat16, 128), LogitRule(1.0, 16)) is kernel
    wide = states(torch.bfloat16, 512)
    wide[0].device = torch.device("cuda")
    assert packed_attention.kernel_of(*wide, LogitRule(1.0)) is ExplicitTiles


def test_values_wider_than_keys_equal_a_dense_mask():
    rollouts, inputs = attention_inputs(LENGTHS, value_head=12)
    rule = LogitRule(0.5, 6)
    computed = with_gradients(attend_packed(*inputs, bounds_of(rollouts), rule), inputs)
    for one, other in zip(computed, with_gradients(by_masks(rollouts, *inputs, rule), inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_tiles_equal_those_worked_by_hand():
    """A prompt of 3 tokens with branches of 2 and 4, and 2 tokens that share nothing."""
    bounds = bounds_of(attention_inputs([[3, 2, 4], [2]])[0])
    segment_tiles = [Tile(slice(a, b), slice(a, b), 0) for a, b in ((0, 3), (3, 5), (5, 9), (9, 11))]
    assert tiles_of(bounds, None) == tiles_of(bounds, 7) == (segment_tiles, [Tile(slice(3, 9), slice(0, 3), None)])
    same_segment, shared_prompt = tiles_of(bounds, 3)
    assert same_segment[2:4] == [Tile(slice(5, 8), slice(5, 8), 0), Tile(slice(8, 9), slice(6, 9), 2)]
    # a window of 3 tokens: the first two tokens of a branch attend to the last two and the last token of the prompt
    assert shared_prompt == [Tile(slice(3, 5), slice(1, 3), 2), Tile(slice(5, 7), slice(1, 3), 2)]


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_the_operator_is_registered_completely(window, with_sinks):
    rollouts, inputs = attention_inputs(LENGTHS)
    sinks = torch.ones(4, dtype=torch.float64).requires_grad_() if with_sinks else None
    bounds = bounds_of(rollouts)
    torch.library.opcheck(packed_attention._attend, (*inputs, sinks, *bounds, 0.5, window, None))


def varlen_forward(query, key, value, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale, **windows):
    """What PyTorch's variable-length FlashAttention computes, by loops; its kernel runs on CUDA only. Causal, aligned
    at the last query and the last key."""
    assert (max_q, max_k) == (cu_q.diff().max(), cu_k.diff().max()) and cu_q.dtype == cu_k.dtype == torch.int32
    assert dropout == 0.0 and causal == (windows["window_size_left"] == -1) and windows["window_size_right"] == 0
    out, sums = [], []
    for part, keys in segments(cu_q, cu_k):
        scores = segment_scores(query[part], key[keys], scale, **windows)
        sums.append(scores.logsumexp(dim=-1))
        out.append((scores.softmax(dim=-1) @ by_heads(value[keys], query)).transpose(0, 1))
    return torch.cat(out), torch.cat(sums, dim=1), None, None, None


def varlen_backward(
    gradient,
    query,
    key,
    value,
    out,
    log_sum,
    cu_q,
    cu_k,
    max_q,
    max_k,
    dropout,
    causal,
    state,
    unused,
    *,
    scale,
    **windows,
):
    """The gradients of this output for any output and log-sum-exp that it is given, as the kernel computes them."""
    gradients = [torch.zeros_like(x) for x in (query, key, value)]
    groups = query.shape[1] // key.shape[1]
    for part, keys in segments(cu_q, cu_k):
        weights = (segment_scores(query[part], key[keys], scale, **windows) - log_sum[:, part, None]).exp()
        heads = [x.transpose(0, 1) for x in (gradient[part], out[part], query[part])]
        change = heads[0] @ by_heads(value[keys], query).mT - (heads[0] * heads[1]).sum(-1, keepdim=True)
        score_gradient = weights * change * scale
        parts = (
            score_gradient @ by_heads(key[keys], query),
            (score_gradient.mT @ heads[2]).unflatten(0, (-1, groups)).sum(1),
            (weights.mT @ heads[0]).unflatten(0, (-1, groups)).sum(1),
        )
        for whole, tokens, values in zip(gradients, (part, keys, keys), parts, strict=True):
            whole[tokens] += values.transpose(0, 1)
    return gradients


def segments(cu_q, cu_k):
    bounds = (x.tolist() for x in (cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:]))
    return [(slice(q0, q1), slice(k0, k1)) for q0, q1, k0, k1 in zip(*bounds, strict=True)]


def by_heads(states, query):
    return states.transpose(0, 1).repeat_interleave(query.shape[1] // states.shape[1], dim=0)


def segment_scores(query, key, scale, window_size_left, window_size_right):
    steps = torch.arange(len(query))[:, None] + len(key) - len(query) - torch.arange(len(key))
    seen = (steps >= -window_size_right) & ((steps <= window_size_left) | (window_size_left < 0))
    return (query.transpose(0, 1) @ by_heads(key, query).mT * scale).masked_fill(~seen, -math.inf)


def test_the_stand_ins_are_called_as_the_kernels_are():
    for stand_in, kernel in ((varlen_forward, "forward"), (varlen_backward, "backward")):
        operator = getattr(torch.ops.aten, f"_flash_attention_{kernel}").default
        names = [argument.name for argument in operator._schema.arguments]
        positional = [argument.name for argument in operator._schema.arguments if not argument.kwarg_only]
        parameters = inspect.signature(stand_in).parameters.values()
        assert len(positional) == sum(p.kind == p.POSITIONAL_OR_KEYWORD for p in parameters)
        assert {"scale", "window_size_left", "window_size_right"} <= set(names)
    assert not packed_attention.takes_varlen(*attention_inputs(LENGTHS)[1])  # on a CPU


@pytest.mark.parametrize("window", [None, 64])
def test_attention_to_a_long_prompt_takes_memory_for_its_tokens_only(window):
    """Behind a prompt of 300 tokens no mask over branch and prompt, (100, 400), nor copies of the prompt's keys are
    made."""
    rollouts, inputs = attention_inputs([[300, 100, 60, 40], [250]], dtype=torch.float32, head=4)
    inputs, settings = [x.detach() for x in inputs], (bounds_of(rollouts), LogitRule(0.5, window))
    with LargestTensor() as largest:
        out, log_sum = FlashTiles.forward(*inputs, *settings)
        FlashTiles.backward(out, *inputs, out, log_sum, *settings)
    assert largest.elements == inputs[0].numel() == 4 * 750 * 4


def flash_attention(module, query, key, value, mask, cu_seq_lens_q, cu_seq_lens_k, scaling=None, **kwargs):
    """What FlashAttention's variable-length kernel computes."""
    assert module.config._attn_implementation == "flash_attention_2"  # the kernels are looked up by it
    tokens = (x[0].transpose(0, 1) for x in (query, key, value))
    bounds = cu_seq_lens_q, cu_seq_lens_k, kwargs["max_length_q"], kwargs["max_length_k"]
    windows = {"window_size_left": -1, "window_size_right": 0}
    return varlen_forward(*tokens, *bounds, 0.0, True, False, scale=scaling, **windows)[0][None], None


PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
COMPLETIONS = [[20, 21], [30, 31, 32, 33], [40]]
SHARED = (
    [[5, 6, 7], [8], [5, 6, 7], [9, 10, 11, 12, 13], [8], [5, 6, 7]],
    [[20, 21], [30, 31, 32, 33], [22], [40], [], [23, 24, 25]],
)


@pytest.mark.parametrize("rollouts", [(PROMPTS, COMPLETIONS), SHARED], ids=["all differ", "shared"])
def test_flash_kernels_see_prompt_and_branch(monkeypatch, rollouts):
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "flash_attention_2", flash_attention)
    model = tiny_model()
    with torch.no_grad(), fused_head(model):
        expected = ForwardPass(model, torch.device("cpu")).compute_logps(model, *rollouts)
        model.config._attn_implementation = "flash_attention_2"
        forward_pass = ForwardPass(model, torch.device("cpu"))
        assert forward_pass.packing == "flash"
        computed = forward_pass.compute_logps(model, *rollouts)
    for part, other in zip(computed, expected, strict=True):
        torch.testing.assert_close(torch.cat(part), torch.cat(other), rtol=1e-5, atol=2e-6)


def test_dropout_is_that_of_each_segment():
    """Of equal segments, so that the same random numbers fall on the same weights."""
    rollouts, inputs = attention_inputs([[6], [9]], dtype=torch.float32)
    torch.manual_seed(shifted(0))
    computed, _ = packing._packed_sdpa(None, *inputs, None, dropout=0.5, **rollouts.kernel_inputs())
    torch.manual_seed(shifted(0))
    key, value = (x.repeat_interleave(2, dim=1) for x in inputs[1:])
    parts = [[x[:, :, part] for x in (inputs[0], key, value)] for part in (slice(0, 6), slice(6, 15))]
    outputs = [F.scaled_dot_product_attention(*part, dropout_p=0.5, is_causal=True) for part in parts]
    torch.testing.assert_close(computed, torch.cat(outputs, dim=2).transpose(1, 2))


@torch.library.custom_op("pacs_trl_tests::flash", mutates_args=())
def flash_operator(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, longest: int) -> torch.Tensor:
    return query.clone()  # what it computes does not matter for the number of graphs


flash_operator.register_fake(lambda query, key, value, longest: torch.empty_like(query))
flash_operator.register_autograd(lambda ctx, gradient: (gradient, None, None, None))


def opaque_flash_attention(module, query, key, value, mask, max_length_q, max_length_k, **kwargs):
    assert module.config._attn_implementation == "flash_attention_2"
    return flash_operator(*(x.transpose(1, 2).contiguous() for x in (query, key, value)), max_length_q), None


class CompiledLayers:
    """A model whose decoder layers are compiled."""

    def __init__(self, model):
        torch._dynamo.reset()
        counters.clear()
        for layer in model.model.layers:
            layer.forward = torch.compile(layer.forward, dynamic=True, backend="aot_eager")
        self.model, self.forward_pass = model, ForwardPass(model, torch.device("cpu"))
        self.generator = np.random.default_rng(shifted(0))

    def new_graphs(self, groups: int, size: int, gradient: bool = True) -> int:
        """Return how many graphs are new in a forward and, with `gradient`, backward pass of groups of such a size."""

        def sample(longest: int) -> list[int]:
            return self.generator.integers(3, 60, int(self.generator.integers(2, longest))).tolist()

        prompts = [prompt for _ in range(groups) for prompt in [sample(20)] * size]
        before = counters["stats"]["unique_graphs"]
        with torch.set_grad_enabled(gradient), self.forward_pass.attention(), fused_head(self.model):
            logps = self.forward_pass.compute_logps(self.model, prompts, [sample(40) for _ in prompts]).logps
            if gradient:
                torch.cat(logps).sum().backward()
        return counters["stats"]["unique_graphs"] - before


@pytest.fixture(params=["sdpa", "flash_attention_2"])
def compiled_layers(request, monkeypatch):
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "flash_attention_2", opaque_flash_attention)
    model = tiny_model().train()
    model.config._attn_implementation = request.param
    with torch._dynamo.config.patch(recompile_limit=32):
        yield CompiledLayers(model)


@pytest.mark.slow
def test_compiled_layers_have_the_same_graph_for_all_lengths(compiled_layers):
    """With or without shared prompts; the filler too."""
    assert compiled_layers.new_graphs(2, 3) == 1
    assert sum(compiled_layers.new_graphs(groups, size) for groups, size in [(3, 1), (1, 1), (1, 4), (4, 2)]) == 0
    forward_pass, model = compiled_layers.forward_pass, compiled_layers.model
    with fused_head(model):
        forward_pass.compute_logps(model, [FILLER.prompt_ids], [FILLER.completion_ids])
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.slow
def test_compiled_layers_have_no_new_graph_once_each_situation_has_occurred(compiled_layers):
    model = compiled_layers.model
    for training, gradient, checkpointing, autocast in itertools.product([True, False], repeat=4):
        if gradient and not training:
            continue
        model.train(training)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            model.gradient_checkpointing_disable()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            compiled_layers.new_graphs(2, 2, gradient)
            assert sum(compiled_layers.new_graphs(1 + i % 3, 1 + i % 4, gradient) for i in range(12)) == 0
    assert counters["stats"]["unique_graphs"] <= 16 and not counters["graph_break"]
