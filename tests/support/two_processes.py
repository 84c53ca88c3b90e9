"""Scenarios that two processes run in one launch, and the comparison of what both saw with one process.

A scenario is a function of `(rank, directory)` that returns something `torch.save` can write. All scenarios of a kind
(DDP, FSDP2, ZeRO-3) run in one launch, because starting processes takes longer than training.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import get_peft_model
from torch.distributed.fsdp import FSDPModule

from pacs_trl import PACSTrainer
from support.long_way import RaggedGroups, in_graph_step
from support.models import LORA, RELATIVE, relative_error, tiny_model, trainable_weights
from support.optional_packages import require
from support.processes import on_two
from support.rollouts import Replay, addition_dataset
from support.runs import Recorder, build_trainer, config
from support.seeds import shifted
from support.sharding import let_accelerate_run_deepspeed_on_cpu, let_accelerate_shard_on_cpu


ADAM = {"optim": "adamw_torch", "learning_rate": 3e-3}

# Two ranks and 16 rows per generation, so two optimizer steps of two groups of four each.
HALF = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "steps_per_generation": 2}
QUARTER = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 4}
EIGHTH = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "steps_per_generation": 8}
DEEPSPEED = {"ACCELERATE_USE_CPU": "false", "ACCELERATE_USE_DEEPSPEED": "true", "DS_ACCELERATOR": "cpu"}


class Sampled(Replay):
    """Rollouts as if an engine had generated them, which gave every token about the same probability."""

    def __call__(self, prompts, trainer):
        output = super().__call__(prompts, trainer)
        output["logprobs"] = [[-5.4 + 0.1 * (token % 3) for token in ids] for ids in output["completion_ids"]]
        return output


def record(directory, settings, replay_settings, *, trainer_class=None, replay_class=Replay):
    settings = {"trainer_class": trainer_class} | settings
    replay, recorder = replay_class(**replay_settings), Recorder()
    more = {"callbacks": [recorder], "peft_config": settings.pop("peft_config", None)}
    torch.manual_seed(shifted(0))  # the same adapter on both processes
    trainer = build_trainer(directory, replay=replay, more=more, **settings)
    trainer.train()
    return {
        "weights": recorder.weights,
        "gradients": recorder.gradients,
        "generations": replay.weights,
        "final": trainable_weights(trainer.model),
        "logs": [e for e in trainer.state.log_history if "loss" in e],
        "sharded": isinstance(trainer.model_wrapped, FSDPModule),
    }


def resumed(rank, directory, lora=False, more=None, reward=None, steps=(3, 4, 5), **settings):
    """Completions are sampled; a run continued after each of some steps ends with the same bits as one without
    stop."""
    shared = {**EIGHTH, **ADAM, "steps_per_generation": 16, "save_strategy": "steps", "save_steps": 1, "max_steps": 6}

    def run(name, resume=None):
        data = {"train_dataset": addition_dataset(8), "peft_config": LORA if lora else None}  # an epoch has 4 steps
        trainer = build_trainer(directory / name, reward=reward, more=data | (more or {}), **(shared | settings))
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model(trainer.args.output_dir, _internal_call=True)
        history = [e for e in trainer.state.log_history if "loss" in e]
        return trainable_weights(trainer.model), [e["loss"] for e in history], history

    straight, losses, history = run("straight")
    again = {}
    for step in steps:
        weights, losses_again, _ = run("again", str(directory / "straight" / f"checkpoint-{step}"))
        again[step] = losses == losses_again and all(torch.equal(straight[n], weights[n]) for n in straight)
    return {"final": straight, "again": again, "history": history}


def run_scenarios(scenarios: dict[str, Callable], kind: str, output: Path) -> None:
    """Run scenarios on one process of a launch; it writes each result as `NAME.RANK.pt`."""
    if "fsdp2" in kind:
        let_accelerate_shard_on_cpu()
    if kind == "zero3":
        let_accelerate_run_deepspeed_on_cpu()
    rank = int(os.environ["RANK"])
    for number, (name, scenario) in enumerate(scenarios.items()):
        print(f"[{rank}] {name}", flush=True)
        torch.save(scenario(rank, output / "runs" / str(number)), output / f"{name}.{rank}.pt")
    torch.distributed.destroy_process_group()  # DeepSpeed's groups would wait for each other at exit


def launch(tmp_path_factory, kind: str, scenarios: dict[str, Callable]) -> Path:
    """The folder of the results of two processes."""
    output = tmp_path_factory.mktemp(kind)
    on_two(run_scenarios, scenarios, kind, output, outputs=output, **(DEEPSPEED if kind == "zero3" else {}))
    return output


def launch_fixture(kind: str, scenarios: dict[str, Callable]) -> Callable:
    """A fixture that launches the scenarios once for a module."""

    @pytest.fixture(scope="module", name=kind)
    def launched(tmp_path_factory) -> Path:
        if kind == "zero3":
            require("deepspeed")
        return launch(tmp_path_factory, kind, scenarios)

    return launched


def both(output: Path, name: str) -> list:
    """The results of both processes for a scenario."""
    return [torch.load(output / f"{name}.{rank}.pt", weights_only=False) for rank in range(2)]


def numbers_of(result: dict, *prefixes: str) -> list[dict[str, float]]:
    """The metrics of every step whose names begin with one of `prefixes`."""
    return [{name: value for name, value in log.items() if name.startswith(prefixes)} for log in result["logs"]]


def assert_steps_of_one_process(tmp_path, results, settings, replay_settings):
    """Compare every optimizer step of a recorded scenario with the long way over all rows."""
    replay = Replay(**replay_settings)
    # sizes are checked for one process: four times the rows stand for two processes
    settings = {**settings, "per_device_train_batch_size": 2 * settings["per_device_train_batch_size"]}
    trainer_class, peft_config = settings.pop("trainer_class", PACSTrainer), settings.pop("peft_config", None)
    args = config(tmp_path, trainer_class._config_class, **settings)
    args.num_iterations = settings.get("num_iterations", 1)
    first, second = results
    assert len(first["logs"]) == args.max_steps
    for update in range(args.max_steps):
        runs = update, first["weights"], first["generations"]
        model = get_peft_model(tiny_model(), peft_config) if peft_config else tiny_model()
        expected = in_graph_step(model.double(), replay, args, *runs, ragged=trainer_class is RaggedGroups)
        norm = sum(g.square().sum() for g in expected.gradients.values()).sqrt().item()
        assert first["logs"][update]["grad_norm"] == pytest.approx(norm, rel=RELATIVE)
        if args.max_grad_norm and norm > args.max_grad_norm:
            expected.gradients = {n: g * args.max_grad_norm / norm for n, g in expected.gradients.items()}
        assert first["logs"][update]["loss"] == pytest.approx(expected.loss, rel=RELATIVE), update
        if any(g is not None for g in first["gradients"][update].values()):  # DeepSpeed has used them up by then
            assert relative_error(first["gradients"][update], expected.gradients) < RELATIVE, update
        # the weights after the step follow from the gradient: this is plain gradient descent
        after = [*first["weights"][1:], first["final"]][update]
        stepped = {n: first["weights"][update][n] - args.learning_rate * g for n, g in expected.gradients.items()}
        assert relative_error({n: after[n] for n in stepped}, stepped) < RELATIVE, update
    for name in first["final"]:
        assert torch.equal(first["final"][name], second["final"][name])
    for mine, other in zip(first["logs"], second["logs"], strict=True):
        assert {k: v for k, v in mine.items() if k.startswith(("pacs/", "loss", "entropy", "grad"))} == {
            k: v for k, v in other.items() if k.startswith(("pacs/", "loss", "entropy", "grad"))
        }
