import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.seeds import shifted
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerControl, TrainerState

from experiments.miniature import warm_start as module
from experiments.miniature.model import build_model
from experiments.miniature.tasks import problems
from experiments.miniature.tokenizer import build_tokenizer
from experiments.miniature.warm_start import (
    AVERAGE_DECAY,
    CALIBRATION_SEED,
    Calibration,
    WarmStartSettings,
    measure,
    train_warm_start,
    warm_start,
)
from pacs_trl.evaluation.requests import Completion


TINY = {"size": "tiny", "target_accuracy": None, "max_steps": 5, "probe_steps": 2, "num_probes": 4, "batch_size": 4}


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(directory).state_dict()


def test_seed_decides_the_result(tmp_path):
    for name, seed in (("first", 3), ("second", 3), ("other", 4)):
        train_warm_start(WarmStartSettings("terms_3", seed=shifted(seed), **TINY), tmp_path / name)
    first, second, other = (weights(tmp_path / name) for name in ("first", "second", "other"))
    assert json.loads((tmp_path / "first" / "warm_start.json").read_text())["steps"] == 5
    assert AutoTokenizer.from_pretrained(tmp_path / "first").get_vocab() == build_tokenizer().get_vocab()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not torch.equal(first["model.norm.weight"], other["model.norm.weight"])


@pytest.mark.trains
def test_what_is_saved_is_where_held_out_problems_have_the_target(tmp_path, monkeypatch):
    """The accuracies are given: of two probes, then of the two averages, and of two places between them."""
    accuracies, asked, measured = [0.1, 0.9, *(0.9, 0.1, 0.7, 0.5)], [], []

    def measure(model, processing_class, rows, **kwargs):
        asked.append([row["problem"] for row in rows])
        measured.append({name: value.clone() for name, value in model.state_dict().items()})
        return accuracies[len(measured) - 1]

    monkeypatch.setattr(module, "measure", measure)
    settings = TINY | {"target_accuracy": 0.5, "probe_steps": 1}
    outcome = train_warm_start(WarmStartSettings("addition", seed=shifted(0), **settings), tmp_path)
    # the chord from (0, 0.1) to (1, 0.9) is 0.5 at 1/2, that from (0, 0.1) to (1/2, 0.7) at 1/3
    expected = [(0, 0.1), (1, 0.9), (1 / 2, 0.7), (1 / 3, 0.5), (1 / 3, 0.5)]
    assert outcome["steps"] == 2 and outcome["calibration"] == [pytest.approx(point) for point in expected]
    held_out = [row["problem"] for row in problems("addition", "test")]
    assert asked[2:] == [held_out] * 4 and not set(asked[0] + asked[1]) & set(held_out)
    saved = weights(tmp_path)
    for name, first in measured[0].items():
        assert torch.equal(saved[name], measured[-1][name]), name
        torch.testing.assert_close(saved[name], torch.lerp(first, measured[1][name], 1 / 3))


class TestCalibration:
    """With a model whose accuracy is its one weight."""

    @pytest.fixture
    def calibration(self, monkeypatch):
        asked, model = [], torch.nn.Module()
        model.weight = torch.nn.Parameter(torch.zeros(()))

        def measured(model, processing_class, rows, *, num_samples=1, seed):
            asked.append(seed)
            return model.weight.item() ** 2

        monkeypatch.setattr(module, "measure", measured)
        settings = WarmStartSettings("addition", probe_steps=1, target_accuracy=0.2)
        calibration = Calibration(settings, model, None)
        calibration.asked = asked
        return calibration

    @staticmethod
    def train_to(calibration, weight: float):
        model = calibration.average.module
        calibration.average.update_parameters = lambda _: torch.nn.init.constant_(model.weight, weight)
        control = TrainerControl()
        calibration.on_step_end(None, TrainerState(global_step=1), control, model=None)
        return control.should_training_stop

    def test_goes_further_back_where_the_last_average_is_above_the_target_too(self, calibration):
        calibration.earlier += [{"weight": torch.tensor(0.5)}]  # its probe was below
        assert self.train_to(calibration, 0.6)
        assert calibration.result[0]["weight"].item() == pytest.approx(0.2**0.5, abs=0.02)
        seeds = calibration.asked[1:]  # after the probe
        assert len(set(seeds)) == len(seeds) and min(seeds) > CALIBRATION_SEED

    def test_a_target_that_cannot_be_interpolated_is_refused(self, calibration, monkeypatch):
        """Only the probe is above the target; or the untrained model is, too."""
        monkeypatch.setattr(calibration, "_accuracy", lambda weights, num_samples: 0.1)
        assert not self.train_to(calibration, 0.6) and calibration.result is None
        monkeypatch.setattr(calibration, "_accuracy", lambda weights, num_samples: 0.3)
        with pytest.raises(ValueError, match="target_accuracy"):
            self.train_to(calibration, 0.6)


@pytest.mark.trains
def test_the_average_is_of_the_weights_and_not_of_the_prepared_model(tmp_path, monkeypatch):
    """A copy of a model that accelerate has prepared computes with the weights of the original."""
    measured = []

    def compute(model, *args, **kwargs):
        with torch.no_grad():
            measured.append(model(torch.tensor([[5, 6]])).logits)
        return 0.0

    monkeypatch.setattr(module, "measure", compute)
    changed = TINY | {"target_accuracy": 0.5, "probe_steps": 1, "max_steps": 2}
    settings = WarmStartSettings("addition", seed=shifted(0), **changed)
    seen: list[dict] = []
    update = module.AveragedModel.update_parameters

    def remember(average, model):
        seen.append({name: value.detach().clone() for name, value in model.state_dict().items()})
        update(average, model)

    monkeypatch.setattr(module.AveragedModel, "update_parameters", remember)
    with pytest.raises(RuntimeError, match="target_accuracy"):
        train_warm_start(settings, tmp_path)
    average = build_model(build_tokenizer(), "tiny", shifted(0))
    mean = {name: torch.lerp(value, seen[1][name], 1 - AVERAGE_DECAY) for name, value in seen[0].items()}
    average.load_state_dict(mean)
    with torch.no_grad():
        torch.testing.assert_close(measured[1], average(torch.tensor([[5, 6]])).logits, rtol=1e-5, atol=1e-6)


def test_accuracy_is_the_share_of_boxed_right_answers(monkeypatch):
    rows = [{"problem": f"{i}+0", "answer": str(i)} for i in range(4)]
    texts = [r"some,steps,\boxed{0}", r"\boxed{11}", "2", r"\boxed{3}"]  # the second and the third are wrong
    drawn = [Completion(text, 9, "stop") for text in texts]
    engine = SimpleNamespace(generate=lambda requests, settings: zip(requests, drawn, strict=True))
    monkeypatch.setattr(module, "TransformersEngine", lambda *args, **kwargs: engine)
    assert measure(None, None, rows, seed=0) == 0.5


class TestCache:
    @pytest.mark.slow
    def test_is_made_once_in_a_process_of_its_own(self, tmp_path, monkeypatch, capfd):
        # As inside torchrun: with these variables a trainer would wait for a second process for ever.
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "29501"}.items():
            monkeypatch.setenv(name, value)
        made = warm_start("addition", cache_dir=tmp_path / "cache", **TINY)
        assert json.loads((made / "warm_start.json").read_text())["settings"]["task"] == "addition"
        assert [path.name for path in (tmp_path / "cache").iterdir()] == [made.name]

        assert "it/s" not in (said := capfd.readouterr().err) and "examples/s" not in said  # a file, not a terminal

        monkeypatch.setattr(subprocess, "run", None)
        assert warm_start("addition", cache_dir=tmp_path / "cache", **TINY) == made

    def test_interrupted_runs_and_two_that_finish_together_leave_one_directory(self, tmp_path, monkeypatch):
        winner = tmp_path / f"addition-small-0-{WarmStartSettings('addition').digest()}"

        def interrupted(command, **kwargs):
            Path(command[-1]).mkdir()
            raise subprocess.CalledProcessError(-9, command)

        def slower(command, **kwargs):
            for directory in (winner, Path(command[-1])):
                directory.mkdir()
                (directory / "config.json").write_text("{}")

        monkeypatch.setattr(subprocess, "run", interrupted)
        with pytest.raises(subprocess.CalledProcessError):
            warm_start("addition", cache_dir=tmp_path)
        assert list(tmp_path.iterdir()) == []
        killed = tmp_path / ".partial-killed"
        (killed / "model").mkdir(parents=True)  # as a kill leaves it
        monkeypatch.setattr(subprocess, "run", slower)
        assert warm_start("addition", cache_dir=tmp_path) == winner
        assert {*tmp_path.iterdir()} == {winner, killed}

    def test_every_setting_and_the_code_change_the_name(self, tmp_path, monkeypatch):
        changes = TINY | {"num_calibration_samples": 3, "seed": 1, "learning_rate": 1e-3, "task": "terms_3"}
        changed = [{}, {}, *({key: value} for key, value in changes.items())]
        digests = [WarmStartSettings(**{"task": "addition"} | each).digest() for each in changed]
        assert len(set(digests)) == len(changes) + 1 and digests[0] == digests[1]
        (tmp_path / "tasks.py").write_text("# edited")
        monkeypatch.setattr(module.tasks, "__file__", str(tmp_path / "tasks.py"))
        assert WarmStartSettings("addition").digest() not in digests
