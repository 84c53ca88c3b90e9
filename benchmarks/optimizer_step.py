"""Time and memory of one optimizer step: PACS and GRPO on the exact update compared with TRL's GRPOTrainer.

    make bench                                       # CPU size, nine minutes on two cores
    python -m benchmarks.optimizer_step --size gpu   # Qwen3-1.7B architecture, random weights, bf16, one GPU
    python -m benchmarks.optimizer_step --parts shapes --shapes gemma3_text qwen3_5_text   # other architectures

All variants run in one process and take turns, one step each, for `--repeats` rounds. A first, untimed round measures
peak memory. The table reports medians. A step is everything from completions to updated weights: rewards, padding,
forward and backward passes, optimizer. Tokens per second exclude padding.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from trl import GRPOTrainer as TRLTrainer

from benchmarks import table_of
from benchmarks.recorded import (
    ARCHITECTURES,
    SMALL_MODELS,
    Runner,
    Size,
    labels_of,
    matmul_rate,
    recorded_rollouts,
)
from pacs_trl import GRPOTrainer, PACSTrainer
from pacs_trl.plan.cost import KNOWN_MODELS, ModelShape


SIZES = {
    "tiny": Size(SMALL_MODELS["tiny"], 32, 8, 4, bf16=False),  # smoke test, takes seconds
    "cpu": Size(ModelShape(6, 256, 768, 4, 2, 64, 512, tied=True, qk_norm=True), 576, 8, 4, bf16=False),
    "gpu": Size(KNOWN_MODELS["Qwen/Qwen3-1.7B"], 8192, 8, 4, bf16=True),
}
BASELINE = "TRL GRPO, best"
CHECKPOINTING = "default (gradient checkpointing)"  # what both trainers do unless told otherwise


def compare(title: str, runners: dict[str, Runner], repeats: int, flops_rate: float) -> list[dict]:
    """Time `repeats` rounds with one step of every runner, and print the results as a table."""
    peaks = {name: runner.peak_memory() for name, runner in runners.items()}  # also warms up
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for number in range(1, repeats + 1):
        for name, runner in runners.items():
            seconds[name].append(runner.step())
        round_seconds = " + ".join(f"{values[-1]:.2f}" for values in seconds.values())
        print(f"{title}, round {number}/{repeats}: {round_seconds} s", file=sys.stderr, flush=True)
    rows = []
    for name, values in seconds.items():
        median, rollouts = statistics.median(values), runners[name].rollouts
        updates = runners[name].updates_per_generation * median
        completion_tokens = sum(len(r["completion_ids"]) for r in rollouts)
        prompts = {tuple(r["prompt_ids"]) for r in rollouts}  # one for the completions of a prompt
        once = sum(map(len, prompts)) + completion_tokens
        skips = "uniform" in name and not name.endswith((" 0", " 0 of 3"))
        rows.append(
            {
                "variant": name,
                "s / step": median,
                "fastest": min(values),
                "slowest": max(values),
                "real tokens / s": (sum(len(r["prompt_ids"]) for r in rollouts) + completion_tokens) / updates,
                "peak MB": peaks[name] / 1e6,
                "times faster than TRL": statistics.median(seconds[BASELINE]) / median,
                "model FLOP utilization": None if skips else flops_rate * once / updates,
            }
        )
    print(f"\n### {title}\n\n{table_of(rows)}")
    return [{"title": title, **row, "rounds": seconds[row["variant"]]} for row in rows]


def aligned(size: Size, device: str, repeats: int, flops_rate: float) -> list[dict]:
    rollouts = recorded_rollouts(size, size.num_groups)
    make = partial(Runner, size=size, rollouts=rollouts, device=device)
    mixed = labels_of(size.num_groups, 0.0)
    runners = {
        f"TRL GRPO, {CHECKPOINTING}": make(TRLTrainer, labels=mixed, gradient_checkpointing=True),
        BASELINE: make(TRLTrainer, labels=mixed),
        "GRPO": make(GRPOTrainer, labels=mixed),
    }
    for fraction in (0, 0.25, 0.5, 0.75):
        labels = labels_of(size.num_groups, fraction)
        runners[f"PACS, uniform fraction {fraction}"] = make(PACSTrainer, labels=labels)
    return compare("One update per generation", runners, repeats, flops_rate)


def four_updates(size: Size, device: str, repeats: int, flops_rate: float) -> list[dict]:
    num_groups = 4 * max(1, size.num_groups // 4)
    make = partial(Runner, size=size, rollouts=recorded_rollouts(size, num_groups), device=device)
    make = partial(make, labels=labels_of(num_groups, 0.0), updates_per_generation=4)
    runners = {BASELINE: make(TRLTrainer), "GRPO": make(GRPOTrainer)}
    runners |= {f"PACS, {layout} groups": make(PACSTrainer, group_layout=layout) for layout in ("whole", "split")}
    return compare("Four updates per generation", runners, repeats, flops_rate)


def prompt_lengths(
    size: Size, device: str, repeats: int, flops_rate: float, tokens: list[int], group_sizes: list[int]
) -> list[dict]:
    """Compare three prompts of one length, with zero or one uniform group; completions average about 0.3 times 448
    tokens at the CPU size."""
    size, rows = replace(size, completion_max=size.completion_max * 7 // 9, rows_per_forward=16), []
    for num_prompt_tokens in tokens:
        for num_generations in group_sizes:
            rollouts = recorded_rollouts(size, 3, 0, num_generations, (num_prompt_tokens, num_prompt_tokens))
            make = partial(Runner, size=size, rollouts=rollouts, device=device, num_generations=num_generations)
            mixed = labels_of(3, 0.0, num_generations)
            runners = {BASELINE: make(TRLTrainer, labels=mixed)}
            for name, trainer_class in (("TRL GRPO", TRLTrainer), ("GRPO", GRPOTrainer)):
                default = make(trainer_class, labels=mixed, gradient_checkpointing=True)
                runners[f"{name}, {CHECKPOINTING}"] = default
            for name, trainer_class in (("GRPO", GRPOTrainer), ("PACS", PACSTrainer)):
                for uniform in (0, 1):
                    labels = labels_of(3, uniform / 3, num_generations)
                    runners[f"{name}, uniform groups {uniform} of 3"] = make(trainer_class, labels=labels)
            title = f"Prompts of {num_prompt_tokens} tokens, {num_generations} completions each"
            rows += compare(title, runners, repeats, flops_rate)
    return rows


def shapes(size: Size, device: str, repeats: int, flops_rate: float, model_types: list[str]) -> list[dict]:
    """Compare three prompts of 120 tokens, without uniform groups, with models of other architectures."""
    size, rows = replace(size, completion_max=size.completion_max * 7 // 9, rows_per_forward=16), []
    rollouts, labels = recorded_rollouts(size, 3, 0, 16, (120, 120)), labels_of(3, 0.0, 16)
    for model_type in model_types:
        size = replace(size, model_type=model_type)
        attention = "eager" if model_type == "gpt_oss" else "sdpa"  # the only one with its sinks
        make = partial(Runner, size=size, rollouts=rollouts, device=device, attention=attention, num_generations=16)
        runners = {BASELINE: make(TRLTrainer, labels=labels), "GRPO": make(GRPOTrainer, labels=labels)}
        packing = runners["GRPO"].trainer.forward_pass.packing
        title = f"{model_type}, {'packed' if packing else 'padded'}"
        rows += compare(title, runners, repeats, flops_rate)
    return rows


def group_memory(size: Size, device: str) -> list[dict]:
    rows, lengths = [], recorded_rollouts(size, 4)
    for num_generations in (8, 16, 32):
        labels = labels_of(32 // num_generations, 0.0, num_generations)
        runner = Runner(PACSTrainer, size, lengths, labels, device, num_generations=num_generations)
        rows.append({"num_generations": num_generations, "peak MB": runner.peak_memory() / 1e6})
    print(f"\n### Peak memory against the number of completions per prompt\n\n{table_of(rows)}")
    return [{"title": "group memory", **row} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="cpu")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--parts", nargs="+", default=["aligned", "prompts", "updates", "memory"])
    parser.add_argument(
        "--shapes",
        nargs="+",
        choices=list(ARCHITECTURES),
        default=[name for name in ARCHITECTURES if name not in ("qwen3", "granitemoehybrid")],
        help="of the part `shapes`; granitemoehybrid takes minutes per step of TRL on a CPU",
    )
    parser.add_argument("--prompt_tokens", type=int, nargs="+", default=[120, 480], help="of the part `prompts`")
    parser.add_argument("--num_generations", type=int, nargs="+", default=[16], help="of the part `prompts`")
    parser.add_argument("--processor_time", action="store_true", help="count CPU time, beside other work")
    parser.add_argument("--output", type=Path, help="write the raw numbers to this JSON file")
    args = parser.parse_args()
    size, device = SIZES[args.size], "cuda" if args.size == "gpu" else "cpu"
    if args.processor_time:
        time.perf_counter = time.process_time
    threads = f"{torch.get_num_threads()} threads"
    n, dtype = (8192, torch.bfloat16) if device == "cuda" else (2048, torch.float32)
    rate = matmul_rate(device, n, dtype)
    print(f"{args.size} size on {platform.machine()}, {threads}; torch {torch.__version__}; repeats {args.repeats}")
    print(f"Matrix product of {n}^3 in {dtype}: {rate / 1e12:.3g} TFLOP/s. Parameters: {size.shape.parameters:.3g}.")
    flops_rate, rows = 6 * size.shape.parameters / rate, []  # of the model, attention left out
    if "aligned" in args.parts:
        rows += aligned(size, device, args.repeats, flops_rate)
    if "prompts" in args.parts:  # TRL's steps are long here
        repeats = min(args.repeats, 3)
        rows += prompt_lengths(size, device, repeats, flops_rate, args.prompt_tokens, args.num_generations)
    if "shapes" in args.parts:
        rows += shapes(size, device, min(args.repeats, 3), flops_rate, args.shapes)
    if "updates" in args.parts:
        rows += four_updates(size, device, args.repeats, flops_rate)
    if "memory" in args.parts:
        rows += group_memory(size, device)
    if args.output:
        args.output.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
