"""Whole training steps with a colocated vLLM beside those of TRL: benchmarks/gpu_step.py."""

import pytest

from benchmarks.gpu import save_model
from benchmarks.gpu_step import COLUMNS, TINY, WholeStep, measure, measure_sums
from experiments.smollm2 import FOLDER


pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.vllm, pytest.mark.needs(package="vllm")]

METHODS = ("trl_grpo", "grpo", "grpo_auto")


def whole_steps(device: str, directory, sleep: bool) -> list[dict]:
    step = WholeStep("Qwen3-1.7B") if device == "cuda" else TINY
    return measure(device, directory, step, sleep=sleep, methods=METHODS)


def sums(device: str, directory, sleep: bool) -> list[dict]:
    overrides = () if device == "cuda" else ("--model_name_or_path", save_model(directory / "model", "tiny"))
    overrides += () if device == "cuda" else ("--max_completion_length", "4", "--num_generations", "4")
    overrides += () if device == "cuda" else ("--per_device_train_batch_size", "4")
    return measure_sums(device, directory, sleep=sleep, methods=METHODS, steps=2, overrides=overrides)


def check(rows: list[dict], sleep: str) -> None:
    """Parts add up to the step, and each trainer generates, sends weights, and learns."""
    assert [row["method"] for row in rows] == list(METHODS)
    for row in rows:
        assert row["sleep mode"] == sleep and row["steps"] == 2
        assert sum(row[part] for part in COLUMNS) == pytest.approx(row["s / step"])
        assert all(row[part] > 0 for part in ("generation", "weight transfer", "rewards", "update"))


@pytest.mark.needs(gib=70)
@pytest.mark.parametrize(
    "sleep", [False, pytest.param(True, marks=pytest.mark.needs(cuda=True))], ids=["awake", "sleep"]
)
def test_whole_steps(alone, device, tmp_path, record_property, sleep):
    """The shape of Qwen3-1.7B, completions of up to 4,096 tokens."""
    rows = alone(whole_steps, device, tmp_path, sleep)
    record_property("rows", rows)
    check(rows, "yes" if sleep else "no")


def test_whole_steps_on_sums(alone, device, tmp_path, record_property):
    """SmolLM2-135M-Instruct, whose completions end when it says so."""
    if device == "cuda" and not FOLDER.is_dir():
        pytest.skip(f"{FOLDER} is missing (`make model`)")
    rows = alone(sums, device, tmp_path, False)
    record_property("rows", rows)
    check(rows, "no")
