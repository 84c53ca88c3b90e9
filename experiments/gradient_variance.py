"""Noise of the gradient under the three scores.

`python -m experiments.gradient_variance`, minutes on one core.

A miniature policy moves away from its reference, one update after the other. At some ages of the reference, groups of
completions are sampled, and the gradient of every group alone is taken under the scores "rloo", "dr_grpo" and "grpo".
What is compared is the noise in the mean over the groups relative to its length, which no optimizer that is free of
scale can change:

    noise share = trace(covariance of a group's gradient) / number of groups / |mean gradient|^2

"rloo" and "dr_grpo" cannot differ but by beta: psi_rloo = G / (G - 1) * psi_dr_grpo, so that the gradients are equal
up to a factor wherever beta is rescaled by (G - 1) / G. The script measures both, as they are and rescaled.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.studies import write_json
from pacs_trl.data.tasks import problems
from pacs_trl.evaluation.requests import SamplingSettings
from pacs_trl.evaluation.sampling import sample_completions
from pacs_trl.miniature.warm_start import warm_start
from pacs_trl.objective import group_scores, proxy_coefficients
from pacs_trl.update.groups import Groups
from pacs_trl.update.logps import sequence_logps


NUM_GENERATIONS = 8
AGES = (0, 1, 3, 10, 30, 100)
TASK, MAX_NEW_TOKENS = "terms", 72

# Label: score, factor of beta. With 7/8 of beta "rloo" is "dr_grpo".
VARIANTS = {
    "rloo": ("rloo", 1.0),
    "dr_grpo": ("dr_grpo", 1.0),
    "rloo, beta x 7/8": ("rloo", (NUM_GENERATIONS - 1) / NUM_GENERATIONS),
    "grpo": ("grpo", 1.0),
}


class Batch(NamedTuple):
    """Groups of completions: tokens of the prompt and of the completion of `B = P * G` rows, and their labels."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    labels: torch.Tensor  # (B,)

    def rows(self, some: slice) -> tuple[list[list[int]], list[list[int]]]:
        return self.prompt_ids[some], self.completion_ids[some]


def noise_share(gradients: torch.Tensor) -> float:
    """
    How much of the squared length of a mean gradient is expected to be noise.

    Args:
        gradients (`torch.Tensor` of shape `(P, D)`): Independent gradients, at least two.

    Returns:
        `float`: `trace(covariance) / P / |mean|^2`, at least 0 and about 1 if there is nothing but noise.
    """
    num_groups = len(gradients)
    mean = gradients.double().mean(dim=0)
    noise = (gradients.double() - mean).square().sum().item() / (num_groups - 1)
    return noise / num_groups / mean.square().sum().item()


def largest_share(gradients: torch.Tensor) -> float:
    """Share of the squared length of all gradients that the longest one in a hundred (at least one) has."""
    squares = gradients.double().square().sum(dim=1).sort(descending=True).values
    count = max(1, len(squares) // 100)
    return (squares[:count].sum() / squares.sum()).item()


def sample_batch(model, tokenizer, num_prompts: int, seed: int) -> Batch:
    """Groups for training problems drawn with the seed, at temperature 1."""
    rows = problems(TASK, "train", num_prompts, seed=seed)
    prompts = [[{"role": "user", "content": row["problem"]}] for row in rows]
    settings = SamplingSettings(temperature=1.0, top_p=1.0, max_new_tokens=MAX_NEW_TOKENS)
    drawn = sample_completions(
        model, tokenizer, prompts, n=NUM_GENERATIONS, settings=settings, seed=seed, batch_size=512
    )
    heads, tails, labels = [], [], []
    for prompt, row, completions in zip(prompts, rows, drawn, strict=True):
        head = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        for completion in completions:
            tail = tokenizer(completion.text, add_special_tokens=False)["input_ids"]
            tail += [tokenizer.eos_token_id] if completion.finish_reason == "stop" else []
            heads.append(head)
            tails.append(tail)
            labels.append(float(completion.text.endswith(rf"\boxed{{{row['answer']}}}")))
    return Batch(heads, tails, torch.tensor(labels))


@torch.no_grad()
def all_logps(model, batch: Batch) -> torch.Tensor:
    """Log-probability of each completion, float32 `(B,)`."""
    return sequence_logps(model, *batch.rows(slice(None)), batch_size=128).float()


def group_gradients(model, batch: Batch, proxies: torch.Tensor) -> dict[str, torch.Tensor]:
    """
    Gradient of the loss of every mixed group alone, `(P', D)`, under each variant.

    Groups of one class are left out: at proxy 0 they have no gradient, later a small one under every score.
    """
    parameters = list(model.parameters())
    gradients: dict[str, list[torch.Tensor]] = {label: [] for label in VARIANTS}
    groups = Groups(batch.labels, [row // NUM_GENERATIONS for row in range(len(batch.labels))])
    for group in groups.mixed.nonzero()[:, 0].tolist():
        rows = slice(group * NUM_GENERATIONS, (group + 1) * NUM_GENERATIONS)
        labels = batch.labels[rows]
        logps = sequence_logps(model, *batch.rows(rows))
        for label, (score, factor) in VARIANTS.items():
            coefficients = factor * proxy_coefficients(
                factor * proxies[rows], labels, num_generations=NUM_GENERATIONS, score_estimator=score
            )
            grads = torch.autograd.grad((coefficients * logps).sum(), parameters, retain_graph=True)
            gradients[label].append(torch.cat([grad.flatten() for grad in grads]))
    return {label: torch.stack(vectors) for label, vectors in gradients.items()}


def measure(model, reference, batch: Batch, age: int) -> list[dict[str, float | int | str]]:
    """Every number of one age of the reference; one row per variant."""
    proxies = all_logps(model, batch) - all_logps(reference, batch)
    gradients = group_gradients(model, batch, proxies)
    rows = []
    for label, (score, factor) in VARIANTS.items():
        scores = group_scores(factor * proxies, batch.labels, num_generations=NUM_GENERATIONS, score_estimator=score)
        mean = gradients[label].mean(dim=0)
        rows.append(
            {
                "age": age,
                "variant": label,
                "groups": len(gradients[label]),
                "noise_share": noise_share(gradients[label]),
                "mean_length": mean.norm().item(),
                "largest_share": largest_share(gradients[label]),
                "cosine_to_rloo": torch.cosine_similarity(mean, gradients["rloo"].mean(dim=0), dim=0).item(),
                "score_std": scores.std().item(),
                "proxy_std": proxies.std().item(),
            }
        )
    return rows


def run(num_prompts: int, ages: Sequence[int], learning_rate: float, seed: int) -> list[dict]:
    """Train with the score "rloo" against a fixed reference, and measure at the given ages of the reference."""
    start = warm_start("arithmetic/tiny", seed=seed)
    tokenizer = AutoTokenizer.from_pretrained(start, padding_side="left")
    model, reference = (AutoModelForCausalLM.from_pretrained(start) for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    rows = []
    for age in range(max(ages) + 1):
        if age in ages:
            rows += measure(model, reference, sample_batch(model, tokenizer, num_prompts, seed=10_000 + age), age)
            print(
                f"age {age}: " + ", ".join(f"{r['variant']} {r['noise_share']:.3f}" for r in rows[-4:]),
                flush=True,
            )
        batch = sample_batch(model, tokenizer, 16, seed=age)
        proxies = all_logps(model, batch) - all_logps(reference, batch)
        coefficients = proxy_coefficients(proxies, batch.labels, num_generations=NUM_GENERATIONS)
        optimizer.zero_grad()
        (coefficients * sequence_logps(model, *batch.rows(slice(None)))).sum().backward()
        optimizer.step()
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--num_prompts", type=int, default=256, help="groups at each age")
    parser.add_argument("--ages", type=int, nargs="+", default=list(AGES))
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", type=Path, default=Path("docs/results/analysis"))
    args = parser.parse_args(argv)
    rows = run(args.num_prompts, args.ages, args.learning_rate, args.seed)
    write_json(args.output_dir / "gradient_variance.json", rows)


if __name__ == "__main__":
    main()
