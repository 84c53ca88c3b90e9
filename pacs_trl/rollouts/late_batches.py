"""Asynchronous rollouts with a fixed lag: generation batches that an engine generates while the trainer learns.

With `rollout_lag: k`, batch `n + k` is generated with the weights from before the updates on batch `n`; batches 0 to
`k` have the initial weights. The number of a batch, not timing, decides its weights, prompts, and seed, so that two
runs are equal. Checkpoints wait for the batches in flight and contain them.

The log-probs of the engine are those of the policy that generated: the reference `rollout` and the denominator of
probability ratios ([`set_generating_logps`]). PACS's proxies are therefore not 0 on the first update.
"""

import threading
import time
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, gather_object

from ..errors import FailedRun
from ..update.rollout import Rollout
from ..update.step_sizes import Step
from .checkpoint import EpochSampler, request_seed
from .engine import ServerFailure, end_empty_completions
from .engine_process import EngineProcess


class ServerRequests:
    """The vLLM server of a run as engine of [`LateBatches`]; it has one copy of the weights. The main process sends
    the prompts of all processes."""

    def __init__(self, trainer: Any):
        self.trainer, self.engine = trainer, trainer.vllm_generation
        self.is_main = trainer.accelerator.is_main_process

    def write_weights(self, slot: int) -> None:
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
            repetition_penalty=engine.repetition_penalty,
            temperature=engine.temperature,
            top_p=engine.top_p,
            top_k=engine.top_k,
            min_p=engine.min_p or 0.0,
            max_tokens=engine.max_completion_length,
            logprobs=engine.logprobs,
            structured_outputs_regex=engine.structured_outputs_regex,
            generation_kwargs={**engine.generation_kwargs, "seed": request["seed"]},
        )
        if len(output["completion_ids"]) < len(request["prompt_ids"]):
            raise RuntimeError("it returned too few completions")
        return output

    def generate_here(self, request: dict[str, Any]) -> None:
        """Return nothing: a run that resumes requests the batch again."""

    def own_part(self, request: dict[str, Any], output: dict | None) -> tuple | None:
        """Return the completions of this process and their log-probs. All processes must call this."""
        shared = [output]
        broadcast_object_list(shared, from_process=0)
        if shared[0] is None:
            return None
        accelerator = self.trainer.accelerator
        num_own = len(request["prompt_ids"]) // accelerator.num_processes
        own = slice(accelerator.process_index * num_own, (accelerator.process_index + 1) * num_own)
        completion_ids, logprobs = shared[0]["completion_ids"][own], shared[0]["logprobs"][own]
        return completion_ids, [[of_token[0] for of_token in tokens] for tokens in logprobs]

    def close(self) -> None:
        """Leave the server running; a request in flight ends with this process."""


class LateBatches:
    """
    The generation batches of a run that are in flight, or have arrived and were not taken yet.

    Attributes:
        arrived (`dict`): Batches of this process by number: prompts, completions, and their log-probs as lists,
            `step` (the optimizer step of the weights), and `seconds` and `idle` (of the engine).
    """

    def __init__(self, trainer: Any):
        self.trainer, self.lag = trainer, trainer.args.rollout_lag
        self.engine: Any = None  # started with the first batch
        self.arrived: dict[int, dict[str, Any]] = {}
        self._in_flight: dict[int, tuple[dict, Future]] = {}
        self._epoch, self._order = -1, torch.empty(0, 1)

    def take(self, number: int, prompt_ids: list) -> tuple[list, list]:
        """Return the completions of batch `number` and their log-probs, and start to generate batch `number + lag`.
        `prompt_ids` are the prompts that training expects. Raises a [`ServerFailure`] on all processes if the engine
        has failed on one of them."""
        trainer, error = self.trainer, None
        if self.engine is None:
            self.engine = ServerRequests(trainer) if trainer.use_vllm else EngineProcess(trainer, self.lag)
            self._last_end = time.perf_counter()
        for n in range(number, number + self.lag):
            self._submit(n)
        started = time.perf_counter()
        if number in self._in_flight and (failure := self._in_flight[number][1].exception()) is not None:
            error = f"{type(failure).__name__}: {failure}".removesuffix(": ")
        waited = time.perf_counter() - started
        if errors := [each for each in gather_object([error]) if each]:
            raise ServerFailure("stopped", errors[0])
        if number in self._in_flight:
            self._receive(number)
        batch = self.arrived[number]
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

    def wait(self) -> None:
        """Wait until no batch is in flight; a server must keep its weights until then."""
        for _, future in self._in_flight.values():
            future.exception()

    def finish(self) -> dict[int, dict[str, Any]]:
        """Wait for the batches in flight, and return all that were not taken. Batches of an engine process that has
        ended are generated here, those of a server are left out. All processes must call this."""
        for number in list(self._in_flight):
            self._receive(number)
        return self.arrived

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()

    def _receive(self, number: int) -> None:
        job, future = self._in_flight.pop(number)
        times = {"seconds": 0.0, "idle": 0.0}
        if future.exception() is None:
            output, times = future.result()
        else:
            output = self.engine.generate_here(job["request"])
        if (own := self.engine.own_part(job["request"], output)) is not None:
            batch = {"prompt_ids": job["prompt_ids"], "completion_ids": own[0], "logprobs": own[1]}
            self.arrived[number] = batch | {"step": job["step"]} | times

    def _submit(self, number: int) -> None:
        trainer, accelerator = self.trainer, self.trainer.accelerator
        num_batches = Step.of(trainer.args, accelerator.num_processes).rollouts(trainer.state.max_steps)
        if number in self.arrived or number in self._in_flight or number >= num_batches:
            return
        with trainer.timer.part("weight_sync"):
            self.engine.write_weights(number % self.lag)  # batch `number - lag` had this slot, and has been taken
        prompt_ids = self._prompts(number)
        num_own = len(prompt_ids) // accelerator.num_processes
        own = prompt_ids[accelerator.process_index * num_own :][:num_own]
        stream = "server" if trainer.use_vllm else accelerator.process_index
        request = {"slot": number % self.lag, "prompt_ids": prompt_ids if trainer.use_vllm else own}
        request["seed"] = request_seed(f"{trainer.args.seed}/{stream}/late", number)
        future: Future = Future()
        job = {"request": request, "prompt_ids": own, "step": trainer.state.global_step}
        self._in_flight[number] = job, future

        def run():
            started = time.perf_counter()
            try:
                output = self.engine.generate(request)
            except Exception as error:  # raised on all processes when the batch is taken
                future.set_exception(error)
                return
            started, before, self._last_end = max(started, self._last_end), self._last_end, time.perf_counter()
            future.set_result((output, {"seconds": self._last_end - started, "idle": started - before}))

        threading.Thread(target=run, daemon=True).start()

    def _prompts(self, number: int) -> list[list[int]]:
        """Return the prompts of a generation batch, one per completion of all processes."""
        trainer = self.trainer
        sampler = trainer._get_train_sampler().sampler
        size, epoch = sampler.batch_size, number // (sampler.num_samples // sampler.batch_size)
        if epoch != self._epoch:
            sampler.repeat_count = sampler.mini_repeat_count = 1
            self._epoch, self._order = epoch, torch.tensor(list(EpochSampler(sampler, lambda: epoch))).view(-1, size)
        rows = self._order[number % len(self._order)].tolist()
        prompts = [trainer.train_dataset[i]["prompt"] for i in rows for _ in range(trainer.num_generations)]
        return [list(ids) for ids in trainer._tokenize_prompts(prompts)[0]]


class LateGeneration:
    """The part of [`ExactUpdateTrainer`] that generates ahead of training; a base class of it before
    [`RolloutTrainer`]."""

    def _reset_run(self) -> None:
        super()._reset_run()
        self._late = LateBatches(self) if self.args.rollout_lag else None

    def train(self, *args, **kwargs):
        try:
            return super().train(*args, **kwargs)
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

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        if self._late is None or not self.model.training:
            if self._late is not None and self.use_vllm:
                self._late.wait()
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        number = self._step // (self.args.steps_per_generation * self.num_iterations)
        completion_ids, logprobs = self._late.take(number, prompt_ids)
        self._log_empty(end_empty_completions(self._tokenizer.eos_token_id, completion_ids, logprobs))
        return completion_ids, logprobs


def set_generating_logps(rollouts: list[Rollout], names: list[str]) -> None:
    """Store the log-probs that the engine reported under other names too (`ref_logps`, `old_logps`). Tokens without
    one are masked out."""
    for rollout in rollouts:
        known = np.isfinite(rollout.sampling_logps)
        rollout.loss_mask = rollout.loss_mask & known
        for name in names:
            setattr(rollout, name, np.where(known, rollout.sampling_logps, 0.0).astype(np.float32))
