r"""A byte-level tokenizer, so that the miniature model can read any text without a vocabulary being downloaded.

Every byte is one token: numbers are read digit by digit, and real GSM8K or MATH text works without unknown tokens.
The only longer tokens are the ChatML role headers and `\boxed{`; rendered text is plain ChatML all the same, and the
short sequences are what makes training on a CPU quick. There are no merges and nothing is learned from data.
"""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


PAD_TOKEN = "<|endoftext|>"
START_TOKEN = "<|im_start|>"
END_TOKEN = "<|im_end|>"
ROLE_HEADERS = [f"{START_TOKEN}{role}\n" for role in ("system", "user", "assistant")]
BOX_TOKEN = r"\boxed{"

# The `generation` block marks what the assistant wrote, its end token included: TRL trains on exactly this span when
# it is asked for the loss on assistant turns only. The line break after the end token belongs to the next turn's
# header. A call of a tool is `@name|argument=value`, so few tokens that a small model writes it; what the tool says is
# a turn of the user, cut to its last characters, where an error of Python says what it is. A prompt does not list the
# tools.
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

# How such calls are read. One that is cut off, before its end token, is none.
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
    Build the tokenizer of the miniature models.

    Ids 0 to 255 are the bytes in the order of the ByteLevel alphabet; the special tokens, the role headers and
    `\boxed{` follow. Padding is on the left, as generation needs it.

    Args:
        tools (`bool`): Whether calls of tools are read in responses, which TRL else takes as the text that they are.

    Returns:
        [`~transformers.PreTrainedTokenizerFast`]:
            A tokenizer with a ChatML chat template, `<|im_end|>` as end and `<|endoftext|>` as padding token.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: token_id for token_id, symbol in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special = [PAD_TOKEN, START_TOKEN, END_TOKEN, *ROLE_HEADERS]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    # Not special: decoding with `skip_special_tokens=True` has to keep the box, or no answer could be verified.
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
