"""Promises of the package itself."""

import importlib
import subprocess
import sys
from dataclasses import dataclass, field, fields

import pytest

from pacs_trl.cli import COMMANDS
from pacs_trl.settings import with_help


def test_importing_the_package_is_light():
    code = "import sys, pacs_trl; print([m for m in ('torch', 'trl', 'transformers', 'vllm') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_public_names_are_there_when_used():
    code = "import pacs_trl; print(*sorted(getattr(pacs_trl, n).__name__ for n in pacs_trl.__all__ if n[0] == 'P'))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # transformers prints a line of its own on import when WANDB_MODE is set, as it is in CI
    assert result.stdout.splitlines()[-1].split() == ["PACSConfig", "PACSTrainer", "PPOConfig", "PPOTrainer"]


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path):
    """`pacs-trl ... | head`."""
    command = [sys.executable, "-u", "-m", "pacs_trl.cli", "reproduce", "table_6", "--scale", "full"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        errors = process.stderr.read()
    assert "Traceback" not in errors and process.returncode == 1


@pytest.mark.parametrize("command", [*COMMANDS, "train --method grpo", "train --method ppo"])
def test_help_of_every_command(command, capsys):
    """argparse fails on a bare percent sign in any of its texts, and only when it prints them."""
    name, *arguments = command.split()
    module = importlib.import_module(COMMANDS[name][0])
    capsys.readouterr()  # transformers prints a line of its own on import when WANDB_MODE is set
    with pytest.raises(SystemExit) as exit:
        module.main([*arguments, "--help"])
    assert exit.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith("usage: ") and len(printed) > 300
    if name == "train":
        assert "--learning_rate" in printed and ("--critic_learning_rate" in printed) == ("ppo" in command)


def test_help_is_what_the_docstring_says():
    @with_help
    @dataclass
    class Arguments:
        """
        Arguments of nothing.

        Args:
            share (`float`, *optional*, defaults to `0.5`): In % of
                what there is (`x` counts).

            > Parameters of another kind

            name (`str`):
                Name.
        """

        name: str
        share: float = field(default=0.5, metadata={"choices": [0.5, 1.0]})

    assert [f.metadata["help"] for f in fields(Arguments)] == ["Name.", "In %% of what there is (`x` counts)."]
    assert fields(Arguments)[1].metadata["choices"] == [0.5, 1.0] and Arguments("a").share == 0.5
