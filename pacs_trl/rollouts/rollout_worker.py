"""Continuous rollouts in a process of their own: TRL's asynchronous worker, which delivers whole graded groups.

[`RolloutLoop`] overrides these parts of TRL's loop:

- Prompts come in the order of the trainer, with their positions, and a group starts when the trainer admits it.
- Requests are streamed, and each token is noted with the version of the weights that sampled it. With adapters it is
  that with which its turn began, also if the server has newer ones.
- The seed of a request follows from position, completion, and turn; a conversation has `max_completion_length` tokens
  over all its turns.
- A group is delivered as one [`GradedGroup`], and groups are graded concurrently.
- The process ends with the trainer, and a server that does not answer ends it within seconds.
"""

import asyncio
import ctypes
import inspect
import itertools
import json
import multiprocessing
import os
import queue
import signal
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any, NamedTuple

from transformers import TrainerState
from trl.experimental.async_grpo import async_rollout_worker
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, TrainingSequence, _AsyncRolloutLoop
from trl.trainer.utils import is_async_callable

from ..data.prompt_date import prints_date, with_date
from ..data.tool_calls import readable_calls, safe_tools
from ..rewards import FUNCTIONS, VerificationArguments, configure_verification, run_python
from ..update.rollout import as_numbers
from .completion_columns import new_column
from .group_starts import takes_seed
from .prompt_order import PromptOrder
from .request_seeds import request_seed
from .reward_functions import never_exiting, with_result, with_truncated


_ATTEMPTS = 3  # of a request, within about three seconds
_SECONDS_TO_STOP = 3.0
_SECONDS_TO_CONNECT = 30.0  # of a busy machine; a server that is down refuses connections at once


class ServerError(RuntimeError):
    """The vLLM server does not answer, or has ended a request."""


class VersionedLogp(float):
    """Log-prob of a sampled token in nats, with the `version` of the weights that sampled it. TRL's loop hands it
    through to the training sequence of a conversation as any number."""

    version: int

    def __new__(cls, value: float, version: int):
        logp = super().__new__(cls, value)
        logp.version = version
        return logp


@dataclass
class GradedGroup:
    """
    All completions of a prompt, finished and graded. Values are plain, so that checkpoints can hold them.

    Attributes:
        position (`int`): Position of the prompt in the order of the run.
        prompts, completions (`list`): Messages of each completion; prompts of environments may differ.
        prompt_ids, completion_ids (`list[list[int]]`): Token ids of each completion.
        mask (`list[list[int]]`): 1 for the tokens of a completion that the policy sampled, 0 for others.
        logps (`list[list[float]]`): Log-probs in nats of the tokens of a completion; 0 where the mask is.
        versions (`list[list[int]]`): Version of the weights of each token of a completion; -1 where the mask is 0.
        rewards (`list[list[float | None]]`): Rewards of the completions by reward function.
        logged (`list[list[list]]`): What each reward function has logged: `log_metric` or `log_extra`, name, value.
        tool_calls, tool_failures (`list[int]`): Number of calls of each completion, and of those that failed.
        num_forks (`int`): Parts of conversations that are not trained, because a chat template changed earlier tokens.
        enqueued_at (`float`): Time of delivery, in seconds since the epoch.
    """

    position: int
    prompts: list
    completions: list
    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    mask: list[list[int]]
    logps: list[list[float]]
    versions: list[list[int]]
    rewards: list[list[float | None]]
    logged: list[list[list]]
    tool_calls: list[int]
    tool_failures: list[int]
    num_forks: int = 0
    enqueued_at: float = 0.0

    @property
    def oldest_version(self) -> int | None:
        """Version of the oldest weights that sampled a token of the group; `None` if none was sampled."""
        sampled_versions = [version for versions in self.versions for version in versions if version >= 0]
        return min(sampled_versions, default=None)

    @property
    def num_mixed(self) -> int:
        """Number of completions with tokens of several versions."""
        distinct_versions = [{version for version in versions if version >= 0} for versions in self.versions]
        return sum(len(versions) > 1 for versions in distinct_versions)


class SharedState(ctypes.Structure):
    """
    Numbers that trainer and worker share.

    Attributes:
        value (`int`): Version of the weights of the server; TRL's name.
        admitted (`int`): Number of groups that the worker may have started.
        asked, drained (`int`): The trainer raises `asked` while the server is paused, or has a new adapter, and the
            worker sets `drained` to it when it has read all tokens that the server had sent.
        oldest (`int`): Oldest version of an adapter that requests still named when `drained` was set last.
    """

    _fields_ = [(name, ctypes.c_int) for name in ("value", "admitted", "asked", "drained", "oldest")]


@dataclass
class _Conversation:
    """
    A conversation that is being generated. TRL's loop runs each in a task of its own, but does not tell
    [`RolloutLoop._post`] for which one a request is, so each task has its conversation in a context variable.

    Attributes:
        seed_stream (`str`): Name of the stream from which its requests take their seeds.
        first_prompt_ids (`list[int]`): Token ids of the prompt of its first turn; empty before the first request.
        num_requests (`int`): Number of requests that were answered.
        turn_version (`int`): Version of the weights with which its current turn began.
    """

    seed_stream: str
    first_prompt_ids: list[int] = field(default_factory=list)
    num_requests: int = 0
    turn_version: int = 0


_conversation: ContextVar[_Conversation] = ContextVar("conversation")


class _Graded(NamedTuple):
    """What a reward function has returned for a group, and what it has logged, as in a [`GradedGroup`]."""

    rewards: list[float | None]
    logged: list[list]


class RolloutLoop(_AsyncRolloutLoop):
    """
    TRL's loop with the changes that the module docstring names. TRL's `group_id` is the position of a prompt.

    Args:
        order ([`PromptOrder`]): Order of prompts.
        missing (`list[int]`), next_position (`int`): Positions to generate first, and the one to continue with.
        seed (`int`): Seed of requests.
        generation_kwargs (`dict`): Further keys of requests.
        verification ([`VerificationArguments`]): Settings of the shared verifiers.
        max_steps (`int`): Optimizer steps of the run, for the `trainer_state` of reward functions.
        prompt_date (`str`): ISO date for chat templates that print one.
        **loop_kwargs: Arguments of TRL's loop.
    """

    def __init__(
        self,
        *,
        order: PromptOrder,
        missing: list[int],
        next_position: int,
        seed: int,
        generation_kwargs: dict[str, Any],
        verification: VerificationArguments,
        max_steps: int,
        prompt_date: str,
        **loop_kwargs: Any,
    ):
        tokenizer = loop_kwargs["processing_class"]
        has_tools = bool(loop_kwargs.get("tools") or loop_kwargs.get("environment_factory"))
        has_template = getattr(tokenizer, "response_template", None) or getattr(tokenizer, "response_schema", None)
        reads_text = not has_tools and not has_template
        if reads_text:
            tokenizer.response_template = {}  # TRL's loop demands one, also if there are no calls of tools to parse
        super().__init__(**loop_kwargs)
        if reads_text:
            tokenizer.response_template = None
        if prints_date(self.chat_template or tokenizer.chat_template):
            self.chat_template_kwargs = with_date(self.chat_template_kwargs, lambda: prompt_date)
        self._shared: Any = self._model_version_value

        # Prompts
        self._order = order
        self._missing = missing
        self._next_position = next_position
        self._num_groups_before: dict[int, int] = {}  # groups of this worker before one, by its position
        self._num_conversations: Counter[int] = Counter()  # that have been created, by position
        self._admission = asyncio.Lock()  # only one conversation at a time asks whether it is admitted
        self._num_in_progress = 0  # conversations of admitted groups
        self._resets_with_seed: dict[str | None, bool] = {}  # by the name of an environment
        if self.environment_factories is not None:
            pools: dict[str | None, list[Any]] = self._environment_pool
            for name, environments in pools.items():
                self._resets_with_seed[name] = takes_seed(environments[0].reset)

        # Requests
        self._seed = seed
        self._generation_kwargs = generation_kwargs
        self._open_turns: Counter[int] = Counter()  # by the version with which they began
        self._num_read = 0  # tokens that requests have read

        # Rewards
        self._max_steps = max_steps
        self._num_graders = loop_kwargs["max_inflight_tasks"]
        functions = [inspect.unwrap(function) for function in (*self.reward_funcs, *self._standalone_tools)]
        if any(function in (*FUNCTIONS, run_python) for function in functions):
            configure_verification(verification)
        names = self.reward_func_names[: len(self.reward_funcs)]
        self._checked_functions = [
            self._checked(function, name) for function, name in zip(self.reward_funcs, names, strict=True)
        ]

    def run(self) -> None:
        if multiprocessing.parent_process() is not None:
            for signum in (signal.SIGINT, signal.SIGTERM):  # a terminal and schedulers send them to all processes
                signal.signal(signum, signal.SIG_IGN)
            threading.Thread(target=_end_with_parent, daemon=True).start()
        with readable_calls(self.tokenizer):
            super().run()

    async def _run_loops(self, stop_event: asyncio.Event) -> None:
        loops = asyncio.create_task(super()._run_loops(stop_event))
        stopped = asyncio.create_task(stop_event.wait())
        _acknowledging = asyncio.create_task(self._acknowledge())  # in a variable: the event loop has weak references
        try:
            await asyncio.wait([loops, stopped], return_when=asyncio.FIRST_COMPLETED)
            if loops.done():
                await loops  # raises what has ended it
        finally:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # Prompts --------------------------------------------------------------------------------------------------------

    def _repeat_iterator(self) -> Iterator[tuple[int, dict[str, Any]]]:
        positions = itertools.chain(self._missing, itertools.count(self._next_position))
        for num_before, position in enumerate(positions):
            self._num_groups_before[position] = num_before
            row = self.dataset[self._order[position]]
            if self._takes_seed(row):
                row = {"seed": request_seed(f"{self._seed}/environments", position), **row}
            for _ in range(self.num_generations):
                yield position, row

    def _takes_seed(self, row: dict[str, Any]) -> bool:
        """Whether the environment of a dataset row starts by a seed, so that a group starts from one state."""
        environment = row.get("environment") if self._multi_environment else None
        return self._resets_with_seed.get(environment, False)

    async def _generate_one(self, prompt, tool_dict, tools, group_id=0):
        index = self._num_conversations[group_id]
        self._num_conversations[group_id] += 1
        conversation = _Conversation(f"{self._seed}/continuous/{group_id}/{index}")
        _conversation.set(conversation)
        async with self._admission:
            while self._num_groups_before[group_id] >= self._shared.admitted:
                await asyncio.sleep(0.01)
        tool_dict = safe_tools(tool_dict, takes_images=False)
        self._num_in_progress += 1
        try:
            generated = await super()._generate_one(prompt, tool_dict, tools, group_id)
        finally:
            self._num_in_progress -= 1
        completion, completion_ids, sequences, *counts = generated
        if not sequences:  # nothing was sampled
            ids = conversation.first_prompt_ids
            sequences = [TrainingSequence(ids, [0] * len(ids), [0.0] * len(ids), "")]
        return completion, completion_ids, sequences, *counts

    def _push_metrics(self, values: dict[str, Any]) -> None:
        if "rollout/inflight" in values:  # in which TRL counts conversations that wait for their admission
            values = values | {"rollout/inflight": float(self._num_in_progress)}
        super()._push_metrics(values)

    # Requests -------------------------------------------------------------------------------------------------------

    async def _generate_one_turn(self, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
        version = self.model_version
        _conversation.get().turn_version = version
        self._open_turns[version] += 1
        try:
            return await super()._generate_one_turn(prompt_ids)
        finally:
            self._open_turns[version] -= 1

    @property
    def _request_model(self) -> str:
        if self.lora_name is None:
            return self.model_name
        return f"{self.lora_name}-v{_conversation.get().turn_version}"

    async def _post(self, path: str, payload: dict, timeout: float, max_retries: int = 3) -> dict:
        """Stream a completion, and return it as an answer without streaming, with a [`VersionedLogp`] per token."""
        conversation = _conversation.get()
        prompt_ids = payload["prompt"]
        if not conversation.first_prompt_ids:
            conversation.first_prompt_ids = prompt_ids
        # The prompt of a later turn has the completion so far: earlier turns, and results of tools.
        num_left = self.max_tokens - (len(prompt_ids) - len(conversation.first_prompt_ids))
        token_ids: list[int] = []
        logps: list[VersionedLogp] = []
        if num_left > 0:
            seed = request_seed(conversation.seed_stream, conversation.num_requests)
            payload = payload | {"max_tokens": num_left, "seed": seed, "stream": True} | self._generation_kwargs
            async for choice in self._stream(path, payload):
                version = self.model_version if self.lora_name is None else conversation.turn_version
                self._num_read += len(choice["token_ids"])
                token_ids += choice["token_ids"]
                logps += [VersionedLogp(logp, version) for logp in choice["logprobs"]["token_logprobs"]]
        conversation.num_requests += 1  # not before: a request that is sent again keeps its seed
        return {"choices": [{"token_ids": token_ids, "logprobs": {"token_logprobs": logps}}]}

    async def _stream(self, path: str, payload: dict):
        """Yield the parts of a completion as they arrive. A server may be paused for any time in between."""
        assert self.session is not None
        aiohttp = async_rollout_worker.aiohttp
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_SECONDS_TO_CONNECT)
        # A connection of its own: a server closes those that are idle, which a request may find out too late.
        headers = {"Connection": "close"}
        url = f"{self.vllm_server_url}{path}"
        async with self.session.post(url, json=payload, headers=headers, timeout=timeout) as response:
            if response.status != 200:
                raise aiohttp.ClientPayloadError(f"status {response.status}, {(await response.text())[:300]}")
            is_finished = False
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                if "choices" not in event:
                    raise aiohttp.ClientPayloadError(f"{event.get('error', event)}"[:300])
                for choice in event["choices"]:
                    is_finished = choice["finish_reason"] is not None
                    if choice["finish_reason"] == "abort":
                        raise aiohttp.ClientPayloadError("the server aborted a request")
                    if choice["token_ids"]:
                        yield choice
            if not is_finished:
                raise aiohttp.ClientPayloadError("the server ended a completion early")

    async def _retry(self, coro_factory: Callable[[], Awaitable], *, label: str, max_attempts: int = 1):
        try:
            return await super()._retry(coro_factory, label=label, max_attempts=min(max_attempts, _ATTEMPTS))
        except async_rollout_worker._RETRYABLE_HTTP_ERRORS as error:
            raise ServerError(f"{label}: {type(error).__name__}: {error}") from error

    async def _acknowledge(self) -> None:
        """Answer the trainer whenever it raises `asked`, see [`SharedState`]."""
        while True:
            asked = self._shared.asked
            if self._shared.drained != asked:
                if self.lora_name is None:  # otherwise the server is not paused
                    await self._read_all()
                versions_in_use = [version for version, num_turns in self._open_turns.items() if num_turns > 0]
                self._shared.oldest = min([*versions_in_use, self.model_version])
                self._shared.drained = asked
            await asyncio.sleep(0.005)

    async def _read_all(self) -> None:
        """Wait until requests have read all tokens that the server, which is paused, has sent: until none has read
        another one in three rounds of the event loop. In each, every request reads a part of what has arrived."""
        num_read_before = -1
        while self._num_read != num_read_before:
            num_read_before = self._num_read
            for _ in range(3):
                await asyncio.sleep(0.005)

    # Rewards --------------------------------------------------------------------------------------------------------

    async def _score_loop(self, stop_event: asyncio.Event) -> None:
        """Grade as many groups at a time as conversations are generated; TRL's loop grades one after the other."""
        score_loop = super()._score_loop
        await asyncio.gather(*(score_loop(stop_event=stop_event) for _ in range(self._num_graders)))

    async def _score_group(self, group) -> list[Any]:
        """Grade a group. TRL's loop delivers each element of the result on its own, and the [`GradedGroup`] is one."""
        arguments = {
            "prompts": group.prompts,
            "completions": group.completions,
            **group.reward_kwargs,
            "completion_ids": group.completions_ids,
            "trainer_state": TrainerState(global_step=self.model_version, max_steps=self._max_steps),
        }
        graded = await asyncio.gather(*(self._grade(function, arguments) for function in self._checked_functions))
        for environment_class in self._env_reward_types:
            graded.append(_Graded(_environment_rewards(group.env_rewards, environment_class), logged=[]))
        # A chat template that changes earlier tokens splits a conversation into several sequences. The one with the
        # most sampled tokens is trained.
        sequences = [
            max(forks, key=lambda sequence: sum(sequence.completion_mask)) for forks in group.completions_sequences
        ]
        tokens = [_split(sequence) for sequence in sequences]
        return [
            GradedGroup(
                position=group.group_id,
                prompts=group.prompts,
                completions=group.completions,
                prompt_ids=[each.prompt_ids for each in tokens],
                completion_ids=[each.completion_ids for each in tokens],
                mask=[each.mask for each in tokens],
                logps=[each.logps for each in tokens],
                versions=[each.versions for each in tokens],
                rewards=[each.rewards for each in graded],
                logged=[each.logged for each in graded],
                tool_calls=group.tool_call_counts,
                tool_failures=group.tool_failure_counts,
                num_forks=sum(len(forks) - 1 for forks in group.completions_sequences),
            )
        ]

    def _checked(self, function: Callable, name: str) -> Callable:
        """Wrap a reward function: it gets `truncated` if it has such a parameter, cannot end the process, and returns
        one number or `None` per completion, or the wrapper raises an error."""

        def add_truncated(arguments: dict[str, Any]) -> dict[str, Any]:
            end_ids = {*self.eos_token_ids, self.tokenizer.pad_token_id}
            truncated = [len(ids) == 0 or ids[-1] not in end_ids for ids in arguments["completion_ids"]]
            return with_truncated(function, arguments, truncated)

        def check(rewards: Any, arguments: dict[str, Any]) -> list[float | None]:
            return as_numbers(rewards, name, len(arguments["completions"]))

        function_in_process = never_exiting(function, f"The reward function {name!r}")
        return with_result(function_in_process, convert=check, adjust=add_truncated)

    async def _grade(self, function: Callable, arguments: dict[str, Any]) -> _Graded:
        """Call a reward function, in a thread if it is not asynchronous."""
        logged: list[list] = []
        columns: dict[str, list] = {}

        def log_metric(name: str, value: float) -> None:
            logged.append(["log_metric", name, float(value)])

        def log_extra(name: str, values: list) -> None:
            column = new_column(name, values, len(arguments["completions"]), columns)
            columns[column] = json.loads(json.dumps([*values], default=str))
            logged.append(["log_extra", column, columns[column]])

        arguments = arguments | {"log_metric": log_metric, "log_extra": log_extra}
        if is_async_callable(function):
            rewards = await function(**arguments)
        else:
            rewards = await asyncio.to_thread(function, **arguments)
        return _Graded(rewards, logged)


def _environment_rewards(rewards: list[tuple[type, float] | None], environment_class: type) -> list[float | None]:
    """Return the reward that its environment gave each completion, and `None` for those of other classes. `rewards`
    are class and reward of the environment of each completion."""
    values: list[float | None] = []
    for class_and_reward in rewards:
        if class_and_reward is not None and class_and_reward[0] is environment_class:
            values.append(class_and_reward[1])
        else:
            values.append(None)
    return as_numbers(values, environment_class.__name__, len(values))


class _Tokens(NamedTuple):
    """Prompt and completion of a training sequence; attributes are those of a [`GradedGroup`]."""

    prompt_ids: list[int]
    completion_ids: list[int]
    mask: list[int]
    logps: list[float]
    versions: list[int]


def _split(sequence: TrainingSequence) -> _Tokens:
    """Split a training sequence: the completion begins with the first token that was sampled, and ends with the
    last one."""
    is_sampled = sequence.completion_mask
    if 1 not in is_sampled:
        return _Tokens(sequence.input_ids, [], [], [], [])
    first = is_sampled.index(1)
    end = len(is_sampled) - is_sampled[::-1].index(1)
    mask = is_sampled[first:end]
    logps = sequence.old_log_probs[first:end]
    return _Tokens(
        prompt_ids=sequence.input_ids[:first],
        completion_ids=sequence.input_ids[first:end],
        mask=mask,
        logps=[float(logp) for logp in logps],
        versions=[getattr(logp, "version", -1) if m else -1 for logp, m in zip(logps, mask, strict=True)],
    )


def _end_with_parent() -> None:
    trainer = multiprocessing.parent_process()
    assert trainer is not None
    wait([trainer.sentinel])
    os._exit(1)


class RolloutWorker(AsyncRolloutWorker):
    """TRL's controller of the process that runs [`RolloutLoop`], whose arguments it takes."""

    _loop_cls = RolloutLoop

    def __init__(self, **loop_kwargs: Any):
        super().__init__(**loop_kwargs)
        # Without a lock, which a process that is killed may hold forever.
        self.shared: Any = self._mp_ctx.Value(SharedState, lock=False)
        self._model_version_value = self.shared

    def start(self) -> None:
        super().start()
        # A read of a message of which a killed process has sent only a part ends when no other process may send more.
        for results in (self.rollout_buffer, self.metrics_queue, self._exception_info_queue):
            results._writer.close()  # type: ignore[attr-defined]  # typeshed names public attributes alone

    def receive(self, timeout: float) -> list[GradedGroup]:
        """Return the groups that were delivered, and wait up to `timeout` seconds for the first one."""
        groups: list[GradedGroup] = []
        try:
            groups.append(self.rollout_buffer.get(block=timeout > 0, timeout=timeout))
            while True:
                groups.append(self.rollout_buffer.get_nowait())
        except (queue.Empty, EOFError):
            return groups

    @property
    def has_failed(self) -> bool:
        """Whether the process has failed or ended."""
        return self._failed_event.is_set() or self._process is None or not self._process.is_alive()

    def problem(self) -> tuple[str, str] | None:
        """Return the type and the message of the exception that has ended the process; `None` if it runs or was not
        started."""
        if self._failed_event.is_set():
            try:
                name, message, _ = self._exception_info_queue.get(timeout=1.0)
                return name, message
            except (queue.Empty, EOFError):
                return "RuntimeError", "see the error above"
        if self.has_failed and self._process is not None:
            return "RuntimeError", f"its process has ended with exit code {self._process.exitcode}"
        return None

    def measured(self) -> dict[str, list]:
        """Return what the process has measured since the last call, by TRL's names."""
        values: dict[str, list] = {}
        while True:
            try:
                for name, value in self.metrics_queue.get_nowait().items():
                    values.setdefault(name, []).append(value)
            except (queue.Empty, EOFError):
                return values

    def stop(self) -> None:
        if self._process is None:
            return
        if self._process.pid is None:  # its start has failed
            self._process = None
            return
        if self._process.is_alive():  # else the event would wait for the process that waits for it
            self._stop_event_mp.set()
        self._process.join(timeout=_SECONDS_TO_STOP)
        if self._process.is_alive():
            self._process.kill()  # what it still does is not needed
            self._process.join()
        self._process = None
