"""Pieces without torch: what the command does with them is what it does with the real ones. They leave a line in `$CALLS`, a file, when
they begin."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from pacs_trl.gpu_check.results import Found, NotPossible, Piece


def _begin(device: str, directory: Path) -> None:
    assert device == "cpu" and not any(directory.iterdir())
    (directory / "left").write_text("by a process that was killed, perhaps")
    with open(os.environ["CALLS"], "a") as calls:
        calls.write(f"{directory.name} {os.getpid()}\n")


def found(device, directory, number=0, seconds=0.0):
    _begin(device, directory)
    time.sleep(seconds)
    return Found([{"number": number, "half": number / 3}], {"it is a number": True}, f"number {number}")


def missed(device, directory):
    _begin(device, directory)
    return Found([], {"that holds": True, "that does not": False})


def raised(device, directory):
    _begin(device, directory)
    raise RuntimeError("a library\nsays so")


def secretive(device, directory):
    _begin(device, directory)
    raise OSError("no weights in /home/alice/models/model.bin (HF_TOKEN=hf_abcdefghij0123456789)")


def impossible(device, directory):
    _begin(device, directory)
    raise NotPossible("no such card")


def crashed(device, directory):
    _begin(device, directory)
    print("the last words", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def hung(device, directory):
    """With a process of its own, which must not outlive it."""
    _begin(device, directory)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(os.environ["CALLS"], "a") as calls:
        calls.write(f"child {child.pid}\n")
    time.sleep(600)


def piece(name: str, part: str = "attention", needs=(), **settings) -> Piece:
    function = name.partition("-")[0]
    return Piece(part, name, f"stand_ins:{function}", settings, needs)


def main() -> None:
    """`gpu-check` with stand-ins, as a process that can be killed: `stand_ins.py OUTPUT NUMBER SECONDS`."""
    from pacs_trl.gpu_check import command

    pieces = [piece(f"found-{i}", number=i, seconds=float(sys.argv[3])) for i in range(int(sys.argv[2]))]
    pieces += [piece("missed"), piece("found-nowhere", "vllm", needs=("cuda",))]
    command.pieces_of = lambda device: pieces
    sys.exit(command.main(["--device", "cpu", "--output", sys.argv[1]]))


if __name__ == "__main__":
    main()
