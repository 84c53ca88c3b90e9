"""Asynchronous rollouts with a fixed lag: generation batches that an engine generates while the trainer learns.

With `rollout_lag: k`, batch `n + k` is generated with the weights from before the updates on batch `n`; batches 0 to
`k` have the initial weights. The number of a batch, not timing, decides its weights, prompts, and seed, so that two
runs are equal. Each process requests the completions of its rows. Checkpoints wait for the batches in flight and
contain them.

Plain reward functions are called in the main thread when their batch is taken, as without a lag: signals, event
loops, and connections of databases work in one thread only. The functions of this package, and asynchronous ones,
which run in the thread of their event loop with and without a lag, are called when the batch arrives, beside training,
in the order of batches and never beside an evaluation; their rewards are replayed when TRL asks for them. One that
names `trainer_state` or an argument of the trainer (`compute_logps`) as a parameter reads the current policy, so it is
called when its batch is taken, like reward models.

The log-probs of the engine are those of the policy that generated: the reference `rollout` and the denominator of
probability ratios ([`use_engine_logps`]). PACS's proxies are therefore not 0 on the first update.
"""

import asyncio
import concurrent.futures
import copy
import inspect
import itertools
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from accelerate.utils import broadcast_object_list, gather_object
from trl.data_utils import is_conversational
from trl.generation.vllm_client import VLLMClient
from trl.trainer.utils import is_async_callable

from ..errors import FailedRun, UserError, without_exit
from ..rewards import FUNCTIONS
from ..update.rollout import Rollout
from ..update.step_sizes import BatchSizes
from .background import in_background
from .checkpoint import indices_of_generation
from .engine import CountingClient, ServerFailure
from .engine_process import EngineProcess
from .interruption import PATIENCE, Stopped
from .protocols import LateTrainer, ServedTrainer
from .request_seeds import request_seed
from .reward_functions import independent_copy
from .rollout_output import ENGINE_FIELDS, check_prompts
from .server_command import server_url
from .stop_on_signal import StopOnSignal


logger = logging.getLogger(__name__)

_SAMPLING = ("repetition_penalty", "temperature", "top_p", "top_k", "logprobs", "structured_outputs_regex")
_RUN_STOPS = ""  # in place of a failure, where a signal or another reason to stop ends the wait


class ServerRequests:
    """The vLLM server of a run as engine of [`LateBatches`]; it has one copy of the weights."""

    def __init__(self, trainer: ServedTrainer):
        self.trainer = trainer
        self.vllm = trainer.vllm_generation  # TRL's engine, with the settings of generation
        self.sent_step = -1  # optimizer step of the weights that the server has
        if trainer.accelerator.is_main_process:
            self.client = self.vllm.vllm_client
        else:
            self.client = CountingClient(VLLMClient(server_url(trainer.args)))

    def write_weights(self, weight_copy: int, weights: None) -> None:
        """Send the current weights. All processes must call this, and none may have a request in flight."""
        if self.sent_step != self.trainer.state.global_step:
            self.vllm.sync_weights()
            # With `vllm_sync_adapter` this is an adapter under a new name, which the first process has given it.
            (model_name,) = broadcast_object_list([self.client.model], from_process=0)
            self.client.model = model_name
            self.sent_step = self.trainer.state.global_step

    def generate(self, weight_copy: int, prompt_ids: list[list[int]], seed: int) -> dict[str, list[list]]:
        output = self.client.generate(
            prompts=prompt_ids,
            min_p=self.vllm.min_p or 0.0,
            max_tokens=self.vllm.max_completion_length,
            generation_kwargs={**self.vllm.generation_kwargs, "seed": seed},
            **{name: getattr(self.vllm, name) for name in _SAMPLING},
        )
        if len(output["completion_ids"]) < len(prompt_ids):
            raise RuntimeError("it returned too few completions")
        # The server returns a list per token, with the log-prob of the sampled token first.
        logprobs = [[candidates[0] for candidates in completion] for completion in output["logprobs"]]
        return {"completion_ids": output["completion_ids"], "logprobs": logprobs}

    def weights_of(self, weight_copy: int) -> None:
        """Return nothing: a run that resumes requests the batch again, with newer weights."""

    def close(self) -> None:
        """Leave the server running; a request in flight ends with this process."""


class InFlight(NamedTuple):
    """
    A generation batch that the engine generates, or that is being graded.

    Attributes:
        weights_step (`int`): Optimizer step of the weights that generate it.
        batch (`Future`): The batch, as [`LateBatches`] has it in `arrived`.
    """

    weights_step: int
    batch: Future


class LateBatches:
    """
    The generation batches of a run that are in flight, or have arrived and were not taken yet.

    Batches are dictionaries of plain values and tensors, which checkpoints can hold.

    Attributes:
        arrived (`dict`): Batches of this process, by number, that are generated and graded, but not taken: `step` (the
            optimizer step of the weights), `prompts` as training expects them, `output` (`completion_ids`, `logprobs`,
            and what else a `rollout_func` returned), `rewards` of each function by its index, and `seconds` and `idle`
            (of the engine).
        stopped (`dict`): Batches of a checkpoint, by number, that had not arrived when it was written. They have
            `step`, and the `weights` to generate them with; [`RepeatableRollouts`] adds what its next batch needs.
        taken (`dict`): The batch that was taken last.
    """

    def __init__(self, trainer: LateTrainer):
        self.trainer, self.lag = trainer, trainer.args.rollout_lag
        self.engine: Any = None  # started with the first batch
        self.arrived: dict[int, dict[str, Any]] = {}
        self.stopped: dict[int, dict[str, Any]] = {}
        self.taken: dict[str, Any] = {"rewards": {}}
        self._taken_number, self._taken_at = -1, -1  # number of `taken`, and the optimizer step that took it
        self._in_flight: dict[int, InFlight] = {}  # by number
        self._last: Future | None = None  # the batch that was submitted last
        self._deadline: float | None = None  # until which a run that is to stop waits

    @property
    def taken_step(self) -> int:
        """Optimizer step of the weights that generated the batch that was taken last."""
        return self.taken["step"]

    @property
    def next_number(self) -> int:
        """Number of the batch that training takes next."""
        return self.trainer.generation_number

    def next_rows(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return rows  # batches are generated in the order of the data loader

    def take(self, prompts: list, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the `output` of the next batch, and start to generate the one `lag` batches later. `prompts` are
        those that training expects. Raises a [`ServerFailure`] on all processes if the engine has failed on one of
        them, and [`Stopped`] if a signal stops the run first."""
        trainer = self.trainer
        if not trainer.model.training:
            raise UserError("rollout_func with rollout_lag generates in training only. Use another for evaluation.")
        number = self.next_number
        waited = self._wait_for(number)
        self._check_prompts(self.arrived[number], prompts)
        self._advance(number, waited)
        trainer.record_metrics({"async/lag_updates": float(trainer.state.global_step - self.taken["step"])})
        return self.taken["output"]

    def _wait_for(self, number: int) -> float:
        """Wait until the batch `number` has arrived, and return the seconds. Raises what [`take`] raises."""
        if self.engine is None:
            self._start()
        for n in range(number, number + self.lag):
            self._submit(n)
        started = time.perf_counter()
        reason = self._receive(number)
        waited = time.perf_counter() - started
        reasons = gather_object([reason])
        failures = [reason for reason in reasons if reason not in (None, _RUN_STOPS)]
        if failures:
            raise ServerFailure("stopped", failures[0])
        if _RUN_STOPS in reasons:
            raise Stopped
        return waited

    def _check_prompts(self, batch: dict[str, Any], prompts: list) -> None:
        """Raise a [`FailedRun`] unless the batch that training takes next was generated for `prompts`."""
        if batch["prompts"] != prompts:
            raise FailedRun(
                f"The prompts of generation batch {self.next_number} are not those that the engine generated for: the "
                "dataset or the number of processes differs from the checkpoint's. Resume with both as they were."
            )

    def _advance(self, number: int, waited: float) -> None:
        """Make the batch `number`, which has arrived, the one that is taken, and start to generate the one `lag`
        batches later. `waited` are the seconds for which training has waited for it."""
        batch = self.taken = self.arrived.pop(number)
        self._taken_number, self._taken_at = number, self.trainer.state.global_step
        self._submit(number + self.lag)
        metrics = {"learner_wait": waited, "engine_wait": batch["idle"]}
        metrics["overlapped_share"] = max(0.0, 1 - waited / batch["seconds"])
        self.trainer.record_metrics({f"async/{name}": value for name, value in metrics.items()})

    def wait(self) -> None:
        """Wait for the batches in flight, unless the run is to stop or the engine has failed."""
        for number in list(self._in_flight):
            self._receive(number)

    def state(self) -> dict[int, dict[str, Any]]:
        """Return all batches that were not taken, for a checkpoint. One that a signal or the end of the engine process
        stopped has its weights instead of completions, or is left out with a server."""
        batches = dict(self.stopped)
        for number, batch in self.arrived.items():
            results = batch["rewards"]
            rewards = {i: result for i, result in results.items() if not isinstance(result, Exception)}
            batches[number] = batch | {"rewards": rewards}  # a function that raised is called when the batch is taken
        for number, in_flight in self._in_flight.items():
            weights = self.engine.weights_of(self._weight_copy(number))
            if weights is not None:
                batches[number] = {"step": in_flight.weights_step, "weights": weights}
        return batches

    @contextmanager
    def early_rewards(self) -> Iterator[None]:
        trainer, early = self.trainer, self.taken["rewards"]
        functions = trainer.reward_funcs
        trainer.reward_funcs = [
            partial(replay, early[i]) if i in early else function for i, function in enumerate(functions)
        ]
        try:
            yield
        finally:
            trainer.reward_funcs = functions

    def load(self, batches: dict[int, dict[str, Any]]) -> None:
        self.arrived = {number: batch for number, batch in batches.items() if "output" in batch}
        self.stopped = {number: batch for number, batch in batches.items() if "output" not in batch}

    def put_back(self) -> None:
        """Undo the last `take` if it belongs to the current optimizer step, which a run that resumes repeats."""
        if self._taken_at == self.trainer.state.global_step:
            self.arrived[self._taken_number] = self.taken

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
        if not self.trainer.use_vllm:  # a server goes on with a request, and an evaluation waits for it
            self._in_flight.clear()

    def _start(self) -> None:
        trainer = self.trainer
        self.engine = ServerRequests(trainer) if trainer.use_vllm else EngineProcess(trainer, self.lag)
        self.signals = [c for c in trainer.callback_handler.callbacks if isinstance(c, StopOnSignal)]
        self._engine_free_since = time.perf_counter()
        self._tokenizer = copy.deepcopy(trainer.processing_class)  # threads must not share one
        self._early = {i: function for i, function in enumerate(trainer.reward_funcs) if self._is_early(function)}
        if trainer.use_vllm:
            self._keep_batches_of_all_processes()

    def _keep_batches_of_all_processes(self) -> None:
        """Keep the batches of a checkpoint that had arrived on all processes. When a server failed, or a signal
        stopped the run, some processes may not have had theirs: all request them again, with new weights, which the
        processes send to the server together."""
        arrived_everywhere = set.intersection(*gather_object([set(self.arrived)]))
        self.arrived = {number: batch for number, batch in self.arrived.items() if number in arrived_everywhere}

    def _is_early(self, function: Callable) -> bool:
        """Whether a reward function is called when its batch arrives, in another thread than the main one."""
        tokenizer = self.trainer._tokenizer
        if getattr(tokenizer, "response_template", None) or getattr(tokenizer, "response_schema", None):
            return False  # completions are parsed when a batch is taken
        if not is_async_callable(function) and inspect.unwrap(function) not in FUNCTIONS:
            return False
        reads_policy = {"trainer_state", *self.trainer.reward_arguments()}
        return reads_policy.isdisjoint(inspect.signature(function).parameters)

    def _receive(self, number: int) -> str | None:
        """Wait for a batch. Returns why it did not arrive, a failure or `_RUN_STOPS`, or `None` if it did."""
        if number not in self._in_flight:
            return None
        future = self._in_flight[number].batch
        while not concurrent.futures.wait([future], timeout=0.2).done:
            if self.trainer.control.should_training_stop or any(callback.received for callback in self.signals):
                self._deadline = self._deadline or time.monotonic() + PATIENCE
                if time.monotonic() >= self._deadline:
                    return _RUN_STOPS
        failure = future.exception()
        if failure is not None:
            return f"{type(failure).__name__}: {failure}".removesuffix(": ")
        self.arrived[number] = future.result()
        del self._in_flight[number]
        return None

    def _submit(self, number: int) -> None:
        """Start to generate a batch, unless that has begun, the batch has arrived, or training ends before it."""
        trainer = self.trainer
        sizes = BatchSizes.of(trainer.args, trainer.accelerator.num_processes)
        is_known = number in self._in_flight or number in self.arrived
        if is_known or number >= sizes.num_generation_batches(trainer.state.max_steps):
            return
        stopped = self.stopped.get(number, {})
        weights_step = stopped.get("step", trainer.state.global_step)
        with trainer.timer.part("weight_sync"):
            self.engine.write_weights(self._weight_copy(number), stopped.get("weights"))
        self.stopped.pop(number, None)
        generate = self._generation_of(number, stopped)
        self._last = in_background(self._generate_and_grade, weights_step, generate, self._last)
        self._in_flight[number] = InFlight(weights_step, self._last)

    def _weight_copy(self, number: int) -> int:
        """Return the index of the copy of the trained weights with which the engine generates a batch. Before, batch
        `number - lag` was generated with it, which is taken when this one is submitted."""
        return number % self.lag

    def _generation_of(self, number: int, stopped: dict[str, Any]) -> Callable[[], tuple[dict, list[dict]]]:
        """Return the function that generates a batch, in another thread, and returns its `prompts` and `output`, and
        its dataset rows."""
        rows = self._rows(number)
        prompts = [row["prompt"] for row in rows]
        if self.trainer.late_rollout is None:
            prompts = self._prompt_ids(prompts)
        return lambda: ({"prompts": prompts, "output": self._generate(number, prompts)}, rows)

    def _prompt_ids(self, prompts: list) -> list[list[int]]:
        return [list(ids) for ids in self.trainer._tokenize_prompts(prompts)[0]]

    def _generate_and_grade(self, weights_step: int, generate: Callable, previous: Future | None) -> dict:
        """Generate and grade a batch in a thread of its own. `previous` is the batch that was submitted before. An
        exception is raised on all processes when the batch is taken."""
        submitted = time.perf_counter()
        batch, rows = generate()
        # The engine generates one batch after the other, so it began this one when the one before was finished.
        free_since = self._engine_free_since
        began = max(submitted, free_since)
        self._engine_free_since = time.perf_counter()
        if previous is not None:
            previous.result()  # batches are graded in their order, and none after one that has failed
        rewards = self._grade(rows, batch["output"], weights_step)
        times = {"seconds": time.perf_counter() - began, "idle": began - free_since}
        return {"step": weights_step, "rewards": rewards} | batch | times

    def _generate(self, number: int, prompts: list) -> dict[str, list]:
        trainer, weight_copy = self.trainer, self._weight_copy(number)
        stream = f"{trainer.args.seed}/{trainer.accelerator.process_index}/late"
        if trainer.late_rollout is None:
            return self.engine.generate(weight_copy, prompts, request_seed(stream, number))
        calls = itertools.count()

        async def generate(prompt_ids: list[list[int]]) -> dict[str, list[list]]:
            seed = request_seed(f"{stream}/{number}", next(calls))
            prompt_ids = check_prompts(prompt_ids, trainer.model.config)
            return await asyncio.wrap_future(in_background(self.engine.generate, weight_copy, prompt_ids, seed))

        try:
            with without_exit("rollout_func"):
                output = asyncio.run(trainer.late_rollout(independent_copy(prompts), generate))
            output = trainer.check_rollouts(output, len(prompts))
            return json.loads(json.dumps(output))  # what checkpoints can hold
        except Exception:
            logger.exception("rollout_func failed to generate batch %d.", number)
            raise

    def _grade(self, rows: list[dict], output: dict[str, list], step: int) -> dict[int, Any]:
        """Call the early reward functions with the dataset row of each completion and the optimizer step of the
        weights. Returns the `rewards` and what was `logged` of each, or the exception it raised."""
        if not self._early:
            return {}
        added_columns = {name: values for name, values in output.items() if name not in ENGINE_FIELDS}
        rows = [row | {name: values[i] for name, values in added_columns.items()} for i, row in enumerate(rows)]
        completion_ids = [ids or [self.trainer._tokenizer.eos_token_id] for ids in output["completion_ids"]]
        texts = self._tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        in_turns = [[{"role": "assistant", "content": text}] for text in texts]
        columns = [name for name in rows[0] if name not in ("prompt", "completion", "completion_ids")]
        arguments: dict[str, Any] = {name: [row[name] for row in rows] for name in columns}
        arguments |= {"prompts": [row["prompt"] for row in rows], "completion_ids": completion_ids}
        arguments["completions"] = in_turns if is_conversational(rows[0]) else texts
        arguments["trainer_state"] = copy.copy(self.trainer.state)
        arguments["trainer_state"].global_step = step
        results: dict[int, Any] = {}
        for i, function in self._early.items():
            try:
                results[i] = self._call(function, arguments)
            except Exception as error:
                results[i] = error
        return results

    def _call(self, function: Callable, arguments: dict[str, Any]) -> dict[str, Any]:
        logged: list[tuple[str, str, Any]] = []
        rewards = function(
            log_metric=lambda name, value: logged.append(("log_metric", name, float(value))),
            log_extra=lambda name, values: logged.append(
                ("log_extra", name, json.loads(json.dumps([*values], default=str)))
            ),
            **arguments,
        )
        if inspect.isawaitable(rewards):
            rewards = asyncio.run_coroutine_threadsafe(_result_of(rewards), self.trainer.async_loop).result()
        return {"rewards": rewards, "logged": logged}

    def _rows(self, number: int) -> list[dict[str, Any]]:
        """Return the dataset rows of a generation batch, one per completion of this process."""
        all_indices = indices_of_generation(self.trainer, number)
        num_rows = len(all_indices) // self.trainer.accelerator.num_processes
        first = self.trainer.accelerator.process_index * num_rows
        indices = all_indices[first : first + num_rows]
        row_of = {i: self.trainer.train_dataset[i] for i in set(indices)}
        return [independent_copy(row_of[i]) for i in indices]  # completions of a group share nothing


def use_engine_logps(rollouts: list[Rollout], names: tuple[str, ...]) -> None:
    """Take the log-probs that the engine reported for those of the policy that generated: store them under `names`
    (`ref_logps`, `old_logps`), and exclude tokens without one from the loss."""
    for rollout in rollouts:
        assert rollout.sampling_logps is not None
        is_reported = np.isfinite(rollout.sampling_logps)
        rollout.loss_mask = rollout.loss_mask & is_reported
        logps = np.where(is_reported, rollout.sampling_logps, 0.0).astype(np.float32)
        for name in names:
            setattr(rollout, name, logps)


def replay(result: Any, **arguments: Any) -> list[float | None]:
    """Return the rewards of a function that was called early, and log what it logged; or raise what it raised."""
    if isinstance(result, Exception):
        raise result
    for function, name, value in result["logged"]:
        arguments[function](name, value)
    return result["rewards"]


async def _result_of(awaitable: Awaitable) -> Any:
    return await awaitable
