"""Command lines: help without libraries, exit codes, suggestions."""

import dataclasses
import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.problems import held_out

from pacs_trl import cli
from pacs_trl.errors import FailedRun, UserError, during_run, exit_code
from pacs_trl.methods import method_names
from pacs_trl.recipe import config_class
from pacs_trl.settings import Parser, read_mapping, read_settings


RECIPE = "recipes/miniature/pacs.yaml"


def called(monkeypatch, capsys, *argv: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["pacs-trl", *argv])
    try:
        status = cli.main()
    except SystemExit as exit:
        status = exit.code
    return status, *capsys.readouterr()


def settings_of_ours(part):
    return {
        field.name: field
        for declaring in part.__mro__
        if declaring.__module__.startswith("pacs_trl.")
        for field in dataclasses.fields(part)
        if field.name in vars(declaring).get("__annotations__", ())
    }


@pytest.mark.parametrize("method", method_names())
def test_help_of_training_has_every_setting_of_ours_with_default_range_and_effect(monkeypatch, capsys, method):
    status, text, _ = called(monkeypatch, capsys, "train", "--method", method, "--help")
    assert status == 0
    for name, field in settings_of_ours(config_class(method)).items():
        head, effect = re.search(rf"^  --{name} \((.*)\)\n((?:      .*\n)+)", text, re.MULTILINE).groups()
        assert head.endswith(f"default {field.default!r}")
        assert str(field.metadata.get("metavar", "")) in head
        assert " ".join(effect.split()) == " ".join(field.metadata["help"].split())


def test_help_has_no_source(monkeypatch, capsys):
    for argv in (["train", "--help"], ["evaluate", "--help"]):
        text = called(monkeypatch, capsys, *argv)[1]
        assert not re.search(r"\b(setting|field|bounded|metadata)\(|typing\.|<class|Field\(", text)


def test_help_of_an_unknown_method_names_those_there_are(monkeypatch, capsys):
    status, _, errors = called(monkeypatch, capsys, "train", "--method", "pac", "--help")
    assert status == 2 and "Did you mean `pacs`?" in errors


def test_help_needs_no_library_with_any_version_of_them():
    """Nor do `--version`, wrong options, and a recipe that does not exist; libraries that are broken show it. Only the
    help of `train` for another method than the default needs TRL, whose configuration it extends."""
    calls = [
        (["--help"], 0),
        (["--version"], 0),
        (["trian"], 2),
        *(([name, "--help"], 0) for name in ("plan", "train", "evaluate", "push", "audit")),
        (["train", "--config", RECIPE, "--help"], 0),
        (["train", "--config", "nowhere.yaml"], 2),
        (["train", "--config", RECIPE, "--method", "pasc"], 2),
        (["plan", "--config", RECIPE, "--gpu", "abacus"], 2),
    ]
    script = f"""
import sys
from importlib import metadata
metadata.version = lambda name: "99.0"
for name in ("torch", "transformers", "trl", "datasets", "accelerate"):
    sys.modules[name] = None  # importing it is an error
from pacs_trl import cli
for argv, expected in {calls}:
    sys.argv = ["pacs-trl", *argv]
    try:
        status = cli.main()
    except SystemExit as exit:
        status = exit.code
    assert status == expected, (argv, status)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_keys_are_checked_before_libraries_are_imported(tmp_path):
    """Libraries that end the process at their import show it."""
    for library in ("torch", "numpy", "pyarrow"):
        (tmp_path / f"{library}.py").write_text("import os; os._exit(99)")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}
    calls = {
        f"train --config {RECIPE} --lr 1": "Did you mean `learning_rate`?",
        f"train --config {RECIPE} --tau 1": "`tau` is a setting of method real, not of pacs",
        f"plan --config {RECIPE} --num_generation 4 --gpu h200": "Did you mean `num_generations`?",
        "evaluate --modle m": "Did you mean `model`?",
    }
    for words, message in calls.items():
        command = [sys.executable, "-m", "pacs_trl.cli", *words.split()]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1) and message in done.stderr, done.stderr


def test_commands_that_take_seconds_to_start_say_so_at_once(tmp_path):
    (tmp_path / "numpy.py").write_text("import os; os._exit(99)")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}
    for words in (f"train --config {RECIPE}", f"plan --config {RECIPE}"):
        command = [sys.executable, "-m", "pacs_trl.cli", *words.split()]
        for rank, lines in (("0", 1), ("1", 0)):
            done = subprocess.run(command, capture_output=True, text=True, env=environment | {"RANK": rank})
            assert (done.returncode, done.stderr.count(" loading ")) == (99, lines), done.stderr


def test_help_of_training_says_where_trls_settings_are(monkeypatch, capsys):
    text = " ".join(called(monkeypatch, capsys, "train", "-h")[1].split())
    assert all(name in text for name in ("trl.GRPOConfig", "TrainingArguments", "trl grpo --help"))


GOLDEN = yaml.safe_load((Path(__file__).parent / "golden_messages.yaml").read_text())


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["command"])
def test_mistakes_have_their_golden_message_and_exit_code_2(monkeypatch, capsys, tmp_path, model_path, case):
    """The complete message of a mistake, in one line, and exit code 2."""
    words = case["command"].replace("OUTPUT", str(tmp_path / "out")).split()
    if words[:2] == ["train", "--recipe"]:
        words[1:2] = ["--config", RECIPE, "--output_dir", str(tmp_path / "out")]
        if "--model_name_or_path" not in words:
            words += ["--model_name_or_path", model_path]
    status, _, errors = called(monkeypatch, capsys, *words)
    message = errors.splitlines()[-1].replace(str(tmp_path / "out"), "OUTPUT").replace(os.getcwd(), "DIRECTORY")
    assert (status, message) == (2, case["message"])


EVALUATE = ["evaluate", "--model", "m", "--benchmarks", held_out(), "--n=64"]


@pytest.mark.parametrize(
    ("argv", "words"), [(["report", "docs/results/miniature"], "matplotlib"), (EVALUATE, "vllm>=")]
)
def test_missing_packages_are_named_before_any_run(monkeypatch, capsys, tmp_path, argv, words):
    monkeypatch.setattr("pacs_trl.settings.names.find_spec", lambda name: None)
    monkeypatch.setattr("pacs_trl.settings.names.installed_vllm", lambda: None)
    monkeypatch.setattr("pacs_trl.evaluation.run.identify_model", lambda args: {"name": "m", "digest": "d"})
    monkeypatch.setattr("pacs_trl.evaluation.run._load_tokenizer", lambda args: None)
    status, _, errors = called(monkeypatch, capsys, *argv, "--output_dir", str(tmp_path / "out"))
    assert status == 2 and words in errors


@pytest.mark.parametrize("program", [["pacs_trl.train"], ["pacs_trl.cli", "evaluate"]])
def test_ctrl_c_while_libraries_are_imported(tmp_path, program):
    """Also in what `accelerate launch -m pacs_trl.train` starts; of several processes the first one prints it."""
    for library in ("accelerate", "numpy"):
        (tmp_path / f"{library}.py").write_text("raise KeyboardInterrupt")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}
    recipe = "recipes/evaluation/miniature.yaml" if "evaluate" in program else RECIPE
    for rank, lines in (("0", 2), ("1", 0)):  # the first line says that libraries are loaded
        done = subprocess.run(
            [sys.executable, "-m", *program, "--config", recipe],
            capture_output=True,
            text=True,
            env=environment | {"RANK": rank},
        )
        assert done.returncode == 130 and done.stderr.count("\n") == lines, done.stderr


def test_hyphens_and_underscores_are_the_same():
    parser = Parser("name", "What it does.")
    parser.add_argument("--output_dir")
    assert parser.parse_args(["--output-dir", "a-b"]) == parser.parse_args(["--output_dir", "a-b"])
    assert read_settings(["--max-steps", "3"]) == read_settings(["--max_steps=3"]) == {"max_steps": "3"}


def _running(learn):
    with during_run():
        learn()


def _raising(error):
    def command(argv):
        raise error

    return command


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (_raising(UserError("The key is wrong. Remove it.")), 2),
        # an error of this package in a run, such as a reward that is NaN
        (lambda argv: _running(lambda: read_mapping("nowhere.yaml", "recipe")), 1),
        (_raising(FailedRun("The upload failed 5 times.")), 1),
        (_raising(ImportError("A needs B.")), 2),
        (_raising(ConnectionError("Cannot reach the Hub: offline mode.")), 2),
        (_raising(FileExistsError(errno.EEXIST, "File exists", "out")), 2),
        (_raising(PermissionError(errno.EACCES, "Permission denied", "out")), 2),
        (_raising(OSError(errno.ENOSPC, "No space left")), 2),
    ],
)
def test_errors_that_are_one_line(capsys, command, code):
    assert exit_code("pacs-trl x", command, []) == code
    errors = capsys.readouterr().err
    assert errors.startswith("pacs-trl x: ") and errors.count("\n") == 1


@pytest.mark.parametrize(
    "command",
    [
        lambda argv: float("4 2"),  # a library, or a bug of ours
        lambda argv: _running(lambda: float("4 2")),  # a reward function has an error
        _raising(OSError(errno.ECHILD, "No child")),
        _raising(ModuleNotFoundError("No module named 'mine'")),
        _raising(NotImplementedError("Ours.")),
    ],
)
def test_errors_that_keep_their_traceback(command):
    with pytest.raises((ValueError, OSError, ImportError, NotImplementedError)):
        exit_code("pacs-trl x", command, [])


PRINTING = """
import sys
from pacs_trl.errors import during_run, exit_code

def run(argv):
    with during_run():
        print("\\u4e2d " * 9999, flush=True)
        print("told", file=sys.stderr)

sys.exit(exit_code("x", run, []))
"""


@pytest.mark.parametrize(
    ("how", "printed"),
    [("| grep -c u4e2d", "told\n"), (">&- 2>&-", ""), (">&-", "told\n"), ("| true", "x: training stopped")],
)
def test_lines_that_nobody_reads(tmp_path, how, printed):
    """In an encoding without the character, to a closed descriptor, and to a reader that has gone."""
    (tmp_path / "printing.py").write_text(PRINTING)
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(Path.cwd())}
    command = f"set -o pipefail; sleep 0.2 | {sys.executable} {tmp_path}/printing.py {how}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment)
    assert done.stderr.startswith(printed) and done.stderr.count("\n") <= 1, done.stderr
    assert done.returncode == (1 if "stopped" in printed else 0)
