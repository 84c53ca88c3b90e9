"""A model that learns beside the policy, with an optimizer of its own: a critic, say.

Policy and second model are prepared by accelerate each on its own. One module around both would need one optimizer
with two learning rates, and everything that reads `trainer.model` (generation, vLLM, PEFT, saving) would have to look
inside it. DeepSpeed, which wants one engine, is not supported.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from transformers import PreTrainedModel, get_scheduler
from trl import GRPOTrainer

from ..rollouts.resumable_trainer import ResumableTrainer


class SecondModel:
    """
    Optimizer and scheduler are of the policy's kinds, and the gradient is clipped to the same norm, on its own.

    Args:
        trainer ([`ResumableTrainer`]): The policy's.
        model ([`~transformers.PreTrainedModel`]): What learns. `self.model` is the prepared one.
        learning_rate (`float`): Of this model.
        directory (`str`): Where its files lie in a checkpoint.
    """

    def __init__(self, trainer: ResumableTrainer, model: PreTrainedModel, *, learning_rate: float, directory: str):
        self.trainer = trainer
        self.directory = directory
        self.model, self.optimizer = trainer.accelerator.prepare(model, self.create_optimizer(model, learning_rate))
        self.scheduler: torch.optim.lr_scheduler.LRScheduler | None = None

    def create_optimizer(self, model: PreTrainedModel, learning_rate: float) -> torch.optim.Optimizer:
        args = self.trainer.args
        decayed = set(self.trainer.get_decay_parameter_names(model))
        groups = [
            {
                "params": [p for name, p in model.named_parameters() if (name in decayed) == decay],
                "weight_decay": args.weight_decay if decay else 0.0,
            }
            for decay in (True, False)
        ]
        optimizer_class, kwargs = self.trainer.get_optimizer_cls_and_kwargs(args, model)
        return optimizer_class(groups, **{**kwargs, "lr": learning_rate})

    def create_scheduler(self, num_training_steps: int) -> None:
        """Begin a run of so many optimizer steps."""
        args = self.trainer.args
        self.scheduler = get_scheduler(
            args.lr_scheduler_type,
            optimizer=self.optimizer,
            num_warmup_steps=args.get_warmup_steps(num_training_steps),
            num_training_steps=num_training_steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        )

    @contextmanager
    def accumulating(self, last: bool = True) -> Iterator[None]:
        """Goes around the forward and backward pass of a micro-batch, or of a part of one: processes exchange
        gradients after the last one only."""
        accelerator = self.trainer.accelerator
        with nullcontext() if last and accelerator.sync_gradients else accelerator.no_sync(self.model):
            yield

    def step(self) -> float:
        """Learn from the gradients since the last step, and return their norm before clipping."""
        trainer = self.trainer
        max_norm = trainer.args.max_grad_norm if trainer.args.max_grad_norm else math.inf
        grad_norm = trainer.accelerator.clip_grad_norm_(self.model.parameters(), max_norm)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return float(grad_norm)

    @contextmanager
    def _in_place_of_policy(self) -> Iterator[None]:
        """Lets `Trainer` save and load this model the way it does the policy, sharded or not."""
        trainer = self.trainer
        policy = trainer.model, trainer.model_wrapped, trainer.optimizer, trainer.lr_scheduler
        trainer.model = trainer.accelerator.unwrap_model(self.model)
        trainer.model_wrapped, trainer.optimizer, trainer.lr_scheduler = self.model, self.optimizer, self.scheduler
        try:
            yield
        finally:
            trainer.model, trainer.model_wrapped, trainer.optimizer, trainer.lr_scheduler = policy

    def save(self, checkpoint: str | Path) -> None:
        """Weights, optimizer and scheduler, into a checkpoint of the trainer; on all processes."""
        directory = str(Path(checkpoint) / self.directory)
        with self._in_place_of_policy():
            ResumableTrainer.save_model(self.trainer, directory, _internal_call=True)  # it needs no card
            GRPOTrainer._save_optimizer_and_scheduler(self.trainer, directory)

    def load(self, checkpoint: str | Path) -> None:
        """
        Inverse of `save`.

        Raises:
            `ValueError`: if the checkpoint holds no such model.
        """
        directory = Path(checkpoint) / self.directory
        if not directory.is_dir():
            raise ValueError(
                f"{checkpoint} holds no {self.directory}: it was not written by {type(self.trainer).__name__}, or "
                "with save_only_model=True, and cannot be continued. Start a new run from its weights with "
                "model_name_or_path instead."
            )
        with self._in_place_of_policy():
            self.trainer._load_from_checkpoint(str(directory), self.trainer.model)
            GRPOTrainer._load_optimizer_and_scheduler(self.trainer, str(directory))
