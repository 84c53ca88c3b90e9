"""The options of `pacs-trl plan`, without any library."""

from collections.abc import Sequence
from typing import NamedTuple

from ..settings.command_line import Parser, did_you_mean, words_by_key
from ..train_settings import METHODS, settings_of_method


class PlanArguments(NamedTuple):
    """The recipe's file, keys that win over it as words of a command line, and what is said of the launch."""

    config: str
    overrides: list[str]
    accelerate_config: str | None
    num_processes: int | None
    mean_length: int | None


def read_plan_arguments(argv: Sequence[str]) -> PlanArguments:
    """
    Raises:
        `SystemExit`: with code 0 after the help, with 2 if an option has a wrong value.
        `ValueError`: if an option is neither plan's nor a setting of any method.
    """
    parser = Parser(
        "plan",
        "What a recipe will do, what it needs and what is wrong with it. Needs no GPU. Exit status 1: it has conflicts.",
        epilog="Any key of the recipe may follow as --key value; `pacs-trl train --help` lists them.",
    )
    parser.add_argument("--config", required=True, metavar="RECIPE.yaml", help="recipe of `pacs-trl train`")
    parser.add_argument("--accelerate_config", help="the file that `accelerate launch --config_file` gets")
    parser.add_argument("--num_processes", type=int, help="number of GPUs; by default that of the accelerate file")
    parser.add_argument("--mean_length", type=int, help="expected tokens per completion; by default 35 %% of most")
    own, overrides = parser.parse_known_args(argv)
    words = words_by_key(overrides)
    known = {key for method in METHODS for key in settings_of_method(method)}
    for key in words:
        if key.removeprefix("no_") not in known:
            near = did_you_mean(key, known | vars(own).keys())
            raise ValueError(f"`{key}` is neither an option of plan nor a setting of a recipe.{near}")
    return PlanArguments(overrides=overrides, **vars(own))
