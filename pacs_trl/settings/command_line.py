"""What all command lines of the package have in common, without any library: `--a-b` is `--a_b`, a misspelt name gets the
nearest one, and settings are given as `--config FILE.yaml [--key value ...]`.

Exit codes: 0; 1 for a run that failed, and for `plan` one that would; 2 for what a user can mend, said in words; 130 after
Ctrl-C; 143 after SIGTERM.
"""

import argparse
import difflib
import os
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from . import Setting, from_words, read_mapping


def exit_code(name: str, main: Callable[[Sequence[str]], Any], argv: Sequence[str]) -> int:
    """Run a command; what ends it in words is printed, and its exit code returned."""
    try:
        status = main(argv)
    except ValueError as error:
        if _is_of_a_run(error):
            traceback.print_exception(error)
            return 1
        print(f"pacs-trl {name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"pacs-trl {name}: stopped by Ctrl-C.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever reads (`| head`) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains when it flushes
        return 1
    return status if isinstance(status, int) else 0


def _is_of_a_run(error: ValueError) -> bool:
    """Whether training had begun and code of others raised it, a reward function's or a library's: then it is no advice."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    begun = any(frame.f_code.co_name == "_inner_training_loop" for frame in frames)
    return begun and not frames[-1].f_globals.get("__name__", "").startswith("pacs_trl.")


class Parser(argparse.ArgumentParser):
    """The parser of `pacs-trl NAME`; options are declared with underscores."""

    def __init__(self, name: str, description: str, **kwargs: Any):
        super().__init__(prog=f"pacs-trl {name}", description=description, allow_abbrev=False, **kwargs)

    def parse_args(self, args=None, namespace=None):
        known = [option for option in self._option_string_actions if option.startswith("--")]
        args = with_underscores(sys.argv[1:] if args is None else args)
        for word in args:
            option = word.partition("=")[0]
            if option.startswith("--") and option not in ("--", *known):
                self.error(f"there is no option `{option}`.{did_you_mean(option, known)}")
        return super().parse_args(args, namespace)

    def parse_known_args(self, args=None, namespace=None):
        return super().parse_known_args(with_underscores(sys.argv[1:] if args is None else args), namespace)


def with_underscores(argv: Sequence[str]) -> list[str]:
    """The words of a command line, names of options with underscores for hyphens."""
    words = []
    for word in argv:
        name, separator, value = word.partition("=")
        words.append(f"--{name[2:].replace('-', '_')}{separator}{value}" if word.startswith("--") else word)
    return words


def did_you_mean(name: str, known: Collection[str]) -> str:
    """The question for the nearest of some names, with a space before it; empty if none is near."""
    nearest = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean `{nearest[0]}`?" if nearest else ""


def asks_for_help(argv: Sequence[str]) -> bool:
    return "-h" in argv or "--help" in argv


def words_by_key(argv: Sequence[str]) -> dict[str, list[str]]:
    """
    `--key value ...` and `--key=value` as keys with their words.

    Raises:
        `ValueError`: if a word belongs to no key.
    """
    words: dict[str, list[str]] = {}
    key = None
    for word in with_underscores(argv):
        if word.startswith("--"):
            key, *value = word[2:].split("=", 1)
            words[key] = value
        elif key is None:
            raise ValueError(f"Cannot make sense of {word!r}: settings are given as --key value.")
        else:
            words[key].append(word)
    return words


def read_settings(argv: Sequence[str], known_to: Callable[[str | None], Mapping[str, Setting]]) -> dict[str, Any]:
    """
    The keys of `--config FILE.yaml [--key value ...]`; those of the command line win. `known_to` gives the settings
    that there are, by the value of the key `method` (`None` without one).

    Raises:
        `ValueError`: if the file does not exist or is no mapping, or a word of the command line belongs to no key.
    """
    words = words_by_key(argv)
    path = words.pop("config", None)
    if path == []:
        raise ValueError("--config must name a file.")
    settings = {} if path is None else read_mapping(path[0], "recipe")
    method = words["method"][0] if words.get("method") else settings.get("method")
    known = known_to(method if isinstance(method, str) else None)
    for key, values in words.items():
        if key not in known and key.removeprefix("no_") in known:  # booleans that default to True have both
            settings[key.removeprefix("no_")] = False
        else:
            settings[key] = from_words(values, known[key]) if key in known else values
    return settings


def environment_errors(settings: Mapping[str, Any]) -> list[str]:
    """What is wrong with the key `env`, environment variables that a file may set."""
    env = settings.get("env") or {}
    return [] if isinstance(env, dict) else [f"env must be a mapping of environment variables, got {env!r}."]
