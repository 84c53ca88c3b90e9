"""Train two methods, evaluate, report, push: the whole path of a paper's table, in the miniature world."""

import json
from importlib.util import find_spec
from pathlib import Path

import huggingface_hub.constants
import pytest
from huggingface_hub import HfApi, ModelCard
from loopback_hub import LoopbackHub
from optional_packages import needs

from pacs_trl import train
from pacs_trl.evaluation.arguments import EvaluationArguments
from pacs_trl.evaluation.results import read_results
from pacs_trl.evaluation.run import evaluate
from pacs_trl.hub import push
from pacs_trl.report.report import main as report


RECIPES = Path(__file__).parents[2] / "recipes" / "miniature"
METHODS = ("pacs", "grpo")


@pytest.fixture(scope="module")
def trained(checkpoint, sums, tmp_path_factory):
    """Two short runs from one start, from the shipped recipes with smaller numbers."""
    directory = tmp_path_factory.mktemp("trained")
    for method in METHODS:
        arguments = {
            "config": RECIPES / f"{method}.yaml",
            "model_name_or_path": checkpoint,
            "dataset_name": sums,
            "per_device_train_batch_size": 32,
            "max_completion_length": 8,
            "max_steps": 5,
            "learning_rate": 1e-3,
            "output_dir": directory / method,
        }
        train.main([part for key, value in arguments.items() for part in (f"--{key}", str(value))])
    return directory


@pytest.fixture(scope="module", params=["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def evaluated(request, trained, sums, verifier, tmp_path_factory):
    """Results of the start and of both methods, n = 16."""
    if request.param == "vllm" and find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    directory = tmp_path_factory.mktemp(request.param)
    for method in METHODS:
        arguments = EvaluationArguments(
            model=str(trained / method),
            benchmarks=f"math_500={sums}",
            output_dir=str(directory / method),
            method=method.upper(),
            n=16,
            k="1,4,16",
            temperature=1.0,
            top_p=1.0,
            max_new_tokens=8,
            prompt_instruction="",
            engine=request.param,
            max_model_len=64,
            enforce_eager=True,
            dtype="float32",
        )
        evaluate(arguments, verifier, progress=False)
    return directory


def test_evaluated_with_the_grader_of_training(evaluated):
    for method in METHODS:
        results = read_results(evaluated / method)
        (entry,) = results["benchmarks"].values()
        assert [problem["n"] for problem in entry["problems"]] == [16] * 12
        assert results["protocol"]["verifier"]["protocol"] == "authors" and sum(entry["verification"].values()) == 192


@needs("matplotlib")
def test_reported(trained, evaluated, tmp_path):
    runs = [f"{method.upper()}={trained / method}" for method in METHODS]
    argv = [str(evaluated / method) for method in METHODS]
    argv += ["--output_dir", str(tmp_path), "--published", "Qwen3-8B", "--baseline", "GRPO", "--training", *runs]
    assert report(argv) == 0
    text = (tmp_path / "tables.md").read_text()
    assert "| PACS | 16 | 1 |" in text and "PACS - GRPO" in text and "PACS (published)" in text
    assert (tmp_path / "pass_at_k.png").is_file() and (tmp_path / "training.svg").is_file()


@needs("matplotlib")
def test_pushed(trained, evaluated, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    huggingface_hub.close_session()
    with LoopbackHub() as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        hub.fail_next["put"] = [500]
        api = HfApi(endpoint=hub.url, token="hf_x")
        push(trained / "pacs", "user/pacs-mini", results=evaluated / "pacs", api=api)
        files = hub.files["user/pacs-mini"]
    huggingface_hub.close_session()
    assert files["model.safetensors"] == (trained / "pacs" / "model.safetensors").read_bytes()
    assert {"README.md", "results.json", "recipe.yaml", "training.png", "config.json", "tokenizer.json"} <= set(files)
    entry = json.loads(files["results.json"])["benchmarks"]["math_500"]["pass_at_k"]["1"]
    card = ModelCard(files["README.md"].decode())
    assert {result.metric_value for result in card.data.eval_results} >= {round(100 * entry["value"], 2)}
