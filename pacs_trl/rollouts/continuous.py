"""Continuous rollouts: a vLLM server that generates without a pause between batches, while the trainer learns.

A worker process (`rollout_worker.py`) keeps the slots of the server filled while fewer groups are decoded or wait than
`max_staleness + 1` optimizer steps need. An optimizer step takes the groups that were finished and graded first. After
each step the server gets the new weights: it is paused, completions in flight go on with the new weights, and their
cache is computed again with them. With `vllm_sync_adapter` it gets an adapter that new turns use, without a pause. The
version of weights is the number of optimizer steps before them.

The log-probs of the engine are the reference `rollout` and the denominator of probability ratios, as with
`rollout_lag`: each is that of the version that sampled the token, after the whole prefix.

Only the first process has a worker, groups that wait, and positions; it sends the groups of a step to the others.
Checkpoints hold the groups that wait, and the positions of prompts that were not delivered, which a run that resumes
generates again.
"""

import logging
import time
from contextlib import AbstractContextManager
from typing import Any

from accelerate.utils import broadcast_object_list

from ..rewards import shared_arguments
from .early_rewards import replaying
from .engine_failures import ServerFailure, WorkerFailure
from .interruption import PATIENCE, Stopped
from .prompt_order import PromptOrder, prompt_order
from .protocols import ContinuousTrainer
from .reward_functions import independent_copy
from .rollout_worker import GradedGroup, RolloutWorker
from .server_command import server_url
from .server_connection import ServerConnection
from .server_watch import Failure, in_one_line
from .stop_on_signal import is_to_stop


logger = logging.getLogger(__name__)


class ContinuousRollouts:
    """
    Source of rollouts of a run with `rollout_schedule: continuous`.

    Attributes:
        waiting (`list[GradedGroup]`): Groups that were delivered and not taken, in the order of delivery.
        missing (`list[int]`), next_position (`int`): Positions below `next_position` that were not delivered, and the
            first one from which none was.
    """

    def __init__(self, trainer: ContinuousTrainer):
        self.trainer = trainer
        self.is_main = trainer.accelerator.is_main_process
        self.groups_per_step = trainer.args.generation_batch_size // trainer.args.num_generations
        self.waiting: list[GradedGroup] = []
        self.missing: list[int] = []
        self.next_position = 0
        self._taken: list[GradedGroup] = []  # of the optimizer step `_taken_at`
        self._taken_at = -1
        self._num_dropped = 0  # groups, since those of a step were taken
        self._num_dropped_before = 0  # those that the step `_taken_at` has counted
        # Completions of this process in the current step: the group, and the index of the completion in it.
        self._completions: list[tuple[GradedGroup, int]] = []
        self._num_delivered = 0  # groups, by the current worker
        self._server = ServerConnection(trainer)
        self._worker: RolloutWorker | None = None
        self._order: PromptOrder | None = None

    def send_weights(self) -> None:
        """Send the current weights to the server, unless it has them. All processes must call this. Raises a
        [`ServerFailure`] or [`WrongWeights`], as [`ServerConnection.send_weights`] does."""
        self._server.send_weights(self._worker)

    # Rollouts of a step ---------------------------------------------------------------------------------------------

    def next_rows(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Wait for the groups of the next optimizer step, and return the dataset rows, with their prompts, of the
        completions of this process. Groups come in the order in which they were finished, so of `rows` only the number
        is used. Raises a [`ServerFailure`] on all processes if server or worker has failed, and [`Stopped`] if a
        signal stops the run first."""
        groups = self._next_groups()
        completions = [(group, i) for group in groups for i in range(len(group.completions))]
        first = self.trainer.accelerator.process_index * len(rows)
        self._completions = completions[first : first + len(rows)]
        order, dataset = self._prompt_order(), self.trainer.train_dataset
        row_by_position = {group.position: dataset[order[group.position]] for group, _ in self._completions}
        return [
            independent_copy(row_by_position[group.position]) | {"prompt": group.prompts[i]}
            for group, i in self._completions
        ]

    def _next_groups(self) -> list[GradedGroup]:
        """Return the groups of the next optimizer step on all processes. Raises what [`next_rows`] raises."""
        self.send_weights()
        started = time.perf_counter()
        failure: ServerFailure | None = None
        groups: list[GradedGroup] | None = None  # none if the run stops
        if self.is_main:
            try:
                if self._worker is None:
                    self._start_worker()
                    started = time.perf_counter()
                if self._wait_for_groups(self.groups_per_step):
                    groups = self._take_groups()
            except ServerFailure as error:
                if not is_to_stop(self.trainer):  # a signal to all processes of a job ends the server, too
                    failure = error
        failure, groups = broadcast_object_list([failure, groups], from_process=0)
        if failure is not None:
            raise failure
        if groups is None:
            raise Stopped
        self.trainer.record_metrics({"async/learner_wait": time.perf_counter() - started})
        return groups

    def take(self, prompts: list, *args: Any, **kwargs: Any) -> dict[str, Any]:
        output: dict[str, list] = {
            "prompt_ids": [list(group.prompt_ids[i]) for group, i in self._completions],
            "completion_ids": [list(group.completion_ids[i]) for group, i in self._completions],
            "logprobs": [_logps_of_sampled(group.logps[i], group.mask[i]) for group, i in self._completions],
        }
        if not self.trainer.tools:  # with tools TRL takes the masks from its `_tool_call_loop`
            output["env_mask"] = [list(group.mask[i]) for group, i in self._completions]
        return output

    def tool_calls(self, prompts, prompt_ids, completion_ids, completions, logprobs, *images: Any) -> tuple:
        """Return what TRL's `_tool_call_loop` returns: the worker has called the tools."""
        masks = [list(group.mask[i]) or [1] for group, i in self._completions]  # an end token for empty completions
        messages = [group.completions[i] for group, i in self._completions]
        num_calls = sum(group.tool_calls[i] for group, i in self._completions)
        num_failures = sum(group.tool_failures[i] for group, i in self._completions)
        images_of_tools: list[list] = [[] for _ in self._completions]
        return masks, messages, completion_ids, logprobs, num_calls, num_failures, images_of_tools

    def early_rewards(self) -> AbstractContextManager[None]:
        num_functions = len(self.trainer.reward_funcs)
        return replaying(self.trainer, {function: self._graded(function) for function in range(num_functions)})

    def _graded(self, function: int) -> dict[str, list]:
        """Return the rewards of a reward function, and what it logged, for the completions of this process."""
        rewards: list[float | None] = []
        metrics: list[tuple[str, str, float]] = []
        columns: dict[str, list] = {}
        for row, (group, i) in enumerate(self._completions):
            rewards.append(group.rewards[function][i])
            for kind, name, value in group.logged[function]:
                if kind == "log_extra":
                    column = columns.setdefault(name, [None] * len(self._completions))
                    column[row] = value[i]
                elif i == 0:  # the process that has the first completion of a group logs the metrics of the group
                    metrics.append((kind, name, value))
        extras = [("log_extra", name, column) for name, column in columns.items()]
        return {"rewards": rewards, "logged": [*metrics, *extras]}

    # Groups, on the first process -----------------------------------------------------------------------------------

    def _wait_for_groups(self, number: int) -> bool:
        """Wait until `number` groups may be trained, and return whether there are as many: a signal or another reason
        to stop ends the wait. Raises a [`ServerFailure`] if server or worker has failed."""
        watch = self._server.watch
        assert watch is not None
        deadline = None
        while True:
            self._drop_stale()
            self._admit(is_taken=False)
            failure = self._failure()
            if failure is not None:
                raise failure
            # Groups are trained once the server was healthy after their delivery.
            if len(self.waiting) >= number and watch.check() is None:
                are_checked = [group.enqueued_at <= watch.checked_at for group in self.waiting[:number]]
                if all(are_checked):
                    return True
            if is_to_stop(self.trainer):
                deadline = deadline or time.monotonic() + PATIENCE
                if time.monotonic() >= deadline:
                    return False
            self._receive(timeout=0.2)

    def _failure(self) -> ServerFailure | None:
        """Return the failure of server or worker, if there is one. Groups that a server delivered after its last
        successful check, and before it failed, are discarded."""
        watch = self._server.watch
        assert self._worker is not None and watch is not None
        failure_of_server = watch.failure
        problem = self._worker.problem()
        if problem is not None:
            error_name, message = problem
            if error_name != "ServerError":
                return WorkerFailure("failed", f"{error_name}: {message}")
            failure_of_server = watch.check() or Failure("failed to generate", message)
        if failure_of_server is None:
            return None
        self._receive(timeout=0)
        self._discard_unchecked()
        return ServerFailure(*failure_of_server)

    def _discard_unchecked(self) -> None:
        """Discard the groups that were delivered after the last successful check of the server. They are generated
        again by a run that resumes."""
        watch = self._server.watch
        assert watch is not None
        discarded = [group for group in self.waiting if group.enqueued_at > watch.checked_at]
        self.waiting = [group for group in self.waiting if group.enqueued_at <= watch.checked_at]
        self.missing = sorted([*self.missing, *(group.position for group in discarded)])

    def _receive(self, timeout: float) -> None:
        """Move groups that the worker has delivered to `waiting`; wait up to `timeout` seconds for the first one."""
        assert self._worker is not None
        for group in self._worker.receive(timeout):
            self._num_delivered += 1
            if group.position in self.missing:
                self.missing.remove(group.position)
            else:
                self.missing += range(self.next_position, group.position)
                self.next_position = group.position + 1
            self.waiting.append(group)

    def _drop_stale(self) -> None:
        step = self.trainer.state.global_step
        fresh = [group for group in self.waiting if _staleness(group, step) <= self.trainer.args.max_staleness]
        self._num_dropped += len(self.waiting) - len(fresh)
        self.waiting = fresh

    def _admit(self, *, is_taken: bool) -> None:
        """Let the worker start groups while fewer are decoded, wait, or are trained than `max_staleness + 1` steps
        need, or the remaining steps. A group that starts now has at best the current weights, so one more step would
        drop it. `is_taken` tells whether the groups of the current step are taken."""
        assert self._worker is not None
        args, state = self.trainer.args, self.trainer.state
        num_steps = min(args.max_staleness + 1, state.max_steps - state.global_step)
        if is_taken:
            num_steps -= 1
        num_places = num_steps * self.groups_per_step
        # A group holds a place from its start until it is taken. Groups that wait were delivered, so the other places
        # are for groups between their start and their delivery.
        num_in_worker = max(0, num_places - len(self.waiting))
        # The worker starts groups while it has started fewer than `admitted`, counted from its own start.
        self._worker.shared.admitted = self._num_delivered + num_in_worker

    def _take_groups(self) -> list[GradedGroup]:
        """Take the groups of the next optimizer step, which wait."""
        groups = self.waiting[: self.groups_per_step]
        self.waiting = self.waiting[self.groups_per_step :]
        self._taken = groups
        self._taken_at = self.trainer.state.global_step
        self._num_dropped_before = self._num_dropped
        self._num_dropped = 0
        self._admit(is_taken=True)
        self._record_metrics(groups)
        return groups

    def _record_metrics(self, groups: list[GradedGroup]) -> None:
        """Log the metrics of the groups that were taken, and what the worker has measured since the last ones."""
        assert self._worker is not None
        ages = [_staleness(group, self._taken_at) for group in groups]
        num_completions = sum(len(group.completions) for group in groups)
        metrics = {
            "async/lag_updates": sum(ages) / len(ages),
            "async/largest_lag": float(max(ages)),
            "async/dropped_groups": float(self._num_dropped_before),
            "async/waiting_groups": float(len(self.waiting)),
            "async/changed_weights_fraction": sum(group.num_mixed for group in groups) / num_completions,
            "async/forked_fraction": sum(group.num_forks > 0 for group in groups) / len(groups),
        }
        measured = self._worker.measured()
        nums_in_flight = measured.get("rollout/inflight")
        if nums_in_flight:
            metrics["async/busy_slots"] = sum(nums_in_flight) / len(nums_in_flight)
        tokens_and_seconds = measured.get("rollout/generated_tok_s")
        if tokens_and_seconds:
            num_tokens = sum(tokens for tokens, _ in tokens_and_seconds)
            seconds = sum(seconds for _, seconds in tokens_and_seconds)
            metrics["async/generated_tokens_per_second"] = num_tokens / max(seconds, 1e-9)
        self.trainer.record_metrics(metrics)

    # State ----------------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Receive the groups that were delivered. The worker goes on, so no other group is waited for."""
        if self._worker is not None and self._server.watch is not None:
            self._receive(timeout=0)
            if self._server.watch.check() is not None:
                self._discard_unchecked()

    def state(self) -> dict[str, Any]:
        """Return the groups that wait, the positions to generate again, and the number of groups that were dropped but
        not logged yet, for a checkpoint."""
        if not self.is_main:
            return {}
        return {
            "groups": [dict(vars(group)) for group in self.waiting],
            "missing": list(self.missing),
            "next_position": self.next_position,
            "num_dropped": self._num_dropped,
        }

    def load(self, batches: dict[str, Any]) -> None:
        if self.is_main:
            self.waiting = [GradedGroup(**group) for group in batches["groups"]]
            self.missing = batches["missing"]
            self.next_position = batches["next_position"]
            self._num_dropped = batches["num_dropped"]
            for group in self.waiting:
                group.enqueued_at = 0.0  # checked by the run that has saved it

    def put_back(self) -> None:
        if self._taken_at == self.trainer.state.global_step:
            self.waiting = [*self._taken, *self.waiting]
            self._num_dropped += self._num_dropped_before
            self._taken_at = -1

    def close(self) -> None:
        """End the worker, whose requests the server then aborts; leave the server running."""
        if self._worker is not None:
            self._worker.stop()
            self._worker = None
        self._server.close()
        self._num_delivered = 0

    # Start ----------------------------------------------------------------------------------------------------------

    def _prompt_order(self) -> PromptOrder:
        if self._order is None:
            self._order = prompt_order(self.trainer)
        return self._order

    def _start_worker(self) -> None:
        assert self._server.watch is not None
        self._num_delivered = 0
        try:
            self._worker = RolloutWorker(**worker_arguments(self.trainer, self, self._server.num_slots))
            self._worker.shared.value = self._server.sent_step
            self._worker.start()
            self._server.watch.start()
        except Exception as error:  # of the user's code, which is sent to the process, and of its start
            logger.exception("The rollout worker failed to start.")
            raise WorkerFailure("failed to start", in_one_line(error)) from error


def worker_arguments(trainer: ContinuousTrainer, source: ContinuousRollouts, num_slots: int) -> dict[str, Any]:
    """Return the arguments of the [`RolloutLoop`] of a run, for a server that decodes `num_slots` completions."""
    args = trainer.args
    return {
        "model_name": trainer.vllm_generation.vllm_client.model,
        "lora_name": source._server.lora_name,
        "dataset": trainer.train_dataset,
        "processing_class": trainer._tokenizer,
        "eos_token_ids": list(trainer.eos_token_ids),
        **trainer.user_code,
        "num_generations": args.num_generations,
        "max_inflight_tasks": min(num_slots, (args.max_staleness + 1) * args.generation_batch_size),
        "vllm_server_url": server_url(args),
        "max_tokens": args.max_completion_length,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "min_p": args.min_p,
        "repetition_penalty": args.repetition_penalty,
        "chat_template_kwargs": dict(args.chat_template_kwargs or {}),
        "max_tool_calling_iterations": args.max_tool_calling_iterations,
        "order": source._prompt_order(),
        "missing": list(source.missing),
        "next_position": source.next_position,
        "seed": args.seed,
        "generation_kwargs": dict(args.generation_kwargs or {}),
        "verification": shared_arguments(),
        "max_steps": trainer.state.max_steps,
        "prompt_date": trainer._prompt_date,
    }


def _logps_of_sampled(logps: list[float], mask: list[int]) -> list[float | None]:
    """Return the log-probs of the tokens that the policy has sampled, and `None` for those of tools."""
    return [logp if is_sampled else None for logp, is_sampled in zip(logps, mask, strict=True)]


def _staleness(group: GradedGroup, step: int) -> int:
    """Return the optimizer steps since the weights of the oldest sampled token of a group."""
    oldest = group.oldest_version
    return 0 if oldest is None else step - oldest
