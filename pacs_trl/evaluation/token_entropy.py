"""Token entropy of stored completions, by one teacher-forced pass of the model that wrote them.

Engines that sample do not give full distributions, so entropy is measured afterwards, the same way for every engine.
The distributions are those of the model itself (temperature 1, no truncation).
"""

from collections.abc import Sequence

import torch


def token_entropy(logits: torch.Tensor) -> torch.Tensor:
    """Entropy in nats of the next-token distributions `logits` (..., V); float32 whatever the input; shape (...)."""
    log_probs = logits.float().log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1)


@torch.no_grad()
def completion_entropies(
    model, tokenizer, texts: Sequence[str], completions: Sequence[str], *, batch_size: int = 8
) -> list[float]:
    """
    Mean token entropy of each completion: the mean over the positions whose next token belongs to the completion.

    Args:
        model, tokenizer: The causal language model that wrote the completions, and its tokenizer.
        texts (sequence of `str`): Rendered prompts.
        completions (sequence of `str`): One completion per prompt; an empty one has entropy nan.
        batch_size (`int`): Rows per forward pass.

    Returns:
        `list[float]`: nats, one per completion. The mean over sequences is the paper's token entropy.
    """
    entropies = []
    for start in range(0, len(texts), batch_size):
        rows = []
        for text, completion in zip(texts[start : start + batch_size], completions[start : start + batch_size]):
            prompt_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            rows.append((prompt_ids, tokenizer(completion, add_special_tokens=False)["input_ids"]))
        longest = max(len(prompt) + len(completion) for prompt, completion in rows)
        input_ids = torch.zeros(len(rows), longest, dtype=torch.long)  # right padding: causality keeps it harmless
        attention_mask = torch.zeros_like(input_ids)
        for i, (prompt, completion) in enumerate(rows):
            input_ids[i, : len(prompt) + len(completion)] = torch.tensor(prompt + completion)
            attention_mask[i, : len(prompt) + len(completion)] = 1
        logits = model(input_ids.to(model.device), attention_mask=attention_mask.to(model.device)).logits
        for i, (prompt, completion) in enumerate(rows):
            # The logits at position t give the distribution of token t + 1.
            positions = logits[i, len(prompt) - 1 : len(prompt) + len(completion) - 1]
            entropies.append(token_entropy(positions).mean().item())
    return entropies
