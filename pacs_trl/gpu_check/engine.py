"""The part `vllm`: an engine beside the trainer on one card. Weights that reach it, what it takes of the memory, seeds, grading while it
draws, resuming, and how far its probabilities are from the trainer's.
"""

import threading
from pathlib import Path
from typing import Any

import torch
from trl.generation import vllm_generation

from ..verification import Verifier
from .drift import score
from .replay import shape_of
from .results import Found
from .training import MAX_COMPLETION, logged, save_model, trainer_of


COLOCATED = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 64}

# Mean difference of log-probabilities between engine and trainer, in nats: what is left in float32, and what bfloat16 explains.
MAX_MISMATCH = {"float32": 1e-3, "auto": 0.05, "bfloat16": 0.05}

# A float32 model that `auto` loads may become one of half precision; these are what a row of the report says.
_SAMPLING = (
    "sampling_logp_difference/mean",
    "sampling_logp_difference/max",
    "effective_sample_size",
    "outside_fraction",
)


def one_engine(device: str, dtype: str) -> None:
    """From now on all trainers of this process share one engine, with weights of a dtype. Each sends its own before it generates."""
    real, started = vllm_generation.LLM, []
    more = {"dtype": dtype} | ({"enforce_eager": True} if device == "cpu" else {})

    def engine(**kwargs):
        if not started:
            started.append(real(**(kwargs | more)))
        return started[0]

    vllm_generation.LLM = engine
    if device == "cpu":
        keep_plain_products(lambda owner, name, value: setattr(owner, name, value))


def keep_plain_products(patch: Any) -> None:
    """vLLM's CPU backend repacks the weights of linear layers when it loads them, so that weights which are sent later would never be
    read. CUDA needs nothing of the kind. `patch(owner, name, value)` is `setattr`, or that of a monkeypatch."""
    from vllm.model_executor.layers import utils

    keep = {"cpu_linear": torch.nn.functional.linear}
    patch(utils, "dispatch_cpu_unquantized_gemm", lambda layer, remove_weight: vars(layer).update(keep))


def weights(
    *, device: str, directory: Path, model: str, dtype: str, fraction: float, sleep: bool, tensor_parallel: int = 1
) -> Found:
    """Train six steps. Weights are sent before each of the first four generations; without sleep, not before the last two, which must be
    seen."""
    one_engine(device, dtype)
    checkpoint, before = save_model(directory / "model", shape_of(model), device), _memory_in_use(device)
    settings = {"vllm_gpu_memory_utilization": fraction, "vllm_enable_sleep_mode": sleep}
    settings |= {"vllm_tensor_parallel_size": tensor_parallel, "max_steps": 4 if sleep else 6}
    trainer = trainer_of(directory / "run", checkpoint, device, **COLOCATED, **settings)
    rows: list[dict[str, Any]] = [{"moment": "engine started", "GiB in use": _memory_in_use(device) - before}]
    sync, generation = trainer.vllm_generation.sync_weights, trainer.vllm_generation
    generation.sync_weights = lambda: sync() if trainer.state.global_step < 4 else None
    generate, asked = generation.generate, _watch_verifier()

    def generate_and_look(**kwargs):
        result = generate(**kwargs)
        row = {
            "moment": f"after generation {trainer.state.global_step + 1}",
            "GiB in use": _memory_in_use(device) - before,
        }
        rows.append(row | {"mean difference": None})
        return result

    generation.generate = generate_and_look
    trainer.train()
    differences = logged(trainer, "sampling/sampling_logp_difference/mean")
    for row, difference, seconds in zip(rows[1:], differences, logged(trainer, "time/weight_sync"), strict=True):
        row |= {"mean difference": difference, "seconds to send weights": seconds}
    bars = {f"weights arrive: mean difference below {MAX_MISMATCH[dtype]}": max(differences[:4]) < MAX_MISMATCH[dtype]}
    bars["completions are graded while others are drawn"] = {"early_grading"} == set(asked)
    if sleep:
        bars["asleep, the engine holds less than a tenth of its share"] = rows[-1][
            "GiB in use"
        ] < 0.1 * fraction * _total(device)
    else:
        bars["weights that stay behind are seen"] = differences[5] > 3 * max(differences[:4])
        bars |= _seeds(trainer)
    if device == "cuda" and not sleep:
        share = fraction * _total(device)
        bars["the engine keeps to its share of the memory, and 2 GiB"] = rows[0]["GiB in use"] < share + 2
    return Found(rows, bars, f"mean difference {max(differences[:4]):.2g} nats after updates, {dtype}")


def _memory_in_use(device: str) -> float:
    """GiB of the card, of all processes."""
    if device == "cpu":
        return 0.0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def _total(device: str) -> float:
    return torch.cuda.get_device_properties(0).total_memory / 2**30 if device == "cuda" else 1.0


def _watch_verifier() -> list[str]:
    """Grows by the name of the thread that asks the verifier for grades."""
    request, asked = Verifier._request, []

    def request_and_note(self, items):
        asked.extend([threading.current_thread().name.rstrip("_0123456789")] * bool(items))
        return request(self, items)

    Verifier._request = request_and_note
    return asked


def _seeds(trainer) -> dict[str, bool]:
    """The same seeds draw the same, and others something else."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": list(range(40, 60))}] * 4
    params = [
        SamplingParams(temperature=1.0, max_tokens=MAX_COMPLETION, ignore_eos=True, seed=seed) for seed in (1, 2, 1, 3)
    ]
    llm = trainer.vllm_generation.llm.llm
    drawn = [
        [tuple(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]
        for _ in range(2)
    ]
    return {
        "equal seeds draw equal completions, within a call and in two": drawn[0] == drawn[1]
        and drawn[0][0] == drawn[0][2],
        "other seeds draw others": len(set(drawn[0])) == 3,
    }


def resume(*, device: str, directory: Path, model: str, dtype: str, fraction: float) -> Found:
    """A run that goes on from a checkpoint within a generation, and from one between two, against one that was not stopped."""
    one_engine(device, dtype)
    checkpoint = save_model(directory / "model", shape_of(model), device)
    settings = {**COLOCATED, "vllm_gpu_memory_utilization": fraction, "steps_per_generation": 2, "max_steps": 5}
    settings |= {"save_strategy": "steps", "save_steps": 1}
    rows, straight = [], None
    for step in (0, 3, 2):
        trainer = trainer_of(directory / f"from-{step}", checkpoint, device, **settings)
        trainer.train(resume_from_checkpoint=str(directory / "from-0" / f"checkpoint-{step}") if step else None)
        final = {name: weight.detach().cpu() for name, weight in trainer.model.named_parameters()}
        straight = straight or (logged(trainer, "loss"), final)
        losses = logged(trainer, "loss")
        rows.append(
            {
                "from step": step,
                "first loss after it": losses[step],
                "without stop": straight[0][step],
                "bit by bit": losses == straight[0]
                and all(torch.equal(final[name], straight[1][name]) for name in final),
            }
        )
    bars = {
        "within a generation the next step learns from the same rows": abs(
            rows[1]["first loss after it"] - rows[1]["without stop"]
        )
        < 1e-3
    }
    if device == "cpu":
        bars["bit by bit"] = all(row["bit by bit"] for row in rows)
    return Found(rows, bars, "bit by bit" if all(row["bit by bit"] for row in rows) else "equal up to rounding")


def mismatch(*, device: str, directory: Path, model: str, dtype: str, fraction: float, completion_max: int) -> Found:
    """With a learning rate of 0 nothing moves: proxies that are computed on the second rollout, and what engine and trainer differ by."""
    one_engine(device, dtype)
    checkpoint, rows = save_model(directory / "model", shape_of(model), device), []
    settings = COLOCATED | {"vllm_gpu_memory_utilization": fraction, "vllm_max_model_length": completion_max + 64}
    settings |= {"max_completion_length": completion_max, "learning_rate": 0.0, "max_steps": 2}
    settings |= {"per_device_train_batch_size": 16, "bf16": dtype == "bfloat16"}
    trainer = trainer_of(directory / "run", checkpoint, device, **settings)
    run = trainer.update.run

    def run_and_compare(policy, step, *, proxies_are_zero, **settings):
        with torch.no_grad(), trainer.update.scorer.attention():
            together = [list(range(len(step.rollouts)))]
            alone = [[i] for i in together[0]]
            scored = [
                score(policy, trainer.update.scorer, step.rollouts, batches) for batches in (together, together, alone)
            ]
        engine = [torch.from_numpy(row.sampling_logps) for row in step.rollouts]
        row = {"rollout": trainer.state.global_step + 1, "taken as 0": proxies_are_zero}
        for name, other in (("same micro-batch", scored[1]), ("each row alone", scored[2]), ("engine", engine)):
            row[f"mean abs proxy, {name}"] = _mean_abs_sum(scored[0], other)
        rows.append(row)
        return run(policy, step, proxies_are_zero=proxies_are_zero, **settings)

    trainer.update.run = run_and_compare
    trainer.train()
    for row, entry in zip(rows, trainer.state.log_history, strict=False):
        row |= {f"sampling/{name}": entry[f"sampling/{name}"] for name in _SAMPLING}
    second = rows[1]
    bars = {
        "the second rollout's proxies are taken as 0": second["taken as 0"],
        "computed in the same micro-batch they are 0": second["mean abs proxy, same micro-batch"] == 0.0,
        f"mean difference below {MAX_MISMATCH[dtype]}": second["sampling/sampling_logp_difference/mean"]
        < MAX_MISMATCH[dtype],
    }
    return Found(rows, bars, f"mean difference {second['sampling/sampling_logp_difference/mean']:.2g} nats, {dtype}")


def _mean_abs_sum(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    """Mean over completions of the absolute sum of log-ratios over its tokens."""
    return sum(abs((a - b).sum().item()) for a, b in zip(first, second, strict=True)) / len(first)
