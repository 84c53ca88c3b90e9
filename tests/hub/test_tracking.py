"""Logs of wandb, trackio, and TensorBoard in a run that is stopped and resumed."""

import importlib
import json
import os
import re
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import yaml
from support.optional_packages import needs

from pacs_trl import PACSConfig, train
from pacs_trl.redaction import published
from pacs_trl.rollouts import trackers


pytestmark = [needs("wandb"), needs("trackio"), needs("tensorboard")]

SECRET = "s3cr3tValue42"
RECIPE = Path(__file__).parents[2] / "recipes" / "miniature" / "pacs.yaml"


def train_steps(output_dir, model, max_steps, *more):
    recipe = yaml.safe_load(RECIPE.read_text()) | {
        "report_to": ["wandb", "trackio", "tensorboard"],
        "model_init_kwargs": {"token": SECRET, "attn_implementation": "sdpa"},
        "vllm_server_base_url": f"http://user:{SECRET}@host:8000",
    }
    (output_dir.parent / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    settings = {"config": output_dir.parent / "recipe.yaml", "model_name_or_path": model, "output_dir": output_dir}
    settings |= {"per_device_train_batch_size": 8, "max_train_samples": 64, "num_generations": 4, "num_iterations": 1}
    settings |= {"max_completion_length": 8, "max_steps": max_steps, "save_strategy": "steps", "save_steps": 1}
    settings |= {"log_completions": "true", "num_completions_to_print": 1, "disable_tqdm": "true"}
    settings |= {"project": "tracking"}
    arguments = [text for key, value in settings.items() for text in (f"--{key}", str(value))]
    with pytest.MonkeyPatch.context() as patch:  # wandb sends the command line, which it reads itself
        patch.setattr("sys.argv", ["train.py", *arguments, *more, "--hub_token", SECRET])
        return train.main([*arguments, *more, "--hub_token", SECRET])


@pytest.fixture(scope="module")
def runs(tmp_path_factory, model_path):
    """Two steps, and two more after resuming: the output folder, wandb's folders of both parts, the log, the
    recipe."""
    folder = tmp_path_factory.mktemp("tracking")
    wandb = importlib.import_module("wandb")
    output_dir = folder / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_DIR", str(folder))
        patch.delenv("WANDB_RUN_ID", raising=False)
        wandb.teardown()  # an earlier test may have let it read the environment, which it does once
        train_steps(output_dir, model_path, 2)
        trainer = train_steps(output_dir, model_path, 4, "--resume_from_checkpoint", "last")
        assert "WANDB_RUN_ID" not in os.environ
        wandb.teardown()  # its process writes the last rows after `finish`
    parts = sorted((folder / "wandb").glob("offline-run-*"))
    assert len(parts) == 2
    recipe = yaml.safe_load((output_dir / "recipe.yaml").read_text())
    return output_dir, parts, trainer.state.log_history, recipe


def wandb_records(folder: Path) -> list:
    """
    The records of an offline run. The file is a log in the format of LevelDB: after 7 bytes that name the version,
    blocks of 32 KiB hold fragments with checksum (4 bytes), length (2) and type (1 whole, 2 first, 3 middle, 4 last).
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data = next(folder.glob("*.wandb")).read_bytes()
    position, parts, records = 7, [], []
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        length, kind = struct.unpack("<HB", data[position + 4 : position + 7])
        if kind == 0:
            break
        parts.append(data[position + 7 : position + 7 + length])
        position += 7 + length
        if kind in (1, 4):
            records.append(Record.FromString(b"".join(parts)))
            parts = []
    return records


def wandb_history(folder: Path) -> list[dict]:
    return [
        {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
        for record in wandb_records(folder)
        if record.HasField("history")
    ]


def wandb_config(folder: Path) -> dict:
    config = {}
    for record in wandb_records(folder):
        for updates in (record.run.config.update, record.config.update):
            config |= {(u.key or "/".join(u.nested_key)): json.loads(u.value_json) for u in updates}
    return config


def scalars(log_history) -> dict[int, dict[str, float]]:
    """What the trainer logged at each step, under the names that trackers use."""
    return {
        entry["step"]: {f"train/{k}": v for k, v in entry.items() if k != "step" and isinstance(v, int | float)}
        for entry in log_history
        if "reward" in entry
    }


def wandb_rows(runs) -> list[dict]:
    return [row for part in runs[1] for row in wandb_history(part)]


def trackio_rows(runs) -> list[dict]:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = trackio.Api().runs("tracking")
    assert run.name == f"run-{(runs[0] / 'run_id').read_text().strip()}"
    assert run.config["recipe"] == published(runs[3]) | {"resume_from_checkpoint": "last"}
    return SQLiteStorage.get_logs(run.project, run.name, run_id=run.id)


@pytest.mark.parametrize("rows_of", [wandb_rows, trackio_rows])
def test_every_scalar_and_table_of_every_step_in_one_run(runs, rows_of):
    rows = rows_of(runs)
    metrics = {row["train/global_step"]: row for row in rows if "train/reward" in row}
    expected = scalars(runs[2])
    assert sorted(metrics) == sorted(expected) == [1, 2, 3, 4]
    for step, logged in expected.items():
        assert len(logged) > 20 and {k: metrics[step][k] for k in logged} == pytest.approx(logged)
    tables = {re.match(r"completions/step_\d{5}|", key)[0] for row in rows for key in row}
    assert tables - {""} == {f"completions/step_{step:05d}" for step in expected}


def test_wandb_keeps_the_completions_of_every_step(runs):
    output_dir, parts, _, _ = runs
    tables = {}
    for part in parts:
        for row in wandb_history(part):
            for key, path in row.items():
                if match := re.fullmatch(r"completions/step_(\d{5})/path", key):
                    step = int(match[1])
                    assert row["train/global_step"] == step and step not in tables
                    tables[step] = json.loads((part / "files" / path).read_text())
    assert sorted(tables) == [1, 2, 3, 4]
    for step, table in tables.items():
        written = pd.read_parquet(output_dir / "completions" / f"completions_{step:05d}.parquet")
        assert table["columns"] == list(written.columns)
        column = table["columns"].index("completion")
        texts = [row[column][0]["content"] for row in table["data"]]
        assert texts == [completion[0]["content"] for completion in written["completion"]] and len(texts) == 8


def test_a_resumed_run_has_the_same_id_and_the_resolved_recipe(runs):
    output_dir, parts, _, recipe = runs
    assert {part.name.split("-")[-1] for part in parts} == {(output_dir / "run_id").read_text().strip()}
    resumed = published(recipe) | {"resume_from_checkpoint": "last"}  # not in the recipe beside the model
    assert wandb_config(parts[1])["recipe"] == resumed and recipe["model_name_or_path"].endswith("/model")
    first = wandb_config(parts[0])
    assert first["recipe"]["max_steps"] == 2 and first["recipe"]["dataset_name"] == "addition_train.jsonl"
    assert first["learning_rate"] == recipe["learning_rate"]  # and every argument of the trainer beside it


def test_no_tracker_gets_a_secret(runs):
    """The token of the model's settings and the password of the server's address, in the files of all trackers."""
    output_dir, parts, _, recipe = runs
    assert recipe["model_init_kwargs"] == {"attn_implementation": "sdpa"}  # nor does the file beside the weights
    files = [file for file in output_dir.parent.rglob("*") if file.is_file() and file.name != "recipe.yaml"]
    files = [file for file in files if file.suffix != ".bin"]  # training_args.bin, which is not published
    assert {".wandb", ".json"} < {file.suffix for file in files} and any("tfevents" in f.name for f in files)
    assert [file for file in files if SECRET.encode() in file.read_bytes()] == []
    for part in parts:
        config = wandb_config(part)
        assert config["_name_or_path"] == "model" and config["output_dir"] == "run"
        assert config["vllm_server_base_url"] == "http://host:8000" and "hub_token" not in config


def test_tensorboard_has_one_folder_with_the_same(runs):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    output_dir, _, log_history, _ = runs
    folder = output_dir / "runs" / (output_dir / "run_id").read_text().strip()
    assert [path.name for path in (output_dir / "runs").iterdir()] == [folder.name]
    assert len(list(folder.glob("events.*"))) == 2
    events = EventAccumulator(str(folder)).Reload()
    expected = scalars(log_history)
    for name in expected[4]:
        values = {event.step: event.value for event in events.Scalars(name)}
        assert values == pytest.approx({step: logged[name] for step, logged in expected.items() if name in logged})


def identity_of(output_dir, *, resuming, report_to="wandb"):
    settings = PACSConfig(str(output_dir), report_to=report_to, use_cpu=True, bf16=False)
    with trackers.tracked_run(settings, {}, resuming=resuming):
        return os.environ.get("WANDB_RUN_ID"), settings.run_name


def test_a_new_run_has_a_new_identity_and_a_resumed_one_the_old(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    first, name = identity_of(tmp_path, resuming=False)
    assert identity_of(tmp_path, resuming=True) == (first, name)
    assert name == f"{tmp_path.name}-{first}"
    assert identity_of(tmp_path, resuming=False)[0] != first
    assert "WANDB_RUN_ID" not in os.environ and "TENSORBOARD_LOGGING_DIR" not in os.environ
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    assert identity_of(tmp_path, resuming=False)[0] == "mine" == (tmp_path / "run_id").read_text().strip()
    assert os.environ["WANDB_RUN_ID"] == "mine"


def test_wandb_without_a_key_is_refused_before_the_trainer_is_built(tmp_path, monkeypatch):
    """Said before the trainer is built, with the words of the command line that wandb may see."""
    import wandb

    seen = []
    monkeypatch.setattr("sys.argv", ["train.py", "--hub_token", SECRET])
    monkeypatch.setattr(
        wandb, "setup", lambda: seen.append(list(sys.argv)) or SimpleNamespace(settings=SimpleNamespace(mode="online"))
    )
    monkeypatch.setattr(wandb, "login", lambda prompt, verify: False)
    with pytest.raises(ValueError, match="report_to.*wandb"):
        identity_of(tmp_path, resuming=False, report_to="wandb")
    assert seen == [["train.py"]]
    monkeypatch.setattr(wandb, "login", lambda prompt, verify: True)
    assert identity_of(tmp_path, resuming=False, report_to="wandb")[1] is not None


def test_without_a_tracker_nothing_is_written(tmp_path):
    assert identity_of(tmp_path, resuming=False, report_to="none")[1] is None
    assert list(tmp_path.iterdir()) == []
