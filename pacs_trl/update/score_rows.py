"""Log-probs of completions under a model that is not being trained."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from trl.trainer.utils import add_fused_lm_head

from .scorer import Scorer
from .startup_check import choose_forward_pass


@contextmanager
def fused_head(model, temperature: float = 1.0) -> Iterator[None]:
    """Inside the context a [`Scorer`] can score `model`, which no trainer of TRL has prepared; afterwards it is as
    before."""
    patched = model.__dict__.get("forward")  # by a trainer, say
    add_fused_lm_head(model, temperature, outputs=("log_probs", "entropy"))
    try:
        yield
    finally:
        del model.forward
        if patched is not None:
            model.forward = patched


def score_rows(
    model, prompt_ids: Sequence[Sequence[int]], completion_ids: Sequence[Sequence[int]], *, batch_size: int = 64
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Log-probabilities and entropies of completions under a model that nobody trains here, at temperature 1, and that
    is as before afterwards: of each row, two float32 `torch.Tensor` of shape `(C,)` in nats. Rows as in
    [`Scorer.score`], `batch_size` of them per forward pass."""
    scorer = Scorer(model, model.device)
    with fused_head(model):
        choose_forward_pass(scorer, model, training=False)
    for start in range(0, len(prompt_ids), batch_size):
        some = slice(start, start + batch_size)
        with fused_head(model):
            scores = scorer.score(model, prompt_ids[some], completion_ids[some])
        yield from zip(*scores, strict=True)


def sequence_logps(
    model, prompt_ids: Sequence[Sequence[int]], completion_ids: Sequence[Sequence[int]], *, batch_size: int = 64
) -> torch.Tensor:
    """
    Log-probability of each completion given its prompt, in nats: the sum over its tokens, 0 for an empty completion.

    Arguments as of [`score_rows`]. Returns a float64 `torch.Tensor` of shape `(B,)`, differentiable where gradients
    are enabled.
    """
    sums = [logps.double().sum() for logps, _ in score_rows(model, prompt_ids, completion_ids, batch_size=batch_size)]
    return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.float64)
