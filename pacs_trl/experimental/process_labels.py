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
from itertools import pairwise
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
        num_positions = np.array([len(labels_of_completion) for labels_of_completion in labels])  # (B,)
        ends = num_positions.cumsum()
        self.starts = (ends - num_positions).tolist()
        self.outcomes = torch.from_numpy(ends - 1)
        self.row = torch.from_numpy(np.repeat(np.arange(len(num_positions)), num_positions))
        in_sequence = [label for labels_of_completion in labels for label in labels_of_completion]
        all_labels = torch.tensor(in_sequence, dtype=groups.labels.dtype)  # (M,)
        self.labels = all_labels.masked_fill(~groups.scorable[self.row], math.nan)
        self._num_scorable = max(int(groups.scorable.sum()), 1)

        self.compared = self._counterparts(groups, num_positions)
        self._has_counterpart = self.compared >= 0  # (M, G - 1)
        self.scored = self._has_counterpart.any(dim=1)
        self._num_compared = self._has_counterpart.sum(dim=1).clamp(min=1)

        # For the derivative of the loss: the share 1 / n_u of each of the n_u counterparts in the score of position u,
        # and 1 minus the sum of the shares that a position has in the scores of others.
        self._compared_or_0 = self.compared.clamp(min=0).flatten()
        self._shares = self._has_counterpart.double() / self._num_compared[:, None]
        received = torch.zeros(len(all_labels), dtype=torch.float64)
        received.index_add_(0, self._compared_or_0, self._shares.flatten())
        self._remaining_share = 1 - received
        self._remaining_share[self._remaining_share.abs() < 1e-9] = 0  # seven times 1/7 is not 1

        # Class weights see each position and its counterparts as a group.
        labels_of_counterparts = self.labels[self.compared].masked_fill(~self._has_counterpart, math.nan)
        grid = torch.cat([self.labels[:, None], labels_of_counterparts], dim=1)  # (M, G)
        grid_weights, grid_targets = class_weights(
            grid.flatten(), num_generations=grid.shape[1], class_weighting=class_weighting
        )
        self.targets = grid_targets.view(grid.shape)[:, 0]
        num_scored = torch.zeros(len(num_positions)).index_add(0, self.row, self.scored.float())  # (B,)
        self.weights = grid_weights.view(grid.shape)[:, 0] / num_scored.clamp(min=1)[self.row]

    def _counterparts(self, groups: Groups, num_positions: np.ndarray) -> torch.Tensor:
        """Return the position of each other completion of the group that each position is compared with, `(M, G - 1)`;
        -1 is none."""
        compared = np.full((num_positions.sum(), groups.size - 1), -1)
        for members in groups.members:
            scorable = [i for i in members if groups.scorable[i]]
            for i in scorable:
                others = [j for j in scorable if j != i]
                for column, j in enumerate(others):
                    aligned = aligned_positions(num_positions[i], num_positions[j])  # counted from 1 in completion j
                    positions = np.where(aligned > 0, self.starts[j] + aligned - 1, -1)
                    compared[self.starts[i] : self.starts[i] + num_positions[i], column] = positions
        return torch.from_numpy(compared)

    def scores(self, proxies: torch.Tensor) -> torch.Tensor:
        """Return `psi` from prefix proxies, both `(M,)`; 0 without counterparts or if all proxies are equal."""
        differences = (proxies[:, None] - proxies[self.compared]).masked_fill(~self._has_counterpart, 0.0)
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
        return kept.index_add_(0, self._compared_or_0, differences.flatten())


def token_coefficients(
    coefficients: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor, shape: torch.Size
) -> torch.Tensor:
    """Return the coefficient of each token, of `shape` `(B, T)`: the sum of `coefficients` `(M,)` over the prefixes of
    `rows` that contain it. `ends` are inclusive, -1 for the empty prefix."""
    at_ends = coefficients.new_zeros(shape[0], shape[1] + 1).index_put((rows, ends + 1), coefficients)
    return at_ends.flip(1).cumsum(1).flip(1)[:, 1:]


def checked_labels(name: str, i: int, pairs: Any, num_tokens: int) -> tuple[list[int], list[float]]:
    """
    Return the positions and labels that a reward function returned for a completion.

    Args:
        name (`str`), i (`int`): Of the reward function and the completion, for the message.
        pairs: What it returned.
        num_tokens (`int`): Tokens of the completion.

    Raises:
        `ValueError`: if they are not (position, label) pairs, or out of range.
    """
    try:
        positions = [operator.index(position) for position, _ in pairs]
        labels = [float(label) for _, label in pairs]
    except (TypeError, ValueError):
        positions, labels = [], []
    increase = all(earlier < later for earlier, later in pairwise([-1, *positions, num_tokens]))
    are_labels = all(0 <= label <= 1 for label in labels)
    if not positions or not increase or not are_labels:
        raise UserError(
            f"The reward function {name!r} returned {pairs!r:.100} for completion {i} of {num_tokens} tokens. Return "
            "None or (position, label) pairs, the last one the outcome: increasing indices of completion_ids, labels "
            "in [0, 1]."
        )
    return positions, labels


def prefix_ends(rollout: Rollout) -> np.ndarray:
    """Return the index of the last token of each labeled prefix; without process labels, of the whole completion."""
    whole_completion = np.array([len(rollout.completion_ids) - 1])
    return rollout.extra.get("positions", whole_completion)


def rows_and_ends(micro_batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return completion and end of each labeled prefix of a micro-batch, `(M,)`."""
    ends = [torch.from_numpy(prefix_ends(rollout)).long() for rollout in micro_batch.rollouts]
    num_prefixes = torch.tensor([len(ends_of_completion) for ends_of_completion in ends])
    rows = torch.arange(len(ends)).repeat_interleave(num_prefixes)
    device = micro_batch.loss_mask.device
    return rows.to(device), torch.cat(ends).to(device)


@dataclass
class PrefixMinibatch(Minibatch):
    """[`Minibatch`] with proxies and coefficients of all prefixes."""

    prefixes: Prefixes = field(kw_only=True)

    def proxy_indices(self, indices: list[int]) -> list[int]:
        proxy_indices: list[int] = []
        for i in indices:
            start = self.prefixes.starts[i]
            proxy_indices += range(start, start + len(prefix_ends(self.rollouts[i])))
        return proxy_indices

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
        longest_prefix = prefix_ends(rollout)[-1] + 1
        return int(rollout.loss_mask[:longest_prefix].sum())

    def proxies(self, logps: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
        """Return [`objective.sequence_proxies`] of the prefixes, `(M,)`, from one float64 cumulative sum per
        completion."""
        rows, ends = rows_and_ends(micro_batch)
        mask, proxy = micro_batch.loss_mask, self.objective.proxy
        has_one_prefix_each = len(rows) == len(logps)
        if has_one_prefix_each:
            is_in_prefix = torch.arange(logps.shape[1], device=logps.device) <= ends[:, None]
            return super().proxies(logps, replace(micro_batch, loss_mask=mask & is_in_prefix))
        terms = logps.detach()
        if proxy != "mean_logp":
            terms = terms.float() - micro_batch.ref_logps.float()
        # Column `t` of the padded sums has the sum of the first `t` tokens.
        sums_of_first = F.pad(terms.masked_fill(~mask, 0.0).double().cumsum(dim=1), (1, 0))
        sums = sums_of_first[rows, ends + 1]
        if proxy != "log_ratio":
            num_tokens = F.pad(mask.cumsum(dim=1), (1, 0))[rows, ends + 1]
            sums = sums / num_tokens.clamp(min=1)
        return (self.objective.pacs_beta * sums).float()

    def coefficients(self, minibatch: Minibatch, indices: list[int], proxies: torch.Tensor) -> torch.Tensor:
        if not isinstance(minibatch, PrefixMinibatch):
            return super().coefficients(minibatch, indices, proxies)
        num_tokens, weights = [], []  # of each prefix
        for rollout in (minibatch.rollouts[i] for i in indices):
            for end in prefix_ends(rollout):
                num_tokens.append(int(rollout.loss_mask[: end + 1].sum()))
                weights.append(rollout.weight)
        proxy_indices = torch.tensor(minibatch.proxy_indices(indices))
        all_proxies = torch.zeros(minibatch.num_proxies).index_copy(0, proxy_indices, proxies)
        loss_derivatives = minibatch.prefixes.coefficients(all_proxies)[proxy_indices]
        proxy_derivatives = self.objective.proxy_derivatives(torch.tensor(num_tokens))
        return proxy_derivatives * loss_derivatives * torch.tensor(weights)

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
        has_other_label = prefixes.labels[prefixes.compared] != prefixes.labels[:, None]
        is_mixed = (has_other_label & (prefixes.compared >= 0)).any(dim=1)
        metrics = {
            "process/labels": int(is_process_label.sum()) / max(num_completions, 1),
            "process/label_mean": prefixes.labels[is_process_label].float().mean().item(),
            "process/mixed_fraction": is_mixed[is_process_label & prefixes.scored].float().mean().item(),
        }
        metrics |= critic_metrics(
            proxies[outcomes],
            scores[outcomes],
            minibatch.groups,
            class_weighting=self.objective.class_weighting,
        )
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
        has_pairs = isinstance(rewards, list) and any(isinstance(reward, list | tuple) for reward in rewards)
        if not has_pairs:
            return rewards
        completion_ids = arguments["completion_ids"]
        if len(rewards) != len(completion_ids):
            return rewards  # `as_numbers` refuses them
        if self._extra_of_completions is not None:
            raise UserError(
                f"{name!r} is the second reward function that returned (position, label) pairs. Return all pairs from "
                "one function, and numbers from the others."
            )
        outcomes: list[float | None] = []
        extra_of_completions: list[dict[str, np.ndarray]] = []
        for i, (pairs, ids) in enumerate(zip(rewards, completion_ids, strict=True)):
            if pairs is None:
                outcomes.append(None)
                extra_of_completions.append({})
                continue
            positions, labels = checked_labels(name, i, pairs, len(ids))
            *process_labels, outcome = labels
            weighted = np.array(process_labels, dtype=np.float32) * self.reward_weights[index].item()
            outcomes.append(outcome)
            extra_of_completions.append(
                {"positions": np.array(positions, np.int32), "process_labels": np.clip(weighted, 0, 1)}
            )
        self._extra_of_completions = extra_of_completions
        return outcomes
