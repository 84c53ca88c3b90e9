"""A run that was stopped after any step and resumed ends with the same bits as one that was not.

Completions are sampled here, not replayed: the state of the random number generators, the order of the data, the rows
that wait in the middle of a generation, the reference and the optimizer all have to come back.
"""

import copy
import errno
import json
import logging
import math
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import SafetensorError
from support.experts import tiny_experts
from support.models import assert_same_models, tiny_model, trainable_weights
from support.processes import start
from support.rollouts import addition_dataset, digit_reward
from support.runs import Recorder, build_trainer
from support.seeds import shifted
from transformers import AutoModelForCausalLM, TrainerCallback

from pacs_trl import GRPOTrainer, rewards
from pacs_trl.errors import FailedRun
from pacs_trl.rollouts.checkpoint_files import FILE_LIST, last_checkpoint, write_file_list
from pacs_trl.rollouts.compared_settings import check_same_adapter, check_same_model


FOUR_UPDATES = {  # of two groups of four, per generation
    "steps_per_generation": 4,
    "optim": "adamw_torch",
    "learning_rate": 3e-3,
    "lr_scheduler_type": "linear",
    "weight_decay": 0.1,
    "save_strategy": "steps",
    "save_steps": 1,
    "max_steps": 9,
    "temperature": 1.3,
}
ADAPTER = LoraConfig(r=4, target_modules="all-linear")
HISTORY = ("loss", "grad_norm", "reward", "entropy", "pacs/proxy_abs_mean", "pacs/score_std", "learning_rate")


def trainer_of(output_dir, *, num_prompts=64, lora=False, adapter=False, callbacks=(), **settings):
    """`lora` lets the trainer make an adapter, `adapter` gives it a model that has one."""
    if adapter:
        settings["model"] = get_peft_model(tiny_model(), ADAPTER)
    more = {"train_dataset": addition_dataset(num_prompts), "eval_dataset": addition_dataset(4)}
    more |= {"peft_config": ADAPTER if lora else None, "callbacks": list(callbacks)}
    return build_trainer(output_dir, more=more, **(FOUR_UPDATES | settings))


def trained(output_dir, *, resume=None, **settings):
    recorder = Recorder()
    trainer = trainer_of(output_dir, callbacks=[recorder], **settings)
    trainer.train(resume_from_checkpoint=resume)
    history = [{name: e.get(name) for name in HISTORY} for e in trainer.state.log_history if "loss" in e]
    return trainable_weights(trainer.model), history, recorder


def check_resuming(tmp_path, offsets, **settings):
    weights, history, recorder = trained(tmp_path / "straight", **settings)
    num_steps = settings.get("max_steps", FOUR_UPDATES["max_steps"])
    assert len(history) == num_steps
    for offset in offsets:
        checkpoint = str(tmp_path / "straight" / f"checkpoint-{offset}")
        again, history_again, recorder_again = trained(
            tmp_path / "resumed", resume=checkpoint, **settings, save_strategy="no"
        )
        assert len(recorder_again.weights) == num_steps - offset
        first = {name: recorder.weights[offset][name] for name in again}
        assert all(torch.equal(first[n], recorder_again.weights[0][n]) for n in first), f"weights loaded at {offset}"
        assert all(torch.equal(weights[n], again[n]) for n in weights), f"weights after resuming at {offset}"
        assert history_again == history, f"history after resuming at {offset}"
    return history


@pytest.mark.trains
def test_every_step_of_two_generations_resumes_bit_by_bit(tmp_path):
    history = check_resuming(tmp_path, range(1, 9))
    moved = [entry["pacs/proxy_abs_mean"] > 0 for entry in history]
    assert moved == [False, True, True, True, False, True, True, True, False]


SNAPSHOT = {"reference": "snapshot", "max_steps": 6}
RENEWED = SNAPSHOT | {"reference_reset_steps": 3, "reset_optimizer_on_reference_reset": True}
SEVERAL = {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "num_prompts": 10, "max_steps": 5}
SPLIT = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "steps_per_generation": 16}
SHUFFLED = {"trainer_class": GRPOTrainer, "shuffle_minibatches": True, "max_steps": 6}
VARIANTS = {  # settings, and the steps after which a run is resumed
    "snapshot with resets": (RENEWED, [2, 3, 4]),
    "first snapshot kept": (SNAPSHOT, [1, 4]),
    "two iterations": ({"num_iterations": 2, "steps_per_generation": 2, "max_steps": 6}, [1, 2, 3, 4]),
    "LoRA snapshot": (SNAPSHOT | {"lora": True, "reference_reset_steps": 4}, [3, 4]),
    "adapter of its own, and KL": ({"adapter": True, "beta": 0.1, "max_steps": 5}, [3, 4]),
    "epochs of one generation": ({"num_prompts": 8, "max_steps": 6}, [3, 4, 5]),
    "epochs that drop prompts": ({"num_prompts": 19, "steps_per_generation": 2}, [3, 4, 8]),
    "groups over micro-batches": (SPLIT | {"max_steps": 6}, [2, 5]),
    "several generations in one update": (SEVERAL, [1, 2, 3]),
    "GRPO, shuffled minibatches": (SHUFFLED, [1, 3, 4]),
}


@pytest.mark.parametrize(("settings", "offsets"), VARIANTS.values(), ids=VARIANTS)
def test_every_kind_of_run_resumes_bit_by_bit(tmp_path, settings, offsets):
    check_resuming(tmp_path, offsets, **settings)


class Kill(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == 6:
            os.kill(os.getpid(), signal.SIGKILL)


def train_and_save(directory, resume):
    trainer = trainer_of(directory, callbacks=[] if resume else [Kill()])
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()


@pytest.mark.slow
def test_a_run_that_was_killed_in_a_step_goes_on_in_a_new_process(tmp_path):
    """kill -9 inside the seventh step, with the sixth saved; a new process goes on."""
    weights, _, _ = trained(tmp_path / "straight")

    def run(resume):
        process = start(train_and_save, tmp_path / "killed", resume, output=tmp_path / "output")
        process.join(300)
        return process.exitcode

    assert run(resume=False) == -signal.SIGKILL
    assert (tmp_path / "killed" / "checkpoint-6").is_dir() and not (tmp_path / "killed" / "checkpoint-7").exists()
    assert run(resume=True) == 0, (tmp_path / "output").read_text()[-3000:]
    again = trainable_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "killed", dtype=torch.float32))
    assert all(torch.equal(weights[name], again[name]) for name in weights)


# Twice with one trainer -------------------------------------------------------------------------------------------


def test_a_used_trainer_resumes_like_a_fresh_one(tmp_path):
    """The snapshot was renewed after the checkpoint had been written."""
    settings = {"reference": "snapshot", "reference_reset_steps": 3, "max_steps": 5}
    used, fresh = trainer_of(tmp_path / "used", **settings), trainer_of(tmp_path / "fresh", **settings)
    used.train()
    for trainer in (used, fresh):
        trainer.train(resume_from_checkpoint=str(tmp_path / "used" / "checkpoint-2"))
    assert_same_models(used, fresh)
    assert used.state.log_history[2]["loss"] == fresh.state.log_history[2]["loss"]


def test_a_second_run_starts_from_nothing_but_the_weights(tmp_path):
    """Stopped in the middle of a generation, and after a non-finite step: neither its rows nor its counters are
    left."""
    settings = {"optim": "sgd", "weight_decay": 0.0, "reference": "snapshot", "max_steps": 2, "save_strategy": "no"}
    used = trainer_of(tmp_path, **settings)
    used.train()
    used._non_finite = 2, 2
    weights = {name: weight.clone() for name, weight in used.model.state_dict().items()}
    fresh = trainer_of(tmp_path, **settings)
    fresh.model.load_state_dict(weights)
    for trainer in (used, fresh):
        torch.manual_seed(shifted(3))
        trainer.train()
    assert_same_models(used, fresh)
    first = next(log for log in used.state.log_history if "loss" in log)
    assert first["pacs/proxy_abs_mean"] == 0.0 and first["update/non_finite_steps"] == 0


def test_rows_of_an_interrupted_step_are_not_learned_from(tmp_path):
    """Two generations of eight rows fill an optimizer step; the reward of the second one is interrupted."""
    seen = []

    def reward(completions, **kwargs):
        seen.append(len(completions))
        if len(seen) == 2:
            raise KeyboardInterrupt
        return digit_reward(completions)

    settings = {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "max_steps": 1, "save_strategy": "no"}
    trainer = build_trainer(tmp_path, reward=reward, **settings)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    learned = []
    schedule = trainer.update.schedule_minibatch
    trainer.update.schedule_minibatch = lambda rollouts: learned.append(len(rollouts)) or schedule(rollouts)
    trainer.train()
    assert learned == [16]


@pytest.mark.trains
def test_evaluation_at_the_start_compares_with_the_snapshot_of_the_checkpoint(tmp_path):
    settings = {"reference": "snapshot", "per_device_eval_batch_size": 4, "max_steps": 4}
    first = trainer_of(tmp_path, **settings)
    first.train()
    resumed = trainer_of(tmp_path, eval_on_start=True, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    metrics = next(log for log in resumed.state.log_history if "eval_loss" in log)
    assert metrics["eval_pacs/proxy_abs_mean"] > 0 and abs(metrics["eval_loss"] - math.log(2)) > 1e-4
    assert_same_models(first, resumed)


# Killed while writing ---------------------------------------------------------------------------------------------


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


TRUNCATED = {
    "not there": lambda checkpoint: (checkpoint / "trainer_state.json").unlink(),
    "state of the trainer": lambda checkpoint: truncate(checkpoint / "trainer_state.json"),
    "rows": lambda checkpoint: truncate(checkpoint / "pacs_state_0.pt"),
    "empty": lambda checkpoint: (checkpoint / "pacs_state_0.pt").write_bytes(b""),
    "optimizer": lambda checkpoint: truncate(checkpoint / "optimizer.pt"),
    "weights": lambda checkpoint: truncate(checkpoint / "model.safetensors"),
}


@pytest.mark.parametrize("damage", TRUNCATED.values(), ids=TRUNCATED)
def test_the_last_complete_checkpoint_is_taken(tmp_path, checkpoint, damage, caplog):
    for name in ("checkpoint-1", "checkpoint-2", "checkpoint-10"):
        shutil.copytree(checkpoint, tmp_path / name)
    (tmp_path / "checkpoint-11-merged").mkdir()
    damage(tmp_path / "checkpoint-10")
    with caplog.at_level(logging.WARNING):
        assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
    assert "checkpoint-10 is not complete" in caplog.text and "checkpoint-2 " not in caplog.text
    with pytest.raises(ValueError, match="Resume from .*checkpoint-2"):
        trained(tmp_path, resume=str(tmp_path / "checkpoint-10"), max_steps=3)
    shutil.rmtree(tmp_path / "checkpoint-1")
    damage(tmp_path / "checkpoint-2")
    assert last_checkpoint(tmp_path) is None and last_checkpoint(tmp_path / "nowhere") is None
    with pytest.raises(ValueError, match="no complete checkpoint"):
        trained(tmp_path, resume=True, max_steps=3)


def test_a_truncated_checkpoint_is_passed_over_and_written_again(tmp_path):
    weights, history, _ = trained(tmp_path, max_steps=4)
    (tmp_path / "checkpoint-4" / "trainer_state.json").unlink()
    truncate(tmp_path / "checkpoint-3" / "pacs_state_0.pt")
    again, history_again, recorder = trained(tmp_path, resume=True, max_steps=4)
    assert len(recorder.weights) == 2 and history == history_again
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")


def test_a_checkpoint_that_is_written_over_is_not_complete_meanwhile(tmp_path, monkeypatch):
    """The kill comes while the sixth step is saved again; what counts is the fifth."""
    trained(tmp_path, max_steps=3)

    def killed(*args):
        raise KeyboardInterrupt

    trainer = trainer_of(tmp_path, max_steps=3)
    monkeypatch.setattr(trainer, "_save_optimizer_and_scheduler", killed)
    with pytest.raises(KeyboardInterrupt):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")


# No space -----------------------------------------------------------------------------------------------------------

needs_dev_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full, which has no space")


@needs_dev_full
@pytest.mark.parametrize(
    "file", ["checkpoint-3/optimizer.pt", "checkpoint-3/pacs_state_0.pt", "completions/completions_00003.parquet"]
)
@pytest.mark.slow
def test_a_full_disk_ends_the_run_and_loses_nothing(tmp_path, file):
    straight, history, _ = trained(tmp_path / "straight", max_steps=4)
    directory = tmp_path / "full"
    (directory / file).parent.mkdir(parents=True)
    (directory / file).symlink_to("/dev/full")
    with pytest.raises(FailedRun, match=f"(?s)run in {directory} .* {directory}/checkpoint-2"):
        trained(directory, max_steps=4, log_completions=True)
    (directory / file).unlink()
    weights, history_again, _ = trained(directory, max_steps=4, log_completions=True, resume=True)
    assert history == history_again
    assert all(torch.equal(straight[name], weights[name]) for name in straight)


@needs_dev_full
def test_a_full_disk_is_reported_without_a_checkpoint_and_for_the_final_model(tmp_path, monkeypatch):
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "scheduler.pt").symlink_to("/dev/full")
    with pytest.raises(FailedRun, match="from the beginning: no checkpoint is complete"):
        trained(tmp_path, max_steps=1)
    trainer = build_trainer(tmp_path)

    def save(*args, **kwargs):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(trainer.model, "save_pretrained", save)
    with pytest.raises(FailedRun, match="No space left on device"):
        trainer.save_model()


def test_other_errors_of_a_run_are_not_taken_for_a_full_disk(tmp_path):
    for error in (RuntimeError("CUDA error: out of memory"), OSError(errno.ECHILD, "No child")):

        def reward(completions, error=error, **kwargs):
            raise error

        with pytest.raises(type(error), match="out of memory|No child"):
            trained(tmp_path, max_steps=1, reward=reward)


# Finished runs ----------------------------------------------------------------------------------------------------


def test_resuming_a_finished_run_learns_nothing(tmp_path, capsys):
    """Whose length is in epochs; in steps: test_preemption.py."""
    settings = {"max_steps": -1, "num_train_epochs": 1, "steps_per_generation": 1}
    weights, history, _ = trained(tmp_path, num_prompts=8, **settings)
    capsys.readouterr()
    again, history_again, recorder = trained(tmp_path, resume=True, num_prompts=8, **settings)
    assert recorder.weights == [] and history == history_again
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert "is the end of a finished run" in capsys.readouterr().out


# Refused checkpoints ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    trained(directory, max_steps=3)
    return directory / "checkpoint-2"


OTHER = {
    **{"pacs_beta": 2.0, "score_estimator": "dr_grpo", "reference": "snapshot", "class_weighting": "none", "seed": 1},
    **{"num_generations": 8, "steps_per_generation": 2, "temperature": 1.0, "max_completion_length": 8, "top_p": 0.9},
    **{"generation_kwargs": {"no_repeat_ngram_size": 2}, "reward_weights": [0.5], "learning_rate": 1e-3},
    "optim_args": "momentum=0.9",
}


def test_a_checkpoint_with_other_settings_is_refused(tmp_path, checkpoint):
    with pytest.raises(ValueError, match="has other settings") as error:
        trained(tmp_path, resume=str(checkpoint), max_steps=3, **OTHER)
    named = {part.rpartition(" ")[2] for part in str(error.value).split(": ")[:-1]}
    sizes = {"steps_per_generation"}  # compared as completions of all processes
    assert OTHER.keys() - sizes <= named and "temperature: 1.3 in the checkpoint, 1.0 now" in str(error.value)
    assert "completions per generation batch: 32 in the checkpoint, " in str(error.value)


def test_a_setting_that_an_earlier_version_did_not_save_is_not_compared(tmp_path, checkpoint):
    earlier = tmp_path / "checkpoint-2"
    shutil.copytree(checkpoint, earlier)
    state = torch.load(earlier / "pacs_state_0.pt", weights_only=False)
    del state["settings"]["optim_args"], state["prompt_digest"]
    torch.save(state, earlier / "pacs_state_0.pt")
    write_file_list(earlier)
    trained(tmp_path / "run", resume=str(earlier), optim_args="momentum=0.9", max_steps=2, save_strategy="no")


def test_a_checkpoint_graded_with_other_verification_settings_is_refused(tmp_path, checkpoint, monkeypatch):
    free = {"verification_num_workers": 1, "verification_max_failure_share": 1.0, "code_isolation": "rlimits"}
    saved = rewards.shared_arguments()
    monkeypatch.setattr(rewards, "_arguments", replace(saved, **free))
    trained(tmp_path / "free", resume=str(checkpoint), max_steps=3, save_strategy="no")
    others = {"verification_protocol": "trl", "verification_cpu_seconds": 0.2, "code_label": "share"}
    monkeypatch.setattr(rewards, "_arguments", replace(saved, **others))
    with pytest.raises(ValueError, match="has other settings") as error:
        trained(tmp_path, resume=str(checkpoint), max_steps=3)
    for name, value in others.items():
        assert f"{name}: {getattr(saved, name)!r} in the checkpoint, {value!r} now" in str(error.value)


def test_other_prompts_are_noticed_and_the_same_ones_are_not(tmp_path, checkpoint, caplog):
    prompts = addition_dataset(64)
    for dataset, is_noticed in (
        (prompts, False),
        (prompts.shuffle(seed=1), True),
        (prompts.to_iterable_dataset(), False),
    ):
        caplog.clear()
        trainer = trainer_of(tmp_path, max_steps=2, save_strategy="no")
        trainer.train_dataset = dataset
        with caplog.at_level(logging.WARNING):
            trainer.train(resume_from_checkpoint=str(checkpoint))
        assert ("other prompts in the training set" in caplog.text) == is_noticed


def test_a_checkpoint_of_another_trainer_is_refused(tmp_path, checkpoint):
    copy = tmp_path / "checkpoint-2"
    with pytest.raises(ValueError, match="'.*checkpoint-2' does not exist"):
        trained(tmp_path, resume=str(copy), max_steps=3)
    shutil.copytree(checkpoint, copy)
    (copy / "pacs_state_0.pt").unlink()
    with pytest.raises(ValueError, match="has no pacs_state"):
        trained(tmp_path, resume=str(copy), max_steps=3)
    (copy / FILE_LIST).unlink()  # neither other trainers nor `save_only_model` write it
    with pytest.raises(ValueError, match="has no pacs_state.* written by another trainer"):
        trained(tmp_path, resume=str(copy), max_steps=3)
    shutil.copytree(checkpoint, copy / "checkpoint-2")  # the given directory is that of a finished run
    with pytest.raises(ValueError, match="checkpoint-2/checkpoint-2"):
        trained(tmp_path, resume=str(copy), max_steps=3)


def test_adapters_do_not_resume_as_whole_models_nor_as_other_adapters(tmp_path, checkpoint, caplog):
    """Found before the optimizer or the weights of the checkpoint are loaded."""
    trained(tmp_path / "lora", max_steps=2, lora=True)
    adapter = str(tmp_path / "lora" / "checkpoint-1")
    with pytest.raises(ValueError, match="use_peft: true"):
        trained(tmp_path / "again", resume=adapter, max_steps=2)
    with pytest.raises(ValueError, match="use_peft: false"):
        trained(tmp_path / "again", resume=str(checkpoint), max_steps=3, lora=True)
    for other, key in (
        (LoraConfig(r=8, target_modules="all-linear"), "r: 4"),
        (LoraConfig(r=4, lora_alpha=1, target_modules="all-linear"), "lora_alpha: 8"),
        (LoraConfig(r=4, target_modules=["q_proj"]), "target_modules"),
        (LoraConfig(r=4, alpha_pattern={"q_proj": 32}, target_modules="all-linear"), "alpha_pattern: {}"),
        (LoraConfig(r=4, bias="all", target_modules="all-linear"), "bias: 'none'"),
    ):
        with pytest.raises(ValueError, match=key):
            trained(tmp_path / "again", resume=adapter, max_steps=2, model=get_peft_model(tiny_model(), other))
    wide = get_peft_model(tiny_model(hidden_size=64), ADAPTER)
    for resume_path, model, words in (
        (adapter, wide, "checkpoint-1 does not fit the model of this run: .*lora"),
        (str(checkpoint), tiny_model(hidden_size=64), "hidden_size: 32 in the checkpoint, 64 now"),
    ):
        with pytest.raises(ValueError, match=words):
            trained(tmp_path / "again", resume=resume_path, max_steps=3, model=model)
    base = get_peft_model(tiny_model(), ADAPTER)
    base.peft_config["default"].base_model_name_or_path = "models/other"
    file = tmp_path / "lora" / "checkpoint-1" / "adapter_config.json"
    file.write_text(file.read_text().replace('"base_model_name_or_path": null', '"base_model_name_or_path": "a/one"'))
    with caplog.at_level(logging.WARNING):
        check_same_adapter(adapter, base.peft_config["default"])
    assert "a/one" in caplog.text and "models/other" in caplog.text


@pytest.mark.parametrize("targets", [["gate_proj", "up_proj", "down_proj"], "all-linear"])
def test_an_adapter_of_fused_experts_is_the_one_that_it_was_made_from(tmp_path, targets):
    """peft replaces names of experts, which transformers fuses, and adds patterns for them."""
    adapter = LoraConfig(r=4, target_modules=targets)
    model = get_peft_model(tiny_experts(), copy.deepcopy(adapter))
    model.save_pretrained(tmp_path)
    check_same_adapter(str(tmp_path), adapter, is_in_model=False)
    check_same_adapter(str(tmp_path), model.peft_config["default"])
    adapter.lora_alpha = 1
    with pytest.raises(ValueError, match="lora_alpha: 8 in the checkpoint, 1 now"):
        check_same_adapter(str(tmp_path), adapter, is_in_model=False)


def test_an_adapter_of_layers_in_a_tuple_is_the_one_of_its_checkpoint(tmp_path):
    adapter = LoraConfig(r=4, target_modules=("q_proj", "v_proj"), layers_to_transform=(0, 1))
    model = get_peft_model(tiny_model(), adapter)
    model.save_pretrained(tmp_path)
    check_same_adapter(str(tmp_path), model.peft_config["default"])


def test_a_model_with_fewer_layers_or_of_another_family_is_not_resumed(tmp_path):
    """Trainer would load the weights that fit and leave the others as they are."""
    tiny_model().config.save_pretrained(tmp_path)
    check_same_model(str(tmp_path), tiny_model(seed=1).config)
    config = tiny_model().config
    config.num_hidden_layers = 1
    with pytest.raises(ValueError, match="num_hidden_layers: 2 in the checkpoint, 1 now.* Set model_name_or_path"):
        check_same_model(str(tmp_path), config)


def test_snapshot_that_does_not_fit(tmp_path):
    trained(tmp_path / "full", max_steps=2, reference="snapshot")
    checkpoint = tmp_path / "full" / "checkpoint-1"
    copies = torch.load(checkpoint / "pacs_reference_0.pt", weights_only=True)
    torch.save(copies[:-1], checkpoint / "pacs_reference_0.pt")
    with pytest.raises(ValueError):
        trained(tmp_path / "again", resume=str(checkpoint), max_steps=2, reference="snapshot")
    (checkpoint / "pacs_reference_0.pt").unlink()
    with pytest.raises((ValueError, FileNotFoundError), match="pacs_reference_0.pt"):
        trained(tmp_path / "again", resume=str(checkpoint), max_steps=2, reference="snapshot")


def test_checkpoint_without_the_reference_that_followed_the_policy(tmp_path):
    """Written by a version that did not save it: a run with the start model would be another one."""
    settings = {"trainer_class": GRPOTrainer, "beta": 0.1, "sync_ref_model": True, "max_steps": 2}
    trained(tmp_path / "full", **settings)
    checkpoint = tmp_path / "full" / "checkpoint-1"
    sizes = json.loads((checkpoint / FILE_LIST).read_text())
    del sizes["kl_reference_0.pt"]
    (checkpoint / FILE_LIST).write_text(json.dumps(sizes))
    (checkpoint / "kl_reference_0.pt").unlink()
    with pytest.raises(ValueError, match="did not save the reference that sync_ref_model changes. Start a new run"):
        trained(tmp_path / "again", resume=str(checkpoint), **settings)
