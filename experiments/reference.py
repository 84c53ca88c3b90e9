"""Effect of the reference on the ratios of correct answers: exact expectations, and a simulation with sampled groups.

`python -m experiments.reference` prints the three tables of docs/results/reference; three minutes on one core.

One problem has a few answers, and the policy is a softmax over them, so the claim of the paper's appendix A.2 can be
computed: `pi*(o) = pi_ref(o) * exp(logit of the label / beta)`, so correct answers keep the reference's ratios.
"""

import argparse
import itertools
import math
from collections.abc import Callable
from functools import partial

import torch

from pacs_trl.objective import proxy_coefficients


# The exact table: four answers, two correct, with a reference ratio of 12.
REFERENCE = torch.tensor([0.6, 0.2, 0.15, 0.05], dtype=torch.float64)
LABELS = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)

# The simulation: 24 answers of which 6 are correct, groups of 8.
ANSWERS, CORRECT, GROUP = 24, 6, 8
GROUPS, LEARNING_RATE, SUCCESS, MOST_UPDATES = 16, 0.01, 0.95, 6000


def exact(
    *,
    reset: int | None = None,
    beta: float = 1.0,
    num_generations: int = 4,
    class_weighting: str = "none",
    step: float = 1.0,
    num_updates: int = 800,
) -> list[torch.Tensor]:
    """
    Return the log-probs of the four answers, `(4,)`, before each update and after the last.

    The updates are gradient descent on the exact expectation over all groups.

    Args:
        reset (`int`, *optional*): Updates after which the reference becomes the policy; `None` keeps it.
        beta (`float`): Weight of the log-ratios. 0 sets all scores to 0, which makes the gradient that of RLOO.
    """
    reference, logits = REFERENCE.log(), REFERENCE.log()
    groups = torch.tensor(list(itertools.product(range(4), repeat=num_generations)))
    settings = {"num_generations": num_generations, "class_weighting": class_weighting}
    found = []
    for update in range(num_updates):
        found.append(logps := logits.log_softmax(0))
        if reset and update % reset == 0:
            reference = logps
        proxies = beta * (logps - reference)[groups].flatten()
        of_completions = proxy_coefficients(proxies, LABELS[groups].flatten(), **settings).view(-1, num_generations)
        expected = of_completions * len(groups) * logps[groups].sum(dim=1, keepdim=True).exp()
        of_answers = torch.zeros_like(REFERENCE).index_add(0, groups.flatten(), expected.flatten())
        logits = logits - step * (of_answers - logps.exp() * of_answers.sum())
    return [*found, logits.log_softmax(0)]


def ratio_and_entropy(logps: torch.Tensor) -> tuple[float, float]:
    """Return the ratio of the two correct answers and the entropy in nats."""
    return (logps[0] - logps[3]).exp().item(), -(logps.exp() * logps).sum().item()


def decay(path: list[torch.Tensor], update: int) -> float:
    """Return the exponent of the power law by which the probability of the incorrect answers falls from a quarter of
    `update` updates to `update`."""
    early, late = (path[time].exp()[LABELS == 0].sum().item() for time in (update // 4, update))
    return math.log(late / early, 4)


def start() -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs and labels of the answers; the correct ones have 7 % together and a perplexity of 4.16."""
    correct = torch.softmax(-0.5718 * torch.arange(CORRECT, dtype=torch.float64), 0) * 0.07
    wrong = torch.softmax(-0.1 * torch.arange(ANSWERS - CORRECT, dtype=torch.float64), 0) * 0.93
    return torch.cat([correct, wrong]).log(), (torch.arange(ANSWERS) < CORRECT).double()


def pacs(proxies: torch.Tensor, labels: torch.Tensor, *, beta: float, class_weighting: str) -> torch.Tensor:
    """Return `c_i` of PACS for log-ratios `(B,)`."""
    return beta * proxy_coefficients(beta * proxies, labels, num_generations=GROUP, class_weighting=class_weighting)


def policy_gradient(proxies: torch.Tensor, labels: torch.Tensor, *, kind: str) -> torch.Tensor:
    """Return `c_i` of RLOO, GRPO, or MaxRL; their advantages do not depend on the log-ratios."""
    rewards = labels.view(-1, GROUP)
    centered = rewards - rewards.mean(dim=1, keepdim=True)
    scale = {
        "rloo": torch.full_like(centered[:, :1], (GROUP - 1) / GROUP),
        "grpo": rewards.std(dim=1, keepdim=True) + 1e-4,
        "maxrl": rewards.mean(dim=1, keepdim=True) + 1e-6,
    }[kind]
    return (-centered / scale).flatten() / labels.numel()


def simulate(
    coefficients: Callable, *, reset: int | None = None, kl: float = 0.0, runs: int = 10
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Train `runs` policies with Adam on sampled groups and measure each when its success rate reaches 95 %.

    Args:
        coefficients (`Callable`): `c_i` from log-ratios and labels.
        reset (`int`, *optional*): Updates after which the reference becomes the policy; `None` keeps the start.
        kl (`float`): Weight of the KL divergence from the start, as TRL's `beta`.

    Returns:
        Updates, perplexity of the correct answers, and KL divergence of their ratios from the reference's in nats,
        each `(runs,)`; NaN for a run that has not reached 95 % after 6,000 updates.
    """
    first, labels = start()
    found = torch.full((3, runs), torch.nan, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    logits = first.repeat(runs, 1).requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=LEARNING_RATE)
    reference = first.repeat(runs, 1)
    for update in range(MOST_UPDATES):
        logps = logits.log_softmax(1)
        probs = logps.detach().exp()
        arrived = (probs[:, :CORRECT].sum(dim=1) >= SUCCESS) & found[0].isnan()
        if arrived.any():
            logs = logps.detach()[arrived, :CORRECT].log_softmax(1)
            entropies = -(logs.exp() * logs).sum(dim=1)
            divergences = (logs.exp() * (logs - first[:CORRECT].log_softmax(0))).sum(dim=1)
            found[:, arrived] = torch.stack([torch.full_like(entropies, update), entropies.exp(), divergences])
        if not found.isnan().any():
            break
        if reset and update % reset == 0:
            reference = logps.detach()
        answers = probs.multinomial(GROUPS * GROUP, replacement=True, generator=generator)
        ratios = (logps.detach() - reference).gather(1, answers)
        weights = coefficients(ratios.flatten(), labels[answers].flatten()).view(runs, -1) * runs
        loss = (weights * logps.gather(1, answers)).sum() + kl * (logps.exp() * (logps - first)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return found[0], found[1], found[2]


def arms() -> dict[str, dict]:
    """Return the arms of the simulation with the arguments of `simulate`."""
    found: dict[str, dict] = {}
    for reference, reset in (("kept", None), ("reset every 320", 320), ("reset every 80", 80), ("rollout", 1)):
        betas = (0.3, 1.0, 3.0) if reset is None else (1.0,)
        for beta in betas:
            for weighting in ("balanced", "none") if beta == 1.0 and reset in (None, 1) else ("balanced",):
                name = f"PACS, {reference}, beta {beta:g}" + ("" if weighting == "balanced" else ", no class weights")
                found[name] = {"coefficients": partial(pacs, beta=beta, class_weighting=weighting), "reset": reset}
    for kind in ("rloo", "grpo", "maxrl"):
        found[{"rloo": "RLOO", "grpo": "GRPO", "maxrl": "MaxRL"}[kind]] = {
            "coefficients": partial(policy_gradient, kind=kind)
        }
    for kl in (0.01, 0.05, 0.2):
        found[f"GRPO, KL {kl:g}"] = {"coefficients": partial(policy_gradient, kind="grpo"), "kl": kl}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    runs = parser.parse_args().runs
    print("| reference | ratio, 800 updates of step 1 | entropy | ratio, 6,000 updates of step 0.3 | entropy |")
    print("| --- | ---: | ---: | ---: | ---: |")
    settings: dict[str, dict] = {"kept": {}, "reset every 80": {"reset": 80}, "reset every 4": {"reset": 4}}
    for name, arguments in (settings | {"RLOO": {"beta": 0.0}}).items():
        ends = [exact(**arguments, step=step, num_updates=n)[-1] for step, n in ((1.0, 800), (0.3, 6000))]
        values = [value for end in ends for value in ratio_and_entropy(end)]
        print(f"| {name} | " + " | ".join(f"{value:,.1f}" if value > 2 else f"{value:.3f}" for value in values) + " |")

    print("\n| completions per group | beta | exponent, measured | predicted | gap after 20,000 updates, nats |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for size, beta in itertools.product((2, 4), (0.0, 0.3, 1.0, 3.0)):
        path = exact(beta=beta, num_generations=size, num_updates=20000)
        gap = beta * (path[-1] - path[0])[:2].diff().abs().item()
        print(
            f"| {size} | {beta:g} | {decay(path, 20000):.3f} | {-1 / (1 + beta / (size - 1)):.3f} | {gap:.1f} |",
            flush=True,
        )

    print("\n| arm | reached 95 % | updates | perplexity of correct answers | KL from the reference's ratios, nats |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, arguments in arms().items():
        columns = [column[~column.isnan()] for column in simulate(**arguments, runs=runs)]
        texts = [f"{c.mean():.{digits}f} ± {c.std():.{digits}f}" for c, digits in zip(columns, (0, 2, 4), strict=True)]
        print(f"| {name} | {len(columns[0])} of {runs} | " + " | ".join(texts) + " |", flush=True)


if __name__ == "__main__":
    main()
