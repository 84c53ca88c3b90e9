"""One start for all completions of a group: seeds for `reset` of environments, and copies of their states.

A group compares completions of one example. TRL resets an environment per completion, and many environments choose
their example at random, so that the completions of a group would play different ones. [`GroupStarts`] gives them the
same start where the environment allows it, and otherwise counts the groups that differ.
"""

import builtins
import copy
import dis
import gc
import inspect
import itertools
import json
import logging
import random
import threading
import types
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from types import MethodType
from typing import Any

import numpy as np
import torch

from ..data.tool_calls import as_observation
from ..errors import UserError


# Modules that keep nothing outside of their objects: what uses only them has its whole state in its attributes.
_IN_MEMORY = frozenset(
    """__future__ _abc _collections _functools _operator _queue _random _thread abc array ast base64 bisect builtins
    calendar cmath collections contextlib copy dataclasses datetime decimal enum fractions functools hashlib heapq
    itertools json logging math numbers numpy operator queue random re secrets statistics string textwrap threading
    time torch types typing typing_extensions unicodedata uuid warnings zlib""".split()
)
_OUTSIDE = (open, input, exec, eval, compile, __import__)
_PLAIN = (int, float, complex, str, bytes, bool, type(None), type(...), range, slice)


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
        self._next: deque[tuple[int, int]] = deque()  # group and seed of the next resets
        self._started: list[Any] = []  # environments that have been reset
        self._first: dict[int, tuple[Any, Any]] = {}  # first environment of each group, and its observation
        self._in_memory: dict[type, bool] = {}  # whether environments of a class keep their state in memory
        self._subclasses: dict[type, type] = {}  # of classes with `__slots__` alone, see `_replace_class`
        self._replacements: dict[int, Callable] = {}  # of the next `reset` of their environments, by id
        self.observations: list[tuple[int, int]] = []
        self.differing: dict[int, str] = {}
        self.unknown: set[int] = set()

    def begin(self, groups: Sequence[int], seeds: Sequence[int]) -> None:
        """Announce a batch: the group and the seed of each of the next resets, in order."""
        self._next = deque(zip(groups, seeds, strict=True))
        self._first.clear()
        self.observations, self.differing, self.unknown = [], {}, set()
        for environment in self._started:
            self._replace_next_reset(environment)
        self._started = []

    def end(self) -> None:
        """Count the groups of which an announced `reset` was not called as groups with different starts."""
        for group, _ in self._next:
            self.differing.setdefault(group, "`reset` was not called for each of its completions")
        self._next.clear()

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

    def _replace_class(self, environment: Any) -> None:
        """Make an environment that has only `__slots__`, and so no attribute `reset`, an instance of a subclass of its
        class. The `reset` of this calls a replacement of `_replace_next_reset` once, and else that of the class."""
        cls = type(environment)
        if cls not in self._subclasses:

            @wraps(cls.reset)
            def reset(environment: Any, /, *args: Any, **row: Any) -> Any:
                reset_for_group = self._replacements.pop(id(environment), None)
                if reset_for_group is None:
                    return cls.reset(environment, *args, **row)
                return reset_for_group(*args, **row)

            names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
            self._subclasses[cls] = type(cls.__name__, (cls,), {"__slots__": (), "reset": reset, **names})
            self._in_memory[self._subclasses[cls]] = self._in_memory[cls]
        object.__setattr__(environment, "__class__", self._subclasses[cls])  # also of frozen classes

    def _replace_next_reset(self, environment: Any) -> None:
        """Replace the `reset` of an environment for its next call, which is TRL's, by [`_reset`]."""
        if not hasattr(environment, "__dict__"):
            user_class: Any = type(environment).__mro__[1]  # of which `_replace_class` has derived
            reset = MethodType(user_class.reset, environment)

            def reset_of_slots(**row: Any) -> Any:
                self._started.append(environment)
                return self._reset(environment, reset, row)

            self._replacements[id(environment)] = reset_of_slots
            return
        attributes, reset = vars(environment), environment.reset
        before = {"reset": attributes["reset"]} if "reset" in attributes else {}

        @wraps(reset)
        def reset_for_group(**row: Any) -> Any:
            del vars(environment)["reset"]
            vars(environment).update(before)
            self._started.append(environment)
            return self._reset(environment, reset, row)

        attributes["reset"] = reset_for_group  # also of frozen classes; TRL calls that of the instance

    def _reset(self, environment: Any, reset: Callable, row: dict[str, Any]) -> Any:
        """Reset an environment for the next completion of the batch, and give it the start of its group. `reset` is
        the environment's own, and `row` has the columns of the dataset row. Returns the observation, which is that of
        the first environment of the group if its state was copied."""
        if not self._next:  # not by the trainer
            return reset(**row)
        group, seed = self._next.popleft()
        if "seed" not in row and takes_seed(reset):
            row = {**row, "seed": seed}
        in_memory = self._in_memory[type(environment)]
        if not in_memory and "seed" not in row:
            self.unknown.add(group)
        with _seeded(seed) if in_memory else nullcontext():
            observation = reset(**row)
        if observation == []:
            observation = None
        if observation is not None:
            check_observation(observation, type(environment).__name__)
            observation = as_observation(observation, takes_images=True)
        first, first_observation = self._first.setdefault(group, (environment, observation))
        has_same_observation = _checksum(observation) == _checksum(first_observation)
        if in_memory:
            try:
                if _copy_differences(first, environment) or not has_same_observation:
                    observation = copy.deepcopy(first_observation)
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


# Copies ---------------------------------------------------------------------------------------------------------


def _copy_differences(source: Any, target: Any) -> bool:
    """Copy the attributes that differ from one environment to another of its class. Returns whether any did."""
    state, other_state = _attributes(source), _attributes(target)
    if source is target or _are_equal(state, other_state, {}):
        return False
    if hasattr(source, "__deepcopy__"):
        copied = _attributes(copy.deepcopy(source))
    else:
        # One copy of all attributes, also the equal ones: several may refer to one object.
        copied = copy.deepcopy(state, {id(source): target} | _not_to_copy(state))
    for name in other_state.keys() - state.keys():
        object.__delattr__(target, name)  # also of frozen classes
    slots = _slots(target)
    for name, value in copied.items():
        if name in slots:
            object.__setattr__(target, name, value)
        else:
            vars(target)[name] = value
    return True


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object in its `__dict__` and `__slots__`."""
    slots = {name: getattr(value, name) for name in _slots(value) if hasattr(value, name)}
    state = slots | getattr(value, "__dict__", {})
    return {name: each for name, each in state.items() if name != "reset"}


def _slots(value: Any) -> list[str]:
    """Return the names in the `__slots__` of the class of an object and of its bases."""
    members = [member for each in type(value).__mro__ for member in vars(each).items()]
    return [name for name, member in members if isinstance(member, types.MemberDescriptorType)]


_LOCKS = {type(create()): create for create in (threading.Lock, threading.RLock)}


def _not_to_copy(state: dict[str, Any]) -> dict[int, Any]:
    """Return what stands for the locks and modules of a state in its copy, by id. Raises a `TypeError` if the state
    holds a method, or a function with variables of its own: their copies would act on the environment they are of."""
    memo: dict[int, Any] = {}
    waiting, seen = list(state.values()), set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, type | logging.Logger):
            continue
        seen.add(id(value))
        if isinstance(value, types.ModuleType):
            memo[id(value)] = value
        elif type(value) in _LOCKS:
            memo[id(value)] = _LOCKS[type(value)]()
        elif isinstance(value, types.FunctionType):
            if any(_variables(value)):
                raise TypeError(f"it holds the function {value.__qualname__}, which has variables of its own")
        elif isinstance(value, types.MethodType | types.BuiltinFunctionType | types.MethodWrapperType):
            if not isinstance(value.__self__, types.ModuleType | None):
                raise TypeError(f"it holds the method {value.__qualname__}")
        elif gc.is_tracked(value):  # else it refers to nothing, as numbers and strings
            waiting.extend(gc.get_referents(value))
    return memo


def _are_equal(first: Any, second: Any, compared: dict[tuple[int, int], tuple[Any, Any]]) -> bool:
    """Return whether two values of the states of environments are equal; `compared` are pairs of objects whose
    comparison has begun, by their ids. Objects are equal if their attributes are: `__eq__` of a class may ignore some,
    or return an array. Objects that have no value, such as locks, count as equal."""
    if first is second or (id(first), id(second)) in compared:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, _PLAIN):
        return first == second or (first != first and second != second)
    compared[id(first), id(second)] = first, second
    if isinstance(first, list | tuple | deque):
        pairs = zip(first, second, strict=False)
        has_same_items = len(first) == len(second) and all(_are_equal(a, b, compared) for a, b in pairs)
    elif isinstance(first, dict):
        has_same_items = _are_equal(list(first.items()), list(second.items()), compared)
    elif isinstance(first, set | frozenset):
        has_same_items = first == second and all(map(_is_plain, first))
    elif isinstance(first, np.ndarray):
        if first.dtype.kind == "O":
            return first.shape == second.shape and _are_equal(first.tolist(), second.tolist(), compared)
        return first.dtype == second.dtype and np.array_equal(first, second, equal_nan=first.dtype.kind in "fc")
    elif torch.is_tensor(first):
        return first.dtype == second.dtype and torch.equal(first, second)
    elif isinstance(first, random.Random):
        has_same_items = first.getstate() == second.getstate()
    elif isinstance(first, np.random.Generator):
        return _are_equal(first.bit_generator.state, second.bit_generator.state, compared)
    elif isinstance(first, np.random.RandomState):
        return _are_equal(first.get_state(), second.get_state(), compared)
    elif isinstance(first, torch.Generator):
        return torch.equal(first.get_state(), second.get_state())
    elif isinstance(first, types.FunctionType):
        return first.__code__ is second.__code__ and _are_equal(_variables(first), _variables(second), compared)
    elif isinstance(first, types.CellType):
        return _are_equal(_contents(first), _contents(second), compared)
    elif isinstance(first, types.MethodType | types.BuiltinFunctionType):
        return first.__qualname__ == second.__qualname__ and _are_equal(first.__self__, second.__self__, compared)
    else:
        has_same_items = _has_same_value(first, second)
    attributes = _attributes(first), _attributes(second)
    return has_same_items and (not any(attributes) or _are_equal(*attributes, compared))


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple | frozenset) and all(map(_is_plain, value)))


def _has_same_value(first: Any, second: Any) -> bool:
    """Return whether two objects are equal as those of the class of Python or numpy from which theirs is derived, such
    as dates and fractions."""
    for base in type(first).__mro__[:-1]:
        equality = vars(base).get("__eq__")
        if _package(base.__module__) in _IN_MEMORY and equality is not None:
            return base is types.SimpleNamespace or bool(equality(first, second))
    return True


def _variables(function: types.FunctionType) -> tuple[Any, Any, Any]:
    """Return what a function keeps between calls: enclosing variables, and default values."""
    return function.__closure__, function.__defaults__, function.__kwdefaults__


def _contents(cell: types.CellType) -> list[Any]:
    """Return a list of the value of an enclosing variable, which is empty if no value is assigned yet."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


# Where a state lies ---------------------------------------------------------------------------------------------


def keeps_state_in_memory(environment: Any) -> bool:
    """Return whether the attributes of an environment are its whole state: whether its class, and all that this uses,
    consists of plain data and of code that could not keep a part of it elsewhere, on a server, in a folder, or in an
    object of the module. Two environments with copies of one session id or path would play one episode. A class with
    `__deepcopy__` says itself how it is copied."""
    if hasattr(environment, "__deepcopy__"):
        return True
    seen: set[int] = set()
    return all(_is_in_memory(value, seen) for value in (type(environment), *_attributes(environment).values()))


def _is_in_memory(value: Any, seen: set[int]) -> bool:
    if isinstance(value, _PLAIN) or id(value) in seen:
        return True
    seen.add(id(value))
    if isinstance(value, types.ModuleType):
        return _package(value.__name__) in _IN_MEMORY
    if isinstance(value, list | tuple | set | frozenset | deque):
        return all(_is_in_memory(each, seen) for each in value)
    if isinstance(value, dict):
        return all(_is_in_memory(each, seen) for entry in value.items() for each in entry)
    if isinstance(value, types.MethodType | staticmethod | classmethod):
        return _is_in_memory(value.__func__, seen) and _is_in_memory(getattr(value, "__self__", None), seen)
    if isinstance(value, property):
        return all(_is_in_memory(function, seen) for function in (value.fget, value.fset, value.fdel))
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        if _package(value.__module__) in _IN_MEMORY:
            return value not in _OUTSIDE
        if isinstance(value, types.FunctionType):
            return all(_is_in_memory(each, seen) for each in _references(value))
        if isinstance(value, types.BuiltinFunctionType):
            return False
        is_python = not any(isinstance(member, _C_METHODS) for member in vars(value).values())
        return is_python and all(_is_in_memory(each, seen) for each in (*vars(value).values(), *value.__bases__))
    if _package(type(value).__module__) in _IN_MEMORY:
        return True
    return _is_in_memory(type(value), seen) and _is_in_memory(getattr(value, "__dict__", None), seen)


_C_METHODS = (types.MethodDescriptorType, types.WrapperDescriptorType, types.BuiltinFunctionType)


def _package(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _references(function: types.FunctionType) -> Iterator[Any]:
    """Yield what the code of a function refers to: global and enclosing names, imports, and default values."""
    for code in _codes(function.__code__):
        for instruction in dis.get_instructions(code):
            if instruction.opname == "IMPORT_NAME":
                yield types.ModuleType(instruction.argval)
            elif instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                name = instruction.argval
                undefined = types.ModuleType(f"undefined_{name}")
                yield function.__globals__.get(name, getattr(builtins, name, undefined))
    for cell in function.__closure__ or ():
        yield from _contents(cell)
    yield from (function.__defaults__, function.__kwdefaults__)


def _codes(code: types.CodeType) -> Iterable[types.CodeType]:
    """Return the code of a function and of those inside."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return [code, *itertools.chain.from_iterable(map(_codes, inner))]
