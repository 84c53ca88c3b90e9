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
    found = [*_attention(on_gpu), *_step(on_gpu), *_vllm(on_gpu), *_gpus(on_gpu), *_soak(on_gpu)]
    return sorted(found, key=lambda piece: FIRST.index(piece.name) if piece.name in FIRST else len(FIRST))


def _attention(on_gpu: bool) -> list[Piece]:
    kinds: dict[str, tuple[str, tuple[str, ...]]] = {
        "sdpa": ("sdpa", ()),
        "flash2": ("flash_attention_2", ("cuda", "flash_attn")),
    }
    kinds["flash3"] = ("flash_attention_3", ("cuda", "flash_attn_interface"))
    models: dict[str, tuple[str, int, tuple[str, ...]]] = {
        "small": ("small" if on_gpu else "tiny", 512 if on_gpu else 24, ())
    }
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
    steps = {"model": "tiny", "kind": "one"}
    return [*found, Piece("attention", "steps-as-on-the-cpu", f"{_HERE}.ranks:against_one", steps, ("cuda",))]


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


def _vllm(on_gpu: bool) -> list[Piece]:
    engine = {"model": "small" if on_gpu else "tiny", "fraction": 0.3}
    env = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"} | (
        {} if on_gpu else {"VLLM_CPU_KVCACHE_SPACE": "1"}
    )
    dtype = "auto" if on_gpu else "float32"
    quick: dict[str, Any] = (
        {} if on_gpu else {"num_problems": 8, "num_samples": 2, "max_steps": 2, "per_device_train_batch_size": 16}
    )
    quick |= {} if on_gpu else {"start": {"target_accuracy": None, "max_steps": 2, "size": "tiny"}, "judged": False}
    awake = {**engine, "dtype": dtype, "sleep": False}
    found: list[tuple[str, str, dict[str, Any], tuple[str, ...]]] = [
        ("weights", "engine:weights", awake, ()),
        ("sleep", "engine:weights", {**awake, "sleep": True}, ("cuda",)),
        ("memory-60", "engine:weights", {**awake, "fraction": 0.6}, ("cuda",)),
        ("resume", "engine:resume", {**engine, "dtype": dtype}, ()),
        ("learns", "learn:learns", {"engine": "vllm", **quick}, ()),
    ]
    longer = {**engine, "model": "Qwen3-0.6B", "completion_max": 512} if on_gpu else {**engine, "completion_max": 8}
    pieces = [Piece("vllm", f"vllm-{name}", f"{_HERE}.{f}", s, ("vllm", *needs), env) for name, f, s, needs in found]
    for dtype in ("bfloat16", "float32"):
        for invariant in (False, True):
            name = f"vllm-mismatch-{dtype}{'-invariant' if invariant else ''}"
            needs = ("vllm", "cuda") if invariant or dtype == "bfloat16" else ("vllm",)
            more = {"VLLM_BATCH_INVARIANT": "1"} if invariant else {}
            settings = {**longer, "dtype": dtype}
            pieces.append(Piece("vllm", name, f"{_HERE}.engine:mismatch", settings, needs, env | more))
    without = {"engine": "transformers", **quick}
    return [*pieces, Piece("vllm", "learns-without-vllm", f"{_HERE}.learn:learns", without)]


def _gpus(on_gpu: bool) -> list[Piece]:
    model = "small" if on_gpu else "tiny"
    pieces = [
        Piece("gpus", f"gpus-{kind}", f"{_HERE}.ranks:against_one", {"model": model, "kind": kind}, ("2 GPUs", *needs))
        for kind, needs in {"ddp": (), "fsdp2": (), "zero3": ("deepspeed",)}.items()
    ]
    engine = {"model": model, "dtype": "auto", "fraction": 0.3, "sleep": False}
    both = ("cuda", "2 GPUs", "vllm")
    pieces.append(Piece("gpus", "gpus-tensor-parallel", f"{_HERE}.ranks:tensor_parallel", engine, both))
    pieces.append(Piece("gpus", "gpus-server", f"{_HERE}.server:server", {"model": model}, both))
    lora = (
        {"model": "Qwen3-8B", "completion_max": 4096}
        if on_gpu
        else {"model": "tiny", "completion_max": 48, "repeats": 2, "matmul": 256}
    )
    lora |= {"method": "pacs", "checkpointing": True, "lora": True}
    room = ("40 GiB",) if on_gpu else ()
    return [*pieces, Piece("gpus", "lora-8B" if on_gpu else "lora-tiny", f"{_HERE}.steps:measure_steps", lora, room)]


def _soak(on_gpu: bool) -> list[Piece]:
    number, seconds = (round(60 / SOAK_MINUTES), 60.0 * SOAK_MINUTES) if on_gpu else (1, 5.0)
    settings = {"model": "small" if on_gpu else "tiny", "seconds": seconds}
    return [Piece("soak", f"soak-{i}", f"{_HERE}.learn:soak", settings, kept="soak") for i in range(1, number + 1)]
