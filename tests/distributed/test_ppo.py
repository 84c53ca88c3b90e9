"""PPO and GenAC on two processes equal themselves on one: weights of policy and critic, with DDP and with FSDP2, and a
resumed run.

The rollouts are recorded (see replay.py), so that one process and two learn from the same rows; with two updates on
all rows of each generation, the order in which TRL shuffles them does not matter.
"""

import os
from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from processes import on_two
from replay import TOKENIZER, Replay, addition_dataset, stored_label, tiny_model

from pacs_trl import PPOConfig, PPOTrainer
from pacs_trl.experimental.genac import GenACConfig, GenACTrainer


pytestmark = pytest.mark.trains


UPDATES = 4


def settings(num_processes: int) -> dict:
    return {
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 8 // num_processes,
        "gradient_accumulation_steps": 2,
        "num_iterations": 2,
        "num_generations": 4,
        "max_completion_length": 16,
        "learning_rate": 0.05,
        "critic_learning_rate": 0.05,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.5,
        "gae_lambda": 0.9,
        "loss_type": "dapo",  # its denominator counts tokens over processes
        "max_steps": UPDATES,
        "logging_steps": 1,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "steps",
        "save_steps": 3,  # in the middle of the second generation
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def pretend_to_have_accelerators() -> None:
    """accelerate turns FSDP on only for accelerator devices; what it then calls runs on CPU with gloo as well."""
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def full_weights(model) -> dict[str, torch.Tensor]:
    weights = {}
    for name, parameter in model.named_parameters():
        parameter = parameter.detach()
        weights[name.removeprefix("module.")] = (
            parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.clone()
        )
    return weights


class RecordedRollouts(Replay):
    def __call__(self, prompts, trainer):
        self.weights = []
        return super().__call__(prompts, trainer)


METHODS = {
    "ppo": (PPOTrainer, PPOConfig, {}),
    "genac": (
        GenACTrainer,
        GenACConfig,
        {"critic_prompt": "miniature", "critic_max_new_tokens": 5, "critic_pretraining_steps": 1, "max_segments": 3},
    ),
}


def train(output_dir: Path, method: str, num_processes: int, resume: str | None = None):
    trainer_class, config_class, more = METHODS[method]
    trainer = trainer_class(
        f"{output_dir}/model",
        stored_label,
        args=config_class(str(output_dir / method), **settings(num_processes), **more),
        train_dataset=addition_dataset(),
        processing_class=TOKENIZER,
        rollout_func=RecordedRollouts(tools=True, unverifiable=0.1),
    )
    if method == "genac":  # an untrained critic writes no tags
        trainer._prompt.parse = lambda text: len(text) % 11 / 10
    trainer.train(resume_from_checkpoint=resume)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {"policy": full_weights(trainer.model), "critic": full_weights(trainer.critic), "logs": logs}


def worker(output_dir: Path, num_processes: int) -> None:
    """Train, train again from the middle, and let the main process save weights and logs of both."""
    is_main = os.environ.get("RANK", "0") == "0"
    if is_main:
        tiny_model().save_pretrained(output_dir / "model")
    if num_processes > 1:
        torch.distributed.init_process_group("gloo")
        torch.distributed.barrier()
    if os.environ.get("ACCELERATE_USE_FSDP"):
        pretend_to_have_accelerators()
    results = {}
    for method in METHODS:
        results[method] = {
            "whole": train(output_dir, method, num_processes),
            "resumed": train(output_dir, method, num_processes, resume=f"{output_dir}/{method}/checkpoint-3"),
        }
    if is_main:
        torch.save(results, output_dir / "result.pt")


FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}
MODES = {"ddp": {}, "fsdp2": FSDP2}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory) -> dict:
    directory = tmp_path_factory.mktemp("one")
    worker(directory, 1)
    return torch.load(directory / "result.pt")


@pytest.mark.parametrize("mode", MODES)
def test_two_processes_equal_one_and_resume(tmp_path, one_process, mode):
    on_two(worker, tmp_path, 2, outputs=tmp_path, **MODES[mode])
    results = torch.load(tmp_path / "result.pt")
    for method, two in results.items():
        one = one_process[method]["whole"]
        for name in ("policy", "critic"):
            assert two["whole"][name].keys() == one[name].keys()
            for key, expected in one[name].items():
                actual, where = two["whole"][name][key], f"{method} {name} {key}"
                torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6, msg=lambda m, w=where: f"{w}: {m}")
                assert torch.equal(two["resumed"][name][key], actual), where
        for mine, theirs in zip(two["whole"]["logs"], one["logs"], strict=True):
            assert mine.keys() == theirs.keys()
            for key in {"loss", *filter(lambda key: key.startswith(f"{method}/"), theirs)}:
                expected = None if theirs[key] is None else pytest.approx(theirs[key], rel=1e-4, abs=1e-6)
                assert mine[key] == expected, f"{method} {key}"
