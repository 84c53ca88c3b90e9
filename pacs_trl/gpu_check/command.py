"""`pacs-trl gpu-check`: run what is missing, one piece after another, and write the report anew after each.

A piece is a process, so that one that crashes, hangs or fills the memory ends nothing but itself. This process loads neither torch
nor CUDA. Its results are files, so whatever ends it, the next call goes on.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..evaluation.store import lock
from ..settings.optional import check_writable
from . import results
from .arguments import read_gpu_check_arguments
from .machine import lacking, machine
from .pieces import pieces_of
from .report import write_report
from .results import Piece


def main(argv: Sequence[str]) -> int:
    """Returns 1 if a piece has failed, else 0. `argv` is what the command line gives."""
    own = read_gpu_check_arguments(argv)
    deadline = time.monotonic() + 60 * own.minutes
    environment = machine(own.device)
    check_writable("output", own.output)
    with _alone(own.output):
        _require_same_card(own.output, environment)
        for half in (
            *(own.output / "results").glob(".*.json.*"),
            *own.output.glob(".report.*"),
        ):  # of a write that was killed
            half.unlink()
        pieces = pieces_of(own.device)
        wanted = [piece for piece in pieces if piece.part in own.parts]
        print(f"{environment['card']}: {len(wanted)} pieces; results in {own.output}", flush=True)
        try:
            run_missing(
                wanted, own.output, environment, deadline, lambda: write_report(own.output, pieces, environment)
            )
        finally:
            report = write_report(own.output, pieces, environment)
    print("\n" + (own.output / "report.md").read_text(encoding="utf-8").partition("\n## ")[0])
    asked = [entry for entry in report["pieces"] if entry["part"] in own.parts]
    left = [entry["name"] for entry in asked if entry["status"] == "not run" and entry["part"] != "plan"]
    if left:
        print(f"Left: {len(left)} pieces, {left[0]} first. The same command goes on with it.")
    print(f"The report is {own.output / 'report.md'}.")
    return int(any(entry["status"] == "failed" for entry in asked))


@contextmanager
def _alone(output: Path) -> Iterator[None]:
    """Two calls would write the same results, and each would slow down what the other one measures."""
    with (output / ".lock").open("w") as file:
        lock(file, f"Another gpu-check is writing to {output}. Wait for it: two on one card would measure each other.")
        yield


def _require_same_card(output: Path, environment: dict[str, Any]) -> None:
    others = {found["environment"].get("card") for found in results.read(output).values()} - {environment["card"]}
    if others:
        raise ValueError(
            f"{output} holds results of {', '.join(map(str, others))}, and this is {environment['card']}: one report is of one "
            "card. Name another directory with --output."
        )


def run_missing(
    wanted: Sequence[Piece], output: Path, environment: dict[str, Any], deadline: float, after_each: Any
) -> None:
    """Run the pieces that have no result until `deadline` (of `time.monotonic`). One that had all the time of a call and did not
    end has failed; another one that is interrupted begins anew in the next call."""
    found, whole, is_first = results.read(output), deadline - time.monotonic(), True
    for piece in wanted:
        if found.get(piece.name, {"status": "not possible"})["status"] != "not possible":
            continue
        if why := lacking(piece.needs, environment):  # asked every time: what was missing may be there now
            results.write(output, piece, "not possible", why, environment=environment)
            continue
        left = deadline - time.monotonic()
        if not is_first and left < 0.1 * whole:
            return
        print(f"  {piece.name} ...", end=" ", flush=True)
        ended = run_piece(piece, output, environment, max(left, 1.0))
        if not ended and not is_first:
            print("stopped, the time is over", flush=True)
            return
        if not ended:
            why = "it did not end in a call that it had to itself: remove this result and give --minutes more"
            results.write(output, piece, "failed", why, environment=environment, seconds=whole)
        entry = results.read(output)[piece.name]
        print(f"{entry['status']}, {entry['seconds']:.0f} s. {entry['reason'] or entry.get('short', '')}", flush=True)
        after_each()
        is_first = False


def run_piece(piece: Piece, output: Path, environment: dict[str, Any], seconds: float) -> bool:
    """Run a piece in a process group of its own; whether it ended in time. If it died without a result, that is the result."""
    (output / "logs").mkdir(exist_ok=True)
    (output / "results" / f"{piece.name}.json").unlink(missing_ok=True)  # torn
    _remove_work(piece, output)
    log, started = output / "logs" / f"{piece.name}.log", time.monotonic()
    order = {
        "piece": piece._asdict(),
        "device": environment["device"],
        "output": str(output),
        "environment": environment,
    }
    with log.open("w") as lines:
        process = subprocess.Popen(
            [sys.executable, "-m", "pacs_trl.gpu_check.worker", json.dumps(order)],
            stdin=subprocess.PIPE,
            stdout=lines,
            stderr=subprocess.STDOUT,
            env=_environment_of(piece, environment),
            start_new_session=True,
        )
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return False
        finally:  # what it has started, too
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
            _remove_work(piece, output)
    if piece.name not in results.read(output):
        code, last = process.returncode, log.read_text(errors="replace").strip().rpartition("\n")[2]
        how = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
        why = f"the process ended with {how} and without a result; its log ends with: {last[:300]}"
        took = time.monotonic() - started
        results.write(output, piece, "failed", why, environment=environment, seconds=took)
    return True


def _remove_work(piece: Piece, output: Path) -> None:
    if not piece.kept:
        shutil.rmtree(output / "work" / piece.name, ignore_errors=True)


def _environment_of(piece: Piece, environment: dict[str, Any]) -> dict[str, str]:
    """Nothing is downloaded or reported; one GPU is seen unless the piece wants more (with several, transformers' trainer would use
    them all); nothing of a launcher around this command reaches it."""
    inherited = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    }
    inherited |= {
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
    }
    if environment["device"] == "cpu":
        inherited |= {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true", "DS_ACCELERATOR": "cpu"}
    elif not any(need.endswith(" GPUs") for need in piece.needs):
        inherited["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return inherited | piece.env
