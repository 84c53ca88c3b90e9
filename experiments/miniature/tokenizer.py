r"""Byte-level tokenizer of the miniature models, without a downloaded vocabulary.

Every byte is a token; the only longer tokens are the ChatML role headers and `\boxed{`. There are no merges.
"""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


PAD_TOKEN = "<|endoftext|>"
START_TOKEN = "<|im_start|>"
END_TOKEN = "<|im_end|>"
ROLE_HEADERS = [f"{START_TOKEN}{role}\n" for role in ("system", "user", "assistant")]
BOX_TOKEN = r"\boxed{"

# The `generation` block marks the assistant's turn with its end token for `assistant_only_loss`. A tool call is
# `@name|argument=value`; the tool's output is a user turn with its last characters, where Python names an error.
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {{- message.content }}
            {%- for call in message.tool_calls or [] %}
                {{- '@' + call.function.name }}
                {%- for name, value in call.function.arguments.items() %}
                    {{- '|' + name + '=' + value|string }}
                {%- endfor %}
            {%- endfor %}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
    {%- elif message.role == 'tool' %}
        {{- message.content[-40:] + '<|im_end|>' }}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}"""

# A truncated call, without an end token, is text.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": ROLE_HEADERS[2],
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


def build_tokenizer(tools: bool = False) -> PreTrainedTokenizerFast:
    r"""
    Build the tokenizer of the miniature models; with `tools` it parses tool calls in responses.

    Ids 0 to 255 are the bytes in the order of the ByteLevel alphabet, followed by the special tokens, the role
    headers, and `\boxed{`. Padding is on the left, the end token is `<|im_end|>`, the padding token `<|endoftext|>`.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: token_id for token_id, symbol in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special = [PAD_TOKEN, START_TOKEN, END_TOKEN, *ROLE_HEADERS]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    # not special, because decoding with `skip_special_tokens=True` must keep the box
    backend.add_tokens([AddedToken(BOX_TOKEN, normalized=False, special=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD_TOKEN,
        eos_token=END_TOKEN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
        response_template=RESPONSE_TEMPLATE if tools else None,
    )
