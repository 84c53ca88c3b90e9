"""A recipe on another number of processes keeps its completions per optimizer step, or says that it does not."""

import os

import pytest
import torch
from support.rollouts import addition_dataset
from support.runs import build_trainer

from pacs_trl import train
from pacs_trl.plan.check import main as plan
from pacs_trl.recipe import Recipe
from pacs_trl.rollouts.checkpoint_files import FILE_LIST, last_resumable_checkpoint, write_file_list
from pacs_trl.rollouts.process_count import SavedRun, read_saved_run
from pacs_trl.update.step_sizes import BatchSizes


RECIPE = {"model_name_or_path": "org/model", "dataset_name": "addition.jsonl", "output_dir": "unused"}
RECIPE |= {"use_cpu": True, "bf16": False, "num_generations": 4, "per_device_train_batch_size": 4}
RECIPE |= {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_completion_length": 8}
WRITTEN = BatchSizes(4, 8, 2, 4, 4)


def checkpoint_of(directory, *, sharding="none", step=WRITTEN):
    saved = SavedRun(step.num_processes, sharding, step.settings)
    directory.mkdir()
    torch.save({"processes": saved._asdict()}, directory / "pacs_state_0.pt")
    (directory / "trainer_state.json").write_text("{}")
    write_file_list(directory)
    return str(directory)


def sizes(recipe: Recipe) -> tuple:
    step = recipe.step
    return step.per_device_train_batch_size, step.gradient_accumulation_steps, step.steps_per_generation


@pytest.mark.parametrize("method", ["pacs", "grpo", "ppo"])
def test_sizes_are_those_of_the_expected_processes(method):
    settings = RECIPE | {"method": method, "expected_processes": 8, "keep_global_batch": True}
    assert sizes(Recipe.from_settings(settings, 8)) == (4, 2, 4)
    assert sizes(Recipe.from_settings(settings, 2)) == (4, 8, 16)
    without_steps = {name: value for name, value in settings.items() if name != "steps_per_generation"}
    assert sizes(Recipe.from_settings(without_steps, 4)) == (4, 4, 4)


def test_unequal_shares_where_the_number_does_not_divide():
    settings = RECIPE | {"expected_processes": 8, "keep_global_batch": True}
    recipe = Recipe.from_settings(settings, 6)
    assert recipe.training.completions_per_step == recipe.step.completions_per_update == 64
    with pytest.raises(ValueError, match="64 completions .* 6 processes, which method ppo needs"):
        Recipe.from_settings(settings | {"method": "ppo"}, 6)
    with pytest.raises(ValueError, match="rollout_lag do not support"):
        Recipe.from_settings(settings | {"rollout_lag": 1}, 6)


def test_sizes_are_those_of_the_checkpoint(tmp_path):
    resume = {"resume_from_checkpoint": checkpoint_of(tmp_path / "checkpoint-3"), "keep_global_batch": True}
    assert sizes(Recipe.from_settings(RECIPE | resume, 4)) == (4, 4, 8)
    with pytest.raises(ValueError, match="128 completions, fewer than the 200 processes"):
        Recipe.from_settings(RECIPE | resume, 200)
    with pytest.raises(ValueError, match="Set expected_processes, or resume_from_checkpoint"):
        Recipe.from_settings(RECIPE | {"keep_global_batch": True}, 4)


def test_plan_prints_the_sizes(tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("\n".join(f"{name}: {value}" for name, value in RECIPE.items()))
    checkpoint = checkpoint_of(tmp_path / "checkpoint-3")
    plan(["--config", str(recipe), "--num_processes", "6", "--resume", checkpoint])
    printed = capsys.readouterr().out
    assert "was written by 8 processes, with 64 completions per optimizer step. 6 continue it" in printed
    assert "  completions_per_step: 64\n" in printed and "  steps_per_generation: 4\n" in printed
    assert "has 64 completions over 8 processes, and one of this launch 48 over 6. Set keep_global_batch" in printed
    assert (
        plan(["--config", str(recipe), "--num_processes", "6", "--resume", checkpoint, "--keep_global_batch", "true"])
        == 0
    )
    assert plan(["--config", str(recipe), "--num_processes", "6", "--resume", "nowhere"]) == 1
    assert "'nowhere' does not exist" in capsys.readouterr().out
    for word, line in (("last", f"{tmp_path / 'new'} contains no checkpoint, so training starts"), ("none", "")):
        words = ["--config", str(recipe), "--num_processes", "8", "--resume", word]
        assert plan([*words, "--output_dir", str(tmp_path / "new")]) == 0
        assert line in capsys.readouterr().out
    assert plan(["--config", str(recipe), "--num_processes", "200", "--resume", checkpoint]) == 1
    assert "fewer than the 200 processes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (
            {},
            "An optimizer step of .*checkpoint-3 has 64 completions over 8 processes, and one of this launch 8 over 1",
        ),
        ({"sharding": "DeepSpeed"}, "was written with DeepSpeed, and this launch uses DDP or one process"),
        ({"sharding": "FSDP"}, "was written with FSDP, and this launch uses DDP"),
    ],
)
def test_a_launch_that_cannot_continue_is_refused_before_the_model_is_loaded(tmp_path, monkeypatch, saved, message):
    def fail(*args, **kwargs):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(train, "check_complete", lambda checkpoint: None)
    monkeypatch.setattr(train, "_load_tokenizer", fail)
    settings = RECIPE | {"output_dir": str(tmp_path), "report_to": "none"}
    settings["resume_from_checkpoint"] = checkpoint_of(tmp_path / "checkpoint-3", **saved)
    argv = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    with pytest.raises(ValueError, match=message):
        train.main(argv)


def test_deepspeed_continues_on_the_same_number_only(tmp_path, monkeypatch):
    recipe = Recipe.from_settings(RECIPE)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    checkpoint = checkpoint_of(tmp_path / "checkpoint-3", sharding="DeepSpeed")
    with pytest.raises(ValueError, match="by 8 processes with DeepSpeed, .* this launch has 1"):
        train._check_processes(recipe, checkpoint)


def test_a_checkpoint_of_an_earlier_version_is_refused_by_name(tmp_path):
    (tmp_path / "checkpoint-3").mkdir()
    torch.save({"attributes": {}}, tmp_path / "checkpoint-3" / "pacs_state_0.pt")
    (tmp_path / "checkpoint-3" / "trainer_state.json").write_text("{}")
    resume = {"resume_from_checkpoint": str(tmp_path / "checkpoint-3"), "keep_global_batch": True}
    with pytest.raises(ValueError, match="earlier version of pacs_trl"):
        Recipe.from_settings(RECIPE | resume, 4)


def test_a_checkpoint_of_another_layout_is_refused_by_name(tmp_path):
    checkpoint = tmp_path / "checkpoint-3"
    checkpoint_of(checkpoint)
    sizes = WRITTEN.settings | {"completions_per_slot": 4}  # a setting that this version does not have
    for processes in ({"num_processes": 8}, {"num_processes": 8, "sharding": "none", "sizes": sizes}):
        torch.save({"processes": processes}, checkpoint / "pacs_state_0.pt")
        write_file_list(checkpoint)
        with pytest.raises(ValueError, match="another version of pacs_trl.* Resume with that version"):
            read_saved_run(checkpoint)


def test_a_checkpoint_without_the_list_of_its_files_is_refused(tmp_path):
    """A copy that lacks it may also lack the optimizer, which Trainer would start anew without a word."""
    checkpoint = tmp_path / "checkpoint-3"
    checkpoint_of(checkpoint)
    (checkpoint / FILE_LIST).unlink()
    with pytest.raises(ValueError, match=f"has no {FILE_LIST}.* Copy the .*checkpoint again"):
        read_saved_run(checkpoint)


def test_ppo_needs_the_same_number_of_processes(tmp_path):
    recipe = Recipe.from_settings(RECIPE | {"method": "ppo", "per_device_train_batch_size": 32})
    with pytest.raises(ValueError, match="by 8 processes, and this launch has 1: the method depends on their number"):
        train._check_processes(recipe, checkpoint_of(tmp_path / "checkpoint-3"))


def test_expected_processes_that_contradict_the_checkpoint_are_named(tmp_path):
    recipe = Recipe.from_settings(RECIPE | {"expected_processes": 3, "keep_global_batch": True})
    with pytest.raises(ValueError, match="has 64 .* this launch 24 over 1. Remove expected_processes"):
        train._check_processes(recipe, checkpoint_of(tmp_path / "checkpoint-3"))


def test_a_streamed_dataset_has_no_unequal_shares(tmp_path):
    stream = addition_dataset(8).to_iterable_dataset()
    settings = {"completions_per_step": 8, "max_steps": 1}
    with pytest.raises(ValueError, match="completions_per_step=8 .* a streamed dataset does not support"):
        build_trainer(tmp_path, more={"train_dataset": stream}, **settings)


def test_last_is_a_checkpoint_that_can_be_continued(tmp_path):
    for seconds, step in enumerate((2, 1)):  # as a copy may have been written
        checkpoint_of(tmp_path / f"checkpoint-{step}")
        os.utime(tmp_path / f"checkpoint-{step}", (seconds, seconds))
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "trainer_state.json").write_text("{}")
    assert last_resumable_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
