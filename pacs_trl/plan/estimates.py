"""Estimate of a recipe on a launch: batches, run, GPU memory, and hours. Formulas are in `cost.py`."""

import math
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from ..recipe import Recipe
from ..rollouts.model_checks import obstacle_to_compilation, trains_routers
from ..settings import render
from ..settings.names import looks_like_path
from . import cost
from .cost import GIB, H200, Execution, Gpu, Passes, Recomputation
from .launch import Launch
from .models import empty_model, local_config, shape_of_model
from .packing import packing_of
from .schedules import Engine, Group, Trainer, continuous, engine_on, generate, transfer_seconds, typical_groups
from .workload import (
    MEAN_SHARE,
    MemoryChoice,
    Workload,
    choice_of_unknown_model,
    choice_on_cpu,
    choose,
    chooses,
    occupied_bytes,
    recomputations_of,
)


# Number of problems in the named training sets, for counting epochs.
_SET_SIZES = {"deepscaler": 40_315, "gsm8k": 7_473, "math": 7_500}


_SIMULATED_STEPS = 20  # optimizer steps of continuous generation


class Prompts(NamedTuple):
    """Number and lengths in tokens of the training prompts; `None` where they are not known."""

    number: int | None = None
    lengths: list[int] | None = None


UNKNOWN = Prompts()


class Estimate:
    """
    Estimate of a run, with sizes in bytes per GPU; there are none if the shape of a model is `unknown`.

    `dtype` is that of the loaded weights, `precision` that of activations (see [`~cost.ModelShape.activation_bytes`]).
    Under mixed precision FSDP and DeepSpeed train float32 copies of half-precision weights. `num_problems` of a named
    set is counted before overlong prompts are dropped. `state`, `activations`, `gathered`, and `collected` are the
    parts of an update, `peak` is the largest use of memory. A vLLM server has `server_gpus`: the rest of the trainer's
    last node of eight GPUs, or one node more. `compiled` and `attention` say how the update computes, see
    [`~cost.Execution`], by default as the recipe says, and `packing` whether completions are packed. `choice` is what
    the update recomputes and the size of its micro-batches, or `None` if no micro-batch fits. `config` and `model`,
    without weights, are those of a model that is on this machine, or known, or else `None`.
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
        training, data = recipe.training, recipe.data
        self.recipe, self.launch, self.training, self.step, self.gpu = recipe, launch, training, recipe.step, gpu
        self.prompts, self.num_gpus = prompts, launch.num_processes
        self.has_server = training.use_vllm and training.vllm_mode == "server"
        self.server_gpus = 8 - self.num_gpus % 8 if self.has_server else 0
        self.schedule = "one batch late" if training.rollout_lag else "in turn"
        if training.rollout_schedule == "continuous":
            self.schedule = "continuous"
        self.usable = 0.95 * gpu.memory_bytes  # the rest is fragmentation, kernels, and communication
        mixed = training.bf16 or training.fp16 or launch.mixed_precision != "no"
        self.dtype = (training.model_init_kwargs or {}).get("dtype", recipe.model.dtype) or "float32"
        self.has_float32_copies = launch.kind in ("FSDP", "DEEPSPEED") and mixed
        self.precision = "autocast" if mixed else "float32"
        if self.dtype != "float32" or self.has_float32_copies:
            self.precision = "bfloat16"
        self.config = config = local_config(recipe)
        self.model = model = None if config is None else empty_model(config)
        self.trains_routers = config is not None and trains_routers(config, training)
        if compiled is None:
            compiled = _compiles_layers(recipe, launch, self.trains_routers)
        if attention is None:
            attention = "fa4" if recipe.model.attn_implementation == "flash_attention_4" else "sdpa"
        self.execution = Execution(self.precision, compiled=compiled, attention=attention)
        self.packing = packing_of(recipe, model)
        size = _SET_SIZES.get(data.dataset_name)
        size = size and max(0, size - data.eval_split_size)
        self.num_problems = prompts.number or (size and min(size, data.max_train_samples or size))
        lengths = prompts.lengths
        self.longest_prompt = max(lengths) if lengths else data.max_prompt_length or 1024
        self.mean_prompt = round(sum(lengths) / len(lengths)) if lengths else min(data.max_prompt_length or 256, 256)
        self.longest = self.longest_prompt + (training.max_completion_length or 0)
        self.sharing = 1  # completions of a prompt in an optimizer step, which compute it once
        # Trainers that are not exact pack completions, too, but compute prompts again.
        is_packed = self.packing is None or self.packing.is_packed
        if training.is_exact and is_packed and self.step is not None:
            minibatches = self.step.updates_per_generation // training.num_iterations
            self.sharing = self.step.num_generations
            if training.shuffle_minibatches:
                self.sharing = max(1, self.step.num_generations // minibatches)
        policy = recipe.model.model_name_or_path
        self.critic_name = (training.critic_model_name_or_path or policy) if training.has_critic else None
        self.shape, self.critic_shape = cost.model_shape(policy), cost.model_shape(self.critic_name)
        self.approximated: str | None = None  # type of a model that is not a dense decoder
        if self.shape is None and model is not None:
            self.shape, self.approximated = shape_of_model(model), model.config.model_type
        if self.critic_name == policy:
            self.critic_shape = self.shape
        shapes = {policy: self.shape} | ({self.critic_name: self.critic_shape} if training.has_critic else {})
        self.unknown = [name for name, shape in shapes.items() if shape is None]
        self.reason_of_unknown = "download its config.json and pass the folder"
        if looks_like_path(policy):
            self.reason_of_unknown = "its directory does not exist here"
        if policy in self.unknown and config is not None:
            self.reason_of_unknown = f"plan does not estimate {config.model_type!r} models"
        if not self.unknown:
            self._estimate_memory()

    def _estimate_memory(self) -> None:
        training, launch, shape, model = self.training, self.launch, self.shape, self.recipe.model
        self.trained = shape.parameters
        if model.use_peft:
            self.trained = cost.lora_parameters(shape, model.lora_r)
        self.critic = self.critic_shape.parameters if self.critic_name else 0
        self.has_snapshot = training.reference == "snapshot" or training.keeps_generating_policy
        self.has_kl_model = training.beta != 0 and not model.use_peft  # with LoRA it is the policy without its adapter

        frozen, weight_bytes = shape.parameters if model.use_peft else 0, 4 if self.dtype == "float32" else 2
        occupied = occupied_bytes(
            training,
            shape,
            trained=self.trained,
            frozen=frozen,
            weight_bytes=weight_bytes,
            has_adapter=model.use_peft,
            sharding=launch.sharding,
            is_fsdp=launch.kind == "FSDP",
            processes=self.num_gpus,
            memory_bytes=self.gpu.memory_bytes,
            critic=self.critic_shape if self.critic_name else None,
        )
        self.state, self.gathered, self.collected, self.engine, self.asleep = occupied
        has_process = training.rollout_lag and not training.use_vllm
        self.copies = weight_bytes * (frozen + training.rollout_lag * self.trained) if has_process else 0

        workload = self.workload(self._mean_completion)
        on_gpu = training.needs_gpu
        self.chooses = chooses(training)
        if not on_gpu:
            self.choice = choice_on_cpu(training)
        elif self.approximated and self.chooses:  # as in a run
            self.choice = choice_of_unknown_model(training, self.approximated)
        else:
            is_zero3 = launch.kind == "DEEPSPEED" and launch.sharding == "full"
            recomputations = recomputations_of(training, has_adapter=bool(model.use_peft), is_zero3=is_zero3)
            self.choice = choose(workload, self.usable - occupied.in_update, recomputations)
        chosen = self.choice or MemoryChoice("full", self.longest, "does not fit")
        self.recomputation: Recomputation = chosen.recomputation
        self.tokens = chosen.max_tokens or workload.largest(training.per_device_train_batch_size)
        execution = self.execution._replace(recomputation=self.recomputation)
        self.activations, self.casts = shape.activation_bytes(self.tokens, execution), shape.cast_bytes(execution)
        if self.critic:  # its activations are freed before the update of the policy
            tokens = training.per_device_train_batch_size * self.longest
            self.activations = max(self.activations, self.critic_shape.activation_bytes(tokens, execution))
        self.update = self.state + self.casts + self.activations + self.gathered + self.collected
        self.beside_engine = self.state if self.asleep else self.update
        self.peak = max(self.beside_engine + self.engine, self.update)
        is_float32 = self.dtype == "float32" or self.has_float32_copies or model.use_peft
        how_saved = {"weight_bytes": 4 if is_float32 else 2, "snapshot": self.has_snapshot}
        self.checkpoint = cost.checkpoint_bytes(self.trained, **how_saved) + cost.checkpoint_bytes(self.critic)
        self.checkpoint *= training.save_strategy != "no"

    @property
    def _mean_completion(self) -> int:
        return max(1, round(MEAN_SHARE * (self.training.max_completion_length or 1)))

    def workload(self, mean_length: int) -> Workload:
        """Return the work on a generation batch, for completions of `mean_length` tokens on average."""
        return Workload(
            self.training,
            self.step,
            self.shape,
            self.gpu,
            self.execution,
            longest_prompt=self.longest_prompt,
            mean_prompt=self.mean_prompt,
            mean_completion=mean_length,
            sharing=self.sharing,
            trains_routers=self.trains_routers,
        )

    def optimizer_steps(self) -> int | None:
        """Return `max_steps`, or the steps of all epochs; `None` if the number of prompts is not known."""
        if self.training.max_steps > 0:
            return self.training.max_steps
        if self.num_problems is None:
            return None
        generations = int(self.num_problems // self.step.prompts_per_generation)
        per_epoch = -(-generations * self.step.updates_per_generation // self.step.generations_per_update)
        return math.ceil(self.training.num_train_epochs * per_epoch)

    def memory_conflict(self) -> str | None:
        """Return why an update, or a colocated vLLM beside it, does not fit on a GPU, and what helps; `None` if both
        fit."""
        if self.unknown or not self.training.needs_gpu or (self.choice is not None and self.peak <= self.usable):
            return None
        total = self.gpu.memory_bytes
        if self.choice is None:
            return (
                f"A completion of {self.longest:,} tokens (prompt and max_completion_length) does not fit on "
                f"{self.on_gpu}, even if the backward pass computes everything again: {self._parts()}, of "
                f"{total / GIB:.0f} GiB. Lower max_completion_length{self._engine_remedy()}, {self._remedies()}."
            )
        if self.update > self.usable:
            return (
                f"An update needs {self.update / GIB:.0f} GiB on each GPU ({self._parts()}) of {total / GIB:.0f} on "
                f"{self.on_gpu}. To make it smaller, {self._remedies()}."
            )
        share = int(20 * (self.usable - self.beside_engine) / total) / 20  # rounded down to a twentieth
        remedies = [f"set it to {share:g} or less"] if share > 0 else []
        if not self.asleep:
            remedies.append("set vllm_enable_sleep_mode: true")
        if self.launch.sharding != "full":
            remedies.append("shard the training state (fsdp2.yaml)")
        return (
            f"vllm_gpu_memory_utilization={self.training.vllm_gpu_memory_utilization:g} takes "
            f"{self.engine / GIB:.0f} of {total / GIB:.0f} GiB on {self.on_gpu}, and training needs "
            f"{self.beside_engine / GIB:.0f} GiB. To make both fit, {_alternatives(remedies or ['use more GPUs'])}."
        )

    @property
    def on_gpu(self) -> str:
        return f"{'a' if self.gpu.name.startswith('B') else 'an'} {self.gpu.name}"

    def _parts(self) -> str:
        """Return the parts of the memory of an update that take a GiB or more."""
        sizes = {
            "training state": self.state,
            "rounded weights": self.casts,
            "activations": self.activations,
            "gathered weights": self.gathered,
            "collected gradient": self.collected,
            "vLLM": 0 if self.asleep else self.engine,
        }
        return ", ".join(f"{name} {size / GIB:.0f}" for name, size in sizes.items() if size >= GIB)

    def _engine_remedy(self) -> str:
        return " or vllm_gpu_memory_utilization" if self.engine and not self.asleep else ""

    def _remedies(self) -> str:
        """Return what makes an update smaller, of what is not done yet."""
        training, remedies = self.training, []
        if self.launch.sharding != "full":
            remedies.append("shard the training state over GPUs (accelerate_configs/fsdp2.yaml)")
        elif self.collected > self.state and not self.critic:
            remedies.append("use ZeRO-3 (accelerate_configs/zero3.yaml), without a collected gradient")
        else:
            remedies.append("use more GPUs")
        if self.recomputation != "full" and not self.chooses:
            remedies.append("set gradient_checkpointing: auto")
        if training.max_tokens_per_micro_batch is None and training.per_device_train_batch_size > 1:
            remedies.append("lower per_device_train_batch_size")
        if not self.recipe.model.use_peft:
            remedies.append("train an adapter (use_peft: true)")
        return _alternatives(remedies)

    def passes(self) -> Passes:
        """Return the passes of the policy over a generation batch in all updates on it."""
        workload = self.workload(self._mean_completion)
        return workload.passes(splits_groups=workload.splits_groups(self.tokens))

    def forward_passes(self) -> float:
        """Return the cost of all updates on a generation, in forward passes over it."""
        passes = self.passes().in_forward_passes(self.recomputation)
        if self.training.critic_scores_tokens:
            passes += cost.critic_passes(self.training.num_iterations).in_forward_passes(self.recomputation)
        return passes

    def learning(self, mean_length: int) -> tuple[float, float]:
        """Return FLOP and seconds of all updates on a generation, for a mean of `mean_length` tokens."""
        workload, step = self.workload(mean_length), self.step
        tokens = step.completions_per_generation * workload.computed(self.tokens)
        flops = seconds = 0.0
        models = [(self.shape, self.trained, self.passes())]
        if self.training.critic_scores_tokens:
            models.append((self.critic_shape, self.critic, cost.critic_passes(self.training.num_iterations)))
        for shape, trained, passes in models:
            forward = shape.forward_flops(tokens, workload.attended(self.tokens))
            flops += passes.in_forward_passes(self.recomputation) * forward
            seconds += workload.seconds_of(shape, passes, self.recomputation, self.tokens)
            processes = self.num_gpus if self.launch.sharding != "none" else 1
            seconds += step.updates_per_generation * cost.optimizer_seconds(trained / processes, self.gpu)
        return flops, seconds

    def generating(self, mean_length: int, num_gpus: int | None = None) -> float:
        """Return the seconds of a generation, on `num_gpus` of a server."""
        training, gpu = self.training, self.gpu
        if self.has_server:
            batch = islice(self._groups(mean_length), int(self.step.prompts_per_generation))
            return generate(batch, self._server(num_gpus or self.server_gpus))[0]
        share = training.vllm_gpu_memory_utilization if training.use_vllm else 0.5
        cache = max(share * gpu.memory_bytes - 2 * self.shape.parameters, 0.05 * gpu.memory_bytes)
        rows = self.step.completions_per_generation / self.num_gpus
        lengths = self.mean_prompt, mean_length, training.max_completion_length
        return cost.decoding_seconds(self.shape, rows, *lengths, kv_cache_bytes=cache, gpu=gpu)

    def _server(self, num_gpus: int) -> Engine:
        """Return the engine of `vllm serve` with the weights split over some GPUs, as recipes/launch starts it."""
        return engine_on(self.shape, self.gpu, num_gpus=num_gpus)

    def _groups(self, mean_length: int) -> Iterator[Group]:
        longest = self.training.max_completion_length
        return typical_groups(self.mean_prompt, mean_length, longest, self.step.num_generations)

    def seconds(self, mean_length: int, server_gpus: int | None = None, schedule: str | None = None) -> float:
        """Return the seconds from one generation to the next, with `server_gpus` of all GPUs for a server. With it
        generation and training follow a schedule: `"in turn"`, `"one batch late"`, or `"continuous"`."""
        learning = self.learning(mean_length)[1]
        if not self.has_server:
            generating = self.generating(mean_length)
            return max(learning, generating) if self.training.rollout_lag else learning + generating
        serving = server_gpus or self.server_gpus
        learning *= self.num_gpus / (self.num_gpus + self.server_gpus - serving)
        schedule = schedule or self.schedule
        if schedule != "continuous":
            generating = self.generating(mean_length, serving)
            return max(learning, generating) if schedule == "one batch late" else learning + generating
        updates = self.step.updates_per_generation
        groups = max(1, int(self.step.prompts_per_update))
        trainer = Trainer(groups, learning / updates, transfer_seconds(self.shape))
        staleness = self.training.max_staleness
        steps = max(_SIMULATED_STEPS, 2 * (staleness + 1))
        engine = self._server(serving)
        return updates * continuous(self._groups(mean_length), engine, trainer, steps, staleness).seconds

    def splits(self, mean_length: int) -> dict[str, tuple[int, float]]:
        """Return for each schedule how many of the GPUs train when it is fastest, and the seconds from one generation
        to the next. Tensor parallelism of a server divides the heads of attention, on one node."""
        total = self.num_gpus + self.server_gpus
        sizes = [size for size in (1, 2, 4, 8) if size < total and self.shape.num_heads % size == 0]
        fastest = {}
        for schedule in ("in turn", "one batch late", "continuous"):
            options = [(self.seconds(mean_length, size, schedule), total - size) for size in sizes]
            seconds, training = min(options)
            fastest[schedule] = (training, seconds)
        return fastest

    def gpu_hours(self, mean_length: int) -> float | None:
        """Return the GPU hours of the run for completions of `mean_length` tokens on average; `None` if unknown."""
        optimizer_steps = self.optimizer_steps()
        if self.unknown or optimizer_steps is None:
            return None
        num_gpus = self.num_gpus + self.server_gpus
        return self.step.rollouts(optimizer_steps) * self.seconds(mean_length) * num_gpus / 3600

    def text(self, mean_length: int) -> str:
        """Return the text that `plan` prints, for completions of `mean_length` tokens on average."""
        hours = self.gpu_hours(mean_length)
        splits = self.splits(mean_length) if self.server_gpus and hours is not None else {}
        shown = {"mean_length": mean_length, "hours": hours, "splits": splits}
        return render("plan.txt", plan=self, step=self.step, duration=_duration, rounded=_rounded, **shown)


def _compiles_layers(recipe: Recipe, launch: Launch, trains_routers: bool) -> bool:
    """Return whether the decoder layers of a recipe are compiled on a GPU."""
    training, model = recipe.training, recipe.model
    if not (training.is_exact and training.needs_gpu and training.compile_layers):
        return False
    is_zero3 = launch.kind == "DEEPSPEED" and launch.sharding == "full"
    quantization = "bitsandbytes" if model.load_in_4bit or model.load_in_8bit else None
    how = {"is_zero3": is_zero3, "quantization": quantization, "trains_routers": trains_routers}
    return obstacle_to_compilation(training, **how) is None


def _alternatives(names: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _rounded(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"


def _duration(hours: float, unit: str = "", digits: int = 1) -> str:
    for size, name in ((1.0, "hours"), (60.0, "minutes")):
        if hours * size >= 1:
            return f"{hours * size:.{digits if size == 1.0 else 1}f} {unit}{name}"
    return f"{3600 * hours:.2g} {unit}seconds"
