"""Calls of a tested program's functions, by a test case in the same process or by asserts in another one.

Everything here runs in the process of the program, which may change it as it likes: what it sends is its answer, and
`asserts.py` decides what the answer is worth. For confined processes, hence the standard library only.
"""

import builtins
import importlib
import json
import operator
import os
import sys
from contextlib import suppress
from enum import Enum
from types import ModuleType
from typing import Any, NoReturn

from .exchange import Connection, encode, shared_classes, update_arguments


# Number of an open file. The worker opens it for each program, because processes share the flags of a file that they
# inherit, and before the confinement, which may forbid opening files for writing.
devnull = -1


def call(source: str, name: str) -> None:
    """Call a function of a program with the arguments on standard input, and write its value to standard output, both
    as JSON. What the program prints goes nowhere."""
    arguments = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "w") as output:
        os.dup2(devnull, 1)
        value = getattr(_load(source, name), name)(*arguments)
        output.write(json.dumps(value))


def serve(source: str, name: str, prelude: str) -> NoReturn:
    """Run a program, which begins with the prelude, and answer the asserts, which are connected to standard input."""
    connection = ProgramConnection()
    for file in (0, 1):
        os.dup2(devnull, file)
    module = _load(source, name)
    connection.objects.update(vars(module), **{"": module})
    connection.shared_classes = shared_classes(prelude, vars(module))
    with suppress(EOFError, OSError):
        while True:
            connection.send(connection.reply_to(*connection.receive()))
    os._exit(0)


def _load(source: str, name: str) -> ModuleType:
    """Run a program as the module `solution`, and return it with its function, which may be a method of `Solution`."""
    sys.modules["solution"] = module = ModuleType("solution")
    module.__file__ = os.path.abspath("solution.py")
    exec(compile(source, "solution.py", "exec"), module.__dict__)
    function = getattr(module, name, None) or getattr(getattr(module, "Solution", object)(), name, None)
    if function is None:
        raise NameError(f"the program defines no function {name}")
    setattr(module, name, function)
    return module


def _data(value: Any) -> Any:
    """Convert an instance of a subclass of a standard type to that type; `None` for others."""
    if isinstance(value, str):  # a member of an enumeration has another `str()`
        return str.__str__(value)
    kinds: tuple[Any, ...] = (int, float, bytes, tuple, list, set, frozenset, dict)
    return next((kind(value) for kind in kinds if isinstance(value, kind)), None)


def _ping(_: Any) -> None:
    pass


_FUNCTIONS: list[Any] = [getattr, setattr, iter, next, len, str, repr, bool, isinstance, issubclass]
_FUNCTIONS += [operator.call, operator.getitem, operator.setitem, operator.delitem, operator.contains, _data, _ping]


class ProgramConnection(Connection):
    """Connection of a program to its asserts. `objects` has the objects of the program that the asserts know."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = {function.__name__: function for function in _FUNCTIONS}
        self.operations["call_with_changes"] = operator.call  # the asserts compare arguments, too
        self.objects: dict[Any, Any] = {}
        self.asserts_objects: dict[int, AssertsObject] = {}

    def perform(self, operation: str, data: Any, named: Any) -> dict[str, Any]:
        args, kwargs = self.decode(data), self.decode(named)
        value = self.operations[operation](*args, **kwargs)
        is_for_effect = operation == "call" and value is None
        has_changes = is_for_effect or operation == "call_with_changes"
        arguments = [*args[1:], *kwargs.values()] if has_changes else []
        return {"value": self.encode(value), "changed": self.encode(arguments)}

    def report(self, error: BaseException) -> dict[str, Any]:
        """Return an exception as a reply, with its class and its key."""
        self.objects[id(error)] = error.with_traceback(None)
        return super().report(error) | {"class": self._encode_error_class(type(error)), "key": id(error)}

    def call_back(self, operation: str, key: int, *args: Any, **kwargs: Any) -> Any:
        """Return the value of a function of the asserts, or the next item of an iterator."""
        reply = self.exchange([operation, key, self.encode(list(args)), self.encode(kwargs)])
        if "raises" in reply:
            raise getattr(builtins, reply["raises"])(reply["message"])
        value = self.decode(reply["value"])
        if value is None:
            changed = self.decode(reply["changed"])
            update_arguments([*args, *kwargs.values()], changed, self.shared_classes.values())
        return value

    def _encode_object(self, value: Any) -> dict[str, Any]:
        if isinstance(value, AssertsObject):
            return {"yours": value._key}
        if isinstance(value, type) and value.__module__ == "builtins":
            return {"type": value.__name__}
        if isinstance(value, type) and issubclass(value, Exception):
            return {"error class": self._encode_error_class(value)}
        key: Any = id(value)
        if isinstance(value, Enum):
            key = f"{type(value).__name__}.{value.name}"
        self.objects[key] = value
        data = _data(value)
        return {"object": [key, None if data is None else [encode(data, self._encode_object)]]}

    def _encode_error_class(self, kind: type[BaseException]) -> Any:
        """Encode a class of exceptions: a built-in one as its name, others with key, module, name, and bases."""
        if kind.__module__ == "builtins":
            return kind.__name__
        self.objects[id(kind)] = kind
        bases = [self._encode_error_class(base) for base in kind.__bases__ if issubclass(base, BaseException)]
        return [id(kind), kind.__module__, kind.__name__, bases]

    def _decode_object(self, kind: str, content: Any) -> Any:
        if kind == "yours":
            return self.objects[content]
        if kind == "standard":
            module, name = content
            return getattr(importlib.import_module(module), name)
        return self.asserts_objects.setdefault(content, AssertsObject(self, content))


class AssertsObject:
    """An object that the asserts handed over: a function can be called, an iterator iterated over."""

    def __init__(self, connection: ProgramConnection, key: int):
        self._connection, self._key = connection, key

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._connection.call_back("call", self._key, *args, **kwargs)

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return self._connection.call_back("next", self._key)
