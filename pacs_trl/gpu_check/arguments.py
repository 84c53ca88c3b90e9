"""The options of `pacs-trl gpu-check`, without any library."""

from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

from ..settings.command_line import Parser, did_you_mean


DESCRIPTION = """\
Measure and compare what this package does on the GPUs of this machine, with random weights and the miniature: nothing is
downloaded. Everything runs in processes of its own, the report is written anew after each of them, and the same command
goes on where it was stopped. Exit status 1: something has failed. How to read it: docs/gpu.md.
"""

# The most telling first. What is only run when it is asked for stands last.
PARTS = {
    "attention": "packed and padded forward and backward passes against float32; proxies when nothing has moved",
    "step": "an optimizer step of PACS and of TRL's GRPO: seconds, tokens, FLOP utilization, memory",
    "plan": "`pacs-trl plan` against what `step` has measured; runs nothing",
    "vllm": "a colocated engine: weights that arrive, sleep, seeds, resuming, mismatch; the miniature learns",
    "gpus": "DDP, FSDP2, ZeRO-3, tensor parallel and a vLLM server on several GPUs; LoRA of 8B on one",
    "soak": "an hour of training, only if it is named: memory stays, metrics are sane",
}
SOAK_MINUTES = 8  # of each of its pieces


def read_gpu_check_arguments(argv: Sequence[str]) -> Namespace:
    """
    `parts` (in the order of `PARTS`), `minutes`, `output` and `device`.

    Raises:
        `SystemExit`: with code 0 after the help, with 2 if an option has a wrong value.
        `ValueError`: if there is no such part, or the minutes are too few.
    """
    parts = "parts:\n" + "\n".join(f"  {name:10} {words}" for name, words in PARTS.items())
    parser = Parser("gpu-check", DESCRIPTION, epilog=parts, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", metavar="PART", help="some of those below; by default all but soak")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long this call may take; by default 10")
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/gpu-check"), metavar="DIR", help="by default outputs/gpu-check"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the same code at tiny sizes, to try it out"
    )
    own = parser.parse_args(argv)
    asked = own.parts or [part for part in PARTS if part != "soak"]
    for part in asked:
        if part not in PARTS:
            near = did_you_mean(part, PARTS)
            raise ValueError(f"--parts: there is no part {part!r}.{near} Choose from {', '.join(PARTS)}.")
    own.parts = [part for part in PARTS if part in asked]
    if not 0 < own.minutes < float("inf"):
        raise ValueError(
            f"--minutes must be a number above 0, got {own.minutes:g}: it is how long this call may take."
        )
    if "soak" in own.parts and own.device == "cuda" and own.minutes < SOAK_MINUTES + 2:
        raise ValueError(
            f"--minutes={own.minutes:g} is too short for the part soak, each piece of which takes {SOAK_MINUTES} minutes and "
            f"a start. Give it {SOAK_MINUTES + 2} or more; the same command goes on with the next piece."
        )
    return own
