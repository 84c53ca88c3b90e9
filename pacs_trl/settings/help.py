"""Help of the commands that take settings, read from the source of the dataclasses: nothing is imported."""

import ast
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import DOCUMENTED, read_mapping
from .command_line import Parser, asks_for_help, words_by_key


_PACKAGE = Path(__file__).parents[1]

# Title, file and dataclass of each group of settings.
_VERIFICATION = ("verification", "verification/shared.py", "VerificationArguments")
_EVALUATION = (("evaluation", "evaluation/arguments.py", "EvaluationArguments"), _VERIFICATION)
_EVERY_METHOD = (
    ("run", "recipe.py", "RunArguments"),
    ("data", "data/__init__.py", "DataArguments"),
    _VERIFICATION,
)
_CRITIC = ("critic, advantage, clipped loss", "baselines/ppo_config.py", "ActorCriticConfig")
_OF_METHOD = {
    "pacs": (("PACS", "pacs_config.py", "PACSConfig"),),
    "grpo": (),
    "ppo": (("PPO", "baselines/ppo_config.py", "PPOConfig"), _CRITIC),
}


def _groups_of(method: str) -> tuple[tuple[str, str, str], ...]:
    """Return the groups of a method; of one in `pacs_trl.experimental` those of the configuration that it extends."""
    file = Path("experimental", f"{method}.py")
    if method in _OF_METHOD or not (_PACKAGE / file).is_file():
        return _OF_METHOD.get(method, _OF_METHOD["pacs"])
    source = (_PACKAGE / file).read_text(encoding="utf-8")
    ((name, base),) = re.findall(r"^class (\w+Config)\((\w+)\)", source, re.MULTILINE)
    return (method, str(file), name), *((_CRITIC,) if base == "ActorCriticConfig" else _OF_METHOD["pacs"])


_OF_THE_LIBRARIES = (
    "Every field of trl.GRPOConfig, which includes those of transformers.TrainingArguments, and of trl.ModelConfig "
    "is a setting too (learning_rate, max_steps, num_generations, use_vllm, use_peft, ...). `trl grpo --help` lists "
    "them; they are documented at https://huggingface.co/docs/trl/grpo_trainer and "
    "https://huggingface.co/docs/transformers/main_classes/trainer ."
)


def answer_train_help(argv: Sequence[str]) -> None:
    """
    Print the help of `pacs-trl train` if the arguments ask for it; otherwise check that the recipe can be read, so
    that a wrong file name does not wait for the libraries.

    Raises:
        `SystemExit`: with code 0, after the help.
        `ValueError`: if the recipe does not exist or is not a mapping.
    """
    words = words_by_key([word for word in argv if word not in ("-h", "--help")])
    if asks_for_help(argv):
        method = (words.get("method") or ["pacs"])[0]
        _train_parser(method).parse_args(["--help"])
    if words.get("config"):
        read_mapping(words["config"][0], "recipe")


def print_evaluation_help() -> None:
    """Print the help of `pacs-trl evaluate` and exit with code 0."""
    parser = Parser(
        "evaluate",
        "Sample, grade and count: pass@k of a model on benchmarks. The command line wins over the file. The same "
        "command again samples only what is missing.",
        usage="pacs-trl evaluate [--config RECIPE.yaml] --model MODEL --benchmarks NAMES --output_dir DIR "
        "[--key value ...]",
    )
    parser.add_argument("--config", metavar="RECIPE.yaml", help="file of keys and values, see recipes/evaluation")
    _add_groups(parser, _EVALUATION)
    parser.parse_args(["--help"])


def _train_parser(method: str) -> Parser:
    parser = Parser(
        "train",
        "Train from a recipe. Keys given on the command line win over the file. Below are the settings of pacs_trl "
        f"with method {method}; `--method {' or '.join(_OF_METHOD)}` with --help shows those of another method. On "
        "several processes: accelerate launch -m pacs_trl.train with the same arguments.",
        usage="pacs-trl train [--config RECIPE.yaml] [--key value ...]",
        epilog=_OF_THE_LIBRARIES,
    )
    parser.add_argument("--config", metavar="RECIPE.yaml", help="file of keys and values")
    _add_groups(parser, (*_EVERY_METHOD, *_groups_of(method)))
    return parser


def _add_groups(parser: Parser, groups: Sequence[tuple[str, str, str]]) -> None:
    """Add an option per setting; of a setting in two groups, the first counts. Options take any word: they are only
    printed."""
    seen: set[str] = set()
    for title, file, class_name in groups:
        group, settings = parser.add_argument_group(title), described(file, class_name)
        for name, entry in settings.items():
            if name not in seen:
                group.add_argument(f"--{name}", **entry)
        seen |= settings.keys()


def described(file: str, class_name: str) -> Mapping[str, dict[str, Any]]:
    """
    Type and help of the fields that a dataclass of this package declares itself, from its source.

    Args:
        file (`str`): Path below `pacs_trl`.
        class_name (`str`): Name of the dataclass, whose docstring documents every field.

    Returns:
        `dict`: `metavar` and `help` by field, in the order of the fields.
    """
    tree = ast.parse((_PACKAGE / file).read_text(encoding="utf-8"))
    node = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    texts = {name: (kind, text) for name, kind, text in DOCUMENTED.findall(ast.get_docstring(node, clean=False) or "")}
    found = {}
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            kind, text = texts[field.target.id]
            text = f"{' '.join(text.split())}{_default(field.value)}".replace("%", "%%")
            found[field.target.id] = {"metavar": kind.split("`")[1], "help": text}
    return found


def _default(value: ast.expr | None) -> str:
    """The default of a field as a sentence; none for a required field, for `None`, and for a constant, whose name says
    nothing."""
    if value is None:
        return " Required."
    if isinstance(value, ast.Call):  # field(default=...) or field(default_factory=lambda: ...)
        given = {keyword.arg: keyword.value for keyword in value.keywords}
        factory = given.get("default_factory")
        value = factory.body if isinstance(factory, ast.Lambda) else given["default"]
    text = ast.unparse(value)
    return "" if isinstance(value, ast.Name) or text in ("None", "''") else f" Default: {text}."
