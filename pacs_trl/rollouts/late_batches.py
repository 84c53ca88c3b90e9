"""Asynchronous rollouts with a fixed lag: generation batches that an engine generates while the trainer learns.

With `rollout_lag: k`, batch `n + k` is generated with the weights from before the updates on batch `n`; batches 0 to
`k` have the initial weights. The number of a batch, not timing, decides its weights, prompts, and seed, so that two
runs are equal. Each process requests the completions of its rows.

The way of a batch, whose number is fixed by the order of the data loader:

1. `_submit`, in the main thread: write the weights for the engine, choose rows and prompts, and start a thread.
2. `_generate_and_grade`, in this thread: the engine generates, and early reward functions are called
   (`early_rewards.py`), in the order of batches and never beside an evaluation.
3. `_receive`, in the main thread: wait for the thread, and keep the batch in `arrived`.
4. `_take_next`: training takes the batch, and the one `k` batches later is submitted.

Checkpoints wait for the batches in flight and contain them.

The log-probs of the engine are those of the policy that generated: the reference `rollout` and the denominator of
probability ratios ([`use_engine_logps`]). PACS's proxies are therefore not 0 on the first update.
"""

import asyncio
import concurrent.futures
import itertools
import json
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
from accelerate.utils import gather_object

from ..errors import FailedRun, UserError, without_exit
from ..update.rollout import Rollout
from ..update.step_sizes import BatchSizes
from .background import in_background
from .early_rewards import EarlyRewards, replaying
from .engine_failures import ServerFailure
from .engine_process import EngineProcess
from .interruption import PATIENCE, Stopped
from .prompt_order import indices_of_generation
from .protocols import LateTrainer
from .request_seeds import request_seed
from .reward_functions import independent_copy
from .rollout_output import check_prompts
from .server_requests import ServerRequests
from .stop_on_signal import is_to_stop


logger = logging.getLogger(__name__)


class InFlight(NamedTuple):
    """
    A generation batch that the engine generates, or that is being graded.

    Attributes:
        weights_step (`int`): Optimizer step of the weights that generate it.
        batch (`Future`): The batch, as [`LateBatches`] has it in `arrived`.
    """

    weights_step: int
    batch: Future


class Generated(NamedTuple):
    """
    What the thread of a batch has generated.

    Attributes:
        entries (`dict`): Entries of the batch, see [`LateBatches`]: `prompts`, `output`, and those of a subclass.
        rows (`list[dict]`): Dataset row of each completion, for reward functions.
    """

    entries: dict[str, Any]
    rows: list[dict[str, Any]]


class LateBatches:
    """
    The generation batches of a run that are in flight, or have arrived and were not taken yet.

    Batches are dictionaries of plain values and tensors, which checkpoints can hold.

    Attributes:
        arrived (`dict`): Batches of this process, by number, that are generated and graded, but not taken: `step` (the
            optimizer step of the weights), `prompts` as training expects them, `output` (`completion_ids`, `logprobs`,
            and what else a `rollout_func` returned), `rewards` (results of early reward functions by their index, see
            [`EarlyRewards.compute`]), and `seconds` and `idle` (of the engine).
        stopped (`dict`): Batches of a checkpoint, by number, that had not arrived when it was written. They have
            `step`, and the `weights` to generate them with; [`RepeatableRollouts`] adds what its next batch needs.
        taken (`dict`): The batch that was taken last.
    """

    def __init__(self, trainer: LateTrainer):
        self.trainer = trainer
        self.lag = trainer.args.rollout_lag
        self.engine: Any = None  # started with the first batch, as `_early_rewards`
        self.arrived: dict[int, dict[str, Any]] = {}
        self.stopped: dict[int, dict[str, Any]] = {}
        self.taken: dict[str, Any] = {"rewards": {}}
        self._taken_number = -1
        self._taken_at = -1  # the optimizer step that took it
        self._in_flight: dict[int, InFlight] = {}  # by number
        self._last_submitted: Future | None = None
        self._deadline: float | None = None  # until which a run that is to stop waits
        self._engine_free_since = 0.0  # when the engine had finished the last batch, by `time.perf_counter`
        self._early_rewards: EarlyRewards

    # Source of rollouts ---------------------------------------------------------------------------------------------

    def next_rows(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return rows  # batches are generated in the order of the data loader

    def take(self, prompts: list, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the `output` of the next batch, and start to generate the one `lag` batches later. `prompts` are
        those that training expects. Raises a [`ServerFailure`] on all processes if the engine has failed on one of
        them, and [`Stopped`] if a signal stops the run first."""
        trainer = self.trainer
        if not trainer.model.training:
            raise UserError("rollout_func with rollout_lag generates in training only. Use another for evaluation.")
        self._take_next()
        self._check_prompts(prompts)
        trainer.record_metrics({"async/lag_updates": float(trainer.state.global_step - self.taken_step)})
        return self.taken["output"]

    def early_rewards(self) -> AbstractContextManager[None]:
        return replaying(self.trainer, self.taken["rewards"])

    def wait(self) -> None:
        """Wait for the batches in flight, unless the run is to stop or the engine has failed."""
        for number in list(self._in_flight):
            self._receive(number)

    def state(self) -> dict[int, dict[str, Any]]:
        """Return all batches that were not taken, for a checkpoint. One that a signal or the end of the engine process
        stopped has its weights instead of completions, or is left out with a server."""
        batches = dict(self.stopped)
        for number, batch in self.arrived.items():
            # A function that raised is called again when the batch is taken.
            rewards = {i: result for i, result in batch["rewards"].items() if not isinstance(result, Exception)}
            batches[number] = batch | {"rewards": rewards}
        for number, in_flight in self._in_flight.items():
            weights = self.engine.weights_of(self._weight_copy(number))
            if weights is not None:
                batches[number] = {"step": in_flight.weights_step, "weights": weights}
        return batches

    def load(self, batches: dict[int, dict[str, Any]]) -> None:
        self.arrived = {number: batch for number, batch in batches.items() if "output" in batch}
        self.stopped = {number: batch for number, batch in batches.items() if "output" not in batch}

    def put_back(self) -> None:
        if self._taken_at == self.trainer.state.global_step:
            self.arrived[self._taken_number] = self.taken

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
        if not self.trainer.use_vllm:  # a server goes on with a request, and an evaluation waits for it
            self._in_flight.clear()

    # The next batch -------------------------------------------------------------------------------------------------

    @property
    def next_number(self) -> int:
        """Number of the batch that training takes next."""
        return self.trainer.generation_number

    @property
    def taken_step(self) -> int:
        """Optimizer step of the weights that generated the batch that was taken last."""
        return self.taken["step"]

    def _take_next(self) -> None:
        """Wait for the next batch, make it the one that is taken, and start to generate the one `lag` batches later.
        Raises what [`take`] raises."""
        number = self.next_number
        if self.engine is None:
            self._start_engine()
        for n in range(number, number + self.lag):  # the first ones of a run; later they have been submitted
            self._submit(n)
        started = time.perf_counter()
        failure = self._receive(number)
        waited = time.perf_counter() - started
        self._raise_on_all(failure)
        self.taken = self.arrived.pop(number)
        self._taken_number = number
        self._taken_at = self.trainer.state.global_step
        self._submit(number + self.lag)
        self.trainer.record_metrics(
            {
                "async/learner_wait": waited,
                "async/engine_wait": self.taken["idle"],
                "async/overlapped_share": max(0.0, 1 - waited / self.taken["seconds"]),
            }
        )

    def _receive(self, number: int) -> ServerFailure | Stopped | None:
        """Wait until a batch is in `arrived`. Returns why it did not arrive, or `None` if it did."""
        if number not in self._in_flight:
            return None
        future = self._in_flight[number].batch
        while not concurrent.futures.wait([future], timeout=0.2).done:
            if is_to_stop(self.trainer):
                self._deadline = self._deadline or time.monotonic() + PATIENCE
                if time.monotonic() >= self._deadline:
                    return Stopped()
        error = future.exception()
        if error is not None:
            return ServerFailure("stopped", f"{type(error).__name__}: {error}".removesuffix(": "))
        self.arrived[number] = future.result()
        del self._in_flight[number]
        return None

    def _raise_on_all(self, failure: ServerFailure | Stopped | None) -> None:
        """Raise the first [`ServerFailure`] of all processes, which must all call this, or else [`Stopped`] if one of
        them stops."""
        failures = [failure for failure in gather_object([failure]) if failure is not None]
        for failure in failures:
            if isinstance(failure, ServerFailure):
                raise failure
        if failures:
            raise Stopped

    def _check_prompts(self, prompts: list) -> None:
        """Raise a [`FailedRun`] unless the batch that was taken was generated for `prompts`."""
        if self.taken["prompts"] != prompts:
            raise FailedRun(
                f"The prompts of generation batch {self._taken_number} are not those that the engine generated for: "
                "the dataset or the number of processes differs from the checkpoint's. Resume with both as they were."
            )

    # Start ----------------------------------------------------------------------------------------------------------

    def _start_engine(self) -> None:
        trainer = self.trainer
        self._early_rewards = EarlyRewards(trainer)
        if trainer.use_vllm:
            self.engine = ServerRequests(trainer)
            self._keep_batches_of_all_processes()
        else:
            self.engine = EngineProcess(trainer, self.lag)
        self._engine_free_since = time.perf_counter()

    def _keep_batches_of_all_processes(self) -> None:
        """Keep the batches of a checkpoint that had arrived on all processes. When a server failed, or a signal
        stopped the run, some processes may not have had theirs: all request them again, with new weights, which the
        processes send to the server together."""
        arrived_everywhere = set.intersection(*gather_object([set(self.arrived)]))
        self.arrived = {number: batch for number, batch in self.arrived.items() if number in arrived_everywhere}

    # Generation -----------------------------------------------------------------------------------------------------

    def _submit(self, number: int) -> None:
        """Start to generate a batch, unless that has begun, the batch has arrived, or training ends before it."""
        trainer = self.trainer
        sizes = BatchSizes.of(trainer.args, trainer.accelerator.num_processes)
        if number >= sizes.num_generation_batches(trainer.state.max_steps):
            return
        if number in self._in_flight or number in self.arrived:
            return
        stopped = self.stopped.get(number, {})
        weights_step = stopped.get("step", trainer.state.global_step)
        with trainer.timer.part("weight_sync"):
            self.engine.write_weights(self._weight_copy(number), stopped.get("weights"))
        self.stopped.pop(number, None)
        generate = self._prepare(number, weights_step, stopped)
        batch = in_background(self._generate_and_grade, weights_step, generate, self._last_submitted)
        self._in_flight[number] = InFlight(weights_step, batch)
        self._last_submitted = batch

    def _weight_copy(self, number: int) -> int:
        """Return the index of the copy of the trained weights with which the engine generates a batch. Before, batch
        `number - lag` was generated with it, which is taken when this one is submitted."""
        return number % self.lag

    def _prepare(self, number: int, weights_step: int, stopped: dict[str, Any]) -> Callable[[], Generated]:
        """Return a function that generates a batch in another thread. `stopped` is the batch of a checkpoint that had
        not arrived, or empty."""
        rows = self._rows(number)
        prompts = [row["prompt"] for row in rows]
        if self.trainer.late_rollout is None:
            prompts = self._prompt_ids(prompts)

        def generate() -> Generated:
            return Generated({"prompts": prompts, "output": self._generate(number, prompts)}, rows)

        return generate

    def _rows(self, number: int) -> list[dict[str, Any]]:
        """Return the dataset rows of a generation batch, one per completion of this process."""
        all_indices = indices_of_generation(self.trainer, number)
        num_rows = len(all_indices) // self.trainer.accelerator.num_processes
        first = self.trainer.accelerator.process_index * num_rows
        indices = all_indices[first : first + num_rows]
        row_by_index = {i: self.trainer.train_dataset[i] for i in set(indices)}
        return [independent_copy(row_by_index[i]) for i in indices]  # completions of a group share nothing

    def _prompt_ids(self, prompts: list) -> list[list[int]]:
        return [list(ids) for ids in self.trainer._tokenize_prompts(prompts)[0]]

    def _generate_and_grade(
        self, weights_step: int, generate: Callable[[], Generated], previous: Future | None
    ) -> dict[str, Any]:
        """Generate and grade a batch in a thread of its own. `previous` is the batch that was submitted before. An
        exception is raised on all processes when the batch is taken."""
        submitted = time.perf_counter()
        entries, rows = generate()
        # The engine generates one batch after the other, so it began this one when the one before was finished.
        free_since = self._engine_free_since
        began = max(submitted, free_since)
        self._engine_free_since = time.perf_counter()
        if previous is not None:
            previous.result()  # batches are graded in their order, and none after one that has failed
        rewards = self._early_rewards.compute(rows, entries["output"], weights_step)
        return {
            "step": weights_step,
            "rewards": rewards,
            **entries,
            "seconds": time.perf_counter() - began,
            "idle": began - free_since,
        }

    def _generate(self, number: int, prompts: list) -> dict[str, list]:
        """Return the `output` of a batch, of the engine or of a `rollout_func`, which makes requests of its own."""
        trainer, weight_copy = self.trainer, self._weight_copy(number)
        stream = f"{trainer.args.seed}/{trainer.accelerator.process_index}/late"
        if trainer.late_rollout is None:
            return self.engine.generate(weight_copy, prompts, request_seed(stream, number))
        request_numbers = itertools.count()

        async def generate(prompt_ids: list[list[int]]) -> dict[str, list[list]]:
            seed = request_seed(f"{stream}/{number}", next(request_numbers))
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
