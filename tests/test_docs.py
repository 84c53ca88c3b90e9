"""Every command in README, docs, notebooks, and docstrings of modules: its arguments parse and its files exist; some
run.

Notebooks are tested as they are committed: with outputs (but for the one that wants a GPU), without traces of a
machine. That they run is the business of `make notebooks`.

A command is a line of a ```bash block, a line of a docstring, or a code span that begins like one. Words in capitals
(MODEL, DIR, USER/NAME) and shell variables stand for what a reader puts in.
"""

import argparse
import ast
import configparser
import contextlib
import glob
import importlib
import importlib.util
import json
import random
import re
import shlex
import sys
from pathlib import Path

import pytest
from support.optional_packages import needs, require
from support.seeds import shifted

from experiments.smollm2 import FOLDER as SMOLLM2
from notebook_tools import pacs_trl
from pacs_trl import cli
from pacs_trl.cli import COMMANDS
from pacs_trl.plan import read_plan_arguments
from pacs_trl.plan.check import check_recipe
from pacs_trl.plan.launch import read_launch


ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))
FOLDERS = ("", "docs/**/", "recipes/", "examples/")
SCRIPTS = sorted(path for folder in ("examples", "pacs_trl") for path in ROOT.glob(f"{folder}/**/*.py"))
PAGES = sorted(page for folder in FOLDERS for page in ROOT.glob(f"{folder}*.md")) + NOTEBOOKS + SCRIPTS
BEGINNINGS = (
    "make ",
    "pacs-trl ",
    "accelerate launch ",
    "python -m pacs_trl",
    "python -m experiments.paper",
    "python -m benchmarks",
    "pytest ",
    ".ci/run",
)

# What belongs to other projects or to the shell; its arguments are theirs.
EXTERNAL = ("pip install jupyterlab", "lm_eval", "git", "cd", "vllm", "curl", "pre-commit", "export", "source")
EXTERNAL += ("jupyter", "until", "srun", "trap", "wait")


def text_of(page: Path) -> str:
    if page.suffix == ".md":
        return page.read_text()
    if page.suffix == ".py":
        docstring = ast.get_docstring(ast.parse(page.read_text())) or ""
        return re.sub(rf"^ *((?:{'|'.join(BEGINNINGS)}).*)$", r"`\1`", docstring, flags=re.MULTILINE)
    cells = json.loads(page.read_text())["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def commands_of(text: str) -> list[str]:
    blocks = re.findall(r"```(?:bash|sh|shell)\n(.*?)```", text, flags=re.DOTALL)
    lines = [line for block in blocks for line in re.sub(r"\\\n\s*", " ", block).splitlines()]
    outside = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    spans = [re.sub(r"\s+", " ", span) for span in re.findall(r"`([^`]+)`", outside)]
    commands = [line.strip() for line in lines] + [span for span in spans if span.startswith(BEGINNINGS)]
    commands = [re.sub(r"(^|\s)#.*", "", line).strip() for line in commands]
    # NAME=value before a command is the shell's
    return [re.sub(r"^([A-Z_]+=\S+ )+", "", line) for line in commands if line]


FOUND = sorted({(str(page.relative_to(ROOT)), command) for page in PAGES for command in commands_of(text_of(page))})


class Parsed(Exception):
    """Raised in place of doing the work, once arguments are parsed."""


def parse_only(monkeypatch, main, arguments):
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(self, args=None, namespace=None):
        parse(self, args, namespace)
        raise Parsed

    def stop_at_other_errors(self, message):
        # text may mention a command with one of its options only
        assert message.startswith("the following arguments are required"), message
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    monkeypatch.setattr(argparse.ArgumentParser, "error", stop_at_other_errors)
    with contextlib.suppress(Parsed):
        main(arguments)
        raise AssertionError("the arguments should have been parsed before any work")


def check_module(monkeypatch, name: str, arguments: list[str], num_processes: int = 1) -> None:
    if name in ("pacs_trl.train", "pacs_trl.plan.check"):
        plan_arguments = read_plan_arguments(arguments)
        if name == "pacs_trl.plan.check":
            launch, errors = read_launch(plan_arguments.accelerate_config, plan_arguments.num_processes)
            assert not errors, errors
            num_processes = launch.num_processes
        folders = ("smollm2-135m/", "images/", "miniature/")  # with models that another command prepares
        is_prepared = any(folder in plan_arguments.config for folder in folders)
        without_model = ["--model_name_or_path", "org/model"] if is_prepared else []
        recipe, conflicts = check_recipe(
            plan_arguments.config, [*plan_arguments.overrides, *without_model], num_processes
        )
        assert recipe is not None and not conflicts, conflicts
    elif name == "pacs_trl.evaluation.run":
        from pacs_trl.evaluation.arguments import read_evaluation

        try:
            read_evaluation(arguments)
        except ValueError as error:  # text may mention a command with one of its options only
            assert "required" in str(error), error
    else:
        parse_only(monkeypatch, importlib.import_module(name).main, arguments)


def check_make(words: list[str]) -> list[str]:
    """Targets exist; returns what ARGS hands on."""
    rules = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    variables = dict(word.split("=", 1) for word in words if "=" in word)
    targets = [word for word in words if "=" not in word]
    assert set(targets) <= set(rules), f"no such target: {set(targets) - set(rules)}"
    return shlex.split(variables.get("ARGS", ""))


def check_extras(word: str) -> None:
    match = re.search(r"\[([\w,]+)\]", word)
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = set(config["options.extras_require"])
    assert match is None or set(match[1].split(",")) <= extras, f"{word}: extras are {sorted(extras)}"


@pytest.mark.parametrize(("page", "command"), FOUND, ids=lambda value: value)
def test_commands_of_the_docs_parse_and_name_files_that_exist(monkeypatch, page, command):
    monkeypatch.chdir(ROOT)
    if command.startswith(EXTERNAL):
        return
    for part in re.split(r"\s+(?:&&|\|)\s+", command):
        if not part.startswith(EXTERNAL):
            words = [word for word in shlex.split(part) if word != "..."]
            if not {"CONFIG", "RECIPE", "RECIPE.yaml", "FILE", "COMMAND", "X", "--help"} & set(words):
                check_command(monkeypatch, ["1" if word.startswith("$") else word for word in words])
    read = re.sub(r"--output_dir \S+", "", command)
    for path in re.findall(r"(?<![\w/.-])(?:recipes|tests|benchmarks|notebooks|docs)/[\w./-]+", read):
        assert Path(path).exists() or "*" in command, f"{path} does not exist"


def check_command(monkeypatch, words: list[str]) -> None:
    match words:
        case ["make", *rest]:
            arguments = check_make(rest)
            if "quickstart" in rest:
                require("matplotlib")
                check_module(monkeypatch, "experiments.quickstart", arguments)
        case ["pacs-trl", name, *rest] if name in COMMANDS:
            if rest:
                check_module(monkeypatch, COMMANDS[name][0], rest)
        case ["pacs-trl", *rest]:
            assert not rest, f"no such subcommand: {rest[0]}"
        case ["accelerate", "launch", *rest]:
            from accelerate.commands.launch import launch_command_parser

            launch = launch_command_parser().parse_args(rest)
            assert launch.config_file is None or Path(launch.config_file).is_file(), launch.config_file
            if launch.training_script.startswith("examples/"):
                return
            assert launch.module and importlib.util.find_spec(launch.training_script)
            processes = read_launch(launch.config_file, launch.num_processes)[0].num_processes
            check_module(monkeypatch, launch.training_script, launch.training_script_args, processes)
        case ["python", "-m", "experiments.paper", *rest]:
            check_module(monkeypatch, "experiments.paper.command", rest)
        case ["python", "-m", name, *rest] if name.startswith(
            ("pacs_trl.", "experiments.genac.", "experiments.miniature.", "experiments.shapes")
        ):
            if rest:
                check_module(monkeypatch, name, rest)
        case ["python", "-m", name, *rest] if name.startswith("benchmarks."):
            module = importlib.import_module(name)
            monkeypatch.setattr(sys, "argv", [name, *rest])
            parse_only(monkeypatch, lambda _: module.main(), None)
        case ["pytest", *rest] | ["python", "-m", "pytest", *rest]:
            assert all(Path(word.split("::")[0]).exists() for word in rest if word.startswith("tests"))
        case ["pip", "install", *rest]:
            for word in rest:
                check_extras(word)
        case [".ci/run"]:
            assert Path(".ci/run").is_file()
        case _:
            raise AssertionError(
                f"unknown command {' '.join(words)}: add its first words to EXTERNAL if it is not ours"
            )


def table_under(page: str, heading: str) -> list[list[str]]:
    """Cells of the rows of the first table behind a heading."""
    rows = re.search(r"(\n\|.*)+", (ROOT / page).read_text().split(f"\n## {heading}\n")[1])[0].strip().splitlines()
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


HARDWARE = table_under("docs/speed.md", "What fits where")
COSTS = table_under("docs/speed.md", "Three methods")


# Commands that a CPU runs in seconds, beside those of the tables.
RUN_HERE = {
    c for _, c in FOUND if c.startswith(("pacs-trl plan --config recipes/", "pacs-trl audit --completions tests/"))
}
RUN_HERE |= {c for _, c in FOUND if c.startswith("pacs-trl report") and "docs/results/" in c}
RUN_HERE -= {row[-1].strip("`") for row in HARDWARE + COSTS}


def run(monkeypatch, capsys, command: str) -> str:
    """What a command prints that succeeds, run in this process."""
    words = [path for word in shlex.split(command) for path in sorted(glob.glob(word, root_dir=ROOT)) or [word]]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", words)
    status, printed = cli.main(), capsys.readouterr()
    assert status == 0, printed
    return printed.out


@pytest.mark.parametrize("command", sorted(RUN_HERE))
def test_command_runs(monkeypatch, capsys, command, tmp_path):
    if command.startswith("pacs-trl report"):
        require("matplotlib")
    if "recipes/smollm2-135m" in command and not (ROOT / SMOLLM2).is_dir():
        pytest.skip("the model is not there; `make model` prepares it")
    run(monkeypatch, capsys, re.sub(r"--output_dir \S+", f"--output_dir {tmp_path}", command))


@pytest.mark.parametrize("row", HARDWARE + COSTS, ids=lambda row: row[-1])
def test_numbers_of_tables_are_those_that_plan_prints(monkeypatch, capsys, row):
    """Peak memory, hours and GPU hours of a row are what its command prints."""
    *_, peak, hours, gpu_hours, command = row
    printed = run(monkeypatch, capsys, command.strip("`"))
    assert re.search(r"peak +(\S+) GiB", printed)[1] == peak
    assert re.search(r"all +(\S+) hours .* (\S+) GPU hours", printed).groups() == (hours, gpu_hours.replace(",", ""))
    assert "fits" in printed


def test_tutorials_have_the_numbers_of_the_page_on_speed():
    tutorials = "".join(page.read_text() for page in sorted(ROOT.glob("docs/tutorials/*.md")))
    shown = re.findall(r"# (.+): ([\d.]+) GiB per GPU, ([\d.]+) hours$", tutorials, re.MULTILINE)
    assert len(shown) == 2 and {gpus for gpus, _, _ in shown} == {"1 x H100 80 GB", "8 x H200"}
    assert set(shown) <= {tuple(row[1:4]) for row in HARDWARE}


def test_readme_fits_on_one_screen_and_has_the_numbers_of_the_page_on_speed():
    """README has at most 80 lines, one figure, and one table, whose rows are medians of docs/speed.md."""
    text = (ROOT / "README.md").read_text()
    text = re.sub(r"(<!-- (\w+) -->\n).*?(<!-- /\2 -->)", r"\1\3", text, flags=re.DOTALL)  # of `make address`
    assert len(text.splitlines()) <= 80 and text.count("![") == 1
    measured = [row[:4] for row in table_under("docs/speed.md", "One optimizer step on an H100")]
    rows = table_under("README.md", "How fast")
    assert len(rows) == len(measured)
    for (_, seconds, gib, factor), (_, range_of_seconds, measured_factor, measured_gib) in zip(rows, measured):
        assert (seconds, gib, float(factor)) == (range_of_seconds.split()[0], measured_gib, float(measured_factor))


GENERATED = {"settings", "metrics", "compatibility", "recipes", "api"}
HAND_WRITTEN = sorted(page for page in ROOT.glob("docs/*.md") if page.stem not in GENERATED)
HAND_WRITTEN.append(ROOT / "docs/results/README.md")  # the other pages of that folder are the archive of the studies


def test_each_page_and_notebook_stands_in_the_index():
    index = (ROOT / "docs/index.md").read_text()
    assert "(docs/index.md)" in (ROOT / "README.md").read_text()
    assert not [notebook.name for notebook in NOTEBOOKS if notebook.name not in index]
    assert not [page.name for page in ROOT.glob("docs/*.md") if page.name != "index.md" and page.name not in index]
    results = (ROOT / "docs/results/README.md").read_text()
    studies = [page.parent.name for page in ROOT.glob("docs/results/*/README.md")]
    assert not [study for study in studies if f"({study}/README.md" not in results]


def test_there_are_at_most_20_pages():
    """Beside the table of contents."""
    pages = [page.name for page in HAND_WRITTEN if page.stem != "index"]
    assert len(pages) <= 20, pages


def name_of(page: Path) -> str:
    return f"{page.parent.name}/{page.stem}"


def prose(text: str) -> list[str]:
    """The lines of a page without code, tables, and lines that a link or a comment makes long."""
    text = re.sub(r"(?m)^( *)```.*?^ *```$", "", text, flags=re.DOTALL)
    return [line for line in text.splitlines() if not line.startswith(("|", "    ", "<!--"))]


@pytest.mark.parametrize("page", HAND_WRITTEN, ids=name_of)
def test_a_page_is_short(page):
    """At most 1,500 words, tables and code included, and a heading for the one subject of a page."""
    text = page.read_text()
    assert len(text.split()) <= 1500
    assert len(re.findall(r"^# ", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE)) == 1


SHORT_LINES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("*/README.md"),
    *ROOT.glob("docs/*.md"),
    *ROOT.glob("docs/tutorials/*.md"),
]


@pytest.mark.parametrize("page", [*SHORT_LINES, *ROOT.glob("docs/results/**/README.md")], ids=name_of)
def test_lines_are_short(page):
    """At most 100 characters, but for tables, code, and words that cannot be broken."""
    long = [line for line in prose(page.read_text()) if len(line) > 100 and " " in line.strip().lstrip("-* ")]
    assert not long


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", text_of(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_named_files_exist():
    """Links between the pages and to their headings, and tests named above."""
    missing = []
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)", text_of(page)):
            file = page.parent / target if target else page
            if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
                missing.append(f"{page.name}: {target}#{anchor}")
    assert not missing


EXECUTED = [path for path in NOTEBOOKS if path.stem != "05_one_gpu"]
NOISE = r"/work|/tmp|/root|/home|\d+it/s|it/s\]|\d+%\||Warning"


def cells_of(path: Path, kind: str) -> list[dict]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def texts(output: dict) -> str:
    data = {k: v for k, v in output.get("data", {}).items() if not k.startswith("image/")}
    return json.dumps([output.get("text", ""), data])


def test_what_was_not_run_on_a_gpu_has_no_outputs():
    (path,) = set(NOTEBOOKS) - set(EXECUTED)
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells_of(path, "code"))
    assert "ot tested on a GPU" in path.read_text()


@pytest.mark.parametrize("path", EXECUTED, ids=lambda path: path.stem)
def test_notebooks_are_executed_in_order_and_clean(path):
    cells = cells_of(path, "code")
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert all(output["output_type"] != "error" and output.get("name") != "stderr" for output in outputs)
    for output in outputs:
        assert not re.search(NOISE, texts(output)), texts(output)[:300]
    assert path.stat().st_size < 1_500_000


def test_a_command_that_fails_ends_the_cell(capsys):
    with pytest.raises(RuntimeError, match="nonsense"):
        pacs_trl("nonsense")
    assert "nonsense" in capsys.readouterr().out


# What keeps the commands short here: a model that is there already, and fewer steps and samples.
SHORTER = {
    "train": ["--max_steps", "2", "--max_completion_length", "8", "--disable_tqdm", "true"],
    "evaluate": ["--n", "4", "--k", "1,2,4", "--max_new_tokens", "8"],
    "report": [],
    "recipes": [],
}


@needs("matplotlib")
def test_a_users_problems_are_trained_evaluated_and_reported(tmp_path, monkeypatch, capsys, model_path):
    """A user's own file of 50 problems through the commands of docs/your_own_problems.md: train, evaluate, report."""
    block = re.search(r"```bash\n(.*?)```", (ROOT / "docs/your_own_problems.md").read_text(), flags=re.DOTALL)[1]
    rng = random.Random(shifted(0))
    pairs = [(rng.randrange(100), rng.randrange(100)) for _ in range(50)]
    lines = [json.dumps({"problem": f"{a}+{b}", "answer": str(a + b), "level": a % 3}) + "\n" for a, b in pairs]
    (tmp_path / "train.jsonl").write_text("".join(lines[:40]))
    (tmp_path / "test.jsonl").write_text("".join(lines[40:]))
    monkeypatch.chdir(tmp_path)
    names = []
    for program, name, *arguments in (shlex.split(line, comments=True) for line in block.splitlines()):
        assert program == "pacs-trl"
        named = ["--model_name_or_path", model_path] if name == "train" else []
        arguments = [model_path if word == "HuggingFaceTB/SmolLM2-135M-Instruct" else word for word in arguments]
        monkeypatch.setattr("sys.argv", [program, name, *arguments, *named, *SHORTER[name]])
        assert cli.main() == 0, capsys.readouterr().err
        names.append(name)
    assert names == ["recipes", "evaluate", "train", "evaluate", "report"]
    results = json.loads((tmp_path / "outputs/mine/evaluation/results.json").read_text())
    assert len(results["benchmarks"]["test"]["problems"]) == 10
    assert results["benchmarks"]["test"]["verification"].keys() <= {"correct", "wrong", "no_answer"}
    table = (tmp_path / "outputs/mine/report/tables.md").read_text()
    assert "<summary>test</summary>" in table and "k=4" in table
    assert (tmp_path / "outputs/mine/report/pass_at_k.png").is_file()
