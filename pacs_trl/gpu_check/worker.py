"""The process of one piece: `python -m pacs_trl.gpu_check.worker JSON`. It ends with whoever started it, and all it has started with it."""

import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from .results import NotPossible, Piece, write


def main() -> None:
    order = json.loads(sys.argv[1])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    run(Piece(**order["piece"]), order["device"], Path(order["output"]), order["environment"])


def _end_with_parent() -> None:
    """Standard input is a pipe that nobody writes to: it ends when the process that holds the other end does, however that was."""
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)


def run(piece: Piece, device: str, output: Path, environment: dict[str, Any]) -> None:
    """Call the function of a piece and write what came of it."""
    directory = (output / "work" / (piece.kept or piece.name)).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    module, _, name = piece.function.partition(":")
    started = time.perf_counter()
    more: dict[str, Any] = {"environment": environment}
    try:
        found = getattr(importlib.import_module(module), name)(device=device, directory=directory, **piece.settings)
        more |= found._asdict()
        missed = [text for text, holds in found.bars.items() if not holds]
        status, reason = ("failed" if missed else "passed"), "; ".join(f"not so: {text}" for text in missed)
    except NotPossible as error:
        status, reason = "not possible", str(error)
    except Exception as error:  # of any library; it ends this piece only, and stands in the report
        traceback.print_exc()
        status, reason = "failed", f"{type(error).__name__}: {error}"
    write(output, piece, status, " ".join(reason.split())[:1000], seconds=time.perf_counter() - started, **more)


if __name__ == "__main__":
    main()
