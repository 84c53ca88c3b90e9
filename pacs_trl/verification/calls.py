"""Calls of a tested program's functions, by a test case in its own process or by asserts in another one.

Values cross as JSON, and objects of other types as keys, so no code of the program runs where values are compared: it
chooses its answers, never the result. For confined processes (`sandbox.py`), hence the standard library only.
"""

import builtins
import importlib
import io
import json
import operator
import os
import sys
from collections import ChainMap, Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from datetime import date, datetime
from decimal import Decimal
from types import FunctionType, ModuleType
from typing import Any, NoReturn


_COLLECTIONS: dict[str, Any] = {t.__name__: t for t in (tuple, set, frozenset, deque, bytes, bytearray)}
_FROM_TEXT: dict[str, Any] = {"complex": complex, "Decimal": Decimal}
_FROM_TEXT |= {t.__name__: t.fromisoformat for t in (date, datetime)}
_FROM_TEXT["type"] = {name: value for name, value in vars(builtins).items() if isinstance(value, type)}.__getitem__
# Methods whose value is a verdict: an object of the program would only have to say yes.
_PREDICATES = {n for t in (str, bytes, set, float) for n in dir(t) if n.startswith("is") or n.endswith("with")}


def encode(value: Any, keep: Callable[[Any], Any]) -> Any:
    """Return a value as exact JSON data; `keep` encodes objects of other than standard types."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [encode(item, keep) for item in value]
    if kind in (dict, OrderedDict, defaultdict, Counter):
        return {"dict": [[encode(key, keep), encode(item, keep)] for key, item in value.items()]}
    if kind in _COLLECTIONS.values():
        return {kind.__name__: [encode(item, keep) for item in value]}
    if kind is type and value.__module__ == "builtins":
        return {"type": value.__name__}
    return {kind.__name__: str(value)} if kind in (complex, Decimal, date, datetime) else keep(value)


def decode(data: Any, find: Callable[..., Any]) -> Any:
    """Return the value of encoded data; `find` decodes other objects. Malformed data raises any exception."""
    if isinstance(data, list):
        return [decode(item, find) for item in data]
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    if kind == "dict":
        return {decode(key, find): decode(item, find) for key, item in content}
    if kind in _COLLECTIONS:
        return _COLLECTIONS[kind]([decode(item, find) for item in content])
    return _FROM_TEXT[kind](content) if kind in _FROM_TEXT else find(kind, content)


def refuse(*value: Any) -> Any:
    """Raise a `ValueError` for a value that is no data."""
    raise ValueError(f"{value!r:.80} is no data")


def call(source: str, name: str, is_exact: bool) -> None:
    """Call a function of a program with the arguments on standard input, and print its value, both as JSON."""
    arguments = json.load(sys.stdin)
    value = getattr(_load(source, name), name)(*(decode(arguments, refuse) if is_exact else arguments))
    print("\n" + json.dumps(encode(value, _encode_as_data) if is_exact else value), file=sys.__stdout__, flush=True)


def _data(value: Any) -> Any:
    """Convert an instance of a subclass of a standard type to that type; `None` for others."""
    kinds: tuple[Any, ...] = (int, float, str, bytes, tuple, list, set, frozenset, dict)
    return next((kind(value) for kind in kinds if isinstance(value, kind)), None)


def _encode_as_data(value: Any) -> Any:
    return {"object": 0} if (data := _data(value)) is None else encode(data, _encode_as_data)


def _load(source: str, name: str) -> ModuleType:
    """Run a program as the module `solution`, and return it with its function, which may be a method of `Solution`."""
    sys.modules["solution"] = module = ModuleType("solution")
    exec(compile(source, "solution.py", "exec"), module.__dict__)
    function = getattr(module, name, None) or getattr(getattr(module, "Solution", object)(), name, None)
    if function is None:
        raise NameError(f"the program defines no function {name}")
    setattr(module, name, function)
    return module


class Connection:
    """Connection to the other process, which may use `operations` on objects that it has keys of, and on `names`."""

    def __init__(self, operations: dict[str, Callable], names: dict[str, Any]):
        self.file, self.operations, self.objects = os.dup(0), operations, ChainMap[Any, Any]({}, names)
        self.lines, self.has_called = os.fdopen(self.file, "rb"), False
        sys.set_int_max_str_digits(0)

    def ask(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        """Return the result of an operation in the other process, or raise its exception. A call that returns `None`
        may be for its effect, so that its arguments change with their copies."""
        self._send([operation, [encode(item, self._key) for item in args], encode(kwargs, self._key)])
        while isinstance(answer := self._receive(), list):
            self._answer(*answer)
        self.has_called |= operation == "call"
        if "raises" in answer:
            kind: Any = vars(builtins).get(answer["raises"])
            is_error = isinstance(kind, type) and issubclass(kind, Exception)
            if not is_error or kind is StopIteration and operation != "next":  # it would end a loop over asserts
                kind = RuntimeError
            raise kind(answer["message"])
        value = decode(answer["value"], self._object)
        if operation == "call" and value is None:
            for old, new in zip(args[1:], decode(answer["changed"], self._object), strict=True):
                if type(old) is type(new) and isinstance(old, list | dict | set):
                    old.clear()
                    old.extend(new) if isinstance(old, list) else old.update(new)
        return value

    def serve(self) -> NoReturn:
        """Answer until the other process ends this one."""
        with suppress(EOFError, OSError):
            while True:
                self._answer(*self._receive())
        os._exit(0)

    def _answer(self, operation: str, args: Any, kwargs: Any) -> None:
        try:
            args = decode(args, self._object)
            value = self.operations[operation](*args, **decode(kwargs, self._object))
            changed = [encode(item, self._key) for item in args[1:]] if value is None else []
            answer = {"value": encode(value, self._key), "changed": changed}
        except BaseException as error:
            name = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
            answer = {"raises": name, "message": str(error)}
        self._send(answer)

    def _send(self, message: Any) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(self.file, data) :]

    def _receive(self) -> Any:
        if not (line := self.lines.readline()):
            raise EOFError("the program has ended")
        return json.loads(line)

    def _key(self, value: Any) -> dict[str, Any]:
        if isinstance(value, Remote):
            return {"yours": value._key}
        self.objects[id(value)] = value
        return {"object": id(value)}

    def _object(self, kind: str, key: Any) -> Any:
        return self.objects[key] if kind == "yours" else Remote(self, key)


class Remote:
    """An object of the other process. It has no operators, and equals itself and the data of its standard type."""

    def __init__(self, connection: Connection, key: Any):
        vars(self).update(_connection=connection, _key=key)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in _PREDICATES:
            raise AttributeError(name)
        return self._connection.ask("getattr", self, name)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Remote):
            return self._key == other._key
        data = self._connection.ask("data", self)
        return data is not None and data == other

    def __hash__(self) -> int:
        return hash(self._key)

    def __bool__(self) -> bool:
        return True


for _name in ("call", "setattr", "iter", "next", "len", "getitem", "setitem", "str", "repr"):
    setattr(Remote, f"__{_name}__", lambda self, *a, _name=_name, **k: self._connection.ask(_name, self, *a, **k))


def serve(source: str, name: str) -> NoReturn:
    """Run a program, and answer the asserts, which are connected to standard input."""
    functions = (getattr, setattr, iter, next, len, str, repr, operator.call, operator.getitem, operator.setitem)
    operations: dict[str, Any] = {function.__name__: function for function in functions} | {"data": _data}
    names: dict[str, Any] = {}
    connection = Connection(operations, names)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    module = _load(source, name)
    names.update(vars(module), **{"": module})
    connection.serve()


class _Names(dict):
    """Names of asserts. Those that they do not define are standard modules, never the program's, or the program's."""

    def __missing__(self, name: str) -> Any:
        if name in vars(builtins):
            raise KeyError(name)
        is_module = name in sys.stdlib_module_names
        return importlib.import_module(name) if is_module else getattr(sys.modules["solution"], name)


def run_asserts(code: str, name: str, prelude: str) -> NoReturn:
    """Run asserts, also `check(candidate)` and `test...()`, on the program that is connected to standard input, and
    print "passed", "no call", or "failed". The exit code is 1 after exceptions other than a failed assert."""
    connection, names, exit_code = Connection({"call": operator.call}, {}), _Names(__name__="asserts"), 0
    sys.stdout = sys.stderr = io.StringIO()
    sys.modules["solution"] = Remote(connection, "")  # type: ignore[assignment]
    try:
        exec(prelude, names)
        own = dict(names)
        names[name] = function = Remote(connection, name)
        exec(compile(code, "asserts.py", "exec"), names)
        for key, test in [item for item in names.items() if item[0] not in own]:
            arguments = [function] if key == "check" else [] if key.startswith("test") else None
            if isinstance(test, FunctionType) and arguments is not None:
                test(*arguments[: test.__code__.co_argcount])
        connection.ask("len", "")  # fails if the program has ended, in whatever an assert has caught
        report = "passed" if connection.has_called else "no call"
    except BaseException as error:
        report, exit_code = "failed", 1 - isinstance(error, AssertionError)
        if not isinstance(error, EOFError | OSError):  # else the program has written why it ended
            os.write(2, f"\n{type(error).__name__}".encode())
    os.write(1, report.encode())
    os._exit(exit_code)
