"""Automatic memory settings on a GPU: what they become, and a step in which its memory runs out."""

import pytest
import torch
from support.models import RELATIVE, relative_error
from support.rollouts import Replay
from support.runs import Recorder, build_trainer

from pacs_trl.rollouts.memory import device_memory


pytestmark = pytest.mark.gpu

AUTO = {"gradient_checkpointing": "auto", "max_tokens_per_micro_batch": "auto"}


def train_with_little_memory(directory, device: str) -> dict:
    """Train on the same rollouts with automatic settings: with all of the memory, and with a first pass for which
    nothing is left. Return the gradients, weights, and choices."""
    results = {}
    for name in ("plenty", "little"):
        trainer = build_trainer(directory, replay=Replay(uniform_groups=0), use_cpu=device == "cpu", **AUTO)
        if name == "little":
            occupy_memory_in_first_pass(trainer, device)
        recorder = Recorder()
        trainer.add_callback(recorder)
        trainer.train()
        results[name] = {
            "gradients": [{key: value.cpu() for key, value in step.items()} for step in recorder.gradients],
            "weights": {key: value.detach().cpu() for key, value in trainer.model.named_parameters()},
            "choice": str(trainer.memory.choice),
        }
    return results


def occupy_memory_in_first_pass(trainer, device: str) -> None:
    """Occupy what is free during the first pass with gradient; a CPU raises the error instead."""
    blocks: list[torch.Tensor] = []
    passes = 0

    def occupy(texts, num_predicted):
        nonlocal passes
        passes += torch.is_grad_enabled()
        blocks.clear()
        if passes == 1 and torch.is_grad_enabled():
            if device == "cpu":
                raise torch.OutOfMemoryError
            torch.cuda.empty_cache()
            size = device_memory(trainer.accelerator.device).free
            while size > 2**19:  # down to less than an allocation of the caching allocator
                try:
                    blocks.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
                except torch.OutOfMemoryError:
                    size //= 2

    trainer.forward_pass.on_pass = occupy


def test_a_step_without_memory_is_repeated_with_the_same_result(alone, device, tmp_path, record_property):
    results = alone(train_with_little_memory, tmp_path, device)
    plenty, little = results["plenty"], results["little"]
    errors = [
        relative_error(repeated, expected)
        for repeated, expected in zip(little["gradients"], plenty["gradients"], strict=True)
    ]
    rows = [{"memory": name, "choice": result["choice"]} for name, result in results.items()]
    record_property("rows", [{**row, "largest relative difference": max(errors)} for row in rows])
    assert "out of memory in step 1" in little["choice"] and "out of memory" not in plenty["choice"]
    assert plenty["choice"].startswith("no recomputation")
    assert max(errors) < (RELATIVE if device == "cpu" else 1e-4)
    assert relative_error(little["weights"], plenty["weights"]) < 1e-4
