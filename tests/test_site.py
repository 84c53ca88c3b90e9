"""The documentation site: pages that follow from the code, navigation, docstrings, links, a build without warnings."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.optional_packages import needs

import pacs_trl


ROOT = Path(__file__).parents[1]


def module(name: str):
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / f"docs/{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


site_pages, check_links = module("site_pages"), module("check_links")


def test_the_api_has_every_exported_name():
    names = re.findall(r"^\.\. auto\w+:: pacs_trl\.(\w+)", site_pages.api_page(), re.MULTILINE)
    assert sorted(names) == sorted(name for name in pacs_trl.__all__ if not name.startswith("__"))


def test_recipes_are_listed_with_the_first_sentence_of_their_comment():
    page = site_pages.recipes_page(ROOT)
    assert len(re.findall(r"^\| \[", page, re.MULTILINE)) > 30
    (row,) = re.findall(r"^\| \[sums\].*$", page, re.MULTILINE)
    assert "recipes/smollm2-135m/sums.yaml" in row and "`outputs/models/SmolLM2-135M-Instruct`" in row
    assert site_pages.first_sentence("# PACS on sums of\n# v1.5 numbers. Hardware: one core.\nmethod: pacs") == (
        "PACS on sums of v1.5 numbers"
    )


def test_the_page_on_metrics_is_that_of_its_data():
    assert (ROOT / "docs/metrics.md").read_text() == site_pages.metrics_page(ROOT), (
        "edit docs/metrics.yaml and run `make settings`"
    )


def test_every_page_is_in_the_navigation():
    source = [(ROOT / "docs/index.md").read_text()]
    site_pages.add_navigation(None, "docs/index", source)
    contents = "\n".join(re.findall(r"```{toctree}(.*?)```", source[0], re.DOTALL)).splitlines()
    pages = [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/tutorials/*.md"), *ROOT.glob("notebooks/*.ipynb")]
    names = {os.path.relpath(page.with_suffix(""), ROOT / "docs") for page in pages}
    assert names - {"index"} <= set(contents)
    assert {":caption: Tutorials", "generated/api", "results/README"} <= set(contents)
    assert "\n## Train\n" in source[0] and "](images/pretrained.png)" in source[0] and "](speed.md)" in source[0]


def test_a_docstring_in_markdown_becomes_restructured_text():
    lines = [
        "Takes `a_b` as [`~trl.GRPOTrainer`], |x|, or",
        "[a paper](https://x.org/a_b); *optional*.",
        "",
        "```python",
    ]
    lines += ["f(*x)  # `code`", "```", "", "y * z_"]
    site_pages.docstring_to_rst(None, "", "", None, None, lines)
    assert lines == [
        r"Takes ``a_b`` as ``trl.GRPOTrainer``, \|x\|, or",
        "`a paper <https://x.org/a_b>`__; *optional*.",
        "",
        ".. code-block:: python",
        "",
        "   f(*x)  # `code`",
        "",
        "",
        r"y \* z\_",
    ]


def test_broken_links_are_named(tmp_path):
    (tmp_path / "b.html").write_text('<h1 id="here">')
    (tmp_path / "a.html").write_text(
        '<a href="b.html#here"><a href="b.html#there"><img src="c.png"><a href="https://x.org"><a href="#top">'
    )
    assert check_links.broken_links(tmp_path) == ["a.html: #top", "a.html: b.html#there", "a.html: c.png"]


@pytest.mark.slow
@needs("sphinx")
def test_the_site_is_built_without_warnings(tmp_path):
    """Two versions side by side: each is in versions.json, and the first page leads to the newest build."""
    (tmp_path / "0.0.1/docs").mkdir(parents=True)
    (tmp_path / "0.0.1/docs/index.html").write_text("")
    command = [sys.executable, "docs/build.py", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    version = pacs_trl.__version__
    assert (tmp_path / "versions.json").read_text() == f'["{version}", "0.0.1"]\n'
    assert f"url={version}/docs/index.html" in (tmp_path / "index.html").read_text()
    api = (tmp_path / version / "docs/generated/api.html").read_text()
    assert 'id="pacs_trl.PACSTrainer"' in api and (tmp_path / version / "searchindex.js").is_file()
