"""Adapters of embeddings and heads that share their weights, which vLLM would get merged."""

import pytest
from peft import LoraConfig, get_peft_model
from support.models import tiny_model

from pacs_trl.rollouts.adapter_checks import check_adapter_of_tied_weights


TIED = {"embed_tokens": True, "lm_head": True, "q_proj": False}


@pytest.mark.parametrize("name", TIED)
@pytest.mark.parametrize("key", ["target_modules", "modules_to_save"])
@pytest.mark.parametrize("tied", [True, False])
def test_adapters_of_tied_weights_are_refused_with_merged_transfer(name, key, tied):
    names = {"target_modules": ["k_proj"]} | {key: [name]}
    model = get_peft_model(tiny_model(tie_word_embeddings=tied), LoraConfig(r=2, **names))
    if TIED[name] and tied:
        with pytest.raises(ValueError, match="tie_word_embeddings.*vllm_sync_adapter"):
            check_adapter_of_tied_weights(model)
    else:
        check_adapter_of_tied_weights(model)


def test_an_adapter_that_keeps_weights_tied_can_be_merged():
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    check_adapter_of_tied_weights(get_peft_model(tiny_model(), config))
    check_adapter_of_tied_weights(tiny_model())
