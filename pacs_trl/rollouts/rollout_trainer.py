"""Base trainer of every method: generation and rewards on top of TRL's GRPOTrainer.

- Every vLLM request has a seed, so a resumed run generates the same completions as an uninterrupted run. If a vLLM
  server dies, all processes save the state after the last optimizer step and stop (`engine_failures.py`).
- Checkpoints resume bitwise, also in the middle of a generation batch (`resumable_trainer.py`).
- Every saved model has a model card, and a push uploads only the model (`publication.py`).
"""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from transformers.integrations import is_deepspeed_zero3_enabled
from trl import GRPOTrainer

from ..data import unread_template_arguments
from ..data.messages import MessageCheck
from ..data.prompt_date import prints_date, with_date
from ..data.tool_calls import messages_for_table, readable_calls
from ..errors import FailedRun, UserError
from ..rewards import math_reward
from ..update.forward_pass import ForwardPass, TokenIds, logps_in_batches
from ..update.generation import faster_generation
from ..update.rollout import Rollout, as_numbers, labels_from_rewards, unpad_rollouts, weighted_rewards
from ..update.startup_check import choose_forward_pass, disable_noise
from ..update.step_sizes import BatchSizes
from . import completion_columns, image_checkpoints, mxfp4
from .adapter_checks import check_adapter_of_tied_weights, check_lora_targets
from .argument_checks import check_arguments, check_config_class
from .compared_settings import check_fixed, fixed_settings
from .console import shorten_console
from .dataset_checks import check_columns, check_environment_names, check_golds
from .engine import Engine, engine_with_lora
from .engine_failures import ServerFailure, stop_without_engine
from .engine_weights import WrongWeights
from .entropy_bonus import reset_entropy_coef
from .evaluation import BenchmarkEvaluation
from .generation_keys import check_generation_config, end_token_ids
from .group_start_report import GroupStartReport
from .group_starts import GroupStarts
from .image_prompts import ImagePrompts
from .kl_reference import check_reference, reference_from_memory
from .logged_names import FORMER_METRIC_NAMES, check_column_name, check_metric_name, distinct_names
from .model_checks import check_model, check_model_type
from .model_config import config_of, name_of
from .nothing_to_learn import NothingToLearnCallback
from .overrides import following_overrides
from .process_checks import check_dataset, check_whole_weights, shared_turns_error
from .prompt_lengths import check_lengths
from .publication import Publication
from .recomputation_checks import check_recomputation_of_shared_keys
from .request_seeds import request_seed
from .resumable_trainer import ResumableTrainer
from .reward_functions import (
    bind_arguments,
    check_scores_of,
    independent_copy,
    never_exiting,
    with_result,
    with_truncated,
)
from .rollout_config import RolloutConfig
from .router_checks import check_router_loss, returns_router_logits
from .run_position import LoggedLoss, StreamPosition
from .sources import GenerationNow, RolloutSource
from .step_start import StepStart
from .timing import StepTimer
from .token_checks import check_pad_token, check_token_ids
from .uneven_shares import UnevenShares
from .user_code import UserCode


logger = logging.getLogger(__name__)

_SIGNATURE = inspect.signature(GRPOTrainer.__init__)
_MOST_UNREWARDED = 3  # a run fails if this many generation batches at its start have no reward at all


# The other bases replace methods and attributes of TRL's trainer, which they do not inherit from.
class RolloutTrainer(ImagePrompts, UserCode, BenchmarkEvaluation, Publication, ResumableTrainer):  # type: ignore[misc]
    """Base class of trainers: [`~trl.GRPOTrainer`], with the same arguments, and exact resumption, input checks, step
    timing, and model cards."""

    _config_class: type[RolloutConfig] = RolloutConfig
    _labels: torch.Tensor  # of the last completions of all processes, `(B,)`
    _warned_of_labels_above_1 = False
    if not TYPE_CHECKING:  # type checkers and editors see the parameters of GRPOTrainer

        @wraps(GRPOTrainer.__init__)
        def __init__(self, *args, **kwargs):
            bound = _SIGNATURE.bind(self, *args, **kwargs)
            bound.apply_defaults()
            bound.arguments.pop("self")
            self._construct(**bound.arguments)

    def _construct(self, model, reward_funcs, args, **arguments: Any) -> None:
        """
        Construct the trainer from the arguments of [`~trl.GRPOTrainer`], in this order:

        1. `_before_loading`, when there are only the arguments; `model` may be a name.
        2. Checks that read the model's configuration: its type, routers, quantization, images, and lengths of prompts.
        3. `_resolve_auto_settings`, which knows `_reads_images` and `_longest_sequence`.
        4. Problems of `eval_benchmarks`, and MXFP4 checkpoints, which are dequantized when they are loaded.
        5. The constructor of TRL's trainer, which loads all other models and the reference, and creates the
           accelerator, the vLLM engine, and tools.
        6. What belongs to a run: `_reset_run`, and callbacks that follow it.
        7. `_set_up_generation`, for everything up to labels.
        8. `_set_up_update`, for the method.
        """
        if args is None:
            args = self._config_class(f"{name_of(model).split('/')[-1]}-{self._name}")
        check_config_class(args, self._config_class)
        arguments["reward_funcs"] = list(reward_funcs) if isinstance(reward_funcs, tuple) else reward_funcs
        self._before_loading(model, args, arguments)
        config, name = config_of(model, args), name_of(model)
        check_model_type(config)
        check_router_loss(config, args)
        mxfp4.check_mxfp4(model, config, args, arguments)
        self._has_language_model_inside = image_checkpoints.has_language_model_inside(config)
        if self._has_language_model_inside:
            self._reads_images = image_checkpoints.has_images(arguments)
            if self._reads_images:
                image_checkpoints.prepare_for_images(model, config, name, args, arguments)
            else:
                image_checkpoints.prepare_for_text(model, config, name, args, arguments)
        else:
            image_checkpoints.check_no_images(name, arguments)
        self._longest_sequence = check_lengths(model, args, arguments)
        args = self._resolve_auto_settings(model, args, arguments)
        self._load_benchmarks(model, args, arguments)
        model, peft_config = mxfp4.dequantized(model, config, args, arguments), arguments["peft_config"]
        with engine_with_lora(args, model, peft_config), reference_from_memory(model, args, peft_config):
            super().__init__(model, args=args, **arguments)
        self._processor_files: list[Path] = []  # copied to saved models
        if self._has_language_model_inside:
            if not self._reads_images or args.freeze_vision_tower:
                image_checkpoints.freeze_outside_language_model(self.model)
            self._processor_files = image_checkpoints.processor_files(name, args)
        if self.aux_loss_enabled:  # of the routers in a mixture of experts
            self.aux_loss_enabled = args.is_exact and returns_router_logits(self.model, args)
        self.reward_func_names = distinct_names(self.reward_func_names)
        self._card_facts: dict[str, Any] = {}  # arguments of `create_model_card`
        self._is_saved = False  # in `output_dir`
        self._reset_run()
        self._fixed_settings = fixed_settings(self.args)
        self._step_start = StepStart(self)
        self.add_callback(self._step_start)
        self._logged_loss = LoggedLoss(self)
        self.add_callback(self._logged_loss)
        self.add_callback(StreamPosition(self))
        if args.disable_dropout:
            disable_noise(self.model, self.ref_model)
        self._set_up_generation()
        self._set_up_update()

    def _before_loading(self, model, args: RolloutConfig, arguments: dict[str, Any]) -> None:
        """Check arguments, and replace those that TRL is to get otherwise, before the model is loaded. `arguments` are
        all other arguments of the trainer."""
        check_arguments(model, args, arguments)
        factories = arguments["environment_factory"]
        if factories is not None:
            self._group_starts = GroupStarts()
            if isinstance(factories, dict):
                factories = {name: self._group_starts.wrap(factory) for name, factory in factories.items()}
            else:
                factories = self._group_starts.wrap(factories)
            arguments["environment_factory"] = factories
        check_model(model, args, arguments)
        check_reference(model, args, arguments["peft_config"])

    def _resolve_auto_settings(self, model, args: RolloutConfig, arguments: dict[str, Any]) -> RolloutConfig:
        """Return the configuration with values in place of `"auto"`, before TRL and Trainer read it."""
        return args

    def _set_up_generation(self) -> None:
        """Set up generation and rewards. The model, the reference, and the engine are loaded."""
        models = [self.model] if self.ref_model is None else [self.model, self.ref_model]
        for config in [self.accelerator.unwrap_model(model).config.get_text_config() for model in models]:
            if hasattr(config, "output_router_logits"):  # their loss fails on packed sequences and in generation
                config.output_router_logits = False
        is_sharded = self.is_fsdp_enabled or is_deepspeed_zero3_enabled()
        generates = self.args.rollout_schedule != "continuous" or self.eval_dataset is not None  # in this process
        if self.tools and generates and (error := shared_turns_error(self.args, is_sharded)):
            raise UserError(error)
        check_lora_targets(self.model)
        check_whole_weights(self.args, is_sharded)
        check_recomputation_of_shared_keys(self.model.config, self.args)
        check_dataset(self.train_dataset, self.args)
        if not self.use_vllm:
            check_generation_config(self.model, self.args)
            if self.rollout_func is None:  # which generates in a way of its own
                check_pad_token(self._tokenizer, self.model.config)
        self.eos_token_ids = list(dict.fromkeys([*self.eos_token_ids, *end_token_ids(self.args)]))
        if self.use_vllm and not self.args.vllm_sync_adapter:
            check_adapter_of_tied_weights(self.model)
        shorten_console(self.callback_handler.callbacks)
        self.add_callback(self.timer)
        self.add_callback(NothingToLearnCallback(self._name))
        self.grades_answers = math_reward in self.reward_funcs
        if self.grades_answers and self.accelerator.is_main_process:
            check_golds(self.train_dataset)
        self._forward_passes_are_chosen = False
        self._extra_of_completions: list[dict] | None = None  # `Rollout.extra` of this process, if any
        self._num_empty = 0  # completions of this process without a token, in the batch that is generated
        self._generates_more = False  # whether `generate_more` generates, not a generation batch
        self._continued_groups: list[int] | None = None  # groups that get more completions, of each completion
        self._start_report = GroupStartReport(self.record_metrics, self.args.group_comparison)
        self._asks_for_logps = False  # whether TRL does, between generation and rewards
        if self.use_vllm:
            self.vllm_generation = Engine(self)
        if self.rollout_func is not None:
            self.rollout_func = partial(self._roll_out, self.rollout_func)
        self._warn_of_template_arguments()
        self._messages = MessageCheck(self.processing_class, self.chat_template_kwargs, self.tools, self.chat_template)
        if prints_date(self.chat_template or self._tokenizer.chat_template):
            self.chat_template_kwargs = with_date(self.chat_template_kwargs, lambda: self._prompt_date)
        self.forward_pass = self.create_forward_pass(self.model, self.temperature)
        if self.ref_model is not None:  # of the KL term
            self.ref_pass = self.create_forward_pass(self.accelerator.unwrap_model(self.ref_model), self.temperature)
        for i, (function, name) in enumerate(zip(self.reward_funcs, self.reward_func_names, strict=True)):
            if isinstance(function, nn.Module):
                check_scores_of(function, name)
            else:
                self.reward_funcs[i] = self._wrap_reward(i, function, name)

    def _warn_of_template_arguments(self) -> None:
        """Warn of `chat_template_kwargs` without effect. Where the chat template renders prompts in memory, they have
        been refused before the model was loaded."""
        unread = unread_template_arguments(self.processing_class, self.chat_template_kwargs, self.chat_template)
        if unread and self.accelerator.is_main_process:
            logger.warning(
                f"chat_template_kwargs: the chat template does not read {', '.join(unread)}, which changes no prompt. "
                "Remove it to hide this warning."
            )

    @cached_property
    def timer(self) -> StepTimer:
        """Seconds and work of the parts of each optimizer step."""
        return StepTimer(lambda name, value: self._metrics["train"][name].append(value))

    def _set_up_update(self) -> None:
        """Set up the parts of the method, last in construction: generation and forward passes are set up."""

    def create_forward_pass(self, model: Any, temperature: float) -> ForwardPass:
        """Return the [`ForwardPass`] of a model, with its work counted by the timer."""
        forward_pass = ForwardPass(
            model,
            self.accelerator.device,
            pad_token_id=self._tokenizer.pad_token_id,
            packing=self.args.packing,
            temperature=temperature,
            autocast=self.accelerator.autocast,
            reads_images=self._reads_images,
        )
        if self._reads_images and self.is_fsdp_enabled:
            forward_pass.image_filler = self._small_image_prompt()
        forward_pass.on_pass = self.timer.counter_of(model, self.accelerator, is_policy=model is self.model)
        return forward_pass

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator. FSDP2 accumulates and reduces gradients in float32 and does not round outputs:
        accelerate 1.15 rounds both to bfloat16, where a log-prob of -0.5 becomes a multiple of 2^-9, more than one
        update changes it. Gradient accumulation needs 2 more bytes per trained weight on each GPU."""
        super().create_accelerator_and_postprocess()
        plugin = self.accelerator.state.fsdp_plugin if self.accelerator.is_fsdp2 else None
        if plugin is not None and plugin.mixed_precision_policy is not None:
            changes: dict[str, Any] = {"reduce_dtype": torch.float32, "output_dtype": None}
            plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, **changes)

    def _choose_forward_passes(self) -> None:
        """Run [`choose_forward_pass`] once, before the first generation, on all processes."""
        if self._forward_passes_are_chosen:
            return
        self._forward_passes_are_chosen = True
        if self.args.startup_check:
            choose_forward_pass(
                self.forward_pass,
                self.model_wrapped,
                training=self.args.disable_dropout,
                has_dropout=not self.args.disable_dropout,
                longest=self._longest_sequence,
                image_prompt=self._small_image_prompt() if self._reads_images else None,
            )
            if self.ref_model is not None:
                self.ref_pass.packing, self.ref_pass.fused = self.forward_pass.packing, self.forward_pass.fused

    # Generation -----------------------------------------------------------------------------------------------------

    def _create_source(self) -> RolloutSource:
        """Return where the completions of training come from."""
        return GenerationNow(self._generate_now)

    def _generate_and_score_completions(self, inputs):
        self._choose_forward_passes()  # needed for an evaluation without training
        if self.model.training:
            inputs = self._source.next_rows(inputs)
        # Of a stream, or of a dataset that `evaluate` gets.
        check_columns("The dataset", inputs[0], needs_prompt=self.environment_factories is None)
        # Positions of the completions of this process among those of all processes.
        positions = self.first_row(len(inputs)) + torch.arange(len(inputs))
        groups = self._next_groups(positions)
        self._begin_batch(inputs, groups.tolist())
        batch, rewards_per_func = self._generate_and_score_with_trl(self._with_images_in_prompts(inputs))
        self._end_batch(rewards_per_func)
        self._add_entries(batch, positions, groups)
        return batch

    def _begin_batch(self, inputs: Sequence[Any], groups: list[int]) -> None:
        """Prepare what TRL's method calls for a batch: starts of environments, seeds of requests, and columns."""
        if self.environment_factories is not None:
            self._group_starts.begin(groups, [self._seed_of_group(group) for group in groups])
        if self.model.training:
            self._request_seeds.begin_batch(self._num_generated_batches, self._first_row_of_engine(len(inputs)))
            self._num_generated_batches += 1
        self._extra_of_completions = None  # subclasses set it when rewards are computed
        self._num_graded = len(inputs)  # values in a column of a reward function

    def _generate_and_score_with_trl(self, inputs) -> tuple[dict[str, Any], torch.Tensor]:
        """Call TRL's method, which calls `_generate` and `_calculate_rewards` below, and compute labels. Returns its
        batch, and the rewards `(B, F)` of the completions of all processes."""
        gathering = nullcontext() if self._shares is None else self._shares.gathering(self.accelerator)
        with self.timer.part("other"), gathering, following_overrides(self) as returned_rewards:
            batch = super()._generate_and_score_completions(inputs)
            (rewards_per_func,) = returned_rewards
            self._labels = self._compute_labels(rewards_per_func)
        return batch, rewards_per_func

    def _end_batch(self, rewards_per_func: torch.Tensor) -> None:
        """Count and report what belongs to a whole batch."""
        if self.model.training:
            self._count_unrewarded()
        else:
            self._evaluation.add_rewards(rewards_per_func)
        if self.environment_factories is not None:
            self._group_starts.end()
            self._start_report.add(self._group_starts)
        completion_columns.align_columns(self._logs["extra"], len(self._logs["prompt"]))

    def _add_entries(self, batch: dict[str, Any], positions: torch.Tensor, groups: torch.Tensor) -> None:
        """Add what `unpad_rollouts` reads to TRL's batch of the completions of this process."""
        if self._reads_images:
            batch["images"] = self._prompt_images
        if self._shares is not None:  # TRL takes those of another process
            batch["advantages"] = self._logged_advantages(self._shares.num_completions)[positions]
        batch["computed_advantages"] = batch["advantages"].clone()  # an override may change those above
        batch["labels"] = self._labels[positions.to(self._labels.device)]
        batch["groups"] = groups
        if self._extra_of_completions is not None:
            batch["extra"] = self._extra_of_completions

    @property
    def _shares(self) -> UnevenShares | None:
        """How the processes share the completions that are generated; `None` for equal shares, also in an evaluation
        and for the completions of `generate_more`."""
        if self._generates_more or not self.model.training:
            return None
        return self._uneven_shares()

    def _uneven_shares(self) -> UnevenShares | None:
        """Return how the processes share a generation batch of training, with `completions_per_step`."""
        if self.args.completions_per_step is None:
            return None
        return UnevenShares.from_batch_sizes(BatchSizes.of(self.args, self.accelerator.num_processes))

    def _logged_advantages(self, num_completions: int) -> torch.Tensor:
        """Return the advantages of the last completions of all processes, which TRL puts into its table of completions
        only."""
        advantages = list(self._logs["advantages"])[-num_completions:]
        return torch.tensor(advantages, device=self.accelerator.device)

    def _next_groups(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the group of each completion of this process, and count the groups. `positions` are those of the
        completions among the completions of all processes."""
        if self._continued_groups is not None:
            return torch.tensor(self._continued_groups)
        num_completions = len(positions) * self.accelerator.num_processes
        if self._shares is not None:
            num_completions = self._shares.num_completions
        if self.model.training:
            groups = self._num_groups + positions // self.num_generations
            self._num_groups += num_completions // self.num_generations
        else:
            groups = self._num_evaluated_groups + positions // self.num_generations_eval
            self._num_evaluated_groups += num_completions // self.num_generations_eval
        return groups

    def _seed_of_group(self, group: int) -> int:
        """Return the seed with which environments start for a group. Every evaluation repeats its seeds."""
        stream = "environments" if self.model.training else "environments/evaluation"
        return request_seed(f"{self.args.seed}/{stream}", group)

    def first_row(self, num_rows: int) -> int:
        """Return the index of the first of this process's `num_rows` completions among those of all processes."""
        process = self.accelerator.process_index
        return process * num_rows if self._shares is None else self._shares.first(process)

    def _first_row_of_engine(self, num_rows: int) -> int:
        """Return the index of the first completion of the processes that share an engine, each with `num_rows`
        completions, among those of all processes."""
        rank_in_engine = self.accelerator.process_index % self.args.vllm_tensor_parallel_size
        return self.first_row(num_rows) - rank_in_engine * num_rows

    def generate_more(
        self, inputs: Sequence[dict[str, Any]], num_generations: int, groups: Sequence[int] | None = None
    ) -> list[Rollout]:
        """
        Generate completions with the current policy, also during a generation batch, and compute their rewards.
        Returns the rollouts of this process; completions of a prompt are adjacent.

        Args:
            inputs (sequence of `dict`): Dataset rows; every process must pass the same number.
            num_generations (`int`): Number of completions per dataset row.
            groups (sequence of `int`, *optional*): [`Rollout.group`] of each row, by default a new group.
        """
        assert not self.args.is_asynchronous  # the source would return the completions of the next batch
        before = self.num_generations, self.num_generations_eval
        self.num_generations = self.num_generations_eval = num_generations
        self._generates_more = True
        if groups is not None:
            self._continued_groups = [group for group in groups for _ in range(num_generations)]
        try:
            rows = [independent_copy(dict(row)) for row in inputs for _ in range(num_generations)]
            batch = self._generate_and_score_completions(rows)
        finally:
            self.num_generations, self.num_generations_eval = before
            self._generates_more, self._continued_groups = False, None
        return self.unpad_rollouts(batch)

    def unpad_rollouts(self, batch: dict[str, Any]) -> list[Rollout]:
        """Return the completions of what `_generate_and_score_completions`, or an override of it, returned."""
        return unpad_rollouts(batch)

    def _tokenize_prompts(self, prompts):
        self._messages.check("the batch", prompts)  # of a stream, or changed by an environment
        if self._reads_images:
            return self._tokenize_with_images(prompts)
        tokenized = super()._tokenize_prompts(prompts)
        check_token_ids(tokenized[0], self._tokenizer, self.model.config)
        return tokenized

    def _generate(self, prompts):
        self._num_empty = 0
        try:
            with self.timer.part("generation"), readable_calls(self._tokenizer):
                generated = super()._generate(prompts)
        except (ServerFailure, WrongWeights) as failure:
            stop_without_engine(self, failure)
        prompt_ids, completion_ids, tool_mask, completions, logprobs, extra_fields, images, tool_images = generated
        if self._reads_images:  # TRL would process the images again, once for each completion
            images = None
        self.timer.work["generated"] += sum(map(len, completion_ids))
        self._record_empty_ratio(len(completion_ids))
        return prompt_ids, completion_ids, tool_mask, completions, logprobs, extra_fields, images, tool_images

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        generate = self._source.take if self.model.training else self._generate_now
        output = generate([list(ids) for ids in prompt_ids], *args, **kwargs)
        self._end_empty(**output)
        return output["completion_ids"], output["logprobs"]

    def _generate_now(self, prompt_ids, *args, **kwargs) -> dict[str, Any]:
        fast, dtype = self.args.fast_generation, self.args.generation_dtype
        faster: AbstractContextManager = nullcontext()
        converts = self.args.use_transformers_continuous_batching  # TRL rounds the trained weights themselves
        if fast or dtype is not None or converts:
            model = self.accelerator.unwrap_model(self.model_wrapped)
            faster = faster_generation(model, fast=fast, dtype=None if dtype is None else getattr(torch, dtype))
        needs_image = self._reads_images and self.is_fsdp_enabled and not self.use_vllm
        with faster:
            if needs_image and args[0] is None:
                prompt_ids, args = self._with_image_filler(prompt_ids, args)
                completion_ids, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
                completion_ids = completion_ids[:-1]
            else:
                completion_ids, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        return {"completion_ids": completion_ids, "logprobs": logprobs}

    def _end_empty(self, completion_ids, logprobs, env_mask=None) -> None:
        """Append the end-of-sequence token to empty completions, in place, and count them. Engines that strip this
        token return empty completions."""
        empty = [i for i, ids in enumerate(completion_ids) if len(ids) == 0]
        for i in empty:
            completion_ids[i] = [self._tokenizer.eos_token_id]
            if logprobs is not None:
                logprobs[i] = [None]
            if env_mask is not None:
                env_mask[i] = [1]
        self._num_empty += len(empty)

    def _record_empty_ratio(self, num_completions: int) -> None:
        """Record the share of empty completions in a batch, of which this process has `num_completions`."""
        counts = torch.tensor([[self._num_empty, num_completions]], device=self.accelerator.device)
        total_empty, total = self.accelerator.gather(counts).sum(dim=0).tolist()
        self.record_metrics({"completions/empty_ratio": total_empty / total})

    def record_metrics(self, metrics: Mapping[str, float]) -> None:
        """Record values that are averaged and logged with the next log of training, or of the running evaluation."""
        recorded = self._metrics["train" if self.model.training else "eval"]
        for name, value in metrics.items():
            recorded[name].append(value)
            if name in FORMER_METRIC_NAMES:
                recorded[FORMER_METRIC_NAMES[name]].append(value)

    def _log_metric(self, name, value):
        check_metric_name(name, self.reward_func_names)
        super()._log_metric(name, value)

    def _log_completion_extra(self, column, values):
        check_column_name(column, self.reward_func_names)
        name = completion_columns.new_column(column, values, self._num_graded, self._pending_extra_logs)
        super()._log_completion_extra(name, list(values))

    def log(self, logs, start_time=None):
        completion_columns.unify_types(self._logs["extra"])
        completions = self._logs["completion"]
        for i, completion in enumerate(completions):
            completions[i] = messages_for_table(completion)
        log_completions = self.log_completions
        # Evaluations have their own tables. After a resume inside a generation batch its table is already written.
        if not self.model.training or len(self._logs["prompt"]) == 0:
            self.log_completions = False
        try:
            super().log(logs, start_time)
        finally:
            self.log_completions = log_completions

    def _log_advantages(self, advantages: list[float]) -> None:
        """Replace the advantages of the last completions, of all processes, in the completions table."""
        logged = self._logs["advantages"]
        for _ in range(min(len(advantages), len(logged))):
            logged.pop()
        logged.extend(advantages)

    # Rewards --------------------------------------------------------------------------------------------------------

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        inputs = [row | columns for row, columns in zip(inputs, self._image_columns, strict=True)]
        with self.timer.part("verification"):
            rewards_per_func = self._call_reward_functions(inputs, prompts, completions, completion_ids_list)
        completion_columns.add_absent_columns(self._pending_extra_logs, self._logs["extra"], len(completions))
        return rewards_per_func

    def _count_unrewarded(self) -> None:
        """Count the generation batches at the start of a run in which no completion has a reward, and end a run that
        begins with `_MOST_UNREWARDED` of them."""
        if self._unrewarded is None:
            return
        self._unrewarded = self._unrewarded + 1 if self._labels.isnan().all() else None
        if self._unrewarded == _MOST_UNREWARDED:
            self._stop_without_rewards()

    def _stop_without_rewards(self) -> NoReturn:
        numbers = "numbers in [0, 1]" if self.args.rewards_are_labels else "numbers"
        raise FailedRun(
            f"The reward functions ({', '.join(self.reward_func_names)}) returned None for every completion of the "
            f"first {self._unrewarded} generation batches, so {self._name} has learned nothing. Return {numbers}, and "
            "check the columns that the functions read."
        )

    def are_truncated(self, completion_ids: Sequence[Sequence[int]]) -> list[bool]:
        """Return which completions do not end with an end-of-sequence token, as TRL's `completions/clipped_ratio`."""
        ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        return [len(ids) == 0 or ids[-1] not in ends for ids in completion_ids]

    def _compute_labels(self, rewards_per_func: torch.Tensor) -> torch.Tensor:
        """Return the labels `(B,)` of the completions of all processes from their rewards `(B, F)`."""
        if self.args.rewards_are_labels:
            labels = labels_from_rewards(rewards_per_func, self.reward_weights, self.reward_func_names)
            self._warn_of_labels_above_1(rewards_per_func)
            return labels
        return weighted_rewards(rewards_per_func, self.reward_weights)

    def _warn_of_labels_above_1(self, rewards_per_func: torch.Tensor) -> None:
        """Warn once if rewards of 1 from all functions that grade a completion would be a label above 1, which those
        that return `None` for each other's problems are not."""
        if self._warned_of_labels_above_1:
            return
        weights = self.reward_weights.to(rewards_per_func.device).clamp(min=0)
        largest = (weights * ~rewards_per_func.isnan()).sum(dim=1).max().item()  # of the labels (B,)
        if largest <= 1 + 1e-6:
            return
        self._warned_of_labels_above_1 = True
        if self.args.rewards_are_binary:
            remedy = "Write one function that returns 0 or 1"
        else:
            remedy = f"Divide reward_weights by {largest:g}"
        if self.accelerator.is_main_process:
            logger.warning(
                f"Labels may reach {largest:g}, the weighted sum of the reward functions "
                f"({', '.join(self.reward_func_names)}), and a label above 1 ends the run. {remedy}, unless the "
                "functions never add up to more than 1."
            )

    def _wrap_reward(self, index: int, function: Callable, name: str) -> Callable:
        """Wrap a reward function: check its result, and bind the `reward_arguments` that it has parameters for.
        `index` is its position in `reward_funcs`."""
        function = bind_arguments(function, name, self.reward_arguments())

        def adjust(arguments: dict[str, Any]) -> dict[str, Any]:
            truncated = self.are_truncated(arguments["completion_ids"]) if "completion_ids" in arguments else None
            return with_truncated(function, arguments, truncated)

        def convert(rewards: Any, arguments: dict[str, Any]) -> list[float | None]:
            # A user may call the function of an environment, which reads no completions, with `environments` alone.
            return as_numbers(rewards, name, len(arguments["completions"]) if "completions" in arguments else None)

        return with_result(never_exiting(function, f"The reward function {name!r}"), convert, adjust)

    def reward_arguments(self) -> dict[str, Any]:
        """Return extra keyword arguments for reward functions; each function receives those that it has a parameter
        for. Extension point for rewards that need, for example, the policy's log-probs."""
        return {"compute_logps": self.compute_logps}

    @torch.no_grad()
    def compute_logps(self, prompt_ids: Sequence[TokenIds], completion_ids: Sequence[TokenIds]) -> list[torch.Tensor]:
        """
        Compute the log-probs of completions under the current policy, without gradient. All processes must call this
        method equally often; the number of completions may differ and may be 0.

        Args:
            prompt_ids, completion_ids (sequences of `B` sequences of `int`): Token ids without padding; prompts need
                at least one token.

        Returns:
            `list[torch.Tensor]`: float32 `(C,)` per completion on the CPU, in nats, at the training `temperature`.
        """
        self._choose_forward_passes()
        compute = partial(self.forward_pass.compute_logps, self.model_wrapped)
        with self.timer.part("log_probs"):
            return logps_in_batches(compute, prompt_ids, completion_ids, self.args.per_device_train_batch_size)

    # Training and evaluation ----------------------------------------------------------------------------------------

    def _reset_run(self) -> None:
        super()._reset_run()
        reset_entropy_coef(self)

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        if self._multi_environment:
            datasets = {"train_dataset": self.train_dataset, "eval_dataset": self.eval_dataset}
            check_environment_names(datasets, self.environment_factories)
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        self._choose_forward_passes()
        return prepared

    def training_step(self, model, inputs, num_items_in_batch=None):
        check_fixed(self)
        with self.timer.part("update"):
            return super().training_step(model, inputs, num_items_in_batch)

    def evaluation_loop(self, *args, **kwargs):
        self._num_evaluated_groups = 0
        self._source.wait()  # a server has one copy of the weights, and reward functions are called in order
        self.accelerator.wait_for_everyone()
        return super().evaluation_loop(*args, **kwargs)
