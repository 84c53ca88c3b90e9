"""Trainers of `reuse.py`, which log the movement of log-ratios and can generate with an older policy.

`reuse/gap` is the mean log-ratio (current policy to generating policy, summed over tokens) of a prompt's correct
completions minus that of its wrong ones, averaged over mixed groups; `reuse/moved` is the mean of its absolute value
over all completions; `reuse/force` is the share of the residuals that is left in mixed groups. At the first update on
a rollout they are 0, 0, and 1.

A *delayed* trainer generates with the weights of `delay` updates ago, on current prompts. Log-ratios refer to the
generating policy, or (`correct = False`) to the current policy, as if there were no delay; then at a first update the
ratio of GRPO is 1 and the scores of PACS are 0.
"""

from collections import deque

import torch

from pacs_trl.objective import class_weights
from pacs_trl.pacs_trainer import PACSTrainer
from pacs_trl.rollouts.rollout_trainer import RolloutTrainer
from pacs_trl.update.groups import Groups
from pacs_trl.update.policy_update import PolicyUpdate
from pacs_trl.update.reference import SnapshotReference


def movement(log_ratios: torch.Tensor, groups: Groups) -> dict[str, float]:
    """Return `reuse/gap` and `reuse/moved` of log-ratios `(B,)`, in nats; no gap without a mixed group."""
    gaps = []
    for rows in groups.members:
        own, labels = log_ratios[rows], groups.labels[rows]
        if (labels == 1).any() and (labels == 0).any():
            gaps.append(own[labels == 1].mean() - own[labels == 0].mean())
    gap = {"reuse/gap": torch.stack(gaps).mean().item()} if gaps else {}
    return gap | {"reuse/moved": log_ratios.abs().mean().item()}


def force(scores: torch.Tensor, groups: Groups, class_weighting: str) -> dict[str, float]:
    """Return `reuse/force`: the sum of the weighted residuals of mixed groups, relative to its value at scores of
    0."""
    weights, targets = groups.apply(class_weights, class_weighting=class_weighting)
    residuals, at_zero = (
        (weights * (torch.sigmoid(psi) - targets).abs())[groups.rows_of(groups.mixed)].sum().item()
        for psi in (scores, torch.zeros_like(scores))
    )
    return {"reuse/force": residuals / at_zero} if at_zero else {}


class _MeasuredUpdate(PolicyUpdate):
    def _summarize(self, step, proxies, entropy, num_forwarded):
        loss, metrics = super()._summarize(step, proxies, entropy, num_forwarded)
        metrics |= movement(proxies / self.objective.pacs_beta, step.groups)
        scores = self.objective.loss(step.groups, proxies)[1]
        return loss, metrics | force(scores, step.groups, self.objective.class_weighting)


class MeasuredPACS(PACSTrainer):
    def _create_update(self):
        return _MeasuredUpdate(**vars(super()._create_update()))


class MeasuredGRPO(RolloutTrainer):
    """With TRL's own update."""

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._scored = found[0].detach()
        return found

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        old = inputs.get("old_per_token_logps")
        log_ratios = (self._scored - (self._scored if old is None else old)) * inputs["completion_mask"]
        groups = Groups(inputs["labels"], inputs["groups"].tolist())
        for name, value in movement(log_ratios.sum(dim=1), groups).items():
            self._metrics["train"][name].append(value)
        return loss


class _Past:
    """Weights of the last `delay` updates; the oldest ones generate."""

    delay, correct = 0, True

    def _oldest(self):
        """Give the model the weights of `delay` updates ago inside the context; enter it once before each update."""
        if not hasattr(self, "_snapshots"):
            self._snapshots = deque(maxlen=self.delay + 1)
        self._snapshots.append(SnapshotReference(self.model))
        return self._snapshots[0].in_place_of_policy()


class DelayedPACS(_Past, MeasuredPACS):
    """PACS with one update per rollout."""

    def _prepare_inputs(self, generation_batch):
        with self._oldest():
            prepared = super()._prepare_inputs(generation_batch)
            if self.correct:
                self.update.cache_logps(self.model_wrapped, self.update.schedule(self._pending), "ref_logps")
        return prepared

    def _policy_is_reference(self) -> bool:
        return not self.correct


class DelayedGRPO(_Past, MeasuredGRPO):
    """GRPO with one update per rollout."""

    def _generate_and_score_completions(self, inputs):
        with self._oldest():
            batch = super()._generate_and_score_completions(inputs)
            if self.correct:
                ids, mask = (
                    torch.cat([batch[f"prompt_{kind}"], batch[f"completion_{kind}"]], dim=1)
                    for kind in ("ids", "mask")
                )
                with torch.no_grad():
                    scored = self._get_per_token_logps_and_entropies(
                        self.model, ids, mask, batch["completion_ids"].size(1), self.args.per_device_train_batch_size
                    )
                batch["old_per_token_logps"] = scored[0]
        return batch


def delayed(trainer_class: type[_Past], delay: int, *, correct: bool) -> type:
    """Return a trainer that generates with the policy of `delay` updates ago; see the module docstring for
    `correct`."""
    return type(trainer_class.__name__, (trainer_class,), {"delay": delay, "correct": correct})
