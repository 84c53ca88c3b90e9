"""Measurements of benchmarks/gpu.py and benchmarks/proxy_noise.py: what must hold whatever the times are."""

import pytest

from benchmarks.gpu import measure_steps, soak
from benchmarks.proxy_noise import SAME, drift


pytestmark = [pytest.mark.gpu, pytest.mark.slow]

# `pacs-trl plan` says that it is accurate to this factor.
FACTOR_OF_PLAN = 1.5


def check_steps(rows: list[dict], device: str) -> None:
    """Weights stay finite, and the memory of `plan` is right to a factor."""
    assert all(row["finite"] for row in rows)
    assert all(0 < row["fastest"] <= row["seconds"] <= row["slowest"] for row in rows)
    if device == "cuda":  # on a CPU the sizes are too small
        assert all(1 / FACTOR_OF_PLAN < row["plan GiB"] / row["GiB"] < FACTOR_OF_PLAN for row in rows)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    "model",
    [
        pytest.param("Qwen3-1.7B", marks=pytest.mark.needs(gib=40)),
        pytest.param("Qwen3-4B", marks=pytest.mark.needs(cuda=True, gib=100)),
    ],
)
def test_steps(alone, device, tmp_path, record_property, model, checkpointing):
    """PACS, also with half of the groups uniform, and GRPO on both updates; same rollouts of up to 4,096 tokens."""
    rows = alone(measured, device, tmp_path, model, checkpointing, ("pacs", "grpo", "trl_grpo"), 4096, False)
    record_property("rows", rows)
    methods = [(row["method"], row["uniform"]) for row in rows]
    assert methods == [("pacs", 0.0), ("pacs", 0.5), ("grpo", 0.0), ("trl_grpo", 0.0)]
    check_steps(rows, device)


def measured(device, directory, model, checkpointing, methods, completion_max, lora) -> list[dict]:
    if device == "cuda":
        sizes = {"completion_max": completion_max, "repeats": 3}
    else:
        model, sizes = "tiny", {"completion_max": 48, "repeats": 1, "matmul": 256}
    return measure_steps(device, directory, model, checkpointing, methods=methods, lora=lora, **sizes)


@pytest.mark.needs(gib=40)
def test_lora_of_8b(alone, device, tmp_path, record_property):
    rows = alone(measured, device, tmp_path, "Qwen3-8B", True, ("pacs",), 4096, True)
    record_property("rows", rows)
    assert len(rows) == 2 and all("LoRA" in row["model"] for row in rows)
    check_steps(rows, device)


@pytest.mark.parametrize("model", ["small", pytest.param("Qwen3-1.7B", marks=pytest.mark.needs(cuda=True, gib=60))])
def test_proxies_are_0_in_the_same_micro_batches(alone, device, record_property, model):
    """Policy and reference are equal; other micro-batches give other roundings, which the report lists."""
    longest = {"small": 512, "Qwen3-1.7B": 1024}[model]
    rows = alone(drift, device, *((model, longest) if device == "cuda" else ("tiny", 24)))
    record_property("rows", rows)
    assert len(rows) == 12
    same = [row["max abs proxy"] for row in rows if row["reference computed"] == SAME]
    assert same == [0.0] * 3
    # On an H100 log-probs of this model in bfloat16 are the same in all micro-batches, in float32 they are not.
    precision, least = ("fp32", 1e-6) if device == "cuda" else ("bf16 weights", 1e-4)
    assert max(row["max abs proxy"] for row in rows if row["precision"] == precision) > least


@pytest.fixture(scope="session")
def soak_directory(request, tmp_path_factory):
    """The run of `make gpu-check` continues after each part, whoever runs it."""
    return request.config.getoption("--gpu-report", None) or tmp_path_factory.mktemp("soak")


@pytest.mark.parametrize("part", range(1, 9))
def test_soak(request, alone, device, record_property, soak_directory, part):
    """An hour of training in parts of seven minutes, each from the checkpoint of the last: memory must not grow."""
    if device == "cuda" and "soak" not in request.config.option.keyword:
        pytest.skip("takes an hour; run it with -k soak")
    if device == "cpu" and part > 2:
        pytest.skip("two parts show that it continues")
    directory = soak_directory.absolute() / "soak"
    before = list((directory / "run").glob("checkpoint-*"))
    (row,) = alone(soak, device, directory, *(("small", 420.0) if device == "cuda" else ("tiny", 0.5)))
    record_property("rows", [row])
    assert row["finite"]
    assert row["first step"] == 1 + max((int(path.name.partition("-")[2]) for path in before), default=0)
    assert row["growth of resident GiB"] < 0.1 and row["growth of allocated GiB"] < 0.1
