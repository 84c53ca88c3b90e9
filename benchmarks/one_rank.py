"""Memory and compute seconds of one process of a run on many GPUs, on one GPU.

    python -m benchmarks.one_rank --config recipes/qwen3-4b/pacs.yaml \\
        --accelerate_config recipes/accelerate_configs/fsdp2_8x8.yaml

This process is rank 0 of a group whose collective operations return at once (torch's fake process group): it holds its
shard of weights, gradients, and moments, gathers whole layers, and runs its micro-batches of the optimizer step. The
update gets completions of all processes, of random tokens and log-normal lengths with mean / max = 0.35; weights are
random, in the shape of the recipe's model. **Communication is absent**, and so is generation: seconds are those of
computation, and memory lacks NCCL's buffers and vLLM. Gathered values are copies of this process, so losses mean
nothing.
"""

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from datasets import Dataset
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import table_of
from benchmarks.gpu import known_gpu
from benchmarks.recorded import (
    KeptTensors,
    Size,
    build_model,
    config_of,
    matmul_rate,
    recorded_rollouts,
    shape_of,
)
from experiments.miniature.tokenizer import build_tokenizer
from pacs_trl.plan.cost import ModelShape
from pacs_trl.plan.estimates import Estimate
from pacs_trl.plan.launch import read_launch
from pacs_trl.recipe import Recipe, trainer_of_method
from pacs_trl.update.rollout import Rollout


PROMPT_TOKENS = (200, 300)

# Keys of a recipe that concern generation, data, and reports, which this process does not have.
WITHOUT = (
    *("use_vllm", "vllm_", "dataset_name", "system_prompt", "chat_template_kwargs", "max_prompt_length"),
    *("save_", "eval_", "expected_processes", "verification_", "attn_implementation"),
)


def join_fake_group(num_processes: int, device: str) -> None:
    """Make this process rank 0 of `num_processes`, whose collective operations return at once."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(num_processes), "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    if device == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_processes)


def fsdp_settings(accelerate_config: dict[str, Any], layer: str) -> dict[str, Any]:
    """Return the settings of a trainer that shards as an accelerate file for FSDP2 says."""
    config = {key.removeprefix("fsdp_"): value for key, value in accelerate_config["fsdp_config"].items()}
    config |= {"cpu_ram_efficient_loading": False, "transformer_layer_cls_to_wrap": [layer]}  # nothing is loaded
    return {"fsdp": True, "fsdp_config": config}


def rollouts_of(size: Size, num_groups: int, num_generations: int) -> list[Rollout]:
    """Return the completions of an optimizer step of all processes; half of each group is correct."""
    rows = recorded_rollouts(size, num_groups, num_generations=num_generations, prompt_tokens=PROMPT_TOKENS)
    rollouts = []
    for i, row in enumerate(rows):
        completion = np.asarray(row["completion_ids"], np.int32)
        rollouts.append(
            Rollout(
                prompt_ids=np.asarray(row["prompt_ids"], np.int32),
                completion_ids=completion,
                loss_mask=np.ones(len(completion), bool),
                label=float(i % 2),
                group=i // num_generations,
                sampling_logps=np.full(len(completion), -1.0, np.float32),
                advantage=float(1 - 2 * (i % 2)),
                generation_tokens=float(sum(len(other["completion_ids"]) for other in rows)),
            )
        )
    return rollouts


def measure(
    device: str, config: Path, accelerate_config: Path, directory: Path, *, repeats: int = 2, **overrides: Any
) -> dict[str, Any]:
    """Measure optimizer steps of rank 0; `overrides` are keys of the recipe. The fake process group stays."""
    launch = yaml.safe_load(accelerate_config.read_text(encoding="utf-8"))
    settings = yaml.safe_load(config.read_text(encoding="utf-8"))
    settings = {key: value for key, value in settings.items() if not key.startswith(WITHOUT)} | overrides
    shape = shape_of(settings["model_name_or_path"].rpartition("/")[2])
    join_fake_group(launch["num_processes"], device)
    settings |= {"dataset_name": "addition.jsonl", "output_dir": str(directory), "report_to": "none"}
    settings |= {"use_cpu": device == "cpu", "disable_tqdm": True, "save_strategy": "no"}
    planned = planned_peak(settings, accelerate_config, shape, directory, device)
    settings |= fsdp_settings(launch, "Qwen3DecoderLayer")
    args = Recipe.from_settings(settings).training
    num_completions = args.per_device_train_batch_size * args.gradient_accumulation_steps * launch["num_processes"]
    size = Size(shape, args.max_completion_length, 0, num_completions // args.num_generations, bf16=args.bf16)
    prompts = Dataset.from_list([{"prompt": f"p{i}"} for i in range(args.generation_batch_size)])
    trainer = trainer_of_method(settings["method"])(
        build_model(shape, device),
        lambda completions, **kwargs: [0.0] * len(completions),
        args=args,
        train_dataset=prompts,
        processing_class=build_tokenizer(),
    )
    model, _ = trainer._prepare_for_training(1, trainer.get_train_dataloader(), None)
    minibatch = trainer.update.schedule_minibatch(rollouts_of(size, size.num_groups, args.num_generations))

    def step() -> float:
        _synchronize(device)
        started = time.perf_counter()
        model.train()
        trainer._run_update(model, minibatch)
        trainer.optimizer.step()
        model.zero_grad()
        _synchronize(device)
        return time.perf_counter() - started

    peak = _peak(device, step)
    seconds = [step() for _ in range(repeats)]
    shard = sum(_local_bytes(parameter) for parameter in model.parameters())
    micro_batches = [indices for indices in minibatch.schedule[0] if indices]
    tokens = sum(len(minibatch.rollouts[i].completion_ids) for indices in micro_batches for i in indices)
    row = {"recipe": str(config), "processes": launch["num_processes"], "completions": num_completions}
    row |= {"of this process": sum(map(len, micro_batches)), "micro-batches": len(micro_batches)}
    row |= {"completion tokens": tokens, "s / step": statistics.median(seconds), "slowest": max(seconds)}
    row |= {"weights, GiB": shard / 2**30, "peak, GiB": peak / 2**30, "peak by plan, GiB": planned / 2**30}
    return row | ({"error of plan, %": 100 * (planned / peak - 1)} if device == "cuda" else {})


def planned_peak(
    settings: dict[str, Any], accelerate_config: Path, shape: ModelShape, directory: Path, device: str
) -> float:
    """Return the bytes of `pacs-trl plan` for an optimizer step, prompts of the largest length here."""
    config_of(shape).save_pretrained(directory / "model")
    launch, errors = read_launch(str(accelerate_config), None)
    if launch is None:
        raise ValueError(errors[0])
    settings = settings | {"model_name_or_path": str(directory / "model"), "max_prompt_length": PROMPT_TOKENS[1]}
    recipe = Recipe.from_settings(settings, launch.num_processes)
    costs = Estimate(recipe, launch, known_gpu(1.0, device)).costs
    assert costs is not None  # the shape is known
    return costs.update


def _local_bytes(parameter: torch.nn.Parameter) -> int:
    local = parameter.to_local() if isinstance(parameter, torch.distributed.tensor.DTensor) else parameter
    return local.numel() * local.element_size()


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _peak(device: str, step: Any) -> int:
    """Return the peak memory of a step in bytes, after one that allocates: allocated on a GPU, or saved for backward
    passes on a CPU."""
    step()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated()
    kept = KeptTensors()
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda handle: handle.tensor):
        step()
    return kept.peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="a recipe")
    parser.add_argument("--accelerate_config", type=Path, required=True, help="an accelerate file for FSDP2")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/benchmark/one_rank"))
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rate = matmul_rate(device, 8192 if device == "cuda" else 1024, torch.bfloat16)
    row = measure(device, args.config, args.accelerate_config, args.output_dir, repeats=args.repeats)
    print(table_of([row | {"matmul TFLOP/s": rate / 1e12}]))


if __name__ == "__main__":
    main()
