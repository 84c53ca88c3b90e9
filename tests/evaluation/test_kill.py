"""kill -9 at random moments of an evaluation, again and again: the counts are those of an undisturbed run.

`PACS_NUM_KILLS=20 pytest tests/evaluation/test_kill.py` runs the full exercise.
"""

import multiprocessing
import os
import random
import time
from pathlib import Path

import pytest

from pacs_trl.evaluation.arguments import EvaluationArguments
from pacs_trl.evaluation.evaluate import evaluate
from pacs_trl.evaluation.results import read_results
from pacs_trl.verification import Verifier


NUM_KILLS = int(os.environ.get("PACS_NUM_KILLS", "3"))


def evaluate_in_child(arguments):
    with Verifier(num_workers=1) as verifier:
        evaluate(EvaluationArguments(**arguments), verifier, progress=False)


@pytest.mark.parametrize("seed", [0])
def test_counts_survive_any_kill(arguments, tmp_path, seed):
    arguments = {**arguments, "n": 32, "k": "1,32", "batch_size": 8}
    # A fork server has imported everything once, so that a child spends its life sampling and not importing.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pacs_trl.evaluation.evaluate", "pacs_trl.evaluation.sampling"])

    def start(output_dir):
        child = context.Process(target=evaluate_in_child, args=({**arguments, "output_dir": str(output_dir)},))
        child.start()
        return child

    undisturbed = start(tmp_path / "undisturbed")
    undisturbed.join(timeout=120)
    expected = read_results(tmp_path / "undisturbed")
    total = sum(p["n"] for p in expected["benchmarks"]["math_500"]["problems"])

    rng = random.Random(seed)
    store = Path(tmp_path / "killed" / "samples" / "math_500.jsonl")
    stored = []
    for _ in range(NUM_KILLS):
        lines_before = _count_lines(store)
        child = start(tmp_path / "killed")
        # Let a few more lines appear, then strike at any point of the write, the next forward pass or the grading.
        target = lines_before + rng.randint(0, max(1, (total - lines_before) // 4))
        deadline = time.monotonic() + 60
        while child.is_alive() and _count_lines(store) < target and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(rng.random() * 0.05)
        child.kill()
        child.join()
        stored.append(_count_lines(store))
    assert len(set(stored)) > 1, "the kills should strike at different moments"

    last = start(tmp_path / "killed")
    last.join(timeout=120)
    assert last.exitcode == 0
    survived = read_results(tmp_path / "killed")
    assert survived["benchmarks"] == expected["benchmarks"]
    lines = store.read_text().splitlines()
    assert len(lines) == total + 1 == len(set(lines))


def _count_lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0
