"""`pacs-trl plan` validates a recipe and estimates memory and time; here its options, which need no library."""

from argparse import Namespace
from collections.abc import Sequence

from ..settings import Parser
from .cost import GPUS


def read_plan_arguments(argv: Sequence[str]) -> Namespace:
    """
    Read the options of `plan`. Returns them, and as `overrides` the words of the keys that win over the recipe's.

    Raises:
        `SystemExit`: with code 0 after the help, with 2 if an option has a wrong value.
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
    own.overrides = overrides
    return own
