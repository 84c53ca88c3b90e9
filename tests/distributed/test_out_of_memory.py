"""Processes that run out of memory: with DDP all repeat the step, with FSDP2 they try the largest size first."""

import os
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from support.models import LORA, RELATIVE, relative_error
from support.processes import on_two
from support.rollouts import Replay
from support.runs import Recorder, build_trainer, out_of_memory_in
from support.seeds import shifted
from support.sharding import FSDP_SETTINGS, let_accelerate_shard_on_cpu

from pacs_trl import GRPOTrainer, PACSTrainer
from pacs_trl.rollouts import memory
from pacs_trl.rollouts.memory import DeviceMemory


pytestmark = [pytest.mark.slow, pytest.mark.distributed]

# Two completions per micro-batch and two micro-batches per process; or one of four.
TWO = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 4}
ONE = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "steps_per_generation": 2}
# Method, settings, and the pass with gradient in which the second process runs out of memory.
STEPS = {
    "PACS, last pass": (PACSTrainer, TWO, 2),
    "PACS, second update": (PACSTrainer, TWO, 3),
    "GRPO, only pass": (GRPOTrainer, ONE, 1),
    "GRPO with an adapter and a KL term": (GRPOTrainer, TWO | {"beta": 0.1, "more": {"peft_config": LORA}}, 2),
}


def repeated_steps(directory: Path) -> None:
    """Save the gradients of each case of this process, with and without a pass that fails."""
    rank, outcomes = int(os.environ["RANK"]), {}
    for name, (trainer_class, settings, number) in STEPS.items():
        for fails in (False, True):
            replay = Replay(uniform_groups=0)
            torch.manual_seed(shifted(0))  # of the adapter
            trainer = build_trainer(directory, replay=replay, trainer_class=trainer_class, max_steps=2, **settings)
            recorder = Recorder()
            trainer.add_callback(recorder)
            if fails and rank == 1:
                out_of_memory_in(trainer, number)
            trainer.train()
            limit = trainer.update.driver.limits.max_tokens
            outcomes[name, fails] = recorder.gradients, trainer_metrics(trainer), limit
    torch.save(outcomes, directory / f"steps.{rank}.pt")


def trainer_metrics(trainer) -> list[dict]:
    names = ("loss", "entropy", "grad_norm")
    return [{name: log[name] for name in names} for log in trainer.state.log_history if "loss" in log]


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    directory = tmp_path_factory.mktemp("steps")
    output = on_two(repeated_steps, directory, outputs=directory)
    return [torch.load(directory / f"steps.{rank}.pt", weights_only=False) for rank in range(2)], output


@pytest.mark.parametrize("name", STEPS)
def test_with_ddp_all_processes_repeat_a_step(steps, name):
    (first, second), (printed, _) = steps
    limits = {process[name, True][2] for process in (first, second)}
    assert len(limits) == 1 and first[name, False][2] is None and limits != {None}
    for process in (first, second):
        gradients, metrics, _ = process[name, False]
        repeated, metrics_again, _ = process[name, True]
        assert len(gradients) == len(repeated) == 2
        for expected, step_gradients in zip(gradients, repeated, strict=True):
            assert relative_error(step_gradients, expected) < RELATIVE
        for expected, step_metrics in zip(metrics, metrics_again, strict=True):
            assert step_metrics == pytest.approx(expected, rel=1e-4)
    assert printed.count("Out of memory in optimizer step") == len(STEPS)


def tried_micro_batches(directory: Path) -> None:
    """Train with FSDP2 on a device with room for everything, on which passes of more than 1,060 tokens fail; and with
    the micro-batches of a CPU."""
    let_accelerate_shard_on_cpu()
    automatic = {"gradient_checkpointing": "auto", "max_tokens_per_micro_batch": "auto"}
    outcomes = []
    with patch.object(memory, "device_memory", lambda device: DeviceMemory(10**9, 10**9, "NVIDIA H200")):
        for settings in (automatic, {}):
            trainer = build_trainer(directory, replay=Replay(), max_steps=1, **FSDP_SETTINGS, **TWO, **settings)
            recorder, tokens = Recorder(), []
            trainer.add_callback(recorder)

            def check(texts, num_predicted, tokens=tokens):
                if torch.is_grad_enabled():
                    tokens.append(sum(map(sum, texts)))
                    if tokens[-1] > 1060:
                        raise torch.OutOfMemoryError

            trainer.forward_pass.on_pass = check
            trainer.train()
            outcomes.append((recorder.gradients, tokens, trainer.update.driver.limits.max_tokens))
    torch.save(outcomes, directory / f"tried.{os.environ['RANK']}.pt")


def test_with_fsdp2_all_processes_try_the_largest_micro_batch_before_training(tmp_path):
    """A rollout can have 1,024 + 16 tokens, and four of a prompt 1,091, which are tried first: 1,040 + 51, without the
    last token of each. Half of them would not hold a rollout; one is tried in two passes, whose gradients add up."""
    on_two(tried_micro_batches, tmp_path, outputs=tmp_path)
    for rank in range(2):
        automatic, on_cpu = torch.load(tmp_path / f"tried.{rank}.pt", weights_only=False)
        gradients, tokens, size = automatic
        assert tokens[:3] == [1089, 1039, 1039] and size == 1040
        assert relative_error(gradients[0], on_cpu[0][0]) < RELATIVE
