"""The release: wheel and sdist, the recipes that they have, and the address of the repository."""

import configparser
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml
from support.optional_packages import needs

import pacs_trl
from pacs_trl import recipe_files
from pacs_trl.errors import UserError


ROOT = Path(__file__).parents[1]
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")
VERSION = SETUP["metadata"]["version"]
SHIPPED = {
    str(file.relative_to(ROOT / "recipes")): file.read_text()
    for pattern in SETUP["recipes"]["ship"].split()
    for file in sorted(ROOT.glob(f"recipes/{pattern}"))
}

sys.path.insert(0, str(ROOT / "docs"))
import address  # noqa: E402


def build(kind: str, source: Path, target: Path) -> Path:
    """Build with the backend of pyproject.toml, as pip does, but in this environment and without git."""
    target.mkdir(exist_ok=True)
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(target)!r}))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=source, env={"PATH": ""}, check=True, capture_output=True, text=True
    )
    return target / result.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """An sdist of a copy of the repository, because a build writes beside the sources."""
    source = tmp_path_factory.mktemp("source") / "pacs_trl"
    others = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "outputs", "build", "dist", "results", "tests")
    shutil.copytree(ROOT, source, ignore=others)
    return build("sdist", source, source / "dist")


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """The wheel that is built from the sdist."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return build("wheel", source, folder / "dist")


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """The interpreter of an environment that has the wheel and the packages of this one, but not the repository: a
    path in a .pth file is not searched for other .pth files, such as that of an editable installation."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python*/site-packages")
    below = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    (packages / "below.pth").write_text("\n".join(below))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", wheel], check=True)
    return python


# What macOS lacks, of modules that it has.
LINUX_ONLY = [
    *("os.sched_getaffinity", "os.sched_setaffinity", "os.memfd_create", "os.pidfd_open", "os.O_PATH"),
    *("os.posix_fadvise", "os.eventfd", "os.splice", "select.epoll", "resource.prlimit", "signal.pidfd_send_signal"),
]
WITHOUT_LINUX = """\
import os, resource, select, signal
for name in {names!r}:
    module, _, attribute = name.partition(".")
    delattr(globals()[module], attribute)
"""


@pytest.mark.slow
@needs("matplotlib")
@pytest.mark.parametrize("absent", [[], LINUX_ONLY], ids=["linux", "macos"])
def test_an_installed_wheel_trains_evaluates_and_reports(environment, tmp_path, absent):
    """`make dist-check` runs the same script where pip has installed the wheel with its requirements."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_LINUX.format(names=absent))
    others = {
        "PYTHONPATH": str(tmp_path),
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [environment, ROOT / "tests/installed.py"]
    result = subprocess.run(command, cwd=tmp_path, env=others, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"pacs_trl {VERSION} works outside the repository." in result.stdout
    assert "Traceback" not in result.stderr
    missing = subprocess.run([environment, "-c", "import experiments"], cwd=tmp_path, env=others, capture_output=True)
    assert b"ModuleNotFoundError" in missing.stderr


@pytest.mark.slow
def test_the_wheel_has_the_package_the_recipes_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = archive.read(f"pacs_trl-{VERSION}.dist-info/METADATA").decode()
        commands = archive.read(f"pacs_trl-{VERSION}.dist-info/entry_points.txt").decode()
    package = {p.relative_to(ROOT) for p in (ROOT / "pacs_trl").rglob("*") if p.is_file() and p.suffix != ".pyc"}
    assert names == {str(path) for path in package} | {f"pacs_trl/recipes/{name}" for name in SHIPPED}
    assert "pacs-trl = pacs_trl.cli:main" in commands
    assert "License-File: LICENSE" in metadata and "Description-Content-Type: text/markdown" in metadata
    description = metadata.split("\n\n", 1)[1]
    assert description.startswith("# pacs_trl") and not address.LINK.search(description)
    assert "pip install pacs-trl" in description and "In a clone" not in description


@pytest.mark.slow
def test_the_sdist_has_what_a_build_and_a_reader_need(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"setup.py", "docs/address.py", "README.md", "LICENSE", "CHANGELOG.md", "SECURITY.md"} <= names
    assert {f"recipes/{name}" for name in SHIPPED} <= names


def test_versions_agree():
    assert pacs_trl.__version__ == VERSION
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {VERSION}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("name", SHIPPED)
def test_a_recipe_of_the_wheel_needs_nothing_of_the_repository(name):
    text = SHIPPED[name]
    text = text.replace("recipes/miniature/", "")
    assert not re.search(r"experiments?\.|outputs/m|miniature/|`make|\bmake \w|docs/|README", text)
    named = {file for file in recipe_files.NAMED_FILE.findall(text) if "." in file}
    assert not [file for file in named if file not in SHIPPED]


def test_all_recipes_are_listed(capsys):
    assert recipe_files.main([]) == 0
    printed = capsys.readouterr().out
    for name in SHIPPED:
        if not name.endswith(".jsonl"):
            line = re.search(rf"^  {re.escape(name.removesuffix('.yaml'))} +(.+)$", printed, re.MULTILINE)
            assert line and 10 < len(line[1]) <= 100, name


def test_a_recipe_is_copied_with_the_files_that_it_names(tmp_path, capsys):
    assert recipe_files.main(["first_run/pacs", "--output_dir", str(tmp_path)]) == 0
    printed = capsys.readouterr().out.splitlines()
    copied = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert {"first_run/pacs.yaml", "first_run/train.jsonl", "first_run/test.jsonl"} < copied
    assert "evaluation/first_run.yaml" in copied and "accelerate_configs/ddp.yaml" not in copied
    assert sorted(printed) == sorted(str(tmp_path / name) for name in copied)
    assert (tmp_path / "first_run/pacs.yaml").read_text() == SHIPPED["first_run/pacs.yaml"]
    recipe_files.main(["recipes/first_run/pacs.yaml", "launch/torchrun.sh", "--output_dir", str(tmp_path)])
    assert (tmp_path / "launch/torchrun.sh").stat().st_mode & 0o100


def test_a_changed_copy_is_not_overwritten(tmp_path):
    copied = tmp_path / "first_run/pacs.yaml"
    copied.parent.mkdir()
    copied.write_text("mine")
    with pytest.raises(ValueError, match="pacs.yaml exists"):
        recipe_files.copy(["first_run/pacs"], tmp_path)
    assert copied.read_text() == "mine" and not (tmp_path / "evaluation").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be copied to .*/file .*Choose a folder"):
        recipe_files.copy(["first_run/pacs"], tmp_path / "file")


def test_an_unknown_recipe_is_named(tmp_path):
    with pytest.raises(ValueError, match="no recipe 'first_run/pcas'. Did you mean `first_run/pacs`"):
        recipe_files.copy(["first_run/pcas"], tmp_path)
    assert not any(tmp_path.iterdir())


README = (ROOT / "README.md").read_text()


def test_the_address_stands_in_setup_cfg_alone():
    """Until it exists there are neither badges nor a clone command nor links to Colab; then `make address` makes
    them."""
    assert address.with_regions(README, address.read_address()) == README, "run `make address`"
    if address.read_address() is None:
        for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")):
            text = path.read_text()
            assert not re.search(r"git clone|git\+|badge\.svg|shields\.io|colab\.research", text)
            assert "`URL`" not in text


def test_an_address_makes_badges_clone_command_and_links():
    text = address.with_regions(README, "https://github.com/owner/name")
    assert "actions/workflows/tests.yml/badge.svg" in text
    assert "git clone https://github.com/owner/name pacs_trl" in text
    assert "colab.research.google.com/github/owner/name/blob/main/notebooks/01_objective_by_hand.ipynb" in text
    assert address.with_regions(text, None) == address.with_regions(README, None)


def test_links_of_the_description_are_absolute_or_text():
    page = "[docs](docs/a.md#b) [web](https://a.b) [below](#c) ![plot](docs/p.png)"
    url = "https://github.com/o/n"
    absolute = address.with_absolute_links(page, url, "0.2.0")
    assert absolute == (
        f"[docs]({url}/blob/v0.2.0/docs/a.md#b) [web](https://a.b) [below](#c) ![plot]({url}/raw/v0.2.0/docs/p.png)"
    )
    assert address.with_absolute_links(page, None, "0.2.0") == "docs [web](https://a.b) [below](#c) "


WORKFLOWS = {path.name: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").glob("*.yml")}


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflows_run_targets_of_the_makefile(name):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets += [f"compat-{name}" for name in ("oldest", "newest", "bare")]
    for job in WORKFLOWS[name]["jobs"].values():
        sets = [row["set"] for row in job.get("strategy", {}).get("matrix", {}).get("include", []) if "set" in row]
        for command in [step["run"] for step in job["steps"] if "run" in step]:
            for filled in [command.replace("${{ matrix.set }}", value) for value in sets or [""]]:
                program, target, *_ = shlex.split(filled)
                assert program == "make" and target in targets, command


def test_installations_keep_the_chosen_torch():
    """The newest torchvision, for example, requires the newest torch, and pip would replace the installed one."""
    installations = re.findall(
        r"^\t\$\(BIN\)/python -m pip install (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    assert len(installations) >= 6
    for arguments in installations:
        keeps = ("$(TORCH)", "--constraint ", "--no-deps ", "--upgrade pip")
        assert any(words in arguments for words in keeps), arguments


def test_a_release_is_uploaded_from_a_tag_without_a_password():
    publish = WORKFLOWS["publish.yml"]
    assert publish[True] == {"push": {"tags": ["v*"]}}  # YAML reads `on` as true
    job = publish["jobs"]["publish"]
    assert job["permissions"] == {"id-token": "write"} and job["environment"]["name"] == "pypi"
    assert "secrets." not in (ROOT / ".github/workflows/publish.yml").read_text()
