"""What the parts find, with the same code as on a GPU at the tiny sizes of `--device cpu`."""

import importlib
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from loopback_vllm import LoopbackVLLM, play_installed, server_settings

from pacs_trl.gpu_check import attention, learn, replay, server, steps
from pacs_trl.gpu_check.judge import against_plan, faster
from pacs_trl.gpu_check.pieces import pieces_of
from pacs_trl.gpu_check.training import save_model


PIECES = {piece.name: piece for piece in pieces_of("cpu")}


def found_by(name: str, directory: Path, **more):
    piece = PIECES[name]
    module, _, function = piece.function.partition(":")
    settings = {**piece.settings, **more}
    found = getattr(importlib.import_module(module), function)(device="cpu", directory=directory, **settings)
    assert all(found.bars.values()), found.bars
    return found


def test_attention(tmp_path):
    """float32 padded rows are the reference, half precisions are far from it, and packing is within its bars."""
    found = found_by("attention-small-sdpa", tmp_path)
    rows = {(row["precision"], row["layout"]): row for row in found.rows}
    assert len(rows) == 6 and len(found.bars) == 8
    assert rows["float32", "padded"]["gradient"] == 0.0 < rows["float32", "packed"]["gradient"] < 1e-5
    assert all(rows[name, "packed"]["gradient"] > 1e-4 for name in ("autocast", "bfloat16"))


def test_attention_notices_rows_that_see_each_other(tmp_path, monkeypatch):
    """Red if packed rows are laid out wrong: here with positions that go on from row to row."""
    packed = attention.Scorer._packed

    def shifted(self, prompts, completions):
        inputs, places = packed(self, prompts, completions)
        return {**inputs, "position_ids": inputs["position_ids"].sort().values}, places

    monkeypatch.setattr(attention.Scorer, "_packed", shifted)
    piece = PIECES["attention-small-sdpa"]
    bars = attention.compare(device="cpu", directory=tmp_path, **piece.settings).bars
    assert not bars["packed is padded in float32, gradient"]


def test_drift(tmp_path):
    rows = found_by("drift-small", tmp_path).rows
    assert len(rows) == 18 and all(math.isfinite(row["max abs proxy"]) for row in rows)
    assert max(row["max abs proxy"] for row in rows if row["precision"] == "bf16 weights") > 1e-4


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The pieces of the part `step`, as entries of the report."""
    names = [name for name in PIECES if PIECES[name].part == "step"]
    found = {name: found_by(name, tmp_path_factory.mktemp(name)) for name in names}
    return [{"part": "step", "name": name, "rows": result.rows} for name, result in found.items()]


def test_steps(measured):
    rows = [row for entry in measured for row in entry["rows"]]
    assert [(r["method"], r["checkpointing"], r["uniform"]) for r in rows] == [
        *(("pacs", "no", 0.0), ("pacs", "no", 0.5), ("grpo", "no", 0.0)),
        *(("pacs", "yes", 0.0), ("pacs", "yes", 0.5), ("grpo", "yes", 0.0)),
    ]
    for row in rows:
        assert 0 < row["fastest"] <= row["seconds"] <= row["slowest"] and row["tokens_per_second"] > 0
        assert (row["utilization"] is None) == (row["uniform"] == 0.5)
    memory = {(row["method"], row["checkpointing"]): row["measured_bytes"] for row in rows}
    assert all(memory[method, "yes"] < memory[method, "no"] / 2 for method in ("pacs", "grpo"))
    assert "tiny: " in faster(measured) and "times as fast as GRPO with 50% uniform" in faster(measured)


def test_plan_of_the_steps(measured):
    entry = against_plan(measured)
    assert entry["status"] == "passed" and len(entry["rows"]) == 4 and not entry["bars"]
    assert "training_share=" in entry["short"]


ROW = {"model": "m", "method": "pacs", "checkpointing": "no", "rows per forward": 8, "uniform": 0.0, "seconds": 2.0}
ROW |= {"measured_bytes": 30 * 2**30, "planned_state_bytes": 10 * 2**30, "planned_activation_bytes": 10 * 2**30}
ROW |= {"planned_bytes": 20 * 2**30, "planned_seconds": 1.0, "planned_share": 0.35, "utilization": 0.4}


def test_plan_against_numbers_of_paper():
    """30 GiB measured, 10 + 10 planned: a third too little, and activations would have to be twice as large to be right. Two
    seconds for one: half the time, so half the share."""
    entry = against_plan([{"rows": [ROW]}])
    (line,) = entry["rows"]
    assert line["error of memory, %"] == pytest.approx(-100 / 3) and line["error of time, %"] == pytest.approx(-50)
    assert line["factor on activations"] == 2.0 and line["training_share"] == pytest.approx(0.175)
    assert entry["status"] == "failed" and "factor of 1.5: m, pacs" in entry["reason"]
    assert against_plan([])["status"] == "not run"
    grpo, half = {**ROW, "method": "grpo", "seconds": 6.0}, {**ROW, "uniform": 0.5, "seconds": 1.0}
    assert faster([{"rows": [ROW, grpo, half]}]) == (
        "m: 3.00 times as fast as GRPO with 0% uniform, FLOP utilization 40%; m: 6.00 times as fast as GRPO with 50% uniform"
    )


def test_a_step_that_does_not_fit_is_tried_with_half_the_rows(tmp_path, monkeypatch):
    """Out of memory with 8 and 4 rows: 2 are measured, and the piece says where plan was wrong."""
    measure, tried = steps._steps, []

    def out_of_memory(size, rows, *args, **kwargs):
        tried.append(rows)
        if rows > 2:
            raise steps.torch.OutOfMemoryError("CUDA out of memory")
        return measure(size, rows, *args, **kwargs)

    monkeypatch.setattr(steps, "_steps", out_of_memory)
    monkeypatch.setattr(steps.torch.cuda, "empty_cache", lambda: None)
    piece = PIECES["step-tiny-grpo"]
    found = steps.measure_steps(device="cpu", directory=tmp_path, **piece.settings)
    assert tried == [8, 4, 2] and found.rows[0]["rows per forward"] == 2
    fits = {text: holds for text, holds in found.bars.items() if "rows per forward" in text}
    assert [*fits.values()] == [False, False, True]


def test_rows_are_as_many_as_plan_says_fit(tmp_path, monkeypatch):
    """A card with room for less than 8 rows gets fewer at once, and nothing is tried that cannot fit."""
    piece = PIECES["step-tiny-grpo"]
    shape = replay.shape_of("tiny")
    replay.config_of(shape).save_pretrained(tmp_path / "model")
    size = replay.Size(shape, 48, 8, 4, bf16=False)
    gpu = steps.card(1e9, "cpu")
    named = {"method": "grpo", "checkpointing": False, "lora": False, "directory": tmp_path, "device": "cpu"}
    two = steps.estimate_of(size, 2, gpu, **named).update
    monkeypatch.setattr(steps, "card", lambda rate, device: gpu._replace(memory_bytes=1.1 * two / 0.95))
    assert {
        row["rows per forward"] for row in steps.measure_steps(device="cpu", directory=tmp_path, **piece.settings).rows
    } == {2}


def test_lora(tmp_path):
    (first, second) = found_by("lora-tiny", tmp_path).rows
    assert first["model"] == "tiny LoRA" and second["uniform"] == 0.5


def test_model_flops_by_hand():
    """Two rows of 3 + 2 and 3 + 4 tokens behind one prompt: 9 tokens are computed once, 12 are in the rows, and a token of a row of
    length n has n of them to see: (25 + 49) / 12 on average."""
    shape = replace(replay.shape_of("tiny"), vocabulary=10)
    rollouts = [{"prompt_ids": [1, 2, 3], "completion_ids": [4] * n} for n in (2, 4)]
    flops, tokens = steps.model_flops(shape, rollouts)
    assert tokens == 12 and flops == pytest.approx(3 * shape.forward_flops(9, 74 / 12))


def test_the_miniature_learns(tmp_path):
    """Two steps from a warm start of two: the path from recipe to pass@k, without bars on the result."""
    found = found_by("learns-without-vllm", tmp_path)
    assert [row["pass@k"] for row in found.rows] == ["1 before", "1 after"]


def test_the_quickstart_is_that_of_the_recipes():
    recipe = Path(__file__).parents[2] / "recipes" / "miniature" / "quickstart_pacs.yaml"
    assert learn.QUICKSTART == yaml.safe_load(recipe.read_text())


def test_soak_goes_on(tmp_path):
    """Two pieces: the second begins where the first has stopped."""
    first, second = (found_by("soak-1", tmp_path, seconds=0.5) for _ in range(2))
    end, begin = (int(word) for word in (first.rows[0]["steps"].split()[-1], second.rows[0]["steps"].split()[0]))
    assert begin == end + 1


@pytest.mark.distributed
def test_several_processes(tmp_path):
    found = found_by("gpus-fsdp2", tmp_path)
    assert len(found.rows) == 4 and 0 < max(row["weights"] for row in found.rows)


@pytest.mark.distributed
def test_a_process_that_fails_ends_the_others(tmp_path):
    from pacs_trl.gpu_check.ranks import start

    with pytest.raises(
        RuntimeError, match=r"(?s)process [01] of 2 ended with 1: .*FileNotFoundError|OSError|ValueError"
    ):
        start(
            "pacs_trl.gpu_check.ranks:learn",
            2,
            tmp_path,
            "cpu",
            {"ACCELERATE_USE_CPU": "true"},
            checkpoint="/nowhere",
            kind="ddp",
            output="",
        )


def test_a_run_outlives_its_server(tmp_path, monkeypatch):
    """With a server that plays one: it dies in the fifth generation, and the run goes on with another."""
    play_installed(monkeypatch.setattr)
    checkpoint, rows = save_model(tmp_path / "model", replay.shape_of("tiny"), "cpu"), []
    for name, failing in (("killed", 4), ("resumed", None)):
        with LoopbackVLLM(checkpoint) as serving:
            serving.fail_generation = failing
            where = {"checkpoint": checkpoint, "run": str(tmp_path / "run"), "output": str(tmp_path / name)}
            settings = {key: value for key, value in server_settings(serving.url).items() if "url" not in key}
            server.train(device="cpu", directory=tmp_path, server=None, url=serving.url, **where, **settings)
        rows.append({"run": name, **json.loads((tmp_path / name).read_text())})
    bars = server.judged(rows, tmp_path / "run").bars
    assert [*bars.values()][1:] == [True] * 3, (bars, rows)
    assert "stopped answering after optimizer step 4" in rows[0]["said"] and rows[1]["steps"] == 6
    never = [{**rows[0], "said": ""}, {**rows[1], "steps": 4}]
    assert not any([*server.judged(never, tmp_path / "nowhere").bars.values()][1:])
