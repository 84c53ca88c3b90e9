"""Log-probs of completions under a model that is not being trained."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from accelerate.utils import gather_object
from trl.trainer.utils import add_fused_lm_head

from .forward_pass import ForwardPass
from .startup_check import choose_forward_pass


@contextmanager
def fused_head(model, temperature: float = 1.0) -> Iterator[None]:
    """Patch TRL's fused head onto `model` inside the context, so that a [`ForwardPass`] can compute its log-probs, and
    restore the model's own `forward` on exit. Models of TRL's trainers already have the fused head."""
    patched = model.__dict__.get("forward")  # e.g. patched by a trainer
    add_fused_lm_head(model, temperature, outputs=("log_probs", "entropy"))
    try:
        yield
    finally:
        del model.forward
        if patched is not None:
            model.forward = patched


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


def logps_in_batches(
    compute: Callable, prompt_ids: Sequence, completion_ids: Sequence, batch_size: int
) -> list[torch.Tensor]:
    """Call `compute(prompt_ids, completion_ids)`, which returns [`CompletionLogps`], for batches of completions. All
    processes make equally many calls, if need be on a filler. Returns one float32 `(C,)` per completion on the CPU."""
    logps: list[torch.Tensor] = []
    for start in range(0, max(gather_object([len(prompt_ids)])), batch_size):
        batch = (ids[start : start + batch_size] or [[0]] for ids in (prompt_ids, completion_ids))
        logps += [values.cpu() for values in compute(*batch).logps]
    return logps[: len(prompt_ids)]
