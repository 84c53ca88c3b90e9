"""Seconds of each non-overlapping part of an optimizer step, tokens per second, and MFU, all of one process.

Only the time between the start and the end of an optimizer step is measured; saving, evaluation, and data loading are
excluded. GPU kernels run asynchronously, so a part that does not wait for its result shifts time to the next part. All
parts here end with a value on the CPU, except the optimizer.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from transformers import TrainerCallback
from trl.trainer.utils import compute_flops_per_token, get_peak_flops


# Parts of a step in execution order, see docs/metrics.md; "other" is the remaining time.
PARTS = ("generation", "weight_sync", "verification", "log_probs", "update", "optimizer", "other")


class StepTimer(TrainerCallback):
    """
    Measure the seconds of each part of optimizer steps. As a callback, log `time/<part>` and `perf/*` for every
    optimizer step with `record(name, number)`.

    Attributes:
        parts (`tuple[str]`): `PARTS`, and the parts that a trainer adds.
        work (`dict[str, float]`): Of the current step the tokens `generated` and `trained`, the `flops` of training,
            and the `peak` of the device in FLOP/s.
    """

    def __init__(self, record: Callable[[str, float], None], clock: Callable[[], float] = time.perf_counter):
        self.record, self.clock = record, clock
        self.parts: tuple[str, ...] = PARTS
        self.work: defaultdict[str, float] = defaultdict(float)
        self._step: defaultdict[str, float] = defaultdict(float)  # seconds of each part
        self._running, self._since = "other", self.clock()

    def _switch(self, part: str) -> str:
        """Add the time since the last switch to the current part, start `part`, and return the previous one."""
        now, previous = self.clock(), self._running
        self._step[previous] += now - self._since
        self._since, self._running = now, part
        return previous

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time inside the context to `name`, a key of `parts`, instead of the enclosing part."""
        previous = self._switch(name)
        try:
            yield
        finally:
            self._switch(previous)

    def on_train_begin(self, *args, **kwargs):
        self._step.clear()
        self.work.clear()
        self._running, self._since = "other", self.clock()

    def on_step_begin(self, *args, **kwargs):
        self._step.clear()
        self.work.clear()
        self._since = self.clock()

    def on_pre_optimizer_step(self, *args, **kwargs):
        self._switch("optimizer")

    def on_optimizer_step(self, *args, **kwargs):
        self._switch("other")

    def on_step_end(self, *args, **kwargs):
        self._switch("other")
        seconds = {name: self._step[name] for name in self.parts} | {"total": sum(self._step.values())}
        for name, value in seconds.items():
            self.record(f"time/{name}", value)
        work, learning = self.work, seconds["update"] + seconds["log_probs"]
        for name, amount, per in (
            ("generated_tok_s", work["generated"], seconds["generation"]),
            ("forwarded_tok_s_fwd_bwd", work["trained"], learning),
            ("forwarded_tok_s_wall_clock", work["trained"], seconds["total"]),
            ("mfu_fwd_bwd", 100 * work["flops"], learning * work["peak"]),
        ):
            if amount and per:
                self.record(f"perf/{name}", amount / per)

    def counter_of(self, model: Any, accelerator: Any, *, is_policy: bool) -> Callable[[list[list[int]], int], None]:
        """Return a function for [`ForwardPass.on_pass`] that adds a pass to `work`. FLOP are those of matrix products:
        2 per weight, token, and pass; only completion tokens go through the head. A gradient costs two more passes,
        one where LoRA freezes the weights; passes that gradient checkpointing repeats do not count."""
        cost, peak = pass_cost(model), peak_flops(accelerator, model.dtype)
        passes_with_gradient = 2 if isinstance(model, PeftModel) else 3

        def count(texts: list[list[int]], num_predicted: int) -> None:
            num_tokens = sum(map(sum, texts))
            has_gradient = torch.is_grad_enabled()
            if has_gradient and is_policy:
                self.work["trained"] += num_tokens
            if cost is None or peak is None:
                return
            # Tokens attend to themselves and earlier ones: those of the prompt, and of their completion.
            pairs = sum(
                prompt**2 / 2 + sum(n * (prompt + n / 2) for n in completions) for prompt, *completions in texts
            )
            weights = cost.layers * num_tokens + cost.head * num_predicted
            weight_passes, attention_passes = (passes_with_gradient, 3) if has_gradient else (1, 1)
            self.work["flops"] += weight_passes * weights + attention_passes * cost.pair * pairs
            self.work["peak"] = peak

        return count


class PassCost(NamedTuple):
    """FLOP of a forward pass: `layers` per token, `head` per token that is predicted, and `pair` per pair of tokens of
    which one attends to the other."""

    layers: float
    head: float
    pair: float


def pass_cost(model: Any) -> PassCost | None:
    """Return what a forward pass of a model costs; `None` for an architecture that TRL's formula does not know, or
    whose layers differ."""
    config = model.config.get_text_config()
    try:  # TRL's number is for three passes, all tokens through the head, and attention to `seq_len` tokens
        without_attention, with_one_pair = (compute_flops_per_token(config, length) / 3 for length in (0, 1))
        head = 2 * config.vocab_size * config.hidden_size
    except (AttributeError, RuntimeError):
        return None
    has_head = model.get_output_embeddings() is not None
    return PassCost(without_attention - head, head if has_head else 0, with_one_pair - without_attention)


def peak_flops(accelerator: Any, dtype: torch.dtype) -> float | None:
    """Return the dense peak FLOP/s of this process's GPU in the precision of matrix products; `None` on CPUs, for
    GPUs and precisions that TRL's table lacks, and for a part of a GPU (MIG)."""
    if accelerator.device.type != "cuda" or " MIG " in (name := torch.cuda.get_device_name(accelerator.device)):
        return None
    autocast_dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(accelerator.mixed_precision)
    return get_peak_flops(name, autocast_dtype or str(dtype).removeprefix("torch."))
