"""Files for the report: results of the made-up world, training logs."""

import json

import numpy as np
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
def make_history():
    """A training log like TRL's."""

    def make(seed, gain=0.3, steps=100):
        rng = np.random.default_rng(seed)
        logs = []
        for step in range(5, steps + 1, 5):
            reward, noise = 0.2 + gain * step / steps, rng.standard_normal(4)
            log = {"step": step, "loss": 0.69, "reward": reward + 0.03 * noise[0], "entropy": 0.4 + 0.01 * noise[1]}
            logs.append(log | {"completions/mean_length": 800 + 20 * noise[2], "step_time": 40 + noise[3]})
        return logs

    return make


@pytest.fixture
def training_directory(tmp_path, make_history):
    """A run directory whose last checkpoint holds the log."""

    def make(name, seed, **settings):
        checkpoint = tmp_path / name / "checkpoint-100"
        checkpoint.mkdir(parents=True)
        (checkpoint / "trainer_state.json").write_text(json.dumps({"log_history": make_history(seed, **settings)}))
        return tmp_path / name

    return make
