"""Compiled decoder layers against eager ones: gradients, proxies and KL term of equal weights, and graphs."""

import pytest
import torch
from peft import LoraConfig
from support.models import relative_error
from support.rollouts import Replay
from support.runs import Recorder, build_trainer
from torch._dynamo.utils import counters
from transformers import TrainerCallback

from pacs_trl.update import compiled_layers


RUNS = {
    "PACS, KL term": {"beta": 0.1},
    "checkpointing": {"gradient_checkpointing": True},
    "snapshot": {"reference": "snapshot"},
    "LoRA": {"lora": True, "beta": 0.1},
}
# A gradient of bfloat16 products is a few percent off, eager or compiled.
LARGEST_DIFFERENCE = {False: 1e-4, True: 0.1}


class CountGraphs(TrainerCallback):
    def __init__(self):
        self.counts = []

    def on_step_end(self, args, state, control, **kwargs):
        self.counts.append((compiled_layers.num_graphs(), sum(counters["graph_break"].values())))


def compare(directory, device: str, name: str, bf16: bool) -> dict:
    """Train some steps with eager layers, and again with compiled ones."""
    if device == "cpu":
        compiled_layers.BACKEND = "aot_eager"  # which needs no compiler
    settings = {"max_steps": 20 if device == "cuda" else 3, "bf16": bf16, "use_cpu": device == "cpu"} | RUNS[name]
    with_lora, results = settings.pop("lora", False), []
    for compiles in (False, True):
        torch.manual_seed(0)  # of the adapter
        recorder, count = Recorder(), CountGraphs()
        lora = LoraConfig(r=4, target_modules="all-linear") if with_lora else None
        more = {"callbacks": [recorder, count], "peft_config": lora}
        run = {"compile_layers": compiles, "more": more, "learning_rate": 1e-3} | settings
        trainer = build_trainer(directory / str(compiles), replay=Replay(), **run)
        trainer.train()
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        results.append({"gradient": recorder.gradients[0], "logs": logs, "counts": count.counts})
    eager, compiled = results
    expected = {key: gradient for key, gradient in eager["gradient"].items() if gradient is not None}
    return {
        "run": name,
        "bf16": bf16,
        "gradient": relative_error(compiled["gradient"], expected),
        "proxy": compiled["logs"][0]["pacs/proxy_abs_mean"],
        "KL": compiled["logs"][0].get("kl", 0.0),
        "graphs": compiled["counts"][0][0],
        "graphs and breaks after the first step": [
            last - first for first, last in zip(compiled["counts"][0], compiled["counts"][-1], strict=True)
        ],
    }


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("name", RUNS)
def test_compiled_layers_train_what_eager_layers_do(alone, device, tmp_path, record_property, name, bf16):
    """Equal weights give proxies and a KL term of exactly 0, and steps of other lengths make no new graph."""
    row = alone(compare, tmp_path, device, name, bf16)
    record_property("rows", [row])
    assert row["gradient"] < LARGEST_DIFFERENCE[bf16]
    assert row["proxy"] == 0.0 and row["KL"] == 0.0
    assert row["graphs"] > 0 and row["graphs and breaks after the first step"] == [0, 0]
