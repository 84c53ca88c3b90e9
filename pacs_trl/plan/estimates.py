"""What a recipe comes to on a launch, in lines of text: the step, the run, GPU memory and hours. Formulas are in
`cost.py`."""

import math

from ..recipe import Recipe
from . import cost
from .cost import GIB, H200, Gpu
from .launch import Launch
from .prompts import UNKNOWN, Prompts


_SHARED = "accelerate_configs/fsdp2.yaml, which shares the training state over the processes"

# Problems in the named training sets, for counting epochs.
_SET_SIZES = {"deepscaler": 40_315, "gsm8k": 7_473, "math": 7_500}


# Tokens of the question to a critic besides problem and response.
_TEMPLATE = 250


def _duration(hours: float, unit: str = "", digits: int = 1) -> str:
    """Hours in words; below one hour in minutes, below one minute in seconds."""
    if hours >= 1:
        return f"{hours:.{digits}f} {unit}hours"
    if 60 * hours >= 1:
        return f"{60 * hours:.1f} {unit}minutes"
    return f"{3600 * hours:.0f} {unit}seconds" if 3600 * hours >= 1 else f"under 1 {unit}second"


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 1 else f"{seconds:.2g} s"


def _count(tokens: float) -> str:
    return f"{tokens / 1e6:,.1f} million" if tokens >= 1e6 else f"{tokens:,.0f}"


def _size(size: float) -> str:
    """Bytes in words of one width."""
    return f"{size / GIB:6.1f} GiB" if size >= 0.1 * GIB else f"{size / 2**20:6.1f} MiB"


class Estimate:
    """
    What is known of a run beforehand. `dtype` is that of the loaded weights, `precision` that of activations (see
    [`~cost.ModelShape.activation_bytes`]). FSDP and DeepSpeed train float32 copies of half-precision weights, but only
    under mixed precision, for which the recipe wins over the accelerate file. `num_problems` is that of `prompts`; of
    a named set it is counted before overlong prompts are left out, of others it is `None`. Sizes are bytes on one GPU;
    there are none where the shape of a model is not known, the policy's or the critic's.
    """

    def __init__(self, recipe: Recipe, launch: Launch, gpu: Gpu = H200, prompts: Prompts = UNKNOWN):
        self.prompts = prompts
        training, data = recipe.training, recipe.data
        self.recipe, self.launch, self.training, self.step, self.gpu = recipe, launch, training, recipe.step, gpu
        self.usable = 0.95 * gpu.memory_bytes  # the rest goes to fragments, kernels and communication
        self.of_pacs, self.of_genac = hasattr(training, "pacs_beta"), recipe.run.method == "genac"
        mixed = training.bf16 or training.fp16 or launch.mixed_precision != "no"
        self.dtype = (training.model_init_kwargs or {}).get("dtype", recipe.model.dtype) or "float32"
        self.has_float32_copies = launch.kind in ("FSDP", "DEEPSPEED") and mixed
        self.precision = "autocast" if mixed else "float32"
        if self.dtype != "float32" or self.has_float32_copies:
            self.precision = "bfloat16"
        size = _SET_SIZES.get(data.dataset_name)
        size = size and max(0, size - data.eval_split_size)
        self.num_problems = prompts.number or (size and min(size, data.max_train_samples or size))
        self.longest_prompt = max(prompts.lengths) if prompts.lengths else data.max_prompt_length or 1024
        self.longest = self.longest_prompt + (training.max_completion_length or 0)
        # Packed rows of a group compute its prompt once; those of PPO meet by chance only.
        self.shares_prompts = self.of_pacs and training.padding_free != "never"
        policy = recipe.model.model_name_or_path
        names = policy, vars(training).get("critic_model_name_or_path") or policy
        self.shape, self.critic_shape = (cost.model_shape(name) for name in names)
        self.unknown = [name for name in names if cost.model_shape(name) is None]
        if not self.unknown:
            self._measure()

    def _measure(self) -> None:
        training, launch, shape, model = self.training, self.launch, self.shape, self.recipe.model
        self.trained = shape.parameters
        if model.use_peft:
            self.trained = cost.lora_parameters(shape, model.lora_r, model.lora_target_modules)
        of_critic = self.critic_shape
        self.critic = of_critic.parameters if self.recipe.run.method in ("ppo", "genac") else 0
        frozen_critic = 0
        if self.of_genac and training.critic_lora_r is not None:
            self.critic = cost.lora_parameters(of_critic, training.critic_lora_r, None)
            frozen_critic = of_critic.parameters
        self.has_snapshot = self.of_pacs and training.reference == "snapshot"
        self.has_kl_model = training.beta != 0 and not model.use_peft  # with LoRA it is the policy without its adapter

        frozen, weight_bytes = shape.parameters if model.use_peft else 0, 4 if self.dtype == "float32" else 2
        sharing = {"sharding": launch.sharding, "processes": launch.num_processes}
        copies = 4 * self.trained if self.has_snapshot and not training.reference_offload else 0
        copies += weight_bytes * shape.parameters if self.has_kl_model else 0
        self.state = cost.training_state_bytes(self.trained, frozen, frozen_bytes=weight_bytes, **sharing)
        self.state += copies / (launch.num_processes if launch.sharding == "full" else 1)
        self.state += cost.training_state_bytes(self.critic, frozen_critic, frozen_bytes=4, **sharing)

        self.tokens = self.of_pacs and training.max_tokens_per_micro_batch
        self.tokens = self.tokens or self._tokens(training.per_device_train_batch_size)
        kept = [(shape, self.tokens, "")]  # the critic's are gone when the policy learns
        if self.critic:
            rows, tokens = training.per_device_train_batch_size, self.longest
            if self.of_genac:
                rows, tokens = training.critic_batch_size or rows, tokens + _TEMPLATE + training.critic_max_new_tokens
            kept.append((of_critic, rows * tokens, " of the critic"))
        how = {"checkpointing": training.gradient_checkpointing, "precision": self.precision}
        self.activations, self.fullest = max(
            ((shape.activation_bytes(n, **how), f"{n} tokens{words}") for shape, n, words in kept),
            key=lambda own: own[0],
        )
        self.gathered = self.collected = self.engine = 0.0
        if launch.sharding == "full":  # two layers and the largest matrix outside of them, in bfloat16
            shapes = (shape, of_critic) if self.critic else (shape,)
            self.gathered = 2.0 * max(2 * s.layer_parameters + s.vocabulary * s.hidden for s in shapes)
        if launch.kind == "FSDP" and training.gradient_accumulation_steps > 1:  # reduced with the last micro-batch
            self.collected = 4.0 * (self.trained + self.critic)
        if training.use_vllm and training.vllm_mode == "colocate":
            self.engine = training.vllm_gpu_memory_utilization * self.gpu.memory_bytes
        self.asleep = self.engine > 0 and training.vllm_enable_sleep_mode
        self.update = self.state + self.activations + self.gathered + self.collected
        self.beside_engine = self.state if self.asleep else self.update  # at the fullest moment at which it is awake
        self.peak = max(self.beside_engine + self.engine, self.update)

    def _tokens(self, rows: int) -> int:
        """Of a micro-batch of the longest rows, as many of one group as there are; each with its prompt where groups
        are not known."""
        shares = self.shares_prompts and self.step is not None
        saved = rows - math.ceil(rows / self.step.num_generations) if shares else 0
        return rows * self.longest - saved * (self.longest_prompt - 1)

    def _rows_of_a_prompt(self, prompt: int, mean_length: int) -> int:
        """Rows of a group that a micro-batch holds on average, if they share a prompt of so many tokens."""
        if not self.shares_prompts:
            return 1
        fitting = self.training.per_device_train_batch_size
        if self.training.max_tokens_per_micro_batch:
            fitting = (self.tokens - prompt) // mean_length
        return max(1, min(fitting, self.step.num_generations))

    def optimizer_steps(self) -> int | None:
        """`max_steps`, or what the epochs of a named set come to; `None` if its size is not known."""
        if self.training.max_steps > 0:
            return self.training.max_steps
        if self.num_problems is None:
            return None
        generations = int(self.num_problems // self.step.prompts_per_generation)
        per_epoch = -(-generations * self.step.updates_per_generation // self.step.generations_per_update)
        return math.ceil(self.training.num_train_epochs * per_epoch)

    def memory_conflict(self) -> str | None:
        """Why updates do not fit into a GPU, whatever the engine, with what helps; `None` if they do."""
        if self.unknown or self.update <= self.usable:
            return None
        full, batch = self.launch.sharding == "full", self.training.per_device_train_batch_size
        remedies = [
            (not full, f"launch with {_SHARED}"),
            (full and self.state > 0.5 * self.usable, "launch on more GPUs"),
            (not self.training.gradient_checkpointing, "set gradient_checkpointing: true"),
            (self.activations > 0.2 * self.usable, f"lower per_device_train_batch_size={batch}"),
            (not self.recipe.model.use_peft, "train an adapter (use_peft: true)"),
        ]
        return (
            f"An update needs {self.update / GIB:.0f} GiB on each GPU (training state {self.state / GIB:.0f}, "
            "activations "
            f"{self.activations / GIB:.0f}), and an {self.gpu.name} has {self.gpu.memory_bytes / GIB:.0f}. To make it "
            f"fit: {'; or '.join(words for helps, words in remedies if helps)}."
        )

    def engine_conflict(self) -> str | None:
        """Why a colocated vLLM does not fit beside training, with what would; `None` if it does."""
        if self.unknown or self.engine == 0 or self.beside_engine + self.engine <= self.usable:
            return None
        training, total = self.training, self.gpu.memory_bytes
        share = int(20 * (self.usable - self.beside_engine) / total) / 20  # rounded down to a twentieth
        weights = 2 * self.shape.parameters / training.vllm_tensor_parallel_size / total
        remedies = [
            (share > weights, f"vllm_gpu_memory_utilization={share:g} or less"),
            (not self.asleep, "vllm_enable_sleep_mode: true, which frees it during updates"),
            (self.launch.sharding != "full", _SHARED),
        ]
        helping = [words for helps, words in remedies if helps] or ["vllm_mode: server"]
        return (
            f"vllm_gpu_memory_utilization={training.vllm_gpu_memory_utilization:g} takes {self.engine / GIB:.0f} GiB "
            "of an "
            f"{self.gpu.name}'s {total / GIB:.0f}, and training needs {self.beside_engine / GIB:.0f} GiB beside it. "
            f"Set {', or '.join(helping)}."
        )

    def lines(self, mean_length: int) -> list[str]:
        """The plan of a recipe with legal batch sizes, for completions of that many tokens on average."""
        optimizer_steps = self.optimizer_steps()
        lines = [*self._step(), *self._run(optimizer_steps, mean_length)]
        if self.unknown:
            return [
                *lines,
                "",
                f"Memory and time: not estimated, because the shape of {self.unknown[0]!r} is not known.",
            ]
        lines += self._memory() + self._disk(optimizer_steps, mean_length)
        return lines if optimizer_steps is None else lines + self._time(optimizer_steps, mean_length)

    def _step(self) -> list[str]:
        step = self.step
        updates = f"{step.updates_per_generation} optimizer steps per generation"
        if step.generations_per_update > 1:
            updates = f"one optimizer step per {step.generations_per_update} generations"
        return [
            "",
            "Step",
            f"  generation batch   {step.prompts_per_generation:.0f} prompts x {step.num_generations} completions = "
            f"{step.rows_per_generation} rows, {step.rows_per_generation // step.num_processes} per process",
            f"  optimizer step     {step.prompts_per_update:g} prompts x {step.num_generations} = "
            f"{step.rows_per_update} rows ({step.per_device_train_batch_size} rows x {step.num_processes} processes x "
            f"{step.gradient_accumulation_steps} accumulation steps)",
            f"  updates            {updates}",
        ]

    def _run(self, optimizer_steps: int | None, mean_length: int) -> list[str]:
        if optimizer_steps is None:
            why = "max_steps is not set and the number of prompts is not known"
            return ["", "Run", f"  optimizer steps    unknown: {why}"]
        rollouts, size, rows = self.step.rollouts(optimizer_steps), self.num_problems, self.step.rows_per_generation
        completions = rollouts * rows
        most = completions * self.training.max_completion_length
        epochs = rollouts * self.step.prompts_per_generation / size if size else 0
        measured = [] if self.prompts.number is None else [f"  prompts            {self.prompts.line}"]
        return [
            "",
            "Run",
            *measured,
            f"  optimizer steps    {optimizer_steps}",
            f"  rollout steps      {rollouts}{f' ({epochs:.1f} epochs of {size} problems)' if size else ''}",
            f"  completions        {completions:,}",
            f"  tokens generated   {_count(completions * mean_length)} at a mean of {mean_length} per completion, at "
            f"most {_count(most)}",
        ]

    def _memory(self) -> list[str]:
        state = "16 bytes per trained weight (float32 weight, gradient, two Adam moments)"
        state += ", and the KL reference" if self.has_kl_model else ""
        state += ", over all processes" if self.launch.sharding == "full" else ""
        kept = ", layer inputs and one whole layer" if self.training.gradient_checkpointing else ""
        engine = f"vllm_gpu_memory_utilization={self.training.vllm_gpu_memory_utilization}"
        fits = "fits" if self.peak < self.usable else "DOES NOT FIT"
        rows = [
            ("training state", self.state, state),
            ("activations", self.activations, f"micro-batch of {self.fullest}, {self.precision}{kept}"),
            ("gathered weights", self.gathered, "two layers and the output head"),
            ("collected gradient", self.collected, "of all weights, until the last micro-batch"),
            ("vLLM", self.engine, engine + ", freed during updates" * self.asleep),
            ("peak", self.peak, f"of {self.gpu.memory_bytes / GIB:.0f} GiB on an {self.gpu.name}: {fits}"),
        ]
        return [
            "",
            f"Memory per GPU (estimate, {self.shape.parameters / 1e9:.2f}e9 parameters)",
            *(f"  {name:18} {_size(size)}   {words}" for name, size, words in rows if size),
        ]

    def _disk(self, optimizer_steps: int | None, mean_length: int) -> list[str]:
        training, step = self.training, self.step
        if training.save_strategy == "no":
            return []
        is_float32 = self.dtype == "float32" or self.has_float32_copies or self.recipe.model.use_peft
        interrupted = training.save_steps % step.updates_per_generation != 0
        row_tokens = step.rows_per_generation * mean_length if interrupted else 0
        parts_of = {"weight_bytes": 4 if is_float32 else 2, "snapshot": self.has_snapshot, "row_tokens": row_tokens}
        size = cost.checkpoint_bytes(self.trained, **parts_of) + cost.checkpoint_bytes(self.critic)
        parts = ["weights", "two Adam moments"] + ["reference snapshot"] * self.has_snapshot
        parts += ["the same of the critic"] * bool(self.critic) + ["rows of a generation"] * interrupted
        total = ""
        if training.save_strategy == "steps" and training.save_steps >= 1 and optimizer_steps is not None:
            count = -(-optimizer_steps // int(training.save_steps))  # the last step is saved too
            count = min(count, training.save_total_limit or count)
            total = f"; {count} of them: {count * size / GIB:.0f} GiB" if count * size >= GIB else f"; {count} of them"
        return ["", "Disk", f"  checkpoint         {_size(size)}   {', '.join(parts)}{total}"]

    def _forward_passes(self) -> float:
        training, step = self.training, self.step
        layout = training.group_layout if self.of_pacs else "whole"
        does_not_fit = self.tokens < self._tokens(step.num_generations)  # a group into a micro-batch
        passes = cost.training_forward_equivalents(
            "pacs" if self.of_pacs else self.recipe.run.method,
            checkpointing=training.gradient_checkpointing,
            updates=step.updates_per_generation,
            iterations=training.num_iterations,
            correction=training.use_vllm and training.vllm_importance_sampling_correction,
            kl=training.beta != 0,
            reference=training.reference if self.of_pacs and training.proxy == "log_ratio" else "none",
            split=layout == "split" or layout == "auto" and does_not_fit,
        )
        return passes

    def learning(self, mean_length: int) -> tuple[float, float, float]:
        """FLOP and seconds of all that is learnt from a generation, and the forward passes that they are reckoned
        as."""
        training, shape, gpu, prompt = self.training, self.shape, self.gpu, self._prompt
        longest, rows = training.max_completion_length, self.step.rows_per_generation
        # GRPO is TRL's, which pads every row to the longest of the generation, and among so many one reaches the
        # limit.
        computed = attended = prompt + longest
        if self.recipe.run.method != "grpo":
            sharing = self._rows_of_a_prompt(prompt, mean_length)
            computed = (prompt - 1) / sharing + 1 + mean_length
            squares = prompt**2 / sharing + 2 * prompt * mean_length + cost.mean_square_length(mean_length, longest)
            attended = squares / computed
        passes = self._forward_passes()
        of_critic = 0
        if self.recipe.run.method == "ppo":  # judges the batch once, and learns as the policy does
            of_critic = training.num_iterations * (4 if training.gradient_checkpointing else 3) + 1
        flops = (passes - of_critic) * shape.forward_flops(rows * computed, attended)
        flops += of_critic * self.critic_shape.forward_flops(rows * computed, attended)
        return flops, flops / (self.launch.num_processes * gpu.flops * gpu.training_share), passes

    def _critic_time(self, mean_length: int) -> tuple[float, float, float, str]:
        """FLOP and seconds of learning from the answers of a generation, seconds of writing them, and all that in
        words. Of a completion every segment is counted that there may be, and a question holds half a completion on
        average."""
        training, shape, gpu, gpus = self.training, self.critic_shape, self.gpu, self.launch.num_processes
        longest = training.critic_max_new_tokens
        answers = self.step.rows_per_generation * (training.max_segments + bool(training.critic_extra_states))
        question, mean = _TEMPLATE + self._prompt + mean_length // 2, max(1, round(0.35 * longest))
        passes = training.num_iterations * (4 if training.gradient_checkpointing else 3)
        flops = passes * shape.forward_flops(answers * (question + mean), question + mean)
        learning, writing = flops / (gpus * gpu.flops * gpu.training_share), 0.0
        written = "written by a server, whose time is not counted"
        if not (training.use_vllm and training.vllm_mode == "server"):
            cache = 0.3 * gpu.memory_bytes
            how = {"kv_cache_bytes": cache, "gpu": gpu}
            writing = cost.decoding_seconds(shape, answers / gpus, question, mean, longest, **how)
            written = f"{_seconds(writing)} to write them"
        words = f"at most {answers:,} answers of {mean} tokens per rollout step; {written}"
        words += f", {_seconds(learning)} to learn from them"
        return flops, learning, writing, f"{words} ({passes:g} forward passes)"

    @property
    def _prompt(self) -> int:
        if self.prompts.lengths:
            return round(sum(self.prompts.lengths) / len(self.prompts.lengths))
        return min(self.recipe.data.max_prompt_length or 256, 256)

    def generating(self, mean_length: int) -> float:
        """Return the seconds in which a generation batch is generated; 0 with a server, which is not estimated."""
        training, gpus = self.training, self.launch.num_processes
        if training.use_vllm and training.vllm_mode == "server":
            return 0.0
        share = training.vllm_gpu_memory_utilization if training.use_vllm else 0.5
        cache = max(share * self.gpu.memory_bytes - 2 * self.shape.parameters, 0.05 * self.gpu.memory_bytes)
        lengths = self._prompt, mean_length, training.max_completion_length
        rows = self.step.rows_per_generation / gpus
        return cost.decoding_seconds(self.shape, rows, *lengths, kv_cache_bytes=cache, gpu=self.gpu)

    def gpu_hours(self, mean_length: int) -> float | None:
        """Return the GPU hours of the run for completions of `mean_length` tokens on average; `None` where unknown."""
        optimizer_steps = self.optimizer_steps()
        if self.unknown or optimizer_steps is None:
            return None
        seconds = self.learning(mean_length)[1] + self.generating(mean_length)
        if self.of_genac:
            seconds += sum(self._critic_time(mean_length)[1:3])
        return self.step.rollouts(optimizer_steps) * seconds * self.launch.num_processes / 3600

    def _time(self, optimizer_steps: int, mean_length: int) -> list[str]:
        training, gpus, gpu, prompt = self.training, self.launch.num_processes, self.gpu, self._prompt
        rollouts, sharing = self.step.rollouts(optimizer_steps), self._rows_of_a_prompt(prompt, mean_length)
        padding = ", padding included" * (self.recipe.run.method == "grpo")
        padding += f", a prompt once for {sharing} completions" * (sharing > 1)
        flops, learning, passes = self.learning(mean_length)
        generating, generation = self.generating(mean_length), "not counted: it depends on the server"
        if generating:
            generation = (
                f"{_seconds(generating)}: weights read once per token of the longest completion, keys and values of "
                f"all completions, at {gpu.decoding_share:.0%} of {gpu.bandwidth / 1e12:.3g} TB/s"
                f"{'' if training.use_vllm else ' (vLLM; without it many times slower)'}"
            )
        critic = []
        if self.of_genac:
            more_flops, more_learning, more_generating, words = self._critic_time(mean_length)
            flops, learning, generating = flops + more_flops, learning + more_learning, generating + more_generating
            critic = [f"  critic             {words}"]
        gpu_hours, reuse, times = self.gpu_hours(mean_length), [], training.num_iterations
        hours = gpu_hours / gpus
        if times > 1 and generating:
            fresh = rollouts * (learning + times * generating) / 3600
            reuse = [
                f"  reuse              {times} updates on every completion: as many with num_iterations=1 would draw "
                f"{times} times as many completions, {_duration(fresh)} instead of {_duration(hours)}"
            ]
        return [
            "",
            f"Time on {gpu.name} (estimate; grading, weight transfer and saving not counted; prompts of {prompt} "
            "tokens)",
            f"  learning           {flops:.1e} FLOP per rollout step: {passes:g} forward passes of 2 x parameters x "
            "tokens "
            f"plus attention{padding}; {_seconds(learning)} at {gpu.training_share:.0%} of {gpu.flops / 1e12:.0f} "
            "TFLOP/s",
            f"  generation         {generation}",
            *critic,
            *reuse,
            f"  all                {_duration(hours)} on {gpus} GPU{'s' * (gpus > 1)}, "
            f"{_duration(gpu_hours, 'GPU ', 0)}, {rollouts * flops:.1e} FLOP for learning",
        ]
