r"""Models, tokenizers, and problems of `equality_scenarios.py`, written once as files that both sides load.

Nothing here imports the package, so that a change of the package cannot change what it is measured with. The models
have random weights, and a head that prefers some successors of a token, so that completions often have the form
`\boxed{3}`: a verifier accepts some of them. The critic prefers answers of the form `<7>`.
"""

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM


PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
ASSISTANT = f"{START}assistant\n"
BOX = r"\boxed{"
HIDDEN_SIZE = 288  # at least the size of the vocabulary: embeddings are orthogonal

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\n' }}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '@' + call.function.name }}
        {%- for name, value in call.function.arguments.items() %}
            {{- '|' + name + '=' + value|string }}
        {%- endfor %}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}"""

# A tool call is `@name|argument=value`.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": ASSISTANT,
    "fields": {
        "tool_calls": {
            "open_pattern": r"@(?P<name>\w+)(?=[^@]*<\|im_end\|>)",
            "close_pattern": r"(?=@)|<\|im_end\|>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"\|(?P<key>\w+)=(?P<value>[^|]*)"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"<\|im_end\|>", "content": "text"},
    },
}

# Logits of the successors of a token.
POLICY = {
    ASSISTANT: {BOX: 5.0, "a": 5.0, "b": 5.0, "c": 5.0},
    "a": {"b": 5.0, "c": 5.0, BOX: 5.0},
    "b": {"a": 5.0, "c": 5.0, BOX: 5.0},
    "c": {"a": 5.0, "b": 5.0, BOX: 5.0},
    BOX: {"3": 8.0, "4": 8.0, "5": 7.0},
    **{digit: {"}": 8.0, END: 4.0} for digit in "345"},
    "}": {END: 9.0, "a": 6.0},
}
CALLING = POLICY | {
    ASSISTANT: {BOX: 6.0, "@": 7.0, "a": 4.0},
    "@": {"t": 10.0},
    "t": {"|": 10.0},
    "|": {"x": 10.0},
    "x": {"=": 10.0},
    "=": {"3": 8.0, "4": 8.0},
    **{digit: {"}": 8.0, END: 8.0} for digit in "345"},
}
CRITIC = {
    ASSISTANT: {"<": 9.0},
    "<": {digit: 8.0 for digit in "0123456789"},
    **{digit: {">": 9.0} for digit in "0123456789"},
    ">": {END: 9.0},
}


def write_inputs(directory: Path) -> None:
    """Write the folders `policy`, `calling` (a policy that calls tools), and `critic`, and two files of problems."""
    tokenizer = build_tokenizer()
    for seed, (name, successors) in enumerate({"policy": POLICY, "calling": CALLING, "critic": CRITIC}.items()):
        tokenizer.response_template = RESPONSE_TEMPLATE if name == "calling" else None
        build_model(tokenizer, successors, seed).save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)
    for name, first in {"problems": 0, "benchmark": 100}.items():
        rows = [
            {"problem": f"{i} + {i + 1}?", "answer": str(3 + i % 2), "hint": "Add the tens."}
            for i in range(first, first + 32)
        ]
        (directory / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token per byte, and tokens for the parts of the chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in (PAD, START, END)])
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in (ASSISTANT, BOX)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def build_model(
    tokenizer: PreTrainedTokenizerFast, successors: dict[str, dict[str, float]], seed: int
) -> Qwen3ForCausalLM:
    """Return a model whose next token depends mostly on the last one, and somewhat on all."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN_SIZE,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    directions = torch.linalg.qr(torch.randn(HIDDEN_SIZE, HIDDEN_SIZE))[0][: len(tokenizer)]
    logits = torch.randn(len(tokenizer), len(tokenizer)) - 3.0
    for token, preferred in successors.items():
        for successor, logit in preferred.items():
            logits[_id(tokenizer, token), _id(tokenizer, successor)] = logit
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(directions * HIDDEN_SIZE**0.5)
        model.get_output_embeddings().weight.copy_(logits.T @ directions / HIDDEN_SIZE**0.5)
        model.get_output_embeddings().weight.add_(0.02 * torch.randn(len(tokenizer), HIDDEN_SIZE))
    return model


def _id(tokenizer: PreTrainedTokenizerFast, text: str) -> int:
    (token_id,) = tokenizer(text)["input_ids"]
    return token_id
