"""Base trainer with exact optimizer steps: the gradient does not depend on the split into micro-batches.

The parent class provides generation, tools, vLLM, rewards, collation, and logging. Trainer calls
[`ExactUpdateTrainer.training_step`] once per accumulation slot, of which an optimizer step has
`gradient_accumulation_steps`, and a generation batch has `steps_per_generation`, each used `num_iterations` times.
The parent back-propagates a part of the loss in each slot. Here the work is done at once: the first slot of a
generation batch generates and grades it, and the last slot of an optimizer step runs the whole step (`update/`). With
2 slots per step, 4 per generation batch, and one iteration:

    slot               0           1           2           3           4           5
    generation batch   generate                                        generate
    optimizer step                 update                  update                  update

Between generation and update, completions are unpadded [`Rollout`]s that wait ([`WaitingRollouts`]) and are saved in
checkpoints. They come from a [`RolloutSource`]: generation now, or generation beside training with `rollout_lag`
(`late_batches.py`) or `rollout_schedule: continuous` (`continuous.py` with a server, `repeatable_rollouts.py`
without).
"""

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from accelerate.utils import gather_object
from accelerate.utils.memory import clear_device_cache
from datasets import IterableDataset
from trl.trainer.utils import use_adapter

from ..errors import UserError
from ..pacs_config import ExactUpdateConfig
from ..update.driver import StepResult, UpdateDriver
from ..update.forward_pass import CompletionLogps
from ..update.group_loss_update import GroupLossUpdate, GroupObjective
from ..update.microbatching import MicroBatchConfig
from ..update.minibatch import Minibatch, UpdateTiming, split_into_minibatches
from ..update.policy_update import PolicyUpdate
from ..update.ratio_update import RatioObjective
from ..update.reference import SnapshotReference, is_sharded
from ..update.rollout import Rollout
from ..update.step_sizes import BatchSizes
from ..update.token_weights import Mismatch, MismatchCorrection, TokenWeights
from . import checkpoint
from .adapter_checks import max_lora_rank
from .checkpoint import load_policy_copy, read_states, save_policy_copy
from .compared_settings import check_fixed
from .copied_settings import check_changes, copied_settings
from .engine_failures import ServerFailure, stop_without_engine
from .engine_weights import WrongWeights
from .entropy_bonus import adapt_entropy_coef, check_entropy_coef, effective_entropy_coef
from .late_batches import LateBatches, use_engine_logps
from .layer_compilation import compile_policy_and_reference, compiles_layers
from .memory import plan_memory, with_choice
from .model_config import config_of
from .non_finite_steps import skip_non_finite_step
from .overrides import check_batch, check_overrides, replaced
from .process_checks import check_on_first_process
from .process_count import divide_batches
from .prompt_order import EpochSampler
from .recomputation_checks import check_recomputation_of_routers
from .repeatable_rollouts import RepeatableRollouts
from .request_seeds import request_seed
from .rollout_trainer import RolloutTrainer
from .router_checks import trains_routers
from .server_checks import check_server_of_continuous
from .sources import ConversationSource, RolloutSource
from .step_memory import StepMemory, backward_cost
from .uneven_shares import UnevenSampler
from .waiting_rollouts import WaitingRollouts, merge_rollouts, rollouts_to_save, share_logps, split_into_slices
from .worker_checks import check_user_code


class ExactUpdateTrainer(RolloutTrainer):
    """
    [`RolloutTrainer`] with exact optimizer steps on the objective that `create_objective` returns. Its configuration
    is an [`ExactUpdateConfig`].
    """

    args: ExactUpdateConfig
    _waiting: WaitingRollouts
    _generating_policy: SnapshotReference | None  # a copy, for `stale_logps: recompute` with a server
    _non_finite: tuple[int, int]  # non-finite optimizer steps: consecutive ones up to the last step, and the total
    late_rollout: Callable | None = None  # an asynchronous `rollout_func`
    update_class: type[PolicyUpdate] = GroupLossUpdate
    # Attributes of TRL's trainer, copies of settings, that `create_objective` reads: they may change during a run.
    live_attributes: tuple[str, ...] = ("beta",)
    # Logged metrics that show why a gradient is not finite.
    divergence_metrics: tuple[str, ...] = ("grad_norm", "entropy")
    _saved_attributes = (
        *RolloutTrainer._saved_attributes,
        "_non_finite",
        "_last_world_entropy",
        # Callbacks may change these:
        "beta",
        "entropy_coef",
        "router_aux_loss_coef",
    )

    # What a method defines ------------------------------------------------------------------------------------------

    @abstractmethod
    def create_objective(self) -> GroupObjective | RatioObjective:
        """Return the objective of the policy update: a [`GroupObjective`], or a [`RatioObjective`] with
        `update_class = RatioUpdate`."""

    def create_update(self) -> PolicyUpdate:
        """Return the update of an optimizer step. Extension point for coefficients that depend on more than the
        objective."""
        return self.update_class(
            UpdateDriver(self.forward_pass, self.accelerator, self._micro_batch_limits()),
            self.create_objective(),
            self._mismatch,
            token_weights=self.token_weights(),
            samples_policy=self._samples_policy(),
            compute_kl_ref_logps=self._compute_kl_ref_logps if self.args.beta != 0 else None,
            has_entropy_bonus=self._entropy_bonus_enabled,
            has_router_loss=self.aux_loss_enabled,
        )

    def token_weights(self) -> list[TokenWeights]:
        """Return the token weights of the update. Extension point for per-token factors on the gradient."""
        if self.args.vllm_importance_sampling_correction:
            return [MismatchCorrection(self._mismatch)]
        return []

    def complete_generation(self, generation_batch, rollouts: list[Rollout], num_steps: int) -> list[Rollout]:
        """Return the completions of all processes for the next `num_steps` optimizer steps. `rollouts` are those that
        this process has generated. Extension point for generating more or different completions."""
        return gather_object(rollouts)

    def store_reference_logps(self, model, minibatch: Minibatch) -> None:
        """Store `ref_logps` in a minibatch before its update or evaluation. Extension point for references other than
        the policy at rollout time, whose log-probs are stored after generation."""

    def policy_is_reference(self) -> bool:
        """Return whether the policy at rollout time is the reference of the proxies."""
        return "ref_logps" in self.update.logps_of_generating_policy

    # Construction, in this order ------------------------------------------------------------------------------------

    def _before_loading(self, model, args, arguments) -> None:
        if args.has_continuous_server:
            self.user_code = check_user_code(args, model, arguments)
        super()._before_loading(model, args, arguments)
        if args.completions_per_step and isinstance(arguments["train_dataset"], IterableDataset):
            raise UserError(
                f"completions_per_step={args.completions_per_step} divides a generation batch unevenly, which a "
                "streamed dataset does not support. Load the dataset, or launch a number of processes that divides it."
            )
        check_overrides(self, ExactUpdateTrainer)
        has_engine = args.use_vllm or args.is_asynchronous or arguments["rollout_func"]
        corrects_by_default = type(args).vllm_importance_sampling_correction  # default of the configuration's class
        if args.vllm_importance_sampling_correction and not corrects_by_default and not has_engine:
            raise UserError(
                "vllm_importance_sampling_correction=True would be ignored: transformers generates with the trained "
                "weights themselves, so there is nothing to correct. Set use_vllm=True, or remove the key."
            )
        self._compiles_layers = compiles_layers(model, args, arguments["quantization_config"])

    def _resolve_auto_settings(self, model, args, arguments):
        if trains_routers(config_of(model, args), args):
            check_recomputation_of_routers(args)
        if args.has_continuous_server:
            lora_rank = max_lora_rank(args, model, arguments["peft_config"])
            check_on_first_process(partial(check_server_of_continuous, args, model, self._longest_sequence, lora_rank))
        plan = plan_memory(
            model,
            args,
            arguments["peft_config"],
            self._longest_sequence,
            compiled=self._compiles_layers,
            quantization_config=arguments["quantization_config"],
        )
        self.memory = StepMemory(self, plan, args)
        return with_choice(args, self.memory.choice)

    def _create_source(self) -> RolloutSource:
        if self.args.has_continuous_server:
            from .continuous import ContinuousRollouts  # imports TRL's asynchronous trainer

            return ContinuousRollouts(self)
        if self.args.rollout_schedule == "continuous":
            return RepeatableRollouts(self)
        if self.args.rollout_lag:
            return LateBatches(self)
        return super()._create_source()

    def _set_up_generation(self) -> None:
        if self.args.rollout_lag and self.rollout_func is not None:
            # The source calls the function of the user ahead of time, and TRL gets what it has returned.
            self.late_rollout = self.rollout_func
            self.rollout_func = lambda prompts, trainer: self._source.take(prompts)
        super()._set_up_generation()

    def _set_up_update(self) -> None:
        self._copied_settings = copied_settings(self)
        if self.aux_loss_enabled:  # TRL sets use_reentrant for adapters with ZeRO-3, and recomputation is chosen now
            check_recomputation_of_routers(self.args)
        self.update = self.create_update()
        self.forward_pass.entropies_have_gradient = self._entropy_bonus_enabled
        self.forward_pass.reads_routers = self.aux_loss_enabled
        self.vllm_importance_sampling_correction = False  # disables the parent's, which needs an extra forward pass

    def _micro_batch_limits(self) -> MicroBatchConfig:
        args = self.args
        return MicroBatchConfig(
            self.accelerator.num_processes,
            args.per_device_train_batch_size,
            self.memory.choice.max_tokens,
            group_layout=args.group_layout,
            backward_cost=backward_cost(args),
            is_adaptive=self.memory.is_automatic,
            pair_cost=1 / (6 * self.forward_pass.config.get_text_config().hidden_size),
        )

    @property
    def _mismatch(self) -> Mismatch:
        args = self.args
        clip_min, clip_max = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
        return Mismatch(args.vllm_importance_sampling_mode, clip_min, clip_max)

    def _samples_policy(self) -> bool:
        """Return whether completions are samples of the distribution that is trained. A temperature other than 1 is
        allowed, because the loss divides the logits by it too."""
        args = self.args
        truncates = args.top_p != 1.0 or bool(args.top_k) or bool(args.min_p)
        changes_logits = args.repetition_penalty != 1.0 or bool(args.generation_kwargs)
        return not (truncates or changes_logits or args.is_asynchronous)

    # Start of a run -------------------------------------------------------------------------------------------------

    def _prepare_memory(self, resume_from_checkpoint) -> None:
        saved = None
        if resume_from_checkpoint:
            saved = checkpoint.read_memory(self, Path(resume_from_checkpoint))
        self.memory.begin_run(saved)

    def _get_train_sampler(self, dataset=None):
        shares = self._uneven_shares()
        if shares is None:
            return super()._get_train_sampler(dataset)
        sampler = UnevenSampler(
            shares,
            data_source=self.train_dataset if dataset is None else dataset,
            mini_repeat_count=self.num_generations,
            batch_size=shares.num_completions // self.num_generations,
            repeat_count=self.num_iterations * self.args.steps_per_generation,
            shuffle=self.shuffle_dataset,
            seed=self.args.seed,
        )
        return EpochSampler(sampler, lambda: int(self.state.epoch or 0))

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        check_overrides(self, ExactUpdateTrainer)  # methods may also be replaced after construction
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        # Trainer has sharded the weights now.
        if self.memory.is_automatic and self.memory.plan.workload is not None and is_sharded(self.model_wrapped):
            self.memory.try_largest_micro_batch()
        return prepared

    def _choose_forward_passes(self) -> None:
        if self._forward_passes_are_chosen:
            return
        super()._choose_forward_passes()
        if self._compiles_layers:
            compile_policy_and_reference(self)

    # Optimizer step -------------------------------------------------------------------------------------------------

    def training_step(self, model, inputs, num_items_in_batch=None):
        """Run an accumulation slot, in which Trainer passes one dataset batch: see the docstring of this module. The
        result is the loss of the optimizer step in its last slot, and 0 in the others."""
        started = time.perf_counter()
        self._enter_training(model)
        check_entropy_coef(self)
        self._follow_changed_settings()

        # 1. Generate and grade a generation batch, and split it into minibatches, one for each optimizer step.
        if self._at_generation_boundary():
            self._generate_minibatches(inputs)
        if self.is_sliced:
            self._take_slice()

        loss = 0.0
        is_last_slot = self.accelerator.sync_gradients
        if is_last_slot:
            with self.timer.part("update"), torch.enable_grad():  # code of the user may have disabled gradients
                # 2. Take the minibatch of this optimizer step.
                minibatch = self._next_minibatch()

                # 3. Back-propagate its loss, again with smaller micro-batches if memory runs out. Trainer clips the
                # gradient and updates the weights.
                self._set_coefficients()
                result = self._run_update(model, minibatch)
            self.record_metrics(result.metrics)
            adapt_entropy_coef(self, result.mean_bonus_entropy)
            loss = result.loss

        self._step += 1
        self._current_train_step_time += time.perf_counter() - started
        if is_last_slot:
            self._metrics["train"]["step_time"].append(self._current_train_step_time)
            self._current_train_step_time = 0.0
        return torch.tensor(loss, device=self.args.device)

    def _enter_training(self, model) -> None:
        """Do what Trainer does at the start of a training step."""
        model.train()
        train_optimizer = getattr(self.optimizer, "train", None)
        if callable(train_optimizer):
            train_optimizer()
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            clear_device_cache()

    def _follow_changed_settings(self) -> None:
        """Renew the objective if a callback has changed an attribute that it reads. Raises a [`FailedRun`] if it has
        changed one that nothing reads anew, and a `ValueError` for a setting in `args`."""
        check_fixed(self)
        settings = copied_settings(self)
        if settings != self._copied_settings:
            check_changes(self, self._copied_settings, settings)
            self._copied_settings = settings
            self.update.objective = self.create_objective()

    def _get_grad_norm(self, model, grad_norm=None):
        grad_norm = super()._get_grad_norm(model, grad_norm)
        skip_non_finite_step(self, model, float(grad_norm))
        return grad_norm

    # 1. Generation batches ------------------------------------------------------------------------------------------

    @property
    def is_sliced(self) -> bool:
        """Whether optimizer steps take slots of generation batches as they come."""
        return BatchSizes.of(self.args, self.accelerator.num_processes).is_sliced

    @property
    def _minibatches_per_generation(self) -> int:
        """Number of optimizer steps that share a generation batch, without reuse."""
        return max(self.args.steps_per_generation // self.args.gradient_accumulation_steps, 1)

    def _generate_minibatches(self, inputs) -> None:
        """Generate and grade a generation batch, whose completions then wait for their optimizer steps. Log-probs
        under the current weights, which later updates read, are stored now."""
        num_minibatches = self._minibatches_per_generation
        rollouts = self._generate_rollouts(inputs)
        rollouts = self.complete_generation(inputs, rollouts, num_minibatches)
        if self.is_sliced:
            # Steps take the slots of this batch as they come.
            self._store_logps_of_slices(rollouts)
            slices = split_into_slices(rollouts, self.args.steps_per_generation, self._shuffle_seed())
            self._waiting = replace(self._waiting, slices=slices)
            return

        has_later_updates = num_minibatches > 1 or self.num_iterations > 1
        if not has_later_updates and not self.args.keeps_generating_policy:
            # The next step takes the whole batch, perhaps with other batches, and computes all log-probs itself.
            self._waiting = self._waiting.with_more_for_next_step(rollouts)
            return

        # Each minibatch has a step, or several. The copy of the generating policy has newer weights by the time of the
        # first step, so that its log-probs are stored even for a single one.
        parts = split_into_minibatches(rollouts, num_minibatches, self._shuffle_seed())
        minibatches = [self._schedule_step(part, self.args.gradient_accumulation_steps) for part in parts]
        self._store_logps_for_later_updates(minibatches)
        self._waiting = WaitingRollouts(minibatches=minibatches)

    def _generate_rollouts(self, inputs) -> list[Rollout]:
        """Generate and grade the completions of this process, and return them without padding."""
        if self.args.rollout_schedule == "continuous" or self.late_rollout is not None:
            self._last_loaded_step = self.state.global_step  # the source sends weights to a server, and TRL does not
        if self._shares is not None:
            inputs = self._shares.rows_of(self.accelerator.process_index, inputs)
        conversations: AbstractContextManager[None] = nullcontext()
        if self.args.has_continuous_server:
            conversations = self._conversations_of_source()
        try:
            with conversations:
                rollouts = self.unpad_rollouts(self._generate_and_score_completions(inputs))
        except (ServerFailure, WrongWeights) as failure:
            stop_without_engine(self, failure)
        if self.args.is_asynchronous and not self.args.keeps_generating_policy:
            use_engine_logps(rollouts, self.update.logps_of_generating_policy)
        return rollouts

    def _conversations_of_source(self) -> AbstractContextManager[None]:
        """Return a context in which TRL's methods log whole conversations of the source, with calls of tools, as if
        they had generated them."""
        source = self._source
        assert isinstance(source, ConversationSource)
        return replaced(
            self,
            rollout_func=lambda prompts, trainer: source.take(prompts),
            _tool_call_loop=source.tool_calls,
            environment_factories=None,
            environments=None,
        )

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        """Skip the log-probs that the parent computes after generation; the update computes those that it needs."""
        if self._asks_for_logps:
            return None, None, None
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    def unpad_rollouts(self, batch: dict) -> list[Rollout]:
        check_batch(self, batch, has_advantages=isinstance(self.update.objective, RatioObjective))
        return super().unpad_rollouts(batch)

    def _shuffle_seed(self) -> int | None:
        """Return the seed with which completions of a generation batch are spread over its steps; `None` for whole
        groups in order."""
        if not self.args.shuffle_minibatches:
            return None
        return request_seed(f"{self.args.seed}/minibatches", self.generation_number)

    def _schedule_step(self, rollouts: list[Rollout], num_slots: int) -> Minibatch:
        """Return the minibatch of an optimizer step of `num_slots` accumulation slots."""
        for rollout in rollouts:
            rollout.generation_share = num_slots / self.args.steps_per_generation
        return self.update.schedule_minibatch(rollouts)

    # Log-probs at rollout time, which are stored before the weights change ------------------------------------------

    def _store_logps_of_slices(self, rollouts: list[Rollout]) -> None:
        """Store the log-probs at rollout time on all processes: a slot may be trained at any later update, on any
        process. They are compared with those of the engine here, because no update has all these completions."""
        names = self.update.logps_for_later_updates(is_late=False)
        minibatch = self.update.schedule_minibatch(rollouts)
        with self.timer.part("log_probs"):
            self.update.driver.store_logps(self.model_wrapped, minibatch, *names)
        share_logps(rollouts, names)
        self.record_metrics(self.update.stored_mismatch_metrics(rollouts))

    def _store_logps_for_later_updates(self, minibatches: Sequence[Minibatch]) -> None:
        """Store the log-probs at rollout time that later updates on a generation batch read."""
        if self.args.keeps_generating_policy:
            self._recompute_generating_logps(minibatches)
        names = self.update.logps_for_later_updates(is_late=self.args.is_asynchronous)
        if not names:
            return
        # Without reuse, the first minibatch has its only update now.
        is_reused = self.num_iterations > 1
        later_minibatches = minibatches if is_reused else minibatches[1:]
        with self.timer.part("log_probs"):
            for minibatch in later_minibatches:
                self.update.driver.store_logps(self.model_wrapped, minibatch, *names)

    def _recompute_generating_logps(self, minibatches: Sequence[Minibatch]) -> None:
        """Store the log-probs of a generation batch under the weights that the server generated it with.

        `_generating_policy` is a copy of these weights: those of the optimizer step at which the batch was requested,
        when the batch before was taken. When this batch was taken, the next one was requested, with the current
        weights, so the copy gets them at the end."""
        source = self._source
        assert isinstance(source, LateBatches)
        if self._generating_policy is None:  # the first batch, which has the initial weights
            self._generating_policy = SnapshotReference(self.model_wrapped)
        elif source.taken_step == self.state.global_step:
            # A run that has resumed requests a batch again that had not arrived, with the weights that it has now. The
            # copy of the checkpoint has earlier ones.
            self._generating_policy.renew()
        names = self.update.logps_of_generating_policy
        with self.timer.part("log_probs"), self._generating_policy.in_place_of_policy():
            for minibatch in minibatches:
                self.update.driver.store_logps(self.model_wrapped, minibatch, *names)
        self._generating_policy.renew()

    # 2. The minibatch of an optimizer step --------------------------------------------------------------------------

    def _take_slice(self) -> None:
        """Add the completions of the current accumulation slot to those of the next optimizer step."""
        slot = self._step % self.args.steps_per_generation
        self._waiting = self._waiting.with_more_for_next_step(self._waiting.slices[slot])

    def _next_minibatch(self) -> Minibatch:
        """Return the completions of the next optimizer step."""
        if self._waiting.next_step:
            # The last step of an epoch may have fewer generation batches.
            minibatch = self._schedule_step(self._waiting.next_step, self.current_gradient_accumulation_steps)
            self._waiting = replace(self._waiting, next_step=[])
            return minibatch
        return self._waiting.minibatches[self._update_number % len(self._waiting.minibatches)]

    @property
    def _update_number(self) -> int:
        return self._step // self.args.gradient_accumulation_steps

    # 3. The update --------------------------------------------------------------------------------------------------

    def _set_coefficients(self) -> None:
        """Set the coefficients of the update that may change between optimizer steps."""
        self.update.entropy_coef = effective_entropy_coef(self)
        self.update.router_coef = self.router_aux_loss_coef

    def _run_update(self, model, minibatch: Minibatch) -> StepResult:
        """Back-propagate the loss of a minibatch, and repeat it with smaller micro-batches if memory runs out."""

        def update() -> StepResult:
            # The order matters: a reference that is not the policy at rollout time, as PACS's snapshot, is taken here
            # for the first time. From then on `policy_is_reference`, which the timing reads, is False, also while the
            # weights are still equal.
            self.store_reference_logps(model, minibatch)
            timing = self._update_timing()
            return self.update.run(model, minibatch, timing)

        return self.memory.repeat_until_it_fits(update, model, minibatch)

    def _update_timing(self) -> UpdateTiming:
        is_first_update = self._is_first_update()
        is_late = self.args.is_asynchronous  # an earlier policy than the current one generated
        return UpdateTiming(
            is_first_update=is_first_update,
            old_logps_are_stored=is_late and "old_logps" in self.update.logps_of_generating_policy,
            proxies_are_zero=is_first_update and self.policy_is_reference() and not is_late,
        )

    def _is_first_update(self) -> bool:
        """Return whether the weights have not changed since the rollouts of this optimizer step were generated, or
        taken from a source."""
        if self.is_sliced:  # a slot may be of an earlier generation batch
            return False
        if not self._waiting.minibatches:  # the step takes whole generation batches, each of them once
            return True
        updates_per_generation = len(self._waiting.minibatches) * self.num_iterations
        return self._update_number % updates_per_generation == 0

    def _compute_kl_ref_logps(self, model, prompt_ids, completion_ids, images=None) -> CompletionLogps:
        """Compute log-probs under the reference of the KL term: a model of its own, or the model without the trained
        adapter."""
        if self.ref_model is not None:
            return self.ref_pass.compute_logps(self.ref_model, prompt_ids, completion_ids, images)
        unwrapped = self.accelerator.unwrap_model(self.model)
        if self.update.driver.runs_passes_alone:
            model = unwrapped  # DDP would send buffers between two calls of `agree_on_memory`
        adapter_name = "ref" if "ref" in unwrapped.peft_config else None  # a copy of the initial adapter, or none
        with use_adapter(unwrapped, adapter_name):
            return self.forward_pass.compute_logps(model, prompt_ids, completion_ids, images)

    # Evaluation -----------------------------------------------------------------------------------------------------

    def _compute_loss(self, model, inputs):
        """Compute the loss of an evaluation batch, with the formula of training and without gradient."""
        rollouts = self.without_repeated(gather_object(self.unpad_rollouts(inputs)))
        minibatch = self.update.schedule_evaluation(rollouts)
        self.store_reference_logps(model, minibatch)
        self._set_coefficients()
        result = self.update.evaluate(model, minibatch, policy_is_reference=self.policy_is_reference())
        metrics = result.metrics
        if self.num_generations_eval == 1 and self.update.needs_several_completions:
            # Without groups the loss is 0, and entropy and KL are defined.
            metrics = {name: value for name, value in metrics.items() if not math.isnan(value)}
        self.record_metrics(metrics)
        return torch.tensor(result.loss, device=self.args.device)

    # Checkpoints ----------------------------------------------------------------------------------------------------

    def _reset_run(self) -> None:
        super()._reset_run()
        self._waiting = WaitingRollouts()
        self._generating_policy = None
        self._non_finite = 0, 0

    def _save_run(self, directory: Path) -> None:
        super()._save_run(directory)
        if self._generating_policy is not None:
            save_policy_copy(self, self._generating_policy, directory)

    def _unfinished_state(self) -> dict:
        waiting = [] if self._at_generation_boundary() else self._waiting.by_step()
        rollouts = rollouts_to_save(waiting, self.accelerator.process_index, self.accelerator.num_processes)
        return {"rollouts": rollouts, "late_batches": self._source.state(), "memory": self.memory.state()}

    def _load_run(self, directory: Path, state: dict) -> None:
        process_states = read_states(self, directory)
        self._choose_forward_passes()  # micro-batches depend on whether they are packed
        self._waiting = self._load_waiting([process_state["rollouts"] for process_state in process_states])
        late_batches = state["late_batches"]
        if len(process_states) != self.accelerator.num_processes and self.args.rollout_lag:
            saved = [process_state["late_batches"] for process_state in process_states]
            late_batches = divide_batches(saved, self.accelerator.process_index, self.accelerator.num_processes)
        self._source.load(late_batches)
        if self.args.keeps_generating_policy:
            self._generating_policy = SnapshotReference(self.model_wrapped)
            load_policy_copy(self, self._generating_policy, directory)

    def _load_waiting(self, saved: list[dict]) -> WaitingRollouts:
        """Return the completions that waited, from the results of [`rollouts_to_save`] of all processes."""
        num_entries = self.args.steps_per_generation if self.is_sliced else self._minibatches_per_generation
        waiting = merge_rollouts(saved, num_entries)
        self.restore_images([rollout for rollouts in waiting for rollout in rollouts])
        if self.is_sliced:
            return WaitingRollouts(slices=waiting)
        return WaitingRollouts(minibatches=[self.update.schedule_minibatch(rollouts) for rollouts in waiting])
