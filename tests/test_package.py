"""Promises of the package itself: versions, imports, types, and the commands of an installed wheel, far from the
repository: nothing of them may need files that only lie there."""

import ast
import configparser
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.optional_packages import needs

import pacs_trl


ROOT = Path(__file__).parents[1]
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")


def required(section: str, option: str) -> dict[str, str]:
    """Distributions by their names, as setup.cfg spells them, with the versions that it asks for."""
    lines = SETUP[section][option].split()
    return dict(re.fullmatch(r"([\w-]+)(?:\[[\w,]+\])?(.*)", line).groups() for line in lines)


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def pinned(file: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / file).read_text().lower().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_lower_bounds_are_those_that_were_run():
    """`make compat`: the oldest set is setup.cfg, the newest lies above it, and both stand in the table of the
    docs."""
    bounds = required("options", "install_requires") | required("options.extras_require", "report")
    oldest, ours, newest = map(pinned, ("constraints-oldest.txt", "constraints.txt", "constraints-newest.txt"))
    assert oldest.keys() == newest.keys() == bounds.keys()
    for name, bound in bounds.items():
        lower = numbers(bound.removeprefix(">=").split(",")[0])
        assert numbers(oldest[name]) == lower + [0] * (len(numbers(oldest[name])) - len(lower)), name
        assert numbers(oldest[name]) <= numbers(ours[name]) <= numbers(newest[name])
    upper = {name for name, bound in bounds.items() if "<" in bound}
    assert upper == {"trl"}, "private methods of TRL alone are overridden"
    page = (ROOT / "docs" / "compatibility.md").read_text()
    for name in bounds:
        assert f"| {name} | {oldest[name]} | {ours[name]} | {newest[name]} |" in page


def test_what_is_imported_is_asked_for():
    """Nothing is used that comes by chance with another package, as httpx did with huggingface_hub before its 2.0."""
    files = [ast.parse(file.read_text()) for file in (ROOT / "pacs_trl").rglob("*.py")]
    nodes = [node for file in files for node in ast.walk(file)]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0}
    extras = SETUP["options.extras_require"].keys() - {"dev", "docs"}  # of the repository, not of the package
    asked = {name for extra in extras for name in required("options.extras_require", extra)}
    asked |= required("options", "install_requires").keys()
    spelled = {"math-verify": "math_verify", "pyyaml": "yaml", "sentence-transformers": "sentence_transformers"}
    spelled |= {"reasoning-gym": "reasoning_gym", "pillow": "PIL"}
    # of datasets; transformers; transformers; transformers; math-verify; torch; torch
    with_them = {"pyarrow", "safetensors", "tokenizers", "tqdm", "latex2sympy2_extended", "sympy", "jinja2"}
    outside = {name.split(".")[0] for name in names} - sys.stdlib_module_names
    assert outside - {spelled.get(name, name) for name in asked} - with_them == set()


def test_every_extra_is_in_the_table_of_the_page_on_installation():
    extras = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/installation.md").read_text(), re.MULTILINE)
    assert sorted(extras) == sorted(SETUP["options.extras_require"])


def test_optional_packages_are_imported_where_they_are_used():
    """Not at the top of a module, where every run would need them; figures alone need matplotlib."""
    optional = {"PIL", "vllm", "deepspeed", "flash_attn", "reasoning_gym", "openenv", "sentence_transformers", "wandb"}
    for file in sorted((ROOT / "pacs_trl").rglob("*.py")):
        for node in ast.parse(file.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            assert not {name.split(".")[0] for name in names} & optional, file


PLAN = "from pacs_trl.plan.check import main; main(['--config', 'recipes/miniature/pacs.yaml'])"
LIGHT = [  # what is run, one after the other in one interpreter, and what is not imported by then
    ("import pacs_trl", "torch trl transformers vllm"),
    ("import pacs_trl.verification", "math_verify sympy torch trl"),
    ("import pacs_trl.verification.pool", "torch trl transformers datasets"),
    ("import pacs_trl.evaluation.pass_at_k, pacs_trl.evaluation.results", "torch vllm transformers trl"),
    ("from pacs_trl.evaluation import pass_at_k; pass_at_k(2, 1, 1)", "torch"),  # the function, not the module
    (PLAN, "pacs_trl.train pacs_trl.rollouts.rollout_trainer trl.trainer.grpo_trainer transformers.trainer"),
]


def test_imports_are_light():
    lines = ["import sys"]
    for code, absent in LIGHT:
        lines += [code, f"assert not {set(absent.split())} & set(sys.modules), {code!r}"]
    result = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr


# A user's script: names, and arguments of trainers and configurations.
TYPED = """\
from peft import LoraConfig

from pacs_trl import GRPOTrainer, PACSConfig, PACSTrainer, PPOConfig, PPOTrainer
from pacs_trl.rewards import math_reward

args = PACSConfig(output_dir="x", pacs_beta=1.0, learning_rate=1e-6)
PACSTrainer("m", math_reward, args, train_dataset=None, peft_config=LoraConfig(), callbacks=[], tools=None)
PPOTrainer("m", args=PPOConfig(gamma=1.0), optimizers=(None, None), rollout_func=None)
GRPOTrainer(model="m", reward_funcs="m", args=args)
PACSConfig(pacs_betta=1.0)  # wrong: "pacs_betta"
PACSConfig(learning_rat=1e-6)  # wrong: "learning_rat"
PPOConfig(gama=1.0)  # wrong: "gama"
PACSTrainer("m", train_datset=None)  # wrong: "train_datset"
PPOTrainer("m", peft_confg=LoraConfig())  # wrong: "peft_confg"
GRPOTrainer("m", callback=[])  # wrong: "callback"
PACSTrainer("m", callbacks=[1])  # wrong: "int"
"""

# Imports are followed, except for packages that do not affect these arguments and would take a minute.
MYPY = """\
[mypy]
[mypy-transformers.models.*,torch.*,peft.*,accelerate.*,numpy.*,pandas.*,huggingface_hub.*,wandb.*,trackio.*,rich.*,IPython.*]
follow_imports = skip
"""


@pytest.mark.slow
@needs("mypy")
def test_a_misspelt_argument_is_found(tmp_path):
    (tmp_path / "script.py").write_text(TYPED)
    (tmp_path / "mypy.ini").write_text(MYPY)
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache"), "script.py"]
    root = str(Path(pacs_trl.__file__).parents[1])  # found as what is installed: only with py.typed
    environment = {key: value for key, value in os.environ.items() if key != "MYPYPATH"} | {"PYTHONPATH": root}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    lines = TYPED.splitlines()
    wrong = {
        i: re.search('"(.*)"', line.split("# wrong:")[1])[1] for i, line in enumerate(lines, 1) if "# wrong" in line
    }
    messages = {
        int(i): message for i, message in re.findall(r"^script\.py:(\d+): error: (.*)$", result.stdout, re.MULTILINE)
    }
    assert messages.keys() == wrong.keys(), result.stdout + result.stderr
    assert all(f'"{wrong[i]}"' in message for i, message in messages.items()), result.stdout


def test_every_trainer_of_the_table_of_methods_is_exported_with_its_configuration():
    table = (ROOT / "recipes/README.md").read_text().split("## By method")[1].split("\n## ")[0]
    trainers = set(re.findall(r"`(\w+Trainer)`", table))
    assert len(trainers) >= 6
    assert {*trainers, *(name.replace("Trainer", "Config") for name in trainers)} <= set(pacs_trl.__all__)


def test_the_names_are_those_that_are_loaded():
    source = Path(pacs_trl.__file__).read_text()
    seen = re.findall(r"^    from \.([\w.]+) import (\w+) as \w+$", source, re.MULTILINE)
    modules = {name: f"pacs_trl.{module}" for module, name in seen}
    assert modules == pacs_trl._PUBLIC_NAMES
    assert sorted(pacs_trl.__all__) == sorted(["__version__", *pacs_trl._PUBLIC_NAMES]) == dir(pacs_trl)
    assert [getattr(pacs_trl, name).__name__ for name in modules] == list(modules)


def imported_modules(file: Path) -> set[str]:
    """Modules that a file imports anywhere in it, also inside of functions."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    names = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return names | {f"{node.module}.{name.name}" for node in froms for name in node.names}


def test_core_tests_import_no_related_method():
    """Related methods are tested in the folders `experimental`, with what `support/related_methods.py` combines."""
    related = ("pacs_trl.experimental.", "support.related_methods.")
    core = [path for path in (ROOT / "tests").rglob("*.py") if "experimental" not in path.relative_to(ROOT).parts]
    core.remove(ROOT / "tests" / "support" / "related_methods.py")
    imports = {str(path.relative_to(ROOT)): sorted(imported_modules(path)) for path in core}
    assert len(imports) > 200
    for path, names in imports.items():
        assert not [name for name in names if f"{name}.".startswith(related)], path
