"""What a recipe comes to, in lines of text: the step, the run, GPU memory and hours. Formulas are in `cost.py`."""

import math
from dataclasses import dataclass

from .cost import (
    GIB,
    H200,
    ModelShape,
    decoding_seconds,
    lora_parameters,
    model_shape,
    training_forward_equivalents,
    training_state_bytes,
)
from .launch import Launch
from .recipe import Recipe


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
    return [*_memory(recipe, shape, launch), *_time(recipe, shape, step, launch, mean_length)]


def _state_bytes(recipe: Recipe, shape: ModelShape, launch: Launch) -> float:
    model, training = recipe.model, recipe.training
    sharing = {"sharding": launch.sharding, "processes": launch.num_processes}
    weight_bytes = 4 if weights_dtype(recipe) == "float32" else 2
    trained, frozen = shape.parameters, 0
    if model.use_peft:
        trained = lora_parameters(shape, model.lora_r, model.lora_target_modules or ["all-linear"])
        frozen = shape.parameters
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
    engine: float
    asleep: bool
    tokens: int

    @property
    def training(self) -> float:
        """What there is besides the engine at the fullest moment at which the engine is awake."""
        return self.state if self.asleep else self.state + self.activations + self.gathered

    @property
    def peak(self) -> float:
        return max(self.training + self.engine, self.state + self.activations + self.gathered)


def _memory_use(recipe: Recipe, shape: ModelShape, launch: Launch) -> _MemoryUse:
    training = recipe.training
    longest = (recipe.data.max_prompt_length or 1024) + training.max_completion_length
    tokens = training.per_device_train_batch_size * longest
    tokens = getattr(training, "max_tokens_per_micro_batch", None) or tokens
    gathered = 0.0
    if launch.sharding == "full":  # two layers and the largest matrix outside of them, in bfloat16
        gathered = 2 * (2 * shape.layer_parameters + shape.vocabulary * shape.hidden)
    colocated = training.use_vllm and training.vllm_mode == "colocate"
    return _MemoryUse(
        state=_state_bytes(recipe, shape, launch),
        activations=shape.activation_bytes(tokens, checkpointing=training.gradient_checkpointing),
        gathered=gathered,
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
        f"  activations        {activations / GIB:6.1f} GiB   micro-batch of {tokens} tokens, bfloat16"
        f"{', layer inputs and one whole layer' if training.gradient_checkpointing else ''}",
        *([f"  gathered weights   {gathered / GIB:6.1f} GiB   two layers and the output head"] if gathered else []),
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
    length = prompt_length + mean_length
    # TRL's trainers pad every row to the longest of the generation, and among so many one reaches the limit.
    computed = length if method == "pacs" else prompt_length + training.max_completion_length
    passes = _forward_passes(recipe, step)
    flops = passes * shape.forward_flops(step.rows_per_generation * computed, computed)
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
            length,
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
