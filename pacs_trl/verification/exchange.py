"""Plain values as JSON, and the connection between a program under test and the process of its asserts.

A plain value has exactly one of the types below. It crosses as data, so that decoding it runs no code of the other
process. For confined processes (`sandbox.py`), hence the standard library only.
"""

import json
import os
import re
import sys
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any


_EMPTY_DICTS: tuple[dict[Any, Any], ...] = ({}, OrderedDict())
_VIEWS: dict[type, str] = {
    **{type(empty.keys()): "dict_keys" for empty in _EMPTY_DICTS},
    **{type(empty.values()): "dict_values" for empty in _EMPTY_DICTS},
    **{type(empty.items()): "dict_items" for empty in _EMPTY_DICTS},
}
_FROM_ITEMS: dict[str, Callable[[list], Any]] = {
    **{kind.__name__: kind for kind in (tuple, set, frozenset, deque, bytes, bytearray)},
    "dict_keys": lambda keys: dict.fromkeys(keys).keys(),
    "dict_values": lambda values: dict(enumerate(values)).values(),
    "dict_items": lambda pairs: dict(pairs).items(),
}
_FACTORIES = (bool, int, float, str, list, tuple, dict, set)
_FROM_PAIRS: dict[str, Callable[[dict], Any]] = {
    **{kind.__name__: kind for kind in (dict, Counter, OrderedDict)},
    **{f"defaultdict of {factory.__name__}": partial(defaultdict, factory) for factory in _FACTORIES},
}
_FROM_TEXT: dict[str, Callable[[str], Any]] = {
    "complex": complex,
    "Decimal": Decimal,
    "date": date.fromisoformat,
    "time": time.fromisoformat,
    "datetime": datetime.fromisoformat,
}
_FROM_INTEGERS: dict[str, Callable[..., Any]] = {kind.__name__: kind for kind in (range, Fraction, timedelta)}


def encode(value: Any, encode_object: Callable[[Any], Any]) -> Any:
    """Return a value as exact JSON data; `encode_object` encodes values that are not plain."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [encode(item, encode_object) for item in value]
    if kind in (dict, defaultdict, Counter, OrderedDict):
        name = kind.__name__
        if kind is defaultdict:
            factory = value.default_factory
            name = f"defaultdict of {factory.__name__}" if factory in _FACTORIES else "dict"
        return {name: [[encode(key, encode_object), encode(item, encode_object)] for key, item in value.items()]}
    if kind in (tuple, set, frozenset, deque, bytes, bytearray):
        return {kind.__name__: [encode(item, encode_object) for item in value]}
    if kind in _VIEWS:
        return {_VIEWS[kind]: [encode(item, encode_object) for item in value]}
    if kind in (complex, Decimal, date, time, datetime):
        return {kind.__name__: str(value)}
    if kind in (range, slice):
        return {kind.__name__: [encode(part, encode_object) for part in (value.start, value.stop, value.step)]}
    if kind is Fraction:
        return {"Fraction": [value.numerator, value.denominator]}
    if kind is timedelta:
        return {"timedelta": [value.days, value.seconds, value.microseconds]}
    return encode_object(value)


def decode(data: Any, decode_object: Callable[[str, Any], Any]) -> Any:
    """Return the value of encoded data; `decode_object` decodes what is not plain. Malformed data raises any
    exception."""
    if isinstance(data, list):
        return [decode(item, decode_object) for item in data]
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    if kind in _FROM_PAIRS:
        return _FROM_PAIRS[kind]({decode(key, decode_object): decode(item, decode_object) for key, item in content})
    if kind in _FROM_ITEMS:
        return _FROM_ITEMS[kind]([decode(item, decode_object) for item in _require(list, content)])
    if kind in _FROM_TEXT:
        return _FROM_TEXT[kind](_require(str, content))
    if kind in _FROM_INTEGERS:
        return _FROM_INTEGERS[kind](*(_require(int, part) for part in content))
    if kind == "slice":
        start, stop, step = content
        return slice(start, stop, step)
    return decode_object(kind, content)


def _require(kind: type, value: Any) -> Any:
    """Return a value of a type, or raise a `TypeError`."""
    if not isinstance(value, kind):
        raise TypeError(f"{value!r:.80} is no {kind.__name__}")
    return value


def refuse(*value: Any) -> Any:
    """Raise a `ValueError` for a value that is not plain."""
    raise ValueError(f"{value!r:.80} is no data")


CONTAINERS = (list, deque, bytearray, dict, set)


def update_arguments(arguments: list, changed: list, shared_classes: Iterable[type] = ()) -> None:
    """Change the containers among the arguments of a call, and the instances of shared classes, as the called
    function changed its copies."""
    for old, new in zip(arguments, changed, strict=True):
        for kind in (*CONTAINERS, *shared_classes):
            if isinstance(old, kind) and isinstance(new, kind):
                _replace_items(old, new)


def _replace_items(old: Any, new: Any) -> None:
    if isinstance(old, list | deque | bytearray):
        old.clear()
        old.extend(new)
    elif isinstance(old, dict | set):
        old.clear()
        old.update(new)
    else:
        _replace_items(vars(old), vars(new))


def shared_classes(prelude: str, namespace: Mapping[str, Any]) -> dict[str, type]:
    """Return the classes that a prelude defines, by name: both processes have them. They must have instances, hence
    not be abstract, with attributes that can be set without a constructor."""
    kinds = {name: namespace.get(name) for name in re.findall(r"^class[ \t]+(\w+)", prelude, re.MULTILINE)}
    return {name: kind for name, kind in kinds.items() if isinstance(kind, type) and _has_instances_of_data(kind)}


def _has_instances_of_data(kind: type) -> bool:
    is_abstract = bool(vars(kind).get("__abstractmethods__"))
    return kind.__new__ is object.__new__ and kind.__dictoffset__ != 0 and not is_abstract


def builtin_name(error: BaseException) -> str:
    """Return the name of the built-in class that the class of an exception is or inherits from."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")


class Connection(ABC):
    """One end of the connection, which is standard input. A request is a list, a reply is a mapping. Instances of
    `shared_classes` cross as data: their attributes."""

    def __init__(self) -> None:
        self.shared_classes: dict[str, type] = {}
        self.file = os.dup(0)
        self.lines = os.fdopen(self.file, "rb")
        sys.set_int_max_str_digits(0)

    def encode(self, value: Any, encode_object: Callable[[Any], Any] | None = None) -> Any:
        """Encode a value, with a list of the instances of shared classes in it, which may refer to each other."""
        encode_object = encode_object or self._encode_object
        instances: list[Any] = []
        positions: dict[int, int] = {}

        def encode_instance(item: Any) -> Any:
            if self.shared_classes.get(type(item).__name__) is not type(item):
                return encode_object(item)
            if id(item) not in positions:
                positions[id(item)] = len(instances)
                instances.append(item)
            return {"instance": positions[id(item)]}

        data = encode(value, encode_instance)
        # The list grows as the attributes are encoded.
        states = [[type(instance).__name__, encode(vars(instance), encode_instance)] for instance in instances]
        return {"instances": [data, states]} if instances else data

    def decode(self, data: Any) -> Any:
        """Decode a value of the other process. No attribute of an instance may hide a method of its class."""
        states: list[Any] = []
        if isinstance(data, dict) and "instances" in data:
            data, states = data["instances"]
        instances: list[Any] = [object.__new__(self.shared_classes[name]) for name, _ in states]

        def decode_instance(kind: str, content: Any) -> Any:
            return instances[content] if kind == "instance" else self._decode_object(kind, content)

        for instance, (name, state) in zip(instances, states, strict=True):
            attributes = _require(dict, decode(state, decode_instance))
            if hidden := [key for key in attributes if callable(getattr(type(instance), key, None))]:
                raise TypeError(f"an attribute of {name} would hide the method {hidden[0]}")
            vars(instance).update(attributes)
        return decode(data, decode_instance)

    @abstractmethod
    def _encode_object(self, value: Any) -> Any:
        """Encode a value that is not plain."""

    @abstractmethod
    def _decode_object(self, kind: str, content: Any) -> Any:
        """Decode a value that is not plain."""

    def exchange(self, request: list) -> dict[str, Any]:
        """Send a request, answer requests of the other process until it replies, and return its reply."""
        self.send(request)
        while isinstance(message := self.receive(), list):
            self.send(self.reply_to(*message))
        return message

    def reply_to(self, *request: Any) -> dict[str, Any]:
        """Return the reply to a request: its value, with the changed arguments, or the exception that it raises."""
        try:
            return self.perform(*request)
        except BaseException as error:
            return self.report(error)

    def report(self, error: BaseException) -> dict[str, Any]:
        """Return an exception as a reply."""
        # `str()` of a `KeyError` is the `repr()` of its message.
        message = error.args[0] if isinstance(error, KeyError) and error.args else error
        return {"raises": builtin_name(error), "message": str(message)}

    @abstractmethod
    def perform(self, *request: Any) -> dict[str, Any]:
        """Perform a request of the other process."""

    def send(self, message: Any) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(self.file, data) :]

    def receive(self) -> Any:
        if not (line := self.lines.readline()):
            raise EOFError("the other process has ended")
        return json.loads(line)
