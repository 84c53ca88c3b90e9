"""What PACSTrainer and the baselines add to the runs of TRL's GRPOTrainer, whatever is learnt in them.

A checkpoint holds what is needed to continue bit by bit, also in the middle of a generation batch, and each call of
`train` begins from a checkpoint or from nothing, whatever the trainer has done before. See `resume.py` for what TRL's
checkpoints leave out and for the files.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import save_fsdp_model
from peft import PeftModel
from transformers import TrainerCallback
from transformers.integrations.fsdp import get_fsdp_ckpt_kwargs
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_NAME
from trl import GRPOTrainer

from .kept_settings import OF_OPTIMIZER, check_kept, settings_of_construction
from .resume import (
    SHARED_SETTINGS,
    EpochSampler,
    check_complete,
    check_same_adapter,
    check_same_settings,
    last_checkpoint,
    own_random_numbers,
    plain_settings,
    reporting_full_disk,
    request_seed,
)


class ResumableTrainer(GRPOTrainer):
    """[`~trl.GRPOTrainer`] that goes on from a checkpoint as if it had never stopped."""

    # Settings, besides `SHARED_SETTINGS`, that a checkpoint and the run that resumes from it must share.
    _own_shared_settings: tuple[str, ...] = ()

    # What moves on inside an optimizer step, besides metrics and the number of tokens.
    _counters: tuple[str, ...] = ("_step", "_num_requests", "_unrewarded", "_buffered_inputs")

    def _prepare_run(self) -> None:
        """Set up what belongs to a run, once the trainer is constructed."""
        self._reset_run()
        self._kept_settings = settings_of_construction(self.args)
        self.add_callback(_StepBegin(self))

    def _get_train_sampler(self, dataset=None):
        return EpochSampler(super()._get_train_sampler(dataset), lambda: int(self.state.epoch or 0))

    def _at_generation_boundary(self) -> bool:
        return self._step % (self.args.steps_per_generation * self.num_iterations) == 0

    def train(self, resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None):
        check_kept(self._kept_settings, self.args)
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise ValueError(f"There is no complete checkpoint in {self.args.output_dir} to resume from.")
        elif resume_from_checkpoint:
            if not Path(resume_from_checkpoint).is_dir():
                raise ValueError(f"The checkpoint {resume_from_checkpoint!r} does not exist (seen from {Path.cwd()}).")
            check_complete(resume_from_checkpoint)
            self._state_file(Path(resume_from_checkpoint))
        if resume_from_checkpoint:
            adapters = self.model.peft_config if isinstance(self.model, PeftModel) else {}
            check_same_adapter(resume_from_checkpoint, adapters.get("default"))
        with reporting_full_disk(self.args.output_dir):
            return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        with self._evaluating():
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(self, test_dataset, ignore_keys=None, metric_key_prefix="test"):
        with self._evaluating():
            return super().predict(test_dataset, ignore_keys, metric_key_prefix)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Keep an evaluation from changing what is trained before or after it."""
        check_kept(self._kept_settings, self.args)
        for name in ("bf16_full_eval", "fp16_full_eval"):
            if getattr(self.args, name) and not self.is_in_train:
                raise ValueError(
                    f"{name}=True would round the trained weights themselves, and training would go on with them. "
                    "Remove the key, or load the model in that precision for an evaluation alone."
                )
        step, number = self._evaluations
        self._evaluations = (self.state.global_step, number + 1 if step == self.state.global_step else 1)
        run = f"{self.args.seed}/{self.accelerator.process_index}/evaluation/{self.state.global_step}"
        with own_random_numbers(request_seed(run, self._evaluations[1]), self.accelerator.device):
            yield

    def _reset_run(self) -> None:
        """Forget all that belongs to a run and not to the trainer."""
        self._step = 0
        self._buffered_inputs = None
        self._current_train_step_time = 0.0
        self._last_loaded_step = -1  # vLLM has the weights of another run
        for kept in (*self._metrics.values(), *self._logs.values(), self._pending_metrics, self._pending_extra_logs):
            kept.clear()
        self._num_requests = 0  # sent to vLLM by this process while training
        self._unrewarded: int | None = 0  # generation batches without any reward; None once one had a reward
        self._evaluation_requests = (0, 0)  # the optimizer step of the last evaluation, and its requests so far
        self.signal: dict[str, float] = {"none_in": 0}  # see `no_signal.py`
        self._evaluations = (0, 0)  # the optimizer step of the last one, and their number at this step
        self._step_begin: dict | None = None
        self._saved_step: int | None = None  # of the last complete checkpoint in `output_dir`

    def _init_training_state(
        self, max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
    ):
        place = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        if resume_from_checkpoint is None:
            return place
        if self.state.global_step < max_steps:
            self.accelerator.print(
                f"Continuing from {resume_from_checkpoint}, after optimizer step {self.state.global_step} of "
                f"{max_steps}."
            )
            return place
        self.accelerator.print(
            f"{resume_from_checkpoint} is the end of a finished run (optimizer step {self.state.global_step} of "
            f"{max_steps}): nothing is learnt any more. Raise max_steps or num_train_epochs to go on."
        )
        return num_train_epochs, 0  # after the last epoch; Trainer would take one more step

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        try:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        except RuntimeError as error:
            if "size mismatch" not in str(error):
                raise
            raise ValueError(
                f"The weights in {resume_from_checkpoint} do not fit the model of this run: "
                f"{str(error).splitlines()[1].strip()} Resume with the model that the run was started with."
            ) from error
        if Path(resume_from_checkpoint, "ref", ADAPTER_SAFE_WEIGHTS_NAME).is_file():
            # The trained adapter lies beside that of the KL reference, and transformers before 5.23 loads the latter
            # alone.
            self.model.load_adapter(resume_from_checkpoint, "default", is_trainable=True)

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        self._reset_run()
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        self._keep_settings(OF_OPTIMIZER)
        if resume_from_checkpoint is not None:
            self._load_run(Path(resume_from_checkpoint))
        return prepared

    def _keep_settings(self, names: Iterable[str]) -> None:
        """From now on these settings cannot be changed any more."""
        self._kept_settings = plain_settings(self.args, list(names)) | self._kept_settings

    def _rewind_step(self) -> None:
        """Back to where the optimizer step began that cannot be finished: what was drawn for it is drawn again."""
        for name in self._counters:
            setattr(self, name, self._step_begin[name])
        self.state.num_input_tokens_seen = self._step_begin["num_input_tokens_seen"]
        self._metrics["train"].clear()
        self._metrics["train"].update(self._step_begin["metrics"])

    # Checkpoints --------------------------------------------------------------------------------------------------

    def save_model(self, output_dir=None, _internal_call=False):
        output_dir = output_dir or self.args.output_dir
        if self.is_fsdp_enabled and "SHARDED" in str(self.accelerator.state.fsdp_plugin.state_dict_type):
            # into a checkpoint Trainer writes the shards itself, with the state of the optimizer
            is_checkpoint = _internal_call and Path(output_dir) != Path(self.args.output_dir)
            self._save_beside_shards(output_dir, with_shards=not is_checkpoint)
        with reporting_full_disk(self.args.output_dir):
            super().save_model(output_dir, _internal_call=True)  # who pushes is said in `published_trainer.py`

    def _save_beside_shards(self, output_dir: str, with_shards: bool) -> None:
        """Where FSDP saves weights in shards Trainer leaves out configuration and tokenizer, without which they are no
        model."""
        if self.args.should_save:
            self._save(output_dir, state_dict={})
            for name in (SAFE_WEIGHTS_NAME, ADAPTER_SAFE_WEIGHTS_NAME):  # comes with it, without any weight
                Path(output_dir, name).unlink(missing_ok=True)
        if with_shards:
            plugin = self.accelerator.state.fsdp_plugin
            save_fsdp_model(plugin, self.accelerator, self.model, output_dir, **get_fsdp_ckpt_kwargs())

    def _save_checkpoint(self, model, trial):
        directory = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            # One that is written over is not complete until Trainer writes this file, the last one.
            (directory / "trainer_state.json").unlink(missing_ok=True)
        self.accelerator.wait_for_everyone()
        super()._save_checkpoint(model, trial)
        if not self.args.save_only_model:
            self._saved_step = self.state.global_step

    # Trainer calls this on every process, before it writes trainer_state.json and deletes older checkpoints.
    def _save_rng_state(self, output_dir):
        super()._save_rng_state(output_dir)
        self._save_run(Path(output_dir))
        self.accelerator.wait_for_everyone()

    def _save_run(self, directory: Path) -> None:
        state = {
            "settings": self._shared_settings(),
            "step": self._step,
            "num_requests": self._num_requests,
            "unrewarded": self._unrewarded,
            "signal": self.signal,
            "metrics": dict(self._metrics["train"]),
            **self._own_state(),
        }
        torch.save(state, directory / f"{self._state_name}_{self.accelerator.process_index}.pt")

    def _state_file(self, checkpoint: Path) -> Path:
        """That of this process, or of process 0 if it did not exist then."""
        files = [checkpoint / f"{self._state_name}_{process}.pt" for process in (self.accelerator.process_index, 0)]
        found = next((file for file in files if file.is_file()), None)
        if found is None:
            within = last_checkpoint(checkpoint)
            raise ValueError(
                f"{checkpoint} has no {files[0].name}: it was not written by {type(self).__name__}, or with "
                "save_only_model=True, and cannot be continued. "
                + (
                    f"Did you mean {within}?"
                    if within
                    else "Start a new run from its weights with model_name_or_path instead."
                )
            )
        return found

    def _load_run(self, checkpoint: Path) -> None:
        state = torch.load(self._state_file(checkpoint), map_location="cpu", weights_only=True)
        current = self._shared_settings()
        # A setting that did not exist then had its default.
        defaults = {name: value for name, value in vars(type(self.args)).items() if name in current}
        check_same_settings(str(checkpoint), defaults | state["settings"], current)
        self._step = state["step"]
        self._num_requests = state["num_requests"]
        self._unrewarded = state.get("unrewarded")
        self.signal = state.get("signal", self.signal)
        self._metrics["train"].update(state["metrics"])
        self._load_own_state(checkpoint, state)
        if checkpoint.resolve().parent == Path(self.args.output_dir).resolve():
            self._saved_step = self.state.global_step

    @property
    def _state_name(self) -> str:
        return f"{self._name.lower()}_state"

    def _shared_settings(self) -> dict[str, Any]:
        settings = plain_settings(self.args, (*SHARED_SETTINGS, *self._own_shared_settings))
        return settings | {"reward functions": self.reward_func_names}

    def _own_state(self) -> dict[str, Any]:
        """What this process still has to learn from; tensors and plain values."""
        return {"rollouts": None if self._at_generation_boundary() else self._buffered_inputs}

    def _load_own_state(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """Inverse of `_own_state`."""
        self._buffered_inputs = self._prepare_input(state["rollouts"])


class _StepBegin(TrainerCallback):
    """Remembers where an optimizer step began, which only Trainer knows: the last one of an epoch may be shorter.
    Checks that no callback or reward function has changed a setting: before the step, and before the state after it is
    saved."""

    def __init__(self, trainer: ResumableTrainer):
        self.trainer = trainer

    def on_step_end(self, args, state, control, **kwargs):
        check_kept(self.trainer._kept_settings, args)

    def on_step_begin(self, args, state, control, **kwargs):
        check_kept(self.trainer._kept_settings, args)
        metrics = {name: list(values) for name, values in self.trainer._metrics["train"].items()}
        counters = {name: getattr(self.trainer, name) for name in self.trainer._counters}
        tokens = {"num_input_tokens_seen": state.num_input_tokens_seen, "global_step": state.global_step}
        self.trainer._step_begin = {"metrics": metrics, **counters, **tokens}
