"""Ratios to TRL of one run beside a recorded run, by hand."""

import json
import math

import pytest

from benchmarks import regression
from benchmarks.regression import BASELINE, LogRatio, change, compare, flag, log_ratios


def rows(trl: list[float], ours: list[float]) -> list[dict]:
    return [
        {"title": "One update", "variant": BASELINE, "rounds": trl},
        {"title": "One update", "variant": "GRPO", "rounds": ours},
        {"title": "group memory", "num_generations": 8},
    ]


RECORD = rows([8.0, 8.1, 7.9, 8.0], [2.0, 2.0, 2.0, 2.0])


def test_a_ratio_is_the_geometric_mean_of_the_ratios_of_the_rounds():
    """Ratios 2 and 8: geometric mean 4; their logarithms are ln 2 from its logarithm, so the mean has variance
    (ln 2)^2, and the interval is 4 times e to the power of +- 12.71 ln 2."""
    run = rows([4.0, 16.0], [2.0, 2.0])
    (ratio,) = log_ratios(run).values()
    assert ratio.mean == pytest.approx(math.log(4)) and ratio.variance == pytest.approx(math.log(2) ** 2)
    value, lower, upper = regression.interval(ratio.mean, ratio.variance, ratio.n - 1)
    assert (value, lower, upper) == pytest.approx((4, 4 / 2**12.71, 4 * 2**12.71))


def test_a_slower_machine_is_no_change():
    """All seconds are three times as many in each round, so every ratio is as before."""
    run = [{**row, "rounds": [3 * s for s in row["rounds"]]} if "rounds" in row else row for row in RECORD]
    (row,) = compare(run, RECORD)
    assert row["change since the record"].startswith("1.00 (") and row["flag"] == ""


@pytest.mark.parametrize(
    ("ours", "flagged"),
    [
        ([2.4, 2.4, 2.4, 2.4], "slower"),
        ([1.6, 1.6, 1.6, 1.6], "faster"),
        ([2.06, 2.06, 2.06, 2.06], ""),  # 3 % slower
        ([2.4, 1.7, 2.9, 2.6], ""),  # slower on average, and the interval contains no change
    ],
)
def test_a_change_is_flagged_if_its_interval_excludes_five_percent(ours, flagged):
    (row,) = compare(rows([8.0, 8.1, 7.9, 8.0], ours), RECORD)
    assert row["flag"] == flagged


def test_a_change_has_the_interval_of_welch():
    """Variances 0.01 and 0.03 of means over 5 and 3 rounds: 0.0016 / (0.0001 / 4 + 0.0009 / 2) = 3.4 degrees of
    freedom, so 3.182 standard errors of 0.2."""
    value, lower, upper = change(LogRatio(1.5, 0.01, 5), LogRatio(1.0, 0.03, 3))
    assert math.log(value) == pytest.approx(0.5)
    assert (math.log(upper) - math.log(lower)) / 2 == pytest.approx(3.182 * 0.2)
    assert flag(change(LogRatio(1.0, 0.0, 3), LogRatio(1.0, 0.0, 3))) == ""


def test_one_command_compares_records_and_fails_if_a_variant_is_slower(tmp_path, monkeypatch, capsys):
    run, record = tmp_path / "run.json", tmp_path / "records/recorded.json"
    run.write_text(json.dumps(RECORD))
    arguments = ["regression", "--run", str(run), "--record_file", str(record)]
    monkeypatch.setattr("sys.argv", [*arguments, "--record"])
    assert regression.main() == 0 and "does not exist" in capsys.readouterr().out
    assert json.loads(record.read_text()) == RECORD
    run.write_text(json.dumps(rows([8.0, 8.1, 7.9, 8.0], [3.0, 3.1, 3.0, 3.1])))
    monkeypatch.setattr("sys.argv", arguments)
    assert regression.main() == 1
    assert "| One update | GRPO | 2.62 (" in capsys.readouterr().out


def test_options_of_the_measurement_reach_it(tmp_path, monkeypatch):
    commands = []

    def measure(command, check):
        commands.append(command)
        (tmp_path / "run.json").write_text(json.dumps(RECORD))

    monkeypatch.setattr(regression.subprocess, "run", measure)
    arguments = ["regression", "--record_file", str(tmp_path / "recorded.json")]
    monkeypatch.setattr("sys.argv", [*arguments, "--parts", "aligned", "--processor_time"])
    assert regression.main() == 0
    assert " ".join(commands[0]).endswith(
        f"--repeats 6 --parts aligned --processor_time --output {tmp_path / 'run.json'}"
    )


def test_options_of_the_measurement_are_refused_for_a_measured_run(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["regression", "--run", "run.json", "--parts", "aligned"])
    with pytest.raises(SystemExit):
        regression.main()
    assert "--parts aligned would be ignored" in capsys.readouterr().err


def test_a_run_without_rounds_of_trl_is_refused():
    with pytest.raises(ValueError, match="fewer than two rounds"):
        log_ratios(rows([8.0], [2.0]))
