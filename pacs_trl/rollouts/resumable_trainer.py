"""TRL's trainer made resumable: checkpoints resume bitwise, also in the middle of a generation batch.

Each call of `train` starts from a checkpoint or from scratch, regardless of earlier calls. `checkpoint.py` says what a
checkpoint contains besides Trainer's, `checkpoint_files.py` which checkpoints are complete.
"""

import re
from datetime import datetime
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from datasets import IterableDataset
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.trainer_utils import TrainOutput
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME
from trl import GRPOTrainer

from ..errors import UserError
from . import checkpoint
from .checkpoint import saved_run
from .checkpoint_files import FILE_LIST, write_file_list
from .compared_settings import check_fixed
from .interruption import Stopped
from .process_checks import prompt_digest
from .process_count import remove_parts_of_missing_processes, seed_process
from .prompt_order import EpochSampler
from .random_numbers import engine_index
from .rank_watch import check_shared_folder, watching_ranks
from .request_seeds import RequestSeeds
from .rollout_config import RolloutConfig
from .run_position import LoggedLoss
from .sources import RolloutSource
from .step_start import StepStart
from .stop_on_signal import StopOnSignal


class ResumableTrainer(GRPOTrainer):
    """The part of [`RolloutTrainer`] that starts, resumes, and saves runs."""

    args: RolloutConfig
    model: PreTrainedModel
    processing_class: PreTrainedTokenizerBase | ProcessorMixin
    num_generations: int
    num_generations_eval: int
    reward_funcs: list[Any]
    chat_template_kwargs: dict[str, Any]
    _buffered_inputs: Any
    _longest_sequence: int | None
    _prompt_digest: str | None  # of the training set
    _source: RolloutSource
    _logged_loss: LoggedLoss
    _step_start: StepStart

    # Settings that must be equal in a run that resumes, besides those of checkpoint_settings.yaml.
    _equal_settings: tuple[str, ...] = ()
    # Settings that are read when the optimizer is created, which is at the start of training.
    optimizer_settings: tuple[str, ...] = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
    # Attributes that are saved in checkpoints, in addition to completions.
    _saved_attributes: tuple[str, ...] = (
        "_step",
        "_num_generated_batches",
        "_num_groups",
        "_unrewarded",
        "_data_position",
        "_prompt_date",
    )

    # Runs -----------------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None):
        check_fixed(self)
        resume_from_checkpoint = checkpoint.checkpoint_to_resume(self, resume_from_checkpoint)
        self._prepare_memory(resume_from_checkpoint)
        self._source.close()  # which an evaluation may have connected to a server
        with (
            watching_ranks(limit=self.args.ddp_timeout, output_dir=self.args.output_dir),
            checkpoint.reporting_full_disk(self.args.output_dir),
        ):
            try:
                output = super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
            except Stopped:
                self._stop_on_signal()
                return TrainOutput(self.state.global_step, float("nan"), {})
            finally:
                self._source.close()
        if self._unrewarded and self.state.global_step >= self.state.max_steps:
            self._stop_without_rewards()
        return output

    def _prepare_memory(self, resume_from_checkpoint: str | None) -> None:
        """Set what the backward pass recomputes and the size of micro-batches, before Trainer prepares the model."""

    def _stop_on_signal(self) -> None:
        """Note that a signal has stopped the current optimizer step, and save the state before this step."""
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, StopOnSignal):
                callback.stop(self.args)
        self.undo_step_and_save()

    def undo_step_and_save(self) -> None:
        """Save the state after the last optimizer step when the current one cannot be finished: the run that resumes
        repeats it. All processes must call this."""
        self._source.put_back()
        self._step_start.rewind()
        checkpoint.save_last_step(self)

    def _create_source(self) -> RolloutSource:
        """Return where the completions of training come from."""
        raise NotImplementedError

    def _reset_run(self) -> None:
        """Set the attributes that a run changes to their values at its start."""
        self._source = self._create_source()
        self._step = 0
        self._buffered_inputs = None
        self._current_train_step_time = 0.0
        self._last_loaded_step = -1  # vLLM may hold the weights of another run
        logs: list[Any] = [
            *self._metrics.values(),
            *self._logs.values(),
            self._pending_metrics,
            self._pending_extra_logs,
        ]
        for log in logs:
            log.clear()
        self._num_generated_batches = 0  # in training, with those of `generate_more`
        engine = engine_index(self.args, self.accelerator.process_index)
        self._request_seeds = RequestSeeds(self.args.seed, engine)  # of vLLM
        self._num_groups = self._num_evaluated_groups = 0  # generated in training, and in the running evaluation
        self._unrewarded: int | None = 0  # initial generation batches without any reward; None after the first reward
        self._data_position = (0, 0)  # passes over the training data, and batches used of the current pass
        (self._prompt_date,) = broadcast_object_list([datetime.now().isoformat()])  # that of the first process
        self._evaluations = (0, 0)  # optimizer step of the last evaluation, and number of evaluations at it
        self._saved_step: int | None = None  # step of the last complete checkpoint in `output_dir`

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        self._reset_run()
        if self.args.save_strategy != "no":
            check_shared_folder(self.accelerator, self.args.output_dir)
        self._prompt_digest = prompt_digest(self.train_dataset)
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if resume_from_checkpoint is not None:
            saved = checkpoint.load_state(self, Path(resume_from_checkpoint))
            self._report_process_count(saved.num_processes)
        return prepared

    def _load_rng_state(self, checkpoint):
        if checkpoint is None:
            return
        if saved_run(self, Path(checkpoint)).num_processes == self.accelerator.num_processes:
            super()._load_rng_state(checkpoint)
        else:
            seed_process(self.args.seed, self.state.global_step, self.accelerator)

    def _init_training_state(self, max_steps, updates_per_epoch, num_train_epochs, resume, trial):
        epoch_and_batch = super()._init_training_state(max_steps, updates_per_epoch, num_train_epochs, resume, trial)
        if resume is None:
            return epoch_and_batch
        if isinstance(self.train_dataset, IterableDataset) and not self.args.ignore_data_skip:
            epoch_and_batch = checkpoint.read_data_position(self, Path(resume))
        step = f"optimizer step {self.state.global_step}"
        if self.state.global_step < max_steps:
            self.accelerator.print(f"Continuing from {resume}, after {step} of {max_steps}.")
            return epoch_and_batch
        self.accelerator.print(f"{resume} is the end of a finished run ({step}), so nothing is left to train.")
        return num_train_epochs, 0  # after the last epoch; Trainer would take one more step

    def _report_process_count(self, saved: int) -> None:
        now = self.accelerator.num_processes
        if saved == now:
            return
        completions = "Completions are those of the uninterrupted run, but for rounding."
        if not self.use_vllm and self.rollout_func is None:
            completions = "Completions are other samples of the same policy than without the change."
        self.accelerator.print(
            f"The checkpoint was written by {saved} processes, and {now} continue with the same completions per "
            f"optimizer step. {completions}"
        )

    def _get_train_sampler(self, dataset=None):
        return EpochSampler(super()._get_train_sampler(dataset), lambda: int(self.state.epoch or 0))

    @property
    def generation_number(self) -> int:
        """Number of the generation batch that is used now, from 0."""
        return self._step // (self.args.steps_per_generation * self.num_iterations)

    def _at_generation_boundary(self) -> bool:
        return self._step % (self.args.steps_per_generation * self.num_iterations) == 0

    # Checkpoints ----------------------------------------------------------------------------------------------------

    def _unfinished_state(self) -> dict[str, Any]:
        """Return the completions that this process has not finished training on, as tensors and plain values."""
        return {"rollouts": None if self._at_generation_boundary() else self._buffered_inputs}

    def _load_run(self, directory: Path, state: dict[str, Any]) -> None:
        """Load what `_unfinished_state` returned and what `_save_run` of a subclass saved."""
        self._buffered_inputs = self._prepare_input(state["rollouts"])

    def _save_run(self, directory: Path) -> None:
        """Save the part of a run that Trainer does not save."""
        checkpoint.save_state(self, directory)

    # Trainer calls this on every process, before it writes trainer_state.json and deletes older checkpoints.
    def _save_rng_state(self, output_dir):
        self._source.wait()  # before random states, which reward functions may use
        super()._save_rng_state(output_dir)
        self._save_run(Path(output_dir))
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            write_file_list(Path(output_dir))

    def _save_checkpoint(self, model, trial):
        directory = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            # An overwritten checkpoint is incomplete until Trainer writes its state, the last file.
            (directory / "trainer_state.json").unlink(missing_ok=True)
            (directory / FILE_LIST).unlink(missing_ok=True)
            remove_parts_of_missing_processes(directory, self.accelerator.num_processes)
        self.accelerator.wait_for_everyone()
        super()._save_checkpoint(model, trial)
        if not self.args.save_only_model:
            self._saved_step = self.state.global_step

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        if self._load_converted_weights(resume_from_checkpoint):
            return
        try:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        except RuntimeError as error:  # of torch, one line per weight
            mismatch = re.search("size mismatch for (.*)", str(error))
            if mismatch is None:
                raise
            raise UserError(
                f"{resume_from_checkpoint} does not fit the model of this run: {mismatch[1]} Set model_name_or_path "
                "to the model that the run was started with, or choose another output_dir."
            ) from error
        if Path(resume_from_checkpoint, "ref", ADAPTER_SAFE_WEIGHTS_NAME).is_file():
            # transformers before 5.23 loads only the adapter of the KL reference, not the trained adapter.
            self.model.load_adapter(resume_from_checkpoint, "default", is_trainable=True)

    def _load_best_model(self):
        if not self._load_converted_weights(self.state.best_model_checkpoint):
            super()._load_best_model()

    def _load_converted_weights(self, directory: str) -> bool:
        loads_files_of_model = not (self.is_fsdp_enabled or self.is_deepspeed_enabled)
        is_whole_model = loads_files_of_model and not isinstance(self.model, PeftModel)
        return is_whole_model and checkpoint.load_converted_weights(self.model, Path(directory))
