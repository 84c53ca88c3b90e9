"""Models that `plan` knows from their configuration alone."""

import pytest
from families import FAMILIES, model_of
from support.architectures import build
from support.experts import tiny_experts
from support.models import TOKENIZER
from transformers import MambaConfig

from pacs_trl.plan import cost
from pacs_trl.plan.cost import Execution
from pacs_trl.plan.models import empty_model, shape_of_model


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family["model_type"])
def test_every_family_of_the_compatibility_page_has_a_shape_with_all_its_weights(family):
    config = model_of(family).config
    model = empty_model(config)
    shape = shape_of_model(model)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.activation_bytes(1, Execution()) > 0 and shape.kv_bytes_per_token > 0
    has_experts = any(".experts." in name for name, _ in model.named_parameters())
    assert has_experts or shape.active_parameters == pytest.approx(shape.parameters, rel=0.05)


def test_a_token_uses_some_of_the_experts_by_hand():
    """Two of four experts in two layers, each with three matrices of 16 columns."""
    model = tiny_experts()
    hidden, total = model.config.hidden_size, sum(p.numel() for p in model.parameters())
    shape = shape_of_model(model)
    assert shape.parameters == total
    unused = model.config.num_hidden_layers * 2 * 3 * hidden * 16
    assert shape.active_parameters == pytest.approx(total - unused, rel=0.02)
    assert shape.num_layers * shape.stored_layer_parameters == pytest.approx(
        shape.num_layers * shape.layer_parameters + unused, rel=0.05
    )


def test_the_shape_of_a_dense_decoder_is_the_same_from_its_weights():
    model = build("qwen3", hidden_size=256, intermediate_size=768)
    exact, counted = cost.shape_of(model.config.to_dict()), shape_of_model(model)
    assert counted.parameters == exact.parameters
    for execution in (Execution(), Execution("autocast", "full", compiled=True)):
        assert counted.activation_bytes(100, execution) == pytest.approx(
            exact.activation_bytes(100, execution), rel=0.05
        )


def test_a_model_without_attention_has_no_shape():
    assert shape_of_model(empty_model(MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=99))) is None


def test_plan_counts_the_forward_pass_of_the_routers(plan, tmp_path):
    """3 passes for the gradient, 3/4 for the reference, and 1 that measures the loads of experts; without the loss of
    the routers layers are compiled."""
    tiny_experts().config.save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    local = {"model_name_or_path": str(tmp_path / "model"), "gradient_checkpointing": False, "bf16": False}
    local |= {"max_completion_length": 500}
    status, output = plan(**local)
    assert status == 0 and "4.75 forward passes" in output, output
    assert "that a token uses" in output and "router_aux_loss_coef" in output
    assert "3.75 forward passes" in plan(**local, router_aux_loss_coef=0.0)[1]
    status, output = plan(**local, compile_layers=True)
    assert status == 1 and "compile_layers: true is not possible: the loss of the routers" in output


def test_automatic_memory_settings_of_other_architectures_are_those_of_a_run(plan, tmp_path):
    """What their activations need is not known, so a run recomputes them."""
    build("olmo3").config.save_pretrained(tmp_path / "model")
    automatic = {"gradient_checkpointing": "auto", "max_tokens_per_micro_batch": "auto"}
    output = plan(model_name_or_path=str(tmp_path / "model"), **automatic)[1]
    assert "full recomputation" in output and "'olmo3' models need is not known" in output
