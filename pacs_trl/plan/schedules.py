"""Simulated schedules: generation and optimizer steps in turn, one generation batch late, or continuous.

Pure functions of lengths and seconds; nothing here was compared with a GPU. An engine decodes several completions at a
time: each decoding step adds a token to all of them, reads the weights once, and the keys and values of all tokens
before. In turn and one batch late, the longest completion of a batch holds what comes next, with most slots empty.
The continuous schedule refills them: groups are started as long as fewer than `(max_staleness + 1)` optimizer steps
need are decoded, wait, or are trained on, a step takes the groups that finished first, and the weights are replaced in
between, after which the engine computes keys and values of unfinished completions again.
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .cost import GIB, Gpu, ModelShape


# Assumed, not measured: seconds in which the kernels of a decoding step are launched, and shares of the data sheet.
_LAUNCH_SECONDS = 3e-3
_BANDWIDTH_SHARE = 0.83
_FLOPS_SHARE = 0.5
_TRANSFER_BANDWIDTH = 50e9  # bytes per second


class Engine(NamedTuple):
    """
    What the GPUs that generate need for a decoding step.

    Attributes:
        slots (`int`): Completions that are decoded at a time.
        launch_seconds (`float`): Seconds in which the kernels of a decoding step are launched.
        weight_seconds (`float`): Seconds in which it reads the weights.
        compute_seconds (`float`): Seconds in which the products of a token are computed. Those of a decoding step hide
            behind the weights; those of prompts (once per group), and of unfinished completions when the weights are
            replaced, count in full.
        cache_seconds (`float`): Seconds in which the keys and values of a token are read.
        cache_tokens (`float`): Tokens whose keys and values fit. A completion starts if those of its last token fit.
    """

    slots: int
    launch_seconds: float
    weight_seconds: float = 0.0
    compute_seconds: float = 0.0
    cache_seconds: float = 0.0
    cache_tokens: float = math.inf


class Group(NamedTuple):
    """Tokens of a prompt and of its completions."""

    prompt: int
    completions: Sequence[int]


class Trainer(NamedTuple):
    """
    What the GPUs that train need for an optimizer step.

    Attributes:
        groups (`int`): Groups of an optimizer step.
        update_seconds (`float`): Seconds of an optimizer step.
        transfer_seconds (`float`): Seconds in which weights are sent, while neither side computes.
    """

    groups: int
    update_seconds: float
    transfer_seconds: float = 0.0


class Schedule(NamedTuple):
    """
    Result of a simulation.

    Attributes:
        seconds (`float`): Seconds per optimizer step, in the second half of the steps.
        decoding (`float`): Completions that are decoded at a time, on average over all steps.
        training (`float`): Share of that time in which an optimizer step runs.
        dropped (`float`): Share of the finished groups that are dropped, because they are staler than allowed.
        total_seconds (`float`): Seconds of all steps.
    """

    seconds: float
    decoding: float
    training: float
    dropped: float
    total_seconds: float


@dataclass
class _Unfinished:
    """A group with completions that are decoded or wait; `version` is that of its first token."""

    group: Group
    remaining: int
    version: int | None = None


class _Waiting(NamedTuple):
    """A completion that waits for a slot, and its tokens."""

    unfinished: _Unfinished
    length: int


class _Running(NamedTuple):
    """A completion that is decoded. Those that end first are the smallest, and of these the one that started first."""

    last_step: int  # number of the decoding step after which it ends
    number: int  # of completions that started before
    length: int
    unfinished: _Unfinished


class _Decoding:
    """Completions of an engine over time; `seconds` is the present, between two decoding steps."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.seconds = 0.0
        self.steps = 0
        self.version = 0  # of the weights
        self.context = 0  # tokens of the completions that are decoded, and of their prompts
        self.reserved = 0  # tokens that these have at their end
        self.slot_seconds = 0.0
        self.waiting: deque[_Waiting] = deque()
        self.running: list[_Running] = []  # a heap
        self._num_started = 0

    def add(self, group: Group) -> None:
        """Let the completions of a group wait for slots."""
        unfinished = _Unfinished(group, len(group.completions))
        self.waiting.extend(_Waiting(unfinished, length) for length in group.completions)

    def fill(self) -> None:
        """Start the completions that wait, in order, as long as there are slots and memory for them."""
        while self.waiting and len(self.running) < self.engine.slots:
            unfinished, length = self.waiting[0]
            prompt = unfinished.group.prompt
            if self.running and self.reserved + prompt + length > self.engine.cache_tokens:
                return
            self.waiting.popleft()
            if unfinished.version is None:
                unfinished.version = self.version
                self.seconds += self.engine.compute_seconds * prompt
            self.context += prompt
            self.reserved += prompt + length
            heapq.heappush(self.running, _Running(self.steps + length, self._num_started, length, unfinished))
            self._num_started += 1

    def seconds_of(self, steps: int) -> float:
        """Return the seconds of the next decoding steps, if no completion starts or ends before their last one."""
        engine, running = self.engine, len(self.running)
        attended = steps * self.context + running * steps * (steps - 1) // 2
        products = max(engine.weight_seconds, running * engine.compute_seconds)
        return steps * (engine.launch_seconds + products) + attended * engine.cache_seconds

    def advance(self, until: float = math.inf) -> list[int]:
        """Run decoding steps to the next end of a completion, or until a moment; return the versions of the first
        tokens of the groups that are finished."""
        steps = self._steps_until(until)
        duration = self.seconds_of(steps)
        self.seconds += duration
        self.slot_seconds += duration * len(self.running)
        self.context += steps * len(self.running)
        self.steps += steps
        finished = []
        while self.running and self.running[0].last_step == self.steps:
            _, _, length, unfinished = heapq.heappop(self.running)
            num_tokens = unfinished.group.prompt + length
            self.context -= num_tokens
            self.reserved -= num_tokens
            unfinished.remaining -= 1
            if unfinished.remaining == 0:
                assert unfinished.version is not None
                finished.append(unfinished.version)
        return finished

    def _steps_until(self, moment: float) -> int:
        """Return the fewest decoding steps, at least one, that reach a moment or the next end of a completion."""
        low, high = 1, self.running[0].last_step - self.steps
        if self.seconds + self.seconds_of(high) < moment:
            return high
        while low < high:
            middle = (low + high) // 2
            if self.seconds + self.seconds_of(middle) >= moment:
                high = middle
            else:
                low = middle + 1
        return high

    def replace_weights(self) -> None:
        """Compute keys and values of unfinished completions with new weights."""
        self.version += 1
        self.seconds += self.engine.compute_seconds * self.context


# What computes, and on what ----------------------------------------------------------------------------------------


def engine_on(
    shape: ModelShape, gpu: Gpu, *, num_gpus: int = 1, engines: int = 1, memory_share: float = 0.9
) -> Engine:
    """
    Return the engine of a model on GPUs of one kind, in bfloat16.

    Args:
        num_gpus (`int`): GPUs of each engine, over which its weights are split.
        engines (`int`): Engines that share the completions evenly; they count as one with more slots.
        memory_share (`float`): Share of the memory for weights, keys, and values.
    """
    memory, weights = num_gpus * gpu.memory_bytes, 2 * shape.parameters
    bandwidth, flops = num_gpus * _BANDWIDTH_SHARE * gpu.bandwidth, num_gpus * _FLOPS_SHARE * gpu.flops
    cache = max(memory_share * memory - weights, 0.05 * memory)
    return Engine(
        slots=engines * default_slots(gpu),
        launch_seconds=_LAUNCH_SECONDS,
        weight_seconds=weights / bandwidth,
        compute_seconds=shape.forward_flops(1, 0) / (engines * flops),
        cache_seconds=shape.kv_bytes_per_token / (engines * bandwidth),
        cache_tokens=engines * cache / shape.kv_bytes_per_token,
    )


def transfer_seconds(shape: ModelShape) -> float:
    """Return the seconds in which bfloat16 weights are sent from the GPUs that train to those that generate."""
    return 2 * shape.parameters / _TRANSFER_BANDWIDTH


def default_slots(gpu: Gpu) -> int:
    """Return the completions that vLLM decodes at a time by default (`max_num_seqs`)."""
    return 1024 if gpu.memory_bytes >= 70 * GIB and gpu.name != "A100" else 256


def typical_groups(prompt: int, mean: float, longest: int, num_generations: int, *, seed: int = 0) -> Iterator[Group]:
    """Yield groups without end whose completions stop with equal chance at each token, up to `longest` tokens, and
    have `mean` tokens on average: the distribution of [`~cost.mean_square_length`]."""
    generator, scale = random.Random(seed), _scale_of_lengths(mean, longest)
    while True:
        lengths = (min(longest, generator.expovariate(1 / scale)) for _ in range(num_generations))
        yield Group(prompt, [max(1, round(length)) for length in lengths])


def _scale_of_lengths(mean: float, longest: float) -> float:
    """Return the mean of an exponential distribution that has `mean` if it is truncated at `longest`."""
    low, high = mean, 1e6 * longest
    for _ in range(100):
        scale = math.sqrt(low * high)
        if scale * -math.expm1(-longest / scale) < mean:
            low = scale
        else:
            high = scale
    return high


# Schedules ---------------------------------------------------------------------------------------------------------


def generate(groups: Iterable[Group], engine: Engine) -> tuple[float, float]:
    """Return the seconds in which an engine generates some groups, until the last completion ends, and the number of
    completions that are decoded at a time, on average."""
    decoding = _Decoding(engine)
    for group in groups:
        decoding.add(group)
    decoding.fill()
    while decoding.running:
        decoding.advance()
        decoding.fill()
    return decoding.seconds, decoding.slot_seconds / decoding.seconds


def in_turn(groups: Iterator[Group], engine: Engine, trainer: Trainer, steps: int) -> Schedule:
    """Simulate generation batches of one optimizer step each, with generation and training in turn."""
    return _in_batches(groups, engine, trainer, steps, overlaps=False)


def one_late(groups: Iterator[Group], engine: Engine, trainer: Trainer, steps: int) -> Schedule:
    """Simulate generation batches of one optimizer step each, generated while the one before is trained on."""
    return _in_batches(groups, engine, trainer, steps, overlaps=True)


def _in_batches(groups: Iterator[Group], engine: Engine, trainer: Trainer, steps: int, *, overlaps: bool) -> Schedule:
    durations, slot_seconds = [], 0.0
    for _ in range(steps):
        seconds, decoded = generate((next(groups) for _ in range(trainer.groups)), engine)
        slot_seconds += seconds * decoded
        sides = (seconds, trainer.update_seconds)
        durations.append((max(sides) if overlaps else sum(sides)) + trainer.transfer_seconds)
    total, second_half = sum(durations), durations[steps // 2 :]
    return Schedule(
        seconds=sum(second_half) / len(second_half),
        decoding=slot_seconds / total,
        training=steps * trainer.update_seconds / total,
        dropped=0.0,
        total_seconds=total,
    )


class _Finished(NamedTuple):
    """A group whose completions have all ended: the moment of its last token, and the version of the weights of its
    first."""

    moment: float
    version: int


def continuous(groups: Iterator[Group], engine: Engine, trainer: Trainer, steps: int, max_staleness: int) -> Schedule:
    """
    Simulate generation that goes on during optimizer steps, with slots that are refilled.

    Args:
        groups: Groups in the order in which they are started, as many as are needed.
        steps (`int`): Optimizer steps to simulate.
        max_staleness (`int`): Largest number of optimizer steps between the weights of the first token of a group and
            those that are trained on it. Finished groups that are staler are dropped.
    """
    decoding = _Decoding(engine)
    num_unfinished = 0
    finished: list[_Finished] = []  # not trained on yet
    num_checked = 0  # of the first finished groups, which are fresh enough for the present weights
    num_dropped = 0
    step_ends: list[float] = []  # moments at which the weights of optimizer steps have been sent
    update_end: float | None = None  # of the optimizer step that runs
    while len(step_ends) < steps:
        # Start an optimizer step on the groups that finished first.
        if update_end is None:
            unchecked = finished[num_checked:]
            fresh = [group for group in unchecked if decoding.version - group.version <= max_staleness]
            num_dropped += len(unchecked) - len(fresh)
            finished[num_checked:] = fresh
            num_checked = len(finished)
        if update_end is None and len(finished) >= trainer.groups:
            batch, finished = finished[: trainer.groups], finished[trainer.groups :]
            trainer_is_free = step_ends[-1] if step_ends else 0.0
            update_end = max(trainer_is_free, batch[-1].moment) + trainer.update_seconds

        # Start groups, as long as there are fewer than the trainer admits.
        num_trained = 0 if update_end is None else trainer.groups
        while num_unfinished + len(finished) + num_trained < (max_staleness + 1) * trainer.groups:
            decoding.add(next(groups))
            num_unfinished += 1
        decoding.fill()

        # Decode until a completion or the optimizer step ends.
        until = math.inf if update_end is None else update_end
        if decoding.running and decoding.seconds < until:
            versions = decoding.advance(until)
            num_unfinished -= len(versions)
            finished += [_Finished(decoding.seconds, version) for version in versions]

        # End the optimizer step, and send its weights.
        if update_end is not None and (decoding.seconds >= update_end or not decoding.running):
            decoding.seconds = max(decoding.seconds, update_end) + trainer.transfer_seconds
            step_ends.append(decoding.seconds)
            update_end = None
            decoding.replace_weights()
            num_checked = 0
    half = steps // 2
    start = step_ends[half - 1] if half else 0.0
    return Schedule(
        seconds=(step_ends[-1] - start) / (steps - half),
        decoding=decoding.slot_seconds / step_ends[-1],
        training=steps * trainer.update_seconds / step_ends[-1],
        dropped=num_dropped / (num_dropped + steps * trainer.groups),
        total_seconds=step_ends[-1],
    )
