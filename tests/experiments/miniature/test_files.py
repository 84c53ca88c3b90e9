"""The files that recipes of the miniature name."""

import json
import subprocess

from experiments.miniature import files
from experiments.miniature.tasks import TASKS, problems
from pacs_trl.errors import exit_code


def test_problems_are_written_once_in_the_order_of_the_task(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files.write_data()
    rows = [json.loads(line) for line in files.data_file("terms_3", "test").read_text().splitlines()]
    assert rows == problems("terms_3", "test")
    assert {path.name for path in files.DATA_DIR.iterdir()} == {
        f"{task}_{split}.jsonl" for task in TASKS for split in ("train", "test")
    }
    files.data_file("addition", "train").write_text("kept")
    files.write_data()
    assert files.data_file("addition", "train").read_text() == "kept"


def test_a_recipe_names_a_link_to_the_warm_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = []

    def warm_start(name, **settings):
        asked.append((name, settings))
        (tmp_path / f"start-{len(asked)}").mkdir()
        return tmp_path / f"start-{len(asked)}"

    monkeypatch.setattr("experiments.miniature.warm_start.warm_start", warm_start)
    for name, directory in (("addition", "addition-small"), ("terms_3/tiny", "terms_3-tiny"), ("addition", None)):
        link = files.write_model(name)
        assert link == files.MODELS_DIR / (directory or "addition-small")
        assert link.resolve() == tmp_path / f"start-{len(asked)}"
    assert files.warm_start_of(link, seed=3) == tmp_path / "start-4"
    assert asked[1:] == [("terms_3/tiny", {}), ("addition/small", {}), ("addition/small", {"seed": 3})]
    assert files.warm_start_of("org/model", seed=3).as_posix() == "org/model"


def test_ctrl_c_reaches_no_process_of_ours_that_would_print_a_traceback(monkeypatch, capsys, tmp_path):
    def interrupted(command, process_group=None, **options):
        assert process_group == 0  # not that of the terminal
        raise KeyboardInterrupt

    monkeypatch.setattr("pacs_trl.errors.signal.signal", lambda number, handler: None)
    monkeypatch.setattr(subprocess, "run", interrupted)
    monkeypatch.chdir(tmp_path)  # warm starts are kept in the working directory
    assert exit_code("files", files.main, ["addition"]) == 130
    assert capsys.readouterr().err == "files: stopped by Ctrl-C.\n"
