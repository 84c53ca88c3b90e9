"""Log-probabilities and entropies of tokens that are already there, in one pass and without the logits.

The logits of 64 rows of 8,192 tokens over 151,936 words take 319 GB in float32. TRL's fused head, which the trainers use as well,
computes them in tiles and keeps one number per token. The distributions are those of the model itself: temperature 1, no truncation.
"""

from collections.abc import Iterator, Sequence

import torch
from torch.nn.utils.rnn import pad_sequence
from trl.trainer.utils import add_fused_lm_head


def token_scores(
    model, input_ids: torch.Tensor, attention_mask: torch.Tensor, is_scored: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Log-probability of each scored token, and the entropy of the distribution it was drawn from.

    Args:
        model: Causal language model of transformers; unchanged afterwards.
        input_ids, attention_mask (`torch.Tensor` of shape `(B, T)`): Rows, padded anywhere.
        is_scored (`torch.Tensor` of shape `(B, T)`): Boolean; True at the tokens asked for, never at the first of a row.

    Returns:
        Two float32 `torch.Tensor` of shape `(B, T - 1)` in nats, of tokens 1 to T - 1; 0 at those not asked for.
    """
    patched = model.__dict__.get("forward")  # by a trainer, say
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    try:
        labels = input_ids.masked_fill(~is_scored, -100)
        outputs = model(input_ids=input_ids, attention_mask=attention_mask, labels=labels, fused_lm_head=True)
    finally:
        del model.forward
        if patched is not None:
            model.forward = patched
    return outputs.log_probs, outputs.entropy


@torch.no_grad()
def completion_scores(
    model, rows: Sequence[tuple[list[int], list[int]]], *, batch_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """
    [`token_scores`] of the tokens of each completion, row by row.

    Args:
        model: Causal language model of transformers.
        rows (sequence of pairs of `list[int]`): Tokens of the prompt (at least one) and of the completion.
        batch_size (`int`): Rows per forward pass.

    Yields:
        Log-probabilities and entropies, float64 on the CPU, of shape `(number of tokens,)`.
    """
    for start in range(0, len(rows), batch_size):
        batch = rows[start : start + batch_size]
        # right padding: causality keeps it harmless
        input_ids = pad_sequence([torch.tensor(p + c) for p, c in batch], batch_first=True).to(model.device)
        starts, ends = torch.tensor([(len(p), len(p) + len(c)) for p, c in batch], device=model.device).T[..., None]
        positions = torch.arange(input_ids.size(1), device=model.device)
        is_scored = (positions >= starts) & (positions < ends)  # (B, T)
        scores = token_scores(model, input_ids, (positions < ends).long(), is_scored)
        logps, entropies = (values.double().cpu() for values in scores)
        for row, (prompt, completion) in enumerate(batch):
            tokens = slice(len(prompt) - 1, len(prompt) + len(completion) - 1)
            yield logps[row, tokens], entropies[row, tokens]
