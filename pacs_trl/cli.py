"""The command line: `pacs-trl COMMAND ...`. Each command is the `main` of the module that does the work."""

import os
import sys
from importlib import import_module


COMMANDS = {
    "plan": (
        "pacs_trl.plan.check",
        "say what a recipe will do, what it needs and what is wrong with it, without a GPU",
    ),
    "train": (
        "pacs_trl.train",
        "train from a recipe, on one process (for several: accelerate launch -m pacs_trl.train)",
    ),
    "evaluate": ("pacs_trl.evaluation.evaluate", "sample, grade and count: pass@k of a model on benchmarks"),
    "audit": (
        "pacs_trl.evaluation.audit",
        "grade a file of completions with several protocols and show where they disagree",
    ),
    "reproduce": ("pacs_trl.reproduce.command", "run or resume the runs behind a table of the paper, and compare"),
    "report": ("pacs_trl.report.report", "tables and figures from results files"),
    "push": ("pacs_trl.hub.push", "upload checkpoint, model card, recipe and results to the Hub"),
}


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print("usage: pacs-trl COMMAND ...\n")
        for name, (_, help_line) in COMMANDS.items():
            print(f"  {name:10} {help_line}")
        return 0
    name = sys.argv[1]
    if name not in COMMANDS:
        print(f"pacs-trl: unknown command {name!r}; choose from {', '.join(COMMANDS)}.", file=sys.stderr)
        return 2
    try:
        status = import_module(COMMANDS[name][0]).main(sys.argv[2:])
    except ValueError as error:
        print(f"pacs-trl {name}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever reads (`| head`) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains when it flushes
        return 1
    return status if isinstance(status, int) else 0


if __name__ == "__main__":
    sys.exit(main())
