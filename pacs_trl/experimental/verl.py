"""VERL ([arXiv 2509.23808](https://huggingface.co/papers/2509.23808)): a bonus for completions whose hidden states
span more directions.

Extension point: coefficients per completion. The effective rank of a completion measures exploration, its first and
second differences over the tokens exploitation. The formulas are the paper's; the authors' launch script
(github.com/hf618/VERL, 3de68f1) disables the bonus. See docs/related_methods.md.

Letters for shapes: `T` tokens of a completion, `D` width of the model, `B` completions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ..pacs_config import PACSConfig
from ..pacs_trainer import PACSTrainer
from ..settings.fields import setting
from ..update.forward_pass import ForwardPass, TokenIds
from ..update.group_loss_update import GroupLossUpdate
from ..update.minibatch import MicroBatch, Minibatch
from ..update.policy_update import PolicyUpdate
from ..update.step_sizes import BatchSizes


# As in the authors' code.
_EPSILON = 1e-8
LONGEST_PREFIX = 512  # last tokens that velocity and acceleration are computed from
_DECAY = 0.3  # of the running means: the weight of the newest step
_GAIN = 2.0
_MAX_DEVIATION = 5.0
_MAX_BONUS = 0.5  # share of the advantage


def effective_rank(hidden_states: torch.Tensor) -> float:
    """
    Return `exp(-sum p log p)`, `p` the singular values of centered hidden states divided by their sum.

    Args:
        hidden_states (`torch.Tensor` of shape `(T, D)`): Of the tokens of one completion.

    Returns:
        `float`: between 1 (one direction, or fewer than two tokens) and `min(T - 1, D)`.
    """
    states = hidden_states.double()
    if len(states) < 2:
        return 1.0
    states = states - states.mean(dim=0)
    return _gram_rank(states @ states.T if len(states) <= states.shape[1] else states.T @ states)


def _gram_rank(gram: torch.Tensor) -> float:
    """Return the effective rank from the float64 matrix of inner products, whose eigenvalues are squared singular
    values."""
    values = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()
    shares = values / (values.sum() + _EPSILON)
    return math.exp(-(shares * (shares + _EPSILON).log()).sum().item())


def rank_velocity_and_acceleration(hidden_states: torch.Tensor, stride: int) -> tuple[float, float]:
    """
    Return the growth of the effective rank over a completion: the mean of `d_j = E_j - mean(E_1, ..., E_(j-1))`, with
    the ranks `E_1, E_2, ...` of the prefixes of `stride + 1`, `2 stride + 1`, ... tokens, and the mean of
    `d_j - d_(j-1)`.

    Args:
        hidden_states (`torch.Tensor` of shape `(T, D)`): Of one completion, whose last 512 tokens are used.
        stride (`int`): Tokens between prefixes.

    Returns:
        Velocity and acceleration; 0 with fewer than two (velocity) or three prefixes (acceleration).
    """
    states = hidden_states[-LONGEST_PREFIX:].double()
    gram = states @ states.T
    ranks = []
    for n in range(stride + 1, len(states) + 1, stride):
        block = gram[:n, :n]
        row_means = block.mean(dim=0)
        ranks.append(_gram_rank(block - row_means - row_means[:, None] + row_means.mean()))
    differences = [rank - sum(ranks[:j]) / j for j, rank in enumerate(ranks) if j > 0]
    second = [later - earlier for earlier, later in zip(differences, differences[1:], strict=False)]
    return sum(differences) / max(len(differences), 1), sum(second) / max(len(second), 1)


def hidden_states(
    forward_pass: ForwardPass, model, prompt_ids: Sequence[TokenIds], completion_ids: Sequence[TokenIds]
) -> list[torch.Tensor]:
    """Return the final hidden states, after the last norm, of the tokens of each completion, `(C, D)`. Arguments as of
    [`ForwardPass.compute_logps`]."""
    # The state of a token is at the position that predicts the next one, so some token follows every completion.
    followed = [[*ids, 0] for ids in completion_ids]
    kept: list = []
    with forward_pass.backbone.register_forward_hook(lambda *call: kept.append(call[-1])):
        forward_pass.forward(model, prompt_ids, followed, logps=forward_pass.fused)
    states = kept[0].last_hidden_state[0]  # of the positions that predict, see `ForwardPass.forward`
    return [completion_states[1:] for completion_states in states.split(list(map(len, followed)))]


def verl_coefficients(
    coefficients: torch.Tensor,
    ranks: torch.Tensor,
    num_completions: int,
    means: list[float] | None,
    used: torch.Tensor | None = None,
) -> tuple[torch.Tensor, list[float] | None]:
    """
    Return the coefficients of an optimizer step with VERL's bonus, and the next running means.

    With `dev(x) = clip((x - m) / |m|, -5, 5)` against the running mean `m` of each metric, `t = sigmoid(2
    dev(acceleration))` and `Phi = t tanh(dev(rank)) + (1 - t) tanh(dev(velocity))`, an advantage `A` becomes `A +
    min(relu(Phi), |A| / 2)`.

    Args:
        coefficients (`torch.Tensor` of shape `(B,)`): `c`.
        ranks (`torch.Tensor` of shape `(3, B)`): Effective rank, velocity, and acceleration.
        num_completions (`int`): `N`: the advantage of a completion is `-N c`.
        means (list of 3 `float`, *optional*): Running means of the metrics; `None` before the first step, whose
            means they then are. The authors begin at 0, where every deviation is clipped.
        used (bool `torch.Tensor` of shape `(B,)`, *optional*): Completions with ranks, by default those whose
            coefficient is not 0. The others are ignored, and keep their coefficients.

    Returns:
        Coefficients `(B,)`, between 1 and 1.5 times a negative one, 1/2 and 1 times a positive one; and means.
    """
    used = coefficients != 0 if used is None else used
    if not used.any():
        return coefficients, means
    step_means = ranks[:, used].double().mean(dim=1)
    before = step_means if means is None else torch.tensor(means, dtype=torch.float64)
    deviations = (ranks - before[:, None]) / (before[:, None].abs() + _EPSILON)
    rank, velocity, acceleration = deviations.clamp(-_MAX_DEVIATION, _MAX_DEVIATION)
    balance = torch.sigmoid(_GAIN * acceleration)
    phi = balance * rank.tanh() + (1 - balance) * velocity.tanh()
    advantages = -num_completions * coefficients
    bonus = torch.minimum(phi.clamp(min=0).to(advantages), _MAX_BONUS * advantages.abs())
    shaped = torch.where(used, -(advantages + bonus) / num_completions, coefficients)
    return shaped, ((1 - _DECAY) * before + _DECAY * step_means).tolist()


class VERLUpdate(GroupLossUpdate):
    """[`GroupLossUpdate`] that adds the bonus to coefficients."""

    trainer: "VERLTrainer"
    shapes_coefficients = True

    def shape_coefficients(self, model, minibatch: Minibatch, coefficients: torch.Tensor):
        has_tokens = torch.tensor([bool(rollout.loss_mask.any()) for rollout in minibatch.rollouts])
        used = (coefficients != 0) & has_tokens
        indices = used.nonzero()[:, 0].tolist()
        if not indices:
            return coefficients, {}
        ranks = self.ranks(model, minibatch, indices)
        shaped, self.trainer.verl_means = verl_coefficients(
            coefficients, ranks, minibatch.num_scorable, self.trainer.verl_means, used
        )
        means = ranks[:, indices].mean(dim=1).tolist()
        metrics = {
            "hidden/effective_rank": means[0],
            "hidden/velocity": means[1],
            "hidden/acceleration": means[2],
            "hidden/bonus": (shaped / coefficients - 1)[indices].abs().mean().item(),
        }
        if self.trainer.args.bonus_tokens == "last":
            shaped = torch.stack([coefficients, shaped], dim=1)
        return shaped, metrics

    def token_coefficients(self, micro_batch: MicroBatch, coefficients: torch.Tensor) -> torch.Tensor:
        if coefficients.dim() == 1:
            return super().token_coefficients(micro_batch, coefficients)
        mask = micro_batch.loss_mask
        is_last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
        return torch.where(is_last, coefficients[:, 1:], coefficients[:, :1])

    @torch.no_grad()
    def ranks(self, model, minibatch: Minibatch, indices: list[int]) -> torch.Tensor:
        """Return effective rank, velocity, and acceleration of some completions, `(3, B)`, equal on all processes."""
        driver = self.driver
        ranks = torch.zeros(3, len(minibatch.rollouts), device=driver.accelerator.device)
        for micro_batch in driver.micro_batches(minibatch, driver.schedule_some(minibatch, indices)):
            prompts = [rollout.prompt_ids for rollout in micro_batch.rollouts]
            completions = [rollout.completion_ids for rollout in micro_batch.rollouts]
            states = hidden_states(driver.forward_pass, model, prompts, completions)
            for i, rollout, token_states in zip(micro_batch.indices, micro_batch.rollouts, states, strict=False):
                counted = token_states[torch.from_numpy(rollout.loss_mask)]
                differences = rank_velocity_and_acceleration(counted, self.trainer.args.hidden_state_stride)
                ranks[:, i] = torch.tensor([effective_rank(counted), *differences])
        return driver.accelerator.reduce(ranks, reduction="sum").cpu()


@dataclass
class VERLConfig(PACSConfig):
    """Configuration class for the [`VERLTrainer`]: every parameter of [`PACSConfig`], and those of the bonus."""

    supports_rollout_lag = False
    supports_images = False

    bonus_tokens: Literal["all", "last"] = setting(
        "all", 'Tokens of a completion that get the bonus: `"all"`, or `"last"` (the authors\' code).'
    )
    hidden_state_stride: int = setting(
        40, "Tokens between the prefixes of a completion whose effective ranks are compared.", least=1
    )

    def errors(self, step: BatchSizes) -> list[str]:
        stride, longest, errors = self.hidden_state_stride, self.max_completion_length, super().errors(step)
        if 3 * stride + 1 > min(longest or LONGEST_PREFIX, LONGEST_PREFIX):
            errors.append(
                f"hidden_state_stride={stride} is too long for max_completion_length={longest}, of which the last "
                f"{LONGEST_PREFIX} tokens are read: acceleration compares prefixes of {stride + 1}, {2 * stride + 1}, "
                f"and {3 * stride + 1} tokens. Lower it."
            )
        return errors


class VERLTrainer(PACSTrainer):
    """[`PACSTrainer`] with [`verl_coefficients`]; an optimizer step needs one more forward pass."""

    args: VERLConfig
    verl_means: list[float] | None  # running means of `verl_coefficients`
    _name = "VERL"
    _paper = {
        "title": "Beyond the Exploration-Exploitation Trade-off: A Hidden State Approach for LLM Reasoning in RLVR",
        "id": "2509.23808",
    }
    _config_class = VERLConfig
    update_class = VERLUpdate
    _saved_attributes = (*PACSTrainer._saved_attributes, "verl_means")

    def create_update(self) -> PolicyUpdate:
        update = super().create_update()
        assert isinstance(update, VERLUpdate)
        update.trainer = self
        return update

    def _reset_run(self) -> None:
        super()._reset_run()
        self.verl_means = None
