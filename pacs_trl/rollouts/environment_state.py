"""State of an environment: whether its attributes are all of it, and copies from one environment to another.

Environments are objects of a class of the user. An environment that keeps a part of its state elsewhere, on a server,
in a folder, or in an object of its module, cannot be copied: two environments with copies of one session id or path
would play one episode.
"""

import builtins
import copy
import dis
import gc
import itertools
import logging
import random
import threading
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch


# Modules that keep nothing outside of their objects: what uses only them has its whole state in its attributes.
_IN_MEMORY = frozenset(
    """__future__ _abc _collections _functools _operator _queue _random _thread abc array ast base64 bisect builtins
    calendar cmath collections contextlib copy dataclasses datetime decimal enum fractions functools hashlib heapq
    itertools json logging math numbers numpy operator queue random re secrets statistics string textwrap threading
    time torch types typing typing_extensions unicodedata uuid warnings zlib""".split()
)
_REACHING_OUTSIDE = (open, input, exec, eval, compile, __import__)  # functions of `builtins` that do
_PLAIN = (int, float, complex, str, bytes, bool, type(None), type(...), range, slice)
_C_METHODS = (types.MethodDescriptorType, types.WrapperDescriptorType, types.BuiltinFunctionType)
_NEW_LOCK = {type(create()): create for create in (threading.Lock, threading.RLock)}  # by the type of the lock


# Where a state lies -------------------------------------------------------------------------------------------------


def keeps_state_in_memory(environment: Any) -> bool:
    """Return whether the attributes of an environment are its whole state: whether its class, and all that this uses,
    consists of plain data and of code that could not keep a part of it elsewhere. A class with `__deepcopy__` says
    itself how it is copied."""
    if hasattr(environment, "__deepcopy__"):
        return True
    seen: set[int] = set()
    return all(_is_in_memory(value, seen) for value in (type(environment), *_attributes(environment).values()))


def _is_in_memory(value: Any, seen: set[int]) -> bool:
    """Return whether a value, and all that it refers to, keeps nothing outside of these objects. `seen` are the ids of
    the values that have been looked at, or are being looked at: values may refer to each other."""
    if isinstance(value, _PLAIN) or id(value) in seen:
        return True
    seen.add(id(value))
    if isinstance(value, list | tuple | set | frozenset | deque):
        return all(_is_in_memory(item, seen) for item in value)
    if isinstance(value, dict):
        return all(_is_in_memory(key_or_value, seen) for entry in value.items() for key_or_value in entry)
    if isinstance(value, types.ModuleType):
        return _package(value.__name__) in _IN_MEMORY
    if isinstance(value, types.MethodType | staticmethod | classmethod):
        return _is_in_memory(value.__func__, seen) and _is_in_memory(getattr(value, "__self__", None), seen)
    if isinstance(value, property):
        return all(_is_in_memory(function, seen) for function in (value.fget, value.fset, value.fdel))
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        if _package(value.__module__) in _IN_MEMORY:
            return value not in _REACHING_OUTSIDE
        if isinstance(value, types.FunctionType):
            return all(_is_in_memory(reference, seen) for reference in _references(value))
        if isinstance(value, types.BuiltinFunctionType):
            return False  # compiled code, which cannot be read
        members = vars(value).values()
        if any(isinstance(member, _C_METHODS) for member in members):
            return False  # also compiled
        return all(_is_in_memory(part, seen) for part in (*members, *value.__bases__))
    if _package(type(value).__module__) in _IN_MEMORY:
        return True
    return _is_in_memory(type(value), seen) and _is_in_memory(getattr(value, "__dict__", None), seen)


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
                undefined = types.ModuleType(f"undefined_{name}")  # which counts as a module that reaches outside
                yield function.__globals__.get(name, getattr(builtins, name, undefined))
    for cell in function.__closure__ or ():
        yield from _contents(cell)
    yield from (function.__defaults__, function.__kwdefaults__)


def _codes(code: types.CodeType) -> Iterable[types.CodeType]:
    """Return the code of a function and of those inside."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return [code, *itertools.chain.from_iterable(map(_codes, inner))]


# Copies -------------------------------------------------------------------------------------------------------------


def copy_differences(source: Any, target: Any) -> bool:
    """Copy the attributes that differ from one environment to another of its class. Returns whether any did."""
    if source is target:
        return False
    state, former_state = _attributes(source), _attributes(target)
    if _are_equal(state, former_state, {}):
        return False
    if hasattr(source, "__deepcopy__"):
        copied = _attributes(copy.deepcopy(source))
    else:
        # One copy of all attributes, also the equal ones: several may refer to one object.
        copied = copy.deepcopy(state, {id(source): target} | _copied_otherwise(state))
    # Past `__setattr__` and `__delattr__`, which frozen classes override.
    for name in former_state.keys() - state.keys():
        object.__delattr__(target, name)
    slots = _slots(target)
    for name, value in copied.items():
        if name in slots:
            object.__setattr__(target, name, value)
        else:
            vars(target)[name] = value
    return True


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object in its `__dict__` and `__slots__`, but for the `reset` that [`GroupStarts`]
    may have put there."""
    in_slots = {name: getattr(value, name) for name in _slots(value) if hasattr(value, name)}
    attributes = in_slots | getattr(value, "__dict__", {})
    attributes.pop("reset", None)
    return attributes


def _slots(value: Any) -> list[str]:
    """Return the names in the `__slots__` of the class of an object and of its bases."""
    members = [member for cls in type(value).__mro__ for member in vars(cls).items()]
    return [name for name, member in members if isinstance(member, types.MemberDescriptorType)]


def _copied_otherwise(state: dict[str, Any]) -> dict[int, Any]:
    """Return the replacements, by id, of what `deepcopy` cannot copy in a state: modules, which stay, and locks, which
    become new ones. Raises a `TypeError` if the state holds a method, or a function with variables of its own: their
    copies would act on the environment they are of."""
    replacements: dict[int, Any] = {}
    waiting, seen = list(state.values()), set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, type | logging.Logger):
            continue
        seen.add(id(value))
        if isinstance(value, types.ModuleType):
            replacements[id(value)] = value
        elif type(value) in _NEW_LOCK:
            replacements[id(value)] = _NEW_LOCK[type(value)]()
        elif isinstance(value, types.FunctionType):
            if any(_variables(value)):
                raise TypeError(f"it holds the function {value.__qualname__}, which has variables of its own")
        elif isinstance(value, types.MethodType | types.BuiltinFunctionType | types.MethodWrapperType):
            if not isinstance(value.__self__, types.ModuleType | None):
                raise TypeError(f"it holds the method {value.__qualname__}")
        elif gc.is_tracked(value):  # else it refers to nothing, as numbers and strings
            waiting.extend(gc.get_referents(value))
    return replacements


# Comparison ---------------------------------------------------------------------------------------------------------


def _are_equal(first: Any, second: Any, compared: dict[tuple[int, int], tuple[Any, Any]]) -> bool:
    """Return whether two values of the states of environments are equal; `compared` are pairs of objects whose
    comparison has begun, by their ids. Objects are equal if their attributes are: `__eq__` of a class may ignore some,
    or return an array. Objects that have no value, such as locks, count as equal."""
    if first is second or (id(first), id(second)) in compared:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, _PLAIN):
        are_nan = first != first and second != second
        return first == second or are_nan
    compared[id(first), id(second)] = first, second
    if isinstance(first, np.ndarray) and first.dtype.kind != "O":
        return first.dtype == second.dtype and np.array_equal(first, second, equal_nan=first.dtype.kind in "fc")
    if torch.is_tensor(first):
        return first.dtype == second.dtype and torch.equal(first, second)
    inner_values = _inner_values(first)
    if inner_values is not None:
        return _are_equal(inner_values, _inner_values(second), compared)
    if not _have_equal_items(first, second, compared):
        return False
    attributes, other_attributes = _attributes(first), _attributes(second)
    if not attributes and not other_attributes:  # as those of a dict of attributes, where the comparison ends
        return True
    return _are_equal(attributes, other_attributes, compared)


def _inner_values(value: Any) -> tuple | None:
    """Return the values that decide whether an object equals another one of its class, if these are not attributes in
    `__dict__` or `__slots__`."""
    if isinstance(value, np.ndarray):  # of objects
        return value.shape, value.tolist()
    if isinstance(value, np.random.Generator):
        return (value.bit_generator.state,)
    if isinstance(value, np.random.RandomState):
        return (value.get_state(),)
    if isinstance(value, torch.Generator):
        return (value.get_state(),)
    if isinstance(value, types.FunctionType):
        return id(value.__code__), _variables(value)
    if isinstance(value, types.CellType):
        return (_contents(value),)
    if isinstance(value, types.MethodType | types.BuiltinFunctionType):
        return value.__qualname__, value.__self__
    return None


def _have_equal_items(first: Any, second: Any, compared: dict[tuple[int, int], tuple[Any, Any]]) -> bool:
    """Return whether two objects of a class are equal but for their attributes."""
    if isinstance(first, list | tuple | deque):
        pairs = zip(first, second, strict=False)
        return len(first) == len(second) and all(_are_equal(a, b, compared) for a, b in pairs)
    if isinstance(first, dict):
        return _are_equal(list(first.items()), list(second.items()), compared)
    if isinstance(first, set | frozenset):
        return first == second and all(map(_is_plain, first))
    if isinstance(first, random.Random):
        return first.getstate() == second.getstate()
    # Dates and fractions, for example, have no attributes: they are compared by the `__eq__` of the class of Python or
    # numpy from which theirs is derived.
    for base in type(first).__mro__[:-1]:
        equality = vars(base).get("__eq__")
        if _package(base.__module__) in _IN_MEMORY and equality is not None:
            return base is types.SimpleNamespace or bool(equality(first, second))
    return True


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple | frozenset) and all(map(_is_plain, value)))


def _variables(function: types.FunctionType) -> tuple[Any, Any, Any]:
    """Return what a function keeps between calls: enclosing variables, and default values."""
    return function.__closure__, function.__defaults__, function.__kwdefaults__


def _contents(cell: types.CellType) -> list[Any]:
    """Return a list of the value of an enclosing variable, which is empty if no value is assigned yet."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []
