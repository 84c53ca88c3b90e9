"""Options of `pacs-trl plan`, which validates a recipe and estimates memory and time; needs no library."""

from argparse import Namespace
from collections.abc import Sequence

from ..settings import Parser
from .cost import GPUS


def read_plan_arguments(argv: Sequence[str]) -> Namespace:
    """Read the options of `plan`; their attribute `overrides` has the words that override keys of the recipe."""
    parser = Parser(
        "plan",
        "Validate a recipe and estimate memory and time, without a GPU. The exit status is 1 if there are conflicts.",
        epilog="Keys of the recipe can be overridden with --key value; `pacs-trl train --help` lists them.",
    )
    parser.add_argument("--config", required=True, metavar="RECIPE.yaml", help="recipe of `pacs-trl train`")
    parser.add_argument("--accelerate_config", help="file for `accelerate launch --config_file`")
    parser.add_argument("--num_processes", type=int, help="number of GPUs (default: that of the accelerate file)")
    parser.add_argument("--mean_length", type=int, help="expected tokens per completion (default: 35 %% of the limit)")
    parser.add_argument("--gpu", type=str.lower, choices=GPUS, default="h200", help="GPU (default: h200)")
    parser.add_argument("--resume", metavar="CHECKPOINT", help="print the batch sizes with which a run continues it")
    parser.add_argument("--nodes", type=int, metavar="N", help="print the commands that launch the recipe on N nodes")
    options, overrides = parser.parse_known_args(argv)
    options.overrides = overrides
    return options
