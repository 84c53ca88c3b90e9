"""Base trainer with exact optimizer steps: the gradient does not depend on the split into micro-batches.

The parent class provides generation, tools, vLLM, rewards, collation, and logging. Differences from the parent:

- `_prepare_inputs` stores a generation batch as unpadded whole groups, split into optimizer steps.
- `training_step` follows the parent's schedule, but runs the whole optimizer step in its last accumulation slot; see
  `update/policy_update.py`.
- With `rollout_lag` it takes generation batches of `late_batches.py` instead of generating.
- Checkpoints also contain the completions of later optimizer steps, and the snapshot reference.
"""

import math
import time
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import DistributedType, gather_object
from accelerate.utils.memory import clear_device_cache
from transformers.trainer_utils import TrainOutput
from trl.trainer.utils import use_adapter

from ..errors import FailedRun
from ..update.forward_pass import CompletionLogps
from ..update.microbatching import MicroBatchConfig
from ..update.policy_update import PolicyUpdate
from ..update.reference import SnapshotReference, is_sharded
from ..update.rollout import Rollout, labels_from_rewards, unpad_rollouts
from ..update.step import Objective, StepRollouts, split_into_steps
from ..update.token_weights import Mismatch, MismatchCorrection, TokenWeights
from .checkpoint import merge_rollouts, request_seed, rollouts_to_save, state_name
from .late_batches import LateBatches, Stopped
from .rollout_trainer import RolloutTrainer


class ExactUpdateTrainer(RolloutTrainer):
    """
    [`RolloutTrainer`] with exact optimizer steps on the objective that `create_objective` returns. Its configuration
    is an [`ExactUpdateConfig`].
    """

    late_rollout: Callable | None = None  # an asynchronous `rollout_func`
    _update_class = PolicyUpdate
    _saved_attributes = (*RolloutTrainer._saved_attributes, "_non_finite")

    @abstractmethod
    def create_objective(self) -> Objective:
        """Return the objective of the policy update."""

    def token_weights(self) -> list[TokenWeights]:
        """Return the token weights of the update. Extension point for per-token factors on the gradient."""
        correct = self.args.vllm_importance_sampling_correction
        return [MismatchCorrection(self.update.mismatch)] if correct else []

    def complete_generation(self, generation_batch, rollouts: list[Rollout], num_steps: int) -> list[Rollout]:
        """Return the completions of all processes for the next `num_steps` optimizer steps. `rollouts` are those that
        this process has generated. Extension point for generating more or different completions."""
        return gather_object(rollouts)

    def _prepare_loading(self, model, args, arguments) -> None:
        super()._prepare_loading(model, args, arguments)
        names = ("compute_loss", "_compute_loss", "_get_per_token_logps_and_entropies")
        if own := [name for name in names if getattr(type(self), name) is not getattr(ExactUpdateTrainer, name)]:
            raise ValueError(
                f"{type(self).__name__} overrides {own[0]}, which the exact update does not call in training. "
                "Override `create_objective` (docs/method.md), or derive from TRL's trainer."
            )
        corrects = args.vllm_importance_sampling_correction and not type(args).vllm_importance_sampling_correction
        if corrects and not (args.use_vllm or args.rollout_lag or arguments["rollout_func"]):
            raise ValueError(
                "vllm_importance_sampling_correction=True would be ignored: transformers generates with the trained "
                "weights themselves, so there is nothing to correct. Set use_vllm=True, or remove the key."
            )

    def _prepare_generation(self) -> None:
        if self.args.rollout_lag and self.rollout_func is not None:
            self.late_rollout, self.rollout_func = self.rollout_func, lambda prompts, _: self._take(prompts)
        super()._prepare_generation()

    def _prepare_learning(self) -> None:
        resets = self._reference == "snapshot" and self.args.reset_optimizer_on_reference_reset
        if resets and self.is_deepspeed_enabled:
            raise ValueError(
                "reset_optimizer_on_reference_reset=True is not supported with DeepSpeed, which keeps the optimizer's "
                "state in buffers of its own. Use DDP or FSDP2, or set it to False."
            )
        self._keeps_generating_policy = self.args.keeps_generating_policy
        self.update = self._create_update()
        self.update.token_weights = self.token_weights()
        self.vllm_importance_sampling_correction = False  # disables the parent's, which needs an extra forward pass

    @property
    def _reference(self) -> str:
        """Reference policy of the proxies: the policy at rollout time (`"rollout"`), or a `"snapshot"`."""
        return vars(self.args).get("reference", "rollout")

    @property
    def _mismatch(self) -> Mismatch:
        args = self.args
        bounds = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
        return Mismatch(args.vllm_importance_sampling_mode, *bounds)

    def _create_update(self) -> PolicyUpdate:
        args = self.args
        untruncated = args.top_p == 1.0 and not args.top_k and not args.min_p and args.repetition_penalty == 1.0
        return self._update_class(
            self.forward_pass,
            self.accelerator,
            objective=self.create_objective(),
            limits=MicroBatchConfig(
                self.accelerator.num_processes,
                args.per_device_train_batch_size,
                args.max_tokens_per_micro_batch,
                group_layout=vars(args).get("group_layout", "auto"),
                backward_cost=3 if args.gradient_checkpointing else 2,  # a backward pass costs two forward passes
                pair_cost=1 / (6 * self.forward_pass.config.get_text_config().hidden_size),
            ),
            mismatch=self._mismatch,
            # A temperature other than 1 is allowed, because the loss divides the logits by it too.
            samples_policy=untruncated and not args.generation_kwargs and not args.rollout_lag,
            compute_kl_ref_logps=self._compute_kl_ref_logps if args.beta != 0 else None,
        )

    # Rollouts -------------------------------------------------------------------------------------------------------

    def _labels_of(self, rewards_per_func):
        return labels_from_rewards(rewards_per_func, self.reward_weights, self.reward_func_names)

    def _prepare_inputs(self, generation_batch):
        if not self.model.training:
            return self._generate_and_score_completions(generation_batch)
        if self._at_generation_boundary():
            num_steps = self.args.steps_per_generation // self.args.gradient_accumulation_steps
            first = self._generate_rollouts(generation_batch)
            rollouts = self.complete_generation(generation_batch, first, max(num_steps, 1))
            if num_steps <= 1 and self.num_iterations == 1 and not self._keeps_generating_policy:
                self._pending = self._pending + rollouts
            else:
                shuffles = vars(self.args).get("shuffle_minibatches", False)
                seed = request_seed(f"{self.args.seed}/minibatches", self._step) if shuffles else None
                self._steps = [self.update.schedule(rows) for rows in split_into_steps(rollouts, num_steps, seed)]
                self._cache_rollout_logps()
        return generation_batch

    def _generate_rollouts(self, generation_batch) -> list[Rollout]:
        """Generate and grade the completions of this process, and return them without padding."""
        rollouts = unpad_rollouts(self._generate_and_score_completions(generation_batch))
        if self.args.rollout_lag and not self._keeps_generating_policy:
            set_generating_logps(rollouts, self._generating_logps)
        return rollouts

    @property
    def _generating_logps(self) -> list[str]:
        """Log-probs that are those of the policy that generated, with a lag."""
        return ["ref_logps"] * self._reads_rollout_reference + ["old_logps"] * self.update.objective.has_ratio

    @property
    def _reads_rollout_reference(self) -> bool:
        return self._reference == "rollout" and self.update.objective.has_reference

    def _cache_rollout_logps(self) -> None:
        """Compute the log-probs at rollout time that later updates need, before the policy changes."""
        has_ratio, has_weights = self.update.objective.has_ratio, bool(self.update.token_weights)
        is_late = self.args.rollout_lag > 0
        if self._keeps_generating_policy:
            self._recompute_generating_logps()
        names = ["ref_logps"] * (self._reads_rollout_reference and not is_late)
        if not (has_ratio and is_late):
            names += ["old_logps"] * (has_weights or has_ratio) + ["old_entropies"] * has_weights
        later = self._steps if self.num_iterations > 1 else self._steps[1:]
        with self.timer.part("log_probs"):
            for step in later if names else ():
                self.update.cache_logps(self.model_wrapped, step, *names)

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        """Skip the log-probs that the parent computes after generation; the update computes those that it needs."""
        return None, None, None

    # Optimizer step -------------------------------------------------------------------------------------------------

    def training_step(self, model, inputs, num_items_in_batch=None):
        started = time.perf_counter()
        model.train()
        if hasattr(self.optimizer, "train") and callable(self.optimizer.train):
            self.optimizer.train()
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            clear_device_cache()
        self._prepare_inputs(inputs)
        loss = 0.0
        if self.accelerator.sync_gradients:  # the last slot of the optimizer step
            with self.timer.part("update"):
                loss = self._run_update(model)
        self._step += 1
        self._current_train_step_time += time.perf_counter() - started
        if self.accelerator.sync_gradients:
            self._metrics["train"]["step_time"].append(self._current_train_step_time)
            self._current_train_step_time = 0.0
        return torch.tensor(loss, device=self.args.device)

    def _run_update(self, model) -> float:
        if self._pending:
            step, first_update = self.update.schedule(self._pending), True
            self._pending = []
        else:
            update = self._step // self.args.gradient_accumulation_steps
            step = self._steps[update % len(self._steps)]
            first_update = update % (len(self._steps) * self.num_iterations) == 0
        step.on_policy, step.is_late = first_update, self.args.rollout_lag > 0 and self.update.objective.has_ratio
        if self._reference == "snapshot":
            with self.timer.part("log_probs"):
                self._cache_snapshot_logps(model, step)
        proxies_are_zero = first_update and self._policy_is_reference() and not self.args.rollout_lag
        loss, metrics = self.update.run(model, step, proxies_are_zero=proxies_are_zero)
        self.record_metrics(metrics)
        return loss

    def _recompute_generating_logps(self) -> None:
        """Compute the log-probs of the policy that generated with its copy, which the current policy replaces: that
        is what the server generates the next batch with."""
        if self._snapshot is None:
            self._snapshot = self._take_snapshot(self.model_wrapped)
        elif self._late.taken["step"] == self.state.global_step:  # requested again after a resume
            self._snapshot.renew()
        with self.timer.part("log_probs"), self._snapshot.in_place_of_policy():
            for step in self._steps:
                self.update.cache_logps(self.model_wrapped, step, *self._generating_logps)
        self._snapshot.renew()

    def _take_snapshot(self, model) -> SnapshotReference:
        return SnapshotReference(model, offload=vars(self.args).get("reference_offload", False))

    def _cache_snapshot_logps(self, model, step: StepRollouts) -> None:
        if self._snapshot is None:
            self._snapshot = self._take_snapshot(model)
        every = self.args.reference_reset_steps
        if every is not None and self.state.global_step > 0 and self.state.global_step % every == 0:
            self._snapshot.renew()
            if self.args.reset_optimizer_on_reference_reset:
                self.optimizer.state.clear()
        with self._snapshot.in_place_of_policy():
            self.update.cache_logps(model, step, "ref_logps")

    def _policy_is_reference(self) -> bool:
        """Return whether the policy at rollout time is the reference. Before the first snapshot, it is."""
        return self.update.objective.has_reference and (self._snapshot is None or self._reference != "snapshot")

    def _compute_kl_ref_logps(self, model, prompt_ids, completion_ids) -> CompletionLogps:
        if self.ref_model is not None:
            return self.ref_pass.compute_logps(self.ref_model, prompt_ids, completion_ids)
        unwrapped = self.accelerator.unwrap_model(self.model)
        with use_adapter(unwrapped, adapter_name="ref" if "ref" in unwrapped.peft_config else None):
            return self.forward_pass.compute_logps(model, prompt_ids, completion_ids)

    def _compute_loss(self, model, inputs):
        """Compute the loss of an evaluation batch, with the formula of training and without gradient."""
        rollouts = self.without_repeated(gather_object(unpad_rollouts(inputs)))
        if self.num_generations_eval < 2 and not self.update.objective.has_ratio:
            return torch.tensor(0.0, device=self.args.device)  # a score needs a second completion of the prompt
        step = self.update.schedule(rollouts, is_evaluation=True)
        step.on_policy = step.coefficients is not None
        if self._reference == "snapshot" and self._snapshot is not None:
            with self._snapshot.in_place_of_policy():
                self.update.cache_logps(model, step, "ref_logps")
        loss, metrics = self.update.evaluate(model, step, proxies_are_zero=self._policy_is_reference())
        self.record_metrics(metrics)
        return torch.tensor(loss, device=self.args.device)

    def _get_grad_norm(self, model, grad_norm=None):
        """Skip and count optimizer steps with a non-finite gradient; raise a [`FailedRun`] after too many in a row."""
        grad_norm = super()._get_grad_norm(model, grad_norm)
        in_a_row, total = self._non_finite
        is_finite = math.isfinite(float(grad_norm))  # the same on all processes
        in_a_row, total = self._non_finite = (0, total) if is_finite else (in_a_row + 1, total + 1)
        self._metrics["train"]["pacs/non_finite_steps"].append(total)
        if is_finite:
            return grad_norm
        step, is_applied = self.state.global_step + 1, self.accelerator.distributed_type == DistributedType.DEEPSPEED
        if is_applied or in_a_row >= self.args.max_non_finite_steps:
            now = f"The gradient norm was not finite in {in_a_row} optimizer steps in a row, up to step {step}"
            weights = "DeepSpeed has already applied the gradient to the weights. Start from the last checkpoint"
            if not is_applied:
                now += f" (max_non_finite_steps={self.args.max_non_finite_steps})"
                weights = "The weights are those before these steps. Look at `pacs/proxy_abs_mean`"
            raise FailedRun(f"{now}. {weights}, and lower the learning rate, or set max_grad_norm.")
        if self.accelerator.scaler is None:  # in fp16 the scaler skips such steps itself
            model.zero_grad(set_to_none=True)  # optimizers skip parameters without a gradient
        return grad_norm

    # Generation ahead of training: batches and their rewards come from `late_batches.py` -----------------------------

    def train(self, *args, **kwargs):
        try:
            return super().train(*args, **kwargs)
        except Stopped:
            return TrainOutput(self.state.global_step, float("nan"), {})
        finally:
            if self._late is not None:
                self._late.close()

    def evaluation_loop(self, *args, **kwargs):
        if self._late is not None:  # a server has one copy of the weights, and reward functions are called in order
            self._late.finish()
            self.accelerator.wait_for_everyone()
        return super().evaluation_loop(*args, **kwargs)

    def _save_rng_state(self, output_dir):
        if self._late is not None:
            self._late.finish()  # before random states, which reward functions may use
        super()._save_rng_state(output_dir)

    def _calculate_rewards(self, *args):
        functions = self.reward_funcs
        if self._late is not None and self.model.training:
            found = self._late.taken["rewards"]
            self.reward_funcs = [partial(_replay, found[i]) if i in found else f for i, f in enumerate(functions)]
        try:
            return super()._calculate_rewards(*args)
        finally:
            self.reward_funcs = functions

    def _generate(self, prompts):
        if self.late_rollout is not None:  # else TRL would send weights while a batch is in flight
            self._last_loaded_step = self.state.global_step
        return super()._generate(prompts)

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        if self._late is None or not self.model.training:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        output = self._take([list(ids) for ids in prompt_ids])
        self._end_empty(**output)
        return output["completion_ids"], output["logprobs"]

    def _take(self, prompts: list) -> dict[str, list]:
        if not self.model.training:
            raise ValueError("rollout_func with rollout_lag generates in training only. Use another for evaluation.")
        return self._late.take(self._step // (self.args.steps_per_generation * self.num_iterations), prompts)

    # Checkpoints ----------------------------------------------------------------------------------------------------

    def _reset_run(self) -> None:
        super()._reset_run()
        self._pending: list[Rollout] = []  # completions of the generation batches of one optimizer step
        self._steps: list[StepRollouts] = []  # the optimizer steps of the current generation batch
        self._snapshot: SnapshotReference | None = None
        self._late = LateBatches(self) if self.args.rollout_lag else None
        self._non_finite = 0, 0  # non-finite optimizer steps: consecutive ones up to the last step, and the total

    def _save_run(self, directory: Path) -> None:
        super()._save_run(directory)
        process = self.accelerator.process_index
        if self._snapshot is not None and (process == 0 or is_sharded(self.model_wrapped)):
            torch.save(self._snapshot.state_dict(), directory / f"pacs_reference_{process}.pt")

    def _save_last_step(self) -> None:
        if self._late is not None:
            self._late.put_back()
        super()._save_last_step()

    def _own_state(self) -> dict:
        waiting = [] if self._at_generation_boundary() else [step.rollouts for step in self._steps]
        rollouts = rollouts_to_save(waiting, self.accelerator.process_index, self.accelerator.num_processes)
        return {"rollouts": rollouts, "late_batches": {} if self._late is None else self._late.finish()}

    def _load_own_state(self, checkpoint: Path, state: dict) -> None:
        files = checkpoint.glob(f"{state_name(self)}_*.pt")
        parts = [torch.load(file, map_location="cpu", weights_only=True)["rollouts"] for file in files]
        self._steps = [self.update.schedule(rollouts) for rollouts in merge_rollouts(parts)]
        if self._late is not None:
            self._late.arrived = dict(state["late_batches"])
        if self._reference == "snapshot" or self._keeps_generating_policy:
            process = self.accelerator.process_index if is_sharded(self.model_wrapped) else 0
            copies = torch.load(checkpoint / f"pacs_reference_{process}.pt", map_location="cpu", weights_only=True)
            self._snapshot = self._take_snapshot(self.model_wrapped)
            self._snapshot.load_state_dict(copies)


def set_generating_logps(rollouts: list[Rollout], names: list[str]) -> None:
    """Store the log-probs that the engine reported under other names too (`ref_logps`, `old_logps`). Tokens without
    one are masked out."""
    for rollout in rollouts:
        known = np.isfinite(rollout.sampling_logps)
        rollout.loss_mask = rollout.loss_mask & known
        for name in names:
            setattr(rollout, name, np.where(known, rollout.sampling_logps, 0.0).astype(np.float32))


def _replay(found: Any, **given: Any) -> list[float | None]:
    if isinstance(found, Exception):
        raise found
    for function, name, value in found["logged"]:
        given[function](name, value)
    return found["rewards"]
