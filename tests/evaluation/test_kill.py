"""kill -9 at random moments of an evaluation, again and again: the counts are those of an undisturbed run.

`PACS_NUM_KILLS=20 pytest tests/evaluation/test_kill.py` runs the full exercise.
"""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from support.processes import start
from support.seeds import shifted

from pacs_trl.evaluation.arguments import EvaluationArguments
from pacs_trl.evaluation.results import read_results
from pacs_trl.evaluation.run import evaluate
from pacs_trl.verification import Verifier


NUM_KILLS = int(os.environ.get("PACS_NUM_KILLS", "3"))


def evaluate_to_the_end(arguments):
    with Verifier(num_workers=1) as verifier:
        evaluate(EvaluationArguments(**arguments), verifier, progress=False)


@pytest.mark.slow
def test_counts_survive_any_kill(arguments, tmp_path):
    output = tmp_path / "output"
    arguments = {**arguments, "n": 64, "k": "1,64", "batch_size": 8}
    undisturbed = {**arguments, "output_dir": str(tmp_path / "undisturbed")}
    killed = {**arguments, "output_dir": str(tmp_path / "killed")}
    start(evaluate_to_the_end, undisturbed, output=output).join(timeout=120)
    expected = read_results(tmp_path / "undisturbed")
    total = sum(p["n"] for p in expected["benchmarks"]["math_500"]["problems"])

    rng = random.Random(shifted(0))
    store = Path(tmp_path / "killed" / "samples" / "math_500.jsonl")
    stored: list[int] = []
    for kills_left in range(NUM_KILLS, 0, -1):
        before = count_lines(store)
        child = start(evaluate_to_the_end, killed, output=output)
        # Let some more lines appear, then strike: within a line, within a forward pass, while the file is read back.
        target = before + rng.randint(0, max(1, (total - before) // kills_left))
        deadline = time.monotonic() + 60
        while child.is_alive() and count_lines(store) < target and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(rng.random() * 0.03)
        child.kill()
        child.join()
        assert child.exitcode in (0, -signal.SIGKILL), output.read_text()[-3000:]
        stored.append(count_lines(store))
    assert len(set(stored)) > 1, "the kills should strike at different moments"

    last = start(evaluate_to_the_end, killed, output=output)
    last.join(timeout=120)
    assert last.exitcode == 0
    survived = read_results(tmp_path / "killed")
    assert survived["benchmarks"] == expected["benchmarks"]
    print(f"lines after each of {NUM_KILLS} kills: {stored} of {total + 1}")
    lines = store.read_text().splitlines()
    assert len(lines) == total + 1 == len(set(lines))
    assert sorted(lines) == sorted((tmp_path / "undisturbed" / "samples" / "math_500.jsonl").read_text().splitlines())


def count_lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0
