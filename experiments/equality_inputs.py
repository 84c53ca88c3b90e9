r"""Models, tokenizers, and problems of `equality_scenarios.py`, written once as files that both sides load.

Nothing here imports the package, so that a change of it cannot change what it is measured with. The models have random
weights, and a head that prefers some successors of a token, so that completions often have the form
`\boxed{3}`: a verifier accepts some of them. The critic prefers answers of the form `<7>`.
"""

import json
from pathlib import Path

import torch
from miniature.tokenizer import BOX_TOKEN as BOX
from miniature.tokenizer import END_TOKEN as END
from miniature.tokenizer import ROLE_HEADERS, build_tokenizer
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM


ASSISTANT = ROLE_HEADERS[2]
HIDDEN_SIZE = 288  # at least the size of the vocabulary: embeddings are orthogonal

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
    for seed, (name, successors) in enumerate({"policy": POLICY, "calling": CALLING, "critic": CRITIC}.items()):
        tokenizer = build_tokenizer(tools=name == "calling")
        build_model(tokenizer, successors, seed).save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)
    for name, first in {"problems": 0, "benchmark": 100}.items():
        rows = [
            {"problem": f"{i} + {i + 1}?", "answer": str(3 + i % 2), "hint": "Add the tens."}
            for i in range(first, first + 32)
        ]
        (directory / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


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
        model.model.embed_tokens.weight.copy_(directions * HIDDEN_SIZE**0.5)
        model.lm_head.weight.copy_(logits.T @ directions / HIDDEN_SIZE**0.5)
        model.lm_head.weight.add_(0.02 * torch.randn(len(tokenizer), HIDDEN_SIZE))
    return model


def _id(tokenizer: PreTrainedTokenizerFast, text: str) -> int:
    (token_id,) = tokenizer(text)["input_ids"]
    return token_id
