"""Names of settings from the source of their dataclasses."""

import textwrap
from dataclasses import fields

import pytest

from pacs_trl import methods
from pacs_trl.methods import method_names
from pacs_trl.recipe import settings_classes
from pacs_trl.settings.declared_names import Declaration, declared_names


@pytest.mark.parametrize("method", method_names())
def test_names_are_those_of_the_classes_of_a_recipe(method):
    exact = {field.name for part in settings_classes(method) for field in fields(part)}
    names = methods._names(*methods._EVERY_RECIPE, methods._config(method))
    assert names - {"activation_checkpointing"} == exact - {"activation_checkpointing"}  # of newer transformers


def test_fields_of_bases_in_other_modules_and_under_conditions_are_declared(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    sources = {
        "declaring/__init__.py": "@dataclass\nclass Base:\n    a: int\n    fixed: ClassVar[int] = 1",
        "declaring/part.py": """
            from . import Base
            from .other import Moved

            class Attributes:  # no dataclass
                attribute: int = 1

            @dataclass(kw_only=True)
            class Config(Attributes, Base):
                if True:
                    b: int = 1

                def method(self):
                    local: int = 1

            class Unknown(Moved):
                c: int

            class Computed(make_base()):
                d: int
            """,
    }
    for name, source in sources.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(source))
    assert declared_names(Declaration("declaring.part", "Config")) == {"a", "b"}
    assert declared_names(Declaration("declaring.part", "Unknown")) is None
    assert declared_names(Declaration("declaring.part", "Computed")) is None
    assert declared_names(Declaration("no_such_package", "Config")) is None


def test_keys_are_not_refused_where_a_library_has_moved_its_configuration(monkeypatch):
    moved = Declaration("trl.moved", "GRPOConfig")
    monkeypatch.setitem(methods.declared_names.__globals__["_EXPORTED"], Declaration("trl", "GRPOConfig"), moved)
    methods.check_recipe_keys({"method": "pacs", "key_of_a_later_version": 1})
