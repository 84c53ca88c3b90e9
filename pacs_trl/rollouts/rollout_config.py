"""Settings of every training configuration: generation, asynchronous rollouts, and pass@k during training. They load
without the training stack, as `pacs-trl plan` needs."""

import inspect
import math
import os
import warnings
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from accelerate import ParallelismConfig
from trl import GRPOConfig

from ..errors import UserError
from ..evaluation.arguments import DEFAULT_KS
from ..evaluation.benchmarks import checked_name
from ..redaction import published
from ..settings import did_you_mean
from ..settings.checks import refuse_illegal_values, refused_settings
from ..settings.fields import read_switches, setting, switch
from ..settings.names import require_deepspeed
from ..settings.trl_settings import DTYPES, SPLITTING_SIZES
from ..update.step_sizes import BatchSizes
from .generation_keys import generation_errors, generation_warnings


if TYPE_CHECKING:
    from transformers.trainer_pt_utils import AcceleratorConfig
    from transformers.trainer_utils import HubStrategy
    from transformers.training_args import OptimizerNames


class MethodSettings:
    """Settings that only some methods have, with the value that the others behave as. They are no fields here."""

    packing: str = "auto"
    max_tokens_per_micro_batch: int | str | None = None
    completions_per_step: int | None = None
    reference: str = "rollout"
    reference_offload: bool = False
    group_layout: str = "auto"
    shuffle_minibatches: bool = False


@dataclass
class RolloutConfig(MethodSettings, GRPOConfig):
    """
    Base of the training configurations. `eval_strategy`, `eval_steps`, and `eval_on_start` say when benchmarks are
    measured; `max_completion_length` bounds their completions, too.
    """

    if TYPE_CHECKING:  # GRPOConfig sets or converts these when it is constructed
        output_dir: str = ""
        num_generations: int = 0
        generation_batch_size: int = 0
        steps_per_generation: int = 0
        model_init_kwargs: dict[str, Any] | None = None
        generation_kwargs: dict[str, Any] | None = None
        gradient_checkpointing_kwargs: dict[str, Any] | None = None
        vllm_importance_sampling_mode: Literal[
            "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
        ] = "sequence_mask"
        chat_template_kwargs: dict[str, Any] | None = None
        optim: OptimizerNames = OptimizerNames.ADAMW_TORCH
        hub_strategy: HubStrategy = HubStrategy.EVERY_SAVE
        accelerator_config: AcceleratorConfig = AcceleratorConfig()  # type: ignore[assignment]  # of what users pass

    # Parameters that control generation
    fast_generation: bool = setting(
        False,
        "Whether to merge LoRA weights into the model for generation, and to prefill each prompt once "
        "instead of once per completion, where the model supports it. Log-probs differ from those without "
        "it by rounding.",
    )
    generation_dtype: Literal["bfloat16"] | None = setting(
        None,
        '`"bfloat16"` generates with weights rounded to bfloat16: float32 weights up or down at random, '
        "with equal thresholds in each generation, so that small updates count. The mismatch with the "
        "trained policy is larger than float32 rounding, and is not corrected.",
    )
    vllm_sync_adapter: bool = setting(
        False,
        "Whether to send vLLM the LoRA adapter alone, instead of all weights with the adapter merged, and "
        "to check that vLLM generates with it. A server reads it from `output_dir`. With "
        "`rollout_schedule: continuous` each turn ends with the adapter with which it began.",
    )

    # Parameters that control asynchronous rollouts
    rollout_lag: Literal[0, 1, 2] = setting(
        0,
        "Generation batches by which generation runs ahead of training, 0 to 2: an engine generates batch "
        "`n + lag` with the weights from before the updates on batch `n`, while these run. Without vLLM "
        'the engine is a process on the CPU; with `vllm_mode="server"` the largest lag is 1. Bits do not '
        "depend on timing.",
    )
    rollout_engine: Literal["transformers", "vllm"] = setting(
        "transformers",
        'What generates in that process: `"transformers"`, or `"vllm"`, a vLLM for CPUs, in float32, whose '
        "context is `vllm_max_model_length`, and whose cache takes `vllm_gpu_memory_utilization` of the memory.",
    )
    stale_logps: Literal["engine", "recompute"] | None = setting(
        None,
        'Log-probs of the policy that generated a batch with a lag: `"engine"` takes those that the engine '
        'reports for the tokens it samples; `"recompute"`, the default of the engine process, computes '
        "them by a forward pass with the weights that generated. For a server, whose default is "
        '`"engine"`, the trainer keeps a copy of these weights.',
    )

    rollout_schedule: Literal["batch", "continuous"] = setting(
        "batch",
        'When a vLLM server (`vllm_mode="server"`) generates: `"batch"` generates a batch of prompts as a whole; '
        '`"continuous"` keeps all slots of the server busy while training goes on, and replaces its weights after '
        "each optimizer step, also those of completions in progress. Then results depend on timing. With "
        '`use_vllm=False` and `rollout_engine="vllm"` a vLLM for CPUs does this in a process beside training, and '
        "bits do not depend on timing.",
    )
    max_staleness: int = setting(
        4,
        "With `rollout_schedule: continuous`, the largest number of optimizer steps since the weights of the oldest "
        "token of a group. Older groups are dropped, and generation runs at most this number of steps ahead.",
        least=1,
    )

    # Parameters that control memory
    gradient_checkpointing: Literal[True, False, "auto"] = switch(  # type: ignore[assignment]  # TRL's is a `bool`
        True,
        "Whether the backward pass computes activations again instead of keeping them. `auto`, for trainers with an "
        "exact update, keeps all of them, those of attention, or none, whichever is fastest and fits on the GPU; "
        "on a CPU it keeps them.",
    )
    if "activation_checkpointing" in GRPOConfig.__dataclass_fields__:  # its name since transformers 5.23
        activation_checkpointing: Literal[True, False, "auto"] | None = switch(
            None, "The same as `gradient_checkpointing`, under transformers' new name."
        )

    # Parameters that control checks
    startup_check: bool = setting(
        True,
        "Whether to compare the log-probs of three short sequences, computed as in training, with each "
        "model's own logits before training. If they differ, training uses a slower forward pass that "
        "agrees and logs a warning, or fails if there is none.",
    )

    # Parameters that control speed
    compile_layers: Literal["auto", True, False] = switch(
        "auto",
        "Whether `torch.compile` compiles each decoder layer for the update: `auto` does on a CUDA device where it is "
        "possible, and names the reason where it is not. `true` fails instead. Generation is not compiled.",
    )

    # Parameters that control evaluation on benchmarks
    eval_benchmarks: list[str] | None = setting(
        None,
        "Benchmarks in the notation of `pacs-trl evaluate`. In a recipe, their prompts have the "
        "instruction and system prompt of training.",
    )
    eval_max_problems: int | None = setting(None, "Use only the first problems of each benchmark.", least=1)
    eval_num_samples: int = setting(
        8, "Completions of each problem. k is 1, 4, 8, 16, 32, and 64 up to this number.", least=1
    )
    eval_temperature: float | None = setting(
        None, "Sampling temperature on benchmarks, by default that of training; 0 is greedy decoding.", least=0
    )
    eval_top_p: float | None = setting(
        None, "Nucleus mass on benchmarks, by default that of training.", above=0, most=1
    )

    freeze_vision_tower: bool = setting(
        False,
        "With images in the dataset, train the language model alone. Without images the rest of a checkpoint that "
        "reads images is always frozen.",
    )

    eval_data = None  # `DataArguments` of a recipe, which prompts are made from; not a field

    # What a method can do. Checks, `plan`, and `train` read these instead of asking which method it is.
    is_exact: ClassVar[bool] = False  # the optimizer step is that of `ExactUpdateTrainer`
    supports_rollout_lag: ClassVar[bool] = False
    supports_images: ClassVar[bool] = False  # datasets may have images
    has_critic: ClassVar[bool] = False  # the settings of an `ActorCriticConfig` exist
    critic_scores_tokens: ClassVar[bool] = False  # the critic is trained on the tokens of the policy's completions
    rewards_are_labels: ClassVar[bool] = False  # their weighted sum must lie in [0, 1]
    rewards_are_binary: ClassVar[bool] = False  # their weighted sum must be 0 or 1
    needs_same_number_of_processes: ClassVar[bool] = False  # of a run that resumes
    kl_pass_precedes_update: ClassVar[bool] = False  # log-probs under the KL reference are computed with the rewards
    scores_groups: ClassVar[bool] = False  # coefficients follow from the log-probs of a whole group
    group_comparison: ClassVar[str | None] = None  # the sentence that says how completions of a group are compared

    def __post_init__(self):
        read_switches(self)
        refuse_illegal_values(self)
        if isinstance(self.eval_benchmarks, str):
            self.eval_benchmarks = [self.eval_benchmarks]
        self._name_best_metric()
        if self.deepspeed or os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
            require_deepspeed()
        parallelism_error = self._parallelism_error()
        if parallelism_error is not None:
            raise UserError(parallelism_error)

        # TRL sets `generation_batch_size` and `steps_per_generation`, so that both have a value later.
        if self.generation_batch_size is not None:
            self._generation_size_keys = ["generation_batch_size"]
        elif self.steps_per_generation is not None:
            self._generation_size_keys = ["per_device_train_batch_size", "steps_per_generation"]
        else:
            self._generation_size_keys = ["per_device_train_batch_size", "gradient_accumulation_steps"]
        try:
            super().__post_init__()
        except ValueError as error:
            knows_processes = "distributed_state" in vars(self)  # which transformers looks at after other settings
            messages = self._batch_size_errors() if knows_processes else []
            if messages:
                raise UserError(" ".join(messages)) from error
            raise

        if self.schedule_follows_metric:
            mode = "max" if self.greater_is_better else "min"
            self.lr_scheduler_kwargs = {"mode": mode, **(self.lr_scheduler_kwargs or {})}
        for spec in self.eval_benchmarks or ():
            checked_name(spec)
        if errors := self.errors(BatchSizes.of(self, self.world_size)):
            raise UserError(" ".join(errors))
        for message in generation_warnings(self):
            warnings.warn(message, stacklevel=3)

    def _name_best_metric(self) -> None:
        """Set `metric_for_best_model` to the name that Trainer looks for, and to a default where one is needed."""
        if self.metric_for_best_model is None:
            if self.load_best_model_at_end or self.schedule_follows_metric:
                self.metric_for_best_model = "eval_pass@1" if self.eval_benchmarks else "eval_reward"
        elif self.metric_for_best_model.startswith("eval/"):  # the name in trackers
            self.metric_for_best_model = f"eval_{self.metric_for_best_model.removeprefix('eval/')}"

    def to_dict(self) -> dict[str, Any]:
        """Return the settings that may be published; trackers receive them."""
        return published(super().to_dict())

    @property
    def launched_parallelism(self) -> ParallelismConfig | None:
        """accelerate's parallelism, of `parallelism_config` or of `accelerate launch`; `None` if neither sets it."""
        config = self.parallelism_config
        if config is None and os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() == "true":
            return ParallelismConfig()  # reads the variables that the launcher sets
        return config

    def _parallelism_error(self) -> str | None:
        """Return why accelerate's parallelism cannot be used: processes that share a model or its sequences have no
        completions of their own."""
        config = self.launched_parallelism
        if config is None:
            return None
        splitting = [f"{name}={getattr(config, name)}" for name in SPLITTING_SIZES if getattr(config, name) > 1]
        if not splitting:
            return None
        return (
            f"parallelism_config with {' and '.join(splitting)} splits the model or its sequences over processes, "
            "each of which must generate and train completions of its own. Remove it; FSDP2 and DeepSpeed shard "
            "weights."
        )

    def errors(self, step: BatchSizes) -> list[str]:
        """Return one message per contradiction between settings; `step` holds the batch sizes."""
        errors = self._benchmark_errors() + generation_errors(self) + refused_settings(self)
        if self.gradient_checkpointing == "auto" and not self.is_exact:
            errors.append(
                f"gradient_checkpointing='auto' needs an update that is exact for any micro-batch, and "
                f"{type(self).__name__} has none. Set gradient_checkpointing: true, or false if memory allows it."
            )
        if self.use_adaptive_entropy and self.entropy_coef_min > self.entropy_coef_max:
            errors.append(
                f"entropy_coef_min={self.entropy_coef_min} is above entropy_coef_max={self.entropy_coef_max}. Set a "
                "larger maximum, or a smaller minimum."
            )
        errors += self._trainer_errors() + self._optimizer_errors() + self._reward_weight_errors()
        if self.push_to_hub and self.hub_strategy not in ("end", "every_save"):
            errors.append(
                f"hub_strategy={self.hub_strategy.value!r} would be ignored: models are pushed at the end of "
                "training, never with checkpoints, which contain the token and the optimizer. Remove the key."
            )
        for_other_engine = ["vllm_sync_adapter"]
        if self.use_vllm:
            for_other_engine = [
                "fast_generation",
                "generation_dtype",
                "cache_implementation",
                "use_transformers_continuous_batching",
            ]
        ignored = [name for name in for_other_engine if getattr(self, name)]
        if ignored:
            errors.append(
                f"{' and '.join(ignored)} would be ignored with use_vllm: {str(self.use_vllm).lower()}. Remove the "
                f"key, or set use_vllm: {str(not self.use_vllm).lower()}."
            )
        has_settings_of_transformers = self.fast_generation or self.generation_dtype is not None
        if self.rollout_engine == "vllm" and (not self.has_engine_process or has_settings_of_transformers):
            errors.append(
                "rollout_engine: vllm is for rollout_lag or rollout_schedule: continuous with use_vllm: false, and "
                "without fast_generation and generation_dtype, which it would ignore. Set rollout_lag: 1, and remove "
                "the others."
            )
        if self.rollout_lag:
            errors += self._lag_errors()
        if self.compile_layers is True and not self.is_exact:
            errors.append(
                f"compile_layers: true is for the exact update, which {type(self).__name__} does not have. Remove the "
                "key, or train with method: pacs, grpo, rloo, maxrl, or real."
            )
        if self.stale_logps and not self.is_asynchronous:
            errors.append("stale_logps is for rollout_lag, without which it would be ignored. Set both, or neither.")
        if self.rollout_schedule == "continuous":
            errors += self._continuous_errors()
        elif self.max_staleness != type(self).max_staleness:
            errors.append(
                f"max_staleness={self.max_staleness} would be ignored without rollout_schedule: continuous. Set "
                "both, or neither."
            )
        return errors

    @property
    def generation_size(self) -> str:
        """The completions of a generation batch as the product of the settings that were written."""
        factors = [f"{key}={getattr(self, key)}" for key in self._generation_size_keys]
        if len(factors) == 1:
            return factors[0]
        if self.world_size > 1:
            factors.append(f"{self.world_size} processes")
        return f"{' x '.join(factors)} = {self.generation_batch_size}"

    def _batch_size_errors(self) -> list[str]:
        """Return what is wrong with batch sizes, of which TRL names some that were not written."""
        errors = []
        generation_size = self.generation_batch_size
        slot_size = self.per_device_train_batch_size * self.world_size
        if generation_size is not None and generation_size % slot_size:
            errors.append(
                f"generation_batch_size={generation_size} must be a multiple of per_device_train_batch_size="
                f"{self.per_device_train_batch_size} x {self.world_size} processes = {slot_size}. Change one of them."
            )
        elif generation_size is not None and generation_size % self.num_generations:
            errors.append(
                f"A generation batch must hold whole groups: {self.generation_size} completions is no multiple of "
                f"num_generations={self.num_generations}. Change one of them."
            )
        group_key = "num_generations" if self.num_generations_eval is None else "num_generations_eval"
        group_size = getattr(self, group_key)
        eval_size = self.per_device_eval_batch_size * self.world_size
        if self.do_eval and self.eval_strategy != "no" and eval_size % group_size:
            errors.append(
                f"An evaluation batch must hold whole groups: per_device_eval_batch_size="
                f"{self.per_device_eval_batch_size} x {self.world_size} processes = {eval_size} is no multiple of "
                f"{group_key}={group_size}. Change one of them."
            )
        return errors

    @property
    def proxy_reference(self) -> str | None:
        """The policy that the proxies compare with, `"rollout"` or `"snapshot"`; `None` without one."""
        return self.reference

    @property
    def schedule_follows_metric(self) -> bool:
        """Whether the learning rate changes after evaluations, by their metric, instead of after optimizer steps."""
        return self.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy")

    @property
    def is_asynchronous(self) -> bool:
        """Whether completions are generated beside training, with the weights of earlier optimizer steps."""
        return self.rollout_lag > 0 or self.rollout_schedule == "continuous"

    @property
    def asynchronous_setting(self) -> str:
        """The setting that makes generation asynchronous, as a recipe has it."""
        return f"rollout_lag={self.rollout_lag}" if self.rollout_lag else "rollout_schedule: continuous"

    @property
    def has_engine_process(self) -> bool:
        """Whether a process on the CPU, with a copy of the policy, generates the completions of training."""
        return self.is_asynchronous and not self.use_vllm

    @property
    def has_continuous_server(self) -> bool:
        """Whether a vLLM server generates continuously for a worker beside training."""
        return self.rollout_schedule == "continuous" and self.use_vllm

    @property
    def keeps_generating_policy(self) -> bool:
        """Whether the trainer keeps a copy of the weights that a server generates with, for `stale_logps`."""
        return self.use_vllm and self.stale_logps == "recompute"

    def _optimizer_errors(self) -> list[str]:
        """Return an error message if the optimizer changes weights before the gradient of a step is complete."""
        optimizer = self.optim.value
        if optimizer in ("lomo", "adalomo") or optimizer.endswith("_layerwise"):
            return [
                f"optim={optimizer!r} changes weights inside the backward pass of each micro-batch, so the result "
                "would depend on their number. Use one that steps afterwards, such as apollo_adamw, galore_adamw, or "
                "adafactor."
            ]
        return []

    def _trainer_errors(self) -> list[str]:
        """Return one message per setting of the optimizer or of batches that would fail late, or be ignored."""
        errors = []
        optimizer = self.optim.value
        model_init_kwargs = self.model_init_kwargs or {}
        if self.max_steps == 0:
            errors.append(
                "max_steps=0 would be ignored: num_train_epochs would decide. Set it to at least 1, or to -1 to train "
                "whole epochs."
            )
        if self.optim_target_modules and not optimizer.startswith(("galore", "apollo")):
            errors.append(
                f"optim_target_modules={self.optim_target_modules!r} would be ignored with optim={optimizer!r}. "
                "Remove the key, or choose a GaLore or APOLLO optimizer."
            )
        if "num_steps" in (self.accelerator_config.gradient_accumulation_kwargs or {}):
            errors.append(
                "accelerator_config with num_steps would replace gradient_accumulation_steps after batches are laid "
                "out. Set gradient_accumulation_steps in its place."
            )
        errors += self._schedule_errors()
        splitting = [key for key in ("tp_plan", "tp_size") if model_init_kwargs.get(key)]
        if splitting:
            errors.append(
                f"model_init_kwargs with {' and '.join(splitting)} would split the model over several processes, each "
                "of which must generate and train completions of its own. Remove the key; FSDP2 and DeepSpeed shard "
                "weights."
            )
        dtype = model_init_kwargs.get("dtype")
        is_dtype = dtype is None or dtype in DTYPES or isinstance(dtype, torch.dtype)
        if not is_dtype:
            errors.append(
                f"model_init_kwargs has dtype={dtype!r}, which weights cannot have. Write one of {', '.join(DTYPES)}."
            )
        if self.accelerator_config.split_batches:
            errors.append(
                "accelerator_config with split_batches would give each process a part of its generation batch. Remove "
                "the key."
            )
        return errors

    def _schedule_errors(self) -> list[str]:
        """Return an error message if the schedule of the learning rate does not take one of `lr_scheduler_kwargs`."""
        from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION  # imports torch

        schedule: Any = self.lr_scheduler_type  # which transformers converts to its enumeration
        create_schedule: Any = TYPE_TO_SCHEDULER_FUNCTION[schedule]
        parameters = inspect.signature(create_schedule).parameters
        if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values()):
            return []  # of an optimizer of torch, which names its parameters
        passed_by_trainer = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
        known = set(parameters) - passed_by_trainer
        unknown = [key for key in self.lr_scheduler_kwargs or {} if key not in known]
        if not unknown:
            return []
        suggestion = did_you_mean(unknown[0], known)
        return [
            f"lr_scheduler_kwargs has {', '.join(unknown)}, which the schedule lr_scheduler_type="
            f"{schedule.value} does not take.{suggestion} Correct or remove the key."
        ]

    def _reward_weight_errors(self) -> list[str]:
        weights = self.reward_weights
        if not weights or not all(isinstance(weight, int | float) for weight in weights):
            return []  # TRL's errors name them
        is_usable = all(math.isfinite(weight) for weight in weights) and any(weights)
        if is_usable:
            return []
        return [
            f"reward_weights={weights} must be finite numbers that are not all 0. Correct them, or remove the key."
        ]

    def _benchmark_errors(self) -> list[str]:
        """Return an error message about settings of benchmarks, or about a best metric that is not measured."""
        best = self.metric_for_best_model or ""
        if best == "loss" or (best.startswith("eval_") and best.endswith("_loss")):
            return [
                f"metric_for_best_model={best!r} does not measure a policy: the loss is ln 2 for PACS at every step, "
                "and not lower for better completions with other methods. Set eval_reward, or with eval_benchmarks "
                "eval/pass@1."
            ]
        names = ("eval_benchmarks", "eval_max_problems", "eval_num_samples", "eval_temperature", "eval_top_p")
        defaults = {field.name: field.default for field in fields(self)}
        changed = [name for name in names if getattr(self, name) != defaults[name]]
        if changed and not self.eval_benchmarks:
            return [f"{', '.join(changed)} would be ignored. Set eval_benchmarks, or remove the key."]
        if self.eval_temperature == 0 and self.eval_num_samples > 1:
            return ["eval_temperature=0 generates equal completions of a problem. Set eval_num_samples: 1."]
        ks: list[str] = []
        if self.eval_benchmarks:
            ks = [str(k) for k in DEFAULT_KS if k <= self.eval_num_samples]
        k_of_best = best.rpartition("pass@")[2].partition("_")[0]  # of "eval_pass@8" or "eval_pass@8_lower"
        if "pass@" in best and k_of_best not in ks:
            return [
                f"metric_for_best_model={best!r} would not be measured: k is {' or '.join(ks) or 'not measured'} "
                f"with eval_num_samples={self.eval_num_samples} and eval_benchmarks={self.eval_benchmarks}."
            ]
        return []

    def _lag_errors(self) -> list[str]:
        """Return an error message if the settings do not allow generation ahead of training."""
        name = f"rollout_lag={self.rollout_lag}"
        if not self.supports_rollout_lag:
            return [
                f"{name} is not supported by {type(self).__name__}: the method generates again, or reads the current "
                "policy. Use pacs, grpo, rloo, maxrl, or real, or remove the key."
            ]
        if self.use_vllm and self.vllm_mode == "colocate":
            return [
                f"{name} needs an engine beside training, and vllm_mode: colocate generates on the GPUs that train. "
                "Set vllm_mode: server and start a server, or remove the key."
            ]
        if self.use_vllm and self.rollout_lag > 1:
            return [
                f"{name} is for the engine process; a server holds the weights of one batch. Set rollout_lag: 1, or "
                "remove the key."
            ]
        if self.gradient_accumulation_steps > self.steps_per_generation:
            return [
                f"{name} counts generation batches, and an optimizer step learns from several. Set "
                f"steps_per_generation={self.gradient_accumulation_steps} or a multiple, or remove the key."
            ]
        return []

    def _continuous_errors(self) -> list[str]:
        """Return one message per setting that contradicts `rollout_schedule: continuous`."""
        name = "rollout_schedule: continuous"
        errors = []
        if not self.supports_rollout_lag:
            errors.append(
                f"{name} is not supported by {type(self).__name__}: the method generates again, or reads the current "
                "policy. Use pacs, grpo, rloo, maxrl, or real, or remove the key."
            )
        if self.use_vllm and self.vllm_mode != "server":
            errors.append(
                f"{name} needs a vLLM server beside training, and use_vllm: true with vllm_mode: {self.vllm_mode} has "
                "none. Set vllm_mode: server, and start a server."
            )
        if not self.use_vllm and self.rollout_engine != "vllm":
            errors.append(
                f"{name} needs a vLLM server beside training, or on CPUs an engine process with vLLM, and use_vllm: "
                f"false with rollout_engine: {self.rollout_engine} has neither. Set use_vllm: true and vllm_mode: "
                "server, and start a server, or set rollout_engine: vllm."
            )
        if not self.use_vllm and self.world_size > 1:
            errors.append(
                f"{name} with use_vllm: false is for one process, and there are {self.world_size}. Launch one, or set "
                "use_vllm: true and vllm_mode: server, and start a server."
            )
        if self.rollout_lag or self.stale_logps:
            errors.append(
                f"{name} replaces rollout_lag and stale_logps: log-probs are those of the engine. Remove both keys."
            )
        has_one_step = self.steps_per_generation == self.gradient_accumulation_steps and self.num_iterations == 1
        if not has_one_step or self.completions_per_step is not None:
            errors.append(
                f"{name} takes new groups for each optimizer step, and each once. Set steps_per_generation to "
                f"gradient_accumulation_steps={self.gradient_accumulation_steps} and num_iterations: 1, and remove "
                "completions_per_step."
            )
        return errors
