"""What all command lines of the package have in common, without any library: `--a-b` is `--a_b`, a misspelt name gets
the nearest one, and settings are given as `--config FILE.yaml [--key value ...]`.

Exit codes: 0; 1 for a run that failed, and for `plan` one that would; 2 for what a user can mend, said in words; 130
after Ctrl-C; 143 after SIGTERM.
"""

import argparse
import difflib
import errno
import io
import logging
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from . import Setting, from_words, read_mapping


# What a machine answers that cannot write or read.
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}
NO_RIGHTS = {errno.EACCES, errno.EPERM}
WRONG_PATHS = {errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG}


class FailedRun(RuntimeError):
    """What ended a run that was begun, in words for the user."""


def exit_code(program: str, main: Callable[[Sequence[str]], Any], argv: Sequence[str]) -> int:
    """Run a command; what ends it in words is printed, and its exit code returned."""
    _open_streams()
    _quiet_libraries()
    try:
        try:
            status = main(argv)
        finally:
            sys.stdout.flush()  # here a reader that has gone is understood
    except (ValueError, ImportError, NotImplementedError) as error:  # the last two are raised by libraries
        is_refused = isinstance(error, ValueError | ImportError) or _is_of_transformers(error)
        if isinstance(error, ModuleNotFoundError) or not is_refused:
            raise
        if _is_of_a_run(error) and not (isinstance(error, ImportError) and _is_of_transformers(error)):
            traceback.print_exception(error)
            return 1
        print(f"{program}: {error}", file=sys.stderr)
        return 1 if _has_begun(error) else 2
    except (FailedRun, subprocess.CalledProcessError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would show what is being ended
        resume = (
            " `--resume_from_checkpoint last` continues from the last checkpoint, if there is one."
            if _has_begun(error)
            else ""
        )
        if os.environ.get("RANK", "0") == "0":
            print(f"{program}: stopped by Ctrl-C.{resume}", file=sys.stderr)
        return 130
    except BrokenPipeError as error:  # whoever reads (`| head`) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains when it flushes
        if _has_begun(error):
            stopped = "training has stopped, because whoever read its output has ended"
            print(
                f"{program}: {stopped}. `--resume_from_checkpoint last` goes on from the last checkpoint.",
                file=sys.stderr,
            )
        return 1
    except OSError as error:
        # None: an answer of the Hub. In a run the path may be one of a reward function's.
        if _has_begun(error) or error.errno not in {None} | NO_ROOM | NO_RIGHTS | WRONG_PATHS:
            raise
        remedy = "What has been written is kept. Make room or give the rights and run the same command again."
        refuses = error.errno in NO_ROOM | NO_RIGHTS
        what = f"this machine refuses: {error}. {remedy}" if refuses else f"{str(error).rstrip('.')}."
        print(f"{program}: {what}", file=sys.stderr)
        return 2
    return status if isinstance(status, int) else 0


def _open_streams() -> None:
    """No line ends a run, wherever it goes: to a closed descriptor, or in an encoding that lacks one of its
    characters."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))
        elif isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _quiet_libraries() -> None:
    """Before they are imported: no progress bars into a pipe or a file, and no warnings that are known to be
    harmless."""
    if not sys.stderr.isatty():
        for name in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
            os.environ.setdefault(name, "1")
    if os.environ.get("RANK", "0") != "0":
        logging.getLogger("pacs_trl.data").setLevel(logging.ERROR)  # all processes read the same data
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in str(record.msg))


def _is_of_a_run(error: Exception) -> bool:
    """Whether training had begun and code of others raised it, a reward function's or a library's: then it is no
    advice."""
    *_, (last, _) = traceback.walk_tb(error.__traceback__)
    return _has_begun(error) and not last.f_globals.get("__name__", "").startswith("pacs_trl.")


def _is_of_transformers(error: Exception) -> bool:
    """Whether transformers or TRL raised it: that a package is missing, or that they do not support a combination."""
    *_, (last, _) = traceback.walk_tb(error.__traceback__)
    return last.f_globals.get("__name__", "").startswith(("transformers.", "trl."))


def _has_begun(error: BaseException) -> bool:
    return any(frame.f_code.co_name == "_inner_training_loop" for frame, _ in traceback.walk_tb(error.__traceback__))


class Parser(argparse.ArgumentParser):
    """The parser of `pacs-trl NAME`; options are declared with underscores."""

    def __init__(self, name: str, description: str, **kwargs: Any):
        super().__init__(**{"prog": f"pacs-trl {name}", "description": description, "allow_abbrev": False, **kwargs})

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


# What settings are called elsewhere, where no part of the name leads to ours.
_ELSEWHERE = {
    "lr": "learning_rate",
    "batch_size": "per_device_train_batch_size",
    **dict.fromkeys(("lora", "use_lora", "peft"), "use_peft"),
    **dict.fromkeys(("max_new_tokens", "max_tokens"), "max_completion_length"),
    **dict.fromkeys(("group_size", "num_samples"), "num_generations"),
    "vllm": "use_vllm",
    "wandb": "report_to",
}


def did_you_mean(name: str, known: Collection[str]) -> str:
    """The question for the nearest name, or those that begin alike, with a space before it; empty if none is near."""
    if _ELSEWHERE.get(name) in known:
        return f" Did you mean `{_ELSEWHERE[name]}`?"
    begin = [other for other in known if f"{other}_".startswith(f"{name}_") or f"{name}_".startswith(f"{other}_")]
    nearest = (
        difflib.get_close_matches(name, known, n=1, cutoff=0.85)
        or sorted(begin)[:3]
        or sorted(other for other in known if f"_{name}_" in f"_{other}_")[:4]
        or difflib.get_close_matches(name, known, n=1)
    )
    return f" Did you mean {' or '.join(f'`{other}`' for other in nearest)}?" if nearest else ""


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
            near = f" Did you mean `--config {word}`?" if word.endswith((".yaml", ".yml")) else ""
            raise ValueError(f"Cannot make sense of {word!r}: settings are given as --key value.{near}")
        else:
            words[key].append(word)
    return words


# A key that every recipe of a command has, and those of others have not.
RECIPE_OF = {"train": "dataset_name", "evaluate": "benchmarks"}


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
    if path and "distributed_type" in settings:
        raise ValueError(
            f"{path[0]} is a file of accelerate, and no recipe: `accelerate launch --config_file` takes it, and "
            "`plan` as --accelerate-config."
        )
    for command, key in RECIPE_OF.items():
        if path and key in settings and key not in known:
            raise ValueError(
                f"{path[0]} is a recipe of `pacs-trl {command}` (it has the key `{key}`), not of this command."
            )
    for key, values in words.items():
        if key not in known and key.removeprefix("no_") in known:  # booleans that default to True have both
            settings[key.removeprefix("no_")] = False
        else:
            settings[key] = from_words(key, values, known[key]) if key in known else values
    return settings


def environment_errors(settings: Mapping[str, Any]) -> list[str]:
    """What is wrong with the key `env`, environment variables that a file may set."""
    env = settings.get("env") or {}
    return [] if isinstance(env, dict) else [f"env must be a mapping of environment variables, got {env!r}."]
