"""The part `step`: seconds, tokens and memory of an optimizer step on recorded rollouts, beside what `plan` says of it.

Rows per forward pass are the most that `plan` says fit; if they do not, that is found, and half as many are tried. PACS gets the same
number as tokens, since it packs rows.
"""

import gc
import statistics
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from trl import GRPOTrainer

from .. import PACSTrainer
from ..plan.cost import GPUS, Gpu, ModelShape
from ..plan.estimates import Estimate
from ..plan.launch import Launch
from ..recipe import Recipe
from .replay import (
    NUM_GENERATIONS,
    PROMPT_TOKENS,
    Runner,
    Size,
    config_of,
    labels_of,
    matmul_rate,
    recorded_rollouts,
    shape_of,
)
from .results import Found


LORA = {"r": 16, "target_modules": "all-linear"}


def measure_steps(
    *,
    device: str,
    directory: Path,
    model: str,
    method: str,
    checkpointing: bool,
    completion_max: int = 8192,
    num_groups: int = 4,
    repeats: int = 5,
    matmul: int = 8192,
    lora: bool = False,
) -> Found:
    """Steps of one method with a model of a shape; PACS also with half the groups uniform."""
    shape = shape_of(model)
    config_of(shape).save_pretrained(directory / "model")
    rate = matmul_rate(device, matmul, torch.bfloat16 if device == "cuda" else torch.float32)
    gpu = card(rate, device)
    size = Size(shape, completion_max, NUM_GENERATIONS, num_groups, bf16=device == "cuda")
    settings = {
        "method": method,
        "checkpointing": checkpointing,
        "lora": lora,
        "directory": directory,
        "device": device,
    }
    bars, rows, fitting = {}, NUM_GENERATIONS, None
    while rows and fitting is None:
        estimate = estimate_of(size, rows, gpu, **settings)
        if estimate.update <= estimate.usable or rows == 1:
            fitting = _without_room(lambda: _steps(size, rows, repeats, rate, **settings))  # noqa: B023
            bars[f"{rows} rows per forward pass fit, as plan says"] = fitting is not None
        rows = rows if fitting else rows // 2
    if fitting is None:
        return Found([], bars, "out of memory")
    _, seconds, _ = estimate.learning(round(0.35 * completion_max))
    activations = estimate.activations + estimate.gathered + estimate.collected
    state = estimate.state if device == "cuda" else 0.0  # on a CPU what autograd keeps is measured
    planned = {"planned_bytes": state + activations, "planned_state_bytes": state}
    planned |= {
        "planned_activation_bytes": activations,
        "planned_seconds": seconds,
        "planned_share": gpu.training_share,
    }
    named = {
        "model": model + (" LoRA" if lora else ""),
        "method": method,
        "checkpointing": "yes" if checkpointing else "no",
    }
    found = [{**named, "rows per forward": rows, **row, **planned} for row in fitting]
    bars["weights are finite after the steps"] = all(row.pop("finite") for row in found)
    first = found[0]
    short = f"{first['tokens_per_second']:.0f} tokens/s, {first['seconds']:.3g} s, {first['measured_bytes'] / 2**30:.1f} GiB"
    return Found(found, bars, short)


def card(rate: float, device: str) -> Gpu:
    """The card as `plan` knows it; one that it does not know has its own memory and the measured rate of matrix products."""
    if device == "cpu":
        return Gpu("this machine", 2**40, rate, 1.0)
    properties = torch.cuda.get_device_properties(0)
    known = [gpu for gpu in GPUS.values() if gpu.name in properties.name]
    return known[0] if known else Gpu(properties.name, properties.total_memory, rate, 1.0)


def estimate_of(
    size: Size, rows: int, gpu: Gpu, *, method: str, checkpointing: bool, lora: bool, directory: Path, device: str
) -> Estimate:
    """What `pacs-trl plan` thinks of such a step."""
    settings: dict[str, Any] = {
        "method": method,
        "model_name_or_path": str(directory / "model"),
        "dataset_name": "miniature/addition",
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
        **_batch(size, rows, method),
    }
    if lora:
        settings |= {"use_peft": True, "lora_r": LORA["r"], "lora_target_modules": [LORA["target_modules"]]}
        settings |= {"dtype": "bfloat16"}
    recipe, errors = Recipe.from_settings(settings, 1)
    assert recipe is not None and not errors, errors
    return Estimate(recipe, Launch(1, "none", "one process"), gpu)


def _batch(size: Size, rows: int, method: str) -> dict[str, int]:
    if method == "grpo":
        return {
            "per_device_train_batch_size": rows,
            "gradient_accumulation_steps": size.num_groups * NUM_GENERATIONS // rows,
        }
    return {
        "per_device_train_batch_size": NUM_GENERATIONS,
        "gradient_accumulation_steps": size.num_groups,
        "max_tokens_per_micro_batch": rows * (PROMPT_TOKENS[1] + size.completion_max),
    }


def _without_room(run):
    """What `run` returns; `None` if the GPU's memory does not suffice, and that memory is free again."""
    try:
        return run()
    except torch.OutOfMemoryError as error:
        print(error, flush=True)
    gc.collect()
    torch.cuda.empty_cache()
    return None


def _steps(
    size: Size, rows: int, repeats: int, rate: float, *, method, checkpointing, lora, directory, device
) -> list[dict[str, Any]]:
    rollouts = recorded_rollouts(size, size.num_groups)
    attention = "flash_attention_2" if device == "cuda" and find_spec("flash_attn") else "sdpa"
    settings = {
        key: value for key, value in _batch(size, rows, method).items() if key != "gradient_accumulation_steps"
    }
    runner = Runner(
        PACSTrainer if method == "pacs" else GRPOTrainer,
        size,
        rollouts,
        labels_of(size.num_groups, 0.0),
        device,
        output_dir=directory,
        attention=attention,
        peft_config=LoraConfig(**LORA, task_type="CAUSAL_LM") if lora else None,
        gradient_checkpointing=checkpointing,
        **settings,
    )
    peak, found = runner.peak_memory(), []
    for uniform in (0.0, 0.5) if method == "pacs" else (0.0,):
        runner.label(labels_of(size.num_groups, uniform))
        seconds = [runner.step() for _ in range(repeats)]
        median = statistics.median(seconds)
        flops, tokens = model_flops(size.shape, rollouts)
        found.append(
            {
                "uniform": uniform,
                "attention": attention,
                "seconds": median,
                "fastest": min(seconds),
                "slowest": max(seconds),
                "tokens_per_second": tokens / median,
                "utilization": flops / median / rate if uniform == 0 else None,
                "matmul TFLOP/s": rate / 1e12,
                "measured_bytes": peak,
                "finite": all(bool(weight.isfinite().all()) for weight in runner.model.parameters()),
            }
        )
    return found


def model_flops(shape: ModelShape, rollouts: list[dict]) -> tuple[float, int]:
    """FLOP of forward and backward passes over the texts, a prompt once for all its completions and attention included; and the tokens
    of all rows."""
    prompts = {tuple(row["prompt_ids"]) for row in rollouts}
    lengths = [len(row["prompt_ids"]) + len(row["completion_ids"]) for row in rollouts]
    once = sum(map(len, prompts)) + sum(len(row["completion_ids"]) for row in rollouts)
    attended = sum(n * n for n in lengths) / sum(lengths)
    return 3 * shape.forward_flops(once, attended), sum(lengths)
