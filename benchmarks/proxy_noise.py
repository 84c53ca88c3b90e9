"""Numerical noise in proxies: deviations from 0 if policy and reference use different micro-batches.

    python -m benchmarks.proxy_noise            # two CPU cores, about two minutes
    python -m benchmarks.proxy_noise --device cuda

Policy and reference have the same weights, so every proxy should be 0. Matrix products of different shapes sum in a
different order, which is visible in bf16. `PACSTrainer` computes policy and reference in the same micro-batches, and
uses 0 for the proxies of the first update without computing them.

Completions are sampled from the model at temperature 1, with log-normal lengths whose mean is 0.35 of the longest.
"""

import argparse
import platform
import random
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from transformers import Qwen3ForCausalLM

from benchmarks import table_of
from benchmarks.recorded import build_model, shape_of
from pacs_trl.update.forward_pass import ForwardPass, fused_head
from pacs_trl.update.microbatching import MicroBatchConfig, schedule_micro_batches
from pacs_trl.update.minibatch import rollout_lengths
from pacs_trl.update.rollout import Rollout


NUM_ROWS, NUM_GENERATIONS, PROMPT_LENGTH, ROWS_PER_FORWARD = 32, 8, 24, 8


@torch.no_grad()
def sample_rollouts(model: Qwen3ForCausalLM, device: str, max_length: int) -> list[Rollout]:
    rng = random.Random(0)
    scale = max_length / 512
    lengths = [min(max_length, max(8, round(scale * rng.lognormvariate(5.0, 0.6)))) for _ in range(NUM_ROWS - 1)]
    shape = NUM_ROWS // NUM_GENERATIONS, PROMPT_LENGTH
    prompts = torch.randint(1, 512, shape, generator=torch.Generator().manual_seed(0)).to(device)
    prompts = prompts.repeat_interleave(NUM_GENERATIONS, dim=0)
    ids = model.generate(  # type: ignore[misc]  # the stub declares another type of `self`
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        top_k=0,
        max_new_tokens=max_length,
        min_new_tokens=max_length,
        pad_token_id=0,
    )
    completions = ids[:, PROMPT_LENGTH:].cpu().numpy().astype(np.int32)
    return [
        Rollout(prompts[i].cpu().numpy().astype(np.int32), completions[i, :n], np.ones(n, dtype=bool), 1.0)
        for i, n in enumerate([*lengths, max_length])
    ]


@torch.no_grad()
def compute_logps(
    model, forward_pass: ForwardPass, rollouts: Sequence[Rollout], micro_batches: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """Compute the log-probs of every completion in these micro-batches; returns one `(C,)` each, on the CPU."""
    completion_logps = [torch.empty(0)] * len(rollouts)
    for rows in micro_batches:
        prompts, completions = (
            [getattr(rollouts[i], name) for i in rows] for name in ("prompt_ids", "completion_ids")
        )
        for i, logps in zip(rows, forward_pass.compute_logps(model, prompts, completions).logps, strict=True):
            completion_logps[i] = logps.cpu()
    return completion_logps


def scheduled(rollouts: list[Rollout], max_rollouts: int, *, padded: bool) -> list[list[int]]:
    one_row_groups = [[i] for i in range(len(rollouts))]
    limits = MicroBatchConfig(1, max_rollouts, padded=padded)
    schedule = schedule_micro_batches(rollout_lengths(rollouts), one_row_groups, limits)
    assert schedule is not None
    return schedule[0]


# Name, micro-batches, and whether completions are packed.
SAME = "in the same micro-batches"
COMPOSITIONS = [
    (SAME, lambda r: scheduled(r, ROWS_PER_FORWARD, padded=False), True),
    ("packed, half as many completions", lambda r: scheduled(r, ROWS_PER_FORWARD // 2, padded=False), True),
    ("padded, sorted by length", lambda r: scheduled(r, ROWS_PER_FORWARD, padded=True), False),
    ("every completion alone", lambda r: [[i] for i in range(len(r))], False),
]


def drift(device: str, model: str, completion_max: int) -> list[dict]:
    """Return a table of proxies that should be 0, by precision and by the micro-batches of the reference."""
    # weights large enough that predictions are far from uniform
    policy = build_model(shape_of(model), device, initializer_range=0.05, eos_token_id=0, pad_token_id=0).eval()
    rollouts, table, float32 = sample_rollouts(policy, device, completion_max), [], None
    with fused_head(policy):
        for precision in ("fp32", "bf16 autocast, fp32 weights", "bf16 weights"):
            if precision == "bf16 weights":
                policy.to(torch.bfloat16)
            autocast = precision.startswith("bf16 autocast")
            reference = None
            for name, micro_batches, packed in COMPOSITIONS:
                forward_pass = ForwardPass(
                    policy,
                    torch.device(device),
                    packing="auto" if packed else "never",
                    autocast=partial(torch.autocast, device, dtype=torch.bfloat16, enabled=autocast),
                )
                batches = micro_batches(rollouts)
                logps = compute_logps(policy, forward_pass, rollouts, batches)
                reference = logps if reference is None else reference
                float32 = logps if float32 is None else float32
                again = compute_logps(policy, forward_pass, rollouts, batches) if reference is logps else logps
                errors = torch.stack([(p - t).sum() for p, t in zip(logps, float32, strict=True)]).abs()
                proxies = torch.stack([(p - r).sum() for p, r in zip(again, reference, strict=True)]).abs()
                table.append(
                    {
                        "precision": precision,
                        "reference computed": name,
                        "mean abs proxy": proxies.mean().item(),
                        "max abs proxy": proxies.max().item(),
                        "mean abs distance from float32": errors.mean().item(),
                    }
                )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    where = f"{torch.get_num_threads()} CPU threads, {platform.machine()}"
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if device == 'cuda' else where}\n")
    print(table_of(drift(device, "small", 512)))


if __name__ == "__main__":
    main()
