"""What PACSTrainer and PPOTrainer add to the rollouts of TRL's GRPOTrainer, whatever is learnt from them.

- Every process shuffles by seed and epoch, and every request to vLLM has a seed, so a resumed run draws what the first would
  have drawn.
- When a vLLM server dies, all processes save the state after the last optimizer step together and stop.
- A checkpoint holds what is needed to continue bit by bit in the middle of a generation batch. Each call of `train` begins
  from a checkpoint or from nothing, whatever the trainer has done before.
- Completions that a colocated engine has finished are graded while it draws the others.
- FSDP2 exchanges gradients in float32.
"""

from pathlib import Path
from typing import Any

import torch
from accelerate.utils import save_fsdp_model
from peft import LoraConfig, PeftConfig
from torch import nn
from transformers import PreTrainedModel, TrainerCallback
from transformers.integrations.fsdp import get_fsdp_ckpt_kwargs
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_NAME
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import get_config_model_id

from ..rewards import math_reward
from .early_grading import EarlyGrading
from .float32_exchange import keep_float32
from .lora import check_lora_targets
from .preemption import check_no_jit_checkpoint
from .resume import (
    SHARED_SETTINGS,
    EpochSampler,
    check_complete,
    check_same_settings,
    last_checkpoint,
    plain_settings,
    request_seed,
)
from .trainer_checks import check_columns, check_dataset, check_evaluation_batch, with_checked_result
from .vllm_checks import check_vllm, serve_command, server_url
from .vllm_requests import ServerGuard, seed_requests


class RolloutTrainer(GRPOTrainer):
    """[`~trl.GRPOTrainer`] whose rollouts can be drawn again."""

    # Settings, besides `SHARED_SETTINGS`, that a checkpoint and the run that resumes from it must share.
    _own_shared_settings: tuple[str, ...] = ()

    def __init__(self, model, reward_funcs=None, args=None, **kwargs):
        super().__init__(model, reward_funcs, args=args, **kwargs)
        self._reset_run()
        self.add_callback(_StepBegin(self))
        self._early_grading: EarlyGrading | None = None
        self._solutions: list = []  # of the rows that are being generated
        if self.use_vllm:
            self._seed_requests()
            self._grade_early()
        self.reward_funcs = [
            function if isinstance(function, nn.Module) else with_checked_result(function, name)
            for function, name in zip(self.reward_funcs, self.reward_func_names, strict=True)
        ]

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        keep_float32(self.accelerator)

    @staticmethod
    def _check_before_loading(model: str | PreTrainedModel, args: GRPOConfig, arguments: dict[str, Any]) -> None:
        """
        Args:
            arguments (`dict`):
                All other arguments of the trainer.

        Raises:
            `ValueError`: if a data set has no prompts, the vLLM that `args` asks for cannot work, or the model has not the
                modules that LoRA is for.
        """
        check_no_jit_checkpoint(args)
        for name in ("train_dataset", "eval_dataset"):
            check_dataset(name, arguments.get(name))
        peft_config: PeftConfig | None = arguments.get("peft_config")
        if args.use_vllm:
            check_vllm(args, model if isinstance(model, str) else get_config_model_id(model.config))
        if isinstance(peft_config, LoraConfig):
            given = args.model_init_kwargs or {}
            check_lora_targets(
                peft_config,
                model,
                revision=given.get("revision"),
                trust_remote_code=given.get("trust_remote_code", args.trust_remote_code),
            )

    def _seed_requests(self) -> None:
        engine = self.vllm_generation
        engine.generation_kwargs = dict(engine.generation_kwargs)  # TRL's is the one of `args`
        if "seed" in engine.generation_kwargs:
            raise ValueError(
                f"generation_kwargs={{'seed': {engine.generation_kwargs['seed']}}} would draw the same completion for "
                f"every row of a group. Remove it: {type(self).__name__} derives a seed for each request from `seed`."
            )
        if self.vllm_mode == "server":
            # one seed per call, see `_generate_single_turn`; vLLM adds the index of the completion to it
            self._server = ServerGuard(engine, self.accelerator)
        else:
            seed_requests(engine, self._next_seeds)

    def _next_seeds(self, num_requests: int) -> list[int]:
        # Processes that share one engine by tensor parallelism must agree on the seeds; a server has one stream.
        processes_per_engine = self.args.vllm_tensor_parallel_size
        stream = 0 if self.vllm_mode == "server" else self.accelerator.process_index // processes_per_engine
        if self.model.training:
            first = self._num_requests
            self._num_requests += num_requests
            return [request_seed(f"{self.args.seed}/{stream}", first + i) for i in range(num_requests)]
        # An evaluation has seeds of its own, so that training draws the same with and without it.
        step, first = self._evaluation_requests
        first = first if step == self.state.global_step else 0
        self._evaluation_requests = (self.state.global_step, first + num_requests)
        run = f"{self.args.seed}/{stream}/evaluation/{self.state.global_step}"
        return [request_seed(run, first + i) for i in range(num_requests)]

    def _grade_early(self) -> None:
        """Where completions come one by one, and `math_reward` grades the text that their tokens spell."""
        parsed = any(
            getattr(self._tokenizer, name, None) is not None for name in ("response_template", "response_schema")
        )
        if self.vllm_mode == "colocate" and math_reward in self.reward_funcs and not self.tools and not parsed:
            self._early_grading = EarlyGrading(
                self.vllm_generation, lambda ids: self._tokenizer.batch_decode(ids, skip_special_tokens=True)
            )

    def _get_train_sampler(self, dataset=None):
        return EpochSampler(super()._get_train_sampler(dataset), lambda: int(self.state.epoch or 0))

    def get_eval_dataloader(self, eval_dataset=None):
        check_evaluation_batch(self.args.eval_batch_size, self.accelerator.num_processes, self.num_generations_eval)
        check_dataset("eval_dataset", eval_dataset)
        return super().get_eval_dataloader(eval_dataset)

    def _at_generation_boundary(self) -> bool:
        return self._step % (self.args.steps_per_generation * self.num_iterations) == 0

    def _generate_and_score_completions(self, inputs):
        check_columns("The data set", inputs[0])
        self._solutions = [row.get("solution") for row in inputs]
        return super()._generate_and_score_completions(inputs)

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        if self.use_vllm and self.vllm_mode == "server":
            self.vllm_generation.generation_kwargs["seed"] = self._next_seeds(len(prompt_ids))[0]
        if self._early_grading is not None:
            self._early_grading.expect(prompt_ids, self._solutions)
        return self._generate_or_stop(prompt_ids, *args, **kwargs)

    def _generate_or_stop(self, prompt_ids, *args, **kwargs):
        """The parent's `_generate_single_turn`; when a server fails, all processes save and stop."""
        if not (self.use_vllm and self.vllm_mode == "server"):
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        if not self._server.answers():
            self._stop_without_server("stopped answering")
        with self._server.watching():
            completion_ids, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        if len(completion_ids) < len(prompt_ids):
            self._stop_without_server(
                "is healthy, but did not generate" if self._server.answers() else "stopped answering"
            )
        return completion_ids, logprobs

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        if self._early_grading is not None:
            self._early_grading.wait()
        return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)

    def save_model(self, output_dir=None, _internal_call=False):
        output_dir = output_dir or self.args.output_dir
        if self.is_fsdp_enabled and "SHARDED" in str(self.accelerator.state.fsdp_plugin.state_dict_type):
            # into a checkpoint Trainer writes the shards itself, with the state of the optimizer
            is_checkpoint = _internal_call and Path(output_dir) != Path(self.args.output_dir)
            self._save_beside_shards(output_dir, with_shards=not is_checkpoint)
        super().save_model(output_dir, _internal_call)

    def _save_beside_shards(self, output_dir: str, with_shards: bool) -> None:
        """Where FSDP saves weights in shards Trainer leaves out configuration and tokenizer, without which they are no model."""
        if self.args.should_save:
            self._save(output_dir, state_dict={})
            for name in (SAFE_WEIGHTS_NAME, ADAPTER_SAFE_WEIGHTS_NAME):  # comes with it, without any weight
                Path(output_dir, name).unlink(missing_ok=True)
        if with_shards:
            plugin = self.accelerator.state.fsdp_plugin
            save_fsdp_model(plugin, self.accelerator, self.model, output_dir, **get_fsdp_ckpt_kwargs())

    def _rewind_step(self) -> None:
        """Back to where the optimizer step began that cannot be finished: what was drawn for it is drawn again."""
        for name in _COUNTERS:
            setattr(self, name, self._step_begin[name])
        self.state.num_input_tokens_seen = self._step_begin["num_input_tokens_seen"]
        self._metrics["train"].clear()
        self._metrics["train"].update(self._step_begin["metrics"])

    def _stop_without_server(self, state: str) -> None:
        """Save the state between the last two optimizer steps, on all processes, and raise."""
        step = self.state.global_step
        if self._step_begin is not None and self._step_begin["global_step"] == step:
            self._rewind_step()
        kept = "Nothing had been learnt yet"
        if step > 0:
            if self._saved_step != step:  # else it would be written over, and lost if that is interrupted
                save_only_model, self.args.save_only_model = self.args.save_only_model, False
                self._save_checkpoint(self.model, trial=None)
                self.args.save_only_model = save_only_model
            kept = f"The state after it is in {Path(self.args.output_dir) / f'checkpoint-{step}'}"
        raise RuntimeError(
            f"The vLLM server at {server_url(self.args)} {state} after optimizer step {step} "
            f"({self._server.failure or 'it gave no completions'}). "
            f"{kept}. Mend the cause, start the server again if it is down: {serve_command(self.model.name_or_path)} and "
            "continue with `--resume_from_checkpoint last`."
        )

    # Begin of a run, checkpoints ----------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None):
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise ValueError(f"There is no complete checkpoint in {self.args.output_dir} to resume from.")
        elif resume_from_checkpoint:
            check_complete(resume_from_checkpoint)
        return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def _reset_run(self) -> None:
        """Forget all that belongs to a run and not to the trainer."""
        self._step = 0
        self._buffered_inputs = None
        self._current_train_step_time = 0.0
        self._last_loaded_step = -1  # vLLM has the weights of another run
        for kept in (*self._metrics.values(), *self._logs.values(), self._pending_metrics, self._pending_extra_logs):
            kept.clear()
        self._num_requests = 0  # sent to vLLM by this process while training
        self._evaluation_requests = (0, 0)  # the optimizer step of the last evaluation, and its requests so far
        self._step_begin: dict | None = None
        self._saved_step: int | None = None  # of the last complete checkpoint in `output_dir`

    def _init_training_state(
        self, max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
    ):
        place = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        if resume_from_checkpoint is None or self.state.global_step < max_steps:
            return place
        self.accelerator.print(
            f"{resume_from_checkpoint} is the end of a finished run (optimizer step {self.state.global_step} of "
            f"{max_steps}): nothing is learnt any more. Raise max_steps or num_train_epochs to go on."
        )
        return num_train_epochs, 0  # after the last epoch; Trainer would take one more step

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        self._reset_run()
        if self.use_vllm and self.vllm_mode == "server":
            self._server.failure = None
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if resume_from_checkpoint is not None:
            self._load_run(Path(resume_from_checkpoint))
        return prepared

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
            "metrics": dict(self._metrics["train"]),
            **self._own_state(),
        }
        torch.save(state, directory / f"{self._state_name}_{self.accelerator.process_index}.pt")

    def _load_run(self, checkpoint: Path) -> None:
        files = [
            checkpoint / f"{self._state_name}_{process}.pt" for process in (self.accelerator.process_index, 0)
        ]  # that of process 0 for one that did not exist then
        file = next((file for file in files if file.is_file()), None)
        if file is None:
            raise ValueError(
                f"{checkpoint} has no {files[0].name}: it was not written by {type(self).__name__}, or with "
                "save_only_model=True, and cannot be continued. Start a new run from its weights with "
                "model_name_or_path instead."
            )
        state = torch.load(file, map_location="cpu", weights_only=True)
        check_same_settings(str(checkpoint), state["settings"], self._shared_settings())
        self._step = state["step"]
        self._num_requests = state["num_requests"]
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
        """What a subclass adds to the state of this process; tensors and plain values."""
        return {}

    def _load_own_state(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """Inverse of `_own_state`."""


# What moves on inside an optimizer step, besides metrics and the number of tokens.
_COUNTERS = ("_step", "_num_requests", "_buffered_inputs")


class _StepBegin(TrainerCallback):
    """Remembers where an optimizer step began, which only Trainer knows: the last one of an epoch may be shorter."""

    def __init__(self, trainer: RolloutTrainer):
        self.trainer = trainer

    def on_step_begin(self, args, state, control, **kwargs):
        metrics = {name: list(values) for name, values in self.trainer._metrics["train"].items()}
        counters = {name: getattr(self.trainer, name) for name in _COUNTERS}
        tokens = {"num_input_tokens_seen": state.num_input_tokens_seen, "global_step": state.global_step}
        self.trainer._step_begin = {"metrics": metrics, **counters, **tokens}
