"""`pacs-trl gpu-check` itself: slices, resuming, what ends a piece, two at once. The pieces are stand-ins, which need no torch."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import stand_ins
from seeds import shifted
from stand_ins import piece

from pacs_trl.cli import run
from pacs_trl.gpu_check import command, machine, results
from pacs_trl.gpu_check.arguments import PARTS, read_gpu_check_arguments
from pacs_trl.gpu_check.pieces import FIRST, pieces_of


HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def of_stand_ins(tmp_path, monkeypatch):
    """Processes find them, and say where they have been."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(HERE.parents[1])]))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    (tmp_path / "calls").touch()


def check(monkeypatch, output, *pieces, options=()):
    monkeypatch.setattr(command, "pieces_of", lambda device: list(pieces))
    return command.main(["--device", "cpu", "--output", str(output), *options])


def called(tmp_path) -> list[str]:
    return [line.split()[0] for line in (tmp_path / "calls").read_text().splitlines()]


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_every_kind_of_end(tmp_path, monkeypatch, capsys):
    """Each piece ends alone; the report says how, and the second call has nothing to do but what was not possible."""
    pieces = [
        piece("found-1", number=1),
        piece("missed"),
        piece("raised"),
        piece("crashed"),
        piece("impossible", "step"),
    ]
    pieces += [piece("found-2", "vllm", needs=("cuda",)), piece("found-soak", "soak")]
    output = tmp_path / "out"
    assert check(monkeypatch, output, *pieces) == 1
    found = {name: (entry["status"], entry["reason"]) for name, entry in results.read(output).items()}
    assert found.pop("crashed")[1].endswith(
        "signal 11 (SIGSEGV) and without a result; its log ends with: the last words"
    )
    assert found == {
        "found-1": ("passed", ""),
        "missed": ("failed", "not so: that does not"),
        "raised": ("failed", "RuntimeError: a library says so"),
        "impossible": ("not possible", "no such card"),
        "found-2": ("not possible", "needs a GPU"),
    }
    report = (output / "report.md").read_text()
    assert "| attention | failed | 1 passed, 3 failed | not so: that does not |" in report
    assert "| vllm | not possible | 1 not possible | needs a GPU |" in report
    assert (
        "| soak | not run | 1 not run |  |" in report and "| number | half |" in report and "| 1 | 0.3333 |" in report
    )
    assert "- holds: that holds\n- DOES NOT HOLD: that does not" in report
    assert json.loads((output / "report.json").read_text())["parts"]["step"]["status"] == "not possible"
    assert called(tmp_path) == ["found-1", "missed", "raised", "crashed", "impossible"]
    assert check(monkeypatch, output, *pieces, options=["--parts", "step", "plan"]) == 0
    assert check(monkeypatch, output, *pieces) == 1
    assert called(tmp_path)[5:] == ["impossible"] * 2
    assert not list((output / "work").iterdir())
    assert "report.md" in capsys.readouterr().out


@pytest.mark.parametrize("first", [True, False], ids=["had all the time", "came later"])
def test_a_piece_that_hangs_is_ended_with_what_it_started(tmp_path, monkeypatch, first, capsys):
    pieces = [piece("found-1")] * (not first) + [piece("hung"), piece("found-2")]
    check(monkeypatch, tmp_path / "out", *pieces, options=["--minutes", "0.12"])
    (pid,) = [
        int(line.split()[1]) for line in (tmp_path / "calls").read_text().splitlines() if line.startswith("child")
    ]
    until = time.monotonic() + 30
    while is_alive(pid) and time.monotonic() < until:  # it was told to end, and is nobody's to wait for
        time.sleep(0.05)
    assert not is_alive(pid)
    found = results.read(tmp_path / "out")
    assert ("hung" in found) == first and "found-2" not in found
    if first:
        assert found["hung"]["reason"].startswith("it did not end in a call that it had to itself")
    else:
        assert "Left: 2 pieces, hung first" in capsys.readouterr().out


ENTRY = '{"part": "attention", "name": "found-1", "status": "passed", "reason": "", "environment": '


@pytest.mark.parametrize(
    "text",
    ["", '{"part": "attention", "na', "[]", '{"name": "found-1"}', "\xff", ENTRY + "null}", ENTRY + '{"card": 1}}'],
)
def test_a_torn_result_is_none(tmp_path, monkeypatch, text):
    (tmp_path / "out" / "results").mkdir(parents=True)
    (tmp_path / "out" / "results" / "found-1.json").write_text(text, encoding="latin-1")
    assert check(monkeypatch, tmp_path / "out", piece("found-1")) == 0
    assert results.read(tmp_path / "out")["found-1"]["status"] == "passed"


def test_ten_kills_at_random_moments(tmp_path):
    """SIGKILL to the command: the piece goes with it, and the results are in the end those of a run without it."""
    arguments, seconds = [sys.executable, str(HERE / "stand_ins.py")], random.Random(shifted(0))
    straight = [tmp_path / "straight", "3", "0"]
    assert subprocess.run([*arguments, *map(str, straight)], stdout=subprocess.DEVNULL).returncode == 1
    output = tmp_path / "out"
    for _ in range(10):
        process = subprocess.Popen([*arguments, str(output), "3", "0.4"], stdout=subprocess.DEVNULL)
        time.sleep(seconds.uniform(0.1, 1.2))
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert subprocess.run([*arguments, str(output), "3", "0.1"], stdout=subprocess.DEVNULL).returncode == 1

    def of(directory):
        found = results.read(directory)
        return {
            name: [entry.get(key) for key in ("status", "reason", "rows", "bars")] for name, entry in found.items()
        }

    assert of(output) == of(tmp_path / "straight") and len(of(output)) == 5
    pids = {int(line.split()[1]) for line in (tmp_path / "calls").read_text().splitlines()}
    assert not any(map(is_alive, pids))


def test_two_at_once(tmp_path, monkeypatch):
    """The second one is refused in words; the first one loses nothing."""
    (tmp_path / "out").mkdir()
    with command._alone(tmp_path / "out"), pytest.raises(ValueError, match="Another gpu-check is writing to .*out"):
        check(monkeypatch, tmp_path / "out", piece("found-1"))
    assert check(monkeypatch, tmp_path / "out", piece("found-1")) == 0


def test_another_card(tmp_path, monkeypatch):
    check(monkeypatch, tmp_path / "out", piece("found-1"))
    monkeypatch.setattr(command, "machine", lambda device: {"card": "NVIDIA H200", "device": "cpu"})
    with pytest.raises(ValueError, match=r"holds results of no GPU .* and this is NVIDIA H200: .* another directory"):
        check(monkeypatch, tmp_path / "out", piece("found-2"))


def test_reports_are_sent_to_others(tmp_path, monkeypatch):
    """What an error says of tokens and homes stays in the log."""
    check(monkeypatch, tmp_path / "out", piece("secretive"))
    text = (tmp_path / "out" / "report.md").read_text() + (tmp_path / "out" / "report.json").read_text()
    assert "no weights in model.bin" in text and "hf_" not in text and "alice" not in text
    assert "hf_" in (tmp_path / "out" / "logs" / "secretive.log").read_text()


def entry_of_now(output, name):
    return json.loads((output / "results" / f"{name}.json").read_text())


def test_results_of_other_versions_are_kept_and_marked(tmp_path, monkeypatch):
    check(monkeypatch, tmp_path / "out", piece("found-1"))
    file = tmp_path / "out" / "results" / "found-1.json"
    entry = json.loads(file.read_text())
    entry["environment"]["versions"]["torch"] = "2.11.0"
    file.write_text(json.dumps(entry))
    check(monkeypatch, tmp_path / "out", piece("found-1"), piece("found-2"))
    report = (tmp_path / "out" / "report.md").read_text()
    assert report.count("Made with other versions than those above: torch 2.11.0.") == 1
    torch = entry_of_now(tmp_path / "out", "found-2")["environment"]["versions"]["torch"]
    assert f"| 2.11.0, {torch} |" in report.rpartition("## For the table")[2]
    assert called(tmp_path) == ["found-1", "found-2"]


FACTS = {"device": "cuda", "gpus": [{"name": "NVIDIA H200", "memory": 141 * 10**9, "capability": "9.0"}]}


@pytest.mark.parametrize(
    ("needs", "why"),
    [
        ((), None),
        (("cuda",), None),
        (("2 GPUs",), "needs 2 GPUs, and torch sees 1"),
        (("200 GiB",), "needs a card of 200 GiB, and this one has 131"),
        (("100 GiB", "no_such_package"), None),
        (("flash_attn",), "flash-attn, the package of FlashAttention 2, is not installed"),
    ],
)
def test_what_is_lacking(monkeypatch, needs, why):
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    assert machine.lacking(needs, FACTS) == why


def test_without_a_gpu_the_remedy_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(machine, "_ASK_TORCH", 'print(\'{"gpus": [], "cuda": null}\')')
    assert run("gpu-check", ["--output", str(tmp_path)]) == 2
    assert (
        "finds no GPU (CUDA None, CUDA_VISIBLE_DEVICES=" in (said := capsys.readouterr().err)
        and "--device cpu" in said
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--parts", "atention"], "no part 'atention'. Did you mean `attention`?"),
        (["--minutes", "0"], "must be a number above 0, got 0"),
        (["--minutes", "nan"], "must be a number above 0, got nan"),
        (["--parts", "soak", "--minutes", "5"], "--minutes=5 is too short for the part soak"),
    ],
)
def test_options_that_are_wrong(words, message):
    with pytest.raises(ValueError, match=message):
        read_gpu_check_arguments(words)


def test_parts_and_pieces():
    """Names are file names and stand once; every part has pieces, the first five are the most telling, soak is asked for."""
    assert read_gpu_check_arguments([]).parts == [part for part in PARTS if part != "soak"]
    assert read_gpu_check_arguments(["--parts", "vllm", "attention", "vllm"]).parts == ["attention", "vllm"]
    for device in ("cuda", "cpu"):
        pieces = pieces_of(device)
        names = [piece.name for piece in pieces]
        assert len(set(names)) == len(names) and {piece.part for piece in pieces} == PARTS.keys() - {"plan"}
        assert json.loads(json.dumps([piece._asdict() for piece in pieces]))
    assert tuple(piece.name for piece in pieces_of("cuda"))[:5] == FIRST


def test_only_what_wants_several_gpus_sees_them(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    one = command._environment_of(stand_ins.piece("found"), FACTS)
    assert one["CUDA_VISIBLE_DEVICES"] == "4" and "WORLD_SIZE" not in one and one["HF_HUB_OFFLINE"] == "1"
    assert command._environment_of(stand_ins.piece("found", needs=("2 GPUs",)), FACTS)["CUDA_VISIBLE_DEVICES"] == "4,5"
