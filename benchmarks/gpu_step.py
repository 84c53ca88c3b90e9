"""Seconds of each part of a whole training step with a colocated vLLM: TRL's GRPOTrainer and this package's trainers.

    python -m benchmarks.gpu_step              # the shape of Qwen3-1.7B, 32 completions of up to 4,096 tokens
    python -m benchmarks.gpu_step --sleep      # the engine sleeps during updates
    python -m benchmarks.gpu_step --model sums # SmolLM2-135M-Instruct on sums (after `make model`)
    python -m benchmarks.gpu_step --model tiny # smoke test on a CPU, after `make env-vllm`

All trainers get the same model, prompts, settings, and engine, one after the other, in one process; `grpo_auto`
chooses recomputation and micro-batches itself. Weights in a published shape are random, and the engine starts with
dummy weights, so nothing is downloaded; lengths of completions are those of `benchmarks.recorded`, whatever is
generated. With SmolLM2 the model decides when a completion ends. The first step of each trainer, which compiles and
allocates, is left out. Clocks wait for the GPU at the borders of parts.
"""

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl.generation import vllm_generation

from benchmarks import record_row, table_of
from benchmarks.end_to_end import TRLTrainer
from benchmarks.recorded import NUM_GENERATIONS, Size, build_model, config_of, recorded_rollouts, shape_of
from benchmarks.shared_engine import share_engine
from experiments.miniature.tokenizer import build_tokenizer
from pacs_trl import GRPOTrainer, PACSTrainer
from pacs_trl.train import main as train


SUMS = Path(__file__).parents[1] / "recipes/smollm2-135m/sums_grpo.yaml"
TRAINERS = {"trl_grpo": TRLTrainer, "grpo": GRPOTrainer, "grpo_auto": GRPOTrainer, "pacs": PACSTrainer}
AUTO = {"gradient_checkpointing": "auto", "max_tokens_per_micro_batch": "auto"}  # of grpo_auto

# The columns of the table, and the parts of `pacs_trl.rollouts.timing` in each.
COLUMNS = {
    "generation": ["generation"],
    "weight transfer": ["weight_sync"],
    "rewards": ["verification"],
    "log-probs": ["log_probs"],
    "update": ["update", "optimizer"],
    "rest": ["other"],
}


@dataclass
class WholeStep:
    """The size of a step: `num_groups * 8` completions whose mean length is 0.35 of `completion_max`, of prompts of
    `prompt_tokens` tokens; `rows` completions per forward pass, with gradient checkpointing."""

    model: str
    completion_max: int = 4096
    num_groups: int = 4
    rows: int = 8
    prompt_tokens: int = 256
    gpu_memory_utilization: float = 0.3


# A smoke test on a CPU.
TINY = WholeStep("tiny", completion_max=24, num_groups=2, prompt_tokens=16, gpu_memory_utilization=0.02)


class FixedLengths:
    """Proxy of vLLM's `LLM`: completion `i` of a batch has `lengths[i]` tokens, except in requests of another size."""

    def __init__(self, llm: Any, lengths: list[int]):
        self.llm, self.lengths = llm, lengths

    def __getattr__(self, name: str) -> Any:
        return getattr(self.llm, name)

    def generate(self, prompts: list, sampling_params: Any, **kwargs: Any) -> list:
        if len(prompts) == len(self.lengths):
            is_list = isinstance(sampling_params, list)
            sampling_params = sampling_params if is_list else [sampling_params.clone() for _ in prompts]
            for params, length in zip(sampling_params, self.lengths, strict=True):
                params.max_tokens = params.min_tokens = length
                params.ignore_eos = True
        return self.llm.generate(prompts, sampling_params=sampling_params, **kwargs)


class Memory(TrainerCallback):
    """Record the largest memory in use on the GPU, by all processes, where an update has ended."""

    def __init__(self) -> None:
        self.peak = 0.0

    def on_pre_optimizer_step(self, *args, **kwargs):
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            self.peak = max(self.peak, (total - free) / 2**30)


def clock_of(device: str) -> Callable[[], float]:
    """Return a clock that waits for the kernels that were started before."""

    def seconds() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    return seconds


@contextmanager
def engine_of(device: str, dtype: str, lengths: list[int] | None, **settings: Any) -> Iterator[None]:
    """Let all trainers inside share one engine; with `lengths`, its completions have these."""
    engine_class = vllm_generation.LLM
    share_engine(device, dtype, **settings)
    shared = vllm_generation.LLM
    if lengths is not None:
        vllm_generation.LLM = lambda **kwargs: FixedLengths(shared(**kwargs), lengths)
    try:
        yield
    finally:
        vllm_generation.LLM = engine_class


def even_start(completion_ids, **kwargs) -> list[float]:
    """Reward an even first token: about half of the completions of each group."""
    return [float(ids[0] % 2 == 0) for ids in completion_ids]


def measure(
    device: str,
    directory: Path,
    step: WholeStep,
    *,
    sleep: bool,
    methods: tuple[str, ...] = ("trl_grpo", "grpo"),
    steps: int = 2,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Measure steps of each method with random weights in the shape `step.model`; `settings` go to all trainers."""
    size = Size(shape_of(step.model), step.completion_max, step.rows, step.num_groups, bf16=device == "cuda")
    lengths = [len(row["completion_ids"]) for row in recorded_rollouts(size, step.num_groups)]
    tokenizer = build_tokenizer()
    config_of(size.shape, architectures=["Qwen3ForCausalLM"]).save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    generator, rows = random.Random(0), []
    for _ in range(step.num_groups * (steps + 1)):
        rows.append({"prompt": "".join(generator.choices("0123456789", k=step.prompt_tokens))})
    dtype = "bfloat16" if device == "cuda" else "float32"
    table = []
    with engine_of(device, dtype, lengths, load_format="dummy", skip_tokenizer_init=True):
        for method in methods:
            model = build_model(size.shape, device, eos_token_id=tokenizer.eos_token_id)
            model.name_or_path = str(directory / "model")
            config_class = getattr(TRAINERS[method], "_config_class", trl.GRPOConfig)
            chosen = AUTO if method == "grpo_auto" else {}
            args = config_class(str(directory / method), **_settings(device, step, sleep, steps) | chosen | settings)
            trainer = TRAINERS[method](
                model, even_start, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
            )
            trainer.timer.clock = clock_of(device)
            trainer.add_callback(memory := Memory())
            trainer.remove_callback(PrinterCallback)
            trainer.train()
            table.append(_row(step.model, method, sleep, trainer.state.log_history, memory, sum(lengths)))
            record_row(table[-1])
            del trainer, model
            gc.collect()  # the next trainer needs the memory
            if device == "cuda":
                torch.cuda.empty_cache()
    return _beside_trl(table)


def _settings(device: str, step: WholeStep, sleep: bool, steps: int) -> dict[str, Any]:
    return {
        "use_cpu": device == "cpu",
        "bf16": device == "cuda",
        "per_device_train_batch_size": step.rows,
        "gradient_accumulation_steps": step.num_groups * NUM_GENERATIONS // step.rows,
        "num_generations": NUM_GENERATIONS,
        "max_completion_length": step.completion_max,
        "gradient_checkpointing": True,
        "learning_rate": 1e-6,
        "max_steps": steps + 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": step.prompt_tokens + step.completion_max,
        "vllm_gpu_memory_utilization": step.gpu_memory_utilization,
        "vllm_enable_sleep_mode": sleep,
        "vllm_importance_sampling_correction": False,  # another forward pass, on by default in TRL
    }


def measure_sums(
    device: str,
    directory: Path,
    *,
    sleep: bool,
    methods: tuple[str, ...] = ("trl_grpo", "grpo"),
    steps: int = 4,
    overrides: tuple[str, ...] = (),
) -> list[dict[str, Any]]:
    """Measure steps of each method on recipes/smollm2-135m/sums_grpo.yaml; `overrides` are further arguments of the
    command line."""
    dtype = "auto" if device == "cuda" else "float32"
    settings = ["--config", str(SUMS), "--max_steps", str(steps + 1), "--use_cpu", str(device == "cpu").lower()]
    settings += ["--use_vllm", "true", "--vllm_mode", "colocate", "--vllm_max_model_length", "128"]
    settings += ["--vllm_gpu_memory_utilization", "0.3", "--vllm_enable_sleep_mode", str(sleep).lower()]
    settings += ["--fast_generation", "false", "--vllm_importance_sampling_correction", "false", *overrides]
    table = []
    with engine_of(device, dtype, None):
        for method in methods:
            memory = Memory()
            trainer_class = watched(TRAINERS[method], device, memory)
            name = "grpo" if method in ("trl_grpo", "grpo_auto") else method
            chosen = [word for key, value in AUTO.items() for word in (f"--{key}", value)]
            chosen = chosen if method == "grpo_auto" else []
            trainer = train(
                [*settings, *chosen, "--method", name, "--output_dir", str(directory / method)], trainer_class
            )
            table.append(_row("SmolLM2-135M, sums", method, sleep, trainer.state.log_history, memory, None))
            record_row(table[-1])
    return _beside_trl(table)


def watched(trainer_class: type, device: str, memory: Memory) -> type:
    """Return a subclass whose clock waits for the GPU, and that measures memory."""

    def init(self, *args, **kwargs):
        trainer_class.__init__(self, *args, **kwargs)
        self.timer.clock = clock_of(device)
        self.add_callback(memory)

    return type(trainer_class.__name__, (trainer_class,), {"__init__": init})


def _row(model: str, method: str, sleep: bool, history: list[dict], memory: Memory, tokens: int | None) -> dict:
    logs = [entry for entry in history if "time/total" in entry][1:]
    row: dict[str, Any] = {"model": model, "method": method, "sleep mode": "yes" if sleep else "no"}
    row["s / step"] = statistics.median(entry["time/total"] for entry in logs)
    for column, parts in COLUMNS.items():
        row[column] = statistics.median(sum(entry[f"time/{part}"] for part in parts) for entry in logs)
    row["steps"] = len(logs)
    if tokens is not None:
        row["tokens/s"] = tokens / row["s / step"]
    row["GiB in use"] = memory.peak or None
    return row


def _beside_trl(table: list[dict[str, Any]]) -> list[dict[str, Any]]:
    trl_seconds = next((row["s / step"] for row in table if row["method"] == "trl_grpo"), None)
    for row in table:
        row["times as fast as TRL"] = trl_seconds / row["s / step"] if trl_seconds else None
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen3-1.7B", help="a published Qwen3 shape, `sums`, or `tiny`")
    parser.add_argument("--methods", nargs="+", choices=list(TRAINERS), default=["trl_grpo", "grpo", "grpo_auto"])
    parser.add_argument("--completion_max", type=int, default=4096)
    parser.add_argument("--num_groups", type=int, default=4)
    parser.add_argument("--rows", type=int, default=8, help="completions per forward pass")
    parser.add_argument("--steps", type=int, default=2, help="measured steps")
    parser.add_argument("--sleep", action="store_true")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/benchmark/gpu_step"))
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run = {"sleep": args.sleep, "methods": tuple(args.methods), "steps": args.steps}
    if args.model == "sums":
        rows = measure_sums(device, args.output_dir, **run)
    else:
        sizes = WholeStep(args.model, args.completion_max, args.num_groups, args.rows)
        step = TINY if args.model == "tiny" else sizes
        rows = measure(device, args.output_dir, step, **run)
    print(table_of(rows))
    args.output_dir.mkdir(parents=True, exist_ok=True)
    (args.output_dir / "rows.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
