"""Optimizer steps on one GPU: time and memory compared with TRL's GRPO and with `pacs-trl plan`, and a soak test.

`make gpu-check` runs these measurements and writes them to its report. Weights are random and nothing is downloaded.
The number of completions per forward pass is the largest that fits according to `plan`. The exact update, which
packs completions, gets the same limit in tokens.
"""

import gc
import statistics
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, TrainerCallback
from transformers.utils import is_flash_attn_2_available
from trl import GRPOTrainer as TRLTrainer

from benchmarks.recorded import (
    NUM_GENERATIONS,
    PROMPT_TOKENS,
    Runner,
    Size,
    build_model,
    config_of,
    labels_of,
    matmul_rate,
    recorded_rollouts,
    shape_of,
)
from benchmarks.shared_engine import share_engine
from experiments.miniature.tasks import problems
from experiments.miniature.tokenizer import build_tokenizer
from pacs_trl import GRPOTrainer, PACSConfig, PACSTrainer
from pacs_trl.plan.cost import GPUS, Gpu, ModelShape
from pacs_trl.plan.estimates import Costs, Estimate
from pacs_trl.plan.launch import Launch
from pacs_trl.plan.sharding import Sharding
from pacs_trl.recipe import Recipe
from pacs_trl.rewards import math_reward
from pacs_trl.rollouts.checkpoint_files import last_checkpoint


COLOCATED: dict[str, Any] = {
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_max_model_length": 64,
    "vllm_gpu_memory_utilization": 0.3,
}
LORA: dict[str, Any] = {"r": 16, "target_modules": "all-linear"}
MAX_COMPLETION = 8
TRAINERS = {"pacs": PACSTrainer, "grpo": GRPOTrainer, "trl_grpo": TRLTrainer}


def measure_steps(
    device: str,
    directory: Path,
    model: str,
    checkpointing: bool,
    *,
    methods: tuple[str, ...] = tuple(TRAINERS),
    completion_max: int = 8192,
    num_groups: int = 4,
    repeats: int = 5,
    matmul: int = 8192,
    lora: bool = False,
) -> list[dict[str, Any]]:
    """Measure optimizer steps of each method on the same rollouts; PACS also with half of the groups uniform."""
    shape = shape_of(model)
    config_of(shape).save_pretrained(directory / "model")
    rate = matmul_rate(device, matmul, torch.bfloat16 if device == "cuda" else torch.float32)
    size = Size(shape, completion_max, NUM_GENERATIONS, num_groups, bf16=device == "cuda")
    table = []
    for method in methods:
        settings = {"method": method, "checkpointing": checkpointing, "lora": lora}
        settings |= {"directory": directory, "device": device}
        for row in _largest_that_fits(size, repeats, rate, settings):
            name = model + (" LoRA" if lora else "")
            named = {"model": name, "method": method, "checkpointing": "yes" if checkpointing else "no"}
            table.append(named | row)
    trl = next((row["seconds"] for row in table if row["method"] == "trl_grpo"), None)
    for row in table:
        row["times as fast as TRL's GRPO"] = trl / row["seconds"] if trl else None
    return table


def _largest_that_fits(size: Size, repeats: int, rate: float, settings: dict) -> list[dict[str, Any]]:
    """Measure with the largest number of completions per forward pass that fits according to `plan`."""
    rows, gpu = NUM_GENERATIONS, known_gpu(rate, settings["device"])
    while (costs := costs_of(size, rows, gpu, **settings)).update > costs.usable and rows > 1:
        rows //= 2
    measured = _steps(size, rows, repeats, rate, **settings)
    gc.collect()  # the next method needs the memory
    if settings["device"] == "cuda":
        torch.cuda.empty_cache()
    planned = planned_beside(costs, measured[0], size.completion_max, settings["device"])
    return [{"rows per forward": rows, **row, **planned} for row in measured]


def planned_beside(costs: Costs, measured: dict[str, Any], completion_max: int, device: str) -> dict[str, Any]:
    """
    Compare the estimate of a step without uniform groups with the measurement.

    Errors are in percent, positive if `plan` overestimates. With `factor on activations` and `factor on time` the
    estimate would match the measurement.
    """
    activations = costs.activations + costs.rounded_weights + costs.gathered + costs.collected
    state = costs.state if device == "cuda" else 0.0  # on a CPU only tensors saved by autograd are measured
    _, seconds = costs.update_flops_and_seconds(round(0.35 * completion_max))
    return {
        "plan GiB": (state + activations) / 2**30,
        "error of memory, %": 100 * ((state + activations) / 2**30 / measured["GiB"] - 1),
        "factor on activations": (measured["GiB"] * 2**30 - state) / activations,
        "plan s": seconds,
        "error of time, %": 100 * (seconds / measured["seconds"] - 1),
        "factor on time": measured["seconds"] / seconds,
    }


def known_gpu(rate: float, device: str) -> Gpu:
    """Return the GPU's entry in `plan`; an unknown GPU gets its memory, the measured matmul rate, and a bandwidth
    in proportion to that of an H100."""
    bandwidth = rate * GPUS["h100-80"].bandwidth / GPUS["h100-80"].flops
    if device == "cpu":
        return Gpu("this machine", 2**40, rate, bandwidth)
    properties = torch.cuda.get_device_properties(0)
    known = [gpu for gpu in GPUS.values() if gpu.name in properties.name]
    return known[0] if known else Gpu(properties.name, properties.total_memory, rate, bandwidth)


def costs_of(
    size: Size,
    rows: int,
    gpu: Gpu,
    *,
    method: str,
    checkpointing: bool | str,
    lora: bool,
    directory: Path,
    device: str,
    **more: Any,
) -> Costs:
    """Return the costs that `pacs-trl plan` estimates for an optimizer step; the model config is in `directory/model`.
    `more` are further keys of the recipe."""
    settings: dict[str, Any] = {
        "method": method.removeprefix("trl_"),
        "model_name_or_path": str(directory / "model"),
        "dataset_name": "addition.jsonl",  # not read
        "prompt_instruction": "",
        "max_prompt_length": PROMPT_TOKENS[1],
        "max_steps": 1,
        "output_dir": str(directory),
        "num_generations": NUM_GENERATIONS,
        "max_completion_length": size.completion_max,
        "gradient_checkpointing": checkpointing,
        "bf16": size.bf16,
        "use_cpu": device == "cpu",
        "report_to": "none",
        "gradient_accumulation_steps": size.num_groups,
        **_batch(size, rows, method),
    }
    if method == "trl_grpo":
        settings["gradient_accumulation_steps"] = size.num_groups * NUM_GENERATIONS // rows
        settings["packing"] = "never"  # TRL's update pads
    if lora:
        settings |= {"use_peft": True, "lora_r": LORA["r"], "lora_target_modules": [LORA["target_modules"]]}
        settings |= {"dtype": "bfloat16"}
    recipe = Recipe.from_settings(settings | more, 1)
    costs = Estimate(recipe, Launch(1, Sharding(), "one process"), gpu).costs
    assert costs is not None  # the shape is known
    return costs


def _batch(size: Size, rows: int, method: str) -> dict[str, int]:
    if method == "trl_grpo":
        return {"per_device_train_batch_size": rows}
    tokens = rows * (PROMPT_TOKENS[1] + size.completion_max)
    return {"per_device_train_batch_size": NUM_GENERATIONS, "max_tokens_per_micro_batch": tokens}


def _steps(
    size: Size, rows: int, repeats: int, rate: float, *, method, checkpointing, lora, directory, device
) -> list[dict[str, Any]]:
    rollouts = recorded_rollouts(size, size.num_groups)
    attention = "flash_attention_2" if device == "cuda" and is_flash_attn_2_available() else "sdpa"
    runner = Runner(
        TRAINERS[method],
        size,
        rollouts,
        labels_of(size.num_groups, 0.0),
        device,
        output_dir=directory,
        attention=attention,
        peft_config=LoraConfig(**LORA, task_type="CAUSAL_LM") if lora else None,
        gradient_checkpointing=checkpointing,
        **_batch(size, rows, method),
    )
    peak, table = runner.peak_memory(), []
    flops, tokens = model_flops(size.shape, rollouts)
    for uniform in (0.0, 0.5) if method == "pacs" else (0.0,):
        runner.label(labels_of(size.num_groups, uniform))
        seconds = [runner.step() for _ in range(repeats)]
        median = statistics.median(seconds)
        table.append(
            {
                "uniform": uniform,
                "attention": attention,
                "seconds": median,
                "fastest": min(seconds),
                "slowest": max(seconds),
                "tokens/s": tokens / median,
                "utilization": flops / median / rate if uniform == 0 else None,
                "matmul TFLOP/s": rate / 1e12,
                "GiB": peak / 2**30,
                "finite": all(bool(weight.isfinite().all()) for weight in runner.model.parameters()),
            }
        )
    return table


def model_flops(shape: ModelShape, rollouts: list[dict]) -> tuple[float, int]:
    """Return the FLOPs of a forward and backward pass, with attention and shared prompts counted once, and the number
    of tokens with all prompts."""
    prompts = {tuple(row["prompt_ids"]) for row in rollouts}
    lengths = [len(row["prompt_ids"]) + len(row["completion_ids"]) for row in rollouts]
    once = sum(map(len, prompts)) + sum(len(row["completion_ids"]) for row in rollouts)
    attended = sum(n * n for n in lengths) / sum(lengths)
    return 3 * shape.forward_flops(once, attended), sum(lengths)


def even_start(completion_ids, **kwargs) -> list[float | None]:
    """Reward an even first token, which random weights learn in seconds."""
    return [float(ids[0] % 2 == 0) for ids in completion_ids]


def save_model(directory: Path, model: str) -> str:
    """Save a model of this shape with random weights and the miniature tokenizer, whose vocabulary size it uses."""
    if not (directory / "tokenizer_config.json").is_file():
        tokenizer = build_tokenizer()
        ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        shape = ModelShape(**{**vars(shape_of(model)), "vocabulary": len(tokenizer)})
        build_model(shape, "cpu", bos_token_id=None, **ends).save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    return str(directory)


def trainer_on(checkpoint: str, output_dir: Path, device: str, *, callbacks=(), **settings: Any) -> PACSTrainer:
    """Build a float32 trainer on additions. The reward is `even_start`; the verifier runs with weight 0."""
    defaults: dict[str, Any] = {
        "use_cpu": device == "cpu",
        "bf16": False,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": MAX_COMPLETION,
        "learning_rate": 1e-2,
        "optim": "adamw_torch",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "reward_weights": [1.0, 0.0],
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    rows = [
        {"prompt": [{"role": "user", "content": row["problem"]}], "solution": row["answer"]}
        for row in problems("addition", "train", 64)
    ]
    return PACSTrainer(
        AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32),
        [even_start, math_reward],
        args=PACSConfig(str(output_dir), **(defaults | settings)),
        train_dataset=Dataset.from_list(rows),
        processing_class=build_tokenizer(),
        callbacks=list(callbacks),
    )


class Watch(TrainerCallback):
    """Record memory at every optimizer step, and stop training after `seconds`."""

    def __init__(self, seconds: float):
        self.deadline = time.monotonic() + seconds
        self.rows: list[dict[str, Any]] = []

    def on_step_end(self, args, state, control, **kwargs):
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**30
        on_gpu = torch.cuda.memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
        self.rows.append({"resident GiB": resident, "allocated GiB": on_gpu})
        if time.monotonic() > self.deadline:
            control.should_training_stop = control.should_save = True


def soak(device: str, directory: Path, model: str, seconds: float) -> list[dict[str, Any]]:
    """
    Train for `seconds`, from the last checkpoint in `directory` if there is one.

    Memory growth is measured from the second to the last quarter of the steps. `finite` is whether loss, entropy, and
    gradient norm are finite at every step and no step was skipped.
    """
    checkpoint, watch = save_model(directory / "model", model), Watch(seconds)
    engine = {}
    if device == "cuda" and find_spec("vllm"):
        share_engine(device, "auto")
        engine = COLOCATED
    saving = {"save_strategy": "steps", "save_steps": 200, "save_total_limit": 2}
    settings = engine | saving | {"learning_rate": 1e-5, "max_steps": 10**7}
    trainer = trainer_on(checkpoint, directory / "run", device, callbacks=[watch], **settings)
    started = (directory / "run").is_dir()
    trainer.train(resume_from_checkpoint=last_checkpoint(str(directory / "run")) if started else None)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    quarter = max(len(watch.rows) // 4, 1)
    second, last = watch.rows[quarter : 2 * quarter] or watch.rows, watch.rows[-quarter:]
    row = {"first step": trainer.state.global_step - len(watch.rows) + 1, "last step": trainer.state.global_step}
    for key in watch.rows[0]:
        before, after = (statistics.mean(entry[key] for entry in part) for part in (second, last))
        row |= {key: after, f"growth of {key}": after - before}
    metrics = (entry[name] for entry in logs for name in ("loss", "entropy", "grad_norm"))
    row["finite"] = all(abs(value) < 1e6 for value in metrics) and logs[-1]["update/non_finite_steps"] == 0
    return [row]
