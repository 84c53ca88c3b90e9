"""Asserts about a program that runs in another process and may send any answer.

Whatever a program returns is compared as a plain value, which it has to choose before it can know what is expected:

- Values of the types in `exchange.py` arrive as such, instances of subclasses as the standard type they inherit from.
- Instances of classes that the prelude defines, which both processes have, arrive as copies with the same attributes.
- A call that returns `None` changes its arguments. A call that returns something else does not, but comparisons of an
  argument with a literal see its changes. Others do not: `f(x) == sorted(x)` must be false of a program that empties
  `x`.
- Other objects stay in the program's process. An object that a function returned equals only itself, has no methods
  that standard types have, and is iterated over once. An object that the asserts made, by calling a class of the
  program, answers for itself, because its methods are what is tested.
- Exceptions of the program are of a built-in class, of one of a loaded standard module, or of one that is made here
  and has the name and base classes of the program's.
- The program may call functions that the asserts handed over, and get plain values from them, nothing else.

For confined processes, hence the standard library only.
"""

import ast
import builtins
import importlib
import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from copy import copy
from types import BuiltinFunctionType, FunctionType
from typing import Any, NoReturn

from .changed_arguments import CHANGED, ComparisonsOfArguments
from .exchange import CONTAINERS, Connection, builtin_name, decode, refuse, shared_classes, update_arguments


_PLAIN_TYPES = (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset)
_TYPES = {kind.__name__: kind for kind in _PLAIN_TYPES}
# Such a method of an object that is no plain value could read from its arguments what is expected.
_METHODS_OF_PLAIN_TYPES = {name for kind in _PLAIN_TYPES for name in dir(kind)}


class ProgramEnded(Exception):
    """The process of the program has ended."""


class AssertsConnection(Connection):
    """Connection of asserts to a program. `objects` are the program's that the asserts know, by the program's key."""

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[int | str, Remote] = {}
        self.error_classes: dict[int, type[Exception]] = {}
        self.handed_over: dict[int, Any] = {}
        self.has_called = False
        self.compares_arguments = False
        # By `id`: the argument, a copy from before the call, and one as the program changed it.
        self.changed_arguments: dict[int, tuple[Any, Any, Any]] = {}

    def ask(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        """Return the result of an operation in the program's process, or raise its exception."""
        return self.decode(self.request(operation, args, kwargs)["value"])

    def call(self, function: "Remote", args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the value of a function of the program. A call that returns `None` may be for its effect, so that
        its arguments change with their copies. Otherwise they stay, and `changed` returns the copies."""
        operation = "call_with_changes" if self.compares_arguments else "call"
        reply = self.request(operation, (function, *args), kwargs)
        value, changed = self.decode(reply["value"]), self.decode(reply["changed"])
        arguments = [*args, *kwargs.values()]
        if value is None:
            update_arguments(arguments, changed, self.shared_classes.values())
        if self.compares_arguments:
            self.keep_changes(arguments, changed)
        return value

    def keep_changes(self, arguments: list, changed: list) -> None:
        """Keep the containers among the arguments of a call, as they are and as the program changed its copies."""
        for argument, copy_of_program in zip(arguments, changed, strict=True):
            if isinstance(argument, CONTAINERS):
                after = copy(argument)
                update_arguments([after], [copy_of_program])
                self.changed_arguments[id(argument)] = argument, copy(argument), after

    def changed(self, argument: Any) -> Any:
        """Return an argument as the last call that got it changed it, unless the asserts have changed it since."""
        if id(argument) not in self.changed_arguments:
            return argument
        _, before, after = self.changed_arguments[id(argument)]
        return after if argument == before else argument

    def construct(self, kind: "ProgramClass", args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return a new instance of a class of the program. Two calls must not give the same object, or all instances
        would be equal, unless the calls are equal too (a class with one instance)."""
        made_by = json.dumps([kind._remote_key, self.encode(args), self.encode(kwargs)])
        value = self.request("call", (kind, *args), kwargs)["value"]
        key = _object_key(value)
        if key is None:
            return self.decode(value)
        if key not in self.objects:
            self.objects[key] = Instance(self, key, made_by=made_by)
        instance = self.objects[key]
        if vars(instance).get("_remote_made_by") != made_by:
            raise RuntimeError("a new object is one that the asserts know already")
        return instance

    def get_named(self, owner: "Namespace", name: str) -> Any:
        """Return what has a name in a module or class of the program. It must not be an object that a function
        returned before, except a member of an enumeration, whose key is its name."""
        if owner._remote_key == "" and name in self.shared_classes:
            return self.shared_classes[name]
        value = self.request("getattr", (owner, name), {})["value"]
        if isinstance(value, dict) and "error class" in value:
            kind = self.decode_error_class(value["error class"])
            if issubclass(AssertionError, kind):
                raise RuntimeError(f"{name} of the program would catch failed asserts")
            return kind
        key = _object_key(value)
        if key is None or key == f"{owner._remote_name}.{name}":
            return self.decode(value)
        if key not in self.objects:
            return self.decode(value) if _object_data(value) else self.name_object(key, name)
        remote = self.objects[key]
        if type(remote) is Remote:
            raise RuntimeError(f"{name} of the program is an object that was returned before")
        return remote

    def name_object(self, key: int | str, name: str) -> "Remote":
        """Return the object of the program with a key and a name, which tells whether it is a class."""
        is_class = name.lstrip("_")[:1].isupper()
        self.objects[key] = ProgramClass(self, key, name=name) if is_class else NamedObject(self, key)
        return self.objects[key]

    def request(self, operation: str, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the reply to a request, or raise the exception that it reports."""
        try:
            reply = self.exchange([operation, self.encode(list(args)), self.encode(kwargs)])
        except (EOFError, OSError) as error:
            raise ProgramEnded from error
        self.has_called = self.has_called or operation in ("call", "call_with_changes")
        if "raises" not in reply:
            return reply
        kind = self.decode_error_class(reply.get("class", reply["raises"]))
        if issubclass(kind, StopIteration) and operation != "next":  # it would end a loop over asserts
            kind = RuntimeError
        raise _new_error(kind, str(reply["message"]), Remote(self, reply.get("key", 0)))

    def decode_error_class(self, data: Any) -> type[Exception]:
        """Return an encoded class of exceptions; `RuntimeError` for a class that is none."""
        if isinstance(data, str):
            return _standard_error("builtins", data) or RuntimeError
        key, module, name, bases = data
        if key not in self.error_classes:
            kinds = tuple(dict.fromkeys(map(self.decode_error_class, bases)))
            remote = ProgramClass(self, key, name=name)
            self.error_classes[key] = _standard_error(module, name) or _new_error_class(name, kinds, remote)
        return self.error_classes[key]

    def perform(self, operation: str, key: int, data: Any, named: Any) -> dict[str, Any]:
        """Call a function that was handed over, or advance an iterator. Values that are not plain must be the
        program's, or handed over before: those that a callback made stay here."""
        handed_over = self.handed_over[key]
        args, kwargs = self.decode(data), self.decode(named)
        if operation == "next" and isinstance(handed_over, Iterator):
            value = next(handed_over)
        elif operation == "call" and callable(handed_over) and not isinstance(handed_over, type):
            value = handed_over(*args, **kwargs)
        else:
            raise TypeError(f"the program may not {operation} this object")
        arguments = [*args, *kwargs.values()] if value is None else []
        known = self._encode_known_object
        return {"value": self.encode(value, known), "changed": self.encode(arguments, known)}

    def _encode_object(self, value: Any) -> dict[str, Any]:
        """Encode a value that is not plain for the program, which may call it afterwards if it is a function."""
        if isinstance(value, _WithAttributes | _ProgramError):
            value = value._remote
        if isinstance(value, _ProgramErrorClass):
            value = value._remote_class
        if isinstance(value, Remote):
            return {"yours": value._remote_key}
        if _is_standard(value):  # the program looks it up by its name
            return {"standard": [value.__module__, value.__name__]}
        self.handed_over[id(value)] = value
        return {"object": id(value)}

    def _encode_known_object(self, value: Any) -> dict[str, Any]:
        is_remote = isinstance(value, Remote | _WithAttributes | _ProgramError | _ProgramErrorClass)
        if is_remote or _is_standard(value) or id(value) in self.handed_over:
            return self._encode_object(value)
        raise TypeError("the value of a function that asserts hand over must be plain")

    def _decode_object(self, kind: str, content: Any) -> Any:
        if kind == "yours":
            return self.handed_over[content]
        if kind == "type" and content in _TYPES:
            return _TYPES[content]
        if kind == "error class":  # as a value it is an object like any other
            kind, content = "object", [content[0], None]
        key = _object_key({kind: content})
        if key is None:
            raise TypeError(f"{kind!r:.80} is no kind of value")
        remote = self.objects.setdefault(key, Remote(self, key))
        data = _object_data({kind: content})
        if data and type(remote) is Remote:
            return _with_attributes(self.decode(data[0]), remote)
        return remote


def _object_key(data: Any) -> int | str | None:
    """Return the key of an encoded object of the program; `None` for a value of another kind."""
    if not isinstance(data, dict) or "object" not in data:
        return None
    key, _ = data["object"]
    if type(key) not in (int, str):
        raise TypeError("a key is a number or a name")
    return key


def _object_data(data: dict[str, Any]) -> list:
    """Return the data that an encoded object of the program inherits from a standard type, in a list; empty for
    none."""
    _, content = data["object"]
    return content or []


def _is_standard(value: Any) -> bool:
    """Whether a value is a class or function of the standard library."""
    if not isinstance(value, type | FunctionType | BuiltinFunctionType) or value.__module__ is None:
        return False
    module = sys.modules.get(value.__module__)
    is_standard = value.__module__ in sys.stdlib_module_names
    return is_standard and getattr(module, value.__name__, None) is value


class Remote:
    """An object of the program that a function returned, or an attribute of another one. It has no operators."""

    def __init__(self, connection: AssertsConnection, key: int | str, **more: Any):
        # Attributes of this object, of which the object of the program probably has none.
        vars(self).update(_remote_connection=connection, _remote_key=key)
        vars(self).update({f"_remote_{name}": value for name, value in more.items()})

    def _remote_ask(self, operation: str, *args: Any) -> Any:
        return self._remote_connection.ask(operation, self, *args)

    def _remote_data(self) -> Any:
        return self._remote_ask("_data")

    def _remote_changes(self) -> None:
        vars(self).pop("_remote_items", None)

    def _remote_all_items(self) -> list | None:
        """Return the items, which are asked for once, so that length and items cannot contradict each other; `None`
        for an iterator."""
        if "_remote_items" not in vars(self):
            iterator = self._remote_ask("iter")
            vars(self)["_remote_items"] = None if iterator is self else list(_Items(iterator))
        return vars(self)["_remote_items"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._remote_connection.call(self, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = self._remote_ask("getattr", name)
        if callable(value):
            self._remote_changes()
            classes = self._remote_connection.shared_classes.values()
            if name in _METHODS_OF_PLAIN_TYPES or any(hasattr(kind, name) for kind in classes):
                raise AttributeError(f"{name} of an object that is no plain value")
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        self._remote_changes()
        self._remote_ask("setattr", name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._remote_ask("getitem", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._remote_changes()
        self._remote_ask("setitem", key, value)

    def __delitem__(self, key: Any) -> None:
        self._remote_changes()
        self._remote_ask("delitem", key)

    def __iter__(self) -> Any:
        items = self._remote_all_items()
        return self if items is None else iter(items)

    def __next__(self) -> Any:
        if "_remote_is_exhausted" in vars(self):
            raise StopIteration
        try:
            return self._remote_ask("next")
        except StopIteration:
            vars(self)["_remote_is_exhausted"] = True
            raise

    def __len__(self) -> int:
        items = self._remote_all_items()
        if items is None:
            raise TypeError("an iterator has no length")
        return len(items)

    def __bool__(self) -> bool:
        return self._remote_ask("bool")

    def __str__(self) -> str:
        return self._remote_ask("str")

    def __repr__(self) -> str:
        return self._remote_ask("repr")

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return hash(self._remote_key)


class _Items:
    """Iterator over what an iterator of the program yields."""

    def __init__(self, iterator: Any):
        self.iterator = iterator

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        if not isinstance(self.iterator, Remote):
            raise TypeError("this is no iterator")
        return self.iterator._remote_ask("next")


class Instance(Remote):
    """An object that the asserts made by calling a class of the program."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._remote_ask("getattr", name)

    def __iter__(self) -> Any:
        return self._remote_ask("iter")

    def __len__(self) -> int:
        return self._remote_ask("len")

    def __contains__(self, item: Any) -> bool:
        return self._remote_ask("contains", item)

    def __eq__(self, other: object) -> bool:
        """Whether this is the other object, or the other value is the data that this inherits from a standard type."""
        if isinstance(other, Remote):
            return self is other
        data = self._remote_data()
        return data is not None and data == other

    __hash__ = Remote.__hash__


class NamedObject(Remote):
    """A function or constant that has a name in a module or class of the program."""


class Namespace(Remote):
    """The module of the program, or a class of it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._remote_connection.get_named(self, name)


class ProgramClass(Namespace):
    """A class of the program, or what has the name of one: it begins with a capital letter."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._remote_connection.construct(self, args, kwargs)

    def __instancecheck__(self, instance: Any) -> bool:
        if isinstance(instance, _WithAttributes):
            instance = instance._remote
        return isinstance(instance, Remote) and self._remote_connection.ask("isinstance", instance, self)

    def __subclasscheck__(self, kind: Any) -> bool:
        return isinstance(kind, Remote) and self._remote_connection.ask("issubclass", kind, self)


class _WithAttributes:
    """Mixin of plain values that came from a subclass of a standard type. Attributes that the standard type does not
    have, such as the fields of a named tuple, are those of the object of the program."""

    _remote: Remote

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_remote":
            raise AttributeError(name)
        value = getattr(self._remote, name)
        if not callable(value):
            return value

        def method(*args: Any, **kwargs: Any) -> Any:
            result = value(*args, **kwargs)
            update_arguments([self], [self._remote._remote_data()])
            return result

        return method

    def __str__(self) -> str:
        return str(self._remote)

    def __repr__(self) -> str:
        return repr(self._remote)


_SUBCLASSES = {
    kind: type(f"{kind.__name__}_of_program", (_WithAttributes, kind), {})
    for kind in (int, float, str, bytes, tuple, list, set, frozenset, dict)
}


def _with_attributes(value: Any, remote: Remote) -> Any:
    plain = _SUBCLASSES[type(value)](value)
    plain._remote = remote
    return plain


class _ProgramErrorClass(type):
    """A class of exceptions that stands for one of the program, which makes the instances."""

    _remote_class: ProgramClass

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        instance = cls._remote_class(*args, **kwargs)
        return _new_error(cls, str(instance), instance)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls._remote_class, name)


class _ProgramError:
    """Mixin of exceptions of the program, which have the attributes of those in its process."""

    _remote: Remote

    def __getattr__(self, name: str) -> Any:
        if name == "_remote":
            raise AttributeError(name)
        return getattr(self._remote, name)


def _new_error_class(name: str, bases: tuple[type[Exception], ...], remote: ProgramClass) -> Any:
    members = {"__module__": "solution", "_remote_class": remote}
    return _ProgramErrorClass(name, (*bases, _ProgramError), members)


def _standard_error(module: str, name: str) -> type[Exception] | None:
    """Return a class of exceptions of a standard module that is loaded; `None` for another name, and for exceptions
    with which `unittest` skips a test."""
    package = module.partition(".")[0]
    if package not in sys.stdlib_module_names or package == "unittest" or module not in sys.modules:
        return None
    kind = vars(sys.modules[module]).get(name)
    return kind if isinstance(kind, type) and issubclass(kind, Exception) else None


def _new_error(kind: Any, message: str, remote: Remote) -> Exception:
    """Return an exception with a message. Only classes of Python are initialized: others may change the message."""
    error = kind.__new__(kind, message)
    if kind.__module__ == "builtins":
        with suppress(TypeError):  # a few take other arguments
            kind.__init__(error, message)
    if isinstance(error, _ProgramError):
        error._remote = remote
    return error


class _Names(dict):
    """Names of asserts. Those that they do not define are standard modules, never the program's, or the program's."""

    def __missing__(self, name: str) -> Any:
        if name in vars(builtins):
            raise KeyError(name)
        is_module = name in sys.stdlib_module_names
        return importlib.import_module(name) if is_module else getattr(sys.modules["solution"], name)


def run_calls(calls: str, name: str) -> NoReturn:
    """Call a function of the program that is connected to standard input with each list of arguments, encoded and as
    JSON. Write a line of JSON per call: its value as the program encoded it, or the class of an exception.

    The program gets the arguments of a call after it has answered the one before: what is expected of one may be
    among the arguments of the next."""
    connection = AssertsConnection()
    function = connection.name_object(name, name)
    for arguments in json.loads(calls):
        try:
            reply = connection.request("call", (function, *decode(arguments, refuse)), {})
            result = {"value": reply["value"]}
        except ProgramEnded:
            os._exit(1)
        except Exception as error:
            result = {"raises": builtin_name(error)}
        print(json.dumps(result), flush=True)
    os._exit(0)


def run_asserts(code: str, name: str, prelude: str) -> NoReturn:
    """Run asserts, also `check(candidate)` and `test...()`, on the program that is connected to standard input.

    Write a line per assert at the top level, and a last one for all others: "passed", "failed", the class of another
    exception, or "no call" if they passed without a call. A failed assert at the top level does not end the process;
    the exit code is 1 after an exception in another statement, and if the program has ended."""
    connection, reports = AssertsConnection(), _Reports()
    names = _Names({"__name__": "asserts", _REPORTS: reports, CHANGED: connection.changed})
    sys.stdout = sys.stderr = io.StringIO()
    module = connection.objects[""] = Namespace(connection, "", name="")
    sys.modules["solution"] = module  # type: ignore[assignment]
    exit_code = 0
    try:
        exec(prelude, names)
        connection.shared_classes = shared_classes(prelude, names)
        names_before = dict(names)
        names[name] = function = connection.name_object(name, name)
        tree = ast.parse(code)
        comparisons = ComparisonsOfArguments(tree)
        comparisons.visit(tree)
        connection.compares_arguments = comparisons.any_compared
        exec(compile(_with_reports(tree), "asserts.py", "exec"), names)
        tests = {key: value for key, value in names.items() if key not in names_before}
        for key, test in tests.items():
            if not isinstance(test, FunctionType):
                continue
            takes_candidate = test.__code__.co_argcount > 0
            if key == "check" and takes_candidate:
                test(function)
            elif key == "check" or key.startswith("test"):
                test()
        connection.ask("_ping", "")  # fails if the program has ended, in whatever an assert has caught
        tests_nothing = reports.all_passed and not connection.has_called
        reports.write("no call" if tests_nothing else "passed")
    except AssertionError:
        reports.write("failed")
    except BaseException as error:
        exit_code = 1
        if not isinstance(error, ProgramEnded):  # else the program has written why it ended
            os.write(2, f"\n{builtin_name(error)}".encode())
    os._exit(exit_code)


_REPORTS = "<reports>"  # among the names of asserts, none of theirs


def _with_reports(tree: ast.Module) -> ast.Module:
    """Return asserts, each of those at the top level in the context of `_Reports`."""
    context = ast.withitem(ast.Name(_REPORTS, ast.Load()))
    tree.body = [ast.With([context], [part]) if isinstance(part, ast.Assert) else part for part in tree.body]
    return ast.fix_missing_locations(tree)


class _Reports:
    """Results of asserts, which standard output gets, a line each; the context of an assert, which writes its result
    and catches its exception."""

    all_passed = True

    def write(self, result: str) -> None:
        self.all_passed = self.all_passed and result == "passed"
        os.write(1, f"{result}\n".encode())

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> bool:
        if error is None:
            self.write("passed")
            return False
        if isinstance(error, ProgramEnded) or not isinstance(error, Exception):
            return False
        self.write("failed" if isinstance(error, AssertionError) else builtin_name(error))
        return True
