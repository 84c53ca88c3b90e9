"""Protocols that name what functions of this folder read and call of a trainer.

[`RolloutTrainer`] fulfills all of them but [`LateTrainer`] and [`ContinuousTrainer`], which an [`ExactUpdateTrainer`]
fulfills; mypy checks both at the end of this file. Attributes without a comment are those of TRL's and transformers'
trainers.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.trainer_callback import CallbackHandler, TrainerControl, TrainerState

from ..update.forward_pass import ForwardPass
from .request_seeds import RequestSeeds
from .rollout_config import RolloutConfig
from .sources import RolloutSource
from .timing import StepTimer


if TYPE_CHECKING:
    from trl.generation.vllm_generation import VLLMGeneration

    from ..pacs_config import ExactUpdateConfig
    from .exact_trainer import ExactUpdateTrainer
    from .rollout_trainer import RolloutTrainer


class ConfiguredTrainer(Protocol):
    """A trainer with its settings."""

    @property
    def args(self) -> RolloutConfig: ...


# Seeds and data -----------------------------------------------------------------------------------------------------


class SeededTrainer(Protocol):
    """A trainer whose vLLM requests have seeds."""

    model: PreTrainedModel
    _request_seeds: RequestSeeds  # of the run


class EvaluatingTrainer(ConfiguredTrainer, Protocol):
    """A trainer whose evaluations have seeds."""

    accelerator: Accelerator
    state: TrainerState
    _evaluations: tuple[int, int]  # optimizer step of the last evaluation, and number of evaluations at it


class SamplingTrainer(Protocol):
    """A trainer that knows the order of its dataset rows."""

    num_generations: int

    def _get_train_sampler(self, dataset: Dataset | None = None) -> Any: ...


# Position of a run --------------------------------------------------------------------------------------------------


class LossLoggingTrainer(Protocol):
    """A trainer with the sums of losses from which Trainer logs `loss` and `train_loss`."""

    _tr_loss: torch.Tensor
    _total_loss_scalar: float
    _globalstep_last_logged: int


class StreamingTrainer(Protocol):
    """A trainer with the position in its training data."""

    _data_position: tuple[int, int]  # passes over the training data, and batches used of the current pass


class CheckedTrainer(ConfiguredTrainer, Protocol):
    """A trainer whose settings are compared with those at its construction."""

    optimizer: torch.optim.Optimizer | None
    optimizer_settings: tuple[str, ...]  # those that are read when the optimizer is created
    _fixed_settings: dict[str, Any]  # see `fixed_settings`


class LiveTrainer(ConfiguredTrainer, Protocol):
    """A trainer whose callbacks may change `live_attributes`, copies of settings."""

    live_attributes: tuple[str, ...]
    aux_loss_enabled: bool  # of the routers in a mixture of experts
    _name: str  # of the method


# Optimizer steps ----------------------------------------------------------------------------------------------------


class EntropyTrainer(ConfiguredTrainer, Protocol):
    """A trainer with an entropy bonus."""

    entropy_coef: float
    use_adaptive_entropy: bool
    _entropy_bonus_enabled: bool
    _last_world_entropy: float  # of the last optimizer step, in nats per token

    def record_metrics(self, metrics: Mapping[str, float]) -> None: ...


class SteppingTrainer(Protocol):
    """A trainer that counts optimizer steps whose gradient is not finite."""

    accelerator: Accelerator
    state: TrainerState
    divergence_metrics: tuple[str, ...]  # logged metrics that show why a gradient is not finite
    _non_finite: tuple[int, int]  # such steps: consecutive ones up to the last step, and the total

    @property
    def args(self) -> "ExactUpdateConfig": ...

    def record_metrics(self, metrics: Mapping[str, float]) -> None: ...


# Engines ------------------------------------------------------------------------------------------------------------


class EngineTrainer(SeededTrainer, ConfiguredTrainer, Protocol):
    """A trainer that generates with vLLM."""

    state: TrainerState
    vllm_generation: Any  # TRL's engine, which that of this package replaces
    tools: list[Callable]
    environment_factories: Any
    _tokenizer: PreTrainedTokenizerBase
    _source: RolloutSource
    _last_loaded_step: int
    _reads_images: bool
    _unexpanded_prompt_ids: dict[tuple[int, ...], list[int]]  # see `ImagePrompts`

    @property
    def timer(self) -> StepTimer: ...

    def create_forward_pass(self, model: Any, temperature: float) -> ForwardPass: ...


class EngineProcessTrainer(ConfiguredTrainer, Protocol):
    """A trainer whose policy an engine process copies."""

    accelerator: Accelerator
    model_wrapped: nn.Module
    generation_config: GenerationConfig
    forward_pass: ForwardPass
    eos_token_ids: list[int]
    _tokenizer: PreTrainedTokenizerBase


class CompilingTrainer(ConfiguredTrainer, Protocol):
    """A trainer whose decoder layers are compiled."""

    accelerator: Accelerator
    model_wrapped: nn.Module
    ref_model: PreTrainedModel | None  # of the KL term
    forward_pass: ForwardPass
    ref_pass: ForwardPass  # of `ref_model`, if there is one


# Sources of completions ---------------------------------------------------------------------------------------------


class ServedTrainer(ConfiguredTrainer, Protocol):
    """A trainer that generates with a vLLM server."""

    accelerator: Accelerator
    state: TrainerState
    vllm_generation: "VLLMGeneration"


class SourceTrainer(SamplingTrainer, ServedTrainer, Protocol):
    """A trainer whose completions were generated, and perhaps graded, beside training."""

    model: PreTrainedModel
    control: TrainerControl
    callback_handler: CallbackHandler
    train_dataset: Dataset
    reward_funcs: list[Any]
    _tokenizer: PreTrainedTokenizerBase

    @property
    def timer(self) -> StepTimer: ...

    def record_metrics(self, metrics: Mapping[str, float]) -> None: ...


class LateTrainer(SourceTrainer, EngineProcessTrainer, Protocol):
    """A trainer with `rollout_lag`."""

    use_vllm: bool
    processing_class: PreTrainedTokenizerBase | ProcessorMixin
    async_loop: asyncio.AbstractEventLoop  # of asynchronous reward functions
    late_rollout: Callable | None  # an asynchronous `rollout_func`

    @property
    def generation_number(self) -> int: ...

    def reward_arguments(self) -> dict[str, Any]: ...

    def check_rollouts(self, output: Any, num_prompts: int) -> dict[str, Any]: ...

    def _tokenize_prompts(self, prompts: list) -> tuple[list[list[int]], list | None, dict[str, Any]]: ...


class ContinuousTrainer(SourceTrainer, Protocol):
    """A trainer with `rollout_schedule: continuous`."""

    tools: list[Callable]
    eos_token_ids: list[int]
    user_code: dict[str, Any]  # of the worker: reward functions, tools, and environments
    _prompt_date: str  # in ISO format, of a chat template that prints the date

    def create_forward_pass(self, model: Any, temperature: float) -> ForwardPass: ...


if TYPE_CHECKING:

    class _RolloutTrainer(
        EngineTrainer,  # and SeededTrainer
        EngineProcessTrainer,
        EvaluatingTrainer,
        SamplingTrainer,
        LossLoggingTrainer,
        StreamingTrainer,
        CheckedTrainer,
        Protocol,
    ): ...

    class _ExactUpdateTrainer(
        SteppingTrainer, LateTrainer, ContinuousTrainer, LiveTrainer, EntropyTrainer, CompilingTrainer, Protocol
    ): ...

    def _fulfilled(trainer: "RolloutTrainer") -> _RolloutTrainer:
        return trainer

    def _fulfilled_by_exact_updates(trainer: "ExactUpdateTrainer") -> _ExactUpdateTrainer:
        return trainer
