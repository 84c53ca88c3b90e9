"""Log-probs in batches of completions, and the fused head of models without a trainer."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from accelerate.utils import gather_object
from trl.trainer.utils import add_fused_lm_head


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
