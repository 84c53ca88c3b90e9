"""One start for all completions of a group: seeds for `reset` of environments, and copies of their states.

A group compares completions of one example. TRL resets an environment per completion, and many environments choose
their example at random, so that the completions of a group would play different ones. [`GroupStarts`] gives them the
same start where the environment allows it, and otherwise counts the groups that differ.
"""

import copy
import inspect
import json
import random
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from itertools import starmap
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import torch

from ..data.tool_calls import as_observation
from ..errors import UserError
from .environment_state import copy_differences, keeps_state_in_memory


class _NextReset(NamedTuple):
    """A call of `reset` that TRL makes next: the group of its completion, and the seed of this group."""

    group: int
    seed: int


class _Start(NamedTuple):
    """The first environment of a group that was reset, and the observation that this returned."""

    environment: Any
    observation: Any


class GroupStarts:
    """
    Resets the environments of a batch so that all completions of a group start from the same state:

    1. `reset` gets the seed of its group as `seed` if it has such a parameter and the dataset no such column;
    2. an environment that keeps its state in memory ([`keeps_state_in_memory`]) is reset with the random number
       generators of Python, numpy, and torch seeded by that seed;
    3. if its state or observation still differs from that of the first environment of its group, it gets a copy.

    Other environments are compared by their observations alone.

    TRL calls the `reset` of each environment once per batch. [`wrap`] and [`begin`] replace it for this one call,
    which puts it back: later calls, by a user, by the environment itself, or of a copy of it, are left alone.

    Attributes:
        observations (`list[tuple[int, int]]`): Group, and checksum of the observation, of each reset of the batch.
        differing (`dict[int, str]`): Groups of this process whose completions start from different states, and why.
        unknown (`set[int]`): Groups with environments that got no seed and whose state may lie elsewhere: equal
            observations do not show that their completions start from the same state.
    """

    def __init__(self):
        self._next_resets: deque[_NextReset] = deque()  # of the batch that was announced
        self._starts: dict[int, _Start] = {}  # of the batch, by group
        self._reset_environments: list[Any] = []  # those whose `reset` TRL has called
        self._in_memory: dict[type, bool] = {}  # whether environments of a class keep their state in memory
        # For environments with `__slots__` alone, see `_replace_class`.
        self._subclasses: dict[type, type] = {}  # by the class of the user
        self._replacements: dict[int, Callable] = {}  # of the next `reset` of an environment, by its id
        self.observations: list[tuple[int, int]] = []
        self.differing: dict[int, str] = {}
        self.unknown: set[int] = set()

    def begin(self, groups: Sequence[int], seeds: Sequence[int]) -> None:
        """Announce a batch: the group and the seed of each of the next resets, in order."""
        self._next_resets = deque(starmap(_NextReset, zip(groups, seeds, strict=True)))
        self._starts.clear()
        self.observations, self.differing, self.unknown = [], {}, set()
        for environment in self._reset_environments:
            self._replace_next_reset(environment)
        self._reset_environments = []

    def end(self) -> None:
        """Count the groups of which an announced `reset` was not called as groups with different starts."""
        for group, _ in self._next_resets:
            self.differing.setdefault(group, "`reset` was not called for each of its completions")
        self._next_resets.clear()

    def wrap(self, factory: Callable) -> Callable:
        """Return a factory of the same environments. The first `reset` of each starts a completion of its group."""

        @wraps(factory, updated=())
        def create() -> Any:
            environment = factory()
            if type(environment) not in self._in_memory:
                self._in_memory[type(environment)] = keeps_state_in_memory(environment)
            if not hasattr(environment, "__dict__"):
                self._replace_class(environment)
            self._replace_next_reset(environment)
            return environment

        return create

    # The next call of `reset` ---------------------------------------------------------------------------------------

    def _replace_next_reset(self, environment: Any) -> None:
        """Replace the `reset` of an environment for its next call, which is TRL's, by [`_reset_for_group`]."""
        if not hasattr(environment, "__dict__"):
            user_class: Any = type(environment).__mro__[1]  # from which `_replace_class` has derived
            reset = MethodType(user_class.reset, environment)
            self._replacements[id(environment)] = partial(self._reset_for_group, environment, reset)
            return
        # TRL calls the `reset` of the instance. Set past `__setattr__`, which frozen classes override.
        attributes = vars(environment)
        former = {"reset": attributes["reset"]} if "reset" in attributes else {}
        reset = environment.reset

        @wraps(reset)
        def reset_once(**row: Any) -> Any:
            del vars(environment)["reset"]
            vars(environment).update(former)
            return self._reset_for_group(environment, reset, **row)

        attributes["reset"] = reset_once

    def _replace_class(self, environment: Any) -> None:
        """Make an environment that has only `__slots__`, and so no attribute `reset`, an instance of a subclass of its
        class. The `reset` of this calls a replacement of `_replace_next_reset` once, and else that of the class."""
        cls = type(environment)
        if cls not in self._subclasses:

            @wraps(cls.reset)
            def reset(environment: Any, /, *args: Any, **row: Any) -> Any:
                replacement = self._replacements.pop(id(environment), None)
                if replacement is None:
                    return cls.reset(environment, *args, **row)
                return replacement(*args, **row)

            names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
            self._subclasses[cls] = type(cls.__name__, (cls,), {"__slots__": (), "reset": reset, **names})
            self._in_memory[self._subclasses[cls]] = self._in_memory[cls]
        object.__setattr__(environment, "__class__", self._subclasses[cls])  # also of frozen classes

    # Starts ---------------------------------------------------------------------------------------------------------

    def _reset_for_group(self, environment: Any, reset: Callable, /, **row: Any) -> Any:
        """Reset an environment for the next completion of the batch, and give it the start of its group. `reset` is
        that of the environment's class, and `row` has the columns of the dataset row. Returns the observation, which
        is that of the first environment of the group if its state was copied."""
        self._reset_environments.append(environment)
        if not self._next_resets:  # no batch was announced: the caller is not the trainer
            return reset(**row)
        group, seed = self._next_resets.popleft()
        if "seed" not in row and takes_seed(reset):
            row = {**row, "seed": seed}
        is_in_memory = self._in_memory[type(environment)]
        if not is_in_memory and "seed" not in row:
            self.unknown.add(group)
        with _seeded(seed) if is_in_memory else nullcontext():
            observation = reset(**row)
        if observation == []:
            observation = None
        if observation is not None:
            check_observation(observation, type(environment).__name__)
            observation = as_observation(observation, takes_images=True)
        start = self._starts.setdefault(group, _Start(environment, observation))
        has_same_observation = _checksum(observation) == _checksum(start.observation)
        if is_in_memory:
            try:
                has_same_state = not copy_differences(start.environment, environment)
                if not has_same_state or not has_same_observation:
                    observation = copy.deepcopy(start.observation)
            except Exception as error:  # of `deepcopy`, by code of a user
                self.differing[group] = f"its state cannot be copied ({type(error).__name__}: {error})"
        elif not has_same_observation:
            self.differing[group] = "its state may lie outside of this process, where it cannot be copied"
        self.observations.append((group, _checksum(observation)))
        return observation


def check_observation(observation: Any, name: str, *, takes_images: bool = True) -> None:
    """Raise a `ValueError` unless what the `reset` of an environment of class `name` returned can be appended to a
    prompt, as TRL does: text or content blocks, with images only if they are taken."""
    is_blocks = isinstance(observation, list) and all(
        isinstance(part, dict) and "type" in part for part in observation
    )
    if is_blocks and not takes_images and any(part["type"] == "image" for part in observation):
        raise UserError(
            f"`reset` of the environment {name} returned an image, and conversations are evaluated on text alone. "
            "Return text."
        )
    if isinstance(observation, str) or is_blocks:
        return
    if inspect.isawaitable(observation):
        if inspect.iscoroutine(observation):
            observation.close()
        raise UserError(
            f"`reset` of the environment {name} is asynchronous, and TRL does not await it. Write it as `def reset`; "
            "tools may be asynchronous."
        )
    raise UserError(
        f"`reset` of the environment {name} returned {observation!r:.100}. It must return text, a list of content "
        "blocks, or None."
    )


def takes_seed(reset: Callable) -> bool:
    """Return whether `reset` has a parameter `seed` for a number: without default, or with `None` or an integer."""
    parameter = inspect.signature(reset).parameters.get("seed")
    return parameter is not None and (parameter.default in (parameter.empty, None) or type(parameter.default) is int)


def _checksum(observation: Any) -> int:
    """Return a number that is equal in all processes for equal observations; images count by their sizes."""
    text = json.dumps(observation, default=lambda value: f"{type(value).__name__}{getattr(value, 'size', '')}")
    return zlib.crc32(text.encode("utf-8", "surrogatepass"))


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the random number generators of Python, numpy, and torch on the CPU inside the context, and restore their
    states on exit."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
