"""Overrides of TRL's methods by subclasses: those that the exact update would never call are refused, others followed.

docs/extending.md lists the methods that TRL's documentation, examples, and trainers override, and whether they are
called.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ..errors import UserError


if TYPE_CHECKING:
    from trl import GRPOTrainer

    from .rollout_trainer import RolloutTrainer


_LOSS = "Override `create_objective` (docs/extending.md), or derive from TRL's trainer"
_WEIGHTS = "Override `token_weights` (docs/extending.md), or derive from TRL's trainer"
# Methods of TRL's and transformers' trainers that the exact update does not call in training, and what to do instead;
# the last three existed in earlier versions of TRL.
NOT_CALLED = {
    "compute_loss": _LOSS,
    "_compute_loss": _LOSS,
    "compute_loss_context_manager": "Set bf16 or fp16, or derive from TRL's trainer",
    "_get_per_token_logps_and_entropies": _LOSS,
    "get_high_entropy_mask": _WEIGHTS,
    "get_off_policy_mask": _WEIGHTS,
    "get_gamma_weights": _LOSS,
    "_prepare_inputs": "Override `_generate_and_score_completions`, which returns a generation batch",
    "_prepare_context_parallel_inputs": "Derive from TRL's trainer; the exact update has no context parallelism",
    "_get_per_token_logps": _LOSS,
    "_get_last_hidden_state": _LOSS,
    "compute_liger_loss": _LOSS,
}
# What an override of `_generate_and_score_completions` may add, and TRL's loss would read.
_NOT_READ = ("old_per_token_logps", "ref_per_token_logps", "importance_sampling_ratio")


def check_overrides(trainer: "GRPOTrainer", base: "type[GRPOTrainer]") -> None:
    """Raise a `ValueError` if the class of a trainer, or the trainer itself, has another of the methods `NOT_CALLED`
    than `base`."""
    for name, remedy in NOT_CALLED.items():
        if getattr(type(trainer), name, None) is not getattr(base, name, None) or name in vars(trainer):
            raise UserError(
                f"{type(trainer).__name__} overrides {name}, which the exact update does not call in training. "
                f"{remedy}."
            )


def check_batch(trainer: "GRPOTrainer", batch: dict[str, Any], *, has_advantages: bool) -> None:
    """Raise a `ValueError` if an override of `_generate_and_score_completions` has changed what the update does not
    read."""
    name = f"{type(trainer).__name__}._generate_and_score_completions"
    if "labels" not in batch:
        raise UserError(
            f"{name} returned a batch without the key 'labels'. Call that of the base class, and change its result."
        )
    if unread := [key for key in _NOT_READ if key in batch]:
        raise UserError(
            f"{name} returned {unread[0]!r}, which the exact update does not read: it computes log-probs itself. "
            "Remove the key, or derive from TRL's trainer."
        )
    if batch["advantages"].ndim > 1:
        raise UserError(
            f"{name} returned advantages of shape {tuple(batch['advantages'].shape)}. Return one for each completion, "
            "and weight tokens with `token_weights` (docs/extending.md)."
        )
    if not has_advantages and not torch.equal(batch["advantages"], batch["computed_advantages"]):
        raise UserError(
            f"{name} changed the advantages, which {trainer._name} does not have: it learns from rewards. Override "
            "`_calculate_rewards`, or use method grpo."
        )


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Set attributes of an object inside the context, in place of methods of its class."""
    before = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in attributes:
            delattr(owner, name)
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def following_overrides(trainer: "RolloutTrainer") -> Iterator[list[torch.Tensor]]:
    """
    Follow TRL's `_generate_and_score_completions` through two of the methods that it calls, which subclasses may
    override. Between `_generate` and `_calculate_rewards` it asks for log-probs that the update computes itself.

    Yields:
        `list[torch.Tensor]`: Empty, and after the call the rewards `(B, F)` of all processes that `_calculate_rewards`
        returned, that of the last override.
    """
    generate, calculate_rewards = trainer._generate, trainer._calculate_rewards
    returned_rewards: list[torch.Tensor] = []

    def generate_completions(prompts):
        generated = generate(prompts)
        trainer._asks_for_logps = True
        return generated

    def calculate_and_keep_rewards(*args):
        trainer._asks_for_logps = False
        returned_rewards.append(calculate_rewards(*args))
        return returned_rewards[-1]

    with replaced(trainer, _generate=generate_completions, _calculate_rewards=calculate_and_keep_rewards):
        try:
            yield returned_rewards
        finally:
            trainer._asks_for_logps = False
