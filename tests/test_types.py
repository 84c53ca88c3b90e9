"""Type checking of a user's script: names, and arguments of trainers and configurations."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from optional_packages import needs

import pacs_trl


pytestmark = needs("mypy")

SCRIPT = """\
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
SETTINGS = """\
[mypy]
[mypy-transformers.models.*,torch.*,peft.*,accelerate.*,numpy.*,pandas.*,huggingface_hub.*,wandb.*,trackio.*,rich.*,IPython.*]
follow_imports = skip
"""


@pytest.mark.slow
def test_a_misspelt_argument_is_found(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache"), "script.py"]
    root = str(Path(pacs_trl.__file__).parents[1])  # found as what is installed: only with py.typed
    environment = {key: value for key, value in os.environ.items() if key != "MYPYPATH"} | {"PYTHONPATH": root}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    lines = SCRIPT.splitlines()
    wrong = {
        i: re.search('"(.*)"', line.split("# wrong:")[1])[1] for i, line in enumerate(lines, 1) if "# wrong" in line
    }
    found = {
        int(i): message for i, message in re.findall(r"^script\.py:(\d+): error: (.*)$", result.stdout, re.MULTILINE)
    }
    assert found.keys() == wrong.keys(), result.stdout + result.stderr
    assert all(f'"{wrong[i]}"' in message for i, message in found.items()), result.stdout


def test_the_names_are_those_that_are_loaded():
    source = Path(pacs_trl.__file__).read_text()
    seen = re.findall(r"^    from \.([\w.]+) import (\w+) as \w+$", source, re.MULTILINE)
    found = {name: f"pacs_trl.{module}" for module, name in seen}
    assert found == pacs_trl._PUBLIC_NAMES
    assert sorted(pacs_trl.__all__) == sorted(["__version__", *pacs_trl._PUBLIC_NAMES]) == dir(pacs_trl)
    assert [getattr(pacs_trl, name).__name__ for name in found] == list(found)
