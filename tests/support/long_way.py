"""One optimizer step written down the long way: in float64, one forward pass per row without padding, autograd."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
import torch
from peft import PeftModel, get_peft_model

from pacs_trl import PACSConfig, PACSTrainer
from pacs_trl.objective import PACSLoss, pacs_loss
from support.models import (
    LORA,
    RELATIVE,
    TOKENIZER,
    load_weights,
    logps_and_entropies,
    relative_error,
    tiny_model,
)
from support.rollouts import Replay, Row, rows_of_update, steps_of
from support.runs import Recorder, build_trainer


@dataclass
class Step:
    """
    What the long way finds for one optimizer step: the loss, gradients by parameter name, proxies by row.

    `cancellation` is how many times smaller the gradient is than those of its rows with a residual of 1; for the
    latest step alone.
    """

    loss: float
    gradients: dict[str, torch.Tensor]
    proxies: torch.Tensor
    cancellation: Callable[[], float]


def _stacked(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(values, batch_first=True)


def in_graph_step(
    model: torch.nn.Module,
    replay: Replay,
    args: PACSConfig,
    update: int,
    weights: list[dict[str, torch.Tensor]],
    generations: list[dict[str, torch.Tensor]],
    start: dict[str, torch.Tensor] | None = None,
    *,
    token_weights: bool = False,
    ragged: bool = False,
) -> Step:
    """
    Loss and gradients of optimizer step `update` of a run, by autograd through the loss of all rows at once.

    `model` is float64; `weights` are those before each step, of the policy at each generation, and at the `start`;
    `token_weights` is whether the rows weigh tokens, `ragged` whether groups are those of `RaggedGroups`.
    """
    generation, rows = rows_of_update(replay, args, update)
    reference, every = generations[generation], args.reference_reset_steps
    if args.reference == "snapshot":
        reference = weights[update // every * every] if every else start

    def counts(row: Row) -> bool:
        ended = row.completion_ids[-1] in (TOKENIZER.eos_token_id, TOKENIZER.pad_token_id)
        return ended or not args.mask_truncated_completions

    def masked(row: Row) -> torch.Tensor:
        mask = torch.tensor(row.env_mask) if replay.tools else torch.ones(len(row.completion_ids), dtype=torch.long)
        return mask * counts(row)

    labels = torch.tensor(
        [float("nan") if r.label is None or not counts(r) else r.label for r in rows], dtype=torch.float64
    )
    mask = _stacked([masked(row) for row in rows])

    def values_with(its_weights: dict[str, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        load_weights(model, its_weights)
        return [logps_and_entropies(model, row) for row in rows]

    with torch.no_grad():
        ref_logps = _stacked([logps for logps, _ in values_with(reference)])
        if args.beta:
            kl_logps = _stacked([logps for logps, _ in values_with(start)])
        if hasattr(args, "token_weight_mapping"):  # STEER
            old_values = values_with(generations[generation])
    weights = weights[update]
    load_weights(model, weights)
    model.zero_grad()
    values = [logps_and_entropies(model, row) for row in rows]
    logps, entropies = (_stacked(list(part)) for part in zip(*values, strict=True))
    weighted = logps
    if token_weights:  # a factor on the gradient that leaves the value alone
        factors = _stacked([torch.tensor(r.token_weights, dtype=torch.float64) for r in rows])
        weighted = logps.detach() + factors * (logps - logps.detach())
    sizes = [args.num_generations] * (len(rows) // args.num_generations)
    if ragged:
        sizes = (SIZES[:4], SIZES[4:])[update % 2]
    if replay.steps or ragged:
        result = _prefix_loss(weighted, ref_logps, mask, rows, labels, args, sizes, replay.steps)
    else:
        names = ("num_generations", "pacs_beta", "score_estimator", "class_weighting", "proxy")
        kinds = {name: getattr(args, name) for name in names}
        result = pacs_loss(weighted, ref_logps, mask, labels, **kinds)
    actor_term = _actor_term(weighted * mask, result.scores.detach(), labels, args, sizes)
    objective = result.loss + args.actor_term_coef * actor_term
    loss = result.loss
    if args.beta:
        log_ratio = kl_logps - logps
        kl = ((log_ratio.exp() - log_ratio - 1) * mask).sum() / mask.sum()
        objective, loss = objective + args.beta * kl, loss + args.beta * kl
    if args.entropy_coef:
        bonus = args.entropy_coef * (entropies * mask).sum() / mask.sum()
        objective, loss = objective - bonus, loss - bonus
    if hasattr(args, "token_weight_mapping"):  # STEER
        objective = _steered(objective, logps, old_values, mask, args, sum(map(len, _judged(labels, sizes))))
    objective.backward(retain_graph=True)
    gradients = {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None and name in weights
    }

    def cancellation() -> float:
        weights = [model.get_parameter(name) for name in gradients]
        sums = (logps * mask).sum(dim=1) / len(rows)
        completion_gradients = [torch.autograd.grad(total, weights, retain_graph=True) for total in sums]
        return (sum(_norm(gradient) for gradient in completion_gradients) / _norm(gradients.values())).item()

    return Step(loss.item(), gradients, result.proxies.detach(), cancellation)


def _norm(tensors) -> torch.Tensor:
    return torch.stack([tensor.norm() for tensor in tensors]).norm()


def _steered(objective, logps, old_values, mask, args: PACSConfig, num_completions: int) -> torch.Tensor:
    """A sum with the gradient of the objective, in which each token has the weight of STEER, one token at a time."""
    (slopes,) = torch.autograd.grad(objective, logps, retain_graph=True)
    changes, total = {}, torch.zeros((), dtype=torch.float64)
    for i, (old_logps, entropies) in enumerate(old_values):
        for t in range(len(old_logps)):
            if mask[i, t]:
                p, old_p = logps[i, t].exp().item(), old_logps[t].exp().item()
                effect = p * (1 - p) * (np.log(p) + entropies[t].item()) / old_p
                changes[i, t] = abs(num_completions * slopes[i, t].item() * effect)
    least, most, low, high = min(changes.values()), max(changes.values()), args.token_weight_min, args.token_weight_max
    for (i, t), change in changes.items():
        weight = high - (high - low) * (change - least) / (most - least) if most > least else (high + low) / 2
        if args.token_weight_mapping == "exponential":
            weight = max(low, low ** (change / max(most, 0.02)))
        total = total + weight * slopes[i, t] * logps[i, t]
    return total


def _judged(labels, sizes: Sequence[int]) -> list[list[int]]:
    """Rows with a verdict of each group that has two of them."""
    bounds = np.cumsum([0, *sizes]).tolist()
    groups = [[i for i in range(*pair) if not labels[i].isnan()] for pair in zip(bounds, bounds[1:])]
    return [group for group in groups if len(group) > 1]


def _prefix_loss(
    logps, ref_logps, mask, rows: list[Row], labels, args: PACSConfig, sizes: Sequence[int], steps: bool
) -> PACSLoss:
    """Eq. 8 with the score of eq. 6 as loops over groups of any sizes, completions, labeled positions (without `steps`
    the last one alone), and what these are compared with."""
    groups, proxies, truths = _judged(labels, sizes), {}, {}
    for i in sum(groups, []):
        before, end = steps_of(rows[i].completion_ids) if steps else ([], len(rows[i].completion_ids) - 1)
        terms = logps[i] * mask[i] if args.proxy == "mean_logp" else (logps[i] - ref_logps[i]) * mask[i]
        for k, (position, truth) in enumerate([*before, (end, labels[i])], start=1):
            divisor = max(mask[i, : position + 1].sum(), 1) if args.proxy == "mean_logp" else 1
            proxies[i, k] = args.pacs_beta * terms[: position + 1].sum() / divisor
            truths[i, k] = float(truth)
    counts = {i: max(k for j, k in proxies if i == j) for i, _ in proxies}
    total, scores = torch.zeros((), dtype=torch.float64), torch.zeros(len(rows), dtype=torch.float64)
    for group in groups:
        for i in group:
            terms = []
            for k in range(1, counts[i] + 1):
                others = [(j, counts[j]) for j in group if j != i]
                if k < counts[i]:
                    others = [(j, math.ceil(Fraction(k * (n - 1), counts[i] - 1))) for j, n in others if n > 1]
                if others:
                    score = proxies[i, k] - sum(proxies[place] for place in others) / len(others)
                    terms.append(_cross_entropy(score, truths[i, k], [truths[p] for p in others], args))
            scores[i] = score.detach()  # of the outcome
            total = total + sum(terms) / len(terms)
    outcomes = torch.stack([proxies.get((i, counts.get(i)), total * 0) for i in range(len(rows))])
    return PACSLoss(total / max(sum(map(len, groups)), 1), scores, outcomes)


def _halves(label, right, number: int, class_weighting: str) -> tuple:
    """Weights of the halves of the cross-entropy of a completion, of whose `number` compared labels the sum is
    `right`."""
    up, down = label, 1 - label
    if class_weighting == "balanced" and 0 < right < number:
        up, down = up * number / 2 / right, down * number / 2 / (number - right)
    return up * (class_weighting != "only_negative"), down * (class_weighting != "only_positive")


def _cross_entropy(score, truth: float, others: list[float], args: PACSConfig) -> torch.Tensor:
    up, down = _halves(truth, truth + sum(others), len(others) + 1, args.class_weighting)
    return -up * torch.sigmoid(score).log() - down * torch.sigmoid(-score).log()


def _actor_term(logps, scores, labels, args: PACSConfig, sizes: Sequence[int]) -> torch.Tensor:
    """Eq. 5's actor term as a loop: each log-likelihood of a label, minus the mean over the other rows of its group,
    times the log-probability of the completion; summed, divided by the number of rows that count, and negated."""
    total, num_completions = torch.zeros((), dtype=torch.float64), 0
    for group in _judged(labels, sizes):
        right, ell = sum(labels[i] for i in group), {}
        for i in group:
            up, down = _halves(labels[i], right, len(group), args.class_weighting)
            p = torch.sigmoid(scores[i])
            ell[i] = up * p.log() + down * (1 - p).log()
        num_completions += len(group)
        for i in group:
            others = sum(ell[j] for j in group if j != i) / (len(group) - 1)
            total = total - (ell[i] - others) * logps[i].sum()
    return total / max(num_completions, 1)


SIZES = [1, 9, 2, 4, 7, 3, 5, 1]  # of the groups of two optimizer steps with 16 rows each


class RaggedGroups(PACSTrainer):
    """The 32 rows of a generation as groups of other sizes than the engine was asked for."""

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        group_of_rollout = torch.repeat_interleave(torch.arange(len(SIZES)), torch.tensor(SIZES))
        output["groups"] = group_of_rollout[self.accelerator.process_index * len(inputs) :][: len(inputs)]
        return output


TWO_UPDATES = {"steps_per_generation": 2, "max_steps": 4}  # two generations of two updates each
CORRECTION = {"vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "token_truncate"}
CORRECTION |= {"vllm_importance_sampling_clip_max": 100.0}


class WeightedTokens(PACSTrainer):
    """As if the engine had drawn with such probabilities that the correction returns the weights of the recorded
    rows."""

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        generation = self._step // (self.args.steps_per_generation * self.num_iterations)
        rows = self.rollout_replay.rows(generation, len(inputs))
        logps = torch.zeros_like(output["completion_ids"], dtype=torch.float32)
        with torch.no_grad():
            scores = self.forward_pass.compute_logps(
                self.model, [r.prompt_ids for r in rows], [r.completion_ids for r in rows]
            )
        for i, row in enumerate(rows):
            logps[i, : len(row.token_weights)] = scores.logps[i] - torch.tensor(row.token_weights).log()
        output["sampling_per_token_logps"] = logps
        return output


def train_and_compare(tmp_path, replay, *, model=None, trainer_class=None, max_steps=2, peft_config=None, **settings):
    """Train, compare every update, and return what the long way finds."""
    replay.weights.clear()
    recorder = Recorder()
    model = tiny_model() if model is None else model
    long_way = tiny_model() if isinstance(model, str | PeftModel) else copy.deepcopy(model)
    trainer = build_trainer(
        tmp_path,
        model=model,
        replay=replay,
        trainer_class=trainer_class,
        more={"callbacks": [recorder], "peft_config": peft_config},
        max_steps=max_steps,
        **settings,
    )
    trainer.rollout_replay = replay
    lora = isinstance(trainer.model, PeftModel)
    long_way = (get_peft_model(long_way, LORA) if lora else long_way).double()
    start = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(recorder.weights) == len(losses) == max_steps
    how = {"token_weights": isinstance(trainer, WeightedTokens), "ragged": trainer_class is RaggedGroups}
    steps = []
    for update in range(max_steps):
        runs = trainer.args, update, recorder.weights, replay.weights, start
        expected = in_graph_step(long_way, replay, *runs, **how)
        assert losses[update] == pytest.approx(expected.loss, rel=RELATIVE), f"loss of update {update}"
        error = relative_error(recorder.gradients[update], expected.gradients)
        # coefficients are differences of residuals: where they nearly cancel, the rounding of rows remains
        if error >= RELATIVE:
            error /= max(1.0, expected.cancellation())
        assert error < RELATIVE, f"gradient of update {update}"
        steps.append(expected)
    return trainer, steps
