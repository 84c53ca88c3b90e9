"""Exit codes of the commands, and one-line errors.

0: success. 1: a run failed, or `plan` found a conflict. 2: wrong settings, with a message that says how to fix them.
130: Ctrl-C. 143: SIGTERM.
"""

import errno
import io
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


# Errors of a full or broken disk.
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}
_READABLE = NO_ROOM | {
    None,  # a response of the Hub
    *(errno.EACCES, errno.EPERM),
    *(errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG),
}
_RESUME = "`--resume_from_checkpoint last` continues from the last checkpoint, if there is one."


class UserError(ValueError):
    """A setting, file, or call of the user is wrong; the message says what is wrong and what to do. Commands print it
    without a traceback. Any other `ValueError`, of this package or a library, is a bug and keeps its traceback."""


class FailedRun(RuntimeError):
    """A run that had started cannot continue; the message is for the user."""


class FailedElsewhere(FailedRun):
    """A run cannot continue because of another rank; `prints` says whether this one tells the user."""

    def __init__(self, message: str, *, prints: bool):
        super().__init__(message)
        self.prints = prints


@contextmanager
def without_exit(what: str) -> Iterator[None]:
    """Raise a [`FailedRun`] if a user's code inside, which `what` names, would end the process: a command that has
    done nothing would end with the exit code of success."""
    try:
        yield
    except SystemExit as error:
        raise FailedRun(
            f"{what} called sys.exit({error.code!r}), which would end the command. Raise an exception, or catch "
            "SystemExit where it comes from."
        ) from error


@contextmanager
def during_run() -> Iterator[None]:
    """Mark errors raised inside as the end of a run, for the exit code and advice of [`exit_code`]."""
    try:
        with without_exit("A callback, an environment, or other code that training calls"):
            yield
    except BaseException as error:
        error.ended_run = True  # type: ignore[attr-defined]
        raise


def exit_code(program: str, main: Callable[[Sequence[str]], Any], argv: Sequence[str]) -> int:
    """Run a command and return its exit code. Errors that the user can fix are printed in one line."""
    _open_streams()
    _quiet_libraries()
    try:
        try:
            status = main(argv)
        finally:
            sys.stdout.flush()  # raises BrokenPipeError here rather than at exit
    except KeyboardInterrupt as error:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would print a traceback
        if os.environ.get("RANK", "0") == "0":
            remedy = f" {_RESUME}" if _has_ended_run(error) else ""
            print(f"{program}: stopped by Ctrl-C.{remedy}", file=sys.stderr)
        return 130
    except BrokenPipeError as error:  # the reader has exited (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter prints an error at exit
        if _has_ended_run(error):
            print(f"{program}: training stopped because stdout was closed. {_RESUME}", file=sys.stderr)
        return 1
    except Exception as error:
        if not _is_for_the_user(error):
            raise
        if getattr(error, "prints", True):
            print(f"{program}: {error}", file=sys.stderr)
        return 1 if _has_ended_run(error) or isinstance(error, FailedRun | subprocess.CalledProcessError) else 2
    return status if isinstance(status, int) else 0


def _has_ended_run(error: BaseException) -> bool:
    """Whether an exception has ended a run that had started."""
    return getattr(error, "ended_run", False)


def _is_for_the_user(error: Exception) -> bool:
    """Whether the message is enough for the user. Bugs, and errors of a user's code and of libraries, keep their
    traceback, except for missing packages and for files and disks before a run."""
    if isinstance(error, UserError | FailedRun | subprocess.CalledProcessError):
        return True
    if _has_ended_run(error) or isinstance(error, ModuleNotFoundError):
        return False
    return isinstance(error, ImportError) or isinstance(error, OSError) and error.errno in _READABLE


def _open_streams() -> None:
    """Make printing safe for closed descriptors and for characters outside the encoding."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))
        elif isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _quiet_libraries() -> None:
    """Disable progress bars into files, and harmless warnings, before libraries are imported."""
    if not sys.stderr.isatty():
        for name in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
            os.environ.setdefault(name, "1")
    if os.environ.get("RANK", "0") != "0":
        for module in ("pacs_trl.data", "pacs_trl.recipe"):  # all processes read the same
            logging.getLogger(module).setLevel(logging.ERROR)
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in str(record.msg))
