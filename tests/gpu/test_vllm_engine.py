"""A vLLM engine beside the trainer: weights, memory, seeds, resuming, mismatch.

With a vLLM for CPUs the tests that need no CUDA run on the CPU.
"""

import pytest
import torch

from benchmarks.gpu import COLOCATED, MAX_COMPLETION, save_model, trainer_on
from benchmarks.shared_engine import share_engine


pytestmark = pytest.mark.needs(package="vllm")

# Mean difference of log-probs between engine and trainer, in nats. `auto` may load float32 weights in half precision.
MAX_MISMATCH = {"float32": 1e-3, "auto": 0.05, "bfloat16": 0.05}
MISMATCH = "sampling/sampling_logp_difference/mean"


@pytest.fixture
def engine(device) -> dict:
    """Arguments of the functions below, which run in a process of their own."""
    if device == "cuda":
        return {"device": device, "model": "small", "dtype": "auto"}
    return {"device": device, "model": "tiny", "dtype": "float32"}


def logged(trainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def train_and_watch(directory, engine: dict, fraction: float, sleep: bool, tensor_parallel: int = 1) -> dict:
    """
    Train six steps (four with sleep mode), one generation each; weights are sent before the first four only.

    Returns the difference of log-probs and the GiB in use after each generation, the GiB that the engine takes and may
    take, and, without sleep mode, completions of seeds.
    """
    device = engine["device"]
    share_engine(device, engine["dtype"])
    checkpoint, before = save_model(directory / "model", engine["model"]), gib_in_use(device)
    settings = COLOCATED | {"vllm_gpu_memory_utilization": fraction, "vllm_enable_sleep_mode": sleep}
    settings |= {"vllm_tensor_parallel_size": tensor_parallel, "max_steps": 4 if sleep else 6}
    trainer = trainer_on(checkpoint, directory / "run", device, **settings)
    report = {"engine GiB": gib_in_use(device) - before, "share GiB": fraction * total_gib(device)}
    report["rows"] = []
    generation = trainer.vllm_generation
    sync, generate = generation.sync_weights, generation.generate
    generation.sync_weights = lambda: sync() if trainer.state.global_step < 4 else None

    def generate_and_look(**kwargs):
        result = generate(**kwargs)
        report["rows"].append({"generation": trainer.state.global_step + 1, "GiB": gib_in_use(device) - before})
        return result

    generation.generate = generate_and_look
    trainer.train()
    for row, difference, seconds in zip(
        report["rows"], logged(trainer, MISMATCH), logged(trainer, "time/weight_sync"), strict=True
    ):
        row |= {"mean difference": difference, "seconds to send weights": seconds}
    if not sleep:
        report["seeds"] = completions_of_seeds(trainer)
    return report


def gib_in_use(device: str) -> float:
    """Return the GiB in use on this GPU, by all processes."""
    return total_gib(device) - torch.cuda.mem_get_info()[0] / 2**30 if device == "cuda" else 0.0


def total_gib(device: str) -> float:
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[1] / 2**30 if device == "cuda" else 0.0


def completions_of_seeds(trainer) -> list[list[tuple]]:
    """Generate twice from one prompt with the seeds 1, 2, 1, 3."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": list(range(40, 60))}] * 4
    params = [
        SamplingParams(temperature=1.0, max_tokens=MAX_COMPLETION, ignore_eos=True, seed=seed) for seed in (1, 2, 1, 3)
    ]
    llm = trainer.vllm_generation.llm.llm
    outputs = [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)]
    return [[tuple(output.outputs[0].token_ids) for output in call_outputs] for call_outputs in outputs]


def check_weights(report: dict, dtype: str, sleep: bool) -> None:
    differences = [row["mean difference"] for row in report["rows"]]
    assert max(differences[:4]) < MAX_MISMATCH[dtype]
    if not sleep:
        assert differences[5] > 3 * max(differences[:4])  # weights that stay behind are noticed
        first, second = report["seeds"]
        assert first == second and first[0] == first[2] and len(set(first)) == 3


@pytest.mark.parametrize(
    ("fraction", "sleep"),
    [
        pytest.param(0.3, False, id="awake"),
        pytest.param(0.3, True, id="sleep", marks=pytest.mark.needs(cuda=True)),
        pytest.param(0.6, False, id="more memory", marks=pytest.mark.needs(cuda=True)),
    ],
)
def test_weights_reach_the_engine(alone, tmp_path, record_property, engine, fraction, sleep):
    """Equal seeds give equal completions, and memory stays in its share."""
    report = alone(train_and_watch, tmp_path, engine, fraction, sleep)
    record_property("rows", report["rows"])
    check_weights(report, engine["dtype"], sleep)
    if engine["device"] == "cuda":
        assert sleep or report["engine GiB"] < report["share GiB"] + 2
        assert not sleep or report["rows"][-1]["GiB"] < 0.1 * report["share GiB"]


@pytest.mark.needs(cuda=True, num_gpus=2)
def test_weights_reach_both_halves_of_an_engine(alone, tmp_path, record_property, engine):
    """Two processes share an engine by tensor parallelism."""
    save_model(tmp_path / "model", engine["model"])
    report = alone(train_and_watch, tmp_path, engine, 0.3, False, 2, num_processes=2)
    record_property("rows", report["rows"])
    check_weights(report, engine["dtype"], sleep=False)


def resume(directory, engine: dict) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    """Return losses and final weights of a run, and of runs from step 3 (within a generation) and 2 (between two)."""
    share_engine(engine["device"], engine["dtype"])
    checkpoint = save_model(directory / "model", engine["model"])
    settings = COLOCATED | {"steps_per_generation": 2, "max_steps": 5, "save_strategy": "steps", "save_steps": 1}
    runs = []
    for step in (0, 3, 2):
        trainer = trainer_on(checkpoint, directory / f"from-{step}", engine["device"], **settings)
        trainer.train(resume_from_checkpoint=str(directory / "from-0" / f"checkpoint-{step}") if step else None)
        weights = {name: weight.detach().cpu() for name, weight in trainer.model.named_parameters()}
        runs.append((logged(trainer, "loss"), weights))
    return runs


def test_a_run_resumes(alone, tmp_path, record_property, engine):
    """Within a generation, the next step learns from the same completions; on a CPU all bits are equal."""
    (losses, weights), within, between = alone(resume, tmp_path, engine)
    equal = [
        losses_there == losses and all(torch.equal(other[name], weights[name]) for name in weights)
        for losses_there, other in (within, between)
    ]
    record_property("rows", [{"from step": step, "bits equal": same} for step, same in zip((3, 2), equal)])
    assert abs(within[0][3] - losses[3]) < 1e-3
    assert engine["device"] == "cuda" or all(equal)


def measure_mismatch(directory, device: str, model: str, dtype: str, completion_max: int) -> list[dict]:
    """Train two steps with a learning rate of 0; return the metrics of the mismatch."""
    share_engine(device, dtype)
    checkpoint = save_model(directory / "model", model)
    settings = COLOCATED | {"vllm_max_model_length": completion_max + 64, "max_completion_length": completion_max}
    settings |= {"learning_rate": 0.0, "max_steps": 2, "per_device_train_batch_size": 16, "bf16": dtype == "bfloat16"}
    trainer = trainer_on(checkpoint, directory / "run", device, **settings)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if MISMATCH in entry]
    return [{name: value for name, value in entry.items() if name.startswith("sampling/")} for entry in logs]


@pytest.mark.parametrize(
    ("dtype", "invariant"),
    [
        ("float32", False),
        pytest.param("float32", True, marks=pytest.mark.needs(cuda=True)),
        pytest.param("bfloat16", False, marks=pytest.mark.needs(cuda=True)),
        pytest.param("bfloat16", True, marks=pytest.mark.needs(cuda=True)),
    ],
)
def test_mismatch(alone, device, tmp_path, record_property, dtype, invariant):
    """Nothing moves: engine and trainer differ by rounding only."""
    sizes = ("Qwen3-0.6B", dtype, 512) if device == "cuda" else ("tiny", dtype, MAX_COMPLETION)
    environment = {"VLLM_BATCH_INVARIANT": "1"} if invariant else {}
    rows = alone(measure_mismatch, tmp_path, device, *sizes, **environment)
    record_property("rows", rows)
    assert len(rows) == 2 and max(row[MISMATCH] for row in rows) < MAX_MISMATCH[dtype]
