"""Changes of a model that the engine process, which builds it anew, would lose."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.models import TOKENIZER, tiny_model
from support.runs import build_trainer
from torch import nn

from pacs_trl.rollouts.engine_copies import changes_in_place


class Halved(nn.Linear):
    def forward(self, states):
        return super().forward(states) / 2


def replaced_layer(model):
    model.model.layers[0].mlp.down_proj = Halved(64, 32, bias=False)


def patched_layer(model):
    mlp = model.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda states: forward(states) / 2


def hooked_layer(model):
    model.model.norm.register_forward_hook(lambda norm, inputs, output: output / 2)


def scaled_attention(model):
    model.model.layers[0].self_attn.scaling *= 2


def longer_vocabulary(model):
    model.model.embed_tokens = nn.Embedding(len(TOKENIZER) + 2, 32)


CHANGES = {
    replaced_layer: "model.layers.0.mlp.down_proj is a Halved",
    patched_layer: "model.layers.1.mlp.forward is replaced",
    hooked_layer: "model.norm.forward has a hook",
    scaled_attention: "model.layers.0.self_attn.scaling is 0.5",
    longer_vocabulary: "model.embed_tokens.weight has the shape",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("with_adapter", [False, True])
def test_changes_that_the_engine_process_would_lose_are_named(change, with_adapter):
    model = tiny_model()
    change(model)
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])) if with_adapter else model
    (description, *others) = changes_in_place(model)
    assert CHANGES[change] in description and not others


def test_weights_and_new_tokens_are_no_changes():
    state = torch.get_rng_state()
    model = tiny_model()
    model.resize_token_embeddings(len(TOKENIZER) + 2, mean_resizing=False)
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    model.add_adapter("ref", LoraConfig(r=2, target_modules=["q_proj"]))
    model.enable_input_require_grads()
    torch.set_rng_state(state)
    assert changes_in_place(model) == [] and torch.equal(torch.get_rng_state(), state)
    assert changes_in_place(model.merge_and_unload()) == []


def test_a_merged_adapter_is_a_change():
    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"]))
    model.merge_adapter()
    assert "adapter is merged" in changes_in_place(model)[0]


def test_a_lag_refuses_changes_before_the_run(tmp_path):
    model = tiny_model()
    patched_layer(model)
    with pytest.raises(ValueError, match="rollout_lag.*mlp.forward is replaced"):
        build_trainer(tmp_path, model=model, rollout_lag=1)
