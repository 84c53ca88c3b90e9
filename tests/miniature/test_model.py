import pytest
import torch
from seeds import shifted

from pacs_trl.miniature.model import MODEL_SIZES, build_model
from pacs_trl.miniature.tokenizer import build_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.mark.parametrize("size", MODEL_SIZES)
def test_forward_and_generation_settings(tokenizer, size):
    model = build_model(tokenizer, size)
    assert size != "small" or 0.9e6 < model.num_parameters() < 1.1e6
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    ids = torch.tensor([tokenizer("12+34")["input_ids"]])
    assert model(input_ids=ids).logits.shape == (1, 5, len(tokenizer))
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id


def test_seed_decides_the_weights_and_leaves_the_global_state_alone(tokenizer):
    torch.manual_seed(shifted(11))
    expected = torch.rand(3)
    torch.manual_seed(shifted(11))
    first = build_model(tokenizer, "tiny", seed=3).state_dict()
    assert torch.equal(torch.rand(3), expected)
    second = build_model(tokenizer, "tiny", seed=3).state_dict()
    other = build_model(tokenizer, "tiny", seed=4).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_unknown_size_names_the_choices(tokenizer):
    with pytest.raises(ValueError, match="huge.*tiny"):
        build_model(tokenizer, "huge")
