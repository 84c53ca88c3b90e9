import pytest
import torch
from support.seeds import shifted
from transformers import AutoTokenizer

from experiments.miniature.model import MODEL_SIZES, build_model
from experiments.miniature.tokenizer import BOX_TOKEN, END_TOKEN, build_tokenizer


CONVERSATION = [
    {"role": "user", "content": "47+38"},
    {"role": "assistant", "content": r"7+8=15,40+30=70,\boxed{85}"},
]

TEXTS = [
    "",
    "  two spaces ,  and . ' marks\n\n",
    "Zoë’s ∑ of 😀 costs $\\frac{1}{2}$ &lt; 3\t",
    "Natalia sold clips to 48 of her friends in April. #### 72",
    "".join(chr(code) for code in range(0x250)),
]


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.mark.parametrize("size", MODEL_SIZES)
def test_sizes_logits_and_generation_settings_fit_the_tokenizer(tokenizer, size):
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


def test_chat_template_renders_chatml(tokenizer):
    assert tokenizer.apply_chat_template(CONVERSATION, tokenize=False) == (
        "<|im_start|>user\n47+38<|im_end|>\n<|im_start|>assistant\n" + CONVERSATION[1]["content"] + "<|im_end|>\n"
    )
    prompt = tokenizer.apply_chat_template(CONVERSATION[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|im_start|>user\n47+38<|im_end|>\n<|im_start|>assistant\n"


def test_role_headers_and_box_are_single_tokens(tokenizer):
    ids = tokenizer.apply_chat_template(CONVERSATION[:1], add_generation_prompt=True)["input_ids"]
    # header, 5 characters, end, line break, header
    assert len(ids) == 9 and len(tokenizer) == 256 + 7
    assert len(tokenizer("añ=12")["input_ids"]) == len("añ=12".encode())
    assert tokenizer.tokenize(r"\boxed{85}") == [BOX_TOKEN, "8", "5", "}"]
    ids = tokenizer(r"\boxed{85}<|im_end|><|endoftext|>")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == r"\boxed{85}"


def test_assistant_mask_covers_the_answer_and_its_end_token(tokenizer):
    encoded = tokenizer.apply_chat_template(CONVERSATION, return_dict=True, return_assistant_tokens_mask=True)
    marked = [token for token, mark in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mark]
    assert tokenizer.decode(marked) == CONVERSATION[1]["content"] + END_TOKEN


def test_any_text_round_trips_and_so_does_the_saved_tokenizer(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert (loaded.pad_token_id, loaded.eos_token_id) == (tokenizer.pad_token_id, tokenizer.eos_token_id)
    assert loaded.padding_side == "left"
    assert loaded.apply_chat_template(CONVERSATION) == tokenizer.apply_chat_template(CONVERSATION)
    for each in (tokenizer, loaded):
        assert [each.decode(each(text)["input_ids"]) for text in TEXTS] == TEXTS
