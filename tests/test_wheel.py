"""The commands of an installed wheel, far from the repository: nothing of them may need files that only lie there."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from optional_packages import needs


ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes/miniature/pacs.yaml"
SMALL = "--model_name_or_path model --num_generations 4 --per_device_train_batch_size 8 --max_completion_length 8"
EVALUATION = "--benchmarks miniature/addition --max_problems 2 --n 2 --k 1 --max_new_tokens 8 --engine transformers"
COMMANDS = [
    f"plan --config recipe.yaml {SMALL}",
    f"train --config recipe.yaml {SMALL} --max_steps 1 --output_dir outputs/run --disable_tqdm true",
    f"evaluate --model outputs/run --output_dir outputs/evaluation {EVALUATION}",
    "audit --completions saved.json --protocols authors",
    "report outputs/evaluation/results.json --output_dir outputs/report",
    "push --model outputs/run --repo user/name --results outputs/evaluation/results.json --dry_run",
]
# All commands in one process: loading the libraries takes longer than they do.
SCRIPT = f"""\
import sys
from pacs_trl import cli
from pacs_trl.miniature.model import build_model
from pacs_trl.miniature.tokenizer import build_tokenizer

tokenizer = build_tokenizer()
tokenizer.save_pretrained("model")
build_model(tokenizer, "tiny").save_pretrained("model")
print("from", cli.__file__)
for command in {COMMANDS!r}:
    sys.argv = ["pacs-trl", *command.split()]
    print("status", command.split()[0], cli.main(), flush=True)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder of a wheel built from a copy of the sources (a build writes beside them) and installed, without a
    network."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "pacs_trl", source / "pacs_trl", ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    offline = ["--quiet", "--no-deps", "--no-index"]
    subprocess.run(
        [*pip, "wheel", *offline, "--no-build-isolation", "--wheel-dir", source / "dist", source], check=True
    )
    (wheel,) = (source / "dist").glob("*.whl")
    subprocess.run([*pip, "install", *offline, "--no-compile", "--target", target, wheel], check=True)
    return target


@pytest.mark.slow
@needs("matplotlib")
def test_every_command_works_elsewhere(installed, tmp_path):
    shutil.copy(RECIPE, tmp_path / "recipe.yaml")
    (tmp_path / "saved.json").write_text('[{"completion": "1", "solution": "2"}]')
    environment = os.environ | {"PYTHONPATH": str(installed)}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert f"from {installed / 'pacs_trl' / 'cli.py'}" in lines
    statuses = {line.split()[1]: line.split()[2] for line in lines if line.startswith("status ")}
    assert statuses == dict.fromkeys((c.split()[0] for c in COMMANDS), "0"), result.stderr
    assert not [line for line in result.stderr.splitlines() if line.startswith("pacs-trl ")]
    card = (tmp_path / "outputs/run/README.md").read_text()
    assert "2509.02522" in card and "Traceback" not in result.stderr
    results = json.loads((tmp_path / "outputs/evaluation/results.json").read_text())
    assert results["commit"] is None and results["versions"]["pacs_trl"] == "0.1.0"


def test_the_wheel_holds_the_package_and_nothing_beside_it(installed):
    assert {path.name for path in installed.iterdir()} - {"bin"} == {"pacs_trl", "pacs_trl-0.1.0.dist-info"}
    tracked = {p.relative_to(ROOT) for p in (ROOT / "pacs_trl").rglob("*") if p.is_file() and p.suffix != ".pyc"}
    assert {path.relative_to(installed) for path in (installed / "pacs_trl").rglob("*") if path.is_file()} == tracked
    assert "pacs-trl = pacs_trl.cli:main" in (installed / "pacs_trl-0.1.0.dist-info" / "entry_points.txt").read_text()
