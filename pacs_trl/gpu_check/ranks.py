"""The part `gpus`: several processes on recorded rollouts against one, and an engine that several processes share.

`python -m pacs_trl.gpu_check.ranks JSON` is one of these processes. On a CPU they speak through gloo, and accelerate has to be
talked into sharding, which it does for accelerator devices only.
"""

import importlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor

from .replay import Size, recorded_rollouts, shape_of
from .results import Found
from .training import MAX_COMPLETION, logged, save_model, trainer_of


FSDP_SETTINGS: dict[str, Any] = {
    "fsdp": True,
    "fsdp_config": {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"],
        "cpu_ram_efficient_loading": False,
        "state_dict_type": "SHARDED_STATE_DICT",
    },
}

# Losses and weights of several processes against one: sums of float32 in another order.
RELATIVE = 1e-4


def zero3_settings(persistence_threshold: int) -> dict[str, Any]:
    return {
        "use_cpu": False,  # accelerate takes it for a wish not to use DeepSpeed
        "deepspeed": {
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": persistence_threshold},
            "zero_allow_untested_optimizer": True,
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
        },
    }


def let_accelerate_shard_on_cpu() -> None:
    """Everything behind accelerate's check of the device runs on a CPU with gloo."""
    construct = AcceleratorState.__init__

    def with_fsdp(self, *args, fsdp_plugin=None, **kwargs):
        construct(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        self.__dict__.setdefault("fsdp_plugin", fsdp_plugin)
        if self.__dict__["fsdp_plugin"] is not None:
            self.distributed_type = DistributedType.FSDP
            if self._mixed_precision != "no":
                self.__dict__["fsdp_plugin"].set_mixed_precision(self._mixed_precision)

    AcceleratorState.__init__ = with_fsdp


def let_accelerate_run_deepspeed_on_cpu() -> None:
    """DeepSpeed itself runs on a CPU with gloo."""
    import deepspeed.ops

    PartialState._prepare_backend = lambda self, *args, **kwargs: ("gloo", DistributedType.MULTI_CPU)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled for minutes


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a parameter or gradient, with the shards of all processes."""
    if hasattr(tensor, "ds_id"):
        from deepspeed.utils import safe_get_full_fp32_param

        return safe_get_full_fp32_param(tensor).clone()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


VARIANTS: dict[str, dict[str, Any]] = {
    "rollout": {},
    "padded": {"padding_free": "never"},
    "snapshot": {"reference": "snapshot", "reference_reset_steps": 2},
    "snapshot on the CPU": {"reference": "snapshot", "reference_offload": True},
}


def learn(*, device: str, directory: Path, checkpoint: str, kind: str, output: str) -> None:
    """Four steps of each variant on recorded rollouts, on however many processes there are; losses and weights go to `output`."""
    if device == "cpu" and kind == "fsdp2":
        let_accelerate_shard_on_cpu()
    if device == "cpu" and kind == "zero3":
        let_accelerate_run_deepspeed_on_cpu()
    processes, found = int(os.environ["WORLD_SIZE"]), {}
    settings = {"per_device_train_batch_size": 16 // processes, "steps_per_generation": 2}
    settings |= {"gradient_accumulation_steps": 1, "optim": "sgd", "learning_rate": 0.05, "max_steps": 4}
    settings |= {"fsdp2": FSDP_SETTINGS, "zero3": zero3_settings(0)}.get(kind, {})
    for name, variant in VARIANTS.items():
        trainer = trainer_of(directory / "run", checkpoint, device, rollout_func=_replay, **settings, **variant)
        trainer.train()
        weights = {name.removeprefix("module."): full(p).cpu() for name, p in trainer.model.named_parameters()}
        found[name] = {"weights": weights, "loss": logged(trainer, "loss"), "grad_norm": logged(trainer, "grad_norm")}
    if trainer.accelerator.is_main_process:
        torch.save(found, output)


def _replay(prompts, trainer) -> dict[str, Any]:
    """The share of this process in the rollouts of the generation, which are a function of its number."""
    accelerator, generation = trainer.accelerator, trainer.state.global_step // 2
    size = Size(shape_of("tiny"), MAX_COMPLETION, 1, 8, bf16=False)
    rows = recorded_rollouts(size, 8, generation, 4, (4, 12))[accelerator.process_index * len(prompts) :][
        : len(prompts)
    ]
    tokens = {name: [row[name] for row in rows] for name in ("prompt_ids", "completion_ids")}
    return {**tokens, "logprobs": None}


def start(function: str, processes: int, directory: Path, device: str, env: dict[str, str], **settings: Any) -> None:
    """
    Run `module:function` on so many processes and wait for them.

    Raises:
        `RuntimeError`: with the end of what one of them printed, if it failed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks, order = [], json.dumps({"function": function, "device": device, "settings": settings})
    for rank in range(processes):
        of_rank = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        of_rank |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = os.environ | env | {key: str(value) for key, value in of_rank.items()}
        (directory / str(rank)).mkdir(parents=True, exist_ok=True)
        log = (directory / str(rank) / "log").open("w+")
        command = [sys.executable, "-m", "pacs_trl.gpu_check.ranks", order, str(directory / str(rank))]
        ranks.append((subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT), log))
    failed = None
    while failed is None and any(process.poll() is None for process, _ in ranks):
        time.sleep(0.1)
        failed = next((rank for rank, (process, _) in enumerate(ranks) if process.poll()), None)
    for process, _ in ranks:  # the others would wait for one that failed
        process.kill()
        process.wait()
    failed = (
        next((rank for rank, (process, _) in enumerate(ranks) if process.returncode), None)
        if failed is None
        else failed
    )
    if failed is not None:
        process, log = ranks[failed]
        log.seek(0)
        raise RuntimeError(f"process {failed} of {processes} ended with {process.returncode}: {log.read()[-3000:]}")


def against_one(*, device: str, directory: Path, model: str, kind: str) -> Found:
    """DDP, FSDP2 or ZeRO-3 on two processes against one process of this device, or (`kind="one"`) that one against one on the CPU."""
    checkpoint, runs, rows = save_model(directory / "model", shape_of(model), device), {}, []
    cpu = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    deepspeed = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_USE_CPU": "false"}
    if kind == "one":
        launches = [("cpu", 1, "cpu", cpu), ("one", 1, device, {})]
    else:
        launches = [("one", 1, device, {}), (kind, 2, device, deepspeed if kind == "zero3" else {})]
    for name, processes, where, env in launches:
        output = str(directory / f"{name}.pt")
        settings = {"checkpoint": checkpoint, "kind": name, "output": output}
        start("pacs_trl.gpu_check.ranks:learn", processes, directory / name, where, env, **settings)
        runs[name] = torch.load(output)
    reference, other = runs.values()
    for name, expected in reference.items():
        found = other[name]
        difference = sum((found["weights"][n] - w).square().sum().item() for n, w in expected["weights"].items())
        size = sum(w.square().sum().item() for w in expected["weights"].values())
        row = {"variant": name, "weights": (difference / size) ** 0.5}
        for key in ("loss", "grad_norm"):
            pairs = zip(expected[key], found[key], strict=True)
            row[key] = max(abs(a - b) / max(abs(a), 1e-3) for a, b in pairs)
        rows.append(row)
    names = " against ".join(reversed(runs))
    bars = {f"{names}, {row['variant']}: all within {RELATIVE:g}": max([*row.values()][1:]) < RELATIVE for row in rows}
    return Found(rows, bars, f"{names}: weights within {max(row['weights'] for row in rows):.1g}")


def tensor_parallel(*, device: str, directory: Path, **settings: Any) -> Found:
    """Two processes that share one engine: the weights reach both halves of it."""
    output = directory / "found.json"
    start(
        "pacs_trl.gpu_check.ranks:shared_engine",
        2,
        directory / "ranks",
        device,
        {},
        output=str(output),
        settings=settings,
    )
    return Found(**json.loads(output.read_text()))


def shared_engine(*, device: str, directory: Path, output: str, settings: dict[str, Any]) -> None:
    from .engine import weights

    found = weights(device=device, directory=directory, tensor_parallel=2, **settings)
    if os.environ["RANK"] == "0":
        Path(output).write_text(json.dumps(found._asdict()))


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    module, _, name = asked["function"].partition(":")
    getattr(importlib.import_module(module), name)(
        device=asked["device"], directory=Path(sys.argv[2]), **asked["settings"]
    )
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # DeepSpeed's groups would wait for each other at exit
