"""The part `attention`: packed rows against padded ones, and all of them against float32, forward and backward.

The yardstick of a half precision is what padded rows lose in it: packing may lose at most twice as much.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..update.rows import Rollout
from ..update.scorer import Scorer, fused_head
from .replay import Size, build_model, recorded_rollouts, shape_of
from .results import Found


PRECISIONS = ("float32", "autocast", "bfloat16")  # float32 weights under autocast to bfloat16; bfloat16 weights

# In float32 what is left is the order of sums: of a log-probability over a vocabulary and some layers, of a gradient over all tokens.
MAX_LOGP_ERROR, MAX_GRADIENT_ERROR = 1e-3, 1e-4


def compare(
    *, device: str, directory: Path, model: str, attention: str, completion_max: int, num_groups: int = 2
) -> Found:
    """Log-probabilities, entropies and gradients of a model of a shape, with one kind of packed attention."""
    size = Size(shape_of(model), completion_max, 4, num_groups, bf16=False)
    rollouts = rows_of(recorded_rollouts(size, num_groups, num_generations=4))
    policy = build_model(size.shape, device, initializer_range=0.05, attn_implementation="sdpa").eval()
    rows, bars, reference = [], {}, None
    for precision in PRECISIONS:
        if precision == "bfloat16":
            policy.to(torch.bfloat16)
        errors = {}
        for layout in ("padded", "packed"):
            if attention != "sdpa" and (layout, precision) == ("packed", "float32"):
                continue  # the kernels know half precisions only
            policy.set_attn_implementation(attention if layout == "packed" else "sdpa")
            found = passes(policy, rollouts, device, packed=layout == "packed", autocast=precision == "autocast")
            reference = found if reference is None else reference
            errors[layout] = differences(found, reference)
            named = {
                "model": model,
                "precision": precision,
                "layout": layout,
                "attention": policy.config._attn_implementation,
            }
            rows.append(named | errors[layout])
        if precision == "float32" and "packed" in errors:
            bars["packed is padded in float32, log-probabilities"] = errors["packed"]["logps, max"] < MAX_LOGP_ERROR
            bars["packed is padded in float32, gradient"] = errors["packed"]["gradient"] < MAX_GRADIENT_ERROR
        elif "packed" in errors:
            for name in ("logps, mean", "entropies, mean", "gradient"):
                text = f"packed loses at most twice what padded does, {precision}, {name}"
                bars[text] = errors["packed"][name] <= 2 * errors["padded"][name] + 1e-6
    worst = max(row["gradient"] for row in rows if row["layout"] == "packed")
    return Found(rows, bars, f"{model}, {attention}: gradients of packed rows within {worst:.2g} of float32")


def rows_of(recorded: Sequence[dict]) -> list[Rollout]:
    return [
        Rollout(
            np.asarray(row["prompt_ids"], np.int32),
            np.asarray(row["completion_ids"], np.int32),
            np.ones(len(row["completion_ids"]), bool),
            1.0,
        )
        for row in recorded
    ]


class Passes:
    """What forward and backward passes over rows gave: values per token on the CPU, gradients where the weights are."""

    def __init__(self) -> None:
        self.logps: list[torch.Tensor] = []
        self.entropies: list[torch.Tensor] = []
        self.gradients: dict[str, torch.Tensor] = {}


def passes(policy, rollouts: Sequence[Rollout], device: str, *, packed: bool, autocast: bool) -> Passes:
    """Four rows per pass, those of a prompt; the loss is the mean log-probability of every other row, less that of the rest."""
    scorer = Scorer(
        policy,
        torch.device(device),
        padding_free="always" if packed else "never",
        autocast=lambda: torch.autocast(device, dtype=torch.bfloat16, enabled=autocast),
    )
    found = Passes()
    policy.zero_grad()
    with fused_head(policy):
        for start in range(0, len(rollouts), 4):
            some = rollouts[start : start + 4]
            with scorer.attention():
                scores = scorer.score(policy, [r.prompt_ids for r in some], [r.completion_ids for r in some])
                loss = sum((1 - 2 * (i % 2)) * logps.mean() for i, logps in enumerate(scores.logps))
                loss.backward()
            found.logps += [logps.detach().float().cpu() for logps in scores.logps]
            found.entropies += [entropies.detach().float().cpu() for entropies in scores.entropies]
    found.gradients = {name: weight.grad for name, weight in policy.named_parameters()}
    for weight in policy.parameters():
        weight.grad = None
    return found


def differences(found: Passes, reference: Passes) -> dict[str, Any]:
    """Absolute differences of the values, in nats, and the norm of the difference of the gradients over the norm of the gradient."""
    errors = {}
    for name in ("logps", "entropies"):
        apart = (torch.cat(getattr(found, name)) - torch.cat(getattr(reference, name))).abs()
        errors |= {f"{name}, mean": apart.mean().item(), f"{name}, max": apart.max().item()}
    difference = size = 0.0
    for name, expected in reference.gradients.items():
        difference += (found.gradients[name].float() - expected).square().sum().item()
        size += expected.square().sum().item()
    return errors | {"gradient": (difference / size) ** 0.5}
