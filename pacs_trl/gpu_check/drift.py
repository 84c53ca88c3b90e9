"""How far proxies are from 0 when nothing has moved, because log-probabilities were computed with other neighbours.

Policy and reference have the same weights, so every proxy should be 0. It is not, when the reference was scored in other
micro-batches than the policy: matrix products of another shape add up in another order, and in bf16 that is visible.
`PACSTrainer` scores both in the same micro-batches, and takes the proxies of a first update as 0 without computing them.

Completions are sampled from the model itself at temperature 1, with log-normal lengths whose mean is 0.35 of the longest.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3ForCausalLM

from ..update.microbatching import schedule_micro_batches
from ..update.rows import Rollout
from ..update.scorer import Scorer, fused_head
from ..update.step import row_lengths
from .replay import build_model, shape_of
from .results import Found


NUM_ROWS, NUM_GENERATIONS, PROMPT_LENGTH, ROWS_PER_FORWARD = 32, 8, 24, 8


@torch.no_grad()
def sample_rollouts(model: Qwen3ForCausalLM, device: str, max_length: int) -> list[Rollout]:
    rng = random.Random(0)
    scale = max_length / 512
    lengths = [min(max_length, max(8, round(scale * rng.lognormvariate(5.0, 0.6)))) for _ in range(NUM_ROWS - 1)]
    shape = NUM_ROWS // NUM_GENERATIONS, PROMPT_LENGTH
    prompts = torch.randint(1, 512, shape, generator=torch.Generator().manual_seed(0)).to(device)
    prompts = prompts.repeat_interleave(NUM_GENERATIONS, dim=0)
    ids = model.generate(
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
def score(
    model, scorer: Scorer, rollouts: Sequence[Rollout], micro_batches: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """Log-probabilities of every row, computed in the given micro-batches, on the CPU."""
    found = [torch.empty(0)] * len(rollouts)
    for rows in micro_batches:
        prompts, completions = (
            [getattr(rollouts[i], name) for i in rows] for name in ("prompt_ids", "completion_ids")
        )
        for i, logps in zip(rows, scorer.score(model, prompts, completions).logps, strict=True):
            found[i] = logps.cpu()
    return found


@dataclass
class Composition:
    """A way to compose micro-batches: what it is called, its micro-batches, and whether rows are packed."""

    name: str
    micro_batches: Callable[[list[Rollout]], list[list[int]]]
    packed: bool


def scheduled(rollouts: list[Rollout], rows_per_forward: int, *, padded: bool) -> list[list[int]]:
    schedule = schedule_micro_batches(
        row_lengths(rollouts),
        [[i] for i in range(len(rollouts))],
        num_processes=1,
        max_rows=rows_per_forward,
        padded=padded,
    )
    assert schedule is not None
    return schedule[0]


def in_order(rollouts: list[Rollout]) -> list[list[int]]:
    return [list(range(i, i + ROWS_PER_FORWARD)) for i in range(0, len(rollouts), ROWS_PER_FORWARD)]


COMPOSITIONS = [
    Composition("in the same micro-batches", lambda r: scheduled(r, ROWS_PER_FORWARD, padded=False), True),
    Composition("packed, half as many rows", lambda r: scheduled(r, ROWS_PER_FORWARD // 2, padded=False), True),
    Composition("padded, sorted by length", lambda r: scheduled(r, ROWS_PER_FORWARD, padded=True), False),
    Composition("padded, in order of generation", in_order, False),
    Composition("padded, all rows at once", lambda r: [list(range(len(r)))], False),
    Composition("every row alone", lambda r: [[i] for i in range(len(r))], False),
]


def drift(*, device: str, directory: Path, model: str, completion_max: int) -> Found:
    """Proxies that should be 0, by precision and by how the reference was scored, and how far each scoring is from float32."""
    # weights large enough that predictions are far from uniform
    policy = build_model(shape_of(model), device, initializer_range=0.05, eos_token_id=0, pad_token_id=0).eval()
    rollouts, table, truth = sample_rollouts(policy, device, completion_max), [], None
    with fused_head(policy):
        for precision in ("fp32", "bf16 autocast, fp32 weights", "bf16 weights"):
            if precision == "bf16 weights":
                policy.to(torch.bfloat16)
            autocast = precision.startswith("bf16 autocast")
            reference = None
            for composition in COMPOSITIONS:
                scorer = Scorer(
                    policy,
                    torch.device(device),
                    padding_free="always" if composition.packed else "never",
                    autocast=lambda on=autocast: torch.autocast(device, dtype=torch.bfloat16, enabled=on),
                )
                batches = composition.micro_batches(rollouts)
                logps = score(policy, scorer, rollouts, batches)
                reference = logps if reference is None else reference
                truth = logps if truth is None else truth  # float32, rows that share their prompts
                again = score(policy, scorer, rollouts, batches) if reference is logps else logps
                ratios = [p - r for p, r in zip(again, reference, strict=True)]
                errors = torch.stack([(p - t).sum() for p, t in zip(logps, truth, strict=True)]).abs()
                proxies, off = torch.stack([r.sum() for r in ratios]).abs(), torch.cat(ratios).exp()
                table.append(
                    {
                        "precision": precision,
                        "reference scored": composition.name,
                        "mean abs proxy": proxies.mean().item(),
                        "max abs proxy": proxies.max().item(),
                        "mean abs distance from float32": errors.mean().item(),
                        "token ratios outside [0.9, 1.1], %": 100 * ((off < 0.9) | (off > 1.1)).float().mean().item(),
                    }
                )
    same = [row for row in table if row["reference scored"] == COMPOSITIONS[0].name]
    bars = {
        f"proxies are 0 in the same micro-batches, {row['precision']}": row["max abs proxy"] == 0.0 for row in same
    }
    worst = max(table, key=lambda row: row["max abs proxy"])
    return Found(table, bars, f"{model}: proxies up to {worst['max abs proxy']:.2g} in other micro-batches")
