"""`pacs-trl plan` validates a recipe and estimates memory and time; here its options, which need no library."""

from argparse import Namespace
from collections.abc import Collection, Sequence

from ..settings.command_line import Parser, did_you_mean, words_by_key
from .cost import GPUS


def read_plan_arguments(argv: Sequence[str], known: Collection[str] | None = None) -> Namespace:
    """
    Read the options of `plan`; `known` are the settings of all methods, once the libraries that define them are
    imported. Returns the options, and as `overrides` the words of the keys that win over the recipe's.

    Raises:
        `SystemExit`: with code 0 after the help, with 2 if an option has a wrong value.
        `ValueError`: if an option is neither plan's nor in `known`.
    """
    parser = Parser(
        "plan",
        "Validate a recipe and estimate memory and time. Needs no GPU. Exit status 1: it has conflicts.",
        epilog="Any key of the recipe may follow as --key value; `pacs-trl train --help` lists them.",
    )
    parser.add_argument("--config", required=True, metavar="RECIPE.yaml", help="recipe of `pacs-trl train`")
    parser.add_argument("--accelerate_config", help="the file that `accelerate launch --config_file` gets")
    parser.add_argument("--num_processes", type=int, help="number of GPUs; by default that of the accelerate file")
    parser.add_argument("--mean_length", type=int, help="expected tokens per completion; by default 35 %% of most")
    parser.add_argument("--gpu", type=str.lower, choices=GPUS, default="h200", help="the card; by default h200")
    own, overrides = parser.parse_known_args(argv)
    for key in words_by_key(overrides):
        if known is not None and key.removeprefix("no_") not in known:
            near = did_you_mean(key, {*known, *vars(own)})
            raise ValueError(f"`{key}` is neither an option of plan nor a setting of a recipe.{near}")
    own.overrides = overrides
    return own
