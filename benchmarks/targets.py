"""Optimizer steps of published shapes on one GPU beside the targets of this package, and TRL's GRPO at its best.

    python -m benchmarks.targets Qwen3-1.7B         # PACS: eager and compiled, attention kernels, checkpointing
    python -m benchmarks.targets Qwen3-1.7B --lora  # PACS with LoRA
    python -m benchmarks.targets Qwen3-1.7B --trl   # TRL's best, and PACS beside it

Random weights and the recorded rollouts of `benchmarks.recorded`: 4 prompts x 8 completions. A utilization is the
model's FLOPs divided by the measured rate of a matrix product. `make gpu-check` runs both. What a machine cannot run,
or has no memory for, is a row that says so.
"""

import argparse
import gc
import statistics
import time
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig

from benchmarks import record_row, table_of
from benchmarks.gpu import LORA, TRAINERS, costs_of, known_gpu, model_flops, planned_beside
from benchmarks.recorded import (
    NUM_GENERATIONS,
    PROMPT_TOKENS,
    Runner,
    Size,
    config_of,
    kernels_of,
    labels_of,
    matmul_rate,
    recorded_rollouts,
    shape_of,
)
from pacs_trl.update import compiled_layers


COMPLETION_MAX = {"Qwen3-1.7B": 4096, "Qwen3-4B": 8192, "tiny": 24}
KERNELS = {"flash_attention_2": "flash_attn.flash_attn_interface", "flash_attention_3": "flash_attn_interface"}
KERNELS |= {"flash_attention_4": "flash_attn.cute"}
TIMES_AS_FAST = {"Qwen3-1.7B": 5.0}  # as TRL's best, with FlashAttention 4


@dataclass(frozen=True)
class Variant:
    """A way to run the step; `rows` of the longest completions fit into a micro-batch. With `auto`, rows and
    checkpointing are what the trainer chooses from the memory of the GPU."""

    rows: int = 8
    auto: bool = False
    compiled: bool = False
    attention: str = "sdpa"
    checkpointing: bool = False
    lora: bool = False
    liger: bool = False  # TRL's fused kernels
    target: float | None = None  # utilization in percent on an H100 or H200


# In the order of a report: what says most first.
VARIANTS = {
    "Qwen3-1.7B": (
        Variant(compiled=True, target=52),
        Variant(compiled=True, attention="flash_attention_4", target=56),
        Variant(compiled=True, checkpointing=True, target=41),
        Variant(compiled=True, auto=True),
        Variant(),
        Variant(checkpointing=True),
    ),
    "Qwen3-4B": (
        Variant(rows=1, compiled=True, attention="flash_attention_4", target=58),
        Variant(rows=1, compiled=True),
        Variant(compiled=True, auto=True),
        Variant(rows=4, checkpointing=True),
    ),
}
VARIANTS["tiny"] = VARIANTS["Qwen3-1.7B"]
LORA_VARIANTS = (Variant(lora=True, compiled=True), Variant(lora=True))


class Measurement:
    """Rollouts and matrix rate of one shape on this machine, and the optimizer steps of trainers on them."""

    def __init__(
        self, device: str, directory: Path, model: str, *, repeats: int = 2, num_groups: int = 4, matmul: int = 8192
    ):
        self.device, self.directory, self.model, self.repeats = device, directory, model, repeats
        self.backend = "inductor" if device == "cuda" else "aot_eager"  # on a CPU without a compiler
        compiled_layers.BACKEND = self.backend
        self.rate = matmul_rate(device, matmul, torch.bfloat16 if device == "cuda" else torch.float32)
        self.size = Size(shape_of(model), COMPLETION_MAX[model], NUM_GENERATIONS, num_groups, bf16=device == "cuda")
        self.rollouts = recorded_rollouts(self.size, num_groups)
        config_of(self.size.shape).save_pretrained(directory / "model")  # for `plan`
        self.rows: list[dict[str, Any]] = []

    def row(self, method: str, variant: Variant) -> dict[str, Any]:
        """Measure a variant, and record its row. Of the first steps, one compiles, and one follows the allocations."""
        row: dict[str, Any] = {"model": self.model + (" LoRA" if variant.lora else ""), "method": method}
        row |= {"layers": "compiled" if variant.compiled else "eager", "attention": variant.attention}
        row |= {"fused kernels": "yes"} if variant.liger else {}
        row |= {"checkpointing": "yes" if variant.checkpointing else "no", "rows": variant.rows}
        row |= {"checkpointing": "auto", "rows": None} if variant.auto else {}
        package = KERNELS.get(variant.attention)
        if package and not _is_installed(package):
            row["outcome"] = f"{variant.attention} is not installed"
        else:
            row |= self._measured(method, variant)
        self.record(row)
        return row

    def record(self, row: dict[str, Any]) -> None:
        """Add a row to the results, and to the report of `make gpu-check`."""
        self.rows.append(row)
        record_row(row)

    def _measured(self, method: str, variant: Variant) -> dict[str, Any]:
        try:
            measured = self._steps(method, variant)
        except torch.OutOfMemoryError:
            return {"outcome": "out of memory"}
        except Exception as error:  # kernels and compilers raise many types, and the other rows are still worth having
            return {"outcome": f"{type(error).__name__}: {error}"[:200]}
        finally:
            gc.collect()  # the next variant needs the memory
            if self.device == "cuda":
                torch.cuda.empty_cache()
        seconds = measured.pop("seconds")
        median = statistics.median(seconds)
        flops, tokens = model_flops(self.size.shape, self.rollouts)
        utilization = 100 * flops / median / self.rate
        row: dict[str, Any] = {"s / step": median, "fastest": min(seconds), "slowest": max(seconds)}
        row |= {"tokens/s": tokens / median, "utilization, %": utilization, "matmul TFLOP/s": self.rate / 1e12}
        row |= measured | {"target, %": variant.target}
        if method != "trl_grpo":
            row |= self._planned(method, variant, {"seconds": median, "GiB": measured["GiB"]})
        if variant.target is not None:
            row["outcome"] = outcome_of(utilization, variant.target)
        return row

    def _steps(self, method: str, variant: Variant) -> dict[str, Any]:
        """Return the seconds of the measured steps and of the first one, the peak of the memory, and what `auto` has
        become."""
        with kernels_of(variant.attention):
            runner = self._runner(method, variant)
            measured: dict[str, Any] = {"first step, s": runner.step()}
            measured["GiB"] = runner.peak_memory() / 2**30
            measured["seconds"] = [runner.step() for _ in range(self.repeats)]
        if variant.auto:
            choice = runner.trainer.memory.choice
            measured |= {"checkpointing": f"auto: {choice.recomputation}", "tokens at most": choice.max_tokens}
        return measured

    def _runner(self, method: str, variant: Variant) -> Runner:
        return Runner(
            TRAINERS[method],
            self.size,
            self.rollouts,
            labels_of(self.size.num_groups, 0.0),
            self.device,
            output_dir=self.directory,
            attention=variant.attention,
            peft_config=LoraConfig(**LORA, task_type="CAUSAL_LM") if variant.lora else None,
            **self._settings(method, variant),
        )

    def _planned(self, method: str, variant: Variant, measured: dict[str, Any]) -> dict[str, Any]:
        """Return the estimate of `pacs-trl plan` beside the measurement."""
        costs = costs_of(
            self.size,
            variant.rows,
            known_gpu(self.rate, self.device),
            method=method,
            checkpointing=variant.checkpointing,
            lora=variant.lora,
            directory=self.directory,
            device=self.device,
            **{"attn_implementation": variant.attention} | self._settings(method, variant),
        )
        return planned_beside(costs, measured, self.size.completion_max, self.device)

    def _settings(self, method: str, variant: Variant) -> dict[str, Any]:
        settings: dict[str, Any] = {"gradient_checkpointing": variant.checkpointing}
        if method == "trl_grpo":
            settings |= {"per_device_train_batch_size": variant.rows, "use_liger_kernel": variant.liger}
            return settings | ({"torch_compile_backend": self.backend} if variant.compiled else {})
        tokens = variant.rows * (PROMPT_TOKENS[1] + self.size.completion_max)
        settings |= {"per_device_train_batch_size": NUM_GENERATIONS, "max_tokens_per_micro_batch": tokens}
        if variant.auto:
            settings |= {"gradient_checkpointing": "auto", "max_tokens_per_micro_batch": "auto"}
        return settings | {"compile_layers": variant.compiled}

    def best_of_trl(self, seconds: float) -> dict[str, Any] | None:
        """Search TRL's best: micro-batch and checkpointing first, then, each kept if it is faster, attention kernels,
        `torch_compile`, and fused kernels. No step is begun after `seconds`; `None` if none has run."""
        deadline, best = time.monotonic() + seconds, None
        layouts = [Variant(rows=rows) for rows in (4, 8, 2)] + [
            Variant(rows=rows, checkpointing=True) for rows in (8, 16)
        ]
        for variant in layouts:
            best = self._faster(best, variant, deadline)
        changes: list[dict[str, Any]] = [{"attention": name} for name in KERNELS if _is_installed(KERNELS[name])]
        changes += [{"compiled": True}]
        changes += [{"liger": True}] if _is_installed("liger_kernel") else []
        for change in changes:
            if best is not None:
                best = self._faster(best, replace(best[1], **change), deadline)
        return best and best[0]

    def _faster(self, best: Any, variant: Variant, deadline: float) -> Any:
        """Return the faster one of `best`, a row and its variant, and of `variant`."""
        if time.monotonic() > deadline:
            return best
        row = self.row("trl_grpo", variant)
        is_faster = "s / step" in row and (best is None or row["s / step"] < best[0]["s / step"])
        return (row, variant) if is_faster else best


def outcome_of(value: float, target: float) -> str:
    return "met" if value >= target else "missed"


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # of its parent
        return False


def measure_variants(
    device: str, directory: Path, model: str, variants: tuple[Variant, ...] | None = None, **settings: Any
) -> list[dict[str, Any]]:
    """Measure the variants of PACS in `VARIANTS`, or others; `settings` go to [`Measurement`]."""
    measurement = Measurement(device, directory, model, **settings)
    for variant in variants or VARIANTS[model]:
        measurement.row("pacs", variant)
    return measurement.rows


def measure_trl(device: str, directory: Path, model: str, *, seconds: float, **settings: Any) -> list[dict[str, Any]]:
    """Search TRL's best for `seconds`, and measure the fastest variant of PACS in the same process; the last row
    compares the two."""
    measurement = Measurement(device, directory, model, **settings)
    trl = measurement.best_of_trl(seconds)
    compiled = [each for each in VARIANTS[model] if each.compiled and not (each.checkpointing or each.auto)]
    times = [row["s / step"] for row in (measurement.row("pacs", each) for each in compiled) if "s / step" in row]
    if trl is not None and times:
        factor, target = trl["s / step"] / min(times), TIMES_AS_FAST.get(model)
        row = {"model": model, "method": "pacs", "times as fast as TRL's best": factor, "target, times": target}
        measurement.record(row | ({"outcome": outcome_of(factor, target)} if target else {}))
    return measurement.rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=list(VARIANTS))
    parser.add_argument("--trl", action="store_true", help="search TRL's best")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--seconds", type=float, default=1800.0, help="of the search")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/benchmark/targets"))
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.trl:
        print(table_of(measure_trl(device, args.output_dir, args.model, seconds=args.seconds)))
    else:
        variants = LORA_VARIANTS if args.lora else None
        print(table_of(measure_variants(device, args.output_dir, args.model, variants)))


if __name__ == "__main__":
    main()
