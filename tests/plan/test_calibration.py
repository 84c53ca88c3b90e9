"""The cost model against optimizer steps measured on a GPU, whose rows are in tests/data/gpu_steps.yaml."""

from pathlib import Path

import pytest
import yaml

from benchmarks.recorded import NUM_GENERATIONS, PROMPT_TOKENS, Size, recorded_rollouts, shape_of
from pacs_trl.plan import cost
from pacs_trl.plan.cost import GIB, Execution, Passes
from pacs_trl.plan.sharding import Sharding
from pacs_trl.update.microbatching import (
    MicroBatchConfig,
    RolloutLengths,
    micro_batch_size,
    schedule_micro_batches,
)


ROWS = yaml.safe_load(Path(__file__).parents[1].joinpath("data", "gpu_steps.yaml").read_text())


def scheduled(row: dict) -> tuple[RolloutLengths, list[list[int]]]:
    """The completions of the step, and the micro-batches in which the trainer computes them."""
    size = Size(shape_of(row["model"]), row["longest"], NUM_GENERATIONS, num_groups=4, bf16=True)
    rollouts = recorded_rollouts(size, size.num_groups)
    texts = [i // NUM_GENERATIONS for i in range(len(rollouts))]
    prompts, completions = ([len(rollout[name]) for rollout in rollouts] for name in ("prompt_ids", "completion_ids"))
    lengths = RolloutLengths(prompts, completions, texts, pair_cost=1 / (6 * size.shape.hidden))
    max_tokens = row["completions"] * (PROMPT_TOKENS[1] + row["longest"])
    limits = MicroBatchConfig(1, NUM_GENERATIONS, max_tokens, pair_cost=lengths.pair_cost)
    return lengths, schedule_micro_batches(lengths, [[i] for i in range(len(rollouts))], limits)[0]


def estimated(row: dict) -> tuple[float, float]:
    """Seconds and GiB by the cost model."""
    shape = shape_of(row["model"])
    execution = Execution("autocast", row["recomputation"], row.get("compiled", False), row.get("attention", "sdpa"))
    lengths, micro_batches = scheduled(row)
    sizes = [micro_batch_size(indices, lengths, padded=False).tokens for indices in micro_batches]
    whole = [prompt + completion for prompt, completion in zip(lengths.prompts, lengths.completions, strict=True)]
    seconds = cost.update_seconds(
        shape,
        cost.H200,
        execution,
        Passes(1, 0),
        tokens=sum(sizes),
        mean_length=sum(n * n for n in whole) / sum(sizes),
        micro_batches=len(sizes),
    )
    seconds += cost.optimizer_seconds(shape.parameters, cost.H200)
    state = cost.training_state_bytes(shape.parameters, 0, frozen_bytes=0, sharding=Sharding())
    memory = state + shape.cast_bytes(execution) + shape.activation_bytes(max(sizes), execution)
    return seconds, memory / GIB


@pytest.mark.parametrize("row", ROWS, ids=lambda row: " ".join(str(value) for value in row.values()))
def test_an_optimizer_step_takes_the_estimated_memory_and_time(row):
    """The constants of the cost model come from the rows of the smaller model, and hold for the larger one."""
    seconds, gib = estimated(row)
    assert gib == pytest.approx(row["gib"], rel=0.15)
    assert seconds == pytest.approx(row["seconds"], rel=0.25)


def test_the_rows_cover_both_sides_of_each_choice():
    """Otherwise a constant of the model would not be tested."""
    for model in ("Qwen3-1.7B", "Qwen3-4B"):
        rows = [row for row in ROWS if row["model"] == model]
        assert {row["recomputation"] for row in rows} == {"none", "full"}
        assert {row.get("compiled", False) for row in rows} == {False, True}
