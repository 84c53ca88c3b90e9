"""Benchmarks at tiny sizes, and their arithmetic."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.models import TOKENIZER, tiny_model

from benchmarks import end_to_end, gpu, optimizer_step, whole_step
from benchmarks.recorded import Size, config_of, recorded_rollouts, shape_of
from pacs_trl.plan.cost import H200


@pytest.mark.slow
def test_every_part_of_an_optimizer_step_is_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = ["--size", "tiny", "--repeats", "1", "--prompt_tokens", "16", "--output", "found.json"]
    monkeypatch.setattr("sys.argv", ["optimizer_step", *arguments])
    optimizer_step.main()
    rows = json.load(open("found.json"))
    assert {row["title"] for row in rows} == {
        "One update per generation",
        "Prompts of 16 tokens, 16 completions each",
        "Four updates per generation",
        "group memory",
    }
    assert all(row["peak MB"] > 0 for row in rows)
    assert "model FLOP utilization" in capsys.readouterr().out


@pytest.mark.slow
def test_optimizer_steps_of_other_architectures_are_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    shapes = ["gpt_oss", "minimax", "qwen3_5_text"]
    arguments = ["--size", "tiny", "--repeats", "1", "--parts", "shapes", "--shapes", *shapes]
    monkeypatch.setattr("sys.argv", ["optimizer_step", *arguments, "--output", "found.json"])
    optimizer_step.main()
    titles = ["gpt_oss, packed", "minimax, padded", "qwen3_5_text, packed"]
    assert list(dict.fromkeys(row["title"] for row in json.load(open("found.json")))) == titles


@pytest.mark.slow
def test_training_of_each_trainer_end_to_end(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    for each in (tiny_model(), TOKENIZER):
        each.save_pretrained("model")
    recipe = {"model_name_or_path": "model", "dataset_name": "addition.jsonl", "reward_funcs": ["math_reward"]}
    recipe |= {"num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 4, "logging_steps": 1}
    recipe |= {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none"}
    Path("recipe.json").write_text(json.dumps(recipe))
    sums = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(16)]
    Path("addition.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    methods = ["pacs", "grpo", "trl_grpo", "trl", "rloo", "trl_rloo"]
    arguments = ["--config", "recipe.json", "--max_steps", "1", "--window", "1", "--methods", *methods]
    monkeypatch.setattr("sys.argv", ["end_to_end", *arguments])
    monkeypatch.setattr(end_to_end.rollout_trainer, "StepTimer", end_to_end.rollout_trainer.StepTimer)
    end_to_end.main()
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows[-6:]] == [f"| {method}" for method in methods]
    assert all(float(row[3]) > 0 for row in rows[-6:])


def test_errors_of_the_plan_equal_those_worked_by_hand():
    """30 GiB measured, 10 + 10 planned: a third too little, and activations would have to be twice as large.

    Two seconds for one: half the time.
    """
    costs = SimpleNamespace(state=10 * 2**30, activations=7 * 2**30, rounded_weights=2**30)
    costs.gathered = costs.collected = 2**30
    costs.update_flops_and_seconds = lambda mean_tokens: (0.0, 1.0)
    columns = gpu.planned_beside(costs, {"GiB": 30.0, "seconds": 2.0}, 100, "cuda")
    assert columns["error of memory, %"] == pytest.approx(-100 / 3) and columns["error of time, %"] == pytest.approx(
        -50
    )
    assert columns["factor on activations"] == 2.0 and columns["factor on time"] == 2.0


def test_model_flops_equal_those_worked_by_hand():
    """Two completions of 2 and 4 tokens of a prompt of 3: 9 tokens are computed once, 12 are in the rows.

    A token of a row of length n attends to n of them: (25 + 49) / 12 on average.
    """
    shape = replace(shape_of("tiny"), vocabulary=10)
    rollouts = [{"prompt_ids": [1, 2, 3], "completion_ids": [4] * n} for n in (2, 4)]
    flops, tokens = gpu.model_flops(shape, rollouts)
    assert tokens == 12 and flops == pytest.approx(3 * shape.forward_flops(9, 74 / 12))


def test_rows_are_as_many_as_plan_says_fit(tmp_path, monkeypatch):
    """A GPU with room for less than 4 rows gets 2, and nothing is tried that cannot fit."""
    shape = shape_of("tiny")
    config_of(shape).save_pretrained(tmp_path / "model")
    size, device = Size(shape, 48, 8, 4, bf16=False), gpu.known_gpu(1e9, "cpu")
    named = {"method": "grpo", "checkpointing": False, "lora": False, "directory": tmp_path, "device": "cpu"}
    memory = 1.1 * gpu.costs_of(size, 2, device, **named).update / 0.95
    monkeypatch.setattr(gpu, "known_gpu", lambda rate, name: device._replace(memory_bytes=memory))
    settings = {"methods": ("grpo",), "completion_max": 48, "repeats": 1, "matmul": 64}
    (row,) = gpu.measure_steps("cpu", tmp_path, "tiny", False, **settings)
    assert row["rows per forward"] == 2


def test_simulated_groups_have_the_recorded_lengths():
    size = Size(shape_of("tiny"), 512, 8, 4, bf16=False)
    lengths = [len(rollout["completion_ids"]) for rollout in recorded_rollouts(size, 4)]
    groups = whole_step.recorded_groups(512, 0.35, 32)
    assert [length for _ in range(4) for length in next(groups).completions] == lengths
    assert [length for _ in range(4) for length in next(groups).completions] != lengths


def test_continuous_steps_are_simulated_to_be_faster_than_steps_in_turn():
    row = whole_step.simulate(("Qwen3-0.6B", 512, 0.1, 16), H200, num_gpus=2, staleness=[4], steps=8)
    assert row["completions"] == 32 and "1 generate" in row["one late, s"]
    assert float(row["continuous, staleness 4, s"].split()[0]) < row["in turn, s"]
