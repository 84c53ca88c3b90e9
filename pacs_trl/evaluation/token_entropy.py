"""Token entropy of stored completions, by one teacher-forced pass of the model that wrote them.

Engines that sample do not give full distributions, so entropy is measured afterwards, the same way for every engine.
"""

from collections.abc import Sequence

import torch

from ..update.scorer import score_rows


@torch.no_grad()
def completion_entropies(
    model, tokenizer, texts: Sequence[str], completions: Sequence[str], *, batch_size: int = 8
) -> list[float]:
    """Mean token entropy of each completion of a rendered prompt, in nats, under the causal language model that wrote
    it: the mean over the positions whose next token belongs to the completion; nan for an empty one. The mean over
    sequences is the paper's token entropy."""
    prompt_ids, completion_ids = (
        [tokenizer(text, add_special_tokens=False)["input_ids"] for text in column] for column in (texts, completions)
    )
    scores = score_rows(model, prompt_ids, completion_ids, batch_size=batch_size)
    return [entropies.double().mean().item() for _, entropies in scores]
