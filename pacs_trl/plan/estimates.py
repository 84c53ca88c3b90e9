"""What a recipe comes to, in lines of text: the step, the run, GPU memory and hours. Formulas are in `cost.py`."""

import math
from dataclasses import dataclass

from ..recipe import Recipe
from .cost import (
    GIB,
    H200,
    ModelShape,
    checkpoint_bytes,
    decoding_seconds,
    lora_parameters,
    mean_square_length,
    model_shape,
    training_forward_equivalents,
    training_state_bytes,
)
from .launch import Launch


# The rest of a GPU's memory goes to fragments, kernels and communication.
_USABLE = 0.95

# Problems in the named training sets, for counting epochs.
_SET_SIZES = {"deepscaler": 40_315, "gsm8k": 7_473, "math": 7_500}


@dataclass(frozen=True)
class Step:
    """
    Sizes of a generation and of an optimizer step, in completions unless said otherwise. One of `updates_per_generation`
    and `generations_per_update` is 1.
    """

    num_processes: int
    num_generations: int
    rows_per_generation: int
    rows_per_update: int
    updates_per_generation: int
    micro_batches_per_update: int
    generations_per_update: int = 1

    def rollouts(self, optimizer_steps: int) -> int:
        """Generations that so many optimizer steps learn from, the last one perhaps in part."""
        return -(-optimizer_steps * self.generations_per_update // self.updates_per_generation)


def weights_dtype(recipe: Recipe) -> str:
    """The dtype that the policy's weights are loaded in."""
    return (recipe.training.model_init_kwargs or {}).get("dtype", recipe.model.dtype) or "float32"


def is_mixed_precision(recipe: Recipe, launch: Launch) -> bool:
    """What the recipe asks for wins over the accelerate file."""
    return recipe.training.bf16 or recipe.training.fp16 or launch.mixed_precision != "no"


def has_float32_copies(recipe: Recipe, launch: Launch) -> bool:
    """FSDP and DeepSpeed train float32 copies of half-precision weights, but only under mixed precision."""
    return launch.kind in ("FSDP", "DEEPSPEED") and is_mixed_precision(recipe, launch)


def _precision(recipe: Recipe, launch: Launch) -> str:
    """In which precision activations are kept, see [`~cost.ModelShape.activation_bytes`]."""
    if weights_dtype(recipe) != "float32" or has_float32_copies(recipe, launch):
        return "bfloat16"
    return "autocast" if is_mixed_precision(recipe, launch) else "float32"


def describe(recipe: Recipe, step: Step, mean_length: int) -> list[str]:
    """What a step is and what the run adds up to."""
    training = recipe.training
    prompts = step.rows_per_generation // step.num_generations
    updates = f"{step.updates_per_generation} optimizer steps per generation"
    if step.generations_per_update > 1:
        updates = f"one optimizer step per {step.generations_per_update} generations"
    lines = [
        "",
        "Step",
        f"  generation batch   {prompts} prompts x {step.num_generations} completions = {step.rows_per_generation} rows, "
        f"{step.rows_per_generation // step.num_processes} per process",
        f"  optimizer step     {step.rows_per_update / step.num_generations:g} prompts x {step.num_generations} = "
        f"{step.rows_per_update} rows ({training.per_device_train_batch_size} rows x {step.num_processes} processes x "
        f"{step.micro_batches_per_update} accumulation steps)",
        f"  updates            {updates}",
        "",
        "Run",
    ]
    optimizer_steps = planned_optimizer_steps(recipe, step)
    if optimizer_steps is None:
        return [*lines, "  optimizer steps    unknown: max_steps is not set and the number of prompts is not known"]
    rollouts = step.rollouts(optimizer_steps)
    completions = rollouts * step.rows_per_generation
    size = num_problems(recipe)
    epochs = f" ({rollouts * prompts / size:.1f} epochs of {size} problems)" if size else ""
    return [
        *lines,
        f"  optimizer steps    {optimizer_steps}",
        f"  rollout steps      {rollouts}{epochs}",
        f"  completions        {completions:,}",
        f"  tokens generated   {completions * mean_length / 1e6:,.1f} million at a mean of {mean_length} per completion, at "
        f"most {completions * training.max_completion_length / 1e6:,.1f} million",
    ]


def num_problems(recipe: Recipe) -> int | None:
    """Problems that are trained on, before overlong prompts are left out; `None` if the set is not a named one."""
    size = _SET_SIZES.get(recipe.data.dataset_name)
    if size is None:
        return None
    size -= recipe.data.eval_split_size
    return min(size, recipe.data.max_train_samples or size)


def planned_optimizer_steps(recipe: Recipe, step: Step) -> int | None:
    """`max_steps`, or what the epochs of a named set come to; `None` if its size is not known."""
    if recipe.training.max_steps > 0:
        return recipe.training.max_steps
    size = num_problems(recipe)
    if size is None:
        return None
    generations = size * step.num_generations // step.rows_per_generation
    per_epoch = -(-generations * step.updates_per_generation // step.generations_per_update)
    return math.ceil(recipe.training.num_train_epochs * per_epoch)


def estimate(recipe: Recipe, step: Step, launch: Launch, mean_length: int) -> list[str]:
    """GPU memory per process, floating-point operations and hours on H200, with their formulas."""
    name = recipe.model.model_name_or_path
    shape = model_shape(name)
    if shape is None:
        return ["", f"Memory and time: not estimated, because the shape of {name!r} is not known."]
    return [
        *_memory(recipe, shape, launch),
        *_disk(recipe, shape, step, launch, mean_length),
        *_time(recipe, shape, step, launch, mean_length),
    ]


def _trained_parameters(recipe: Recipe, shape: ModelShape) -> int:
    model = recipe.model
    if model.use_peft:
        return lora_parameters(shape, model.lora_r, model.lora_target_modules or ["all-linear"])
    return shape.parameters


def _state_bytes(recipe: Recipe, shape: ModelShape, launch: Launch) -> float:
    model, training = recipe.model, recipe.training
    sharing = {"sharding": launch.sharding, "processes": launch.num_processes}
    weight_bytes = 4 if weights_dtype(recipe) == "float32" else 2
    trained, frozen = _trained_parameters(recipe, shape), shape.parameters if model.use_peft else 0
    state = training_state_bytes(trained, frozen, frozen_bytes=weight_bytes, **sharing)
    copies = 0.0
    if getattr(training, "reference", "rollout") == "snapshot" and not training.reference_offload:
        copies += 4 * trained
    if _has_kl_model(recipe):
        copies += weight_bytes * shape.parameters
    state += copies / (launch.num_processes if launch.sharding == "full" else 1)
    if recipe.run.method == "ppo":
        state += training_state_bytes(shape.parameters, 0, frozen_bytes=0, **sharing)
    return state


def _has_kl_model(recipe: Recipe) -> bool:
    """Whether the KL term refers to a model of its own. With LoRA that is the policy without its adapter."""
    return recipe.training.beta != 0 and not recipe.model.use_peft


@dataclass(frozen=True)
class _MemoryUse:
    """Bytes on one GPU; `engine` is 0 without a colocated vLLM, `tokens` is the size of the micro-batch."""

    state: float
    activations: float
    gathered: float
    collected: float  # gradients of whole weights between micro-batches
    engine: float
    asleep: bool
    tokens: int

    @property
    def training(self) -> float:
        """What there is besides the engine at the fullest moment at which the engine is awake."""
        return self.state if self.asleep else self.update

    @property
    def update(self) -> float:
        return self.state + self.activations + self.gathered + self.collected

    @property
    def peak(self) -> float:
        return max(self.training + self.engine, self.update)


def _memory_use(recipe: Recipe, shape: ModelShape, launch: Launch) -> _MemoryUse:
    training = recipe.training
    longest = (recipe.data.max_prompt_length or 1024) + training.max_completion_length
    tokens = training.per_device_train_batch_size * longest
    tokens = getattr(training, "max_tokens_per_micro_batch", None) or tokens
    gathered = 0.0
    if launch.sharding == "full":  # two layers and the largest matrix outside of them, in bfloat16
        gathered = 2 * (2 * shape.layer_parameters + shape.vocabulary * shape.hidden)
    collected = 0.0
    if launch.kind == "FSDP" and training.gradient_accumulation_steps > 1:  # reduced with the last micro-batch only
        collected = 4.0 * _trained_parameters(recipe, shape)
        collected += 4.0 * shape.parameters * (recipe.run.method == "ppo")
    colocated = training.use_vllm and training.vllm_mode == "colocate"
    checkpointing = {"checkpointing": training.gradient_checkpointing}
    return _MemoryUse(
        state=_state_bytes(recipe, shape, launch),
        activations=shape.activation_bytes(tokens, precision=_precision(recipe, launch), **checkpointing),
        gathered=gathered,
        collected=collected,
        engine=training.vllm_gpu_memory_utilization * H200.memory_bytes if colocated else 0.0,
        asleep=colocated and training.vllm_enable_sleep_mode,
        tokens=tokens,
    )


def engine_conflict(recipe: Recipe, launch: Launch) -> str | None:
    """Why a colocated vLLM does not fit beside training by the estimate, with what would; `None` if it does."""
    shape = model_shape(recipe.model.model_name_or_path)
    if shape is None:
        return None
    use = _memory_use(recipe, shape, launch)
    room = _USABLE * H200.memory_bytes
    if use.engine == 0 or use.training + use.engine <= room:
        return None
    share = int(20 * (room - use.training) / H200.memory_bytes) / 20  # rounded down to a twentieth
    weights = 2 * shape.parameters / recipe.training.vllm_tensor_parallel_size / H200.memory_bytes
    remedies = [] if share <= weights else [f"vllm_gpu_memory_utilization={share:g} or less"]
    if not use.asleep:
        remedies.append("vllm_enable_sleep_mode: true, which frees it during updates")
    if launch.sharding != "full":
        remedies.append("accelerate_configs/fsdp2.yaml, which shares the training state over the processes")
    return (
        f"vllm_gpu_memory_utilization={recipe.training.vllm_gpu_memory_utilization:g} takes {use.engine / GIB:.0f} GiB of an "
        f"H200's {H200.memory_bytes / GIB:.0f}, and training needs {use.training / GIB:.0f} GiB beside it. Set "
        f"{', or '.join(remedies or ['vllm_mode: server'])}."
    )


def memory_conflict(recipe: Recipe, launch: Launch) -> str | None:
    """Why updates do not fit into an H200 by the estimate, whatever the engine, with what helps; `None` if they do."""
    shape = model_shape(recipe.model.model_name_or_path)
    if shape is None:
        return None
    training, use = recipe.training, _memory_use(recipe, shape, launch)
    room = _USABLE * H200.memory_bytes
    if use.update <= room:
        return None
    remedies = []
    if launch.sharding != "full":
        remedies.append(
            "launch with accelerate_configs/fsdp2.yaml, which shares the training state over the processes"
        )
    elif use.state > 0.5 * room:
        remedies.append("launch on more GPUs")
    if not training.gradient_checkpointing:
        remedies.append("set gradient_checkpointing: true")
    if use.activations > 0.2 * room:
        remedies.append(f"lower per_device_train_batch_size={training.per_device_train_batch_size}")
    if not recipe.model.use_peft:
        remedies.append("train an adapter (use_peft: true)")
    return (
        f"An update needs {use.update / GIB:.0f} GiB on each GPU (training state {use.state / GIB:.0f}, activations "
        f"{use.activations / GIB:.0f}), and an H200 has {H200.memory_bytes / GIB:.0f}. To make it fit: {'; or '.join(remedies)}."
    )


def _disk(recipe: Recipe, shape: ModelShape, step: Step, launch: Launch, mean_length: int) -> list[str]:
    training, trained = recipe.training, _trained_parameters(recipe, shape)
    if training.save_strategy == "no":
        return []
    is_float32 = weights_dtype(recipe) == "float32" or has_float32_copies(recipe, launch) or recipe.model.use_peft
    interrupted = training.save_steps % step.updates_per_generation != 0
    snapshot = getattr(training, "reference", "rollout") == "snapshot"
    critic = shape.parameters if recipe.run.method == "ppo" else 0
    size = checkpoint_bytes(
        trained,
        weight_bytes=4 if is_float32 else 2,
        snapshot=snapshot,
        row_tokens=step.rows_per_generation * mean_length if interrupted else 0,
    ) + checkpoint_bytes(critic)
    parts = ["weights", "two Adam moments"]
    parts += ["reference snapshot"] * snapshot + ["the same of the critic"] * bool(critic)
    parts += ["rows of a generation"] * interrupted
    optimizer_steps, count = planned_optimizer_steps(recipe, step), None
    if training.save_strategy == "steps" and training.save_steps >= 1 and optimizer_steps is not None:
        count = -(-optimizer_steps // int(training.save_steps))  # the last step is saved too
        count = min(count, training.save_total_limit or count)
    total = "" if count is None else f"; {count} of them: {count * size / GIB:.0f} GiB"
    return ["", "Disk", f"  checkpoint         {size / GIB:6.1f} GiB   {', '.join(parts)}{total}"]


def _memory(recipe: Recipe, shape: ModelShape, launch: Launch) -> list[str]:
    training = recipe.training
    use = _memory_use(recipe, shape, launch)
    state, activations, gathered, engine = use.state, use.activations, use.gathered, use.engine
    colocated, asleep, tokens, peak = engine > 0, use.asleep, use.tokens, use.peak
    fits = "fits" if peak < _USABLE * H200.memory_bytes else "DOES NOT FIT"
    return [
        "",
        f"Memory per GPU (estimate, {shape.parameters / 1e9:.2f}e9 parameters)",
        f"  training state     {state / GIB:6.1f} GiB   16 bytes per trained weight (float32 weight, gradient, two Adam "
        f"moments){', and the KL reference' if _has_kl_model(recipe) else ''}"
        f"{', over all processes' if launch.sharding == 'full' else ''}",
        f"  activations        {activations / GIB:6.1f} GiB   micro-batch of {tokens} tokens, {_precision(recipe, launch)}"
        f"{', layer inputs and one whole layer' if training.gradient_checkpointing else ''}",
        *([f"  gathered weights   {gathered / GIB:6.1f} GiB   two layers and the output head"] if gathered else []),
        *(
            [f"  collected gradient {use.collected / GIB:6.1f} GiB   of all weights, until the last micro-batch"]
            if use.collected
            else []
        ),
        *(
            [
                f"  vLLM               {engine / GIB:6.1f} GiB   vllm_gpu_memory_utilization="
                f"{training.vllm_gpu_memory_utilization}{', freed during updates' if asleep else ''}"
            ]
            if colocated
            else []
        ),
        f"  peak               {peak / GIB:6.1f} GiB   of {H200.memory_bytes / GIB:.0f} GiB on an H200: {fits}",
    ]


def _forward_passes(recipe: Recipe, step: Step) -> float:
    training, method = recipe.training, recipe.run.method
    only_pacs = {}
    if method == "pacs":
        longest = (recipe.data.max_prompt_length or 1024) + training.max_completion_length
        room = training.per_device_train_batch_size
        if training.max_tokens_per_micro_batch is not None:
            room = training.max_tokens_per_micro_batch // longest
        whole = training.group_layout == "auto" and room >= step.num_generations
        only_pacs = {
            "reference": training.reference if training.proxy == "log_ratio" else "none",
            "split": not whole and training.group_layout != "whole",
        }
    return training_forward_equivalents(
        method,
        checkpointing=training.gradient_checkpointing,
        updates=step.updates_per_generation,
        iterations=training.num_iterations,
        correction=training.use_vllm and training.vllm_importance_sampling_correction,
        kl=training.beta != 0,
        **only_pacs,
    )


def _time(recipe: Recipe, shape: ModelShape, step: Step, launch: Launch, mean_length: int) -> list[str]:
    training, method = recipe.training, recipe.run.method
    optimizer_steps = planned_optimizer_steps(recipe, step)
    if optimizer_steps is None:
        return []
    rollouts = step.rollouts(optimizer_steps)
    prompt_length = min(recipe.data.max_prompt_length or 256, 256)
    # TRL's trainers pad every row to the longest of the generation, and among so many one reaches the limit.
    computed = attended = prompt_length + training.max_completion_length
    if method == "pacs":
        computed = prompt_length + mean_length
        squared = mean_square_length(mean_length, training.max_completion_length)
        attended = (prompt_length**2 + 2 * prompt_length * mean_length + squared) / computed
    passes = _forward_passes(recipe, step)
    flops = passes * shape.forward_flops(step.rows_per_generation * computed, attended)
    learning = flops / (launch.num_processes * H200.flops * H200.training_share)
    share = training.vllm_gpu_memory_utilization if training.use_vllm else 0.5
    cache = max(share * H200.memory_bytes - 2 * shape.parameters, 0.05 * H200.memory_bytes)
    served = training.use_vllm and training.vllm_mode == "server"
    generating = (
        0.0
        if served
        else decoding_seconds(
            shape,
            step.rows_per_generation / launch.num_processes,
            prompt_length,
            mean_length,
            training.max_completion_length,
            kv_cache_bytes=cache,
        )
    )
    hours = rollouts * (learning + generating) / 3600
    generation = (
        f"{generating:.0f} s: weights read once per token of the longest completion, keys and values of all completions, at "
        f"{H200.decoding_share:.0%} of {H200.bandwidth / 1e12:.1f} TB/s"
        f"{'' if training.use_vllm else ' (vLLM; without it many times slower)'}"
    )
    return [
        "",
        f"Time on H200 (estimate; grading, weight transfer and saving not counted; prompts of {prompt_length} tokens)",
        f"  learning           {flops:.1e} FLOP per rollout step: {passes:g} forward passes of 2 x parameters x tokens plus "
        f"attention{'' if method == 'pacs' else ', padding included'}; {learning:.0f} s at {H200.training_share:.0%} of {H200.flops / 1e12:.0f} TFLOP/s",
        f"  generation         {'not counted: it depends on the server' if served else generation}",
        f"  all                {hours:.1f} hours on {launch.num_processes} GPU{'s' * (launch.num_processes > 1)}, "
        f"{hours * launch.num_processes:.0f} GPU hours, {rollouts * flops:.1e} FLOP for learning",
    ]
