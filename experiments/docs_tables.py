"""Tables of docs/related_methods.md, exactly, and the share of docs/related_methods.md.

Run as `python -m experiments.docs_tables`.
"""

import math
from functools import lru_cache

import torch

from pacs_trl.experimental.dars import additional_completions
from pacs_trl.experimental.steer import entropy_sensitivities
from pacs_trl.objective import ClassWeighting, proxy_coefficients


SCHEDULES = {
    "off": None,
    "equal_treatment": {"schedule": "equal_treatment", "max_generations": 32},
    "hardness_weighted": {"schedule": "hardness_weighted", "max_generations": 64},
}


@lru_cache
def group_weight(right: int, size: int, weighting: ClassWeighting) -> float:
    """Sum of the absolute coefficients of a group at proxy 0, times the number of completions that the loss is divided
    by."""
    labels = torch.tensor([1.0] * right + [0.0] * (size - right), dtype=torch.float64)
    coefficients = proxy_coefficients(0 * labels, labels, num_generations=size, class_weighting=weighting)
    return size * coefficients.abs().sum().item()


def expectations(rate: float, schedule: dict | None) -> dict[str, float]:
    """Of a prompt with a success rate, exactly: completions, share of mixed groups, mean label, weight of its
    group."""
    expected = dict.fromkeys(("completions", "mixed", "label", "none", "balanced"), 0.0)
    for first in range(9):
        more = additional_completions(first, 8, **schedule) if schedule else 0
        for second in range(more + 1):
            right, size = first + second, 8 + more
            ways = math.comb(8, first) * math.comb(more, second)
            chance = ways * rate**right * (1 - rate) ** (size - right)
            expected["completions"] += chance * size
            expected["mixed"] += chance * (0 < right < size)
            expected["label"] += chance * right / size
            for weighting in ("none", "balanced"):
                expected[weighting] += chance * group_weight(right, size, weighting)
    return expected


def wrong_signs(num_tokens: int) -> float:
    """Share of sampled tokens of random logits where STEER's estimate has another sign than the first-order change of
    the entropy: beside the sampled token's logit all others fall."""
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(8000, num_tokens, generator=generator, dtype=torch.float64)).requires_grad_()
    logps = logits.log_softmax(-1)
    entropies = -(logps.exp() * logps).sum(-1)
    (slopes,) = torch.autograd.grad(entropies.sum(), logits)
    logps, entropies = logps.detach(), entropies.detach()
    sampled = torch.multinomial(logps.exp(), 1, generator=generator)
    # a step up the gradient of log p(sampled) moves the logits by 1 - p at the token, by -p at the others
    moves = torch.zeros_like(logps).scatter_(1, sampled, 1.0) - logps.exp()
    change = (slopes * moves).sum(-1)
    sampled_logps = logps.gather(1, sampled)
    estimate = -entropy_sensitivities(
        sampled_logps, torch.zeros_like(sampled_logps), entropies[:, None], sampled_logps < 0
    )[:, 0]
    return (estimate.sign() != change.sign()).double().mean().item()


def main() -> None:
    for name, schedule in SCHEDULES.items():
        for weighting in ("none", "balanced"):
            weights = [f"{expectations(rate, schedule)[weighting]:.2f}" for rate in (1 / 16, 1 / 8, 1 / 4, 1 / 2)]
            print(f"| `{name}`, `{weighting}` | {' | '.join(weights)} |")
    for denominator in (64, 8, 2):
        for name, schedule in SCHEDULES.items():
            rate, expected = 1 / denominator, expectations(1 / denominator, schedule)
            same = round(expected["completions"])
            shares = [f"{100 * share:.0f} %" for share in (expected["mixed"], 1 - (1 - rate) ** same - rate**same)]
            values = [f"{value:.2f}" for value in (expected["label"] / rate, expected["none"], expected["balanced"])]
            print(
                "| "
                + " | ".join([f"1/{denominator}", name, f"{expected['completions']:.1f}", *shares, *values])
                + " |"
            )
    rates = [(i + 0.5) / 500 for i in range(500)]
    plain, equal = ([expectations(rate, SCHEDULES[name]) for rate in rates] for name in ("off", "equal_treatment"))
    for key in ("completions", "mixed"):
        means = [f"{sum(each[key] for each in half) / 500:.2f}" for half in (plain, equal)]
        print(f"rates spread evenly, {key}, off and equal_treatment: {', '.join(means)}")
    print("STEER, other sign, 32 and 1,000 tokens:", *(f"{wrong_signs(number):.0%}" for number in (32, 1000)))


if __name__ == "__main__":
    main()
