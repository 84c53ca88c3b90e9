"""Files of the miniature for recipes: `python -m experiments.miniature.files [TASK[/SIZE] ...]`.

Problems of every task are written to `outputs/miniature/data`, the warm starts that are named to
`outputs/miniature/models`.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pacs_trl.errors import exit_code
from pacs_trl.settings import Parser

from .tasks import TASKS, Split, problems


DATA_DIR = Path("outputs/miniature/data")
MODELS_DIR = Path("outputs/miniature/models")
CRITIC_PROMPT = "experiments/miniature/critic_prompt.txt"  # of GenAC


def data_file(task: str, split: Split) -> Path:
    """Return the path of the problems of a split, relative to the working directory."""
    return DATA_DIR / f"{task}_{split}.jsonl"


def benchmark(task: str) -> str:
    """Return the held-out problems of a task as `benchmarks` of an evaluation."""
    return f"miniature/{task}={data_file(task, 'test')}"


def write_data(directory: Path = DATA_DIR) -> None:
    """Write the problems of every task, unless the files are newer than the tasks; safe with several processes."""
    tasks_changed = Path(problems.__code__.co_filename).stat().st_mtime
    directory.mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        for split in ("train", "test"):
            path = directory / data_file(task, split).name
            if path.is_file() and path.stat().st_mtime > tasks_changed:
                continue
            partial = path.with_suffix(f".{os.getpid()}")
            partial.write_text("".join(json.dumps(row) + "\n" for row in problems(task, split)))
            os.replace(partial, path)


def model_directory(name: str) -> Path:
    """Return the path of the warm start `TASK` or `TASK/SIZE` in recipes."""
    task, _, size = name.partition("/")
    return MODELS_DIR / f"{task}-{size or 'small'}"


def warm_start_of(directory: str | Path, **settings) -> Path:
    """Return the warm start that a recipe names, trained on first use; `settings` as in
    [`~warm_start.warm_start`]. Other models are returned unchanged."""
    from .warm_start import warm_start  # slow to import

    directory = Path(directory)
    if directory.parent != MODELS_DIR:
        return directory
    task, _, size = directory.name.rpartition("-")
    return warm_start(f"{task}/{size}", **settings)


def write_model(name: str) -> Path:
    """Let the directory of the warm start `TASK` or `TASK/SIZE` in recipes be a link to it; train it on first use."""
    directory = model_directory(name)
    start = warm_start_of(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.unlink(missing_ok=True)  # of an earlier version of the code
    directory.symlink_to(start.resolve())
    return directory


def main(argv: Sequence[str] = ()) -> None:
    """Command line: writes all problems and the warm starts that are named."""
    parser = Parser("files", __doc__, prog="python -m experiments.miniature.files")
    parser.add_argument("names", nargs="*", metavar="TASK[/SIZE]", help="warm starts to write, such as addition")
    names = parser.parse_args(argv).names
    write_data()
    print(f"{DATA_DIR}: problems of {', '.join(TASKS)}")
    for name in names:
        print(write_model(name))


if __name__ == "__main__":
    sys.exit(exit_code("python -m experiments.miniature.files", main, sys.argv[1:]))
