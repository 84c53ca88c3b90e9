"""Which pieces there are, in the order in which they run: what tells most first. On a CPU the same functions get tiny sizes."""

from typing import Any

from .arguments import SOAK_MINUTES
from .results import Piece


_HERE = "pacs_trl.gpu_check"

# What a first call should reach in five minutes: is packing right, how fast is a step, does an engine get the weights.
FIRST = ("attention-small-sdpa", "attention-small-flash2", "step-1.7B-pacs", "step-1.7B-grpo", "vllm-weights")


def pieces_of(device: str) -> list[Piece]:
    """All pieces for `"cuda"` or `"cpu"`."""
    on_gpu = device == "cuda"
    found = [*_attention(on_gpu), *_step(on_gpu)]
    return sorted(found, key=lambda piece: FIRST.index(piece.name) if piece.name in FIRST else len(FIRST))


def _attention(on_gpu: bool) -> list[Piece]:
    kinds = {"sdpa": ("sdpa", ()), "flash2": ("flash_attention_2", ("cuda", "flash_attn"))}
    kinds["flash3"] = ("flash_attention_3", ("cuda", "flash_attn_interface"))
    models = {"small": ("small" if on_gpu else "tiny", 512 if on_gpu else 24, ())}
    if on_gpu:
        models["1.7B"] = ("Qwen3-1.7B", 1024, ("60 GiB",))
    found = [
        Piece(
            "attention",
            f"attention-{name}-{kind}",
            f"{_HERE}.attention:compare",
            {"model": model, "attention": attention, "completion_max": longest},
            (*needs, *room),
        )
        for name, (model, longest, room) in models.items()
        for kind, (attention, needs) in kinds.items()
    ]
    for name, (model, longest, room) in models.items():
        settings = {"model": model, "completion_max": longest}
        found.append(Piece("attention", f"drift-{name}", f"{_HERE}.drift:drift", settings, room))
    return found


def _step(on_gpu: bool) -> list[Piece]:
    sizes: dict[str, dict[str, Any]] = {"tiny": {"model": "tiny", "completion_max": 48, "repeats": 2, "matmul": 256}}
    if on_gpu:
        sizes = {"1.7B": {"model": "Qwen3-1.7B"}, "4B": {"model": "Qwen3-4B"}}
    return [
        Piece(
            "step",
            f"step-{name}-{method}{'-checkpointing' if checkpointing else ''}",
            f"{_HERE}.steps:measure_steps",
            {**size, "method": method, "checkpointing": checkpointing},
            ("100 GiB",) if name == "4B" else ("40 GiB",) * on_gpu,
        )
        for name, size in sizes.items()
        for checkpointing in (False, True)
        for method in ("pacs", "grpo")
    ]
