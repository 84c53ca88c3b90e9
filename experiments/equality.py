"""Compare weights, metrics, and files of training and evaluation between a commit and the working tree, bit by bit.

    python -m experiments.equality                    # against BEFORE; about four minutes per side
    python -m experiments.equality COMMIT --only rollout ppo

Runs `equality_scenarios.py` with the package of the commit, in a temporary worktree, and with that of the working
tree. Prints a Markdown table; the exit code is 1 if a scenario differs: in a bit of a weight or of a logged number, or
because only one side has a file, a tensor, or a number. Renamed and new metrics are named in RENAMED and ADDED. One
thread, no downloads; output goes to a temporary folder (`--keep DIR` keeps it).
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

import torch
from safetensors.torch import load_file


BEFORE = "a5bc2ba"
# Metrics that the working tree logs under another name than BEFORE, old name: new name. The numbers must be equal. The
# old name may stay as an alias.
RENAMED: dict[str, str] = {
    "pacs/forwarded_fraction": "update/forwarded_fraction",
    "pacs/non_finite_steps": "update/non_finite_steps",
    "pacs/uniform_group_fraction": "labels/uniform_group_fraction",
    "pacs/label_mean": "labels/mean",
    "eval_pacs/forwarded_fraction": "eval_update/forwarded_fraction",
    "eval_pacs/uniform_group_fraction": "eval_labels/uniform_group_fraction",
    "eval_pacs/label_mean": "eval_labels/mean",
}
# Metrics that only the working tree logs.
ADDED: set[str] = set()
# Metrics that depend on a clock: both sides must log them, and their numbers are not compared.
CLOCKS = (
    *("time/*", "perf/*", "step_time", "*_runtime", "*_per_second"),
    *("async/engine_wait", "async/learner_wait", "async/overlapped_share"),
)

ROOT = Path(__file__).resolve().parents[1]
SCENARIOS = Path(__file__).with_name("equality_scenarios.py")


@dataclass
class Comparison:
    """
    What two sides of a scenario differ in.

    Attributes:
        largest (`float`): Largest absolute difference of a weight.
        relative (`float`): Norm of the difference over norm of what training changed, the largest one of all files.
        bit_equal (`bool`): Whether all weights and files have the same bits.
        compared (`int`): Weights, files, and numbers that both sides have.
        metrics (`list[str]`): Logged numbers that differ.
        problems (`list[str]`): Whatever else makes the scenario fail.
    """

    largest: float = 0.0
    relative: float = 0.0
    bit_equal: bool = True
    compared: int = 0
    metrics: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return not self.bit_equal or bool(self.metrics or self.problems)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit", nargs="?", default=BEFORE)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="some of SCENARIOS in equality_scenarios.py"
    )
    parser.add_argument("--keep", type=Path, help="folder for what the runs write, instead of a temporary one")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, so that the worktree goes
    with tempfile.TemporaryDirectory() as temporary, worktree(args.commit, Path(temporary) / "worktree") as before:
        output = (args.keep or Path(temporary)).resolve()
        inputs = make_inputs(output / "inputs")
        sides = [
            run_side(before, inputs, output / "before", args.only),
            run_side(ROOT, inputs, output / "after", args.only),
        ]
        print(f"Weights after training, the working tree against {args.commit} ({torch.__version__}, one thread).\n")
        print("| scenario | bit-equal | largest difference | relative | seconds before | after | |")
        print("| --- | --- | ---: | ---: | ---: | ---: | --- |")
        names = json.loads((sides[0] / "names.json").read_text())
        failures = [name for name in names if report(name, inputs, *(side / name for side in sides))]
        print(f"\n{len(names)} scenarios, {len(failures)} differ.")
        return int(bool(failures))


@contextmanager
def worktree(commit: str, path: Path) -> Iterator[Path]:
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(path), commit], check=True)
    try:
        yield path
    finally:
        subprocess.run([*git, "remove", "--force", str(path)], check=True)


def make_inputs(directory: Path) -> Path:
    sys.path.append(str(SCENARIOS.parent))  # where a script, unlike `python -m`, finds the next module
    from equality_inputs import write_inputs  # after `--help`: transformers is slow to import
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    write_inputs(directory)
    return directory


def run_side(root: Path, inputs: Path, output: Path, names: list[str]) -> Path:
    """Run all scenarios in one process, with the package under `root`."""
    work = output / "cwd"
    work.mkdir(parents=True)
    env = os.environ | {
        "PYTHONPATH": str(root),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    log = output / "log.txt"
    with log.open("w") as file:
        command = [sys.executable, str(SCENARIOS), str(inputs), str(output), *names]
        code = subprocess.run(command, cwd=work, env=env, stdout=file, stderr=subprocess.STDOUT).returncode
    if code != 0 or f"pacs_trl from {root / 'pacs_trl'}\n" not in log.read_text():
        raise SystemExit(f"The scenarios did not run with {root} (exit code {code}):\n{log.read_text()[-3000:]}")
    return output


def report(name: str, inputs: Path, before: Path, after: Path) -> bool:
    """Print the row of a scenario; return whether it failed."""
    result = compare(before, after, inputs)
    notes = ["FAILED"] if result.failed else []
    notes += result.problems[:5]
    if len(result.problems) > 5:
        notes.append(f"{len(result.problems) - 5} more problems")
    if result.metrics:
        notes.append(f"{len(result.metrics)} numbers differ: {', '.join(result.metrics[:3])}")
    seconds = " | ".join((side / "seconds.txt").read_text() for side in (before, after))
    equal = "yes" if result.bit_equal else "no"
    cells = f"| {name} | {equal} | {result.largest:.2g} | {result.relative:.2g} | {seconds} |"
    print(f"{cells} {'; '.join(notes).replace('|', '/')} |", flush=True)
    return result.failed


def compare(before: Path, after: Path, inputs: Path) -> Comparison:
    """Compare the folders that a scenario has written on two sides; `inputs` has the weights before training."""
    result = Comparison()
    for label, side in (("before", before), ("after", after)):
        if (side / "error.txt").exists():
            result.problems.append(f"{label}: {(side / 'error.txt').read_text().strip().splitlines()[-1]}")
    if result.problems:
        result.bit_equal = False
        return result
    compare_weights(result, before, after, inputs)
    compare_files(result, before / "files", after / "files")
    compare_metrics(result, before, after)
    if result.compared == 0:
        result.problems.append("nothing was compared")
    return result


def compare_weights(result: Comparison, before: Path, after: Path, inputs: Path) -> None:
    files = files_of_both(result, before / "weights", after / "weights", "*.safetensors")
    for file in files:
        old, new = load_file(before / "weights" / file), load_file(after / "weights" / file)
        if {n: (v.shape, v.dtype) for n, v in old.items()} != {n: (v.shape, v.dtype) for n, v in new.items()}:
            result.problems.append(f"{file} has other tensors")
            continue
        initial = load_file(inputs / "policy" / "model.safetensors")
        difference = changed = 0.0
        for key, value in old.items():
            if not torch.equal(value.view(torch.uint8), new[key].view(torch.uint8)):
                result.bit_equal = False
            gap = (new[key].double() - value.double()).abs()
            result.largest = max(result.largest, gap.max().item())
            difference += gap.square().sum().item()
            start = initial[key].double() if key in initial else 0.0
            changed += (value.double() - start).square().sum().item()
            result.compared += 1
        if changed == 0.0 or not math.isfinite(changed + difference):
            result.problems.append(f"{file}: nothing was learned, or not finite")
            continue
        result.relative = max(result.relative, math.sqrt(difference / changed))


def compare_files(result: Comparison, before: Path, after: Path) -> None:
    for file in files_of_both(result, before, after, "*"):
        result.compared += 1
        if (before / file).read_bytes() != (after / file).read_bytes():
            result.bit_equal = False
            result.problems.append(f"{file} differs")


def files_of_both(result: Comparison, before: Path, after: Path, pattern: str) -> list[str]:
    """Return the files that both folders have; those that only one has are problems."""
    old, new = ({str(p.relative_to(side)) for p in side.rglob(pattern) if p.is_file()} for side in (before, after))
    result.problems += [f"{file} is missing after" for file in sorted(old - new)]
    result.problems += [f"{file} is missing before" for file in sorted(new - old)]
    return sorted(old & new)


def compare_metrics(result: Comparison, before: Path, after: Path) -> None:
    """Compare logged numbers, whose keys are `RUN|STEP|METRIC`."""
    files = files_of_both(result, before, after, "metrics.json")
    if not files:
        return
    old, new = (json.loads((side / "metrics.json").read_text()) for side in (before, after))
    expected = set()  # numbers of the new side that the old side explains
    for key, number in old.items():
        where, _, metric = key.rpartition("|")
        names = [name for name in (metric, RENAMED.get(metric)) if f"{where}|{name}" in new]
        if not names:
            result.problems.append(f"{key} is missing after")
        expected |= {f"{where}|{name}" for name in names}
        for name in names:
            result.compared += 1
            is_clock = any(fnmatch(metric, pattern) for pattern in CLOCKS)
            if not is_clock and repr(new[f"{where}|{name}"]) != repr(number):
                result.metrics.append(f"{where}|{name}")
    for key in sorted(new.keys() - expected):
        if key.rpartition("|")[2] not in ADDED:
            result.problems.append(f"{key} is missing before")


if __name__ == "__main__":
    sys.exit(main())
