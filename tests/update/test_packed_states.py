"""Segments of packed rollouts for convolutions and recurrences: layouts by hand, and what functions of modeling files
are called with."""

from types import ModuleType

import pytest
import torch
import transformers
from support.architectures import build
from support.models import TOKENIZER
from support.rollouts import Replay
from support.runs import build_trainer
from support.seeds import shifted

from pacs_trl import GRPOTrainer
from pacs_trl.update import compiled_layers
from pacs_trl.update.forward_pass import ForwardPass, fused_head
from pacs_trl.update.packed_states import Segments, packed_states, state_modules
from pacs_trl.update.packing import PackedRollouts
from pacs_trl.update.startup_check import compile_layers


CPU = torch.device("cpu")
GROUPS = [(3, [2, 1]), (1, [2])]  # tokens 0 to 2, 3 to 4, 5; 6, 7 to 8


def test_segments_are_preceded_by_the_tokens_before_them():
    inputs, is_zero, outputs = Segments(GROUPS, CPU).with_previous(2)
    with_zeros = inputs.masked_fill(is_zero, -1)
    prompts, completions = [-1, -1, 0, 1, 2, -1, -1, 6], [1, 2, 3, 4, 1, 2, 5, -1, 6, 7, 8]
    assert with_zeros.tolist() == prompts + completions
    assert inputs[outputs].tolist() == list(range(9))
    assert outputs.tolist() == [2, 3, 4, 10, 11, 14, 7, 17, 18]


def test_segments_of_similar_length_are_batched():
    batches = Segments([(3, [2, 1]), (1, [2]), (5, [])], CPU).batches(4)
    shown = [batch.indices.masked_fill(batch.is_padding, -1).tolist() for batch in batches.prompts]
    assert shown == [[[-1, 0, 1, 2], [-1, -1, -1, 6]], [[-1, -1, -1, 9, 10, 11, 12, 13]]]
    (completions,) = batches.completions
    rows = [[3, 4, -1, -1], [5, -1, -1, -1], [7, 8, -1, -1]]
    assert completions.indices.masked_fill(completions.is_padding, -1).tolist() == rows
    assert completions.first_states.tolist() == [0, 0, 1]
    flat = torch.cat([batch.indices.flatten() for batch in [*batches.prompts, completions]])
    assert flat[batches.outputs].tolist() == list(range(14))


def test_initial_states_follow_the_order_of_batches():
    """The prompt of five tokens comes first, and is in the second batch."""
    batches = Segments([(5, [1]), (2, [1])], CPU).batches(4)
    assert [batch.indices.shape[1] for batch in batches.prompts] == [4, 8]
    assert batches.completions[0].first_states.tolist() == [1, 0]


def test_long_segments_share_batches():
    lengths = [*range(1, 9), 9, 10, 17, 20, 21, 100, 112]
    batches = Segments([(length, []) for length in lengths], CPU).batches(1).prompts
    assert [batch.indices.shape for batch in batches] == [
        *((1, n) for n in range(1, 9)),
        (2, 10),
        (2, 20),
        (1, 24),
        (2, 112),
    ]


def test_prompts_without_a_branch_have_no_batch_of_completions():
    """The completion of one token predicts nothing behind it."""
    rollouts = PackedRollouts([torch.arange(3).numpy()], [torch.arange(1).numpy()])
    assert rollouts.groups == [(3, [])] and rollouts.blocks == [[3]]
    batches = Segments(rollouts.groups, CPU).batches(4)
    assert not batches.completions and batches.outputs.tolist() == [1, 2, 3]


@pytest.fixture
def qwen() -> ModuleType:
    return transformers.models.qwen3_5.modeling_qwen3_5


def test_functions_are_replaced_inside_the_context_only(qwen):
    model = build("qwen3_5_text").eval()
    forward_pass, ids = ForwardPass(model, CPU), torch.arange(3, 40)[None]
    functions = qwen.causal_conv1d_fn, qwen.torch_chunk_gated_delta_rule
    with torch.no_grad():
        expected = model(ids).logits
        with forward_pass.attention():
            with forward_pass.attention():
                assert qwen.causal_conv1d_fn is not functions[0]
            assert qwen.torch_chunk_gated_delta_rule is not functions[1]
            model.config._attn_implementation = "sdpa"
            assert torch.equal(model(ids).logits, expected)  # without segments, as in generation
    assert (qwen.causal_conv1d_fn, qwen.torch_chunk_gated_delta_rule) == functions


def test_kernels_see_segments_only(monkeypatch, qwen):
    """No bounds of the packed sequence reach a kernel, which would take them for its own."""
    calls, delta_rule, convolve = [], qwen.torch_chunk_gated_delta_rule, qwen.causal_conv1d_fn

    def recorded(function):
        def call(*args, **kwargs):
            calls.append(set(kwargs))
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(qwen, "torch_chunk_gated_delta_rule", recorded(delta_rule))
    monkeypatch.setattr(qwen, "causal_conv1d_fn", recorded(convolve))
    model = build("qwen3_5_text")
    generator = torch.Generator().manual_seed(shifted(0))
    ids = [torch.randint(3, 99, (n,), generator=generator).tolist() for n in (5, 20, 9)]
    with torch.no_grad():
        ForwardPass(model, CPU).forward(model, [ids[0], ids[0]], ids[1:])
    settings = {"g", "beta", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "chunk_size"}
    assert calls == [{"activation"}, *[settings] * 3]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["granitemoehybrid", "lfm2", "qwen3_5_text"])
def test_layers_are_compiled_around_convolutions_and_recurrences(monkeypatch, model_type):
    torch._dynamo.reset()
    monkeypatch.setattr(compiled_layers, "BACKEND", "aot_eager")
    model = build(model_type)
    with fused_head(model):
        forward_pass = ForwardPass(model, CPU)
        assert compile_layers(forward_pass, model) is None  # log-probs agree, and new lengths make no graph


def test_layers_that_mamba_ssm_fuses_are_computed_in_parts(monkeypatch):
    """In training, its fused kernel would run over the packed sequence."""
    granite = transformers.models.granitemoehybrid.modeling_granitemoehybrid

    def fused(*args, **kwargs):
        raise AssertionError("the fused kernel was called")

    monkeypatch.setattr(granite, "mamba2_split_conv1d_scan_combined", fused)
    model = build("granitemoehybrid")
    assert model.training
    ForwardPass(model, CPU).forward(model, [[5, 6], [5, 6]], [[7, 8, 9], [10, 11]])
    with pytest.raises(AssertionError, match="fused kernel"), packed_states(state_modules(model)):
        model(torch.tensor([[5, 6, 7]]), use_cache=False)


@pytest.mark.trains
@pytest.mark.parametrize("model_type", ["lfm2", "qwen3_5_text"])
def test_training_on_packed_completions_has_the_weights_of_padded_ones(tmp_path, model_type):
    weights = []
    for packing in ("auto", "never"):
        model = build(model_type, vocab_size=len(TOKENIZER))
        initial = {name: value.clone() for name, value in model.state_dict().items()}
        settings = {"packing": packing, "max_steps": 2, "learning_rate": 1e-3, "optim": "sgd", "beta": 0.1}
        trainer = build_trainer(
            tmp_path / packing, model=model, replay=Replay(), trainer_class=GRPOTrainer, **settings
        )
        trainer.train()
        assert (trainer.forward_pass.packing is None) == (packing == "never")
        weights.append(torch.cat([(value - initial[name]).flatten() for name, value in model.state_dict().items()]))
    packed, padded = weights
    assert padded.norm() > 0 and (packed - padded).norm() < 1e-3 * padded.norm()
