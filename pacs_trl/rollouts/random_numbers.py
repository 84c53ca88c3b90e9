"""Random states of a process, and the seeds of its evaluations and vLLM requests."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from accelerate.utils import set_seed

from .protocols import EvaluatingTrainer, SeededTrainer
from .request_seeds import request_seed
from .rollout_config import RolloutConfig


def random_states(device: torch.device) -> dict[str, Any]:
    """Return the states of all random number generators of this process: of Python, NumPy, torch on the CPU, and torch
    on `device`."""
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state(device)
    return states


def restore_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Restore what [`random_states`] returned."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["cpu"])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states["device"], device)


@contextmanager
def seeded_random_numbers(seed: int, device: torch.device) -> Iterator[None]:
    """Seed all random number generators inside the context, and restore their states on exit."""
    states = random_states(device)
    set_seed(seed)
    try:
        yield
    finally:
        restore_random_states(states, device)


# Seeds --------------------------------------------------------------------------------------------------------------


def engine_index(args: RolloutConfig, process_index: int) -> int:
    """Return the index of the colocated engine of a process; processes that share one (tensor parallelism) need equal
    seeds."""
    return process_index // args.vllm_tensor_parallel_size


def evaluation_seed(trainer: EvaluatingTrainer) -> int:
    """Count an evaluation of the trainer, and return the seed of this process for it, in [0, 2^31). Several
    evaluations at one optimizer step get different seeds."""
    step = trainer.state.global_step
    last_step, num_evaluations = trainer._evaluations
    if step != last_step:
        num_evaluations = 0
    num_evaluations += 1
    trainer._evaluations = (step, num_evaluations)
    engine = engine_index(trainer.args, trainer.accelerator.process_index)
    return request_seed(f"{trainer.args.seed}/{engine}/evaluation/{step}", num_evaluations)


def next_seeds(trainer: SeededTrainer, prompts: Sequence[Sequence[int]]) -> list[int]:
    """Return the seeds of the next vLLM requests of this process, one per prompt of token ids."""
    if not trainer.model.training:  # an evaluation, which runs inside `seeded_random_numbers`
        return [random.getrandbits(31) for _ in prompts]
    return trainer._request_seeds.next(prompts)


def next_call_seed(trainer: SeededTrainer) -> int:
    """Return the seed of the next call of a vLLM server with the prompts of all processes."""
    if not trainer.model.training:
        return random.getrandbits(31)
    return trainer._request_seeds.next_of_all()
