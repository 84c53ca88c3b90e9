"""Two processes learn what one does: DDP, FSDP2 and ZeRO-3 over gloo, groups straddling the processes.

One launch runs all scenarios of a kind (see scenarios.py). Each test reads what both processes saw and compares it
with the long way over all rows (see support/two_processes.py).
"""

import pytest
import torch
from accelerate.utils import merge_fsdp_weights
from scenarios import (
    COMPILED,
    FSDP2,
    GATHERED,
    GRPO,
    REPLAYED,
    SCENARIOS,
    SHARDED,
    benchmarks,
    corrected,
    experts,
    held_out,
)
from support.models import RELATIVE, TOKENIZER, relative_error, tiny_model
from support.rollouts import Replay
from support.trls_update import TRLS, difference, run
from support.two_processes import assert_steps_of_one_process, both, launch, launch_fixture, numbers_of
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoModelForCausalLM, AutoTokenizer


pytestmark = [pytest.mark.distributed, pytest.mark.trains]
# Shards in small are in test_ppo.py and tests/gpu/test_gpu_processes.py.
TWO_KINDS = ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)]
ALL_KINDS = [*TWO_KINDS, pytest.param("zero3", marks=pytest.mark.slow)]


ddp = launch_fixture("ddp", SCENARIOS["ddp"])
fsdp2 = launch_fixture("fsdp2", SCENARIOS["fsdp2"])
zero3 = launch_fixture("zero3", SCENARIOS["zero3"])


@pytest.mark.parametrize("name", REPLAYED)
def test_ddp_equals_one_process(tmp_path, ddp, name):
    assert_steps_of_one_process(tmp_path, both(ddp, name), *REPLAYED[name])


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_grpo_ends_with_the_weights_of_trl_in_one_process(request, tmp_path, kind):
    first, second = both(request.getfixturevalue(kind), "grpo")
    settings = {**GRPO, "per_device_train_batch_size": 2 * GRPO["per_device_train_batch_size"]}
    before, trls, logs = run(tmp_path, TRLS, "grpo", Replay(unverifiable=0.2), **settings)
    assert max(log["clip_ratio/low_mean"] for log in logs) > 0 < max(log["clip_ratio/high_mean"] for log in logs)
    for mine in (first, second):
        assert difference(mine["final"], trls, before) < 1e-5
        for log, other in zip(mine["logs"], logs, strict=True):
            assert log["loss"] == pytest.approx(other["loss"], rel=1e-3, abs=1e-5)


def test_proxies_are_exactly_zero_while_the_policy_has_not_moved(ddp):
    assert both(ddp, "zero proxies") == [[0.0, 0.0]] * 2


def test_empty_completions_of_all_processes_are_counted(ddp):
    assert both(ddp, "empty completions") == [3 / 16] * 2


def test_step_is_skipped_on_both_processes(ddp):
    for result in both(ddp, "not finite"):
        before, skipped, after = result["weights"]
        assert any(not torch.equal(before[n], skipped[n]) for n in before)
        assert all(torch.equal(skipped[n], after[n]) for n in before)
        assert result["count"] == [0, 1, 1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("too few tokens", "max_tokens_per_micro_batch=30 cannot hold .* 36 tokens"),
        ("different datasets", r"disagree on the number of prompts in the training set: \[32, 33\]"),
        ("shuffled datasets", "disagree on the prompts of the training set or on their order"),
        ("different checkpoints", r"different checkpoints: checkpoint-4 \(rank 0\), no checkpoint \(rank 1\)"),
        ("label out of range", r"must lie in \[0, 1\], but completion 8 .* has 2: reward=2"),
    ],
)
def test_both_processes_stop_with_the_same_message(ddp, name, message):
    first, second = both(ddp, name)
    assert first == second
    with pytest.raises(ValueError, match=message):
        raise ValueError(first)


@pytest.mark.parametrize("name", ["resumed", "resumed snapshot"])
def test_resumed_run_ends_with_the_same_bits(ddp, name):
    first, second = both(ddp, name)
    assert all(torch.equal(first["final"][n], second["final"][n]) for n in first["final"])
    assert first["again"] == second["again"] == dict.fromkeys((3, 4) if "snapshot" in name else (3, 4, 5), True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp2", "zero3"])
def test_shards_resume_snapshot_and_rows(request, kind):
    first, second = both(request.getfixturevalue(kind), "resumed snapshot")
    assert first["again"] == second["again"] == {3: True, 4: True}


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_reference_that_follows_the_policy_is_resumed(request, kind):
    first, second = both(request.getfixturevalue(kind), "resumed reference")
    assert first["again"] == second["again"] == {3: True}


@pytest.mark.parametrize("kind", TWO_KINDS)
def test_a_second_draw_and_rewards_that_need_the_policy(request, kind):
    first, second = both(request.getfixturevalue(kind), "drawn again")
    assert first["groups"] == [[0] * 4 + [1] * 4 + [0] * 8] and second["groups"] == [[2] * 4 + [3] * 4 + [2] * 8]
    ids = torch.tensor([[1, 2, 3, 7, i] for i in range(9)])
    expected = tiny_model()(ids).logits[:, 2:-1].log_softmax(dim=-1).gather(2, ids[:, 3:, None])[:, :, 0]
    torch.testing.assert_close(torch.stack(second["logps"]), expected, rtol=1e-4, atol=1e-5)
    assert first["logps"] == [] and all(torch.equal(first["final"][n], second["final"][n]) for n in first["final"])


@pytest.mark.parametrize("kind", TWO_KINDS)
def test_benchmarks_are_shared_by_processes(tmp_path, request, kind):
    first, second = both(request.getfixturevalue(kind), "benchmarks")
    one = benchmarks(0, tmp_path, per_device_train_batch_size=8)
    assert first == second == one and len(one) == 2 and one[0]["eval_miniature/addition/mean_length"] > 0


def test_an_evaluation_does_not_count_repeated_prompts(tmp_path, ddp):
    first, second = both(ddp, "held out")
    one = held_out(0, tmp_path, per_device_train_batch_size=8, per_device_eval_batch_size=16)
    assert first == second == pytest.approx(one, rel=1e-4)
    assert abs(one["eval_loss"]) > 1e-3 and one["eval_kl"] > 1e-3 and 0.1 < one["eval_reward"] < 0.9


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_the_correction_of_an_engines_logps_is_that_of_one_process(tmp_path, request, kind):
    """Extremes and statistics are of all completions."""
    first, second = both(request.getfixturevalue(kind), "corrected")
    one = corrected(0, tmp_path, per_device_train_batch_size=8)
    logs = [numbers_of(run, "sampling/", "loss", "grad_norm") for run in (first, second, one)]
    for mine, other, expected in zip(*logs, strict=True):
        assert mine == other and mine == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert [any(name.startswith("sampling/") for name in log) for log in logs[0]] == [True, False] * 2
    assert relative_error(first["final"], one["final"]) < RELATIVE


def test_loads_of_experts_are_those_of_one_process(tmp_path, ddp):
    first, second = both(ddp, "experts")
    one = experts(0, tmp_path, per_device_train_batch_size=8)
    for mine, other, expected in zip(first["logs"], second["logs"], one["logs"], strict=True):
        for name in ("loss", "aux_loss", "grad_norm"):
            assert mine[name] == other[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5)
    assert relative_error(first["gradients"][0], one["gradients"][0]) < RELATIVE
    assert relative_error(first["final"], one["final"]) < RELATIVE


REPLAYED_SHARDS = [("fsdp2", name, name) for name in SHARDED]
REPLAYED_SHARDS += [("zero3", f"{name}, {threshold}", name) for name, threshold in GATHERED]


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_an_engine_that_sleeps_gets_merged_weights(request, kind):
    """Both processes compare their engines after each wake; shards are gathered."""
    for recorded in both(request.getfixturevalue(kind), "asleep"):
        assert recorded["calls"].count("kv_cache") == recorded["calls"].count("weights") >= 3
        changed = 0
        for name, weight in tiny_model().named_parameters():
            assert torch.allclose(recorded["sent"][name], recorded["expected"][name], atol=1e-6), name
            changed += not torch.equal(recorded["sent"][name], weight)
        assert changed >= 8


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "scenario", "name"), REPLAYED_SHARDS)
def test_shards_equal_one_process(request, tmp_path, kind, scenario, name):
    results = both(request.getfixturevalue(kind), scenario)
    assert all(result["sharded"] == (kind == "fsdp2") for result in results)
    assert_steps_of_one_process(tmp_path, results, *REPLAYED[name])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_compiled_layers_of_two_processes_equal_eager_ones_of_one(tmp_path_factory, tmp_path, kind):
    results = both(launch(tmp_path_factory, f"compiled, {kind}", SCENARIOS[f"compiled, {kind}"]), "compiled")
    assert all(result["sharded"] == (kind == "fsdp2") and result["graphs"] > 0 for result in results)
    assert_steps_of_one_process(tmp_path, results, {**COMPILED, "compile_layers": False}, {})


@pytest.mark.slow
def test_fsdp2_checkpoints_of_shards_are_models(fsdp2):
    """Of each checkpoint and of what is saved at the end: weights, configuration and tokenizer, for everybody to
    load."""
    final = both(fsdp2, "resumed snapshot")[0]["final"]
    run = fsdp2 / "runs" / str(list(FSDP2).index("resumed snapshot")) / "straight"
    for directory in (run / "checkpoint-6", run):
        assert (directory / "pytorch_model_fsdp_0").is_dir() and not (directory / "model.safetensors").exists()
        assert "Trained with 2 processes on" in (directory / "README.md").read_text()
        merge_fsdp_weights(str(directory / "pytorch_model_fsdp_0"), str(directory))
        model = AutoModelForCausalLM.from_pretrained(directory)
        assert model.config.dtype == torch.float32 and model.config.architectures == ["Qwen3ForCausalLM"]
        assert all(torch.equal(weights, final[name]) for name, weights in model.named_parameters())
        assert AutoTokenizer.from_pretrained(directory).get_vocab() == TOKENIZER.get_vocab()


@pytest.mark.slow
def test_fsdp2_gathers_the_model_of_the_kl_term_whole(fsdp2):
    """As the plan counts it (`wraps_kl_model_whole`); its decoder layers are no units of their own."""
    assert both(fsdp2, "units of the KL model") == [[""]] * 2


@pytest.mark.slow
def test_fsdp2_exchanges_float32_under_bf16(fsdp2):
    """Log-probabilities and reduced gradients have more than bfloat16's 8 significant bits; with the policy of
    accelerate both were multiples of them."""
    for result in both(fsdp2, "exchanged in bf16"):
        assert result["logps"] and all(result["gradients"])
        assert set(result["policies"]) == {"pacs policy", "grpo policy", "ppo policy", "ppo critic"}
        for policies in result["policies"].values():
            assert policies == {MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)}
