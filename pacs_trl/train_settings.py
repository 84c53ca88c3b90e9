"""Every setting of `pacs-trl train`, as a table: the help of a command and most of a user's mistakes need no library.

`train_settings.json` is made from the dataclasses by `python -m pacs_trl.train_settings`. It is read where the versions of TRL
and transformers are those that it was made with; elsewhere the dataclasses are asked, which takes seconds.
"""

import json
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .settings import Setting
from .settings.command_line import Parser, asks_for_help, read_settings, words_by_key
from .settings.keys import add_settings, described, values_and_errors
from .settings.ranges import RANGES


FILE = Path(__file__).with_suffix(".json")
VERSIONS_OF = ("trl", "transformers")
METHODS = ("pacs", "grpo", "ppo", "genac")

TITLES = {
    "run": "what is run",
    "pacs": "PACS",
    "ppo": "PPO",
    "genac": "GenAC",
    "critic": "PPO and GenAC: critic, advantage, clipped loss",
    "data": "data",
    "verification": "verification",
    "model": "model (from TRL)",
    "trl": "inherited from TRL: rollouts, rewards, vLLM, the loss of GRPO",
    "transformers": "inherited from transformers: optimizer, schedule, logging, checkpoints, Hub",
}


def made() -> dict[str, Any]:
    """The table by the dataclasses: settings by group and name; of a name in two groups of a method the first counts."""
    from transformers import TrainingArguments
    from trl import GRPOConfig, ModelConfig

    from .baselines.actor_critic_config import ActorCriticConfig
    from .baselines.genac_config import GenACConfig
    from .baselines.ppo_config import PPOConfig
    from .data import DataArguments
    from .pacs_config import PACSConfig
    from .recipe import RunArguments
    from .verification import VerificationArguments

    of_transformers = [f.name for f in fields(TrainingArguments)]
    groups: dict[str, tuple[type, Sequence[str] | None]] = {
        "run": (RunArguments, None),
        "pacs": (PACSConfig, list(PACSConfig.__annotations__)),
        "ppo": (PPOConfig, list(PPOConfig.__annotations__)),
        "genac": (GenACConfig, list(GenACConfig.__annotations__)),
        "critic": (ActorCriticConfig, list(ActorCriticConfig.__annotations__)),
        "data": (DataArguments, None),
        "verification": (VerificationArguments, None),
        "model": (ModelConfig, None),
        "trl": (GRPOConfig, [f.name for f in fields(GRPOConfig) if f.name not in of_transformers]),
        "transformers": (GRPOConfig, of_transformers),
    }
    return {
        "versions": {name: version(name) for name in VERSIONS_OF},
        "groups": {group: described(part, names) for group, (part, names) in groups.items()},
    }


@cache
def table() -> dict[str, Any]:
    """The table for the libraries that are installed."""
    content = json.loads(FILE.read_text(encoding="utf-8"))
    return content if content["versions"] == {name: version(name) for name in VERSIONS_OF} else made()


def groups_of(method: str) -> dict[str, dict[str, dict[str, Any]]]:
    """The settings of a method by group."""
    others = {"pacs", "ppo", "genac"} - {method} | ({"critic"} if method in ("pacs", "grpo") else set())
    groups, seen = {}, set()
    for group, settings in table()["groups"].items():
        if group not in others:
            groups[group] = {name: entry for name, entry in settings.items() if name not in seen}
            seen |= settings.keys()
    return groups


@cache
def settings_of_method(method: str | None) -> dict[str, Setting]:
    """The settings of a method, those of PACS where there is none of that name."""
    return {
        name: Setting(entry["default"], tuple(entry["choices"]), set(entry["kinds"]), entry["items"], RANGES.get(name))
        for group in groups_of(method if method in METHODS else "pacs").values()
        for name, entry in group.items()
    }


def check_train(argv: Sequence[str]) -> None:
    """
    The help of `pacs-trl train` where it is asked for, and everything that the table can say against its arguments.

    Raises:
        `SystemExit`: with code 0, after the help.
        `ValueError`: with every mistake.
    """
    if asks_for_help(argv):
        words = words_by_key([word for word in argv if word not in ("-h", "--help")])
        method = (words.get("method") or ["pacs"])[0]
        train_parser(method if method in METHODS else "pacs").parse_args(["--help"])
    settings = read_settings(argv, settings_of_method)
    errors = values_and_errors(settings, {method: settings_of_method(method) for method in METHODS})[-1]
    if errors:
        raise ValueError(" ".join(errors))


def train_parser(method: str) -> Parser:
    """What prints the help of training with a method."""
    parser = Parser(
        "train",
        f"Train from a recipe. Its keys are those below, here of method {method}; `--method {' or '.join(METHODS)}` with "
        "--help shows those of another. The command line wins over the file. On several processes: accelerate launch -m "
        "pacs_trl.train with the same arguments.",
        usage="pacs-trl train [--config RECIPE.yaml] [--key value ...]",
    )
    parser.add_argument("--config", metavar="RECIPE.yaml", help="file of keys and values")
    for group, settings in groups_of(method).items():
        add_settings(parser.add_argument_group(TITLES[group]), settings)
    return parser


if __name__ == "__main__":
    FILE.write_text(json.dumps(made(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
