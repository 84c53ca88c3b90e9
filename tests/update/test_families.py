"""docs/compatibility.md says of thirty families how their completions are computed."""

import importlib.metadata

import families
import pytest


FAILS = {"llama4"} if importlib.metadata.version("transformers") > "5.18" else set()  # in transformers 5.24 itself


def test_page_has_every_family_once():
    names = [family["model_type"] for family in families.FAMILIES]
    assert len(names) == len(set(names)) == 30
    assert [line.split("`")[1] for line in families.documented().splitlines()[2:]] == names


@pytest.mark.parametrize(
    "name", [*("gemma3", "qwen2_5_vl"), pytest.param("all", marks=pytest.mark.slow, id="every family")]
)
def test_page_is_what_tiny_models_do(name):
    documented = families.documented().splitlines()[2:]
    for family, line in zip(families.FAMILIES, documented, strict=True):
        if name in (family["model_type"], "all") and family["model_type"] not in FAILS:
            assert families.row(family) == line, "run `python tests/families.py`"
