"""Log-probs of completions under a model that is not being trained."""

from collections.abc import Iterator, Sequence

import torch

from pacs_trl.update.forward_pass import ForwardPass, fused_head
from pacs_trl.update.startup_check import choose_forward_pass


def compute_logps(
    model, prompt_ids: Sequence[Sequence[int]], completion_ids: Sequence[Sequence[int]], *, batch_size: int = 64
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """
    Compute the log-probs and entropies of completions under a model at temperature 1.

    The model is left unchanged. Yields two float32 `torch.Tensor` of shape `(C,)` in nats per completion. Arguments
    are those of [`ForwardPass.compute_logps`]; each forward pass has `batch_size` completions.
    """
    forward_pass = ForwardPass(model, model.device)
    with fused_head(model):
        choose_forward_pass(forward_pass, model, training=False)
    for start in range(0, len(prompt_ids), batch_size):
        some = slice(start, start + batch_size)
        with fused_head(model):
            scores = forward_pass.compute_logps(model, prompt_ids[some], completion_ids[some])
        yield from zip(*scores, strict=True)
