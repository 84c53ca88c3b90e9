import pytest
from transformers import AutoTokenizer

from pacs_trl.miniature.tokenizer import BOX_TOKEN, END_TOKEN, build_tokenizer


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
