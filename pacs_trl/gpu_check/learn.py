"""The miniature learns, with the bars of the quickstart; and an hour of training in pieces, in which nothing may grow."""

import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import TrainerCallback

from .. import train
from ..evaluation.arguments import EvaluationArguments
from ..evaluation.evaluate import evaluate
from ..miniature.warm_start import warm_start
from ..report.inputs import read_log_history
from ..rollouts.resume import last_checkpoint
from ..verification import shared_verifier
from .engine import COLOCATED, one_engine
from .replay import shape_of
from .results import Found
from .training import save_model, trainer_of


BENCHMARK = "miniature/addition"

# recipes/miniature/quickstart_pacs.yaml, which is not where this package is installed.
QUICKSTART = {
    "method": "pacs",
    "model_name_or_path": "miniature/addition",
    "dataset_name": "miniature/addition",
    "prompt_instruction": "",
    "reward_funcs": ["math_reward"],
    "num_generations": 8,
    "per_device_train_batch_size": 64,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 4,
    "max_completion_length": 32,
    "temperature": 1.0,
    "pacs_beta": 1.0,
    "learning_rate": 1e-4,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 10,
    "max_grad_norm": 0.0,
    "max_steps": 240,
    "seed": 42,
    "output_dir": "outputs/miniature/quickstart_pacs",
    "bf16": False,
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
}


def learns(
    *,
    device: str,
    directory: Path,
    engine: str,
    num_problems: int = 250,
    num_samples: int = 16,
    start: dict[str, Any] | None = None,
    judged: bool = True,
    **settings: Any,
) -> Found:
    """The quickstart's training, completions drawn by `"vllm"` or `"transformers"`; bars on the result only if it is `judged`. `start`
    and `settings` win over those of the warm start and of the recipe."""
    recipe = QUICKSTART | {"use_cpu": device == "cpu", "disable_tqdm": True} | settings
    if engine == "vllm":
        one_engine(device, "float32")
        recipe |= COLOCATED | {"vllm_max_model_length": 128, "vllm_gpu_memory_utilization": 0.3}
    (directory / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    model = warm_start("addition", seed=42, cache_dir=directory.parent / "warm_start", **(start or {}))
    results = {}
    for name, checkpoint in (("before", model), ("after", directory / "run")):
        if name == "after":
            output = ["--model_name_or_path", str(model), "--output_dir", str(checkpoint)]
            train.main(["--config", str(directory / "recipe.yaml"), *output, "--resume_from_checkpoint", "last"])
            logs = read_log_history(checkpoint / "trainer_state.json")
        arguments = EvaluationArguments(
            model=str(checkpoint),
            benchmarks=BENCHMARK,
            output_dir=str(directory / name),
            n=num_samples,
            k="1,8" if num_samples > 7 else "1",
            temperature=1.0,
            top_p=1.0,
            max_new_tokens=recipe["max_completion_length"],
            prompt_instruction="",
            engine="transformers",
            batch_size=256,
            max_problems=num_problems,
        )
        results[name] = evaluate(arguments, shared_verifier())["benchmarks"][BENCHMARK]["pass_at_k"]
    rows = [
        {"pass@k": f"{k} {name}", **{key: 100 * value for key, value in interval.items()}}
        for name, table in results.items()
        for k, interval in table.items()
    ]
    before, after = results["before"]["1"], results["after"]["1"]
    losses = [entry["loss"] for entry in logs if "loss" in entry]
    bars = {"all losses are numbers": all(loss == loss and abs(loss) < 100 for loss in losses)}
    if judged:
        bars["pass@1 at least doubles"] = after["value"] >= 2 * before["value"]
        bars["its 95 % intervals do not overlap"] = after["lower"] > before["upper"]
    short = f"pass@1 from {100 * before['value']:.1f} to {100 * after['value']:.1f} % with {engine}"
    return Found(rows, bars, short)


class Watch(TrainerCallback):
    """Notes memory and metrics of every step, and stops after so many seconds."""

    def __init__(self, seconds: float):
        self.deadline, self.rows = time.monotonic() + seconds, []

    def on_step_end(self, args, state, control, **kwargs):
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**30
        on_gpu = torch.cuda.memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
        self.rows.append({"resident GiB": resident, "allocated GiB": on_gpu})
        if time.monotonic() > self.deadline:
            control.should_training_stop = control.should_save = True


def soak(*, device: str, directory: Path, model: str, seconds: float) -> Found:
    """Train for so many seconds, from where the last piece has stopped."""
    checkpoint, watch = save_model(directory / "model", shape_of(model), device), Watch(seconds)
    engine = {}
    if device == "cuda" and find_spec("vllm"):
        one_engine(device, "auto")
        engine = COLOCATED | {"vllm_gpu_memory_utilization": 0.3}
    settings = {"learning_rate": 1e-5, "save_strategy": "steps", "save_steps": 200, "save_total_limit": 2}
    trainer = trainer_of(
        directory / "run", checkpoint, device, callbacks=[watch], max_steps=10**7, **engine, **settings
    )
    trainer.train(
        resume_from_checkpoint=last_checkpoint(str(directory / "run")) if (directory / "run").is_dir() else None
    )
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    quarter = max(len(watch.rows) // 4, 1)
    second, last = watch.rows[quarter : 2 * quarter] or watch.rows, watch.rows[-quarter:]
    grown = {key: _mean(last, key) - _mean(second, key) for key in watch.rows[0]}
    rows = [{"steps": f"{trainer.state.global_step - len(watch.rows) + 1} to {trainer.state.global_step}"}]
    rows[0] |= {f"{key}, second quarter": _mean(second, key) for key in grown} | {
        f"{key}, last": _mean(last, key) for key in grown
    }
    bars = {f"{key} grows by less than 0.1": value < 0.1 for key, value in grown.items()}
    for name in ("loss", "entropy", "grad_norm"):
        bars[f"{name} is a number at every step"] = all(abs(entry[name]) < 1e6 for entry in entries)
    bars["no step was left out as not finite"] = entries[-1]["pacs/non_finite_steps"] == 0
    return Found(
        rows, bars, f"{len(watch.rows)} steps in {seconds:.0f} s, resident memory {grown['resident GiB']:+.2g} GiB"
    )


def _mean(rows: Sequence[dict[str, float]], key: str) -> float:
    return sum(row[key] for row in rows) / len(rows)
