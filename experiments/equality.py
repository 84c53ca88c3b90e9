"""Compare weights, metrics, and files of training and evaluation between a commit and the working tree, bit by bit.

    python experiments/equality.py                    # against BEFORE; about three minutes per side
    python experiments/equality.py COMMIT --only rollout ppo

Runs `equality_scenarios.py` with the package of the commit, in a temporary worktree, and with that of the working
tree. Prints a Markdown table; the exit code is 1 if a scenario differs. One thread, no downloads;
output goes to a temporary folder (`--keep DIR` keeps it).
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
from pathlib import Path

import torch
from safetensors.torch import load_file


BEFORE = "fc65125"
ROOT = Path(__file__).resolve().parents[1]
SCENARIOS = Path(__file__).with_name("equality_scenarios.py")
# What a clock says is not compared.
CLOCKS = ("perf/", "time", "runtime", "per_second", "duration")


@dataclass
class Comparison:
    """
    What two sides of a scenario differ in.

    Attributes:
        largest (`float`): Largest absolute difference of a weight.
        relative (`float`): Norm of the difference over norm of what training changed, the larger one of policy and
            critic.
        metrics (`list[str]`): Logged numbers that differ.
        only_one_side (`list[str]`): Logged numbers that only one side has; they are named, and are no failure.
        problems (`list[str]`): Whatever makes the scenario fail in any case.
    """

    largest: float = 0.0
    relative: float = 0.0
    bit_equal: bool = True
    metrics: list[str] = field(default_factory=list)
    only_one_side: list[str] = field(default_factory=list)
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
        sides = [run_side(before, output / "before", args.only), run_side(ROOT, output / "after", args.only)]
        print(f"Weights after training, the working tree against {args.commit} ({torch.__version__}, one thread).\n")
        print("| scenario | bit-equal | largest difference | relative | seconds before | after | |")
        print("| --- | --- | ---: | ---: | ---: | ---: | --- |")
        return int(
            any(
                [
                    report(name, *(side / name for side in sides))
                    for name in json.loads((sides[0] / "names.json").read_text())
                ]
            )
        )


@contextmanager
def worktree(commit: str, path: Path) -> Iterator[Path]:
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(path), commit], check=True)
    try:
        yield path
    finally:
        subprocess.run([*git, "remove", "--force", str(path)], check=True)


def run_side(root: Path, output: Path, names: list[str]) -> Path:
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
        command = [sys.executable, str(SCENARIOS), str(output), *names]
        code = subprocess.run(command, cwd=work, env=env, stdout=file, stderr=subprocess.STDOUT).returncode
    if code != 0 or f"pacs_trl from {root / 'pacs_trl'}\n" not in log.read_text():
        raise SystemExit(f"The scenarios did not run with {root} (exit code {code}):\n{log.read_text()[-3000:]}")
    return output


def report(name: str, before: Path, after: Path) -> bool:
    """Print the row of a scenario; return whether it failed."""
    found = compare(name, before, after)
    notes = list(found.problems)
    if found.metrics:
        notes.append(f"{len(found.metrics)} numbers differ: {', '.join(found.metrics[:3])}")
    if found.only_one_side:
        notes.append(f"numbers of one side only: {', '.join(found.only_one_side[:5])}")
    seconds = " | ".join((side / "seconds.txt").read_text() for side in (before, after))
    cells = (
        f"| {name} | {'yes' if found.bit_equal else 'no'} | {found.largest:.2g} | {found.relative:.2g} | {seconds} |"
    )
    print(f"{cells} {'; '.join(['FAILED'] * found.failed + notes)} |", flush=True)
    return found.failed


def compare(name: str, before: Path, after: Path) -> Comparison:
    result = Comparison()
    for label, side in (("before", before), ("after", after)):
        if (side / "error.txt").exists():
            result.problems.append(f"{label}: {(side / 'error.txt').read_text().strip().splitlines()[-1]}")
    if result.problems:
        result.bit_equal = False
        return result
    compare_weights(result, before, after)
    compare_files(result, before / "files", after / "files")
    if name != "evaluate":  # which logs nothing
        compare_metrics(result, before, after)
    return result


def compare_weights(result: Comparison, before: Path, after: Path) -> None:
    files = same_files(result, before / "weights", after / "weights", "*.safetensors")
    initial = load_file(before.parent / "model" / "model.safetensors")
    for file in files:
        old, new = load_file(before / "weights" / file), load_file(after / "weights" / file)
        if {n: (v.shape, v.dtype) for n, v in old.items()} != {n: (v.shape, v.dtype) for n, v in new.items()}:
            result.problems.append(f"{file} has other tensors")
            continue
        difference = changed = 0.0
        for key, value in old.items():
            if not torch.equal(value.view(torch.uint8), new[key].view(torch.uint8)):
                result.bit_equal = False
            gap = (new[key].double() - value.double()).abs()
            result.largest = max(result.largest, gap.max().item())
            difference += gap.square().sum().item()
            start = initial[key].double() if key in initial else 0.0
            changed += (value.double() - start).square().sum().item()
        if changed == 0.0 or not math.isfinite(changed + difference):
            result.problems.append(f"{file}: nothing was learned, or not finite")
            continue
        result.relative = max(result.relative, math.sqrt(difference / changed))


def compare_files(result: Comparison, before: Path, after: Path) -> None:
    for file in same_files(result, before, after, "*"):
        if (before / file).read_bytes() != (after / file).read_bytes():
            result.bit_equal = False
            result.problems.append(f"{file} differs")


def same_files(result: Comparison, before: Path, after: Path, pattern: str) -> list[str]:
    """Return the files that differ between two folders, or are missing in one of them."""
    sides = [{str(p.relative_to(s)) for p in s.rglob(pattern) if p.is_file()} for s in (before, after)]
    result.problems += [f"{file} is missing on one side" for file in sorted(sides[0] ^ sides[1])]
    return sorted(sides[0] & sides[1])


def compare_metrics(result: Comparison, before: Path, after: Path) -> None:
    old, new = (json.loads((side / "metrics.json").read_text()) for side in (before, after))
    if not old:
        result.problems.append("nothing was logged")
    result.only_one_side = sorted(old.keys() ^ new.keys())
    logged = [key for key in old.keys() & new.keys() if not any(word in key for word in CLOCKS)]
    result.metrics = sorted(key for key in logged if repr(old[key]) != repr(new[key]))


if __name__ == "__main__":
    sys.exit(main())
