"""One GPU, and DDP, FSDP2, and ZeRO-3 on two, learn what one process on the CPU learns from the same rollouts."""

import pytest
from support.models import relative_error, trainable_weights
from support.rollouts import Replay
from support.runs import build_trainer
from support.sharding import FSDP_SETTINGS, let_accelerate_shard_on_cpu, zero3_settings


VARIANTS = {
    "rollout": {},
    "padded": {"packing": "never"},
    "snapshot": {"reference": "snapshot", "reference_reset_steps": 2},
    "snapshot on the CPU": {"reference": "snapshot", "reference_offload": True},
}
SETTINGS = {"one": {}, "ddp": {}, "fsdp2": FSDP_SETTINGS, "zero3": zero3_settings(0)}

# Losses and weights: sums of float32 in another order.
RELATIVE = 1e-4


def train_variants(directory, device: str, kind: str) -> dict[str, dict]:
    """Run four optimizer steps of each variant on recorded rollouts; return its weights and logs."""
    if (device, kind) == ("cpu", "fsdp2"):
        let_accelerate_shard_on_cpu()
    settings = {"use_cpu": device == "cpu", "per_device_train_batch_size": 16 if kind == "one" else 8}
    settings |= {"steps_per_generation": 2, "gradient_accumulation_steps": 1, "max_steps": 4} | SETTINGS[kind]
    results = {}
    for name, variant in VARIANTS.items():
        trainer = build_trainer(directory, replay=Replay(), **settings, **variant)
        trainer.train()
        weights = {key: weight.cpu() for key, weight in trainable_weights(trainer.model).items()}
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        results[name] = {"weights": weights, "logs": logs}
    return results


def relative_differences(results: dict, expected: dict) -> dict[str, float]:
    """Return the relative difference of the weights, and the largest of losses and of gradient norms."""
    row = {"weights": relative_error(results["weights"], expected["weights"])}
    for key in ("loss", "grad_norm"):
        values = [(a[key], b[key]) for a, b in zip(results["logs"], expected["logs"], strict=True)]
        row[key] = max(abs(a - b) / max(abs(b), 1e-3) for a, b in values)
    return row


@pytest.mark.distributed
@pytest.mark.gpu
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("one", marks=pytest.mark.needs(cuda=True)),
        pytest.param("ddp", marks=pytest.mark.needs(cuda=True, num_gpus=2)),  # tests/distributed on the CPU
        pytest.param("fsdp2", marks=pytest.mark.needs(num_gpus=2)),
        pytest.param("zero3", marks=pytest.mark.needs(cuda=True, num_gpus=2, package="deepspeed")),
    ],
)
def test_equals_one_process_on_the_cpu(alone, device, tmp_path, record_property, kind):
    cpu = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    expected = alone(train_variants, tmp_path / "cpu", "cpu", "one", **cpu)
    zero3 = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_USE_CPU": "false"} if kind == "zero3" else {}
    results = alone(train_variants, tmp_path / kind, device, kind, num_processes=1 if kind == "one" else 2, **zero3)
    rows = [{"variant": name} | relative_differences(results[name], expected[name]) for name in VARIANTS]
    record_property("rows", rows)
    for row in rows:
        assert max(row["weights"], row["loss"], row["grad_norm"]) < RELATIVE, row
