"""Files for the report: results of the made-up world, training logs."""

import json

import pytest
from results_world import make_results

from pacs_trl.evaluation.results import write_results


@pytest.fixture
def results_factory(tmp_path):
    """Writes a document of `make_results` and returns its directory."""

    def write(method, skill, **changes):
        directory = tmp_path / f"{method}-{changes.get('seed', 0)}"
        directory.mkdir(parents=True, exist_ok=True)
        write_results(directory / "results.json", make_results(method, skill, **changes))
        return directory

    return write


@pytest.fixture
def training_directory(tmp_path):
    """A run directory whose last checkpoint holds a training log like TRL's."""

    def make(name, seed):
        constant = {"loss": 0.69, "entropy": 0.4, "completions/mean_length": 800.0, "step_time": 40.0}
        logs = [constant | {"step": step, "reward": 0.003 * step + 0.1 * seed} for step in range(5, 101, 5)]
        checkpoint = tmp_path / name / "checkpoint-100"
        checkpoint.mkdir(parents=True)
        (checkpoint / "trainer_state.json").write_text(json.dumps({"log_history": logs}))
        return tmp_path / name

    return make
