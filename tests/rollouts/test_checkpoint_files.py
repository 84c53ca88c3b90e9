"""Checkpoints with missing, empty, or truncated files are incomplete."""

import json
import shutil

import pytest
from support.runs import build_trainer

from pacs_trl.rollouts.checkpoint_files import FILE_LIST, defect, last_checkpoint


SAVING = {"optim": "adamw_torch", "save_strategy": "steps", "save_steps": 1, "max_steps": 1}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    build_trainer(directory, **SAVING).train()
    return directory / "checkpoint-1"


@pytest.fixture
def copy(checkpoint, tmp_path):
    return shutil.copytree(checkpoint, tmp_path / "checkpoint-1")


def test_every_file_of_a_checkpoint_is_needed(checkpoint, copy):
    assert defect(copy) is None
    names = set(json.loads((checkpoint / FILE_LIST).read_text()))
    needed = {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "pacs_state_0.pt", "config.json"}
    assert needed <= names
    for name in names:
        (copy / name).rename(copy / "away")
        assert name in defect(copy), name
        (copy / "away").rename(copy / name)
    assert defect(copy) is None


def test_empty_and_truncated_files_are_detected(checkpoint, copy):
    for name in json.loads((checkpoint / FILE_LIST).read_text()):
        whole = (copy / name).read_bytes()
        for kept in (0, len(whole) // 2):
            (copy / name).write_bytes(whole[:kept])
            if not name.endswith(".jinja"):  # text of any length may be right
                assert name in defect(copy), (name, kept)
        (copy / name).write_bytes(whole)
    assert defect(copy) is None


def test_an_empty_config_falls_back_to_an_earlier_checkpoint(checkpoint, tmp_path):
    for step in (1, 2):
        shutil.copytree(checkpoint, tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-2" / "config.json").write_text("")
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-1")


def test_a_checkpoint_whose_json_was_edited_is_complete(copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"comment": "moved"}))
    (copy / "README.md").unlink(missing_ok=True)
    assert defect(copy) is None


def test_a_run_refuses_to_continue_without_the_optimizer(copy):
    (copy / "optimizer.pt").unlink()
    with pytest.raises(ValueError, match="has no optimizer.pt"):
        build_trainer(copy.parent, **SAVING).train(resume_from_checkpoint=str(copy))


def test_checkpoints_of_earlier_versions_have_no_list_of_files(copy):
    (copy / FILE_LIST).unlink()
    assert defect(copy) is None
    (copy / "config.json").write_text("{")
    assert "config.json is truncated" in defect(copy)
