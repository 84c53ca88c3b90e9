"""Memory of a run: what `"auto"` becomes, and steps that are repeated with less memory. A stand-in says how much
memory the device has."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import LoraConfig
from support.models import RELATIVE, relative_error, tiny_model
from support.rollouts import Replay
from support.runs import Recorder, build_trainer, config, out_of_memory_in
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from pacs_trl import GRPOTrainer, PACSTrainer
from pacs_trl.baselines.ppo_config import PPOConfig
from pacs_trl.errors import FailedRun, UserError
from pacs_trl.plan import cost
from pacs_trl.plan.sharding import Sharding
from pacs_trl.rollouts import memory
from pacs_trl.rollouts.memory import DeviceMemory
from pacs_trl.rollouts.step_memory import StartOfUpdate, moments_of_optimizer
from pacs_trl.update.driver import UpdateDriver
from pacs_trl.update.microbatching import MicroBatchConfig
from pacs_trl.update.rollout import Rollout


AUTO = {"gradient_checkpointing": "auto", "max_tokens_per_micro_batch": "auto"}
MODEL = tiny_model()
# 8 bytes per weight with SGD; the rest is for activations. A micro-batch of 32 rollouts has about 1,000 tokens.
STATE = 8 * sum(parameter.numel() for parameter in MODEL.parameters())
MEMORY_WITHOUT_STATE = 1e10


def on_device(monkeypatch, room: float) -> None:
    """A device that has `room` bytes for activations."""
    weights = sum(parameter.nbytes for parameter in MODEL.parameters())
    total = 20 * (room + STATE + weights)
    reported = DeviceMemory(int(room + STATE + 0.05 * total), int(total), "NVIDIA H200")
    monkeypatch.setattr(memory, "device_memory", lambda device: reported)


def limited(trainer, max_tokens: float) -> list[int]:
    """Let passes with gradient of more than `max_tokens` tokens run out of memory; return the sizes of all."""
    sizes = []

    def check(texts, num_predicted):
        if torch.is_grad_enabled():
            sizes.append(sum(map(sum, texts)))
            if sizes[-1] > max_tokens:
                raise torch.OutOfMemoryError(f"{sizes[-1]} tokens")

    trainer.forward_pass.on_pass = check
    return sizes


def trained(trainer) -> Recorder:
    recorder = Recorder()
    trainer.add_callback(recorder)
    trainer.train()
    return recorder


# What "auto" becomes -----------------------------------------------------------------------------------------------


def test_on_a_cpu_auto_changes_nothing(tmp_path):
    """Nor in later updates of a rollout, whose micro-batches hold whole groups."""
    runs = []
    for settings in ({}, AUTO):
        trainer = build_trainer(tmp_path, replay=Replay(), steps_per_generation=2, max_steps=4, **settings)
        sizes = limited(trainer, math.inf)
        recorder = trained(trainer)
        runs.append((recorder.gradients, sizes, [log["loss"] for log in trainer.state.log_history if "loss" in log]))
    assert trainer.args.gradient_checkpointing is False and trainer.args.max_tokens_per_micro_batch is None
    (gradients, *others), (gradients_again, *others_again) = runs
    assert others == others_again
    for first, second in zip(gradients, gradients_again, strict=True):
        assert all(torch.equal(first[name], second[name]) for name in first)


# A rollout has up to 1,024 + 16 tokens, and a token keeps 5,520 bytes without recomputation, 3,480 with attention
# kept, and 3,208 with full recomputation; 0.9 of the room is used. Four rollouts share a prompt: 1,024 + 4 x 16 + 3.
CHOICES = {
    "plenty": (1e9, AUTO, "none", 1091),
    "one rollout": (1045.5 * 5520 / 0.9, AUTO, "none", 1045),
    "attention": (1030.5 * 5520 / 0.9, AUTO, "selective", 1091),
    "layer inputs": (1030.5 * 3480 / 0.9, AUTO, "full", 1091),
    "set size": (1500.5 * 5520 / 0.9, AUTO | {"max_tokens_per_micro_batch": 1500}, "none", 1500),
    "set size, too large": (1499.5 * 5520 / 0.9, AUTO | {"max_tokens_per_micro_batch": 1500}, "selective", 1500),
    "set recomputation": (1e9, AUTO | {"gradient_checkpointing": True}, "full", 1091),
    "completions": (2182.5 * 5520 / 0.9, AUTO | {"max_tokens_per_micro_batch": None}, "none", None),
    "completions, too large": (2181.5 * 5520 / 0.9, AUTO | {"max_tokens_per_micro_batch": None}, "selective", None),
    "reentrant": (
        1030.5 * 5520 / 0.9,
        AUTO | {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
        "full",
        1091,
    ),
}


@pytest.mark.parametrize(("room", "settings", "recomputation", "size"), CHOICES.values(), ids=CHOICES)
def test_the_choice_follows_from_the_memory_that_is_left(
    tmp_path, monkeypatch, capsys, room, settings, recomputation, size
):
    on_device(monkeypatch, room)
    trainer = build_trainer(tmp_path, replay=Replay(), max_steps=1, **settings)
    assert trainer.args.gradient_checkpointing is (recomputation != "none")  # before Trainer reads it
    trainer.train()
    assert trainer.args.max_tokens_per_micro_batch == trainer.update.driver.limits.max_tokens == size
    assert trainer.model.is_gradient_checkpointing == (recomputation != "none")
    size_in_words = f"{size:,} tokens" if size else "per_device_train_batch_size completions"
    word = {"none": "no"}.get(recomputation, recomputation)
    assert f"Memory: {word} recomputation, micro-batches of {size_in_words}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "sharing"), [({}, 4), ({"shuffle_minibatches": True}, 2), ({"packing": "never"}, 1)]
)
def test_completions_that_share_a_prompt_are_those_of_an_optimizer_step(tmp_path, monkeypatch, settings, sharing):
    """Shuffled minibatches divide groups: a micro-batch computes more prompts than one of whole groups."""
    on_device(monkeypatch, 1e9)
    settings = {"trainer_class": GRPOTrainer, "steps_per_generation": 2} | settings
    assert build_trainer(tmp_path, replay=Replay(), **AUTO, **settings).memory.plan.workload.sharing == sharing


def test_the_reason_names_what_does_not_fit(tmp_path, monkeypatch):
    on_device(monkeypatch, 1030.5 * 5520 / 0.9)
    reason = build_trainer(tmp_path, replay=Replay(), **AUTO).memory.choice.reason
    assert "without recomputation 1,030 tokens fit, and a rollout can have 1,040" in reason


def test_a_completion_that_does_not_fit_is_refused_before_the_model_is_loaded(tmp_path, monkeypatch):
    MODEL.save_pretrained(tmp_path / "model")
    on_device(monkeypatch, 1030 * 3208 / 0.9)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *args, **kwargs: pytest.fail("loaded"))
    with pytest.raises(ValueError, match="max_completion_length"):
        build_trainer(tmp_path, model=str(tmp_path / "model"), replay=Replay(), **AUTO)


def test_code_of_a_checkpoint_is_trusted_as_by_loaders(tmp_path, monkeypatch, model_path, checkpoint_with_code):
    on_device(monkeypatch, 1e9)
    settings = {"model": checkpoint_with_code(model_path, "qwen3"), "trust_remote_code": True} | AUTO
    assert build_trainer(tmp_path, replay=Replay(), **settings).memory.plan.workload is not None


def test_quantized_weights_leave_more_room(tmp_path, monkeypatch):
    """Of 4 bytes, a weight of the layers keeps 1 / 2 and a sixteenth; of the 16 of one of the adapter 8 stay."""
    MODEL.save_pretrained(tmp_path / "model")
    on_device(monkeypatch, 1e9)
    args, adapter = config(tmp_path, **AUTO, optim="adamw_torch"), LoraConfig(r=4)
    rooms = [
        memory.plan_memory(str(tmp_path / "model"), args, adapter, 100, quantization_config=quantization).room
        for quantization in (None, BitsAndBytesConfig(load_in_4bit=True))
    ]
    shape = cost.shape_of(MODEL.config.to_dict())
    in_layers = shape.num_layers * shape.layer_parameters
    saved = (4 - 0.5625) * in_layers + 8 * cost.lora_parameters(shape, 4)
    assert rooms[1] - rooms[0] == pytest.approx(saved, abs=1)


def test_weights_that_are_packed_count_with_the_bytes_that_they_have(tmp_path, monkeypatch):
    """Of a loaded model, bfloat16 weights stand in for packed ones."""
    on_device(monkeypatch, 1e9)
    plans = [
        memory.plan_memory(tiny_model().to(dtype), config(tmp_path, **AUTO), LoraConfig(r=4), 100)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert plans[1].room - plans[0].room == pytest.approx(2 * STATE / 8, abs=1)


def test_replicas_of_fsdp_need_the_memory_of_the_processes_of_one(tmp_path, monkeypatch):
    """Two replicas on 8 processes leave the room of one replica on 4."""
    on_device(monkeypatch, 1e9)
    args = config(tmp_path, **AUTO)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")

    def room(processes: int) -> float:
        monkeypatch.setattr(type(args), "world_size", processes)
        return memory.plan_memory(MODEL, args, None, 100).room

    on_four, on_eight = room(4), room(8)
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "2")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "4")
    assert room(8) == on_four < on_eight


PARAMETERS = STATE / 8
GATHERED = 4 * cost.gathered_weights(cost.shape_of(MODEL.config.to_dict()), Sharding("fsdp", 8))
# Of 8 bytes per weight with SGD, and of 4 for weights that are gathered, in float32. FSDP collects the gradient of a
# step with several micro-batches, 4 bytes per weight.
OCCUPIED = {
    "FULL_SHARD": ({}, STATE / 8 + GATHERED + 4 * PARAMETERS),
    "SHARD_GRAD_OP": ({"FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP"}, STATE / 8 + 8 * PARAMETERS),
    "NO_SHARD": ({"FSDP_SHARDING_STRATEGY": "NO_SHARD"}, STATE + GATHERED),
    "HYBRID_SHARD, a node of 4": ({"FSDP_SHARDING_STRATEGY": "HYBRID_SHARD"}, STATE / 4 + GATHERED + 4 * PARAMETERS),
    "FSDP 2": ({"FSDP_VERSION": "2"}, STATE / 8 + GATHERED + 4 * PARAMETERS),
    "FSDP 2, kept": ({"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false"}, STATE / 8 + 8 * PARAMETERS),
    "FSDP 2, offloaded": ({"FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true"}, GATHERED + 4 * PARAMETERS),
}


@pytest.mark.parametrize(("variables", "occupied"), OCCUPIED.values(), ids=OCCUPIED)
def test_layouts_of_fsdp_leave_the_memory_that_they_do_not_occupy(tmp_path, monkeypatch, variables, occupied):
    """Of 8 processes, on nodes of 4 GPUs."""
    room = room_of_launch(tmp_path, monkeypatch, {"ACCELERATE_USE_FSDP": "true"} | variables)
    assert room == pytest.approx(MEMORY_WITHOUT_STATE - occupied, abs=2)


def test_fsdp_2_gathers_the_model_of_the_kl_term_whole_and_twice(tmp_path, monkeypatch):
    """It takes 4 bytes per weight, divided by 8; gathered are twice its weights and the output head of the policy."""
    variables = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    without, with_kl = (room_of_launch(tmp_path, monkeypatch, variables, beta=beta) for beta in (0.0, 0.1))
    head = MODEL.get_output_embeddings().weight.numel()
    more = 4 * PARAMETERS / 8 + 4 * (2 * PARAMETERS + head) - GATHERED
    assert without - with_kl == pytest.approx(more, abs=2)


def test_a_strategy_that_does_not_exist_is_an_error_of_the_user(tmp_path, monkeypatch):
    variables = {"ACCELERATE_USE_FSDP": "true", "FSDP_SHARDING_STRATEGY": "SOME"}
    with pytest.raises(UserError, match=r"fsdp_sharding_strategy is 'SOME'\. Set it to one of .*\.$"):
        room_of_launch(tmp_path, monkeypatch, variables)


def test_settings_of_fsdp_are_those_that_trainer_passes(tmp_path, monkeypatch):
    """`fsdp_config` comes before variables of the launcher."""
    monkeypatch.setenv("FSDP_VERSION", "1")
    settings = {"fsdp": True, "fsdp_config": {"reshard_after_forward": False, "cpu_offload": True}}
    room = room_of_launch(tmp_path, monkeypatch, {}, **settings)
    assert room == pytest.approx(MEMORY_WITHOUT_STATE - 8 * PARAMETERS, abs=2)


def test_fsdp_that_recomputes_in_any_case_leaves_no_choice(tmp_path, monkeypatch):
    """By a variable of the launcher, or by `fsdp_config`, whose argument Trainer passes."""
    variables = {"ACCELERATE_USE_FSDP": "true", "FSDP_ACTIVATION_CHECKPOINTING": "true"}
    with monkeypatch.context() as of_launcher, pytest.raises(UserError, match="fsdp_activation_checkpointing: true"):
        room_of_launch(tmp_path, of_launcher, variables)
    settings = {"fsdp": True, "fsdp_config": {"activation_checkpointing": True}}
    with pytest.raises(UserError, match="fsdp_activation_checkpointing: true"):
        room_of_launch(tmp_path, monkeypatch, {}, **settings)


BUCKET = 4 * cost.ZERO_BUCKET
ZERO = {  # stage, whether the optimizer and weights are offloaded, bytes; float32 copies as large as what is copied
    "ZeRO-0": (0, False, False, STATE + 8 * PARAMETERS + BUCKET),
    "ZeRO-1": (1, False, False, STATE / 8 + 8 * PARAMETERS + BUCKET),
    "ZeRO-2": (2, False, False, STATE / 8 + (4 + 4 / 8) * PARAMETERS + BUCKET),
    "ZeRO-2, offloaded": (2, True, True, 4 * PARAMETERS + BUCKET),
    "ZeRO-3": (3, False, False, STATE / 8 + (4 + 4) / 8 * PARAMETERS + 4 * PARAMETERS + BUCKET),
    "ZeRO-3, offloaded": (3, True, True, 4 * PARAMETERS + BUCKET),
}


@pytest.mark.parametrize(("stage", "optimizer", "weights", "occupied"), ZERO.values(), ids=ZERO)
def test_stages_of_zero_leave_the_memory_that_they_do_not_occupy(
    tmp_path, monkeypatch, stage, optimizer, weights, occupied
):
    """Of 8 processes. ZeRO-3 may keep all weights of a small model gathered."""
    devices = {True: "cpu", False: "none"}
    plugin = SimpleNamespace(
        zero_stage=stage, offload_optimizer_device=devices[optimizer], offload_param_device=devices[weights]
    )
    room = room_of_launch(tmp_path, monkeypatch, {"ACCELERATE_USE_DEEPSPEED": "true"}, deepspeed_plugin=plugin)
    assert room == pytest.approx(MEMORY_WITHOUT_STATE - occupied, abs=2)


def test_deepspeed_casts_the_weights_of_a_loaded_model(tmp_path, monkeypatch):
    """Of its float32 weights below an adapter each process of ZeRO-1 keeps 2 bytes under bf16, of 4 without."""
    plugin = SimpleNamespace(zero_stage=1, offload_optimizer_device="none", offload_param_device="none")
    on_device(monkeypatch, 1e12)
    both_args = [config(tmp_path, **AUTO, bf16=bf16) for bf16 in (False, True)]
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    rooms = []
    for args in both_args:
        args.deepspeed_plugin = plugin
        rooms.append(memory.plan_memory(MODEL, args, LoraConfig(r=4), 100).room)
    adapter = cost.lora_parameters(cost.shape_of(MODEL.config.to_dict()), 4)
    cast_numbers = (
        PARAMETERS + 2 * adapter + cost.ZERO_BUCKET
    )  # also weights and gradients of the adapter, and buckets
    assert rooms[1] - rooms[0] == pytest.approx(2 * cast_numbers, abs=2)


def room_of_launch(tmp_path, monkeypatch, variables: dict[str, str], deepspeed_plugin=None, **settings) -> float:
    """The bytes for activations in one of 8 processes with `variables` of the launcher, on nodes of 4 GPUs."""
    args = config(tmp_path, **AUTO, gradient_accumulation_steps=2, **settings)
    args.deepspeed_plugin = deepspeed_plugin
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(type(args), "world_size", 8)
    on_device(monkeypatch, MEMORY_WITHOUT_STATE - STATE)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return memory.plan_memory(MODEL, args, None, 100).room


def test_moments_on_the_cpu_do_not_occupy_the_device():
    """FSDP offloads them with the weights; the meta device stands in for a GPU."""
    device = torch.device("meta")
    for model, number in ((torch.nn.Linear(3, 5), 0), (torch.nn.Linear(3, 5, device=device), 2 * 20)):
        with moments_of_optimizer(model, device) as moments:
            assert moments.numel() == number


def test_an_optimizer_that_is_not_known_is_not_refused(tmp_path, monkeypatch, caplog):
    """Adafactor needs less than the two moments that are counted. The longest completion, 1,040 tokens, and all is
    computed again."""
    on_device(monkeypatch, 1030 * 3208 / 0.9)
    caplog.set_level("WARNING", memory.__name__)
    plan = memory.plan_memory(MODEL, config(tmp_path, **AUTO, optim="adafactor"), None, None)
    assert plan.choice[:2] == ("full", 1040) and plan.fits(plan.choice)
    assert "may not fit" in caplog.text and "optim: adafactor is counted with two moments" in caplog.text


def test_auto_is_for_an_exact_update():
    with pytest.raises(ValueError, match="gradient_checkpointing: true"):
        config("", PPOConfig, gradient_checkpointing="auto")
    for size in ("automatic", 2.5, 0):
        with pytest.raises(ValueError, match="max_tokens_per_micro_batch"):
            config("", max_tokens_per_micro_batch=size)


# Out of memory ------------------------------------------------------------------------------------------------------


REPEATED = {
    "first pass": (PACSTrainer, {}, 1),
    "second pass": (PACSTrainer, {"max_tokens_per_micro_batch": 40}, 2),
    "ratio loss": (GRPOTrainer, {"max_tokens_per_micro_batch": 40}, 2),
    "later whole group": (PACSTrainer, {"num_generations": 8, "steps_per_generation": 2}, 1),
    "second update": (PACSTrainer, {"num_generations": 8, "steps_per_generation": 2}, 2),
    "snapshot": (PACSTrainer, {"reference": "snapshot"}, 2),
}


@pytest.mark.parametrize(("trainer_class", "settings", "number"), REPEATED.values(), ids=REPEATED)
def test_a_step_without_memory_is_repeated_with_the_same_result(tmp_path, capsys, trainer_class, settings, number):
    """Neither gradients nor work of the abandoned attempt count."""
    recorders, logs, work = [], [], []
    for fails in (False, True):
        trainer = build_trainer(tmp_path, replay=Replay(uniform_groups=0), trainer_class=trainer_class, **settings)
        if fails:
            out_of_memory_in(trainer, number)
        recorders.append(trained(trainer))
        logs.append([log for log in trainer.state.log_history if "loss" in log])
        work.append(trainer.timer.work["generated"])
    for expected, repeated in zip(*(recorder.gradients for recorder in recorders), strict=True):
        assert relative_error(repeated, expected) < RELATIVE
    for expected, repeated in zip(*logs, strict=True):
        assert expected.keys() == repeated.keys() and expected.get("num_tokens") == repeated.get("num_tokens")
        for name in ("loss", "entropy", "grad_norm"):
            assert repeated[name] == pytest.approx(expected[name], rel=1e-4)
    assert work[0] == work[1]
    assert capsys.readouterr().out.count("Out of memory in optimizer step") == 1


def test_a_step_in_which_no_completion_has_a_gradient_is_repeated(tmp_path):
    """The passes that compute the entropy of skipped completions become smaller."""
    entropies = []
    for fails in (False, True):
        trainer = without_gradient(tmp_path, GRPOTrainer)
        if fails:
            out_of_memory_once(trainer)
        trainer.train()
        entropies.append(trainer.state.log_history[0]["entropy"])
    assert trainer.state.log_history[0]["update/forwarded_fraction"] == 0.0
    assert trainer.update.driver.limits.max_tokens is not None
    assert entropies[1] == pytest.approx(entropies[0], rel=1e-4)


@pytest.mark.parametrize("trainer_class", [PACSTrainer, GRPOTrainer])
def test_a_step_without_gradient_that_never_fits_ends_the_run_with_what_to_set(tmp_path, trainer_class):
    trainer = without_gradient(tmp_path, trainer_class)

    def fail(texts, num_predicted):
        raise torch.OutOfMemoryError

    trainer.forward_pass.on_pass = fail
    with pytest.raises(FailedRun, match="max_completion_length"):
        trainer.train()


@pytest.mark.parametrize("num_scheduled", [0, 1])
def test_passes_over_skipped_completions_become_smaller_only_without_scheduled_ones(num_scheduled):
    """A pass over four completions of 6 tokens has 4 x 6 and 4 of their prompt. One completion with a gradient, which
    needs more memory than passes without, cannot be split."""
    accelerator = SimpleNamespace(process_index=0, num_processes=1)
    driver = UpdateDriver(
        SimpleNamespace(packing="sdpa"), accelerator, MicroBatchConfig(num_processes=1, max_rollouts=4)
    )
    prompt, completion = np.zeros(4, dtype=np.int32), np.zeros(6, dtype=np.int32)
    rollouts = [Rollout(prompt, completion, np.ones(6, dtype=bool), label=0.0, group=0) for _ in range(4)]
    has_gradient = torch.arange(4) < num_scheduled
    minibatch = driver.schedule_minibatch(rollouts, has_gradient, ignores_groups=True)
    if num_scheduled > 0:
        assert not driver.lower_max_tokens(minibatch) and driver.limits.max_tokens is None
        return
    assert driver.lower_max_tokens(minibatch) and driver.limits.max_tokens == 14
    assert driver.schedule_some(minibatch, [0, 1, 2, 3]) == [[[0], [1], [2], [3]]]
    assert not driver.lower_max_tokens(minibatch)


def without_gradient(tmp_path, trainer_class):
    """A trainer whose only step schedules no completion: all groups are uniform, or all completions lack a label."""
    replay = Replay(unverifiable=1.0) if trainer_class is PACSTrainer else Replay(uniform_groups=4)
    return build_trainer(tmp_path, replay=replay, trainer_class=trainer_class, startup_check=False, max_steps=1)


def out_of_memory_once(trainer) -> None:
    """Let the first pass of a trainer run out of memory, whether it has a gradient or not."""
    is_first = True

    def check(texts, num_predicted):
        nonlocal is_first
        if is_first:
            is_first = False
            raise torch.OutOfMemoryError

    trainer.forward_pass.on_pass = check


def test_later_steps_of_a_rollout_have_smaller_micro_batches(tmp_path):
    """Also those whose micro-batches were made before memory ran out."""
    settings = {"num_generations": 8, "steps_per_generation": 2, "group_layout": "whole"}
    trainer = build_trainer(tmp_path, replay=Replay(uniform_groups=0), **settings)
    sizes = limited(trainer, math.inf)
    out_of_memory_in(trainer, 1)
    trainer.train()
    limit = trainer.update.driver.limits.max_tokens
    assert sizes[0] > limit >= max(sizes[1:])


def test_random_numbers_of_the_abandoned_attempt_are_drawn_again(tmp_path):
    """With dropout, the run ends with the bits of one that has small micro-batches from the start."""
    trainers, size = [], None
    for fails in (True, False):
        settings = {"disable_dropout": False, "startup_check": False, "max_tokens_per_micro_batch": size}
        trainer = build_trainer(
            tmp_path, model=tiny_model(attention_dropout=0.2), replay=Replay(uniform_groups=0), max_steps=1, **settings
        )
        if fails:
            out_of_memory_in(trainer, 1)
        trainer.train()
        trainers.append(trainer)
        size = trainer.update.driver.limits.max_tokens
    repeated, small = ([*trainer.model.parameters()] for trainer in trainers)
    assert all(torch.equal(first, second) for first, second in zip(repeated, small, strict=True))


def test_work_and_metrics_return_to_the_start_of_an_update(tmp_path):
    trainer = build_trainer(tmp_path, replay=Replay())
    trainer._metrics["train"]["before"].append(1.0)
    trainer.timer.work["trained"] = 5
    start, numbers = StartOfUpdate(trainer), []
    for _ in range(2):
        numbers.append(torch.rand(3))
        trainer.record_metrics({"before": 2.0, "during": 3.0})
        trainer.timer.work.update({"trained": 7, "flops": 8})
        start.restore()
    assert torch.equal(*numbers)
    assert dict(trainer._metrics["train"]) == {"before": [1.0]} and dict(trainer.timer.work) == {"trained": 5}


def test_single_completions_without_memory_recompute_more(tmp_path, monkeypatch):
    """Where recomputation is chosen; otherwise the run ends with what to set."""
    on_device(monkeypatch, 1e9)
    trainer = build_trainer(tmp_path, replay=Replay(), max_steps=1, **AUTO)
    seen = []

    def check(texts, num_predicted):
        if torch.is_grad_enabled():
            seen.append((trainer.memory.choice.recomputation, trainer.model.is_gradient_checkpointing))
            if trainer.memory.choice.recomputation != "full":
                raise torch.OutOfMemoryError

    trainer.forward_pass.on_pass = check
    trainer.train()
    assert list(dict.fromkeys(seen)) == [("none", False), ("selective", True), ("full", True)]

    trainer = build_trainer(tmp_path, replay=Replay())
    limited(trainer, 0)
    with pytest.raises(FailedRun, match="gradient_checkpointing: true"):
        trainer.train()


def test_a_new_run_of_a_trainer_has_the_micro_batches_of_its_settings_again(tmp_path):
    trainer = build_trainer(tmp_path, replay=Replay(uniform_groups=0))
    out_of_memory_in(trainer, 1)
    trainer.train()
    assert trainer.memory.choice.max_tokens == trainer.update.driver.limits.max_tokens is not None
    trainer.train()
    assert trainer.memory.choice.max_tokens is trainer.update.driver.limits.max_tokens is None


# Resumed runs -------------------------------------------------------------------------------------------------------


def test_a_resumed_run_reuses_the_choice(tmp_path, monkeypatch, capsys):
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    on_device(monkeypatch, 1e9)
    first = build_trainer(tmp_path, replay=Replay(uniform_groups=0), **AUTO, **saving)
    limited(first, 40)
    first.train()
    size = first.update.driver.limits.max_tokens
    assert size <= 40
    rooms = {
        1e9: ("none", size),  # also the size after memory ran out
        1039.5 * 5520: ("selective", 1091),  # what is saved does not fit
    }
    for room, expected in rooms.items():
        on_device(monkeypatch, room)
        resumed = build_trainer(tmp_path, replay=Replay(uniform_groups=0), **AUTO, **saving)
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
        output = capsys.readouterr().out
        assert (resumed.memory.choice.recomputation, resumed.update.driver.limits.max_tokens) == expected
        assert ("whose rounding differs" in output) == (expected[0] == "selective")


def test_a_set_size_is_not_replaced_by_that_of_a_checkpoint(tmp_path, monkeypatch):
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    build_trainer(tmp_path, replay=Replay(), max_tokens_per_micro_batch=70, **saving).train()
    resumed = build_trainer(tmp_path, replay=Replay(), max_tokens_per_micro_batch=80, **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert resumed.update.driver.limits.max_tokens == 80
