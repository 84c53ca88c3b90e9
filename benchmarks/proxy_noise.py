"""How far proxies are from 0 when nothing has moved, because log-probabilities were computed with other neighbors.

    python benchmarks/proxy_noise.py            # two CPU cores, about two minutes
    python benchmarks/proxy_noise.py --device cuda

Policy and reference have the same weights, so every proxy should be 0. It is not, when the reference was scored in other
micro-batches than the policy: matrix products of another shape add up in another order, and in bf16 that is visible.
`PACSTrainer` scores both in the same micro-batches, and takes the proxies of a first update as 0 without computing them.

Completions are sampled from the model itself at temperature 1, with log-normal lengths whose mean is 0.35 of the longest.
"""

import argparse
import platform
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl.trainer.utils import add_fused_lm_head

from pacs_trl.update.microbatching import schedule_micro_batches
from pacs_trl.update.rows import Rollout
from pacs_trl.update.scorer import Scorer
from pacs_trl.update.step import row_lengths


NUM_ROWS, NUM_GENERATIONS, MAX_LENGTH, PROMPT_LENGTH, ROWS_PER_FORWARD = 32, 8, 512, 24, 8


def build_model(device: str) -> Qwen3ForCausalLM:
    """8 layers x 256 wide; weights large enough that predictions are far from uniform."""
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
        initializer_range=0.05,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).to(device).eval()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model


@torch.no_grad()
def sample_rollouts(model: Qwen3ForCausalLM, device: str) -> list[Rollout]:
    rng = random.Random(0)
    lengths = [min(MAX_LENGTH, max(8, round(rng.lognormvariate(5.0, 0.6)))) for _ in range(NUM_ROWS - 1)] + [
        MAX_LENGTH
    ]
    shape = NUM_ROWS // NUM_GENERATIONS, PROMPT_LENGTH
    prompts = torch.randint(1, 512, shape, generator=torch.Generator().manual_seed(0)).to(device)
    prompts = prompts.repeat_interleave(NUM_GENERATIONS, dim=0)
    ids = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        top_k=0,
        max_new_tokens=MAX_LENGTH,
        min_new_tokens=MAX_LENGTH,
        pad_token_id=0,
    )
    completions = ids[:, PROMPT_LENGTH:].cpu().numpy().astype(np.int32)
    return [
        Rollout(prompts[i].cpu().numpy().astype(np.int32), completions[i, :n], np.ones(n, dtype=bool), 1.0)
        for i, n in enumerate(lengths)
    ]


@torch.no_grad()
def score(
    model, rollouts: list[Rollout], micro_batches: list[list[int]], *, packed: bool, device: str, autocast: bool
):
    """Log-probabilities of every row, computed in the given micro-batches."""
    found = [torch.empty(0)] * len(rollouts)
    scorer = Scorer(
        model,
        torch.device(device),
        padding_free="always" if packed else "never",
        autocast=lambda: torch.autocast(device, dtype=torch.bfloat16, enabled=autocast),
    )
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    where = (
        torch.cuda.get_device_name()
        if device == "cuda"
        else f"{torch.get_num_threads()} CPU threads, {platform.machine()}"
    )
    model = build_model(device)
    rollouts = sample_rollouts(model, device)
    mean = sum(len(r.completion_ids) for r in rollouts) / len(rollouts)
    print(
        f"{NUM_ROWS} completions, mean {mean:.0f} and at most {MAX_LENGTH} tokens; torch {torch.__version__}, {where}\n"
    )
    print("| precision | reference scored | mean abs proxy | max abs proxy | token ratios outside [0.9, 1.1] |")
    print("| --- | --- | --- | --- | --- |")
    for precision in ("fp32", "bf16 autocast, fp32 weights", "bf16 weights"):
        if precision == "bf16 weights":
            model.to(torch.bfloat16)
        settings = {"device": device, "autocast": precision.startswith("bf16 autocast")}
        policy = score(model, rollouts, COMPOSITIONS[0].micro_batches(rollouts), packed=True, **settings)
        for composition in COMPOSITIONS:
            batches = composition.micro_batches(rollouts)
            reference = score(model, rollouts, batches, packed=composition.packed, **settings)
            ratios = [p - r for p, r in zip(policy, reference, strict=True)]
            proxies = torch.stack([r.sum() for r in ratios]).abs()
            off = torch.cat(ratios).exp()
            outside = ((off < 0.9) | (off > 1.1)).float().mean()
            print(
                f"| {precision} | {composition.name} | {proxies.mean():.2g} | {proxies.max():.2g} | {outside:.2%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
