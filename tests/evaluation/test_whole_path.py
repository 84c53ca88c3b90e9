"""Train, evaluate, report, push: the whole path of a paper's table, in the miniature world."""

import json
from importlib.util import find_spec
from pathlib import Path

import huggingface_hub.constants
import pytest
from huggingface_hub import HfApi, ModelCard
from loopback_hub import LoopbackHub
from optional_packages import matplotlib  # noqa: F401 (skips without it)

from pacs_trl import train
from pacs_trl.evaluation.arguments import EvaluationArguments
from pacs_trl.evaluation.run import evaluate
from pacs_trl.hub import push
from pacs_trl.report.report import main as report


RECIPES = Path(__file__).parents[2] / "recipes" / "miniature"


@pytest.mark.parametrize(
    "engine", [pytest.param("transformers", marks=pytest.mark.slow), pytest.param("vllm", marks=pytest.mark.vllm)]
)
def test_from_training_to_the_hub(engine, checkpoint, sums, verifier, tmp_path, monkeypatch):
    if engine == "vllm" and find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    arguments = {
        "config": RECIPES / "pacs.yaml",
        "model_name_or_path": checkpoint,
        "dataset_name": sums,
        "per_device_train_batch_size": 32,
        "max_completion_length": 8,
        "max_steps": 5,
        "learning_rate": 1e-3,
        "output_dir": tmp_path / "pacs",
    }
    train.main([part for key, value in arguments.items() for part in (f"--{key}", str(value))])
    for name, model in (("Base", checkpoint), ("PACS", tmp_path / "pacs")):
        arguments = EvaluationArguments(
            model=str(model),
            benchmarks=f"math_500={sums}",
            output_dir=str(tmp_path / name),
            method=name,
            n=16,
            k="1,4,16",
            temperature=1.0,
            top_p=1.0,
            max_new_tokens=8,
            prompt_instruction="",
            engine=engine,
            max_model_len=64,
            enforce_eager=True,
            dtype="float32",
        )
        results = evaluate(arguments, verifier, progress=False)
    entry = results["benchmarks"]["math_500"]
    assert [problem["n"] for problem in entry["problems"]] == [16] * 12
    assert results["protocol"]["verifier"]["protocol"] == "authors" and sum(entry["verification"].values()) == 192

    argv = [str(tmp_path / "Base"), str(tmp_path / "PACS"), "--output_dir", str(tmp_path / "report")]
    argv += ["--baseline", "Base", "--training", f"PACS={tmp_path / 'pacs'}"]
    assert report(argv) == 0
    text = (tmp_path / "report" / "tables.md").read_text()
    assert "| PACS | 16 | 1 |" in text and "PACS - Base" in text
    assert (tmp_path / "report" / "pass_at_k.png").is_file() and (tmp_path / "report" / "training.svg").is_file()

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    huggingface_hub.close_session()
    with LoopbackHub() as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        hub.fail_next["put"] = [500]
        api = HfApi(endpoint=hub.url, token="hf_x")
        push(tmp_path / "pacs", "user/pacs-mini", results=tmp_path / "PACS", api=api)
        files = hub.files["user/pacs-mini"]
    huggingface_hub.close_session()
    assert files["model.safetensors"] == (tmp_path / "pacs" / "model.safetensors").read_bytes()
    assert {"README.md", "results.json", "recipe.yaml", "training.png", "config.json", "tokenizer.json"} <= set(files)
    entry = json.loads(files["results.json"])["benchmarks"]["math_500"]["pass_at_k"]["1"]
    card = ModelCard(files["README.md"].decode())
    assert {result.metric_value for result in card.data.eval_results} >= {round(100 * entry["value"], 2)}
