"""Estimate of a recipe on a launch: batches, run, GPU memory, and hours. Formulas are in `cost.py`."""

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from ..data import DataArguments
from ..recipe import Recipe
from ..rollouts.layer_compilation import obstacle_to_compilation
from ..rollouts.router_checks import trains_routers
from ..settings import render
from ..settings.names import looks_like_path
from . import cost
from .cost import GIB, H200, Execution, Gpu, ModelShape, Passes, Recomputation
from .launch import Launch, gpus_of_server
from .models import empty_model, local_config, shape_of_model
from .occupied import (
    bytes_in_passes,
    engine_bytes,
    engine_weights,
    has_kl_model,
    kept_bytes_of,
    occupied_bytes,
    weight_bytes,
)
from .packing import packing_of
from .schedules import Engine, Group, Trainer, continuous, engine_on, generate, transfer_seconds, typical_groups
from .sharding import state_shares
from .workload import (
    UNKNOWN_LONGEST_PROMPT,
    UNKNOWN_MEAN_PROMPT,
    USABLE_SHARE,
    MemoryChoice,
    Workload,
    activation_precision,
    choice_of_unknown_model,
    choice_on_cpu,
    choose,
    chooses,
    completions_of_a_prompt,
    mean_completion,
    recomputations_of,
)


# Number of problems in the named training sets, for counting epochs.
_SET_SIZES = {"deepscaler": 40_315, "gsm8k": 7_473, "math": 7_500}


_SIMULATED_STEPS = 20  # optimizer steps of continuous generation
# Shares of the memory of a GPU: for generation by transformers, and for keys and values where less is left.
_MEMORY_SHARE_WITHOUT_VLLM, _LEAST_CACHE_SHARE = 0.5, 0.05


class Prompts(NamedTuple):
    """Number and lengths in tokens of the training prompts; `None` where they are not known."""

    number: int | None = None
    lengths: list[int] | None = None


UNKNOWN = Prompts()


class Estimate:
    """
    What a run does on a launch. What that costs, `costs`, needs the shapes of its models.

    Attributes:
        num_gpus, server_gpus (`int`): GPUs that train, and those of a vLLM server, see [`~launch.gpus_of_server`].
        num_heads (`int`, *optional*): Heads of attention of the policy, if its shape is known.
        schedule (`str`): How generation and training follow each other: `"in turn"`, `"one batch late"`, or
            `"continuous"`.
        dtype (`str`): Dtype of the loaded weights. Under mixed precision FSDP and DeepSpeed train float32 copies of
            half-precision weights (`has_float32_copies`).
        quantization: Configuration of quantization of the weights, or its dictionary; `None` without.
        execution ([`~cost.Execution`]): How an update computes.
        config, model: Configuration, and model without weights, if it is on this machine, or known, or else `None`.
        compile_obstacle: What prevents compiled decoder layers, if anything.
        packing ([`~packing.Packing`], *optional*): Whether completions are packed.
        num_problems (`int`, *optional*): Size of the training set; that of a named set is counted before overlong
            prompts are dropped.
        longest_prompt, mean_prompt, longest (`int`): Tokens of prompts, and of the longest one with a completion.
        sharing (`int`): Completions of a prompt in an optimizer step, which compute it once.
        costs ([`Costs`], *optional*): Memory and seconds; `None` if the shape of a model is `unknown`.
        unknown (`list[str]`): Models whose shapes are not known.
        note_on_unknown (`str`): Why the first of them is not known, or what to do.
    """

    def __init__(
        self,
        recipe: Recipe,
        launch: Launch,
        gpu: Gpu = H200,
        prompts: Prompts = UNKNOWN,
        *,
        compiled: bool | None = None,
        attention: str | None = None,
    ):
        self.recipe, self.launch, self.gpu, self.prompts = recipe, launch, gpu, prompts
        self.training, self.step = recipe.training, recipe.step
        self.num_problems = _num_problems(recipe.data, prompts)
        self._set_gpus_and_schedule()
        self._set_model()
        self.execution = self._execution(compiled, attention)
        self._set_tokens()
        self._set_costs()

    def _set_gpus_and_schedule(self) -> None:
        """Set the GPUs that train, and how generation and training follow each other."""
        training = self.training
        self.num_gpus = self.launch.num_processes
        self.has_server = training.use_vllm and training.vllm_mode == "server"
        self.schedule = "one batch late" if training.rollout_lag else "in turn"
        if training.rollout_schedule == "continuous":
            self.schedule = "continuous"

    def _set_model(self) -> None:
        """Set the model without weights, if it is known, and what is known of its weights and layers."""
        recipe, training, launch = self.recipe, self.training, self.launch
        self.config = config = local_config(recipe)
        self.model = None if config is None else empty_model(config, training.trust_remote_code)
        self.packing = packing_of(recipe, self.model)
        self.trains_routers = config is not None and trains_routers(config, training)
        self.quantization = _quantization(recipe, config)
        is_quantized = recipe.model.load_in_4bit or recipe.model.load_in_8bit
        self.compile_obstacle = obstacle_to_compilation(
            training,
            is_zero3=launch.is_zero3,
            quantization="bitsandbytes" if is_quantized else None,
            trains_routers=self.trains_routers,
        )
        self.dtype = (training.model_init_kwargs or {}).get("dtype", recipe.model.dtype) or "float32"
        self.has_float32_copies = self._is_wrapped and self._is_mixed

    @property
    def _is_mixed(self) -> bool:
        """Whether the run has mixed precision."""
        return self.training.bf16 or self.training.fp16 or self.launch.mixed_precision != "no"

    @property
    def _is_wrapped(self) -> bool:
        """Whether FSDP or DeepSpeed hold the weights."""
        return self.launch.kind in ("FSDP", "DEEPSPEED")

    def _execution(self, compiled: bool | None, attention: str | None) -> Execution:
        """Return how an update computes; `None` is what the recipe says."""
        training = self.training
        if compiled is None:
            compiles = training.is_exact and training.needs_gpu and training.compile_layers
            compiled = bool(compiles) and self.compile_obstacle is None
        if attention is None:
            attention = "fa4" if self.recipe.model.attn_implementation == "flash_attention_4" else "sdpa"
        precision = activation_precision(
            loads_float32=self.dtype == "float32", is_mixed=self._is_mixed, is_wrapped=self._is_wrapped
        )
        return Execution(precision, compiled=compiled, attention=attention)

    def _set_tokens(self) -> None:
        """Set the tokens of prompts, measured or assumed, and of the longest one with a completion."""
        limit, lengths = self.recipe.data.max_prompt_length, self.prompts.lengths
        if lengths:
            self.longest_prompt = max(lengths)
            self.mean_prompt = round(sum(lengths) / len(lengths))
        else:
            self.longest_prompt = limit or UNKNOWN_LONGEST_PROMPT
            self.mean_prompt = min(limit or UNKNOWN_MEAN_PROMPT, UNKNOWN_MEAN_PROMPT)
        self.longest = self.longest_prompt + (self.training.max_completion_length or 0)
        self.sharing = self._sharing()

    def _set_costs(self) -> None:
        """Set the models whose shapes are unknown, the GPUs of a server, and the costs if all shapes are known."""
        training, policy = self.training, self.recipe.model_name
        shape, approximated = cost.model_shape(policy), None
        if shape is None and self.model is not None:
            shape, approximated = shape_of_model(self.model), self.model.config.model_type
        self.critic_name = (training.critic_model_name_or_path or policy) if training.has_critic else None
        critic_shape = shape if self.critic_name == policy else cost.model_shape(self.critic_name)
        if critic_shape is not None and training.critic_scores_tokens:
            critic_shape = critic_shape.with_value_head()
        self.num_heads = None if shape is None else shape.num_heads
        self.server_gpus = len(gpus_of_server(self.num_gpus, self.num_heads)) if self.has_server else 0
        self.unknown = [policy] if shape is None else []
        if self.critic_name not in (None, policy) and critic_shape is None:
            self.unknown.append(self.critic_name)
        self.note_on_unknown = "download its config.json and pass the folder"
        if looks_like_path(policy):
            self.note_on_unknown = "its directory does not exist here"
        if policy in self.unknown and self.config is not None:
            self.note_on_unknown = f"plan does not estimate {self.config.model_type!r} models"
        self.costs: Costs | None = None
        if shape is not None and not self.unknown:
            self.costs = Costs(self, shape, critic_shape, approximated)

    def _sharing(self) -> int:
        """Return the completions of a prompt in an optimizer step. Trainers that are not exact pack completions, too,
        but compute prompts again."""
        is_packed = self.packing is None or self.packing.is_packed
        return completions_of_a_prompt(self.step, self.training) if self.training.is_exact and is_packed else 1

    @property
    def on_gpu(self) -> str:
        """Name of the GPU with its article."""
        return f"{'a' if self.gpu.name.startswith('B') else 'an'} {self.gpu.name}"

    def optimizer_steps(self) -> int | None:
        """Return `max_steps`, or the steps of all epochs; `None` if the number of prompts is not known."""
        if self.training.max_steps > 0:
            return self.training.max_steps
        if self.num_problems is None:
            return None
        generations = int(self.num_problems // self.step.prompts_per_generation)
        per_epoch = -(-generations * self.step.updates_per_generation // self.step.generations_per_update)
        return math.ceil(self.training.num_train_epochs * per_epoch)

    def gpu_hours(self, mean_length: int) -> float | None:
        """Return the GPU hours of the run for completions of `mean_length` tokens on average; `None` if unknown."""
        optimizer_steps = self.optimizer_steps()
        if self.costs is None or optimizer_steps is None:
            return None
        num_gpus = self.num_gpus + self.server_gpus
        return self.step.num_generation_batches(optimizer_steps) * self.costs.seconds(mean_length) * num_gpus / 3600

    def text(self, mean_length: int) -> str:
        """Return the text that `plan` prints, for completions of `mean_length` tokens on average."""
        hours = self.gpu_hours(mean_length)
        splits = {}
        if self.costs is not None and self.server_gpus and hours is not None:
            splits = self.costs.splits(mean_length)
        return render(
            "plan.txt",
            plan=self,
            costs=self.costs,
            step=self.step,
            mean_length=mean_length,
            hours=hours,
            splits=splits,
            duration=_duration,
            rounded=_rounded,
        )


def _quantization(recipe: Recipe, config: PreTrainedConfig | None) -> Any:
    """Return the configuration of quantization, or its dictionary: that of the recipe, or else of the checkpoint with
    `config`; `None` without."""
    model = recipe.model
    if model.load_in_4bit or model.load_in_8bit:
        return {
            "load_in_4bit": model.load_in_4bit,
            "load_in_8bit": model.load_in_8bit,
            "bnb_4bit_use_double_quant": model.use_bnb_nested_quant,
        }
    init_kwargs = recipe.training.model_init_kwargs or {}
    return init_kwargs.get("quantization_config") or getattr(config, "quantization_config", None)


def _num_problems(data: DataArguments, prompts: Prompts) -> int | None:
    """Return the size of the training set, if it was measured or is that of a named set."""
    size = _SET_SIZES.get(data.dataset_name)
    if prompts.number or size is None:
        return prompts.number
    size = max(0, size - data.eval_split_size)
    return min(size, data.max_train_samples or size)


class Costs:
    """
    Memory and seconds of a run, with sizes in bytes per GPU. Formulas are in `cost.py` and `workload.py`.

    Attributes:
        shape, critic_shape ([`~cost.ModelShape`]): Shapes of the models.
        approximated (`str`, *optional*): Type of a policy that is no dense decoder, for which the shape of one stands.
        has_adapter (`bool`): Whether an adapter of the policy is trained.
        trained_weights, frozen_weights, critic_weights (`int`): Numbers of weights: of the policy, those that are
            trained and those that are not, and of the critic.
        loaded_bytes (`int`): Bytes of a weight in the dtype in which a model is loaded.
        weights ([`~occupied.WeightBytes`]): Bytes per weight of the policy.
        shares ([`~sharding.StateShares`]): What a process keeps of the training state on its GPU.
        usable (`float`): Memory of a GPU without the share that is never filled.
        state, gathered, most_are_gathered_for_kl, collected, engine, is_asleep: See [`~occupied.Occupied`].
        room (`float`): What is left for activations.
        tensor_parallel (`int`): GPUs of each colocated vLLM.
        engine_needed (`float`): Least memory of a colocated vLLM, see [`~occupied.engine_bytes`].
        choice ([`~workload.MemoryChoice`], *optional*): What the update recomputes and the size of its micro-batches;
            `None` if no micro-batch fits. It is a choice if the recipe `chooses`, with `auto`.
        micro_batch_tokens (`int`): Tokens of the largest micro-batch.
        activations, rounded_weights, update, peak (`float`): Activations of that micro-batch, copies of weights that
            autocast makes, all parts of an update, and the largest use of memory.
        engine_process (`float`): Weights of the engine in a process of its own, in memory of the CPU.
        checkpoint (`float`): Size on disk.
    """

    def __init__(
        self, run: Estimate, shape: ModelShape, critic_shape: ModelShape | None, approximated: str | None = None
    ):
        training, model = run.training, run.recipe.model
        self.run, self.shape, self.critic_shape, self.approximated = run, shape, critic_shape, approximated
        self.has_adapter = bool(model.use_peft)
        self.trained_weights = cost.lora_parameters(shape, model.lora_r) if self.has_adapter else shape.parameters
        self.frozen_weights = shape.parameters if self.has_adapter else 0
        self.critic_weights = critic_shape.parameters if critic_shape else 0
        self.loaded_bytes = 4 if run.dtype == "float32" else 2
        self.has_kl_model = has_kl_model(training, has_adapter=self.has_adapter)
        self.usable = USABLE_SHARE * run.gpu.memory_bytes

        self._set_occupied()
        self._set_micro_batches()
        self._set_peak()
        self.engine_process = self._engine_process_bytes()
        self.checkpoint = self._checkpoint_bytes()

    def _set_occupied(self) -> None:
        """Set what an update cannot use for activations."""
        run, training = self.run, self.run.training
        kept_bytes = kept_bytes_of(self.loaded_bytes, run.launch.sharding, run.execution.precision)
        self.weights = weight_bytes(
            training,
            self.shape,
            kept_bytes=kept_bytes,
            has_adapter=self.has_adapter,
            has_float32_copies=run.has_float32_copies,
            quantization=run.quantization,
        )
        self.shares = state_shares(run.launch.sharding)
        occupied = occupied_bytes(
            training,
            self.shape,
            trained=self.trained_weights,
            frozen=self.frozen_weights,
            kept_bytes=kept_bytes,
            weights=self.weights,
            has_adapter=self.has_adapter,
            sharding=run.launch.sharding,
            precision=run.execution.precision,
            memory_bytes=run.gpu.memory_bytes,
            critic=self.critic_shape,
        )
        self.state = occupied.state
        self.gathered = occupied.gathered
        self.most_are_gathered_for_kl = occupied.most_are_gathered_for_kl
        self.collected = occupied.collected
        self.engine = occupied.engine
        self.is_asleep = occupied.is_asleep
        self.room = self.usable - occupied.in_update
        self.tensor_parallel = training.vllm_tensor_parallel_size if self.engine else 1
        self.engine_needed = self._engine_needed(self.tensor_parallel) if self.engine else 0.0

    def _set_micro_batches(self) -> None:
        """Set what the backward pass recomputes and the size of the largest micro-batch, as a run chooses them."""
        run, training = self.run, self.run.training
        workload = self.workload(mean_completion(training.max_completion_length))
        self.chooses = chooses(training)
        self.choice: MemoryChoice | None
        if not training.needs_gpu:
            self.choice = choice_on_cpu(training)
        elif self.approximated and self.chooses:
            self.choice = choice_of_unknown_model(training, self.approximated)
        else:
            recomputations = recomputations_of(training, has_adapter=self.has_adapter, is_zero3=run.launch.is_zero3)
            self.choice = choose(workload, self.room, recomputations)
        choice = self.choice or MemoryChoice("full", run.longest, "does not fit")
        if run.launch.fsdp_recomputes and not self.chooses:
            choice = choice._replace(recomputation="full")
        self.recomputation: Recomputation = choice.recomputation
        self.micro_batch_tokens = choice.max_tokens or workload.largest(training.per_device_train_batch_size)

    def _set_peak(self) -> None:
        """Set the memory of an update, and the largest use of memory."""
        training, execution = self.run.training, self.run.execution._replace(recomputation=self.recomputation)
        self.rounded_weights = self.shape.cast_bytes(execution)
        self.activations = self.shape.activation_bytes(self.micro_batch_tokens, execution)
        if self.critic_shape:  # its activations are freed before the update of the policy
            tokens = training.per_device_train_batch_size * self.run.longest
            self.activations = max(self.activations, self.critic_shape.activation_bytes(tokens, execution))
        self.update = self.state + self.rounded_weights + self.activations + self.gathered + self.collected
        # A sleeping engine wakes between updates, when there are no activations and layers are gathered one at a time.
        self.beside_engine = self.state if self.is_asleep else self.update
        self.peak = max(self.beside_engine + self.engine, self.update)

    def _engine_process_bytes(self) -> float:
        """Return the bytes of weights in the engine process, which has all that late rollouts need."""
        training = self.run.training
        if not training.has_engine_process:
            return 0
        return self.loaded_bytes * (self.frozen_weights + max(1, training.rollout_lag) * self.trained_weights)

    def _checkpoint_bytes(self) -> float:
        """Return the bytes of a checkpoint on disk, 0 if none is saved. The critic is saved in float32."""
        run, training = self.run, self.run.training
        if training.save_strategy == "no":
            return 0
        is_float32 = run.dtype == "float32" or run.has_float32_copies or self.has_adapter
        has_snapshot = training.reference == "snapshot" or training.keeps_generating_policy
        reference_follows = training.sync_ref_model and self.has_kl_model
        policy = cost.checkpoint_bytes(
            self.trained_weights,
            weight_bytes=4 if is_float32 else 2,
            snapshot=has_snapshot,
            followed_reference=self.loaded_bytes * self.shape.parameters if reference_follows else 0,
        )
        return policy + cost.checkpoint_bytes(self.critic_weights)

    def workload(self, mean_length: int) -> Workload:
        """Return the work on a generation batch, for completions of `mean_length` tokens on average."""
        run = self.run
        return Workload(
            run.training,
            run.step,
            self.shape,
            run.gpu,
            run.execution,
            longest_prompt=run.longest_prompt,
            mean_prompt=run.mean_prompt,
            mean_completion=mean_length,
            sharing=run.sharing,
            trains_routers=run.trains_routers,
        )

    # Memory ----------------------------------------------------------------------------------------------------------

    @property
    def fits(self) -> bool:
        """Whether an update fits on a GPU, a colocated vLLM beside it, and the model into vLLM's share."""
        return self.choice is not None and self.peak <= self.usable and self.engine_needed <= self.engine

    def memory_conflict(self) -> str | None:
        """Return why an update, a colocated vLLM beside it, or the model in vLLM's share does not fit on a GPU, and
        what helps; `None` if all fit."""
        run = self.run
        if not run.training.needs_gpu or self.fits:
            return None
        total = run.gpu.memory_bytes
        if self.choice is None:
            return (
                f"A completion of {run.longest:,} tokens (prompt and max_completion_length) does not fit on "
                f"{run.on_gpu}, even if the backward pass computes everything again: {self._parts()}, of "
                f"{total / GIB:.0f} GiB. Lower max_completion_length{self._engine_remedy()}, {self._remedies()}."
            )
        if self.update > self.usable:
            return (
                f"An update needs {self.update / GIB:.0f} GiB on each GPU ({self._parts()}) of {total / GIB:.0f} on "
                f"{run.on_gpu}. To make it smaller, {self._remedies()}."
            )
        share = f"vllm_gpu_memory_utilization={run.training.vllm_gpu_memory_utilization:g}"
        if self.engine < self.engine_needed:
            length = run.training.vllm_max_model_length or run.longest
            return (
                f"{share} gives vLLM {self.engine / GIB:.1f} of {total / GIB:.0f} GiB on {run.on_gpu}, and the "
                f"weights with the cache of one sequence of {length:,} tokens need {self.engine_needed / GIB:.1f} "
                f"GiB. To make them fit, {_alternatives(self._engine_remedies())}."
            )
        return (
            f"{share} takes {self.engine / GIB:.0f} of {total / GIB:.0f} GiB on {run.on_gpu}, and training needs "
            f"{self.beside_engine / GIB:.0f} GiB. To make both fit, {_alternatives(self._engine_remedies())}."
        )

    def _engine_needed(self, tensor_parallel: int) -> float:
        """Return the memory that a colocated vLLM over some GPUs needs at least on each of them."""
        run = self.run
        return engine_bytes(run.training, self.shape, run.longest, tensor_parallel, quantization=run.quantization)

    def _engine_remedies(self) -> list[str]:
        """Return what lets a colocated vLLM that has too much or too little memory fit beside training."""
        run, total = self.run, self.run.gpu.memory_bytes
        most = int(20 * (self.usable - self.beside_engine) / total) / 20  # rounded down to a twentieth
        least = math.ceil(20 * self.engine_needed / total) / 20
        is_too_small, has_fitting_share = self.engine < self.engine_needed, least <= most
        is_too_large = self.engine > most * total
        remedies = []
        if has_fitting_share:
            remedies.append(f"set it to {least:g} or more" if is_too_small else f"set it to {most:g} or less")
        if is_too_small or not has_fitting_share:
            sizes = [n for n in (2, 4, 8) if n > self.tensor_parallel]
            sizes = [n for n in sizes if run.num_gpus % n == self.shape.num_heads % n == 0]
            fitting = [n for n in sizes if self._engine_needed(n) <= min(self.engine, most * total)]
            also = " and lower it" if is_too_large else ""
            remedies += [f"set vllm_tensor_parallel_size: {n}{also}" for n in fitting[:1]]
        weights = engine_weights(self.shape, run.quantization).stored / self.tensor_parallel
        if is_too_small and weights < self.engine:
            is_set = run.training.vllm_max_model_length
            remedies.append("lower vllm_max_model_length" if is_set else "lower max_completion_length")
        if not (is_too_small and has_fitting_share):
            if not self.is_asleep:
                remedies.append("set vllm_enable_sleep_mode: true")
            if not run.launch.sharding.divides_weights:
                remedies.append("shard the training state (fsdp2.yaml)")
        if not has_fitting_share:
            remedies += ["use a GPU with more memory", "set vllm_mode: server"]
        return remedies

    def _parts(self) -> str:
        """Return the parts of the memory of an update that take a GiB or more."""
        sizes = {
            "training state": self.state,
            "rounded weights": self.rounded_weights,
            "activations": self.activations,
            "gathered weights": self.gathered,
            "collected gradient": self.collected,
            "vLLM": 0 if self.is_asleep else self.engine,
        }
        return ", ".join(f"{name} {size / GIB:.0f}" for name, size in sizes.items() if size >= GIB)

    def _engine_remedy(self) -> str:
        can_be_lowered = self.engine > self.engine_needed and not self.is_asleep
        return " or vllm_gpu_memory_utilization" if can_be_lowered else ""

    def _remedies(self) -> str:
        """Return what makes an update smaller, of what is not done yet."""
        training, remedies = self.run.training, []
        if not self.run.launch.sharding.divides_weights:
            remedies.append("shard the training state over GPUs (accelerate_configs/fsdp2.yaml)")
        elif max(self.collected, self.gathered) > self.state and not self.critic_weights:
            remedies.append("use ZeRO-3 (accelerate_configs/zero3.yaml), which gathers and reduces layer by layer")
        else:
            remedies.append("use more GPUs")
        if self.recomputation != "full" and not self.chooses:
            remedies.append("set gradient_checkpointing: auto")
        if training.max_tokens_per_micro_batch is None and training.per_device_train_batch_size > 1:
            remedies.append("lower per_device_train_batch_size")
        if not self.run.recipe.model.use_peft:
            remedies.append("train an adapter (use_peft: true)")
        return _alternatives(remedies)

    def notes_on_state(self) -> list[str]:
        """Return the bytes of the training state per weight if they are not 16, or weights are quantized, and what
        they assume."""
        run, (weight, gradient, moments) = self.run, self.weights.trained
        sharding = run.launch.sharding
        buckets = gradient if sharding.framework == "ddp" else 0
        working = 2 * bytes_in_passes(run.execution.precision) if sharding.framework == "deepspeed" else 0
        total, assumptions = weight + gradient + moments + buckets + working, list(self.weights.assumptions)
        if sharding.framework == "deepspeed":
            assumptions.append(
                f"DeepSpeed's buckets are counted with its default reduce_bucket_size, {cost.ZERO_BUCKET:,} gradients."
            )
        if sharding.offloads_optimizer:
            assumptions.append("The time of the optimizer step on the CPU is not counted.")
        if run.dtype == "auto":
            assumptions.append("dtype: auto is counted as half precision.")
        if total == 16 and run.quantization is None:
            return assumptions
        parts = {
            "weight": weight,
            "gradient": gradient,
            "moments": moments,
            "DDP's buckets": buckets,
            "DeepSpeed's copies": working,
        }
        summands = ", ".join(f"{name} {size:.3g}" for name, size in parts.items() if size)
        frozen = f", and {self.weights.frozen:.3g} per frozen weight" if run.recipe.model.use_peft else ""
        note = f"The training state is counted with {total:.3g} bytes per trained weight ({summands}){frozen}."
        return [note, *assumptions]

    # Time ------------------------------------------------------------------------------------------------------------

    def passes(self) -> Passes:
        """Return the passes of the policy over a generation batch in all updates on it."""
        workload = self.workload(mean_completion(self.run.training.max_completion_length))
        return workload.passes(has_split_groups=workload.has_split_groups(self.micro_batch_tokens))

    def forward_passes(self) -> float:
        """Return the cost of all updates on a generation, in forward passes over it."""
        training = self.run.training
        passes = self.passes().in_forward_passes(self.recomputation)
        if training.critic_scores_tokens:
            passes += cost.critic_passes(training.num_iterations).in_forward_passes(self.recomputation)
        return passes

    def update_flops_and_seconds(self, mean_length: int) -> tuple[float, float]:
        """Return FLOP and seconds of all updates on a generation, for a mean of `mean_length` tokens."""
        run, workload = self.run, self.workload(mean_length)
        step = run.step
        tokens = step.completions_per_generation * workload.computed_per_completion(self.micro_batch_tokens)
        length = workload.attended_length(self.micro_batch_tokens)
        flops = seconds = 0.0
        models = [(self.shape, self.trained_weights, self.passes())]
        if self.critic_shape and run.training.critic_scores_tokens:
            models.append((self.critic_shape, self.critic_weights, cost.critic_passes(run.training.num_iterations)))
        for shape, trained, passes in models:
            flops += passes.in_forward_passes(self.recomputation) * shape.forward_flops(tokens, length)
            seconds += workload.seconds_of_passes(shape, passes, self.recomputation, self.micro_batch_tokens)
            seconds += step.updates_per_generation * cost.optimizer_seconds(trained * self.shares.moments, run.gpu)
        return flops, seconds

    def generation_seconds(self, mean_length: int, num_gpus: int | None = None) -> float:
        """Return the seconds of a generation, on `num_gpus` of a server, or else on the GPUs that train."""
        run = self.run
        if not run.has_server:
            return self._local_generation_seconds(mean_length)
        batch = islice(self._groups(mean_length), int(run.step.prompts_per_generation))
        return generate(batch, self._server(num_gpus or run.server_gpus))[0]

    def _local_generation_seconds(self, mean_length: int) -> float:
        """Return the seconds of a generation by engines over `tensor_parallel` of the GPUs that train, each of which
        generates its part of the batch."""
        run, training, gpu = self.run, self.run.training, self.run.gpu
        weights = engine_weights(self.shape, run.quantization)
        memory_share = training.vllm_gpu_memory_utilization if training.use_vllm else _MEMORY_SHARE_WITHOUT_VLLM
        beside_weights = memory_share * gpu.memory_bytes - weights.stored / self.tensor_parallel
        cache_on_gpu = max(beside_weights, _LEAST_CACHE_SHARE * gpu.memory_bytes)
        return cost.decoding_seconds(
            self.shape,
            self.tensor_parallel * run.step.completions_per_generation / run.num_gpus,
            run.mean_prompt,
            mean_length,
            training.max_completion_length,
            weight_bytes=weights.moved,
            kv_cache_bytes=cache_on_gpu * min(self.tensor_parallel, self.shape.num_kv_heads),
            gpu=gpu._replace(bandwidth=self.tensor_parallel * gpu.bandwidth),
        )

    def _server(self, num_gpus: int) -> Engine:
        """Return the engine of `vllm serve` with the weights split over some GPUs, as recipes/launch starts it."""
        return engine_on(self.shape, self.run.gpu, num_gpus=num_gpus)

    def _groups(self, mean_length: int) -> Iterator[Group]:
        longest = self.run.training.max_completion_length
        return typical_groups(self.run.mean_prompt, mean_length, longest, self.run.step.num_generations)

    def seconds(self, mean_length: int, server_gpus: int | None = None, schedule: str | None = None) -> float:
        """Return the seconds from one generation to the next, with `server_gpus` of all GPUs for a server. With it
        generation and training follow a schedule: `"in turn"`, `"one batch late"`, or `"continuous"`."""
        run = self.run
        _, updates = self.update_flops_and_seconds(mean_length)
        if not run.has_server:
            generation = self.generation_seconds(mean_length)
            return max(updates, generation) if run.training.is_asynchronous else updates + generation
        server_gpus = server_gpus or run.server_gpus
        updates *= run.num_gpus / (run.num_gpus + run.server_gpus - server_gpus)
        schedule = schedule or run.schedule
        if schedule == "continuous":
            return self._continuous_seconds(mean_length, server_gpus, updates)
        generation = self.generation_seconds(mean_length, server_gpus)
        return max(updates, generation) if schedule == "one batch late" else updates + generation

    def _continuous_seconds(self, mean_length: int, server_gpus: int, update_seconds: float) -> float:
        """Return the seconds of a generation batch with continuous rollouts, whose updates take `update_seconds`."""
        step, staleness = self.run.step, self.run.training.max_staleness
        groups_per_update = max(1, int(step.prompts_per_update))
        trainer = Trainer(
            groups_per_update, update_seconds / step.updates_per_generation, transfer_seconds(self.shape)
        )
        simulated_steps = max(_SIMULATED_STEPS, 2 * (staleness + 1))
        engine = self._server(server_gpus)
        simulated = continuous(self._groups(mean_length), engine, trainer, simulated_steps, staleness)
        return step.updates_per_generation * simulated.seconds

    def splits(self, mean_length: int) -> dict[str, tuple[int, float]]:
        """Return for each schedule how many of the GPUs train when it is fastest, and the seconds from one generation
        to the next. Tensor parallelism of a server divides the heads of attention, on one node."""
        total = self.run.num_gpus + self.run.server_gpus
        sizes = [size for size in (1, 2, 4, 8) if size < total and self.shape.num_heads % size == 0]
        fastest = {}
        for schedule in ("in turn", "one batch late", "continuous"):
            options = [(self.seconds(mean_length, size, schedule), total - size) for size in sizes]
            seconds, training_gpus = min(options)
            fastest[schedule] = (training_gpus, seconds)
        return fastest


def _alternatives(names: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _rounded(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"


def _duration(hours: float, unit: str = "", digits: int = 1) -> str:
    for size, name in ((1.0, "hours"), (60.0, "minutes")):
        if hours * size >= 1:
            return f"{hours * size:.{digits if size == 1.0 else 1}f} {unit}{name}"
    return f"{3600 * hours:.2g} {unit}seconds"
