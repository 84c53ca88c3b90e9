import json
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pacs_trl.evaluation.requests import Completion
from pacs_trl.miniature import warm_start as module
from pacs_trl.miniature.tokenizer import build_tokenizer
from pacs_trl.miniature.warm_start import StopAtAccuracy, WarmStartSettings, train_warm_start, warm_start


pytestmark = pytest.mark.slow

TINY = {"size": "tiny", "target_accuracy": 1.0, "max_steps": 5, "probe_steps": 2, "num_probes": 4, "batch_size": 4}


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(directory).state_dict()


class TestTraining:
    def test_trains_up_to_max_steps_below_the_target(self, tmp_path):
        outcome = train_warm_start(WarmStartSettings("addition", **TINY), tmp_path)
        assert outcome == {"steps": 5, "accuracy": 0.0}
        assert json.loads((tmp_path / "warm_start.json").read_text())["steps"] == 5
        tokenizer = AutoTokenizer.from_pretrained(tmp_path)
        assert tokenizer.get_vocab() == build_tokenizer().get_vocab()
        assert weights(tmp_path)["model.embed_tokens.weight"].shape == (len(tokenizer), 64)

    def test_stops_at_the_first_measurement_that_reaches_the_target(self, tmp_path):
        settings = WarmStartSettings("expression", **{**TINY, "target_accuracy": 0.0})
        assert train_warm_start(settings, tmp_path)["steps"] == 2

    def test_seed_decides_the_result(self, tmp_path):
        for name, seed in (("first", 3), ("second", 3), ("other", 4)):
            train_warm_start(WarmStartSettings("equation", seed=seed, **TINY), tmp_path / name)
        first, second, other = (weights(tmp_path / name) for name in ("first", "second", "other"))
        assert all(torch.equal(first[key], second[key]) for key in first)
        assert not torch.equal(first["model.norm.weight"], other["model.norm.weight"])


def test_accuracy_is_the_share_of_boxed_right_answers(monkeypatch):
    probe = StopAtAccuracy(WarmStartSettings("addition", **TINY), build_tokenizer())
    answers = [row["answer"] for row in probe.rows]
    texts = [
        rf"some,steps,\boxed{{{answers[0]}}}",  # right
        rf"\boxed{{1{answers[1]}}}",  # wrong: another number that ends alike
        answers[2],  # wrong: not in a box
        rf"\boxed{{{answers[3]}}}",  # right
    ]
    drawn = [[Completion(text, 9, "stop")] for text in texts]
    monkeypatch.setattr(module, "sample_completions", lambda *args, **kwargs: drawn)
    assert probe.measure(model=None) == 0.5


class TestCache:
    def test_is_made_once_in_a_process_of_its_own(self, tmp_path, monkeypatch):
        # As inside torchrun: with these variables a trainer would wait for a second process for ever.
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "29501"}.items():
            monkeypatch.setenv(name, value)
        made = warm_start("addition", cache_dir=tmp_path / "cache", **TINY)
        assert json.loads((made / "warm_start.json").read_text())["settings"]["task"] == "addition"
        assert [path.name for path in (tmp_path / "cache").iterdir()] == [made.name]

        monkeypatch.setattr(subprocess, "run", None)
        assert warm_start("addition", cache_dir=tmp_path / "cache", **TINY) == made

    @pytest.mark.parametrize(
        ("task", "given", "learning_rate", "target"),
        [
            ("addition", {}, 7e-4, 0.15),
            ("addition/tiny", {}, 2e-3, 0.15),
            ("arithmetic", {}, 7e-4, 0.2),
            ("arithmetic/tiny", {}, 2e-3, 0.2),
            ("arithmetic/tiny", {"learning_rate": 1e-3, "target_accuracy": 0.5}, 1e-3, 0.5),
        ],
    )
    def test_what_a_size_and_a_task_want_gives_way_to_what_is_asked_for(
        self, tmp_path, monkeypatch, task, given, learning_rate, target
    ):
        asked = []

        def run(command, **kwargs):
            asked.append(json.loads(command[-2]))
            Path(command[-1]).mkdir()

        monkeypatch.setattr(subprocess, "run", run)
        warm_start(task, cache_dir=tmp_path, **given)
        assert (asked[0]["learning_rate"], asked[0]["target_accuracy"]) == (learning_rate, target)

    def test_an_interrupted_run_leaves_nothing(self, tmp_path, monkeypatch):
        def interrupted(command, **kwargs):
            Path(command[-1]).mkdir()
            (Path(command[-1]) / "model.safetensors").write_bytes(b"half")
            raise subprocess.CalledProcessError(-9, command)

        monkeypatch.setattr(subprocess, "run", interrupted)
        with pytest.raises(subprocess.CalledProcessError):
            warm_start("addition", cache_dir=tmp_path)
        assert list(tmp_path.iterdir()) == []

    def test_a_kill_before_the_end_leaves_nothing_under_the_final_name(self, tmp_path, monkeypatch):
        (tmp_path / ".partial-killed" / "model").mkdir(parents=True)
        monkeypatch.setattr(subprocess, "run", lambda command, **kwargs: Path(command[-1]).mkdir())
        assert warm_start("addition", cache_dir=tmp_path).name.startswith("addition-small-0-")

    def test_two_processes_that_finish_together_agree(self, tmp_path, monkeypatch):
        winner = tmp_path / f"addition-small-0-{WarmStartSettings('addition').digest()}"

        def slower(command, **kwargs):
            for directory in (winner, Path(command[-1])):
                directory.mkdir()
                (directory / "config.json").write_text("{}")

        monkeypatch.setattr(subprocess, "run", slower)
        assert warm_start("addition", cache_dir=tmp_path) == winner
        assert [path.name for path in tmp_path.iterdir()] == [winner.name]

    def test_every_setting_and_the_code_change_the_name(self, tmp_path, monkeypatch):
        base = WarmStartSettings("addition")
        changed = [WarmStartSettings("equation"), WarmStartSettings("addition", size="base")]
        changed += [WarmStartSettings("addition", **{key: value}) for key, value in TINY.items()]
        changed += [WarmStartSettings("addition", seed=1), WarmStartSettings("addition", learning_rate=1e-3)]
        digests = {settings.digest() for settings in [base, *changed]}
        assert len(digests) == 1 + len(changed)
        assert WarmStartSettings("addition").digest() == base.digest()

        before = base.digest()
        edited = tmp_path / "tasks.py"
        edited.write_text("# edited")
        monkeypatch.setattr(module.tasks, "__file__", str(edited))
        assert base.digest() != before


def test_bad_arguments_name_the_rule(tmp_path):
    with pytest.raises(ValueError, match="unknown miniature task 'sums'; choose one of addition"):
        warm_start("sums", cache_dir=tmp_path)
    with pytest.raises(ValueError, match="unknown model size 'huge'; choose one of tiny"):
        warm_start("addition", cache_dir=tmp_path, size="huge")
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ValueError, match="is a file; name a directory"):
        warm_start("addition", cache_dir=file)
