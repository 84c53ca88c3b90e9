"""Settings declare their default, help, and legal values once."""

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

import pytest
import trl
from transformers import HfArgumentParser
from trl import TrlParser

from pacs_trl import GRPOConfig, RLOOConfig
from pacs_trl.errors import UserError
from pacs_trl.evaluation.arguments import EvaluationArguments
from pacs_trl.methods import method_names
from pacs_trl.recipe import config_class, settings_classes
from pacs_trl.settings import NAMES_ELSEWHERE, read_settings, typed_values
from pacs_trl.settings.checks import illegal_values
from pacs_trl.settings.fields import Range, setting, switch
from pacs_trl.settings.help import (
    DEFAULT_METHOD,
    PAGE,
    TRAIN_HELP,
    declared_settings,
    legal_values,
    reference_page,
    train_help,
)


@dataclass
class Base:
    size: int | None = setting(None, "Number of rows.", least=1)
    kind: Literal["a", "b"] = setting("a", "Which one.")


@dataclass
class Derived(Base):
    share: float = setting(0.5, "Fraction of rows.", above=0, most=1)
    name: str | None = setting(None, "What it is called.", choices=["x", "y"])
    kind: Literal["a", "b"] = setting("b", "Which one, here.")


@pytest.mark.parametrize(
    ("legal", "inside", "outside"),
    [
        (Range(least=1), [1, 2.5], [0, 0.999]),
        (Range(above=0), [1e-300, 7], [0, -1]),
        (Range(above=0, most=1), [0.1, 1], [0, 1.0000001]),
        (Range(least=-1, below=2), [-1, 1.999], [-1.5, 2]),
    ],
)
def test_a_range_contains_its_values_and_no_others(legal, inside, outside):
    assert all(value in legal for value in inside)
    assert not any(value in legal for value in (*outside, math.nan, math.inf, -math.inf))


def test_a_range_is_printed_in_words():
    assert str(Range(above=0, most=0.5)) == "above 0 and at most 0.5"
    assert str(Range(least=1, below=2)) == "at least 1 and below 2"


def test_illegal_values_name_value_range_and_default():
    assert illegal_values(Derived(size=0, share=2.0, name="z", kind="c")) == [
        "size must be at least 1, got 0. Its default is None.",
        "kind must be one of a, b; got 'c'.",
        "share must be above 0 and at most 1, got 2.0. Its default is 0.5.",
        "name must be one of x, y; got 'z'.",
    ]
    assert illegal_values(Derived(size=None, name="y")) == []
    assert illegal_values(Derived(share=None)) == [
        "share must be above 0 and at most 1, got None. Its default is 0.5."
    ]


def test_numbers_are_no_booleans():
    @dataclass
    class Switch:
        switch: bool | str = setting("auto", "Whether to.", choices=["auto", True, False])

    assert [illegal_values(Switch(value)) for value in (True, False, "auto")] == [[], [], []]
    for number in (0, 1, 1.0):
        assert illegal_values(Switch(number)) == [f"switch must be one of auto, True, False; got {number!r}."]


def test_text_and_fractions_are_no_numbers():
    assert illegal_values(Derived(size=1.5, share="0.5")) == [
        "size must be an integer, got 1.5. Its default is None.",
        "share must be a number, got '0.5'. Its default is 0.5.",
    ]


def test_settings_belong_to_the_class_that_declares_them_last():
    sections = {part: [each.name for each in declared] for part, declared in declared_settings(Derived).items()}
    assert sections == {Derived: ["share", "name", "kind"], Base: ["size"]}


def test_legal_values_are_written_in_words():
    words = {each.name: legal_values(Derived, each) for each in fields(Derived)}
    assert words == {
        "size": "int, at least 1, default None",
        "kind": "'a' | 'b', default 'b'",
        "share": "float, above 0 and at most 1, default 0.5",
        "name": "'x' | 'y', default None",
    }


@dataclass
class Switched:
    speed: Literal[True, False, "auto"] = switch("auto", "Whether to.")
    memory_use: Literal["auto", True, False] | None = switch(None, "Whether to save it.")


WORDS = {
    (): "auto",
    ("--speed",): True,
    ("--speed", "true"): True,
    ("--speed=Yes",): True,
    ("--speed", "1"): True,
    ("--speed", "FALSE"): False,
    ("--speed", "0"): False,
    ("--no_speed",): False,
    ("--no-speed",): False,
    ("--speed", "Auto"): "auto",
}


@pytest.mark.parametrize(("words", "value"), WORDS.items(), ids=map(" ".join, WORDS))
def test_switches_are_written_as_booleans_or_auto(words, value, tmp_path):
    (parsed,) = TrlParser(Switched).parse_args_and_config(words)
    assert parsed == Switched(value) and type(parsed.speed) is type(value)
    assert replace(parsed, memory_use=True) == Switched(value, True)
    assert asdict(parsed) == {"speed": value, "memory_use": None}
    assert typed_values(read_settings(words), [Switched], "tests") == {"speed": value, "memory_use": None}


def test_switches_are_written_in_yaml_too(tmp_path):
    path = tmp_path / "recipe.yaml"
    for written, value in {"true": True, "no": False, "auto": "auto", '"False"': False, "AUTO": "auto"}.items():
        path.write_text(f"speed: {written}\nmemory_use: {written}\n")
        words = ["--config", str(path)]
        assert TrlParser(Switched).parse_args_and_config(words) == (Switched(value, value),)
        assert typed_values(read_settings(words), [Switched], "tests") == asdict(Switched(value, value))
        assert TrlParser(Switched).parse_args_and_config([*words, "--no-memory-use"])[0].memory_use is False


@pytest.mark.parametrize("words", [["--speed", "fast"], ["--no_speed", "auto"]], ids=" ".join)
def test_other_words_are_no_values_of_switches(words, capsys):
    with pytest.raises(SystemExit):
        TrlParser(Switched).parse_args_and_config(words)
    assert "argument --speed" in capsys.readouterr().err


def test_an_error_names_a_switch_once():
    with pytest.raises(UserError, match="^`memory_use`: invalid choice: 'fast'"):
        typed_values({"memory_use": "fast"}, [Switched], "tests")


@pytest.mark.parametrize(("ours", "trls"), [(GRPOConfig, trl.GRPOConfig), (RLOOConfig, trl.RLOOConfig)])
def test_command_lines_of_trl_set_the_same_values(ours, trls):
    """Each option of TRL's configuration, in each form that TRL's parser accepts."""
    parser, expected = TrlParser(ours), TrlParser(trls)
    for action in expected._actions:
        lines = [[option] for option in action.option_strings]
        lines += [[action.option_strings[0], word] for word in ("true", "False", "1", "none", "0.5", "group", "{}")]
        for line in lines:
            try:
                value = vars(expected.parse_args(line))[action.dest]
            except (SystemExit, KeyError):  # a word that is no value, and --help
                continue
            if line == ["--num_generations", "none"]:  # refused by either when it trains
                continue
            if line[0] == "--scale_rewards" and value not in ("group", "none"):  # refused by TRL when it trains
                continue
            assert vars(_parse(parser, line))[action.dest] == value, line


def _parse(parser: TrlParser, words: list[str]) -> Any:
    """Parse a command line without ending the process; unlike TRL's, some settings have choices."""
    for action in parser._actions:
        if action.dest in ("loss_type", "importance_sampling_level"):
            action.choices = None
    return parser.parse_args(words)


@pytest.mark.parametrize("parser", [TrlParser, HfArgumentParser])
def test_parsers_of_trl_and_transformers_print_help_and_range(parser):
    text = " ".join(parser(Derived, prog="x").format_help().split())
    assert "--share above 0 and at most 1 Fraction of rows. (default: 0.5)" in text


ALL = {part for method in method_names() for part in settings_classes(method)} | {EvaluationArguments}


@pytest.mark.parametrize("part", sorted(ALL, key=lambda part: part.__name__), ids=lambda part: part.__name__)
def test_every_setting_of_ours_has_a_help_that_is_a_sentence(part):
    for settings in declared_settings(part).values():
        for each in settings:
            assert each.metadata["help"].endswith((".", ")")), each.name
    HfArgumentParser(part).format_help()  # raises where argparse would read a percent sign


def test_names_of_other_libraries_stand_for_settings_and_are_none_beside_them():
    parts = [{each.name for part in settings_classes(method) for each in fields(part)} for method in method_names()]
    for ours, names in NAMES_ELSEWHERE.items():
        holders = [known for known in (*parts, {each.name for each in fields(EvaluationArguments)}) if ours in known]
        assert holders, ours
        assert not [name for name in names for known in holders if name in known], ours


def test_page_of_settings_is_up_to_date():
    assert PAGE.read_text() == reference_page(), "run `make settings`"


def test_file_with_the_help_of_training_is_up_to_date():
    assert TRAIN_HELP.read_text() == train_help(DEFAULT_METHOD), "run `make settings`"


def test_page_has_the_settings_of_every_method():
    text = PAGE.read_text()
    for method in method_names():
        for settings in declared_settings(config_class(method)).values():
            assert all(f"- `{each.name}` (" in text for each in settings)
