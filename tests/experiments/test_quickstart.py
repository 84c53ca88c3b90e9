import json

import pytest

from experiments import quickstart
from experiments.quickstart import doubled_and_apart, draw, summary
from pacs_trl.miniature.warm_start import warm_start


def run_of(before: tuple[float, float, float], after: tuple[float, float, float]) -> dict:
    """A run whose pass@k is the same for every k, given as value, lower, upper."""
    cells = {
        when: {str(k): dict(zip(("value", "lower", "upper"), values, strict=True)) for k in quickstart.KS}
        for when, values in (("before", before), ("after", after))
    }
    example = {"problem": "1+2", "answer": "3"}
    example |= {"before": {"completion": "x", "right": False}, "after": {"completion": "y", "right": True}}
    log = [{"step": 1, "reward": 0.2, "entropy": 0.3}, {"step": 2, "reward": 0.4, "entropy": 0.2}, {"train_loss": 0.7}]
    return {"seed": 7, "seconds": 61.4, **cells, "examples": [example], "log_history": log}


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((0.2, 0.15, 0.25), (0.5, 0.45, 0.55), True),
        ((0.2, 0.15, 0.25), (0.4, 0.3, 0.5), True),  # exactly doubled
        ((0.2, 0.15, 0.25), (0.39, 0.3, 0.5), False),  # intervals apart, not doubled
        ((0.1, 0.0, 0.3), (0.5, 0.3, 0.7), False),  # doubled, intervals touch
        ((0.5, 0.45, 0.55), (0.2, 0.15, 0.25), False),
    ],
)
def test_doubled_and_apart(before, after, expected):
    assert doubled_and_apart(run_of(before, after)) is expected


def test_summary_has_a_row_per_seed_and_shows_completions():
    lines = summary([run_of((0.123, 0.1, 0.15), (0.5, 0.45, 0.55))]).splitlines()
    cells = "| 12.3 [10.0, 15.0] | 50.0 [45.0, 55.0]"
    assert lines[2] == f"| 7 {cells} {cells} | yes | 61 |"
    assert lines[-1] == "| 7 | `1+2` | `x` wrong | `y` right |"


def test_figure_is_written_for_several_seeds(tmp_path):
    draw([run_of((0.1, 0.0, 0.2), (0.5, 0.4, 0.6))] * 2, tmp_path / "new" / "figure.png")
    assert (tmp_path / "new" / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_whole_run_in_miniature_of_the_miniature(tmp_path, monkeypatch, capsys):
    tiny = {"size": "tiny", "target_accuracy": None, "max_steps": 2, "batch_size": 2}
    monkeypatch.setattr(
        "pacs_trl.miniature.warm_start.warm_start",
        lambda task, seed: warm_start(task, cache_dir=tmp_path / "cache", seed=seed, **tiny),
    )
    monkeypatch.setattr(quickstart, "NUM_PROBLEMS", 6)
    monkeypatch.setattr(quickstart, "NUM_SAMPLES", 8)
    # What an earlier run left in the directory of the seed is removed.
    stale = tmp_path / "out" / "seed-5" / "after" / "results.json"
    stale.parent.mkdir(parents=True)
    stale.write_text("stale")

    quickstart.main(["--seeds", "5", "--max_steps", "2", "--output_dir", str(tmp_path / "out")])

    out = tmp_path / "out"
    run = json.loads((out / "summary.json").read_text())[0]
    assert [log["step"] for log in run["log_history"] if "reward" in log] == [1, 2]
    assert set(run["before"]) == set(run["after"]) == {"1", "2", "4", "8"}
    assert len(run["examples"]) == 5
    assert (out / "quickstart.png").is_file()
    files = {path.name for path in (out / "seed-5" / "pacs").iterdir()}
    assert {"model.safetensors", "tokenizer.json", "README.md", "recipe.yaml"} <= files
    results = json.loads((out / "seed-5" / "after" / "results.json").read_text())
    assert results["benchmarks"]["miniature/addition"]["pass_at_k"] == run["after"]
    assert (out / "summary.md").read_text().strip() in capsys.readouterr().out
