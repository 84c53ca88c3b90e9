"""Seconds of the parts of a step: with a clock that is moved by hand, and in a real run."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.models import tiny_model
from support.rollouts import Replay
from support.runs import build_trainer
from torch.utils.flop_counter import FlopCounterMode

from pacs_trl.plan.cost import GPUS
from pacs_trl.rollouts import timing
from pacs_trl.rollouts.timing import PARTS, StepTimer
from pacs_trl.update.forward_pass import ForwardPass


@pytest.fixture
def timer():
    """With a clock that `wait` moves, and `seconds` that it has recorded last."""
    seconds, clock = {}, SimpleNamespace(now=0.0)
    timer = StepTimer(lambda name, value: seconds.update({name.removeprefix("time/"): value}), lambda: clock.now)
    timer.seconds, timer.wait = seconds, lambda number: setattr(clock, "now", clock.now + number)
    return timer


def test_parts_of_a_step_add_up_to_its_time(timer):
    """10 s of generation with 3 s of weight sync inside, 2 s of nothing, 5 s of update: 7 + 3 + 2 + 5 = 17. Work
    between steps is not counted, a part that an error ends is, and an interrupted run leaves nothing."""
    timer.on_step_begin()
    timer.on_pre_optimizer_step()
    timer.wait(1)
    timer.on_train_begin()
    with timer.part("generation"):
        timer.wait(100)
    timer.on_step_begin()
    with timer.part("generation"):
        timer.wait(4)
        with pytest.raises(KeyError), timer.part("weight_sync"):
            timer.wait(3)
            raise KeyError
        timer.wait(3)
    timer.wait(2)
    with timer.part("update"):
        timer.wait(5)
    timer.on_step_end()
    expected = {"generation": 7.0, "weight_sync": 3.0, "update": 5.0, "other": 2.0, "total": 17.0}
    assert timer.seconds == dict.fromkeys(PARTS, 0.0) | expected


@pytest.mark.parametrize("steps_per_generation", [1, 2])
def test_trainer_logs_the_parts_of_every_step(tmp_path, steps_per_generation):
    trainer = build_trainer(
        tmp_path, replay=Replay(), steps_per_generation=steps_per_generation, max_steps=3, group_layout="split"
    )
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(steps) == 3
    for entry in steps:
        parts = [entry[f"time/{name}"] for name in PARTS]
        assert min(parts) >= 0.0 and sum(parts) == pytest.approx(entry["time/total"])
        assert entry["time/update"] > 0.0 and entry["time/optimizer"] > 0.0
        assert entry["time/weight_sync"] == 0.0
        assert 0.0 < entry["perf/forwarded_tok_s_wall_clock"] < entry["perf/forwarded_tok_s_fwd_bwd"]
        assert ("perf/generated_tok_s" in entry) == (entry["time/generation"] > 0.0)
        assert "perf/mfu_fwd_bwd" not in entry  # a CPU has no peak
    generated = [entry["time/generation"] > 0.0 and entry["time/verification"] > 0.0 for entry in steps]
    assert generated == ([True, True, True] if steps_per_generation == 1 else [True, False, True])
    assert (steps[0]["time/log_probs"] > 0.0) == (steps_per_generation == 2)


def test_rates_by_hand(timer):
    """300 of 2000 FLOP/s are 15 %; log-probs count as computation, generation does not."""
    timer.on_step_begin()
    with timer.part("generation"):
        timer.wait(5)
    with timer.part("log_probs"):
        timer.wait(1)
    with timer.part("update"):
        timer.wait(3)
    timer.work.update(generated=50, trained=90, flops=1200, peak=2000)
    timer.on_step_end()
    rates = {name.removeprefix("perf/"): value for name, value in timer.seconds.items() if "perf/" in name}
    assert rates == {
        "generated_tok_s": 10.0,
        "forwarded_tok_s_fwd_bwd": 22.5,
        "forwarded_tok_s_wall_clock": 10.0,
        "mfu_fwd_bwd": 15.0,
    }


@pytest.mark.parametrize("packing", ["auto", "never"])
@pytest.mark.parametrize("has_gradient", [True, False])
def test_flop_are_those_of_the_matrix_products(timer, monkeypatch, packing, has_gradient):
    """Two completions of a prompt of 4 tokens, and one of another; attention by hand, the rest counted by torch."""
    monkeypatch.setattr(timing, "peak_flops", lambda *_: 1e12)
    model = tiny_model()
    forward_pass = ForwardPass(model, torch.device("cpu"), packing=packing)
    forward_pass.fused = False  # the fused head computes logits again in the backward pass
    forward_pass.on_pass = timer.counter_of(model, None, is_policy=True)
    prompts, completions = [[1, 2, 3, 4], [1, 2, 3, 4], [5, 6]], [[7, 8], [9], [3, 2, 1]]
    with FlopCounterMode(display=False) as counted, torch.set_grad_enabled(has_gradient):
        logps = forward_pass.compute_logps(model, prompts, completions).logps
        if has_gradient:
            torch.cat(logps).sum().backward()
    products = sum(n for op, n in counted.get_flop_counts()["Global"].items() if str(op) in ("aten.mm", "aten.addmm"))
    if packing == "auto":  # 4 shared tokens, then a branch of one, and 4 tokens; last ones predict nothing
        num_tokens, pairs = 4 + 1 + 4, 4 * 4 / 2 + 1 * (4 + 1 / 2) + 4 * 4 / 2
    else:
        num_tokens, pairs = 6 + 5 + 5, (6 * 6 + 5 * 5 + 5 * 5) / 2
        products *= np.array(num_tokens) / 18  # padding goes through the model, and does not count
        head = 2 * model.config.vocab_size * 32 * 6 * (3 if has_gradient else 1)
        products += head * (1 - num_tokens / 18)  # of which the head sees nothing
    passes, width, layers = 3 if has_gradient else 1, 32, 2
    assert timer.work["flops"] == pytest.approx(products + passes * 4 * layers * width * pairs)
    assert timer.work["trained"] == (num_tokens if has_gradient else 0)


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("Tesla T4", "bf16", None),  # which has no bfloat16
        ("NVIDIA H100 80GB HBM3", "no", None),  # float32
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "bf16", None),
        ("A new one", "bf16", None),
    ],
)
def test_a_peak_is_known_or_absent(monkeypatch, name, precision, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    accelerator = SimpleNamespace(device=torch.device("cuda"), mixed_precision=precision)
    assert timing.peak_flops(accelerator, torch.float32) == peak
    accelerator.device = torch.device("cpu")
    assert timing.peak_flops(accelerator, torch.float32) is None


def test_plan_and_run_have_the_same_peaks():
    peaks = [(timing.get_peak_flops(f"NVIDIA {gpu.name}", "bfloat16"), gpu.flops) for gpu in GPUS.values()]
    assert all(measured in (None, planned) for measured, planned in peaks) and any(measured for measured, _ in peaks)
