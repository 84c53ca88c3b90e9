"""Checkpoints in shards, as FSDP2 writes them, go into an evaluation. What a trainer writes: tests/distributed."""

import os
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dist_cp
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from seeds import shifted
from transformers import AutoModelForCausalLM

from pacs_trl.cli import run
from pacs_trl.evaluation.arguments import EvaluationArguments
from pacs_trl.evaluation.evaluate import evaluate
from pacs_trl.evaluation.shards import merge_shards


@pytest.fixture
def sharded(checkpoint, tmp_path):
    """The digit guesser as a directory of shards, with configuration and tokenizer."""
    directory = tmp_path / "checkpoint-7"
    shutil.copytree(checkpoint, directory, ignore=shutil.ignore_patterns("model.safetensors"))
    write_shards(directory, AutoModelForCausalLM.from_pretrained(checkpoint).state_dict())
    return directory


def write_shards(directory, state_dict):
    writer = dist_cp.FileSystemWriter(directory / "pytorch_model_fsdp_0")
    dist_cp.save({"model": state_dict}, storage_writer=writer, no_dist=True)


pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:Detected an existing checkpoint"
)


def grades(results):
    return [problem["c"] for problem in results["benchmarks"]["math_500"]["problems"]]


def test_shards_are_evaluated_like_the_whole(arguments, sharded, verifier, tmp_path):
    whole = evaluate(EvaluationArguments(**arguments), verifier, progress=False)
    given = EvaluationArguments(**(arguments | {"model": str(sharded), "output_dir": str(tmp_path / "shards")}))
    results = evaluate(given, verifier, progress=False)
    assert grades(results) == grades(whole) and results["model"]["name"] == "checkpoint-7"
    assert sorted(p.name for p in sharded.iterdir() if "model" in p.name) == [
        "model.safetensors",
        "pytorch_model_fsdp_0",
    ]
    assert evaluate(given, verifier, progress=False)["model"] == results["model"]


def test_merged_once_and_again_when_the_shards_are_newer(sharded):
    merge_shards(str(sharded))
    merged = sharded / "model.safetensors"
    first = merged.stat().st_mtime_ns
    merge_shards(str(sharded))
    assert merged.stat().st_mtime_ns == first
    model = AutoModelForCausalLM.from_pretrained(sharded)
    with torch.no_grad():
        model.model.norm.weight.fill_(3.0)
    write_shards(sharded, model.state_dict())  # another run has come to its seventh step
    os.utime(sharded / "pytorch_model_fsdp_0" / ".metadata", ns=(first + 1, first + 1))
    merge_shards(str(sharded))
    assert AutoModelForCausalLM.from_pretrained(sharded).model.norm.weight.unique().item() == 3.0


def test_shards_of_an_adapter(checkpoint, tmp_path):
    torch.manual_seed(shifted(0))
    base = AutoModelForCausalLM.from_pretrained(checkpoint)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.peft_config["default"].save_pretrained(tmp_path)
    write_shards(tmp_path, get_peft_model_state_dict(model))
    merge_shards(str(tmp_path))
    input_ids = torch.tensor([[5, 6, 7]])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(input_ids).logits, model(input_ids).logits)


def test_what_has_no_shards_is_left_alone(checkpoint):
    before = sorted(checkpoint.iterdir())
    for model in (str(checkpoint), "Qwen/Qwen3-4B", "/nowhere"):
        merge_shards(model)
    assert sorted(checkpoint.iterdir()) == before


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (
            "config.json",
            "shards of weights (pytorch_model_fsdp_0) but no config.json. Copy configuration and tokenizer",
        ),
        ("pytorch_model_fsdp_0/.metadata", "has no .metadata: writing these shards of the weights was interrupted"),
        ("pytorch_model_fsdp_0/__0_0.distcp", "could not be merged into"),
    ],
)
def test_refusals(arguments, sharded, capsys, missing, message):
    (sharded / missing).unlink()
    arguments |= {"model": str(sharded)}
    assert run("evaluate", [part for key, value in arguments.items() for part in (f"--{key}", str(value))]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (sharded / "model.safetensors").exists() and not list(sharded.glob("tmp*"))
