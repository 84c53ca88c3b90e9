"""Process labels: PACS on prefixes of completions.

Extension point: labels of a completion. A reward function returns (position, label) pairs for each completion; the
last pair is the outcome. The score of a position is the proxy of the prefix that ends there, compared with aligned
prefixes of the other completions of the prompt. If every completion has one position, the update is that of PACS.

**Alignment** is by progress: of a completion with `K_i` positions, position `k < K_i` is compared with position
`ceil(k (K_j - 1) / (K_i - 1))` of each other completion that has more than one; `k = K_i`, the outcome, with `K_j`.
Positions without a counterpart have no score. **Weights**: the classes of a position and its counterparts have equal
weight; the scored positions of a completion share the weight 1. See docs/related_methods.md.

Shapes: `M` positions of all completions in sequence, `B` completions, `G` completions of the largest group.
"""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ..errors import UserError
from ..objective import ClassWeighting, class_weights
from ..pacs_config import PACSConfig
from ..pacs_trainer import PACSObjective, PACSTrainer, critic_metrics
from ..rollouts.reward_functions import with_result
from ..update.group_loss_update import GroupLossUpdate
from ..update.groups import Groups
from ..update.minibatch import MicroBatch, Minibatch
from ..update.policy_update import PolicyUpdate
from ..update.rollout import Rollout
from ..update.step_sizes import BatchSizes


def aligned_positions(number: int, other_number: int) -> np.ndarray:
    """Return, for each of `number` positions of a completion, the aligned one of a completion with `other_number`
    positions, `(number,)`, counted from 1; 0 if there is none."""
    # Equal progress: k / (number - 1) of one completion, rounded up to a position of the other. The last position, the
    # outcome, is aligned with the last.
    num_intervals = max(number - 1, 1)
    progress = np.arange(1, number) * (other_number - 1)  # in units of 1 / num_intervals
    aligned = (progress + num_intervals - 1) // num_intervals
    return np.append(aligned, other_number)


class Prefixes:
    """
    Positions of all completions, their counterparts, and the loss on them.

    Args:
        groups ([`Groups`]): Groups and outcomes of the completions.
        labels (sequence of `B` sequences of `float`): Labels in [0, 1] of each completion, the last one the outcome.
        class_weighting (`str`): See [`objective.class_weights`].

    Attributes:
        row, labels (`(M,)`): Completion and label of each position; NaN for completions that are not scorable.
        outcomes (`(B,)`), starts (list of `B` `int`): The last and the first position of each completion.
        compared (`(M, G - 1)`): Counterparts of each position; -1 is none.
        scored (bool, `(M,)`): Whether a position has counterparts.
        weights, targets (`(M,)`): Class weights of a position among its counterparts, divided by the scored positions
            of its completion, 0 without a score; and targets of the score.
    """

    def __init__(
        self, groups: Groups, labels: Sequence[Sequence[float]], class_weighting: ClassWeighting = "balanced"
    ):
        numbers = np.array([len(completion_labels) for completion_labels in labels])
        self.row = torch.from_numpy(np.repeat(np.arange(len(numbers)), numbers))
        self.outcomes = torch.from_numpy(numbers.cumsum() - 1)
        all_labels = torch.tensor(
            [label for completion_labels in labels for label in completion_labels], dtype=groups.labels.dtype
        )
        self.labels = all_labels.masked_fill(~groups.scorable[self.row], math.nan)
        compared = np.full((len(all_labels), groups.size - 1), -1)
        self.starts = starts = (numbers.cumsum() - numbers).tolist()
        for members in groups.members:
            rows = [i for i in members if groups.scorable[i]]
            for i in rows:
                for column, j in enumerate(j for j in rows if j != i):
                    aligned = aligned_positions(numbers[i], numbers[j])
                    aligned = np.where(aligned > 0, starts[j] + aligned - 1, -1)
                    compared[starts[i] : starts[i] + numbers[i], column] = aligned
        self.compared = torch.from_numpy(compared)
        self._is_other = self.compared >= 0
        self.scored = self._is_other.any(dim=1)
        self._num_compared = self._is_other.sum(dim=1).clamp(min=1)
        # For the derivative of the loss: the share 1 / n_u of each of the n_u counterparts in the score of position u,
        # and 1 minus the sum of the shares that a position has in the scores of others.
        self._counterparts = self.compared.clamp(min=0).flatten()
        self._shares = self._is_other.double() / self._num_compared[:, None]
        received = torch.zeros(len(all_labels), dtype=torch.float64).index_add(
            0, self._counterparts, self._shares.flatten()
        )
        self._remaining_share = 1 - received
        self._remaining_share[self._remaining_share.abs() < 1e-9] = 0  # seven times 1/7 is not 1
        self._num_scorable = max(int(groups.scorable.sum()), 1)
        others = self.labels[self.compared].masked_fill(~self._is_other, math.nan)
        grid = torch.cat([self.labels[:, None], others], dim=1)  # (M, G)
        grid_weights, grid_targets = class_weights(
            grid.flatten(), num_generations=grid.shape[1], class_weighting=class_weighting
        )
        weights = grid_weights.view(grid.shape)[:, 0]
        self.targets = grid_targets.view(grid.shape)[:, 0]
        shares = torch.zeros(len(numbers)).index_add(0, self.row, self.scored.float())
        self.weights = weights / shares.clamp(min=1)[self.row]

    def scores(self, proxies: torch.Tensor) -> torch.Tensor:
        """Return `psi` from prefix proxies, both `(M,)`; 0 without counterparts or if all proxies are equal."""
        differences = (proxies[:, None] - proxies[self.compared]).masked_fill(~self._is_other, 0.0)
        return differences.sum(dim=1) / self._num_compared.to(proxies)

    def loss(self, proxies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss `1 / N * sum_ik w_ik BCE(sigmoid(psi_ik), y_ik)` over scored positions, `N` the number of
        scorable completions, and the scores `psi`, `(M,)`. Differentiable in `proxies`, `(M,)`."""
        scores = self.scores(proxies)
        entropies = F.binary_cross_entropy_with_logits(scores, self.targets.to(scores), reduction="none")
        return (self.weights.to(scores) * entropies).sum() / self._num_scorable, scores

    @torch.no_grad()
    def coefficients(self, proxies: torch.Tensor) -> torch.Tensor:
        """Return the derivative of [`loss`] with respect to the proxy of each prefix, `(M,)`. With the derivatives
        with respect to scores, `e = w (sigmoid(psi) - y) / N`, it is `e_m - sum_u e_u / n_u` over the positions `u`
        that have `m` among their `n_u` counterparts. Exactly 0 if all of these are equal and their shares sum to 1, so
        that the update skips such completions."""
        scores = self.scores(proxies)
        residuals = self.weights.to(scores) * (torch.sigmoid(scores) - self.targets.to(scores)) / self._num_scorable
        differences = (residuals[self.compared] - residuals[:, None]) * self._shares.to(residuals)
        # `e_m - sum_u e_u / n_u`, written as `e_m * remaining_share + sum_u (e_m - e_u) / n_u` with a
        # `remaining_share` of `1 - sum_u 1 / n_u`, so that equal residuals cancel exactly.
        kept = residuals * self._remaining_share.to(residuals)
        return kept.index_add_(0, self._counterparts, differences.flatten())


def token_coefficients(
    coefficients: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor, shape: torch.Size
) -> torch.Tensor:
    """Return the coefficient of each token, of `shape` `(B, T)`: the sum of `coefficients` `(M,)` over the prefixes of
    `rows` that contain it. `ends` are inclusive, -1 for the empty prefix."""
    at_ends = coefficients.new_zeros(shape[0], shape[1] + 1).index_put((rows, ends + 1), coefficients)
    return at_ends.flip(1).cumsum(1).flip(1)[:, 1:]


def checked_labels(name: str, i: int, pairs: Any, num_tokens: int) -> tuple[list[int], list[float]]:
    """
    Return the positions and labels that reward function `name` returned for completion `i`.

    Raises:
        `ValueError`: if they are not (position, label) pairs, or out of range.
    """
    try:
        positions, labels = [operator.index(p) for p, _ in pairs], [float(y) for _, y in pairs]
    except (TypeError, ValueError):
        positions, labels = [], []
    rising = all(earlier < later for earlier, later in zip([-1, *positions], [*positions, num_tokens], strict=True))
    if not positions or not rising or not all(0 <= label <= 1 for label in labels):
        raise UserError(
            f"The reward function {name!r} returned {pairs!r:.100} for completion {i} of {num_tokens} tokens. Return "
            "None or (position, label) pairs, the last one the outcome: increasing indices of completion_ids, labels "
            "in [0, 1]."
        )
    return positions, labels


def prefix_ends(rollout: Rollout) -> np.ndarray:
    """Return the index of the last token of each labeled prefix."""
    return rollout.extra.get("positions", np.array([len(rollout.completion_ids) - 1]))


def rows_and_ends(micro_batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return completion and end of each labeled prefix of a micro-batch, `(M,)`."""
    ends = [torch.from_numpy(prefix_ends(rollout)).long() for rollout in micro_batch.rollouts]
    rows = torch.arange(len(ends)).repeat_interleave(torch.tensor(list(map(len, ends))))
    device = micro_batch.loss_mask.device
    return rows.to(device), torch.cat(ends).to(device)


@dataclass
class PrefixMinibatch(Minibatch):
    """[`Minibatch`] with proxies and coefficients of all prefixes."""

    prefixes: Prefixes = field(kw_only=True)

    def proxy_indices(self, indices: list[int]) -> list[int]:
        starts = self.prefixes.starts
        return [starts[i] + k for i in indices for k in range(len(prefix_ends(self.rollouts[i])))]

    @property
    def num_proxies(self) -> int:
        return len(self.prefixes.row)


class PrefixUpdate(GroupLossUpdate):
    """[`GroupLossUpdate`] on prefixes, for minibatches in which a completion has more than one label."""

    objective: PACSObjective

    def schedule_minibatch(self, rollouts: list[Rollout]) -> Minibatch:
        minibatch = super().schedule_minibatch(rollouts)
        if all(len(prefix_ends(rollout)) == 1 for rollout in rollouts):
            return minibatch
        labels = [[*rollout.extra.get("process_labels", ()), rollout.label] for rollout in rollouts]
        prefixes = Prefixes(minibatch.groups, labels, self.objective.class_weighting)
        return PrefixMinibatch(**vars(minibatch), prefixes=prefixes)

    def counted_tokens(self, rollout: Rollout) -> int:
        return int(rollout.loss_mask[: prefix_ends(rollout)[-1] + 1].sum())

    def proxies(self, logps: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
        """Return [`objective.sequence_proxies`] of the prefixes, `(M,)`, from one float64 cumulative sum per
        completion."""
        rows, last = rows_and_ends(micro_batch)
        mask, proxy = micro_batch.loss_mask, self.objective.proxy
        if len(rows) == len(logps):
            mask = mask & (torch.arange(logps.shape[1], device=logps.device) <= last[:, None])
            return super().proxies(logps, replace(micro_batch, loss_mask=mask))
        terms = logps.detach()
        if proxy != "mean_logp":
            terms = terms.float() - micro_batch.ref_logps.float()
        sums = F.pad(terms.masked_fill(~mask, 0.0).double().cumsum(dim=1), (1, 0))[rows, last + 1]
        if proxy != "log_ratio":
            num_tokens = F.pad(mask.cumsum(dim=1), (1, 0))[rows, last + 1]
            sums = sums / num_tokens.clamp(min=1)
        return (self.objective.pacs_beta * sums).float()

    def coefficients(self, minibatch: Minibatch, indices: list[int], proxies: torch.Tensor) -> torch.Tensor:
        if not isinstance(minibatch, PrefixMinibatch):
            return super().coefficients(minibatch, indices, proxies)
        prefixes = [(minibatch.rollouts[i], end + 1) for i in indices for end in prefix_ends(minibatch.rollouts[i])]
        num_tokens = torch.tensor([int(rollout.loss_mask[:end].sum()) for rollout, end in prefixes])
        weights = torch.tensor([rollout.weight for rollout, _ in prefixes])
        proxy_indices = torch.tensor(minibatch.proxy_indices(indices))
        all_proxies = torch.zeros(minibatch.num_proxies).index_copy(0, proxy_indices, proxies)
        loss_derivatives = minibatch.prefixes.coefficients(all_proxies)[proxy_indices]
        return self.objective.proxy_derivatives(num_tokens) * loss_derivatives * weights

    def token_coefficients(self, micro_batch: MicroBatch, coefficients: torch.Tensor) -> torch.Tensor:
        return token_coefficients(coefficients, *rows_and_ends(micro_batch), micro_batch.loss_mask.shape)

    def summarize(self, minibatch: Minibatch, proxies: torch.Tensor) -> tuple[float, dict[str, float]]:
        if not isinstance(minibatch, PrefixMinibatch):
            return super().summarize(minibatch, proxies)
        prefixes, outcomes = minibatch.prefixes, minibatch.prefixes.outcomes
        loss, scores = prefixes.loss(proxies)
        has_label = ~prefixes.labels.isnan()
        num_completions = int(has_label[outcomes].sum())
        is_process_label = has_label.index_fill(0, outcomes, False)
        differs = prefixes.labels[prefixes.compared] != prefixes.labels[:, None]
        mixed = (differs & (prefixes.compared >= 0)).any(dim=1)
        metrics = {
            "process/labels": int(is_process_label.sum()) / max(num_completions, 1),
            "process/label_mean": prefixes.labels[is_process_label].float().mean().item(),
            "process/mixed_fraction": mixed[is_process_label & prefixes.scored].float().mean().item(),
        }
        weighting = self.objective.class_weighting
        metrics |= critic_metrics(proxies[outcomes], scores[outcomes], minibatch.groups, class_weighting=weighting)
        return loss.item(), metrics


@dataclass
class ProcessLabelsConfig(PACSConfig):
    """Configuration of [`ProcessLabelsTrainer`]: the parameters of [`PACSConfig`]."""

    supports_rollout_lag = False
    supports_images = False

    def errors(self, step: BatchSizes) -> list[str]:
        errors = super().errors(step)
        if self.score_estimator != "rloo":
            errors.append(f"score_estimator={self.score_estimator!r} is not supported by process_labels. Use 'rloo'.")
        if self.actor_term_coef:
            errors.append("actor_term_coef is not supported by process_labels. Remove the key.")
        return errors


class ProcessLabelsTrainer(PACSTrainer):
    """[`PACSTrainer`] with one reward function that may return (position, label) pairs for each completion: positions
    are inclusive indices into `completion_ids`, and the last label is the outcome."""

    _name = "process_labels"
    _config_class = ProcessLabelsConfig
    update_class = PrefixUpdate

    def create_update(self) -> PolicyUpdate:
        update = super().create_update()
        if update.reads_completion_values:
            raise UserError(
                f"{type(self).__name__} combines process labels with token weights that need a value of every "
                "completion before the update (such as STEER's). Use one of the two methods."
            )
        return update

    def _wrap_reward(self, index: int, function: Callable, name: str) -> Callable:
        return super()._wrap_reward(index, with_result(function, partial(self._outcomes, index, name)), name)

    def _outcomes(self, index: int, name: str, rewards: Any, arguments: dict) -> Any:
        """Store the process labels that a reward function returned, and return its outcomes."""
        if not isinstance(rewards, list) or not any(isinstance(reward, list | tuple) for reward in rewards):
            return rewards
        completion_ids = arguments["completion_ids"]
        if len(rewards) != len(completion_ids):
            return rewards  # `as_numbers` refuses them
        if self._extra_of_completions is not None:
            raise UserError(
                f"{name!r} is the second reward function that returned (position, label) pairs. Return all pairs from "
                "one function, and numbers from the others."
            )
        pairs = [
            None if reward is None else checked_labels(name, i, reward, len(ids))
            for i, (reward, ids) in enumerate(zip(rewards, completion_ids, strict=True))
        ]
        self._extra_of_completions = [{} for _ in pairs]
        for extra, each in zip(self._extra_of_completions, pairs, strict=True):
            if each is not None:
                weighted = np.array(each[1][:-1], dtype=np.float32) * self.reward_weights[index].item()
                extra["positions"], extra["process_labels"] = np.array(each[0], np.int32), np.clip(weighted, 0, 1)
        return [None if each is None else each[1][-1] for each in pairs]
