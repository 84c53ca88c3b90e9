"""The command line: help, versions, exit codes and suggestions of all commands."""

import ast
import dataclasses
import errno
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from optional_packages import needs

from pacs_trl import cli
from pacs_trl.data import PROMPT_INSTRUCTION
from pacs_trl.recipe import METHODS, _parts, method_names, settings_of_method
from pacs_trl.settings import help, read_mapping
from pacs_trl.settings.command_line import FailedRun, Parser, exit_code, read_settings, with_underscores


RECIPE = "recipes/miniature/pacs.yaml"
ACCELERATE = "recipes/accelerate_configs/single_gpu.yaml"


def called(monkeypatch, capsys, *argv: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["pacs-trl", *argv])
    try:
        status = cli.main()
    except SystemExit as exit:
        status = exit.code
    return status, *capsys.readouterr()


@pytest.mark.parametrize("method", method_names())
def test_help_of_training_has_every_setting_of_ours_and_its_default(method):
    """The help is read from the source of the dataclasses, which are the reference here."""
    own = {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for part in _parts(method)
        for declaring in part.__mro__
        if declaring.__module__.startswith("pacs_trl.")
        for field in dataclasses.fields(part)
        if field.name in vars(declaring).get("__annotations__", ())
    }
    assert set(help._OF_METHOD) == METHODS.keys()
    options = {action.dest: action.help for action in help._train_parser(method)._actions}
    assert options.keys() - {"help", "config"} == own.keys()
    for name, default in own.items():
        said = options[name].rpartition(" Default: ")
        if default is dataclasses.MISSING:
            assert options[name].endswith(" Required.")
        elif said[0]:
            assert ast.literal_eval(said[2].removesuffix(".").replace("%%", "%")) == default
        else:
            assert default in (None, "", PROMPT_INSTRUCTION)


def test_help_needs_no_library_with_any_version_of_them():
    """Nor do `--version`, wrong options and a recipe that does not exist; libraries that are broken show it."""
    calls = [
        (["--help"], 0),
        (["--version"], 0),
        (["trian"], 2),
        *(([name, "--help"], 0) for name in cli.COMMANDS),
        (["train", "--method", "ppo", "-h"], 0),
        (["train", "--config", "nowhere.yaml"], 2),
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
    text = " ".join(done.stdout.split())
    assert all(name in text for name in ("trl.GRPOConfig", "TrainingArguments", "trl grpo --help"))


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_names_the_command_and_what_it_takes(monkeypatch, capsys, name):
    texts = {called(monkeypatch, capsys, name, flag) for flag in ("--help", "-h")}
    ((status, text, errors),) = texts
    assert status == 0 and text.startswith(f"usage: pacs-trl {name} ") and not errors
    assert ("--config" in text) == (name in ("train", "plan", "evaluate"))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["trian"], "there is no command 'trian'. Did you mean `train`? Choose from plan, train"),
        (["plan", "--config", RECIPE, "--acelerate-config", "a"], "Did you mean `accelerate_config`?"),
        (["plan", "--config", RECIPE, "--lerning_rate", "1"], "Did you mean `learning_rate`?"),
        (
            ["train", "--config", RECIPE, "--model", "m"],
            "Did you mean `model_init_kwargs` or `model_name_or_path` or `model_revision`?",
        ),
        (["evaluate", "--model_name_or_path", "m"], "not an argument of evaluate. Did you mean `model`?"),
        (
            ["train", "--config", "recipes/evaluation/miniature.yaml"],
            "recipes/evaluation/miniature.yaml is a recipe of `pacs-trl evaluate` (it has the key `benchmarks`), not "
            "of this command.\n",
        ),
        (
            ["evaluate", "--config", RECIPE, "--model", "m"],
            "is a recipe of `pacs-trl train` (it has the key `dataset_name`), not of this command.\n",
        ),
        pytest.param(
            ["report", "--reliability", "nowhere.jsonl", "--output_dir", "x"],
            "No such file or directory: 'nowhere.jsonl'.",
            marks=needs("matplotlib"),
        ),
        (["push", "--model", "tests/data", "--repo", "a/b"], "is not a saved model"),
        (["train", "--confg", RECIPE], "Did you mean `config`?"),
        (
            ["train", "--config", RECIPE, "--method", "pasc"],
            "got 'pasc'. Did you mean `pacs`?",
        ),
        (["train", "--config", RECIPE, "--epochs", "1"], "Did you mean `num_train_epochs`?"),
        (
            ["train", "--config", RECIPE, "--lr", "1"],
            "`lr` is not a setting of method pacs. Did you mean `learning_rate`?",
        ),
        (
            ["train", "--config", RECIPE, "--use_lora"],
            "`use_lora` is not a setting of method pacs. Did you mean `use_peft`?",
        ),
        (["train", "--config", RECIPE, "--output_dir"], "--output_dir must be followed by text"),
        (["train", "--config", RECIPE, "--max-steps"], "--max_steps must be followed by a whole number"),
        (["train", "--config", "recipes/miniature"], "recipe 'recipes/miniature' is a directory, and must be a file"),
        (
            ["train", "--config", ACCELERATE],
            "is a file of accelerate, and no recipe: `accelerate launch --config_file`",
        ),
        (
            ["train", "--config", RECIPE, "--first_update_score", "none"],
            "one of dr_grpo; got 'none'. Write null, or remove",
        ),
        (["train", "lr=1"], "Cannot make sense of 'lr=1'"),
        (["train", "--config"], "--config must name a file"),
        (["evaluate", "--config", "tests/loopback.py"], "not YAML"),
        (["evaluate", "--config", "nowhere.yaml"], "recipe 'nowhere.yaml' does not exist (seen from /"),
        (["evaluate", "--env", "5"], "env must be a mapping of environment variables"),
        (["evaluate", "--modle", "m"], "Did you mean `model`? `model` is missing"),
        (["report", "results", "--ouput-dir", "x"], "Did you mean `--output_dir`?"),
        (["audit", "--completion", "x.jsonl"], "Did you mean `--completions`?"),
        (["push", "--model", "m", "--repository", "a/b"], "there is no option `--repository`"),
    ],
)
def test_a_mistake_is_said_in_words_and_ends_with_2(monkeypatch, capsys, argv, words):
    status, _, errors = called(monkeypatch, capsys, *argv)
    assert status == 2 and words in errors and "pacs-trl" in errors, errors


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ["report", "docs/results/miniature", "--output_dir", "DIR"],
            "draws figures with matplotlib, which is not inst",
        ),
        (
            [
                "evaluate",
                "--model",
                "m",
                "--benchmarks",
                "miniature/addition",
                "--output_dir",
                "DIR",
                "--n",
                "64",
            ],
            "engine='vllm', but vLLM is not installed in this environment. TRL 1.16 works with vLLM 0.22 to 0.31. "
            "Install "
            "one with `pip install 'vllm>=0.22,<0.32' 'transformers<5.18'` (CUDA) or `make env-vllm` (CPU), or sample "
            "with transformers: `--engine transformers`.",
        ),
    ],
)
def test_what_is_not_installed_is_said_before_any_run(monkeypatch, capsys, tmp_path, argv, words):
    monkeypatch.setattr("pacs_trl.settings.optional.find_spec", lambda name: None)
    monkeypatch.setattr("pacs_trl.evaluation.run.identify_model", lambda args: {"name": "m", "digest": "d"})
    status, _, errors = called(
        monkeypatch, capsys, *(str(tmp_path / "out") if word == "DIR" else word for word in argv)
    )
    assert status == 2 and words in errors


@needs("matplotlib")
def test_the_quickstart_asks_for_matplotlib_first(monkeypatch):
    from experiments.quickstart import _run

    monkeypatch.setattr("pacs_trl.settings.optional.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="The quickstart draws figures with matplotlib, which is not installed"):
        _run([])


def test_ctrl_c_is_one_line(monkeypatch, capsys):
    def interrupted(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr("pacs_trl.settings.command_line.signal.signal", lambda number, handler: None)
    monkeypatch.setattr(cli, "import_module", lambda name: SimpleNamespace(main=interrupted))
    assert called(monkeypatch, capsys, "report") == (130, "", "pacs-trl report: stopped by Ctrl-C.\n")


@pytest.mark.parametrize("program", [["pacs_trl.train"], ["pacs_trl", "train"], ["pacs_trl", "evaluate"]])
def test_ctrl_c_while_libraries_are_imported(tmp_path, program):
    """Also in what `accelerate launch -m pacs_trl.train` starts; of several processes the first one says it."""
    for library in ("accelerate", "numpy"):
        (tmp_path / f"{library}.py").write_text("raise KeyboardInterrupt")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}
    recipe = "recipes/evaluation/miniature.yaml" if "evaluate" in program else RECIPE
    for rank, lines in (("0", 1), ("1", 0)):
        done = subprocess.run(
            [sys.executable, "-m", *program, "--config", recipe],
            capture_output=True,
            text=True,
            env=environment | {"RANK": rank},
        )
        assert done.returncode == 130 and done.stderr.count("\n") == lines, done.stderr
        assert (
            done.stderr == f"pacs-trl {'evaluate' if 'evaluate' in program else 'train'}: stopped by Ctrl-C.\n" * lines
        )


def test_ctrl_c_reaches_no_process_of_ours_that_would_print_a_traceback(monkeypatch, capsys, tmp_path):
    def interrupted(command, process_group=None, **options):
        assert process_group == 0  # not that of the terminal
        raise KeyboardInterrupt

    monkeypatch.setattr("pacs_trl.settings.command_line.signal.signal", lambda number, handler: None)
    monkeypatch.setattr("pacs_trl.miniature.warm_start.subprocess.run", interrupted)
    recipe = str(Path(RECIPE).resolve())
    monkeypatch.chdir(tmp_path)  # warm starts are kept in the working directory
    status, _, errors = called(monkeypatch, capsys, "train", "--config", recipe, "--output_dir", "run")
    assert (status, errors) == (130, "pacs-trl train: stopped by Ctrl-C.\n")


def test_version_and_module(monkeypatch, capsys):
    status, text, _ = called(monkeypatch, capsys, "--version")
    assert status == 0 and text.startswith("pacs-trl 0.1.0 (trl 1.")
    done = subprocess.run([sys.executable, "-m", "pacs_trl", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == text


def test_hyphens_and_underscores_are_the_same():
    assert with_underscores(["--a-b=c-d", "e-f", "--", "-1"]) == ["--a_b=c-d", "e-f", "--", "-1"]
    parser = Parser("name", "What it does.")
    parser.add_argument("--output_dir")
    assert parser.parse_args(["--output-dir", "a-b"]) == parser.parse_args(["--output_dir", "a-b"])
    known = settings_of_method
    assert read_settings(["--max-steps", "3"], known) == read_settings(["--max_steps=3"], known) == {"max_steps": 3}


def _inner_training_loop(learn):  # as Trainer's is called
    learn()


@pytest.mark.parametrize(
    ("command", "code", "is_shown_whole"),
    [
        (lambda argv: float("4 2"), 2, False),  # a library refuses a setting
        (lambda argv: _inner_training_loop(lambda: float("4 2")), 1, True),  # a reward function breaks
        # an error of this package, such as a reward that is NaN
        (lambda argv: _inner_training_loop(lambda: read_mapping("nowhere.yaml", "recipe")), 1, False),
    ],
)
def test_what_breaks_in_the_middle_of_a_run(capsys, command, code, is_shown_whole):
    assert exit_code("train", command, []) == code
    assert ("Traceback" in capsys.readouterr().err) == is_shown_whole


PRINTING = """
import sys
from pacs_trl.settings.command_line import exit_code

def _inner_training_loop(argv):  # as Trainer's is called
    print("\\u4e2d " * 9999, flush=True)
    print("told", file=sys.stderr)

sys.exit(exit_code("x", _inner_training_loop, []))
"""


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("| grep -c u4e2d", "told\n"),
        (">&- 2>&-", ""),
        (">&-", "told\n"),
        ("| true", "training has stopped, because whoever read"),
    ],
)
def test_lines_that_nobody_reads(tmp_path, how, said):
    """In an encoding without the character, to a closed descriptor, and to a reader that has gone."""
    (tmp_path / "printing.py").write_text(PRINTING)
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(Path.cwd())}
    command = f"set -o pipefail; sleep 0.2 | {sys.executable} {tmp_path}/printing.py {how}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment)
    assert done.stderr.startswith(said and f"x: {said}" if "stopped" in said else said), done.stderr
    assert done.stderr.count("\n") <= 1 and done.returncode == (1 if "stopped" in said else 0)


def _raising(error):
    def command(argv):
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (FailedRun("The upload failed 5 times."), 1, "pacs-trl x: The upload failed 5 times.\n"),
        (ImportError("A needs B."), 2, "pacs-trl x: A needs B.\n"),
        (
            ConnectionError("Cannot reach the Hub: offline mode."),
            2,
            "pacs-trl x: Cannot reach the Hub: offline mode.\n",
        ),
        (FileExistsError(errno.EEXIST, "File exists", "out"), 2, "pacs-trl x: [Errno 17] File exists: 'out'.\n"),
        (
            PermissionError(errno.EACCES, "Permission denied", "out"),
            2,
            "refuses: [Errno 13] Permission denied: 'out'. What",
        ),
        (OSError(errno.ENOSPC, "No space left"), 2, "Make room or give the rights and run the same command again.\n"),
    ],
)
def test_what_a_machine_or_a_library_refuses_is_one_line(capsys, error, code, words):
    assert exit_code("pacs-trl x", _raising(error), []) == code
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_what_transformers_does_not_support_is_one_line(capsys):
    library = {"__name__": "trl.trainer.grpo_trainer"}
    exec("def command(argv):\n    raise NotImplementedError('Not with PEFT.')", library)
    assert exit_code("pacs-trl x", library["command"], []) == 2
    assert capsys.readouterr().err == "pacs-trl x: Not with PEFT.\n"


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ECHILD, "No child"), ModuleNotFoundError("No module named 'mine'"), NotImplementedError("Ours.")],
)
def test_what_nobody_expected_is_shown_whole(error):
    with pytest.raises(type(error)):
        exit_code("pacs-trl x", _raising(error), [])
