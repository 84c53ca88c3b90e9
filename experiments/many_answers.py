"""Objectives on problems with many correct answers, compared at equal pass@1.

    python -m experiments.many_answers rates      # three learning rates for each arm, on two other seeds
    python -m experiments.many_answers train      # the arms of the page; recorded arms are skipped
    python -m experiments.many_answers best       # the second plan's arms, at the best of these rates
    python -m experiments.many_answers proposal_rates   # UCPO and gated problems, as `rates`
    python -m experiments.many_answers proposals     # the same at the best of these rates
    python -m experiments.many_answers_tables     # tables and figure

A problem is a number and up to two forbidden terms. An answer writes the number as an ordered sum of two to five
terms of 1 to 5, and every such sum is correct. The probabilities of all 3,906 answers are computed exactly, so that
pass@k, entropy, and the number of distinct correct answers have no sampling noise. The policies of several seeds are
transformers with one layer and 13,600 parameters each, trained side by side: S seeds, B completions, T tokens.
"""

import argparse
import gzip
import itertools
import json
import os
import time
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from experiments.right_answers.gated import expected_gains
from pacs_trl.experimental.ucpo import ucpo_weights
from pacs_trl.objective import (
    actor_coefficients,
    group_scores,
    maxrl_advantages,
    proxy_coefficients,
    real_loss,
    rloo_advantages,
)


RESULTS = Path(__file__).parents[1] / "docs/results/many_answers"

# Tokens: 0 ends an answer, 1 to 5 are terms, 6 is "no forbidden term", 6 + n is the number n.
NUM_TERMS, MOST_TERMS, NONE = 5, 5, 6
NUMBERS = range(4, 21)
MIN_ANSWERS, HELD_OUT = 4, 5  # correct answers of a problem; one problem in HELD_OUT is held out

WIDTH, HEADS, PROMPT = 32, 2, 3
PROMPTS, GROUP = 16, 8  # of an update
WARM_START = 0.15  # pass@1 on held-out problems
KS = (1, 8, 64)

Policy = dict[str, torch.Tensor]  # parameters of S seeds, the first dimension


@cache
def answers() -> torch.Tensor:
    """Return all answers, `(A, 5)`, filled up with 0, by number of terms, then in lexicographic order."""
    terms = (t for size in range(MOST_TERMS + 1) for t in itertools.product(range(1, NUM_TERMS + 1), repeat=size))
    return torch.tensor([[*t, *[0] * (MOST_TERMS - len(t))] for t in terms])


def correct(prompts: torch.Tensor, completions: torch.Tensor) -> torch.Tensor:
    """Return whether completions `(B, 5)` solve the problems of `prompts`, `(B, 3)`: bool `(B,)`."""
    forbidden = (completions.unsqueeze(2) == prompts[:, None, 1:]).flatten(1).any(dim=1)
    return (completions.sum(dim=1) == prompts[:, 0] - NONE) & ((completions > 0).sum(dim=1) >= 2) & ~forbidden


@cache
def problems() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the prompts for training and those held out, `(P, 3)`: the number and two forbidden terms."""
    forbidden = [(NONE, NONE), *((term, NONE) for term in range(1, NUM_TERMS + 1))]
    forbidden += itertools.combinations(range(1, NUM_TERMS + 1), 2)
    prompts = torch.tensor([(NONE + n, *terms) for n in NUMBERS for terms in forbidden])
    prompts = prompts[labels_of(prompts).sum(dim=1) >= MIN_ANSWERS]
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(0))
    num_held_out = len(prompts) // HELD_OUT
    return prompts[order[num_held_out:]], prompts[order[:num_held_out]]


def labels_of(prompts: torch.Tensor) -> torch.Tensor:
    """Return whether each answer solves each problem, bool `(P, A)`."""
    rows = prompts.repeat_interleave(len(answers()), dim=0)
    return correct(rows, answers().repeat(len(prompts), 1)).view(len(prompts), -1)


def copy_of(policy: Policy) -> Policy:
    return {name: value.detach().clone() for name, value in policy.items()}


def build(seeds: list[int]) -> Policy:
    names = ("tokens", "positions", "attention", "projection", "up", "down", "head")
    rows = (NONE + max(NUMBERS) + 1, PROMPT + MOST_TERMS, WIDTH, WIDTH, WIDTH, 4 * WIDTH, WIDTH)
    columns = (WIDTH, WIDTH, 3 * WIDTH, WIDTH, 4 * WIDTH, WIDTH, NUM_TERMS + 1)
    shapes = dict(zip(names, zip(rows, columns, strict=True), strict=True))
    matrices = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        matrices.append([torch.randn(shape, generator=generator) * shape[0] ** -0.5 for shape in shapes.values()])
    return {name: torch.stack(values) for name, values in zip(shapes, zip(*matrices, strict=True), strict=True)}


def next_logps(policy: Policy, tokens: torch.Tensor, past: list | None = None) -> torch.Tensor:
    """Return log-probs of the end and the terms after each of `tokens`, `(S, B, T)`: `(S, B, T, 6)`. `past` has the
    keys and values of earlier tokens, and receives those of these; with any, T must be 1."""
    num_seeds, num_rows, length = tokens.shape
    offset = past[0].shape[-2] if past else 0
    index = torch.arange(num_seeds)[:, None]
    hidden = policy["tokens"][index, tokens.flatten(1)].view(num_seeds, num_rows, length, WIDTH)
    hidden = (hidden + policy["positions"][:, None, offset : offset + length]).flatten(1, 2)  # (S, B * T, D)
    normed = F.rms_norm(hidden, (WIDTH,))
    heads = (normed @ policy["attention"]).view(num_seeds * num_rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
    query, key, value = heads
    if past:
        key, value = torch.cat([past[0], key], dim=2), torch.cat([past[1], value], dim=2)
    if past is not None:
        past[:] = [key, value]
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=offset == 0)
    hidden = hidden + mixed.transpose(1, 2).reshape(hidden.shape) @ policy["projection"]
    hidden = hidden + F.gelu(F.rms_norm(hidden, (WIDTH,)) @ policy["up"]) @ policy["down"]
    logits = F.rms_norm(hidden, (WIDTH,)) @ policy["head"]
    return logits.view(num_seeds, num_rows, length, -1).log_softmax(dim=-1)


def token_logps(policy: Policy, prompts: torch.Tensor, completions: torch.Tensor) -> torch.Tensor:
    """Return the log-probs of the tokens of completions, `(S, B, 5)`, 0 after the end."""
    logps = next_logps(policy, torch.cat([prompts, completions[..., :-1]], dim=2))[:, :, PROMPT - 1 :]
    return logps.gather(3, completions.unsqueeze(3)).squeeze(3) * mask_of(completions)


def mask_of(completions: torch.Tensor) -> torch.Tensor:
    """Return 1 for the terms and the end of each completion, 0 after it: `(S, B, 5)`."""
    ends = (completions == 0).long()
    return (ends.cumsum(dim=-1) - ends == 0).float()


@torch.no_grad()
def generate(policy: Policy, prompts: torch.Tensor) -> torch.Tensor:
    """Sample a completion for each of `prompts` `(S, B, 3)`: `(S, B, 5)`, filled up with 0."""
    past: list = []
    inputs, completions = prompts, torch.zeros(*prompts.shape[:2], 0, dtype=torch.long)
    for size in range(MOST_TERMS):
        probs = next_logps(policy, inputs, past)[:, :, -1].exp()
        inputs = probs.flatten(0, 1).multinomial(1).view(*prompts.shape[:2], 1)
        inputs = inputs.masked_fill(completions[..., -1:] == 0, 0) if size else inputs
        completions = torch.cat([completions, inputs], dim=2)
    return completions


@torch.no_grad()
def answer_logps(policy: Policy, prompts: torch.Tensor) -> torch.Tensor:
    """Return the exact log-probs of all answers to `prompts` `(P, 3)`: `(S, P, A)`. Each prefix is computed once."""
    num_seeds = len(policy["head"])
    past: list[torch.Tensor] = []
    ended = []  # log-probs of the answers that end after each number of terms
    inputs, prefixes = prompts.expand(num_seeds, -1, -1), torch.zeros(num_seeds, len(prompts), 1)
    for size in range(MOST_TERMS):
        logps = next_logps(policy, inputs, past)[:, :, -1].view(*prefixes.shape, -1) + prefixes.unsqueeze(3)
        ended.append(logps[..., 0])
        prefixes = logps[..., 1:].flatten(2)  # (S, P, 5 ** (size + 1))
        past = [tensor.repeat_interleave(NUM_TERMS, dim=0) for tensor in past] if size < MOST_TERMS - 1 else past
        inputs = torch.arange(1, NUM_TERMS + 1).repeat(num_seeds, prefixes[0].numel() // NUM_TERMS).unsqueeze(2)
    return torch.cat([*ended, prefixes], dim=2)


def measure(policy: Policy, prompts: torch.Tensor, first: torch.Tensor | None = None) -> dict[str, list[float]]:
    """
    Return metrics by name, a value for each seed, means over problems: `pass@k`; `distinct`, the expected share of the
    correct answers that 64 samples contain; `entropy` of the answers in nats; of the correct answers their
    `perplexity`, mean number of `terms`, and the `kl` divergence of their ratios from those of `first`, the log-probs
    of the warm start `(S, P, A)`.
    """
    logps, labels = answer_logps(policy, prompts).double(), labels_of(prompts)
    probs = logps.exp()
    success = (probs * labels).sum(dim=2).clamp(max=1)
    metrics = {f"pass@{k}": 1 - (1 - success) ** k for k in KS}
    metrics["distinct"] = ((1 - (1 - probs) ** 64) * labels).sum(dim=2) / labels.sum(dim=1)
    metrics["entropy"] = -(probs * logps).sum(dim=2)
    logs = shares_of(logps, labels)
    shares = logs.exp() * labels
    metrics["perplexity"] = (-(shares * logs).sum(dim=2)).exp()
    metrics["terms"] = (shares * (answers() > 0).sum(dim=1)).sum(dim=2)
    if first is not None:
        metrics["kl"] = (shares * (logs - shares_of(first.double(), labels))).sum(dim=2)
    return {name: [round(v, 5) for v in values.mean(dim=1).tolist()] for name, values in metrics.items()}


def shares_of(logps: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the logarithm of each correct answer's share of the correct answers' probability; 0 for others."""
    return logps.masked_fill(~labels, -torch.inf).log_softmax(dim=2).masked_fill(~labels, 0.0)


def warm_start(seeds: list[int]) -> Policy:
    """Train on correct answers until pass@1 exceeds `WARM_START`, and interpolate the weights to it. The number of
    terms of a demonstration is uniform, so correct answers have unequal probabilities."""
    policy = {name: value.requires_grad_() for name, value in build(seeds).items()}
    train, held_out = problems()
    labels, sizes = labels_of(train), (answers() > 0).sum(dim=1)
    correct_by_size = [(labels & (sizes == size)).float() for size in range(2, MOST_TERMS + 1)]
    weights = torch.stack([each / each.sum(dim=1, keepdim=True).clamp(min=1) for each in correct_by_size]).sum(dim=0)
    generator = torch.Generator().manual_seed(seeds[0])
    optimizer = torch.optim.AdamW(policy.values(), lr=3e-3, weight_decay=0.0)
    ends: dict[int, tuple[Policy, Policy]] = {}
    while len(ends) < len(seeds):
        before = copy_of(policy)
        for _ in range(20):
            rows = torch.randint(len(train), (len(seeds) * 64,), generator=generator)
            picked = weights[rows].multinomial(1, generator=generator).squeeze(1)
            shape = (len(seeds), 64, -1)
            loss = -token_logps(policy, train[rows].view(shape), answers()[picked].view(shape)).sum() / 64
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for i, value in enumerate(measure(policy, held_out)["pass@1"]):
            if value > WARM_START and i not in ends:
                after = copy_of(policy)
                ends[i] = {n: v[i] for n, v in before.items()}, {n: v[i] for n, v in after.items()}
    low, high = torch.zeros(len(seeds)), torch.ones(len(seeds))
    for _ in range(10):
        middle = (low + high) / 2
        policy = {
            n: torch.stack([ends[i][0][n].lerp(ends[i][1][n], middle[i]) for i in range(len(seeds))]) for n in policy
        }
        above = torch.tensor(measure(policy, held_out)["pass@1"]) > WARM_START
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return policy


class Arm(NamedTuple):
    """An objective with its settings."""

    method: str
    beta: float = 1.0
    reset: int = 1  # updates after which the reference becomes the policy; 0 keeps the warm start
    proxy: str = "sum"  # or "mean", over the tokens of a completion
    kl: float = 0.0  # weight of the divergence from the warm start, TRL's `beta`
    weighting: str = "balanced"  # class weights of PACS
    actor: float = 0.0  # `actor_term_coef` of PACS
    minibatches: int = 1  # updates per rollout, each with other prompts
    breadth: bool = False  # two updates on all minibatches of a rollout instead
    noise: float = 0.0  # share of the labels that are flipped
    tau: float = 0.2  # of UCPO
    gate: int = 0  # k of the pass@k whose expected gain multiplies GRPO's advantages; 0 is none

    @property
    def name(self) -> str:
        parts = [self.method, f"KL {self.kl:g}" if self.kl else "", f"gated, k = {self.gate}" if self.gate else ""]
        parts.append(f"tau {self.tau:g}" if self.method == "UCPO" else "")
        if self.method == "PACS":
            parts.append({0: "kept", 1: "rollout"}.get(self.reset, f"reset every {self.reset}"))
            parts.append("" if self.reset == 1 and self.beta == 1 else f"beta {self.beta:g}")
            parts.append("mean log-ratio" if self.proxy == "mean" else "")
            parts.append("no class weights" if self.weighting == "none" else "")
            parts.append(f"actor term {self.actor:g}" if self.actor else "")
        parts.append("breadth" if self.breadth else f"{self.minibatches} minibatches" if self.minibatches > 1 else "")
        parts.append(f"{self.noise:.0%} flipped" if self.noise else "")
        return ", ".join(part for part in parts if part)


def token_coefficients(
    arm: Arm, log_ratios: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor, logps: torch.Tensor
) -> torch.Tensor:
    """Return the derivative of an arm's loss with respect to the log-prob of each token, `(B, 5)`, of one seed, from
    the log-ratios and log-probs of tokens `(B, 5)` and the labels `(B,)`."""
    lengths = mask.sum(dim=1)
    scale = 1 / lengths if arm.proxy == "mean" or arm.method == "REAL" else torch.ones_like(lengths)
    ratios = log_ratios.sum(dim=1) * scale
    if arm.method == "PACS":
        settings: dict[str, Any] = {"num_generations": GROUP, "class_weighting": arm.weighting}
        coefficients = arm.beta * scale * proxy_coefficients(arm.beta * ratios, labels, **settings)
        if arm.actor:
            scores = group_scores(arm.beta * ratios, labels, num_generations=GROUP)
            coefficients = coefficients + arm.actor * actor_coefficients(scores, labels, **settings)
    elif arm.method == "REAL":
        ratios.requires_grad_()
        coefficients = scale * torch.autograd.grad(real_loss(ratios, labels, num_generations=GROUP), ratios)[0]
    elif arm.method == "RLOO":
        advantages = rloo_advantages(labels, num_generations=GROUP)
        weights = ratios.exp()  # of probabilities, clipped as in TRL
        coefficients = -advantages / len(labels) * weights.masked_fill((weights - 1) * advantages.sign() > 0.2, 0.0)
    elif arm.method == "MaxRL":
        coefficients = -maxrl_advantages(labels, num_generations=GROUP) / lengths.sum()
    else:
        grid = labels.view(-1, GROUP)
        advantages = (grid - grid.mean(dim=1, keepdim=True)) / (grid.std(dim=1, keepdim=True) + 1e-4)
        weights = torch.ones(len(labels))
        if arm.method == "UCPO":
            weights = ucpo_weights(logps.sum(dim=1) / lengths, labels == 1, GROUP, arm.tau).float()
        elif arm.gate:
            gains = expected_gains(GROUP, arm.gate).float()
            weights = (gains / gains[1])[grid.sum(dim=1).long()].repeat_interleave(GROUP)
        coefficients = -weights * advantages.flatten() / lengths.sum()
    return coefficients.unsqueeze(1) * mask


@torch.no_grad()
def rollout(policy: Policy, arm: Arm, prompts: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Sample a group for each of `PROMPTS` problems: prompts `(S, B, 3)`, completions `(S, B, 5)`, labels `(S, B)`,
    and log-probs of tokens, `(S, B, 5)`, or an empty tensor if the update follows at once."""
    num_seeds = len(policy["head"])
    rows = torch.randint(len(prompts), (num_seeds, PROMPTS), generator=generator)
    repeated = prompts[rows].repeat_interleave(GROUP, dim=1)
    completions = generate(policy, repeated)
    labels = correct(repeated.flatten(0, 1), completions.flatten(0, 1)).float().view(num_seeds, -1)
    if arm.noise:
        labels = (labels - (torch.rand(labels.shape, generator=generator) < arm.noise).float()).abs()
    logps = token_logps(policy, repeated, completions) if arm.minibatches > 1 else torch.empty(0)
    return repeated, completions, labels, logps


def train(
    arm: Arm, rate: float, seeds: list[int], start: Policy, *, updates: int, every: int, until: float = 1.0
) -> dict[str, Any]:
    """Train the policies of several seeds until pass@1 of all exceeds `until`, and return a record with metrics of
    held-out problems every `every` updates and the CPU seconds of the updates, measurements excluded."""
    prompts, held_out = problems()
    policy = {name: value.requires_grad_() for name, value in copy_of(start).items()}
    kept, first = start, answer_logps(start, held_out)
    optimizer = torch.optim.AdamW(policy.values(), lr=rate, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seeds[0])
    torch.manual_seed(seeds[0])
    seconds, curve = 0.0, []
    rollouts: list[tuple[torch.Tensor, ...]] = []
    for update in range(updates + 1):
        if update % every == 0:
            curve.append(measure(policy, held_out, first))
        if update == updates or min(curve[-1]["pass@1"]) > until:
            break
        began = time.process_time()
        if arm.reset > 1 and update % arm.reset == 0:
            kept = copy_of(policy)
        if not rollouts:
            rollouts = [rollout(policy, arm, prompts, generator) for _ in range(arm.minibatches)]
            if arm.breadth:
                rollouts = 2 * [tuple(torch.cat(parts, dim=1) for parts in zip(*rollouts, strict=True))]
        repeated, completions, labels, reference = rollouts.pop(0)
        mask = mask_of(completions)
        logps = token_logps(policy, repeated, completions)
        if arm.kl or arm.reset != 1:
            with torch.no_grad():
                reference = token_logps(kept, repeated, completions)
        elif arm.minibatches == 1:
            reference = logps.detach()
        log_ratios = (logps - reference).detach()
        rows = zip(log_ratios, labels, mask, logps.detach(), strict=True)
        coefficients = [token_coefficients(arm, *values) for values in rows]
        loss = (torch.stack(coefficients) * logps).sum()
        if arm.kl:
            gap = reference - logps
            loss = loss + arm.kl * (((gap.exp() - gap - 1) * mask).sum(dim=(1, 2)) / mask.sum(dim=(1, 2))).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seconds += time.process_time() - began
    success = (answer_logps(policy, held_out).exp() * labels_of(held_out)).sum(dim=2)  # by problem
    record = {"arm": arm.name, "rate": rate, "seeds": seeds, "every": every, "seconds": round(seconds, 1)}
    record["success"] = [[round(value, 3) for value in seed_success] for seed_success in success.tolist()]
    return record | {name: [point[name] for point in curve] for name in curve[0]}


ROLLOUT, GRPO = Arm("PACS"), Arm("GRPO")
KEPT = {beta: Arm("PACS", beta, 0) for beta in (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)}
MEAN = {beta: Arm("PACS", beta, 0, "mean") for beta in (0.1, 0.3, 1.0, 4.0, 10.0)}  # of about four tokens
RESET = {reset: Arm("PACS", reset=reset) for reset in (16, 80, 320)}
PENALTY = {kl: Arm("GRPO", kl=kl) for kl in (0.02, 0.1, 0.2, 0.3, 1.0)}
OTHERS = [Arm("RLOO"), Arm("MaxRL"), Arm("REAL")]
LEADING = [GRPO, ROLLOUT, KEPT[0.3], PENALTY[0.1]]
FAST = [RESET[80], *OTHERS[:2], MEAN[1.0], RESET[16], KEPT[0.1], OTHERS[2], PENALTY[0.02]]
SLOW = [KEPT[3.0], MEAN[4.0]]
NEW, NEW_SLOW = [KEPT[0.03], MEAN[0.1], MEAN[0.3]], [PENALTY[0.3], RESET[320]]
STILL = [PENALTY[1.0], KEPT[10.0], MEAN[10.0]]  # expected to stay below 40 %

# Learning rate, arms, updates, updates between two measurements; the pilots' seeds are not used again.
PLAN = [(1e-3, [*LEADING, *FAST[:3]], 320, 40), (1e-3, [KEPT[1.0]], 640, 80), (1e-3, FAST[3:], 320, 40)]
PLAN += [(3e-4, [GRPO], 960, 120), (1e-3, SLOW, 640, 80)]
RATES = [(rate, [*LEADING, *FAST, *NEW], size, size // 8) for rate, size in ((3e-3, 320), (1e-3, 320), (3e-4, 640))]
RATES += [(rate, [KEPT[1.0], *SLOW, *NEW_SLOW, *STILL], 640, 80) for rate in (3e-3, 1e-3)]
# The new arms, and those whose best rate is not 1e-3.
SECOND = [(3e-4, [OTHERS[1], ROLLOUT], 640, 80), (1e-3, [RESET[320], PENALTY[0.2]], 640, 80)]
SECOND += [(3e-4, [KEPT[0.1], *OTHERS[::2], *NEW, PENALTY[0.02]], 640, 80)]
SECOND += [(3e-3, [PENALTY[0.3], *STILL[1:]], 320, 40), (1e-3, STILL[:1], 320, 40)]
PROPOSALS = [Arm("UCPO"), Arm("UCPO", tau=1.0), Arm("GRPO", gate=64), Arm("GRPO", gate=8)]
PROPOSAL_RATES = [(rate, PROPOSALS, size, size // 8) for rate, size in ((3e-3, 320), (1e-3, 320), (3e-4, 640))]
# Each proposal at its best rate.
THIRD = [(3e-4, [*PROPOSALS[:2], PROPOSALS[3]], 640, 80), (1e-3, [PROPOSALS[2]], 320, 40)]
SEEDS, RATE_SEEDS = list(range(10)), [200, 201]  # those of the first pilot were 100 and 101

# Arms with sizes, seeds, and the pass@1 after which a run ends.
COMMANDS = {"rates": (RATES, RATE_SEEDS, 0.4), "train": (PLAN, SEEDS, 1.0)}
COMMANDS |= {"best": (SECOND, SEEDS, 0.5), "proposals": (THIRD, SEEDS, 0.5)}
COMMANDS["proposal_rates"] = (PROPOSAL_RATES, RATE_SEEDS, 0.4)


def read_records(results: Path) -> list[dict[str, Any]]:
    path = results / "records.jsonl.gz"
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()] if path.is_file() else []


def train_missing(results: Path, wanted: list[tuple[Arm, float]], seeds: list[int], **sizes: Any) -> None:
    """Train and record the arms that are not recorded with these seeds and learning rates."""
    start = None
    for arm, rate in wanted:
        records = read_records(results)
        if any((r["arm"], r["rate"], r["seeds"]) == (arm.name, rate, seeds) for r in records):
            continue
        start = warm_start(seeds) if start is None else start
        record = train(arm, rate, seeds, start, **sizes)
        content = "".join(json.dumps(r, separators=(",", ":")) + "\n" for r in [*records, record])
        (results / "records.tmp").write_bytes(gzip.compress(content.encode(), mtime=0))
        os.replace(results / "records.tmp", results / "records.jsonl.gz")
        print(f"{arm.name}, {rate:g}: pass@1 {mean(record['pass@1'][-1]):.3f}, {record['seconds']} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=list(COMMANDS))
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    args.results.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    plan, seeds, until = COMMANDS[args.command]
    for rate, arms, updates, every in plan:
        train_missing(args.results, [(arm, rate) for arm in arms], seeds, updates=updates, every=every, until=until)


if __name__ == "__main__":
    main()
