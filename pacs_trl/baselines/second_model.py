"""Second model that is trained alongside the policy with its own optimizer. DeepSpeed is not supported, because it
needs one engine for both."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from transformers import PreTrainedModel, get_scheduler
from trl import GRPOTrainer

from ..rollouts.rollout_trainer import RolloutTrainer


class SecondModel:
    """A model with its own optimizer and scheduler, of the same types as those of the trainer's policy. Its gradient
    is clipped separately, to the same maximum norm."""

    def __init__(self, trainer: RolloutTrainer, model: PreTrainedModel, *, learning_rate: float):
        self.trainer = trainer
        decayed = set(trainer.get_decay_parameter_names(model))
        groups = [
            {
                "params": [p for name, p in model.named_parameters() if (name in decayed) == decay],
                "weight_decay": trainer.args.weight_decay if decay else 0.0,
            }
            for decay in (True, False)
        ]
        optimizer_class, kwargs = trainer.get_optimizer_cls_and_kwargs(trainer.args, model)
        optimizer = optimizer_class(groups, **{**kwargs, "lr": learning_rate})
        self.model, self.optimizer = trainer.accelerator.prepare(model, optimizer)
        self.scheduler: torch.optim.lr_scheduler.LRScheduler | None = None

    def create_scheduler(self, num_training_steps: int) -> None:
        args = self.trainer.args
        self.scheduler = get_scheduler(
            args.lr_scheduler_type,
            optimizer=self.optimizer,
            num_warmup_steps=args.get_warmup_steps(num_training_steps),
            num_training_steps=num_training_steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        )

    def accumulating(self, last: bool = True) -> AbstractContextManager:
        """Return the context for the forward and backward pass of a micro-batch or a part of it. Gradients are
        synchronized across processes only after the last one of an optimizer step."""
        accelerator = self.trainer.accelerator
        return nullcontext() if last and accelerator.sync_gradients else accelerator.no_sync(self.model)

    def step(self) -> float:
        """Update the weights, and return the norm of the gradient before clipping."""
        trainer = self.trainer
        max_norm = trainer.args.max_grad_norm if trainer.args.max_grad_norm else math.inf
        grad_norm = trainer.accelerator.clip_grad_norm_(self.model.parameters(), max_norm)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return float(grad_norm)

    @contextmanager
    def _in_place_of_policy(self) -> Iterator[None]:
        """Substitute this model for the policy inside the context, so that `Trainer` saves and loads it the same way,
        sharded or not."""
        trainer = self.trainer
        policy = trainer.model, trainer.model_wrapped, trainer.optimizer, trainer.lr_scheduler
        trainer.model = trainer.accelerator.unwrap_model(self.model)
        trainer.model_wrapped, trainer.optimizer, trainer.lr_scheduler = self.model, self.optimizer, self.scheduler
        try:
            yield
        finally:
            trainer.model, trainer.model_wrapped, trainer.optimizer, trainer.lr_scheduler = policy

    def save(self, checkpoint: str | Path) -> None:
        """Save weights, optimizer and scheduler into a checkpoint of the trainer; on all processes."""
        directory = str(Path(checkpoint) / "critic")
        with self._in_place_of_policy():
            self.trainer.save_weights(directory, is_checkpoint=True)
            GRPOTrainer._save_optimizer_and_scheduler(self.trainer, directory)

    def load(self, checkpoint: str | Path) -> None:
        """Load what `save` has saved; on all processes."""
        directory = Path(checkpoint) / "critic"
        with self._in_place_of_policy():
            self.trainer._load_from_checkpoint(str(directory), self.trainer.model)
            GRPOTrainer._load_optimizer_and_scheduler(self.trainer, str(directory))
