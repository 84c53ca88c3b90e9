"""The command line: `pacs-trl COMMAND ...`. Each command is the `main` of the module that does the work.

Help is printed before any library is imported. Exit codes: see `settings/command_line.py`.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from . import __version__
from .settings.command_line import did_you_mean, exit_code


COMMANDS = {
    "plan": (
        "pacs_trl.plan.check",
        "say what a recipe will do, what it needs and what is wrong with it, without a GPU",
    ),
    "train": (
        "pacs_trl.train",
        "train from a recipe, on one process (for several: accelerate launch -m pacs_trl.train)",
    ),
    "evaluate": ("pacs_trl.evaluate", "sample, grade and count: pass@k of a model on benchmarks"),
    "audit": (
        "pacs_trl.evaluation.audit",
        "grade a file of completions with several protocols and show where they disagree",
    ),
    "report": ("pacs_trl.report.report", "tables and figures from results files"),
    "push": ("pacs_trl.hub", "upload checkpoint, model card, recipe and results to the Hub"),
}

# What answers help and wrong options of the commands whose modules take seconds to import.
EARLY = {
    "train": ("pacs_trl.settings.help", "answer_train_help"),
    "plan": ("pacs_trl.plan", "read_plan_arguments"),
}


def main() -> int:
    """Run the command that the process was started with; returns its exit code."""
    name, *argv = sys.argv[1:] or ["--help"]
    return run(name, argv) if name in COMMANDS else exit_code("pacs-trl", _front_door, [name])


def _front_door(argv: Sequence[str]) -> int:
    name = argv[0]
    if name in ("-h", "--help", "help"):
        print("usage: pacs-trl COMMAND ...\n")
        for command, (_, help_line) in COMMANDS.items():
            print(f"  {command:10} {help_line}")
        print("\n`pacs-trl COMMAND --help` says more; `pacs-trl --version` names the versions of what is installed.")
        return 0
    if name in ("-V", "--version"):
        print(f"pacs-trl {__version__} ({', '.join(map(_installed, ('trl', 'transformers', 'torch', 'vllm')))})")
        return 0
    near = did_you_mean(name, [*COMMANDS, "--help", "--version"])
    raise ValueError(f"there is no command {name!r}.{near} Choose from {', '.join(COMMANDS)}.")


def run(name: str, argv: Sequence[str]) -> int:
    """Run a command; returns its exit code."""

    def main(argv: Sequence[str]) -> Any:
        if name in EARLY:
            module, function = EARLY[name]
            getattr(import_module(module), function)(argv)
        return import_module(COMMANDS[name][0]).main(argv)

    return exit_code(f"pacs-trl {name}", main, argv)


def _installed(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"no {package}"


if __name__ == "__main__":
    sys.exit(main())
