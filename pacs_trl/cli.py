"""Command line `pacs-trl COMMAND ...`, which runs the `main` of a module per command.

Wrong options and keys are found before libraries are imported. Exit codes are in `errors.py`.
"""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any

from .errors import UserError, exit_code
from .methods import check_evaluation_keys, check_recipe_keys
from .plan import read_plan_arguments
from .settings import did_you_mean, read_settings
from .settings.connection import work_offline_without_connection
from .settings.help import answer_help


COMMANDS = {
    "recipes": ("pacs_trl.recipe_files", "list the recipes of this installation, and copy them"),
    "plan": ("pacs_trl.plan.check", "validate a recipe, and estimate its memory and time, without a GPU"),
    "train": (
        "pacs_trl.train",
        "train from a recipe on one process (on several: accelerate launch -m pacs_trl.train)",
    ),
    "evaluate": ("pacs_trl.evaluation.run", "sample, grade, and compute pass@k of a model on benchmarks"),
    "audit": ("pacs_trl.evaluation.audit", "grade a file of completions with several protocols and compare them"),
    "report": ("pacs_trl.report.report", "create tables and figures from results files"),
    "push": ("pacs_trl.hub", "upload checkpoint, model card, recipe, and results to the Hub"),
}


def main() -> int:
    """Run the command of `sys.argv` and return its exit code."""
    name, *argv = sys.argv[1:] or ["--help"]
    return run(name, argv) if name in COMMANDS else exit_code("pacs-trl", _without_command, [name])


def run(name: str, argv: Sequence[str]) -> int:
    """Run a command and return its exit code."""

    def command(argv: Sequence[str]) -> Any:
        if name in ("plan", "train", "evaluate"):  # whose import takes seconds
            settings = _checked_settings(name, argv)
            if name != "plan":  # which reads the cache alone
                work_offline_without_connection(name, settings)
            if os.environ.get("RANK", "0") == "0":
                print(f"pacs-trl {name}: loading torch, transformers, and TRL ...", file=sys.stderr, flush=True)
        return import_module(COMMANDS[name][0]).main(argv)

    return exit_code(f"pacs-trl {name}", command, argv)


def _checked_settings(name: str, argv: Sequence[str]) -> dict[str, Any]:
    """Print the help of a command if requested, and exit; otherwise return its settings. Raises a `ValueError` for
    unknown options and keys, without any library."""
    if name == "plan":
        options = read_plan_arguments(argv)
        argv = ["--config", options.config, *options.overrides]
    else:
        answer_help(name, argv)
    settings = read_settings(argv)
    if name == "evaluate":
        check_evaluation_keys(settings)
    else:
        check_recipe_keys(settings)
    return settings


def _without_command(argv: Sequence[str]) -> int:
    name = argv[0]
    if name in ("-h", "--help", "help"):
        print("usage: pacs-trl COMMAND ...\n")
        for command, (_, help_line) in COMMANDS.items():
            print(f"  {command:10} {help_line}")
        print("\n`pacs-trl COMMAND --help` lists options; `pacs-trl --version` lists installed versions.")
        return 0
    if name in ("-V", "--version"):
        libraries = ", ".join(f"{library} {version(library)}" for library in ("trl", "transformers", "torch"))
        print(f"pacs-trl {version('pacs_trl')} ({libraries})")
        return 0
    near = did_you_mean(name, [*COMMANDS, "--help", "--version"])
    raise UserError(f"There is no command {name!r}.{near} Choose from {', '.join(COMMANDS)}.")


if __name__ == "__main__":
    sys.exit(main())
