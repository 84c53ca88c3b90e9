"""Asynchronous rollouts with a fixed lag: generation batches that an engine generates while the trainer learns.

With `rollout_lag: k`, batch `n + k` is generated with the weights from before the updates on batch `n`; batches 0 to
`k` have the initial weights. The number of a batch, not timing, decides its weights, prompts, and seed, so that two
runs are equal. Checkpoints wait for the batches in flight and contain them. Rewards are computed when a batch arrives
([`EarlyRewards`]).

The log-probs of the engine are those of the policy that generated: the reference `rollout` and the denominator of
probability ratios ([`set_generating_logps`]). PACS's proxies are therefore not 0 on the first update.
"""

import threading
import time
from concurrent.futures import Future, wait
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, gather_object
from transformers.trainer_utils import TrainOutput

from ..errors import FailedRun
from ..update.rollout import Rollout
from ..update.step_sizes import Step
from .checkpoint import EpochSampler, request_seed, save_last_step
from .early_rewards import EarlyRewards, slice_of
from .engine import ServerFailure
from .engine_process import EngineProcess
from .preemption import StopOnSignal


PATIENCE = 3.0  # seconds that a run that is stopped by a signal waits for batches in flight
_SAMPLING = ("repetition_penalty", "temperature", "top_p", "top_k", "logprobs", "structured_outputs_regex")


class _Stopped(Exception):
    """A signal has stopped the run while it waited, and the state after the last optimizer step is saved."""


class ServerRequests:
    """The vLLM server of a run as engine of [`LateBatches`]; it has one copy of the weights. The main process sends
    the prompts of all processes."""

    def __init__(self, trainer: Any):
        self.trainer, self.engine = trainer, trainer.vllm_generation
        self.is_main = trainer.accelerator.is_main_process

    def write_weights(self, slot: int, weights: None) -> None:
        if self.trainer.state.global_step != self.trainer._last_loaded_step:
            self.engine.sync_weights()
            self.trainer._last_loaded_step = self.trainer.state.global_step

    def generate(self, request: dict[str, Any]) -> dict | None:
        if not self.is_main:
            return None
        engine, num_generations = self.engine, self.trainer.num_generations
        output = engine.vllm_client.generate(
            prompts=request["prompt_ids"][::num_generations],
            features=None,
            n=num_generations,
            min_p=engine.min_p or 0.0,
            max_tokens=engine.max_completion_length,
            generation_kwargs={**engine.generation_kwargs, "seed": request["seed"]},
            **{name: getattr(engine, name) for name in _SAMPLING},
        )
        if len(output["completion_ids"]) < len(request["prompt_ids"]):
            raise RuntimeError("it returned too few completions")
        logprobs = [[of_token[0] for of_token in tokens] for tokens in output["logprobs"]]
        return {"completion_ids": output["completion_ids"], "logprobs": logprobs}

    def weights_of(self, request: dict[str, Any]) -> None:
        """Return nothing: a run that resumes requests the batch again, with newer weights."""

    def own_part(self, request: dict[str, Any], output: dict | None) -> dict | None:
        """Return the completions of this process, log-probs, and rewards. All processes must call this."""
        shared = [output]
        broadcast_object_list(shared, from_process=0)
        if (found := shared[0]) is None:
            return None
        accelerator = self.trainer.accelerator
        num_own = len(request["prompt_ids"]) // accelerator.num_processes
        own = slice(accelerator.process_index * num_own, (accelerator.process_index + 1) * num_own)
        parts = {name: found[name][own] for name in ("completion_ids", "logprobs")}
        return parts | {"rewards": slice_of(found["rewards"], own)}

    def close(self) -> None:
        """Leave the server running; a request in flight ends with this process."""


class LateBatches:
    """
    The generation batches of a run that are in flight, or have arrived and were not taken yet.

    Attributes:
        arrived (`dict`): Batches of this process by number: `prompt_ids`, `completion_ids`, and `logprobs` as lists,
            `rewards` ([`EarlyRewards.grade`]), `step` (the optimizer step of the weights), and `seconds` and `idle`
            (of the engine). One that was stopped has the `weights` to generate it with instead.
        taken (`dict`): The batch that was taken last.
    """

    def __init__(self, trainer: Any):
        self.trainer, self.lag = trainer, trainer.args.rollout_lag
        self.engine: Any = None  # started with the first batch
        self.arrived: dict[int, dict[str, Any]] = {}
        self.taken: dict[str, Any] = {"rewards": {}}
        self._in_flight: dict[int, tuple[dict, Future]] = {}
        self._last: Future | None = None
        self._reward_errors: dict[int, BaseException] = {}
        self._epoch, self._order = -1, torch.empty(0, 1)

    def take(self, number: int, prompt_ids: list) -> tuple[list, list]:
        """Return the completions of batch `number` and their log-probs, and start to generate batch `number + lag`.
        `prompt_ids` are the prompts that training expects. Raises a [`ServerFailure`] on all processes if the engine
        has failed on one of them, and [`_Stopped`] if a signal stops the run first."""
        trainer, error = self.trainer, None
        if self.engine is None:
            self.engine = ServerRequests(trainer) if trainer.use_vllm else EngineProcess(trainer, self.lag)
            self.early, self._last_end = EarlyRewards(trainer), time.perf_counter()
            self.signals = [each for each in trainer.callback_handler.callbacks if isinstance(each, StopOnSignal)]
        for n in range(number, number + self.lag):
            self._submit(n)
        started = time.perf_counter()
        if number in self._in_flight:
            future = self._in_flight[number][1]
            if not self._has_arrived(future, patience=0.0):
                error = ""
            elif (failure := future.exception()) is not None:
                error = f"{type(failure).__name__}: {failure}".removesuffix(": ")
        waited = time.perf_counter() - started
        errors = gather_object([error])
        if any(errors):
            raise ServerFailure("stopped", next(filter(None, errors)))
        if "" in errors:
            for each in self.signals:
                each.on_step_end(trainer.args, trainer.state, trainer.control)
            trainer._step_start.rewind()
            save_last_step(trainer)
            raise _Stopped
        if number in self._in_flight:
            self._receive(number)
        if number in self._reward_errors:
            raise self._reward_errors[number]
        batch = self.taken = self.arrived[number]
        if batch["prompt_ids"] != [list(ids) for ids in prompt_ids]:
            raise FailedRun(
                f"The prompts of generation batch {number} are not those that the engine was given: the dataset or "
                "the number of processes differs from the checkpoint's. Resume with both as they were."
            )
        del self.arrived[number]
        self._submit(number + self.lag)
        for name, value in {
            "lag_updates": float(trainer.state.global_step - batch["step"]),
            "learner_wait": waited,
            "engine_wait": batch["idle"],
            "overlapped_share": max(0.0, 1 - waited / batch["seconds"]) if batch["seconds"] else 0.0,
        }.items():
            trainer._metrics["train"][f"async/{name}"].append(value)
        return batch["completion_ids"], batch["logprobs"]

    def finish(self) -> dict[int, dict[str, Any]]:
        """Wait for the batches in flight, and return all that have arrived and were not taken. One that a signal or
        the end of the engine process stopped has its weights instead. All processes must call this."""
        for number in list(self._in_flight):
            self._receive(number)
        return self.arrived

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()

    def _has_arrived(self, future: Future, patience: float) -> bool:
        """Wait for a batch. Returns `False` if it has not arrived `patience` seconds after a signal or another reason
        to stop the run."""
        deadline = None
        while not wait([future], timeout=0.2).done:
            if self.trainer.control.should_training_stop or any(each.received for each in self.signals):
                deadline = deadline or time.monotonic() + patience
                if time.monotonic() >= deadline:
                    return False
        return True

    def _receive(self, number: int) -> None:
        job, future = self._in_flight[number]
        times = {"seconds": 0.0, "idle": 0.0}
        if not self._has_arrived(future, PATIENCE) or future.exception() is not None:
            output = self.engine.weights_of(job["request"])
        else:
            output, times = future.result()
        if (own := self.engine.own_part(job["request"], output)) is not None:
            del self._in_flight[number]
            self.arrived[number] = own | {"prompt_ids": job["prompt_ids"], "step": job["step"]} | times

    def _submit(self, number: int) -> None:
        trainer, accelerator = self.trainer, self.trainer.accelerator
        num_batches = Step.of(trainer.args, accelerator.num_processes).rollouts(trainer.state.max_steps)
        stopped = self.arrived.pop(number) if "weights" in self.arrived.get(number, ()) else {}
        if number in self.arrived or number in self._in_flight or number >= num_batches:
            return
        with trainer.timer.part("weight_sync"):  # batch `number - lag` had this slot, and has been taken
            self.engine.write_weights(number % self.lag, stopped.get("weights"))
        rows = self._rows(number)
        prompt_ids = [list(ids) for ids in trainer._tokenize_prompts([row["prompt"] for row in rows])[0]]
        num_own = len(rows) // accelerator.num_processes
        own = slice(accelerator.process_index * num_own, (accelerator.process_index + 1) * num_own)
        stream, of_request = ("server", slice(None)) if trainer.use_vllm else (accelerator.process_index, own)
        request = {"slot": number % self.lag, "prompt_ids": prompt_ids[of_request]}
        request["seed"] = request_seed(f"{trainer.args.seed}/{stream}/late", number)
        job = {"request": request, "rows": rows[of_request], "prompt_ids": prompt_ids[own]}
        job["step"] = stopped.get("step", trainer.state.global_step)
        future: Future = Future()
        previous, self._last = self._last, future
        self._in_flight[number] = job, future

        def run():
            started = time.perf_counter()
            try:
                output = self.engine.generate(request)
                started, before, self._last_end = max(started, self._last_end), self._last_end, time.perf_counter()
                times = {"seconds": self._last_end - started, "idle": started - before}
                if previous is not None:
                    previous.result()  # rewards are computed in the order of batches
            except BaseException as error:  # raised on all processes when the batch is taken
                future.set_exception(error)
                return
            started = time.perf_counter()
            try:
                if output is not None:
                    output["rewards"] = self.early.grade(job["rows"], output["completion_ids"], job["step"])
            except BaseException as error:  # raised when the batch is taken
                self._reward_errors[number], output["rewards"] = error, {}
            times["seconds"] += time.perf_counter() - started
            future.set_result((output, times))

        threading.Thread(target=run, daemon=True).start()

    def _rows(self, number: int) -> list[dict[str, Any]]:
        """Return the dataset rows of a generation batch, one per completion of all processes."""
        trainer = self.trainer
        sampler = trainer._get_train_sampler().sampler
        size, epoch = sampler.batch_size, number // (sampler.num_samples // sampler.batch_size)
        if epoch != self._epoch:
            sampler.repeat_count = sampler.mini_repeat_count = 1
            self._epoch, self._order = epoch, torch.tensor(list(EpochSampler(sampler, lambda: epoch))).view(-1, size)
        order = self._order[number % len(self._order)].tolist()
        return [row for i in order for row in [trainer.train_dataset[i]] * trainer.num_generations]


class LateGeneration:
    """The part of [`ExactUpdateTrainer`] that generates ahead of training; a base class of it before
    [`RolloutTrainer`]."""

    def _reset_run(self) -> None:
        super()._reset_run()
        self._late = LateBatches(self) if self.args.rollout_lag else None

    def train(self, *args, **kwargs):
        try:
            return super().train(*args, **kwargs)
        except _Stopped:
            return TrainOutput(self.state.global_step, float("nan"), {})
        finally:
            if self._late is not None:
                self._late.close()

    @property
    def late_batches(self) -> dict:
        """Generation batches that were not taken yet; saved in checkpoints."""
        return {} if self._late is None else self._late.finish()

    @late_batches.setter
    def late_batches(self, batches: dict) -> None:
        if self._late is not None:
            self._late.arrived = dict(batches)

    def generate_more(self, *args, **kwargs):
        if self._late is not None:
            raise ValueError("generate_more would need the current weights in the engine. Set rollout_lag: 0.")
        return super().generate_more(*args, **kwargs)

    def evaluation_loop(self, *args, **kwargs):
        if self._late is not None:  # a server has one copy of the weights, and reward functions are called in order
            self._late.finish()
        return super().evaluation_loop(*args, **kwargs)

    def _save_rng_state(self, output_dir):
        if self._late is not None:
            self._late.finish()  # before random states, which reward functions may use
        super()._save_rng_state(output_dir)

    def _calculate_rewards(self, *args):
        functions = self.reward_funcs
        if self._late is not None and self.model.training:
            self.reward_funcs = self._late.early.replaying(self._late.taken["rewards"])
        try:
            return super()._calculate_rewards(*args)
        finally:
            self.reward_funcs = functions

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        if self._late is None or not self.model.training:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        number = self._step // (self.args.steps_per_generation * self.num_iterations)
        completion_ids, logprobs = self._late.take(number, prompt_ids)
        self._end_empty(completion_ids, logprobs)
        return completion_ids, logprobs


def set_generating_logps(rollouts: list[Rollout], names: list[str]) -> None:
    """Store the log-probs that the engine reported under other names too (`ref_logps`, `old_logps`). Tokens without
    one are masked out."""
    for rollout in rollouts:
        known = np.isfinite(rollout.sampling_logps)
        rollout.loss_mask = rollout.loss_mask & known
        for name in names:
            setattr(rollout, name, np.where(known, rollout.sampling_logps, 0.0).astype(np.float32))
