"""Unpadded rollouts: the representation of a generation batch between generation and update.

TRL returns a generation batch as tensors padded to the longest completion. [`unpad_rollouts`] converts each completion
to one [`Rollout`] without padding, so that it can be dropped, reordered, moved to another process, and saved.
"""

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..errors import UserError
from .prompt_images import PromptImages


@dataclass
class Rollout:
    """
    One completion with its prompt.

    Attributes:
        prompt_ids (int32, shape `(P,)`), completion_ids (int32, shape `(C,)`): Token ids without padding.
        loss_mask (bool, shape `(C,)`): `True` for tokens that the policy generated; `False` for tool results and
            environment feedback.
        label (`float`): Reward of the completion, in [0, 1] for group losses; NaN if it has no label, or if it was
            truncated and is masked.
        group (`int`): Group id: equal for all completions of a prompt, distinct for other prompts of a step.
        old_logps, ref_logps (float32, shape `(C,)`, *optional*): Log-probs in nats under the policy at rollout time
            and under the reference of the proxies. Stored on the process that trains on the completion, before the
            policy changes, for the updates that read them; with a lag on every process, as reported by the engine.
        old_entropies (float32, shape `(C,)`, *optional*): Entropies in nats of the policy at rollout time, for token
            weights; not known for ratio losses with a lag.
        sampling_logps (float32, shape `(C,)`, *optional*): Log-probs in nats as reported by the generation engine; NaN
            where it reported none.
        weight (`float`): Factor on the gradient of the completion.
        advantage (`float`): Advantage of the completion; read by ratio losses.
        generation_tokens (`float`): Number of counted tokens in the generation batch of the completion.
        generation_share (`float`): Fraction of that generation batch per optimizer step; above 1 if a step uses
            several batches, and 1 in an evaluation.
        extra (`dict[str, np.ndarray]`): Method-specific arrays; saved in checkpoints.
        images ([`PromptImages`], *optional*): Images of the prompt, which all its completions share.
    """

    prompt_ids: np.ndarray
    completion_ids: np.ndarray
    loss_mask: np.ndarray
    label: float
    group: int = 0
    old_logps: np.ndarray | None = None
    ref_logps: np.ndarray | None = None
    sampling_logps: np.ndarray | None = None
    old_entropies: np.ndarray | None = None
    weight: float = 1.0
    advantage: float = 0.0
    generation_tokens: float = 0.0
    generation_share: float = 1.0
    extra: dict[str, np.ndarray] = field(default_factory=dict)
    images: PromptImages | None = None

    @property
    def num_counted(self) -> int:
        """Number of counted tokens: those with a True loss mask."""
        return int(self.loss_mask.sum())


def with_tensors(value: Any) -> Any:
    """Convert arrays in nested dicts to tensors, which `torch.load(weights_only=True)` accepts."""
    if isinstance(value, dict):
        return {name: with_tensors(inner) for name, inner in value.items()}
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def with_arrays(value: Any) -> Any:
    """Convert the result of [`with_tensors`] back."""
    if isinstance(value, dict):
        return {name: with_arrays(inner) for name, inner in value.items()}
    return value.numpy() if torch.is_tensor(value) else value


MAX_REWARD = 1e18  # in magnitude: advantages are computed in float32, from squares of rewards


def as_numbers(rewards: Any, name: str, num_completions: int | None) -> list[float | None]:
    """Return what the reward function `name` returned as a list, with `None` for NaN, which is a missing reward, as in
    TRL. Raises a `ValueError` unless it is an ordered iterable of finite numbers, NaN, or `None`, one per completion
    unless their number is unknown."""
    try:
        if isinstance(rewards, Mapping | Set | str | bytes) or not isinstance(rewards, Iterable):
            raise TypeError(f"a {type(rewards).__name__} is not a list")
        entries = list(rewards)
        if num_completions is not None and len(entries) != num_completions:
            raise UserError(f"{len(entries)} entries for {num_completions} completions")
        numbers = [None if entry is None else _as_number(entry) for entry in entries]
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:  # RuntimeError: tensors of several elements
        raise UserError(
            f"The reward function {name!r} returned {rewards!r:.100} ({error}). It must return one entry per "
            "completion: a finite number, or None or NaN for no verdict."
        ) from error
    return numbers


def _as_number(entry: Any) -> float | None:
    if isinstance(entry, str | bytes):
        raise TypeError(f"{entry!r:.50} is text")
    number = float(entry)
    if math.isnan(number):
        return None
    if abs(number) > MAX_REWARD:
        raise UserError(f"{number:g} is larger than {MAX_REWARD:g}")
    return number


def weighted_rewards(rewards_per_func: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum `(B,)` of the rewards `(B, F)`, where NaN rewards (no verdict) are skipped; NaN for a
    completion whose rewards are all NaN."""
    rewards = (rewards_per_func * weights.to(rewards_per_func.device)).nansum(dim=1)
    return rewards.masked_fill(rewards_per_func.isnan().all(dim=1), torch.nan)


def labels_from_rewards(rewards_per_func: torch.Tensor, weights: torch.Tensor, names: Sequence[str]) -> torch.Tensor:
    """
    Return labels `(B,)` in [0, 1] from rewards `(B, F)`, as [`weighted_rewards`]; NaN where no reward function has a
    verdict. `names` are the names of the reward functions, for the error.

    Raises:
        `ValueError`: if a label lies outside of [0, 1].
    """
    labels = weighted_rewards(rewards_per_func, weights)
    outside = (labels < -1e-6) | (labels > 1 + 1e-6)
    if outside.any():
        row = int(outside.nonzero()[0])
        parts = ", ".join(
            f"{name}={value:g} (weight {weight:g})"
            for name, value, weight in zip(names, rewards_per_func[row].tolist(), weights.tolist(), strict=True)
        )
        raise UserError(
            f"Labels must lie in [0, 1], but completion {row} of the generation batch has "
            f"{labels[row].item():g}: {parts}. The label is the weighted sum of the reward functions. Rescale the "
            "reward functions to [0, 1], or set reward_weights that sum to at most 1."
        )
    return labels.clamp(0, 1)


def unpad_rollouts(batch: dict[str, torch.Tensor]) -> list[Rollout]:
    """Convert a padded batch to rollouts. `batch` is the result of `_generate_and_score_completions` plus `"labels"`
    and `"groups"` of shape `(B,)`, and optionally `"extra"`. A completion whose mask is all zero was truncated and is
    masked by `mask_truncated_completions`; its label becomes NaN."""
    prompts = without_padding(batch["prompt_ids"], batch["prompt_mask"])
    completions = without_padding(batch["completion_ids"], batch["completion_mask"])
    tool_mask = batch["tool_mask"] if "tool_mask" in batch else batch["completion_mask"]
    masks = without_padding(tool_mask > 0, batch["completion_mask"])
    labels, groups, advantages = batch["labels"].tolist(), batch["groups"].tolist(), batch["advantages"].tolist()
    sampling_logps: Sequence[np.ndarray | None] = [None] * len(prompts)
    if "sampling_per_token_logps" in batch:
        sampling_logps = without_padding(batch["sampling_per_token_logps"].float(), batch["completion_mask"])
    extra: Any = batch["extra"] if "extra" in batch else [{}] * len(prompts)
    images: Any = batch["images"] if "images" in batch else [None] * len(prompts)
    return [
        Rollout(
            prompt_ids=prompts[i].astype(np.int32),
            completion_ids=completions[i].astype(np.int32),
            loss_mask=masks[i],
            label=labels[i] if len(completions[i]) else float("nan"),
            group=groups[i],
            sampling_logps=sampling_logps[i],
            advantage=advantages[i],
            generation_tokens=float(batch["num_items_in_batch"]),
            extra=extra[i] if len(completions[i]) else {},
            images=images[i],
        )
        for i in range(len(prompts))
    ]


def without_padding(values: torch.Tensor, mask: torch.Tensor) -> list[np.ndarray]:
    """Return, for each of `B` sequences, the values where the mask is not 0; both arguments have shape `(B, N)`."""
    rows, masks = values.cpu().numpy(), mask.cpu().numpy() > 0
    return [row[row_mask] for row, row_mask in zip(rows, masks, strict=True)]
